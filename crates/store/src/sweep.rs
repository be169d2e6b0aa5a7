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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draft::Draft;

    #[test]
    fn leftovers_go_and_what_has_an_owner_stays() {
        let directory = tempfile::tempdir().unwrap();
        let layout =
            Layout::create(directory.path().join("data"), directory.path().join("cache")).unwrap();
        let draft = Draft::create(&layout.cache_temporary(), "test").unwrap();
        let (leftover, file) =
            (layout.cache_temporary().join("tree-1-0"), layout.data_temporary().join("file"));
        fs::create_dir_all(leftover.join("a/b")).unwrap();
        fs::write(&file, b"x").unwrap();
        assert_eq!(temporary(&layout).unwrap(), 2);
        assert!(draft.path().exists() && !leftover.exists() && !file.exists());
        assert_eq!(temporary(&layout).unwrap(), 0);
    }
}
