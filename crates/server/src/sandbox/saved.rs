//! Machines at rest, from which others are started: a bake, a snapshot, a hibernated sandbox.

use std::{fs::File, path::PathBuf};

use api::SnapshotId;
use machine::MachineSpec;
use store::bake::Bake;

use crate::Error;

/// Immutable; shared by all that are started from it.
pub(crate) struct SavedMachine {
    /// Names it among all of them.
    pub(crate) key: String,
    pub(crate) spec: MachineSpec,
    /// Of its root disk. A clone's may be larger, never smaller.
    pub(crate) disk_bytes: u64,
    memory: PathBuf,
    state: PathBuf,
    rootfs: PathBuf,
}

impl SavedMachine {
    pub(crate) fn of_bake(key: String, spec: MachineSpec, bake: &Bake) -> Self {
        Self {
            key,
            spec,
            disk_bytes: bake.manifest.disk_bytes,
            memory: bake.memory(),
            state: bake.state(),
            rootfs: bake.rootfs(),
        }
    }

    /// `key`: see [`snapshot_key`].
    pub(crate) fn of_store(
        key: String,
        spec: MachineSpec,
        saved: &store::saved_machine::SavedMachine,
    ) -> Self {
        Self {
            key,
            spec,
            disk_bytes: saved.manifest.disk_bytes,
            memory: saved.memory(),
            state: saved.state(),
            rootfs: saved.rootfs(),
        }
    }

    pub(crate) fn is_there(&self) -> bool {
        self.memory.exists()
    }

    /// Opened for reading only: clones map it privately.
    pub(crate) fn memory(&self) -> Result<File, Error> {
        File::open(&self.memory).map_err(Error::internal)
    }

    pub(crate) fn state(&self) -> Result<File, Error> {
        File::open(&self.state).map_err(Error::internal)
    }

    pub(crate) fn rootfs(&self) -> PathBuf {
        self.rootfs.clone()
    }
}

pub(crate) fn snapshot_key(id: &SnapshotId) -> String {
    format!("snapshot {id}")
}
