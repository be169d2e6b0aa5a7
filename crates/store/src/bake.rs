//! Bakes: machines booted once and saved, from which sandboxes start. Addressed by everything that went into them.

use std::{
    fs,
    io::ErrorKind,
    path::Path,
    time::{Duration, SystemTime},
};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};
use serde::{Deserialize, Serialize};

use crate::{
    Digest, Error, Layout, Result,
    draft::{self, Draft},
    lock::Lock,
    pool,
    saved_machine::Files,
};

/// What a bake says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// All that the key was computed from, for people and to compare before a load.
    pub description: String,
    pub template: Digest,
    /// Size of the root disk that the machine was saved with.
    pub disk_bytes: u64,
}

/// Published and immutable.
#[derive(Debug, Clone)]
pub struct Bake {
    pub key: Digest,
    pub manifest: Manifest,
    pub files: Files,
}

/// Being made; gone when dropped.
#[derive(Debug)]
pub struct BakeDraft {
    key: Digest,
    draft: Draft,
}

impl BakeDraft {
    pub fn create(layout: &Layout, key: &Digest) -> Result<Self> {
        Ok(Self { key: key.clone(), draft: Draft::create(&layout.cache_temporary(), "bake")? })
    }

    pub fn files(&self) -> Files {
        Files::of(self.draft.path())
    }

    /// Memory, state and rootfs must be complete.
    pub fn publish(self, layout: &Layout, manifest: Manifest) -> Result<Bake> {
        self.files().lengths()?;
        write_manifest(self.draft.path(), &manifest)?;
        let directory = layout.bake(&self.key);
        self.draft.publish(&directory)?;
        Ok(Bake { key: self.key, manifest, files: Files::of(&directory) })
    }
}

pub(crate) const MANIFEST: &str = "manifest.json";

pub(crate) fn write_manifest(directory: &Path, manifest: &impl Serialize) -> Result<()> {
    let path = directory.join(MANIFEST);
    let text = serde_json::to_vec_pretty(manifest).expect("a manifest is plain data");
    fs::write(&path, text).map_err(Error::io("write", path))
}

/// `None` when there is nothing under that name.
pub(crate) fn read_manifest<T: for<'de> Deserialize<'de>>(directory: &Path) -> Result<Option<T>> {
    let path = directory.join(MANIFEST);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read", path)(error)),
    };
    match serde_json::from_slice(&bytes) {
        Ok(manifest) => Ok(Some(manifest)),
        Err(error) => Err(Error::Damaged { path: directory.to_owned(), reason: error.to_string() }),
    }
}

/// Held while a bake is looked for, made and published, so that no two servers make the same one.
pub fn lock(
    layout: &Layout,
    key: &Digest,
    deadline: Duration,
    waiting: &mut dyn FnMut(),
) -> Result<Lock> {
    Lock::acquire(&layout.lock("bake", Some(key)), deadline, waiting)
}

/// Counts as a use.
pub fn get(layout: &Layout, key: &Digest) -> Result<Option<Bake>> {
    let directory = layout.bake(key);
    let Some(manifest) = read_manifest(&directory)? else { return Ok(None) };
    touch(&directory);
    Ok(Some(Bake { key: key.clone(), manifest, files: Files::of(&directory) }))
}

/// A missed mark only makes the bake look older than it is.
fn touch(directory: &Path) {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let _ = utimensat(
        CWD,
        directory,
        &Timestamps { last_access: now, last_modification: now },
        AtFlags::empty(),
    );
}

/// Machines that run from it go on: they hold its files open.
pub fn remove(layout: &Layout, key: &Digest) -> Result<()> {
    draft::discard(&layout.bake(key), &layout.cache_temporary())
}

/// Those made from `template`, after it was deleted.
pub fn remove_of_template(layout: &Layout, template: &Digest) -> Result<usize> {
    let mut removed = 0;
    for (key, _) in by_last_use(layout)? {
        let manifest: Option<Manifest> = read_manifest(&layout.bake(&key))?;
        if manifest.is_some_and(|manifest| manifest.template == *template) {
            remove(layout, &key)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Removes the bakes used longest ago until those left take at most `keep_bytes`; never one of `in_use`.
pub fn remove_least_recently_used(
    layout: &Layout,
    keep_bytes: u64,
    in_use: &[Digest],
) -> Result<Vec<Digest>> {
    let bakes = by_last_use(layout)?;
    let sizes: Vec<u64> = bakes
        .iter()
        .map(|(key, _)| pool::allocated_bytes(&layout.bake(key)).unwrap_or(0))
        .collect();
    let mut total: u64 = sizes.iter().sum();
    let mut removed = Vec::new();
    for ((key, _), size) in bakes.into_iter().zip(sizes) {
        if total <= keep_bytes {
            break;
        }
        if !in_use.contains(&key) {
            remove(layout, &key)?;
            total -= size;
            removed.push(key);
        }
    }
    Ok(removed)
}

/// Oldest first.
fn by_last_use(layout: &Layout) -> Result<Vec<(Digest, SystemTime)>> {
    let directory = layout.bakes();
    let mut bakes = Vec::new();
    for entry in directory.read_dir().map_err(Error::io("list", &directory))? {
        let entry = entry.map_err(Error::io("list", &directory))?;
        let Some(key) = entry.file_name().to_str().and_then(|name| name.parse::<Digest>().ok())
        else {
            continue;
        };
        // It may have gone since.
        if let Ok(used) = entry.metadata().and_then(|metadata| metadata.modified()) {
            bakes.push((key, used));
        }
    }
    bakes.sort_by_key(|(_, used)| *used);
    Ok(bakes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> (tempfile::TempDir, Layout) {
        let directory = tempfile::tempdir().unwrap();
        let layout =
            Layout::create(directory.path().join("data"), directory.path().join("cache")).unwrap();
        (directory, layout)
    }

    fn manifest(description: &str) -> Manifest {
        Manifest {
            description: description.to_owned(),
            template: Digest::of(b"template"),
            disk_bytes: 1,
        }
    }

    fn filled(layout: &Layout, key: &Digest, content: &[u8]) -> BakeDraft {
        let draft = BakeDraft::create(layout, key).unwrap();
        let files = draft.files();
        for path in [files.memory(), files.state(), files.rootfs()] {
            fs::write(path, content).unwrap();
        }
        draft
    }

    #[test]
    fn a_bake_is_invisible_until_published_and_whole_then() {
        let (_directory, layout) = layout();
        let key = Digest::of(b"key");
        let draft = filled(&layout, &key, b"old");
        assert!(get(&layout, &key).unwrap().is_none());
        draft.publish(&layout, manifest("old")).unwrap();
        let bake = get(&layout, &key).unwrap().unwrap();
        assert_eq!(bake.manifest, manifest("old"));
        assert!(!bake.files.memory().with_file_name("machine").exists());

        filled(&layout, &key, b"new").publish(&layout, manifest("new")).unwrap();
        let bake = get(&layout, &key).unwrap().unwrap();
        assert_eq!(
            (bake.manifest.description.as_str(), fs::read(bake.files.state()).unwrap()),
            ("new", b"new".to_vec())
        );
        assert_eq!(fs::read_dir(layout.cache_temporary()).unwrap().count(), 0);
    }

    #[test]
    fn an_incomplete_bake_is_not_published() {
        let (_directory, layout) = layout();
        let key = Digest::of(b"key");
        let draft = filled(&layout, &key, b"x");
        fs::write(draft.files().state(), b"").unwrap();
        assert!(draft.publish(&layout, manifest("x")).is_err());
        assert!(get(&layout, &key).unwrap().is_none());
        assert_eq!(fs::read_dir(layout.cache_temporary()).unwrap().count(), 0);
    }

    #[test]
    fn the_bake_used_longest_ago_goes_first_and_one_in_use_stays() {
        let (_directory, layout) = layout();
        let keys = [b"a", b"b", b"c"].map(|name| Digest::of(name));
        for (age, key) in (1..).zip(&keys) {
            filled(&layout, key, &[1; 4096]).publish(&layout, manifest("x")).unwrap();
            let time = Timespec { tv_sec: age * 1000, tv_nsec: 0 };
            let times = Timestamps { last_access: time, last_modification: time };
            utimensat(CWD, layout.bake(key), &times, AtFlags::empty()).unwrap();
        }
        get(&layout, &keys[1]).unwrap();
        let removed = remove_least_recently_used(&layout, 0, &keys[..1]).unwrap();
        assert_eq!(removed, [keys[2].clone(), keys[1].clone()]);
        assert!(get(&layout, &keys[0]).unwrap().is_some());
    }
}
