//! The directories of machines, one for each slot of the host: sockets, the process's mark, and the disk of a machine that
//! is nobody's yet. Nothing that must last.

use std::{
    fs::{self, File},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{Error, Layout, Result, clone::clone_file, draft, ext4, volume};

/// Makes the slot's directory anew, whatever was there.
pub fn create(layout: &Layout, slot: u16) -> Result<PathBuf> {
    remove(layout, slot)?;
    let directory = layout.machine(slot);
    fs::create_dir(&directory).map_err(Error::io("create", &directory))?;
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o700))
        .map_err(Error::io("set the mode of", &directory))?;
    Ok(directory)
}

/// The root disk of a machine that is nobody's yet: see [`SandboxFiles::take_rootfs`].
///
/// [`SandboxFiles::take_rootfs`]: crate::sandbox_files::SandboxFiles::take_rootfs
pub fn rootfs(layout: &Layout, slot: u16) -> PathBuf {
    layout.machine(slot).join("rootfs")
}

/// Makes that disk from a bake's.
pub fn clone_rootfs(layout: &Layout, slot: u16, source: &Path) -> Result<File> {
    let path = rootfs(layout, slot);
    clone_file(source, &path)?;
    let open = File::options().read(true).write(true).open(&path);
    open.map_err(Error::io("open", path))
}

/// An empty volume, gone when it is closed.
pub fn scratch_volume(layout: &Layout, slot: u16) -> Result<File> {
    let path = layout.machine(slot).join("scratch");
    ext4::make_volume(&path, volume::MINIMUM_BYTES)?;
    let open = File::options().read(true).write(true).open(&path);
    let file = open.map_err(Error::io("open", &path))?;
    fs::remove_file(&path).map_err(Error::io("remove", path))?;
    Ok(file)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox_files::SandboxFiles;

    #[test]
    fn a_disk_made_ahead_becomes_that_of_a_sandbox_and_is_never_shortened() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let layout = Layout::create(at("data"), at("cache")).unwrap();
        fs::write(at("baked"), [7; 4096]).unwrap();
        for bytes in [8192, 1024] {
            let machine = create(&layout, 3).unwrap();
            let open = clone_rootfs(&layout, 3, &at("baked")).unwrap();
            let sandbox = SandboxFiles::create(&layout, &api::SandboxId::random()).unwrap();
            sandbox.take_rootfs(&rootfs(&layout, 3), bytes).unwrap();
            assert_eq!(machine.read_dir().unwrap().count(), 0);
            let length = open.metadata().unwrap().len();
            assert_eq!(length, bytes.max(4096));
            assert_eq!(sandbox.open_rootfs().unwrap().metadata().unwrap().len(), length);
        }
    }

    #[test]
    fn a_scratch_volume_has_a_file_system_and_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let layout = Layout::create(at("data"), at("cache")).unwrap();
        let machine = create(&layout, 3).unwrap();
        let scratch = scratch_volume(&layout, 3).unwrap();
        assert_eq!(machine.read_dir().unwrap().count(), 0);
        use std::os::fd::AsRawFd;
        let path = PathBuf::from(format!("/proc/self/fd/{}", scratch.as_raw_fd()));
        assert!(ext4::is_ext4(&path).unwrap());
    }
}
