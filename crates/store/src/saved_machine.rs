//! A machine at rest: its memory, its device state and its root disk at one instant, and what is needed to load them.
//! Snapshots and hibernated sandboxes are kept so.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, ErrorKind},
    num::NonZero,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::{Advice, fadvise};
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

const PAGE: u64 = 4096;
/// Of a machine's memory: more may not be used soon.
const MOST_FETCHED: u64 = 128 << 20;

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
    /// Pages of its memory that it had used and not changed: the number of the first, and how many.
    #[serde(default)]
    pub read_pages: Vec<(u32, u32)>,
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

/// Where a machine at rest lies.
#[derive(Debug, Clone)]
pub struct Files(PathBuf);

impl Files {
    pub(crate) const NAMES: [&str; 3] = ["memory", "state", "rootfs"];

    pub fn of(directory: &Path) -> Self {
        Self(directory.to_owned())
    }

    /// The guest's memory. To be mapped privately.
    pub fn memory(&self) -> PathBuf {
        self.0.join("memory")
    }

    /// Device state without memory.
    pub fn state(&self) -> PathBuf {
        self.0.join("state")
    }

    /// The root disk, to be cloned.
    pub fn rootfs(&self) -> PathBuf {
        self.0.join("rootfs")
    }

    /// Their lengths, by name.
    pub(crate) fn lengths(&self) -> Result<BTreeMap<String, u64>> {
        let mut lengths = BTreeMap::new();
        for name in Self::NAMES {
            let path = self.0.join(name);
            let length = path.metadata().map_err(Error::io("look for", &path))?.len();
            if length == 0 {
                return Err(Error::Damaged { path, reason: "it is empty".to_owned() });
            }
            lengths.insert(name.to_owned(), length);
        }
        Ok(lengths)
    }
}

/// Immutable: published, or a draft that nobody writes to any longer.
#[derive(Debug, Clone)]
pub struct SavedMachine {
    pub manifest: Manifest,
    pub files: Files,
}

impl SavedMachine {
    /// `None` when there is nothing.
    pub(crate) fn read(directory: PathBuf, what: &'static str, id: &str) -> Result<Option<Self>> {
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
        Ok(Some(Self { manifest: stored.machine, files: Files(directory) }))
    }
}

/// Has the kernel fetch these pages of a memory file from the disk, in the background. What the machine had changed was
/// written there and is in the kernel's cache still, but of the rest only what it was cloned from is.
pub fn fetch(memory: &File, pages: &[(u32, u32)]) {
    // The kernel cuts longer requests short.
    const PIECE: u64 = 128 << 10;
    let mut left = MOST_FETCHED;
    for &(first, count) in pages {
        let (start, length) = (u64::from(first) * PAGE, (u64::from(count) * PAGE).min(left));
        for at in (start..start + length).step_by(PIECE as usize) {
            let piece = NonZero::new(PIECE.min(start + length - at));
            // Not worth a failure: it comes when it is used.
            let _ = fadvise(memory, at, piece, Advice::WillNeed);
        }
        left -= length;
    }
}

/// What the host has not written of this file to its disk yet is written.
pub fn flush(path: &Path) -> Result<()> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    file.sync_data().map_err(Error::io("flush", path))
}

/// Being made; gone when dropped.
#[derive(Debug)]
pub struct SavedMachineDraft {
    draft: Draft,
    target: PathBuf,
}

impl SavedMachineDraft {
    pub(crate) fn create(temporary: &Path, kind: &'static str, target: PathBuf) -> Result<Self> {
        let draft = Draft::create(temporary, kind)?;
        draft.keep_others_out()?;
        Ok(Self { draft, target })
    }

    fn files(&self) -> Files {
        Files::of(self.draft.path())
    }

    /// The memory starts as a clone of `base`; the changed pages are written over it. Readable and writable.
    pub fn clone_memory(&self, base: &Path) -> Result<File> {
        self.clone_memory_of(&File::open(base).map_err(Error::io("open", base))?)
    }

    /// As [`SavedMachineDraft::clone_memory`], of a file that may have lost its name.
    pub fn clone_memory_of(&self, base: &File) -> Result<File> {
        let path = self.files().memory();
        let mut options = OpenOptions::new();
        // A machine's process opens its descriptor of it once more, as a user of its own.
        options.read(true).write(true).create_new(true).mode(0o444);
        let file = options.open(&path).map_err(Error::io("create", &path))?;
        clone_into(base, &file).map_err(Error::system("clone to", &path))?;
        Ok(file)
    }

    /// Empty, for writing only.
    pub fn state_file(&self) -> Result<File> {
        let path = self.files().state();
        let open = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        open.map_err(Error::io("create", path))
    }

    /// All of a machine that is at rest already.
    pub fn clone_all_of(&self, saved: &SavedMachine) -> Result<()> {
        self.clone_memory(&saved.files.memory())?;
        clone_file(&saved.files.state(), &self.files().state())?;
        clone_file(&saved.files.rootfs(), &self.files().rootfs()).map(drop)
    }

    /// Clones the root disk when called, which is to be while the machine stands still.
    pub fn clone_rootfs_later(
        &self,
        source: PathBuf,
    ) -> impl FnOnce() -> io::Result<()> + Send + use<> {
        let target = self.files().rootfs();
        move || {
            let input = File::open(&source)?;
            let output =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target)?;
            clone_into(&input, &output)?;
            Ok(())
        }
    }

    /// What is started from it where it lies. Nothing of it need be on the disk, and it goes with this.
    ///
    /// # Errors
    /// A file is missing.
    pub fn unpublished(&self, manifest: Manifest) -> Result<SavedMachine> {
        self.files().lengths()?;
        Ok(SavedMachine { manifest, files: self.files() })
    }

    /// Flushes everything to the disk, and makes it visible at once. All files must be complete.
    pub fn publish(self, manifest: Manifest) -> Result<SavedMachine> {
        let files = self.files().lengths()?;
        let stored = Stored { format: FORMAT, files, machine: manifest.clone() };
        write_manifest(self.draft.path(), &stored)?;
        self.draft.publish(&self.target)?;
        Ok(SavedMachine { manifest, files: Files(self.target) })
    }
}
