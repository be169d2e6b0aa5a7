//! Root disks: a sandbox's own lies in its directory and goes with it, a machine's is a volume from its first byte on.
//! So a disk that is detached or preserved never moves.

use std::{fs::File, path::PathBuf};

use api::VolumeId;
use machine::Durability;
use store::{Layout, sandbox_files::SandboxFiles, volume::Access, volume::Recovery};

use super::{
    Sandboxes,
    registry::{Entry, locked},
    state::{Refusal, RootDisk},
};
use crate::{Error, blocking::blocking};

#[derive(Debug, Clone)]
pub(super) enum Root {
    Own(SandboxFiles),
    Volume(Layout, VolumeId),
}

impl Root {
    /// To be cloned or flushed.
    pub(super) fn path(&self) -> PathBuf {
        match self {
            Self::Own(files) => files.rootfs(),
            Self::Volume(layout, id) => store::volume::path(layout, id),
        }
    }

    pub(super) fn durability(&self) -> Durability {
        match self {
            Self::Own(_) => Durability::Throwaway,
            Self::Volume(..) => Durability::Durable,
        }
    }

    /// A clone of `source` with so many bytes, in place of what was there.
    pub(super) async fn put(&self, source: PathBuf, bytes: u64) -> Result<File, Error> {
        let root = self.clone();
        blocking(move || match root {
            Self::Own(files) => files.clone_rootfs(&source, bytes),
            Self::Volume(layout, id) => store::volume::put_root(&layout, &id, &source, bytes),
        })
        .await
    }

    /// As it is.
    pub(super) async fn open(&self) -> Result<File, Error> {
        let root = self.clone();
        blocking(move || match root {
            Self::Own(files) => files.open_rootfs(),
            Self::Volume(layout, id) => store::volume::open(&layout, &id, Access::Writable),
        })
        .await
    }

    /// Whatever its machine has written is on the host's disk then, and its file system in order, as far as that can be
    /// had without a decision. The machine has to be dead.
    pub(super) async fn recover(&self) -> Result<Recovery, Error> {
        let root = self.clone();
        blocking(move || {
            store::saved_machine::flush(&root.path())?;
            match root {
                Self::Own(files) => files.recover_rootfs(),
                Self::Volume(layout, id) => store::volume::recover(&layout, &id),
            }
        })
        .await
    }

    /// For ever; also twice. A sandbox's own goes with its directory.
    pub(super) async fn remove(&self) -> Result<(), Error> {
        match self {
            Self::Own(_) => Ok(()),
            Self::Volume(layout, id) => {
                let (layout, id) = (layout.clone(), *id);
                blocking(move || store::volume::remove(&layout, &id)).await
            }
        }
    }
}

impl Entry {
    pub(super) fn root_volume(&self) -> Option<VolumeId> {
        *locked(&self.root_volume)
    }

    pub(super) fn root_disk(&self) -> RootDisk {
        match (self.root_volume(), self.look(|row| row.durable)) {
            (Some(_), _) => RootDisk::Volume,
            (None, true) => RootDisk::None,
            (None, false) => RootDisk::Own,
        }
    }
}

impl Sandboxes {
    /// # Errors
    /// 409 when it was detached.
    pub(super) fn root(&self, entry: &Entry) -> Result<Root, Error> {
        match (entry.root_disk(), entry.root_volume()) {
            (RootDisk::Own, _) => Ok(Root::Own(self.files(entry))),
            (RootDisk::Volume, Some(id)) => Ok(Root::Volume(self.sites.layout.clone(), id)),
            (RootDisk::Volume | RootDisk::None, _) => Err(entry.refused(Refusal::NoRootDisk)),
        }
    }
}
