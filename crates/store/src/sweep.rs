//! Removes what processes that died left half-made. Safe beside running ones: what has a living owner is locked.

use std::{
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{Error, Layout, Result, draft::remove_all, lock::Lock};

const LOCK_DEADLINE: Duration = Duration::from_secs(30);

/// Whether what is found goes, or is only told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Look,
    Remove,
}

/// The leftovers of both directories.
pub fn temporary(layout: &Layout, mode: Mode) -> Result<Vec<PathBuf>> {
    let mut found = of_data(layout, mode)?;
    found.extend(of_cache(layout, mode)?);
    Ok(found)
}

pub fn of_data(layout: &Layout, mode: Mode) -> Result<Vec<PathBuf>> {
    below(&layout.data_temporary(), mode)
}

pub fn of_cache(layout: &Layout, mode: Mode) -> Result<Vec<PathBuf>> {
    below(&layout.cache_temporary(), mode)
}

/// A whole directory that nobody uses any longer, whatever is below.
pub fn remove_directory(path: &Path) -> Result<()> {
    remove_all(path).map_err(Error::io("remove", path))
}

fn below(temporary: &Path, mode: Mode) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(temporary) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io("list", temporary)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(Error::io("list", temporary))?.path();
        if !is_abandoned(temporary, &path)? {
            continue;
        }
        if mode == Mode::Remove {
            // Nobody takes up what was abandoned, so no lock is needed for the long part.
            remove_all(&path).map_err(Error::io("remove", &path))?;
            tracing::info!(path = %path.display(), "removed a leftover");
        }
        found.push(path);
    }
    Ok(found)
}

fn is_abandoned(temporary: &Path, path: &Path) -> Result<bool> {
    // No draft is between being made and being locked while this is held.
    let _no_creation = Lock::acquire_existing(temporary, LOCK_DEADLINE)?;
    match Lock::try_acquire_existing(path) {
        Ok(lock) => Ok(lock.is_some()),
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => Ok(false),
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
        assert_eq!(temporary(&layout, Mode::Look).unwrap(), [file.clone(), leftover.clone()]);
        assert!(leftover.exists() && file.exists());
        assert_eq!(temporary(&layout, Mode::Remove).unwrap().len(), 2);
        assert!(draft.path().exists() && !leftover.exists() && !file.exists());
        assert!(temporary(&layout, Mode::Remove).unwrap().is_empty());
    }
}
