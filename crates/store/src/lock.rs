//! Locks between processes, held by an open file: they go with their holder, however it dies.

use std::{
    fs::{File, OpenOptions},
    os::fd::AsFd,
    path::Path,
    time::{Duration, Instant},
};

use rustix::fs::{FlockOperation, flock};

use crate::{Error, Result};

const RETRY_EVERY: Duration = Duration::from_millis(50);

/// Held until dropped. The file stays: deleting it would let two holders lock two files of one name.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// `None` when another holds it.
    pub fn try_acquire(path: &Path) -> Result<Option<Self>> {
        let file = open(path)?;
        Ok(try_flock(&file, FlockOperation::NonBlockingLockExclusive, path)?
            .then_some(Self { _file: file }))
    }

    /// `waiting` is called once if another holds it.
    pub fn acquire(path: &Path, deadline: Duration, waiting: &mut dyn FnMut()) -> Result<Self> {
        let file = open(path)?;
        acquire(&file, FlockOperation::NonBlockingLockExclusive, path, deadline, waiting)?;
        Ok(Self { _file: file })
    }

    /// Several may hold it shared, none of them while one holds it alone. `path` may be a directory.
    pub(crate) fn acquire_shared(path: &Path, deadline: Duration) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        acquire(&file, FlockOperation::NonBlockingLockShared, path, deadline, &mut || ())?;
        Ok(Self { _file: file })
    }

    /// On what exists already; `path` may be a directory.
    pub(crate) fn try_acquire_existing(path: &Path) -> Result<Option<Self>> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        Ok(try_flock(&file, FlockOperation::NonBlockingLockExclusive, path)?
            .then_some(Self { _file: file }))
    }

    pub(crate) fn acquire_existing(path: &Path, deadline: Duration) -> Result<Self> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        acquire(&file, FlockOperation::NonBlockingLockExclusive, path, deadline, &mut || ())?;
        Ok(Self { _file: file })
    }
}

fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(path)
        .map_err(Error::io("open the lock", path))
}

fn try_flock(file: impl AsFd, operation: FlockOperation, path: &Path) -> Result<bool> {
    match flock(file, operation) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(Error::system("lock", path)(error)),
    }
}

fn acquire(
    file: &File,
    operation: FlockOperation,
    path: &Path,
    deadline: Duration,
    waiting: &mut dyn FnMut(),
) -> Result<()> {
    let end = Instant::now() + deadline;
    let mut told = false;
    while !try_flock(file, operation, path)? {
        if !told {
            waiting();
            told = true;
        }
        if Instant::now() >= end {
            return Err(Error::Locked { path: path.to_owned(), after: deadline });
        }
        pause(RETRY_EVERY);
    }
    Ok(())
}

/// A lock that is waited for in the kernel knows no deadline, hence the short waits.
#[expect(
    clippy::disallowed_methods,
    reason = "this crate blocks by contract; callers use spawn_blocking"
)]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_by_one_and_goes_with_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let first = Lock::try_acquire(&path).unwrap();
        assert!(first.is_some());
        assert!(Lock::try_acquire(&path).unwrap().is_none());
        let mut waited = 0;
        let refused = Lock::acquire(&path, Duration::from_millis(60), &mut || waited += 1);
        assert!(matches!(refused, Err(Error::Locked { .. })));
        assert_eq!(waited, 1);
        drop(first);
        assert!(Lock::try_acquire(&path).unwrap().is_some());
    }
}
