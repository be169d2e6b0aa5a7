//! Room on the file system that everything lies on.

use std::{os::unix::fs::MetadataExt, path::Path};

use rustix::fs::statvfs;

use crate::{Error, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    pub total_bytes: u64,
    /// What an unprivileged writer may still take.
    pub free_bytes: u64,
}

pub fn room(directory: &Path) -> Result<Room> {
    let answer = statvfs(directory).map_err(Error::system("ask for the room at", directory))?;
    Ok(Room {
        total_bytes: answer.f_blocks.saturating_mul(answer.f_frsize),
        free_bytes: answer.f_bavail.saturating_mul(answer.f_frsize),
    })
}

/// Only then can one be cloned or renamed to the other. Both must exist.
pub fn is_same_file_system(one: &Path, other: &Path) -> Result<bool> {
    let device =
        |path: &Path| Ok::<_, Error>(path.metadata().map_err(Error::io("stat", path))?.dev());
    Ok(device(one)? == device(other)?)
}

/// What `path`, a file or a directory with all below, takes on the disk. Blocks that clones share count for each.
pub fn allocated_bytes(path: &Path) -> Result<u64> {
    let metadata = path.symlink_metadata().map_err(Error::io("stat", path))?;
    let mut bytes = metadata.blocks() * 512;
    if metadata.is_dir() {
        for entry in path.read_dir().map_err(Error::io("list", path))? {
            bytes += allocated_bytes(&entry.map_err(Error::io("list", path))?.path())?;
        }
    }
    Ok(bytes)
}
