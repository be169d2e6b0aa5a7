//! A directory in which something is made that nobody may see yet. It appears under its final name by a rename after
//! everything in it is on disk, or goes away with its owner.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::{Error, Result, lock::Lock};

const LOCK_DEADLINE: Duration = Duration::from_secs(30);

/// Locked as long as its owner lives, so that a sweep leaves it alone.
#[derive(Debug)]
pub(crate) struct Draft {
    path: PathBuf,
    temporary: PathBuf,
    _lock: Lock,
}

impl Draft {
    /// In `temporary`, which must be on the file system of the final name.
    pub(crate) fn create(temporary: &Path, kind: &'static str) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        // A sweep that met the directory between its making and its locking would take it for a leftover.
        let _no_sweep = Lock::acquire_shared(temporary, LOCK_DEADLINE)?;
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = temporary.join(format!("{kind}-{}-{count}", std::process::id()));
            // Others, such as a machine's process, may enter but not list.
            match fs::DirBuilder::new().mode(0o711).create(&path) {
                Ok(()) => {
                    let lock = Lock::acquire_existing(&path, LOCK_DEADLINE)?;
                    return Ok(Self { path, temporary: temporary.to_owned(), _lock: lock });
                }
                // Of an earlier process with our number.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io("create", path)(error)),
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn keep_others_out(&self) -> Result<()> {
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o700))
            .map_err(Error::io("set the mode of", &self.path))
    }

    /// Everything in the draft becomes visible as `target` at once. What was there before is replaced and removed.
    pub(crate) fn publish(self, target: &Path) -> Result<()> {
        sync_below(&self.path)?;
        match renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE) {
            Ok(()) => {}
            Err(rustix::io::Errno::EXIST) => {
                renameat_with(CWD, &self.path, CWD, target, RenameFlags::EXCHANGE)
                    .map_err(Error::system("replace", target))?;
            }
            Err(error) => return Err(Error::system("publish", target)(error)),
        }
        sync_directory(target.parent().unwrap_or(Path::new("/")))?;
        sync_directory(&self.temporary)
        // Dropping removes what was replaced, if anything.
    }

    /// As [`Draft::publish`], but what is there already stays, and is an error.
    pub(crate) fn publish_new(self, target: &Path) -> Result<()> {
        sync_below(&self.path)?;
        renameat_with(CWD, &self.path, CWD, target, RenameFlags::NOREPLACE)
            .map_err(Error::system("publish", target))?;
        sync_directory(target.parent().unwrap_or(Path::new("/")))?;
        sync_directory(&self.temporary)
    }

    /// The file `name` of the draft becomes visible as `target` at once, in place of what was there.
    pub(crate) fn publish_file(self, name: &str, target: &Path) -> Result<()> {
        let path = self.path.join(name);
        sync_file(&path)?;
        fs::rename(&path, target).map_err(Error::io("publish", target))?;
        sync_directory(target.parent().unwrap_or(Path::new("/")))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if let Err(error) = remove_all(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "left a half-made directory for the next sweep");
        }
    }
}

/// Takes `path` out of sight at once and then deletes it. Nothing there is fine.
pub(crate) fn discard(path: &Path, temporary: &Path) -> Result<()> {
    let in_place = || remove_all(path).map_err(Error::io("remove", path));
    let draft = match Draft::create(temporary, "discarded") {
        Ok(draft) => draft,
        // A full disk is emptied by this, so it must not need room.
        Err(error) if error.is_no_space() => return in_place(),
        Err(error) => return Err(error),
    };
    match fs::rename(path, draft.path().join("content")) {
        Ok(()) => {
            fault::point!("delete.disk_renamed");
            sync_directory(path.parent().unwrap_or(Path::new("/")))
        }
        Err(error) if error.kind() == ErrorKind::StorageFull => in_place(),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("remove", path)(error)),
    }
}

/// Does not follow links and stays on one file system: what is mounted below is an error, never emptied. Nothing there
/// is fine.
pub(crate) fn remove_all(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_dir() => remove_directory(path, metadata.dev()),
        Ok(_) => ignore_missing(fs::remove_file(path)),
        Err(error) => ignore_missing(Err(error)),
    }
}

fn remove_directory(path: &Path, device: u64) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if !entry.file_type()?.is_dir() {
            ignore_missing(fs::remove_file(entry.path()))?;
            continue;
        }
        if entry.metadata()?.dev() != device {
            return Err(io::Error::new(ErrorKind::CrossesDevices, "something is mounted below"));
        }
        remove_directory(&entry.path(), device)?;
    }
    ignore_missing(fs::remove_dir(path))
}

fn ignore_missing(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(()) | Err(_) => result,
    }
}

pub(crate) fn sync_file(path: &Path) -> Result<()> {
    File::open(path).and_then(|file| file.sync_all()).map_err(Error::io("sync", path))
}

pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    sync_file(path)
}

/// Files side by side: each waits for the disk, and all for the same journal.
fn sync_below(directory: &Path) -> Result<()> {
    const MOST_THREADS: usize = 4;
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(Error::io("list", directory))? {
        let entry = entry.map_err(Error::io("list", directory))?;
        let kind = entry.file_type().map_err(Error::io("stat", entry.path()))?;
        if kind.is_dir() {
            sync_below(&entry.path())?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
    }
    let sync = |files: &[PathBuf]| files.iter().try_for_each(|file| sync_file(file));
    std::thread::scope(|scope| {
        let share = files.len().div_ceil(MOST_THREADS).max(1);
        let syncing: Vec<_> =
            files.chunks(share).map(|files| scope.spawn(move || sync(files))).collect();
        syncing.into_iter().try_for_each(|syncing| {
            syncing.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    })?;
    sync_directory(directory)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn places() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let temporary = directory.path().join("temporary");
        fs::create_dir(&temporary).unwrap();
        let target = directory.path().join("target");
        (directory, temporary, target)
    }

    fn draft_with(temporary: &Path, content: &str) -> Draft {
        let draft = Draft::create(temporary, "test").unwrap();
        fs::create_dir(draft.path().join("below")).unwrap();
        fs::write(draft.path().join("below/file"), content).unwrap();
        draft
    }

    #[test]
    fn a_publish_replaces_the_old_at_once_and_leaves_nothing_behind() {
        let (_directory, temporary, target) = places();
        draft_with(&temporary, "old").publish(&target).unwrap();
        draft_with(&temporary, "new").publish(&target).unwrap();
        assert_eq!(fs::read_to_string(target.join("below/file")).unwrap(), "new");
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
    }

    #[test]
    fn a_draft_that_is_not_published_goes_away() {
        let (_directory, temporary, target) = places();
        draft_with(&temporary, "old").publish(&target).unwrap();
        drop(draft_with(&temporary, "new"));
        assert_eq!(fs::read_to_string(target.join("below/file")).unwrap(), "old");
        assert_eq!(fs::read_dir(&temporary).unwrap().count(), 0);
    }

    #[test]
    fn discarding_works_twice() {
        let (_directory, temporary, target) = places();
        draft_with(&temporary, "x").publish(&target).unwrap();
        discard(&target, &temporary).unwrap();
        discard(&target, &temporary).unwrap();
        assert!(!target.exists());
    }

    #[test]
    fn removing_does_not_follow_links() {
        let (directory, temporary, _) = places();
        let precious = directory.path().join("precious");
        fs::create_dir(&precious).unwrap();
        fs::write(precious.join("file"), b"x").unwrap();
        let draft = draft_with(&temporary, "x");
        symlink(&precious, draft.path().join("link")).unwrap();
        drop(draft);
        assert!(precious.join("file").exists());
    }
}
