//! Removes what processes that died left half-made. Safe beside running ones: what has a living owner is locked.

use std::{fs, path::Path, time::Duration};

use crate::{Error, Layout, Result, draft::remove_all, lock::Lock};

const LOCK_DEADLINE: Duration = Duration::from_secs(30);

/// How many leftovers went.
pub fn temporary(layout: &Layout) -> Result<usize> {
    Ok(below(&layout.data_temporary())? + below(&layout.cache_temporary())?)
}

fn below(temporary: &Path) -> Result<usize> {
    let mut removed = 0;
    for entry in fs::read_dir(temporary).map_err(Error::io("list", temporary))? {
        let path = entry.map_err(Error::io("list", temporary))?.path();
        if is_abandoned(temporary, &path)? {
            // Nobody takes up what was abandoned, so no lock is needed for the long part.
            remove_all(&path).map_err(Error::io("remove", &path))?;
            tracing::info!(path = %path.display(), "removed a leftover");
            removed += 1;
        }
    }
    Ok(removed)
}

fn is_abandoned(temporary: &Path, path: &Path) -> Result<bool> {
    // No draft is between being made and being locked while this is held.
    let _no_creation = Lock::acquire_existing(temporary, LOCK_DEADLINE)?;
    match Lock::try_acquire_existing(path) {
        Ok(lock) => Ok(lock.is_some()),
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
