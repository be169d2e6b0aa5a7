//! The directory of a sandbox, gone with it: its root disk, or the whole machine while it hibernates.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, PermissionsExt},
    },
    path::{Path, PathBuf},
};

use api::SandboxId;
use rustix::fs::{Mode, OFlags};

use crate::{
    Error, Layout, Result,
    clone::clone_file,
    draft,
    ext4::{self, Recovery},
    layout,
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

    /// What its root disk takes of the host, blocks that it shares included; what it hibernates in, while it does.
    pub fn used_bytes(&self) -> Result<u64> {
        let hibernated = self.hibernated();
        let mut used = 0;
        for path in ["memory", "state", "rootfs"].map(|name| hibernated.join(name)) {
            used += allocated(&path)?;
        }
        Ok(used + allocated(&self.rootfs())?)
    }

    /// Makes the root disk from that of a bake. It is as long as asked for, at least as long as the bake's. What an earlier
    /// start left is replaced.
    pub fn clone_rootfs(&self, source: &Path, bytes: u64) -> Result<File> {
        self.remove_rootfs()?;
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

    /// The disk `from`, of a machine that has it open, becomes the sandbox's. It gets as long as asked for, never shorter.
    pub fn take_rootfs(&self, from: &Path, bytes: u64) -> Result<()> {
        let path = self.rootfs();
        fs::rename(from, &path).map_err(Error::io("move", from))?;
        let open = File::options().write(true).open(&path);
        let file = open.map_err(Error::io("open", &path))?;
        if file.metadata().map_err(Error::io("stat", &path))?.len() < bytes {
            file.set_len(bytes).map_err(Error::io("set the size of", path))?;
        }
        Ok(())
    }

    /// As [`crate::volume::recover`], of the sandbox's own disk.
    pub fn recover_rootfs(&self) -> Result<Recovery> {
        ext4::recover(&self.rootfs())
    }

    pub fn open_rootfs(&self) -> Result<File> {
        let path = self.rootfs();
        let open = File::options().read(true).write(true).open(&path);
        open.map_err(Error::io("open", path))
    }

    /// Of a guest that is about to boot: all zeroes, without a name, for reading only. It takes no room.
    pub fn blank_memory(&self, bytes: u64) -> Result<File> {
        let directory = &self.directory;
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        // The machine's process opens its descriptor of it once more, as a user of its own.
        let file = rustix::fs::open(directory, flags, Mode::from_raw_mode(0o444))
            .map_err(Error::system("make memory in", directory))?;
        let file = File::from(file);
        file.set_len(bytes).map_err(Error::io("make memory in", directory))?;
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .map_err(Error::io("open memory in", directory))
    }

    /// For a sandbox that hibernates, whose root disk lies with the rest. There need be none.
    pub fn remove_rootfs(&self) -> Result<()> {
        remove_file(&self.rootfs())
    }

    fn hibernated(&self) -> PathBuf {
        self.directory.join("hibernated")
    }

    /// With a root disk of its own, so that a wake that fails half-way costs nothing: it can be begun again.
    pub fn hibernation_draft(&self) -> Result<SavedMachineDraft> {
        SavedMachineDraft::create(&self.temporary, "hibernation", self.hibernated())
    }

    /// `None` when the sandbox does not hibernate.
    pub fn hibernation(&self) -> Result<Option<SavedMachine>> {
        let id = self.directory.file_name().unwrap_or_default().to_string_lossy();
        SavedMachine::read(self.hibernated(), "hibernated machine of sandbox", &id)
    }

    /// After a wake. There need be none.
    pub fn remove_hibernation(&self) -> Result<()> {
        draft::discard(&self.hibernated(), &self.temporary)
    }
}

/// What a file takes of the host's disk, in bytes: 0 for what is not there.
pub fn allocated(path: &Path) -> Result<u64> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(metadata.blocks() * 512),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        Err(error) => Err(Error::io("stat", path)(error)),
    }
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        Ok(()) | Err(_) => Ok(()),
    }
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
