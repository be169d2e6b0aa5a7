//! Bounds what the shared cache keeps of guest kernels, initramfs archives and downloaded packages. Bakes and templates
//! have rules of their own.
//!
//! What a server uses it holds locked, so that no other server's pruning takes it away.

use std::{
    fs::{self, DirEntry},
    io::ErrorKind,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::fs::{AtFlags, CWD, Timespec, Timestamps, UTIME_NOW, utimensat};

use crate::{
    Error, Layout, Result, draft, initramfs::Initramfs, kernel::Kernel, lock::Lock, pool,
    sweep::Mode,
};

/// Kept in any case, beside those in use: a way back after an upgrade.
const KEPT_KERNELS: usize = 2;
/// A few megabytes each; every build of the agent has its own.
const KEPT_INITRAMFS: usize = 8;
/// The newest of more than these may still be on somebody's desk.
const KEPT_FOR: Duration = Duration::from_secs(24 * 3600);
const PACKAGE_BYTES: u64 = 2 << 30;
const LOCK_DEADLINE: Duration = Duration::from_secs(30);

/// Keeps a kernel and an initramfs from being pruned, as long as it lives.
#[derive(Debug)]
pub struct InUse {
    _locks: [Lock; 2],
}

/// Also counts as a use of both.
///
/// # Errors
/// One of them has just been pruned: make it again.
pub fn hold(kernel: &Kernel, initramfs: &Initramfs) -> Result<InUse> {
    let directory = kernel.vmlinuz.parent().unwrap_or(Path::new("/"));
    Ok(InUse { _locks: [hold_one(directory)?, hold_one(&initramfs.path)?] })
}

fn hold_one(path: &Path) -> Result<Lock> {
    let lock = Lock::acquire_shared(path, LOCK_DEADLINE)?;
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    // Whoever prunes takes it out of sight with the lock in hand: what is still there stays.
    utimensat(CWD, path, &times, AtFlags::empty())
        .map_err(Error::system("mark the use of", path))?;
    Ok(lock)
}

/// Something that goes, or would.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    pub path: PathBuf,
    pub bytes: u64,
}

struct Candidate {
    path: PathBuf,
    used: SystemTime,
    bytes: u64,
}

/// Removes kernels and archives used longest ago beyond a number, and packages beyond a size.
pub fn prune(layout: &Layout, now: SystemTime, mode: Mode) -> Result<Vec<Unused>> {
    let mut unused = Vec::new();
    for (directory, kept) in
        [(layout.kernels(), KEPT_KERNELS), (layout.initramfs_directory(), KEPT_INITRAMFS)]
    {
        let named = named(layout);
        let old = candidates(&directory)?
            .into_iter()
            .filter(|candidate| is_digest(&candidate.path) && !named.contains(&candidate.path))
            .skip(kept)
            .filter(|candidate| {
                now.duration_since(candidate.used).is_ok_and(|since| since > KEPT_FOR)
            });
        for candidate in old {
            unused.extend(remove(layout, candidate, mode)?);
        }
    }
    unused.extend(prune_packages(layout, mode)?);
    Ok(unused)
}

/// `None`: a server uses it, or another was faster.
fn remove(layout: &Layout, candidate: Candidate, mode: Mode) -> Result<Option<Unused>> {
    let lock = match Lock::try_acquire_existing(&candidate.path) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Ok(None),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    if mode == Mode::Remove {
        draft::discard(&candidate.path, &layout.cache_temporary())?;
    }
    drop(lock);
    Ok(Some(Unused { path: candidate.path, bytes: candidate.bytes }))
}

fn prune_packages(layout: &Layout, mode: Mode) -> Result<Vec<Unused>> {
    let directory = layout.packages();
    // Builds, which copy from it, hold it shared.
    let _no_build = match Lock::try_acquire_existing(&directory) {
        Ok(Some(lock)) => lock,
        Ok(None) => return Ok(Vec::new()),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(Vec::new());
        }
        Err(error) => return Err(error),
    };
    let mut kept = 0;
    let mut unused = Vec::new();
    for Candidate { path, bytes, .. } in candidates(&directory)? {
        kept += bytes;
        if kept > PACKAGE_BYTES {
            if mode == Mode::Remove {
                fs::remove_file(&path).map_err(Error::io("remove", &path))?;
            }
            unused.push(Unused { path, bytes });
        }
    }
    Ok(unused)
}

/// What has a name of its own: the kernel in use, and the guest of tests.
fn named(layout: &Layout) -> Vec<PathBuf> {
    let current = fs::read_to_string(layout.current_kernel()).unwrap_or_default();
    let linked = ["vmlinuz", "initramfs"]
        .iter()
        .filter_map(|name| fs::read_link(layout.current_guest().join(name)).ok())
        .flat_map(|target| [target.parent().map(Path::to_owned), Some(target.clone())])
        .flatten();
    linked.chain([layout.kernels().join(current.trim())]).collect()
}

fn is_digest(path: &Path) -> bool {
    path.file_name()
        .and_then(|name| name.to_str())
        .is_some_and(|name| name.parse::<crate::Digest>().is_ok())
}

/// The one used last comes first.
fn candidates(directory: &Path) -> Result<Vec<Candidate>> {
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", directory)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        // It may have gone since.
        found.extend(candidate(&entry.map_err(Error::io("list", directory))?));
    }
    found.sort_by(|left, right| right.used.cmp(&left.used).then(left.path.cmp(&right.path)));
    Ok(found)
}

fn candidate(entry: &DirEntry) -> Option<Candidate> {
    let metadata = entry.metadata().ok()?;
    // Of a package, when it was written here or read last: its modification is the archive's.
    let seconds = if metadata.is_dir() || is_digest(&entry.path()) {
        metadata.mtime()
    } else {
        metadata.ctime().max(metadata.atime())
    };
    let used = SystemTime::UNIX_EPOCH + Duration::from_secs(u64::try_from(seconds).unwrap_or(0));
    let bytes = pool::allocated_bytes(&entry.path()).ok()?;
    Some(Candidate { path: entry.path(), used, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Digest;

    fn layout() -> (tempfile::TempDir, Layout) {
        let directory = tempfile::tempdir().unwrap();
        let layout =
            Layout::create(directory.path().join("data"), directory.path().join("cache")).unwrap();
        (directory, layout)
    }

    /// Used so many days ago.
    fn make(path: &Path, now: SystemTime, days: u64) {
        fs::write(path, b"x").unwrap();
        let used = now - Duration::from_secs(days * 24 * 3600);
        fs::File::options().append(true).open(path).unwrap().set_modified(used).unwrap();
    }

    fn time() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000)
    }

    #[test]
    fn the_archives_used_longest_ago_go_beyond_a_number() {
        let (_directory, layout) = layout();
        let path = |number: u64| layout.initramfs(&Digest::of(&number.to_le_bytes()));
        for number in 0..12 {
            make(&path(number), time(), number);
        }
        let looked = prune(&layout, time(), Mode::Look).unwrap();
        let removed = prune(&layout, time(), Mode::Remove).unwrap();
        assert_eq!(looked, removed);
        let gone: Vec<_> = removed.into_iter().map(|unused| unused.path).collect();
        assert_eq!(gone, [8, 9, 10, 11].map(path));
        assert!((0..8).all(|number| path(number).exists()) && !path(8).exists());
    }

    #[test]
    fn what_was_used_within_a_day_stays_however_much_there_is() {
        let (_directory, layout) = layout();
        for number in 0..20_u64 {
            make(&layout.initramfs(&Digest::of(&number.to_le_bytes())), time(), 0);
        }
        assert!(prune(&layout, time(), Mode::Remove).unwrap().is_empty());
    }

    #[test]
    fn what_a_server_holds_or_a_name_leads_to_is_never_pruned() {
        let (_directory, layout) = layout();
        let digest = |number: u64| Digest::of(&number.to_le_bytes());
        for number in 0..12 {
            make(&layout.initramfs(&digest(number)), time(), number);
        }
        let kernel = layout.kernel(&digest(0));
        fs::create_dir(&kernel).unwrap();
        let kernel = Kernel {
            vmlinuz: kernel.join("vmlinuz"),
            modules: Vec::new(),
            release: String::new(),
            digest: digest(0),
        };
        let initramfs = Initramfs { path: layout.initramfs(&digest(11)), digest: digest(11) };
        let held = hold(&kernel, &initramfs).unwrap();
        // It was marked as used; make it look old again.
        make(&initramfs.path, time(), 50);
        fs::create_dir(layout.current_guest()).unwrap();
        let link = layout.current_guest().join("initramfs");
        std::os::unix::fs::symlink(layout.initramfs(&digest(10)), link).unwrap();
        prune(&layout, time(), Mode::Remove).unwrap();
        assert!(initramfs.path.exists() && layout.initramfs(&digest(10)).exists());
        drop(held);
        prune(&layout, time(), Mode::Remove).unwrap();
        assert!(!initramfs.path.exists());
        assert!(hold(&kernel, &initramfs).is_err(), "whoever comes too late is told");
    }
}
