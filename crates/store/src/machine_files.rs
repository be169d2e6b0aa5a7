//! The directories of machines, one for each slot of the host: sockets and the process's mark, nothing that must last.

use std::{fs, os::unix::fs::PermissionsExt, path::PathBuf};

use crate::{Error, Layout, Result, draft};

/// Makes the slot's directory anew, whatever was there.
pub fn create(layout: &Layout, slot: u16) -> Result<PathBuf> {
    remove(layout, slot)?;
    let directory = layout.machine(slot);
    fs::create_dir(&directory).map_err(Error::io("create", &directory))?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))
        .map_err(Error::io("set the mode of", &directory))?;
    Ok(directory)
}

/// There need be none.
pub fn remove(layout: &Layout, slot: u16) -> Result<()> {
    draft::remove_all(&layout.machine(slot)).map_err(Error::io("remove", layout.machine(slot)))
}

/// Whether the slot has a directory.
pub fn exists(layout: &Layout, slot: u16) -> bool {
    layout.machine(slot).exists()
}

/// The slots that have a directory. Other names are not ours and are left out.
pub fn list(layout: &Layout) -> Result<Vec<u16>> {
    let directory = layout.machines();
    let mut slots = Vec::new();
    for entry in directory.read_dir().map_err(Error::io("list", &directory))? {
        let name = entry.map_err(Error::io("list", &directory))?.file_name();
        slots.extend(name.to_str().and_then(|name| name.parse::<u16>().ok()));
    }
    slots.sort_unstable();
    Ok(slots)
}
