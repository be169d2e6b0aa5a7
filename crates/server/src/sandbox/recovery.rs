//! A server's start: the rows are the truth. Running machines are found again, half-made ones are removed, and
//! directories, namespaces and processes that no row names are given back.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use api::{ErrorCode, SandboxId};
use futures::StreamExt;
use machine::{Hypervisor, Machine};
use store::Layout;

use super::{
    Sandboxes,
    driver::Inside,
    network,
    pausing::hold_ttl,
    registry::{self, Entry, locked},
    state::{State, Target},
};
use crate::Error;

/// Each keeps a core busy for a moment.
const ADOPTED_AT_ONCE: usize = 16;
/// A guest that is busy, on a host that just starts, is not one that is lost.
const FOUND_AGAIN_DEADLINE: Duration = Duration::from_secs(60);
const SILENT: &str = "its guest did not answer when the server was started anew";
/// Tries of a write for which there was no room.
const RUN_ON_EVERY: Duration = Duration::from_millis(20);

/// Which start of the host it is, and which it was for the server before.
struct Boot {
    now: String,
    before: Option<String>,
}

impl Boot {
    fn look(layout: &Layout) -> Result<Self, Error> {
        let now = machine::host_boot_id().map_err(Error::internal)?;
        let before = match std::fs::read_to_string(layout.boot_id()) {
            Ok(text) => Some(text.trim().to_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::internal(error)),
        };
        Ok(Self { now, before })
    }

    fn is_another(&self) -> bool {
        self.before.as_ref().is_some_and(|before| *before != self.now)
    }

    fn why_lost(&self) -> &'static str {
        if self.is_another() {
            "the host was restarted, and virtual machines do not survive that"
        } else {
            "its virtual machine ended while no server ran"
        }
    }

    /// Only once the rows say what that means for them. A torn file only makes the reason vaguer.
    fn write_down(&self, layout: &Layout) -> Result<(), Error> {
        if self.before.as_ref() == Some(&self.now) {
            return Ok(());
        }
        std::fs::write(layout.boot_id(), format!("{}\n", self.now)).map_err(Error::internal)
    }
}

impl Sandboxes {
    /// Before the first request. Then one driver for each row, expiry, and the pool's filling are under way.
    ///
    /// # Errors
    /// The database cannot be read, or the directories cannot.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), Error> {
        fault::point!("sweep.rows_reading", Error::internal);
        let rows = self.db.all_sandboxes().await?;
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        self.refuse_a_foreign_database(&ids).await?;
        let boot = Boot::look(&self.sites.layout)?;
        let entries: Vec<_> = rows.into_iter().map(|row| Arc::new(self.entry(row))).collect();
        let attachments = self.db.all_attachments().await?;
        for entry in &entries {
            let id = entry.look(|row| row.id);
            entry.set_volumes(
                attachments.iter().filter(|held| held.sandbox == id).cloned().collect(),
            );
        }
        self.recover_execs(&entries).await?;
        // At once: a guest that does not answer must not keep the others waiting.
        let kept: BTreeSet<u16> = futures::stream::iter(&entries)
            .map(|entry| self.find_again(entry, &boot))
            .buffer_unordered(ADOPTED_AT_ONCE)
            .filter_map(std::future::ready)
            .collect()
            .await;
        boot.write_down(&self.sites.layout)?;
        for entry in entries {
            self.registry.insert(&entry);
        }
        self.sites.remove_leftovers(&kept).await?;
        // Their machines are dead now.
        for entry in self.registry.all() {
            let state = entry.look(|row| row.state);
            if matches!(state, State::Failed | State::Stopped) {
                entry.execs.lose_all();
            }
            if state == State::Failed {
                self.release_volumes(&entry).await;
            }
        }
        self.volumes.recover(&ids).await?;
        self.db.delete_stray_events().await?;
        self.end_trees_without_children().await?;
        let snapshots = self.db.all_snapshots().await?;
        store::snapshot::remove_all_but(&self.sites.layout, &snapshots).map_err(Error::internal)?;
        fault::point!("sweep.disks_removing", Error::internal);
        store::sandbox_files::remove_all_but(&self.sites.layout, &ids).map_err(Error::internal)?;
        fault::point!("sweep.drafts_removing", Error::internal);
        store::sweep::temporary(&self.sites.layout, store::sweep::Mode::Remove)
            .map_err(Error::internal)?;
        fault::point!("sweep.swept");
        for entry in self.registry.all() {
            self.tasks.spawn(Arc::clone(self).drive(entry, None));
        }
        self.tasks.spawn(Arc::clone(self).delete_expired());
        self.tasks.spawn(Arc::clone(self).hibernate_idle());
        self.tasks.spawn(Arc::clone(self).keep_metering());
        self.tasks.spawn(Arc::clone(self).look_after_execs());
        self.tasks.spawn(Arc::clone(self).age_execs());
        self.tasks.spawn(Arc::clone(&self.pool).keep_filled());
        self.tasks.spawn(Arc::clone(self).watch_room());
        Ok(())
    }

    /// A database that was never used cannot be that of a data directory with sandboxes, which would all look like
    /// leftovers.
    async fn refuse_a_foreign_database(&self, ids: &[SandboxId]) -> Result<(), Error> {
        let is_new = ids.is_empty() && self.db.keys().await?.is_empty();
        let stored = store::sandbox_files::list(&self.sites.layout).map_err(Error::internal)?;
        if !is_new || stored.is_empty() {
            return Ok(());
        }
        let directory = self.sites.layout.sandboxes();
        Err(Error::conflict(format!(
            "the database is new, but {} has disks of {} sandboxes; give the database they belong to with --database, or remove them to begin anew",
            directory.display(),
            stored.len()
        )))
    }

    /// The slot, when its machine still runs and answers, or stands still as it should.
    async fn find_again(&self, entry: &Entry, boot: &Boot) -> Option<u16> {
        let row = entry.row();
        let (State::Running | State::Paused, Some(slot)) = (row.state, row.slot) else {
            return None;
        };
        if row.target == Target::Deleted {
            return None;
        }
        fault::point!("sweep.machine_adopting");
        match self.adopt(entry, slot).await {
            Ok(()) => {
                tracing::info!(sandbox = %row.id, state = row.state.name(), "found again");
                fault::point!("sweep.machine_adopted");
                // A hibernation or a wake was cut short after its machine had been saved, or before that was removed.
                self.forget_hibernation(entry).await;
                Some(slot)
            }
            // On its way to rest or back when server and machine ended. What volumes hold may be newer than that.
            Err(error)
                if locked(&entry.attachments).is_empty()
                    && entry.root_volume().is_none()
                    && self.hibernation_was_done(entry).await =>
            {
                tracing::info!(sandbox = %row.id, %error, "hibernated by a server that is gone");
                let now = self.clock.steady_ms();
                entry.change(|row| {
                    row.state = State::Hibernated;
                    row.target = Target::Hibernated;
                    row.slot = None;
                    hold_ttl(row, now);
                });
                self.note_row(entry).await;
                None
            }
            // It was being stopped, and what it has flushed is on its disk.
            Err(error) if row.target == Target::Stopped && (row.durable || !boot.is_another()) => {
                tracing::info!(sandbox = %row.id, %error, "stopped by a server that is gone");
                entry.change(|row| {
                    row.state = State::Stopped;
                    row.slot = None;
                });
                self.note_row(entry).await;
                None
            }
            Err(error) => {
                tracing::warn!(sandbox = %row.id, %error, cause = error.causes(), "a running sandbox is gone");
                // The machine is there, so nothing of the host is to blame.
                let is_silent = error.code == ErrorCode::Unavailable;
                let why = if is_silent { SILENT } else { boot.why_lost() };
                entry.change(|row| {
                    row.state = State::Failed;
                    row.target = Target::Stopped;
                    row.slot = None;
                    row.error = Some(why.to_owned());
                });
                self.note_row(entry).await;
                None
            }
        }
    }

    async fn adopt(&self, entry: &Entry, slot: u16) -> Result<(), Error> {
        let site = self.sites.adopt(slot, &network::policy_of(entry)?).await?;
        let machine =
            Hypervisor::adopt(&site.place_without_tap()).await.map_err(Error::internal)?;
        entry.put_inside(Inside::new(machine, site));
        let found = match entry.inside() {
            Some(inside) => tokio::select! {
                found = self.take_up(entry) => found,
                error = run_on_bit_by_bit(&inside.machine) => Err(error),
            },
            None => Err(registry::not_found()),
        };
        if found.is_err() {
            locked(&entry.inside).take();
        }
        found
    }

    /// A server may have died in the middle of a pause, a snapshot or a hibernation: the machine goes on from there.
    async fn take_up(&self, entry: &Entry) -> Result<(), Error> {
        if entry.look(|row| (row.state, row.target)) == (State::Running, Target::Stopped) {
            // It may be powering off just now. Its driver sees to the rest.
            return Ok(());
        }
        if entry.look(|row| row.state) == State::Paused {
            // Connected to when it goes on.
            return match entry.inside() {
                Some(inside) => Ok(inside.machine.stop().await?),
                None => Err(registry::not_found()),
            };
        }
        self.go_on_within(entry, FOUND_AGAIN_DEADLINE).await
    }

    async fn note_row(&self, entry: &Entry) {
        if let Err(error) = self.save_row(entry).await {
            tracing::warn!(sandbox = %entry.look(|row| row.id), cause = error.causes(), "failed to write a sandbox's row");
        }
    }
}

/// One that stands still for want of room gets far enough to answer all the same. Ends only with the machine.
async fn run_on_bit_by_bit(machine: &Machine) -> Error {
    loop {
        tokio::time::sleep(RUN_ON_EVERY).await;
        if machine.is_out_of_room()
            && let Err(error) = machine.try_writes_again().await
        {
            return Error::internal(error);
        }
    }
}
