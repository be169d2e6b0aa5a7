//! Hibernation: memory and disk lie in the sandbox's directory, no process is left, volumes stay its own.
//!
//! Waking restores a clone of what was saved, and that is only removed once the sandbox runs: whatever dies in between,
//! one of the two is whole.

use std::sync::Arc;

use api::EventKind;
use machine::WriteBack;
use store::sandbox_files::SandboxFiles;

use super::{
    Sandboxes,
    bake::BAKE_PATIENCE as WAKE_PATIENCE,
    capacity::Need,
    driver::Inside,
    pausing::{hold_ttl, release_ttl},
    pool::Started,
    registry::{Entry, locked},
    saved::SavedMachine,
    state::State,
    volumes::Volumes,
};
use crate::{Error, blocking::blocking};

impl Sandboxes {
    pub(super) fn files(&self, entry: &Entry) -> SandboxFiles {
        SandboxFiles::of(&self.sites.layout, &entry.look(|row| row.id))
    }

    pub(super) async fn hibernate_machine(self: &Arc<Self>, entry: &Entry) -> Result<(), Error> {
        let files = self.files(entry);
        let draft = {
            let files = files.clone();
            blocking(move || files.hibernation_draft()).await?
        };
        // Volumes stay mounted: nobody else gets them meanwhile.
        let was_paused = entry.look(|row| row.state) == State::Paused;
        let begun = self.begin_to_save(entry, draft, WriteBack::Now).await?;
        let saved = async {
            let (draft, manifest) = self.save_machine(entry, begun).await?;
            fault::point!("hibernate.publishing", Error::internal);
            blocking(move || draft.publish(manifest)).await
        };
        if let Err(error) = saved.await {
            if !was_paused {
                self.go_on(entry).await?;
            }
            return Err(error);
        }
        entry.execs.write_out().await;
        let now = self.clock.steady_ms();
        self.tell(entry, EventKind::Hibernated, None);
        entry.change(|row| {
            row.state = State::Hibernated;
            row.slot = None;
            hold_ttl(row, now);
        });
        fault::point!("hibernate.row_writing");
        // Before the process ends: without the row, an ended process is a loss.
        self.write_down(entry).await;
        fault::point!("hibernate.machine_ending");
        let gone = self.past_traffic.take_inside(entry);
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            site.end_machine().await;
            self.tasks.spawn(site.remove_network());
        }
        fault::point!("hibernate.disk_removing");
        // A machine's own stays where it is, as it is: a volume.
        blocking(move || files.remove_rootfs()).await.unwrap_or_else(|error| {
            tracing::warn!(%error, cause = error.causes(), "failed to remove the disk of a sandbox that hibernates");
        });
        Ok(())
    }

    pub(super) async fn wake_machine(&self, entry: &Entry) -> Result<(), Error> {
        let files = self.files(entry);
        let stored = {
            let files = files.clone();
            blocking(move || files.hibernation()).await?
        };
        let stored =
            stored.ok_or_else(|| Error::internal("a hibernated sandbox without its files"))?;
        let spec = self.spec_of(&stored.manifest)?;
        let saved = SavedMachine::of_store(String::new(), spec, &stored)?;
        self.root(entry)?;
        fault::point!("wake.restoring", Error::internal);
        let need = Need::of_clone(entry.look(|row| row.memory_mb) << 20);
        let _admitted = self.admit(need, WAKE_PATIENCE).await?;
        let Started { site, prepared } = self.pool.start(&saved).await?;
        let _no_other_change = entry.network_changes.lock().await;
        let loaded = async {
            let loaded = self.load_up(entry, &saved, prepared, &site, Volumes::AsTheyWere).await?;
            self.note_waking(entry, site.number()).await?;
            Ok(loaded)
        };
        let loaded = match loaded.await {
            Ok(loaded) => loaded,
            Err(error) => {
                site.remove().await;
                return Err(error);
            }
        };
        let machine = match self.set_going(entry, loaded).await {
            Ok(machine) => machine,
            Err(error) => {
                site.remove().await;
                self.note_failed_wake(entry).await;
                return Err(error);
            }
        };
        fault::point!("wake.row_writing");
        let slot = site.number();
        entry.put_inside(Inside::new(machine, site));
        let now = self.clock.steady_ms();
        self.tell(entry, EventKind::Woken, None);
        entry.change(|row| {
            row.state = State::Running;
            row.slot = Some(slot);
            release_ttl(row, now);
        });
        self.write_down(entry).await;
        fault::point!("wake.files_removing");
        blocking(move || files.remove_hibernation()).await.unwrap_or_else(|error| {
            tracing::warn!(%error, cause = error.causes(), "failed to remove what a woken sandbox had hibernated in");
        });
        self.grow_what_waits(entry).await;
        self.watch_commands(entry).await;
        Ok(())
    }

    /// Its machine has taken steps and is dead. Without volumes it can be woken anew. With one that it writes that would put
    /// back what its memory says of a file system which has changed since.
    async fn note_failed_wake(&self, entry: &Entry) {
        if locked(&entry.attachments).iter().all(|held| held.read_only) {
            return;
        }
        let reason = "it could not be woken, and its volumes may hold more than its memory knows; delete it, the volumes are free";
        self.tell(entry, EventKind::Failed, Some(reason.to_owned()));
        entry.change(|row| {
            row.state = State::Failed;
            row.error = Some(reason.to_owned());
        });
        self.write_down(entry).await;
        entry.execs.lose_all();
        self.forget_hibernation(entry).await;
        self.release_volumes(entry).await;
    }

    /// Before its first step, so that a server which dies now leaves it running: what it does from here on, to its
    /// volumes above all, is not to be done again out of what was saved.
    pub(super) async fn note_waking(&self, entry: &Entry, slot: u16) -> Result<(), Error> {
        let _writing = entry.writing.lock().await;
        let mut row = entry.row();
        row.state = State::Running;
        row.slot = Some(slot);
        release_ttl(&mut row, self.clock.steady_ms());
        self.db.update_sandbox(&row).await
    }

    /// What a server that died in the middle of it left: `true` when the sandbox hibernates all the same.
    pub(super) async fn hibernation_was_done(&self, entry: &Entry) -> bool {
        let files = self.files(entry);
        match blocking(move || files.hibernation()).await {
            Ok(found) => found.is_some(),
            Err(error) => {
                tracing::warn!(%error, cause = error.causes(), "what a sandbox hibernated in cannot be read");
                false
            }
        }
    }

    pub(super) async fn forget_hibernation(&self, entry: &Entry) {
        let files = self.files(entry);
        if let Err(error) = blocking(move || files.remove_hibernation()).await {
            tracing::warn!(%error, cause = error.causes(), "failed to remove an unfinished hibernation");
        }
    }
}

impl Entry {
    pub(super) fn put_inside(&self, inside: Inside) {
        *locked(&self.inside) = Some(Arc::new(inside));
    }
}
