//! Instants of a sandbox that are gone as soon as others have begun at them. No row names one and nothing of it is flushed
//! to the disk: it goes with whoever holds it, and is swept when the server dies. What is started from one clones its disk,
//! and a clone's first flush brings what it shares to the disk as well.

use std::{path::PathBuf, sync::Arc};

use api::{AccountId, SandboxId, SnapshotId, VolumeId};
use machine::{WriteBack, guest::Request};
use store::{saved_machine::SavedMachineDraft, volume::RootDraft};

use super::{
    Sandboxes,
    create::DatabaseBeginning,
    pausing::QUIESCE_DEADLINE,
    registry::{self, Entry},
    saved::SavedMachine,
    saving::sync_ahead,
    snapshots::{Caught, or_its_end},
    state::State,
};
use crate::{
    Error,
    account::Plan,
    blocking::blocking,
    db::{SnapshotRow, VolumeRow},
};

/// Memory and disk. To be ended by [`Sandboxes::end_passing`].
pub(crate) struct PassingInstant {
    /// As it would be of a snapshot.
    pub(super) row: SnapshotRow,
    pub(super) saved: Arc<SavedMachine>,
    /// Its files go with it.
    _draft: SavedMachineDraft,
}

impl PassingInstant {
    pub(crate) fn beginning(&self) -> DatabaseBeginning {
        DatabaseBeginning::Instant(self.row.clone(), Arc::clone(&self.saved))
    }
}

impl Sandboxes {
    /// The sandbox goes on, whether this works or not, also when whoever asked has gone.
    ///
    /// # Errors
    /// As [`Sandboxes::snapshot`].
    pub(super) async fn catch_passing(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: SnapshotId,
    ) -> Result<PassingInstant, Error> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = self.tasks.spawn(async move {
            let Caught { row, draft, manifest } =
                sandboxes.catch(&entry, id, WriteBack::Later).await?;
            fault::point!("fork.caught", Error::internal);
            let stored = draft.unpublished(manifest).map_err(Error::internal)?;
            let saved = sandboxes.to_start_from(&id, &stored)?;
            Ok(PassingInstant { row, saved, _draft: draft })
        });
        task.await.map_err(Error::internal)?
    }

    /// What was started from it has all that it needs.
    pub(crate) async fn end_passing(&self, instant: PassingInstant) {
        self.pool.forget(&instant.saved.key).await;
        // A memory of gigabytes takes a moment to be given back.
        let ended = tokio::task::spawn_blocking(move || drop(instant)).await;
        if let Err(error) = ended {
            tracing::error!(%error, "failed to remove a passing instant");
        }
    }

    /// The disk of a sandbox as it is now, as a volume to boot from, in place of one that an earlier attempt has left. The
    /// sandbox goes on, after it has stood still for as long as a clone of its disk takes.
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
        let sandboxes = Arc::clone(self);
        let task = self.tasks.spawn(async move {
            let in_use = entry.usage.begin();
            let turn = sandboxes.turn_for_snapshot(&entry).await?;
            let draft = or_its_end(&entry, sandboxes.catch_disk(&entry).await).await?;
            drop((turn, in_use));
            let (account, template, disk_mb) =
                entry.look(|row| (row.account.clone(), row.template.clone(), row.disk_mb));
            let root = sandboxes.root_row(volume, account, template, disk_mb)?;
            let layout = sandboxes.sites.layout.clone();
            blocking(move || draft.publish(&layout, &volume).map(drop)).await?;
            if let Err(error) = sandboxes.db.insert_volume(&root, &Plan::unlimited()).await {
                let layout = sandboxes.sites.layout.clone();
                blocking(move || store::volume::remove(&layout, &volume)).await?;
                return Err(error);
            }
            Ok(root)
        });
        task.await.map_err(Error::internal)?
    }

    async fn catch_disk(&self, entry: &Entry) -> Result<RootDraft, Error> {
        self.admit_bytes(0)?;
        let (state, bytes) = entry.look(|row| (row.state, row.disk_mb << 20));
        let clone = |source: PathBuf| {
            let layout = self.sites.layout.clone();
            blocking(move || store::volume::draft_root(&layout, &source, bytes))
        };
        match state {
            State::Hibernated => {
                let files = self.files(entry);
                let saved = blocking(move || files.hibernation()).await?;
                let saved =
                    saved.ok_or_else(|| Error::internal("a hibernated machine is missing"))?;
                clone(saved.files.rootfs()).await
            }
            // Quiet since it stands still.
            State::Paused => clone(self.root(entry)?.path()).await,
            State::Running => {
                let source = self.root(entry)?.path();
                let inside = entry.inside().ok_or_else(registry::not_found)?;
                let guest = entry.guest().ok_or_else(registry::not_found)?;
                sync_ahead(entry, &guest).await;
                inside.machine.flush_disks().await?;
                let still = async {
                    guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
                    // A quiet guest goes on by itself in the end.
                    inside.machine.stop().await?;
                    clone(source).await
                };
                let cloned = still.await;
                let after = self.go_on(entry).await;
                // The first that went wrong is the reason.
                let draft = cloned?;
                after?;
                Ok(draft)
            }
            // Since its turn was asked for.
            State::Creating | State::Stopped | State::Failed => {
                Err(Error::busy("its machine has just ended; try again shortly", 2))
            }
        }
    }
}
