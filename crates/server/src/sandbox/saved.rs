//! Machines at rest, from which others are started: a bake, a snapshot, a hibernated sandbox, an instant that passes.

use std::{
    fs::File,
    os::{fd::AsRawFd, unix::fs::MetadataExt},
    path::PathBuf,
    sync::Mutex,
};

use api::SnapshotId;
use machine::MachineSpec;
use store::{bake::Bake, saved_machine::Files};

use super::registry::locked;
use crate::Error;

/// Immutable; shared by all that are started from it. Its files are open, for under the same names others may appear: a
/// bake can be removed and made again, and a state with another one's memory is a broken machine.
pub(crate) struct SavedMachine {
    /// Names it among all of them.
    pub(crate) key: String,
    pub(crate) spec: MachineSpec,
    /// Of its root disk. A clone's may be larger, never smaller.
    pub(crate) disk_bytes: u64,
    memory_path: PathBuf,
    memory: File,
    state: File,
    rootfs: File,
    identity: String,
    is_bake: bool,
    /// Of its memory: see [`store::saved_machine::fetch`].
    read_pages: Mutex<Vec<(u32, u32)>>,
}

impl SavedMachine {
    pub(crate) fn of_bake(key: String, spec: MachineSpec, bake: &Bake) -> Result<Self, Error> {
        let opened = Self::open(key, spec, bake.manifest.disk_bytes, &bake.files)?;
        Ok(Self { is_bake: true, ..opened })
    }

    /// `key`: see [`snapshot_key`].
    pub(crate) fn of_store(
        key: String,
        spec: MachineSpec,
        saved: &store::saved_machine::SavedMachine,
    ) -> Result<Self, Error> {
        let opened = Self::open(key, spec, saved.manifest.disk_bytes, &saved.files)?;
        Ok(Self { read_pages: Mutex::new(saved.manifest.read_pages.clone()), ..opened })
    }

    fn open(key: String, spec: MachineSpec, disk_bytes: u64, files: &Files) -> Result<Self, Error> {
        let open = |path: PathBuf| File::open(path).map_err(Error::internal);
        let (memory, state, rootfs) =
            (open(files.memory())?, open(files.state())?, open(files.rootfs())?);
        let memory_path = files.memory();
        let metadata = memory.metadata().map_err(Error::internal)?;
        let identity = format!("{key} in {}:{}", metadata.dev(), metadata.ino());
        Ok(Self {
            key,
            spec,
            disk_bytes,
            memory_path,
            memory,
            state,
            rootfs,
            identity,
            is_bake: false,
            read_pages: Mutex::default(),
        })
    }

    /// Of the very files, not of their name: the same while anything is started from them.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// No instant of anyone's sandbox: it may run on before it is handed out.
    pub(crate) fn is_bake(&self) -> bool {
        self.is_bake
    }

    pub(crate) fn is_there(&self) -> bool {
        self.memory_path.exists()
    }

    /// Opened for reading only: clones map it privately.
    pub(crate) fn memory(&self) -> Result<File, Error> {
        reopened(&self.memory)
    }

    /// Once: whoever is started from it again finds them in the kernel's cache. It is only a matter of time.
    pub(crate) async fn fetch_memory(&self) {
        let pages = std::mem::take(&mut *locked(&self.read_pages));
        if pages.is_empty() {
            return;
        }
        if let Ok(memory) = self.memory() {
            let fetching = move || store::saved_machine::fetch(&memory, &pages);
            let _ = tokio::task::spawn_blocking(fetching).await;
        }
    }

    pub(crate) fn state(&self) -> Result<File, Error> {
        reopened(&self.state)
    }

    /// To be cloned, while this lives.
    pub(crate) fn rootfs(&self) -> PathBuf {
        path_of(&self.rootfs)
    }
}

/// With a position of its own.
fn reopened(file: &File) -> Result<File, Error> {
    File::open(path_of(file)).map_err(Error::internal)
}

/// Also of a file that has lost its name.
fn path_of(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

pub(crate) fn snapshot_key(id: &SnapshotId) -> String {
    format!("snapshot {id}")
}

#[cfg(test)]
mod tests {
    use std::{fs, io::Read};

    use machine::{Accelerator, Shape};

    use super::*;

    #[test]
    fn what_is_made_again_under_the_same_key_is_another_machine() {
        let directory = tempfile::tempdir().unwrap();
        let files = Files::of(directory.path());
        let shape = Shape { cpus: 1, memory_mib: 512 };
        let spec = MachineSpec { shape, accelerator: Accelerator::Tcg };
        let make = |content: &str| {
            for path in [files.memory(), files.state(), files.rootfs()] {
                let draft = path.with_extension("draft");
                fs::write(&draft, content).unwrap();
                fs::rename(draft, path).unwrap();
            }
            SavedMachine::open("key".to_owned(), spec, 0, &files).unwrap()
        };
        let read = |mut file: File| {
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            text
        };
        let first = make("first");
        let again = SavedMachine::open("key".to_owned(), spec, 0, &files).unwrap();
        assert_eq!(first.identity(), again.identity());
        let second = make("second");
        assert_ne!(first.identity(), second.identity());
        // Each time from its beginning.
        for _ in 0..2 {
            let all = [first.memory().unwrap(), first.state().unwrap()];
            assert_eq!(all.map(read), ["first", "first"]);
        }
        assert_eq!(fs::read_to_string(first.rootfs()).unwrap(), "first");
        assert_eq!(fs::read_to_string(second.rootfs()).unwrap(), "second");
    }
}
