//! The directory of a sandbox: its root disk, gone with it.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use api::SandboxId;

use crate::{Error, Layout, Result, clone::clone_file, draft};

/// Paths of one sandbox's files; none of them need exist.
#[derive(Debug, Clone)]
pub struct SandboxFiles {
    directory: PathBuf,
}

impl SandboxFiles {
    /// Touches nothing.
    pub fn of(layout: &Layout, id: &SandboxId) -> Self {
        Self { directory: layout.sandbox(id) }
    }

    /// Makes the directory; an error when the sandbox has one.
    pub fn create(layout: &Layout, id: &SandboxId) -> Result<Self> {
        let files = Self::of(layout, id);
        fs::create_dir(&files.directory).map_err(Error::io("create", &files.directory))?;
        // The machine's process gets its disk as a descriptor.
        fs::set_permissions(&files.directory, fs::Permissions::from_mode(0o700))
            .map_err(Error::io("set the mode of", &files.directory))?;
        Ok(files)
    }

    pub fn directory(&self) -> &PathBuf {
        &self.directory
    }

    /// The sandbox's own disk.
    pub fn rootfs(&self) -> PathBuf {
        self.directory.join("rootfs")
    }

    /// Makes the root disk from that of a bake. It is as long as asked for, at least as long as the bake's.
    pub fn clone_rootfs(&self, source: &Path, bytes: u64) -> Result<File> {
        let path = self.rootfs();
        clone_file(source, &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .map_err(Error::io("set the mode of", &path))?;
        let open = File::options().read(true).write(true).open(&path);
        let file = open.map_err(Error::io("open", &path))?;
        file.set_len(bytes).map_err(Error::io("set the size of", &path))?;
        Ok(file)
    }
}

/// In any state, also twice.
pub fn remove(layout: &Layout, id: &SandboxId) -> Result<()> {
    draft::discard(&layout.sandbox(id), &layout.data_temporary())
}

/// What sandboxes left that are no more.
pub fn remove_all_but(layout: &Layout, kept: &[SandboxId]) -> Result<()> {
    list(layout)?.iter().filter(|id| !kept.contains(id)).try_for_each(|id| remove(layout, id))
}

/// Those that have a directory. Names that are no ids are not ours and are left out.
pub fn list(layout: &Layout) -> Result<Vec<SandboxId>> {
    let directory = layout.sandboxes();
    let mut ids = Vec::new();
    for entry in directory.read_dir().map_err(Error::io("list", &directory))? {
        match entry {
            Ok(entry) => ids
                .extend(entry.file_name().to_str().and_then(|name| name.parse::<SandboxId>().ok())),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("list", &directory)(error)),
        }
    }
    Ok(ids)
}
