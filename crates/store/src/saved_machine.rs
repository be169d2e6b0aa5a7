//! A machine at rest: its memory, its device state and its root disk at one instant, and what is needed to load them.
//! Snapshots and hibernated sandboxes are kept so.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::{
    Digest, Error, Result,
    bake::{MANIFEST, write_manifest},
    clone::{clone_file, clone_into},
    draft::Draft,
};

/// Counts up when a program that knows only the number before could not use the files rightly. Fields are added to
/// [`Manifest`] without it, with a default for files that lack them.
const FORMAT: u32 = 1;

/// What must be known to load the machine again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// Digest of `description`. Compared before every load.
    pub key: Digest,
    /// The whole machine, for people.
    pub description: String,
    pub cpus: u32,
    pub memory_mib: u32,
    /// Of the root disk, as the machine saw it.
    pub disk_bytes: u64,
    /// Version of the protocol that the agent in its memory speaks.
    pub agent_protocol: u32,
    /// QEMU's, with its version.
    pub machine_type: String,
    /// Milliseconds since 1970.
    pub created_ms: i64,
}

/// As it is in the file.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    format: u32,
    /// Lengths of the files beside it, by name.
    files: BTreeMap<String, u64>,
    machine: Manifest,
}

/// Only this, of a file that a later program may have written.
#[derive(Debug, Deserialize)]
struct StoredFormat {
    format: u32,
}

/// Published and immutable.
#[derive(Debug, Clone)]
pub struct SavedMachine {
    pub manifest: Manifest,
    directory: PathBuf,
    rootfs: PathBuf,
}

impl SavedMachine {
    /// The guest's memory. To be mapped privately.
    pub fn memory(&self) -> PathBuf {
        self.directory.join("memory")
    }

    /// Device state without memory.
    pub fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    /// The root disk. A snapshot's is to be cloned; a hibernated sandbox's is the sandbox's own.
    pub fn rootfs(&self) -> PathBuf {
        self.rootfs.clone()
    }

    /// `rootfs` is where the root disk lies if not beside the memory. `None` when there is nothing.
    pub(crate) fn read(
        directory: PathBuf,
        rootfs: Option<PathBuf>,
        what: &'static str,
        id: &str,
    ) -> Result<Option<Self>> {
        let unusable = |reason: String| Error::Unusable { what, id: id.to_owned(), reason };
        let path = directory.join(MANIFEST);
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io("read", path)(error)),
        };
        let damaged = |error: serde_json::Error| unusable(format!("its manifest: {error}"));
        let StoredFormat { format } = serde_json::from_slice(&text).map_err(damaged)?;
        if format > FORMAT {
            return Err(unusable(format!(
                "a newer version of this program made it (format {format}, known up to {FORMAT})"
            )));
        }
        let stored: Stored = serde_json::from_slice(&text).map_err(damaged)?;
        for (name, bytes) in &stored.files {
            match directory.join(name).metadata() {
                Ok(metadata) if metadata.len() == *bytes => {}
                Ok(metadata) => {
                    return Err(unusable(format!(
                        "{name} has {} bytes instead of {bytes}",
                        metadata.len()
                    )));
                }
                Err(error) => return Err(unusable(format!("{name}: {error}"))),
            }
        }
        let rootfs = rootfs.unwrap_or_else(|| directory.join("rootfs"));
        Ok(Some(Self { manifest: stored.machine, directory, rootfs }))
    }
}

/// Being made; gone when dropped.
#[derive(Debug)]
pub struct SavedMachineDraft {
    draft: Draft,
    target: PathBuf,
    /// Where the root disk lies if it is not to become part of it.
    rootfs: Option<PathBuf>,
}

impl SavedMachineDraft {
    pub(crate) fn create(
        temporary: &Path,
        kind: &'static str,
        target: PathBuf,
        rootfs: Option<PathBuf>,
    ) -> Result<Self> {
        let draft = Draft::create(temporary, kind)?;
        draft.keep_others_out()?;
        Ok(Self { draft, target, rootfs })
    }

    fn memory(&self) -> PathBuf {
        self.draft.path().join("memory")
    }

    fn state(&self) -> PathBuf {
        self.draft.path().join("state")
    }

    /// The memory starts as a clone of `base`; the changed pages are written over it. Readable and writable.
    pub fn clone_memory(&self, base: &Path) -> Result<File> {
        clone_file(base, &self.memory())?;
        let open = File::options().read(true).write(true).open(self.memory());
        open.map_err(Error::io("open", self.memory()))
    }

    /// Empty, for writing only.
    pub fn state_file(&self) -> Result<File> {
        let open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(self.state());
        open.map_err(Error::io("create", self.state()))
    }

    /// The device state of a machine that is at rest already.
    pub fn clone_state(&self, source: &Path) -> Result<()> {
        clone_file(source, &self.state()).map(drop)
    }

    /// Clones the root disk when called, which is to be while the machine stands still.
    pub fn clone_rootfs_later(
        &self,
        source: PathBuf,
    ) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let target = self.draft.path().join("rootfs");
        move || {
            let input = File::open(&source)?;
            let output =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target)?;
            clone_into(&input, &output)?;
            Ok(())
        }
    }

    /// Flushes everything to the disk, and makes it visible at once. All files must be complete.
    pub fn publish(self, manifest: Manifest) -> Result<SavedMachine> {
        let mut names = vec!["memory", "state"];
        if self.rootfs.is_none() {
            names.push("rootfs");
        }
        let mut files = BTreeMap::new();
        for name in names {
            let path = self.draft.path().join(name);
            let length = path.metadata().map_err(Error::io("look for", &path))?.len();
            if length == 0 {
                let source = io::Error::new(ErrorKind::UnexpectedEof, "it is empty");
                return Err(Error::Io { doing: "publish", path, source });
            }
            files.insert(name.to_owned(), length);
        }
        let stored = Stored { format: FORMAT, files, machine: manifest.clone() };
        write_manifest(self.draft.path(), &stored)?;
        let rootfs = self.rootfs.unwrap_or_else(|| self.target.join("rootfs"));
        self.draft.publish(&self.target)?;
        Ok(SavedMachine { manifest, directory: self.target, rootfs })
    }
}
