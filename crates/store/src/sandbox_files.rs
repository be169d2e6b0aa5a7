//! The directory of a sandbox, gone with it: its root disk, the memory that its machine started from, and the machine
//! itself while it hibernates.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use api::SandboxId;

use crate::{
    Error, Layout, Result,
    clone::{Method, clone_file},
    draft, layout,
    saved_machine::{SavedMachine, SavedMachineDraft},
};

/// Paths of one sandbox's files; none of them need exist.
#[derive(Debug, Clone)]
pub struct SandboxFiles {
    directory: PathBuf,
    temporary: PathBuf,
}

impl SandboxFiles {
    /// Touches nothing.
    pub fn of(layout: &Layout, id: &SandboxId) -> Self {
        Self { directory: layout.sandbox(id), temporary: layout.data_temporary() }
    }

    /// Makes the directory; an error when the sandbox has one.
    pub fn create(layout: &Layout, id: &SandboxId) -> Result<Self> {
        let files = Self::of(layout, id);
        fault::point!("create.directory_making", Error::io("create", &files.directory));
        fs::create_dir(&files.directory).map_err(Error::io("create", &files.directory))?;
        fault::point!("create.directory_made", Error::io("set the mode of", &files.directory));
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
        fault::point!("create.disk_cloned", Error::io("set the mode of", &path));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))
            .map_err(Error::io("set the mode of", &path))?;
        let open = File::options().read(true).write(true).open(&path);
        let file = open.map_err(Error::io("open", &path))?;
        fault::point!("create.disk_growing", Error::io("set the size of", &path));
        file.set_len(bytes).map_err(Error::io("set the size of", &path))?;
        Ok(file)
    }

    /// The memory that the running machine was loaded from; snapshots of it start from there.
    pub fn memory(&self) -> PathBuf {
        self.directory.join("memory")
    }

    /// Keeps `source`, the memory of a bake or a snapshot, at hand whatever becomes of that. It is the same file, so all
    /// machines started from it go on sharing its pages; only where a link cannot be made, it is cloned.
    pub fn link_memory(&self, source: &Path) -> Result<MemoryKept> {
        let path = self.memory();
        let linked = match fs::hard_link(source, &path) {
            // Of an earlier start.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                self.remove_memory()?;
                fs::hard_link(source, &path)
            }
            other => other,
        };
        match linked {
            Ok(()) => Ok(MemoryKept::SameFile),
            Err(error) if needs_clone(&error) => Ok(match clone_file(source, &path)? {
                Method::Reflink => MemoryKept::Cloned,
                Method::Copy => MemoryKept::Copied,
            }),
            Err(error) => Err(Error::io("link the memory to", path)(error)),
        }
    }

    /// For a sandbox whose machine is no more. There need be none.
    pub fn remove_memory(&self) -> Result<()> {
        match fs::remove_file(self.memory()) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(Error::io("remove", self.memory())(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn hibernated(&self) -> PathBuf {
        self.directory.join("hibernated")
    }

    /// For memory and device state; the root disk stays where it is.
    pub fn hibernation_draft(&self) -> Result<SavedMachineDraft> {
        let (target, rootfs) = (self.hibernated(), Some(self.rootfs()));
        SavedMachineDraft::create(&self.temporary, "hibernation", target, rootfs)
    }

    /// `None` when the sandbox does not hibernate.
    pub fn hibernation(&self) -> Result<Option<SavedMachine>> {
        let id = self.directory.file_name().unwrap_or_default().to_string_lossy();
        SavedMachine::read(
            self.hibernated(),
            Some(self.rootfs()),
            "hibernated machine of sandbox",
            &id,
        )
    }

    /// After a wake. There need be none.
    pub fn remove_hibernation(&self) -> Result<()> {
        draft::discard(&self.hibernated(), &self.temporary)
    }
}

/// How [`SandboxFiles::link_memory`] went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryKept {
    SameFile,
    /// Its blocks are shared, its pages in memory are not.
    Cloned,
    /// Neither is: the cache is on another file system than the data. Slow, and it costs the size of the memory.
    Copied,
}

/// Another file system, or one that is out of links to this file.
fn needs_clone(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::CrossesDevices | ErrorKind::TooManyLinks | ErrorKind::Unsupported
    )
}

/// In any state, also twice.
pub fn remove(layout: &Layout, id: &SandboxId) -> Result<()> {
    fault::point!("delete.disk_removing", Error::io("remove", layout.sandbox(id)));
    draft::discard(&layout.sandbox(id), &layout.data_temporary())
}

/// What sandboxes left that are no more.
pub fn remove_all_but(layout: &Layout, kept: &[SandboxId]) -> Result<()> {
    list(layout)?.iter().filter(|id| !kept.contains(id)).try_for_each(|id| remove(layout, id))
}

/// Those that have a directory.
pub fn list(layout: &Layout) -> Result<Vec<SandboxId>> {
    layout::ids_in(&layout.sandboxes())
}
