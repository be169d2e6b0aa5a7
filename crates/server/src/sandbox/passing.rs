//! Instants of a sandbox that are gone as soon as others have begun at them. No row names one and nothing of it is flushed
//! to the disk: it goes with whoever holds it, and is swept when the server dies. What is started from one clones its disk,
//! and a clone's first flush brings what it shares to the disk as well.

use std::{path::PathBuf, sync::Arc};

use api::{AccountId, SandboxId, SnapshotId, VolumeId, VolumeKind};
use machine::{WriteBack, guest::Request};
use store::saved_machine::SavedMachineDraft;

use super::{
    Sandboxes,
    create::DatabaseBeginning,
    pausing::QUIESCE_DEADLINE,
    registry::{self, Entry},
    saved::SavedMachine,
    snapshots::Caught,
    state::State,
};
use crate::{
    Error,
    account::Plan,
    blocking::blocking,
    db::{SnapshotRow, VolumeRow},
};

/// Memory and disk. To be ended by [`Sandboxes::end_passing`].
pub(crate) struct Passing {
    /// As it would be of a snapshot.
    pub(super) row: SnapshotRow,
    pub(super) saved: Arc<SavedMachine>,
    /// Its files go with it.
    _draft: SavedMachineDraft,
}

impl Passing {
    pub(crate) fn beginning(&self) -> DatabaseBeginning {
        DatabaseBeginning::Instant(self.row.clone(), Arc::clone(&self.saved))
    }
}

impl Sandboxes {
    /// The sandbox goes on, whether this works or not, also when whoever asked has gone.
    ///
    /// # Errors
    /// As [`Sandboxes::snapshot`].
    pub(super) async fn passing(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: SnapshotId,
    ) -> Result<Passing, Error> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = self.tasks.spawn(async move {
            let Caught { row, draft, manifest } =
                sandboxes.catch(&entry, id, WriteBack::Later).await?;
            fault::point!("fork.caught", Error::internal);
            let stored = draft.unpublished(manifest).map_err(Error::internal)?;
            let saved = sandboxes.to_start_from(&id, &stored)?;
            Ok(Passing { row, saved, _draft: draft })
        });
        task.await.map_err(Error::internal)?
    }

    /// What was started from it has all that it needs.
    pub(crate) async fn end_passing(&self, passing: Passing) {
        self.pool.forget(&passing.saved.key).await;
        // A memory of gigabytes takes a moment to be given back.
        let ended = tokio::task::spawn_blocking(move || drop(passing)).await;
        if let Err(error) = ended {
            tracing::error!(%error, "failed to remove a passing snapshot");
        }
    }

    /// The disk of a sandbox as it is now, as a volume to boot from, in place of one that an earlier attempt has left. The
    /// sandbox goes on; what stands still is quiet for as long as a clone of its disk takes.
    ///
    /// # Errors
    /// As [`Sandboxes::snapshot`].
    pub(crate) async fn root_of(
        self: &Arc<Self>,
        account: &AccountId,
        id: &SandboxId,
        volume: VolumeId,
    ) -> Result<VolumeRow, Error> {
        let entry = self.registry.find(account, id)?;
        self.forget_root(account, volume).await?;
        let sandboxes = Arc::clone(self);
        let task = self.tasks.spawn(async move {
            let in_use = entry.usage.begin();
            let turn = sandboxes.turn_for_snapshot(&entry).await?;
            let layout = sandboxes.sites.layout.clone();
            // Nothing is published under this name.
            let passing = SnapshotId::random();
            let draft = blocking(move || store::snapshot::draft(&layout, &passing)).await?;
            let draft = sandboxes.catch_disk(&entry, draft).await?;
            let (template, disk_mb) = entry.look(|row| (row.template.clone(), row.disk_mb));
            drop((turn, in_use));
            let root = VolumeRow {
                id: volume,
                account: entry.look(|row| row.account.clone()),
                name: format!("root-{volume}").parse().map_err(Error::internal)?,
                kind: VolumeKind::Root,
                size_bytes: disk_mb << 20,
                created_at: sandboxes.clock.now_ms(),
                template: Some(template),
            };
            let (layout, bytes) = (sandboxes.sites.layout.clone(), root.size_bytes);
            blocking(move || {
                store::volume::put_root(&layout, &volume, &draft.files().rootfs(), bytes)
            })
            .await?;
            sandboxes.db.insert_volume(&root, &Plan::unlimited()).await?;
            Ok(root)
        });
        task.await.map_err(Error::internal)?
    }

    async fn catch_disk(
        &self,
        entry: &Entry,
        draft: SavedMachineDraft,
    ) -> Result<SavedMachineDraft, Error> {
        self.admit_bytes(0)?;
        let state = entry.look(|row| row.state);
        let clone = |source: PathBuf, draft: SavedMachineDraft| {
            blocking(move || draft.clone_rootfs(&source).map(|()| draft))
        };
        if state == State::Hibernated {
            let files = self.files(entry);
            let saved = blocking(move || files.hibernation()).await?;
            let saved = saved.ok_or_else(|| Error::internal("a hibernated machine is missing"))?;
            return clone(saved.files.rootfs(), draft).await;
        }
        let source = self.root(entry)?.path();
        if state != State::Running {
            // Quiet since it stands still.
            return clone(source, draft).await;
        }
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        let guest = entry.guest().ok_or_else(registry::not_found)?;
        // Less is left to be written when its processes stand still. If it fails, so will that.
        if let Err(error) = guest.call(Request::Sync, QUIESCE_DEADLINE).await {
            tracing::debug!(%error, "a guest has not flushed its disks");
        }
        inside.machine.flush_disks().await?;
        let cloned = match guest.call(Request::Quiesce, QUIESCE_DEADLINE).await {
            Ok(_) => clone(source, draft).await,
            Err(error) => Err(error.into()),
        };
        self.go_on(entry).await?;
        cloned
    }
}
