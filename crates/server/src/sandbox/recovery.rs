//! A server's start: the rows are the truth. Running machines are found again, half-made ones are removed, and
//! directories, namespaces and processes that no row names are given back.

use std::{collections::BTreeSet, sync::Arc};

use api::{NetworkPolicy, SandboxId};
use futures::StreamExt;
use machine::Hypervisor;
use store::Layout;

use super::{
    Sandboxes,
    driver::{ANSWER_DEADLINE, Inside},
    exec::watch_again,
    network,
    registry::{Entry, locked},
    state::{State, Target},
};
use crate::{Error, db::SandboxRow};

/// Each keeps a core busy for a moment.
const ADOPTED_AT_ONCE: usize = 16;

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

    fn why_lost(&self) -> &'static str {
        if self.before.as_ref().is_some_and(|before| *before != self.now) {
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
        let entries: Vec<_> = rows.into_iter().map(|row| Arc::new(Entry::new(row))).collect();
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
            self.tasks.spawn(Arc::clone(self).drive(entry, None));
        }
        self.sites.remove_leftovers(&kept).await?;
        fault::point!("sweep.disks_removing", Error::internal);
        store::sandbox_files::remove_all_but(&self.sites.layout, &ids).map_err(Error::internal)?;
        fault::point!("sweep.drafts_removing", Error::internal);
        store::sweep::temporary(&self.sites.layout, store::sweep::Mode::Remove)
            .map_err(Error::internal)?;
        fault::point!("sweep.swept");
        self.tasks.spawn(Arc::clone(self).delete_expired());
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

    /// The slot, when its machine still runs and answers.
    async fn find_again(&self, entry: &Entry, boot: &Boot) -> Option<u16> {
        let row = entry.row();
        let (State::Running, Target::Running, Some(slot)) = (row.state, row.target, row.slot)
        else {
            return None;
        };
        fault::point!("sweep.machine_adopting");
        match self.adopt(slot, &row.network).await {
            Ok(inside) => {
                tracing::info!(sandbox = %row.id, "found running");
                if let Err(error) = watch_again(&inside.guest, &entry.logs).await {
                    tracing::warn!(sandbox = %row.id, %error, cause = error.causes(), "commands of before are not in the log");
                }
                *locked(&entry.inside) = Some(Arc::new(inside));
                fault::point!("sweep.machine_adopted");
                Some(slot)
            }
            Err(error) => {
                tracing::warn!(sandbox = %row.id, %error, cause = error.causes(), "a running sandbox is gone");
                self.note_lost(entry, &row, boot.why_lost()).await;
                None
            }
        }
    }

    async fn adopt(&self, slot: u16, policy: &NetworkPolicy) -> Result<Inside, Error> {
        let site = self.sites.adopt(slot, &network::for_machine(policy)?).await?;
        let machine =
            Hypervisor::adopt(&site.place_without_tap()).await.map_err(Error::internal)?;
        let guest = machine.connect_guest(ANSWER_DEADLINE).await.map_err(Error::internal)?;
        Ok(Inside::new(machine, guest, site))
    }

    async fn note_lost(&self, entry: &Entry, row: &SandboxRow, why: &str) {
        entry.change(|row| {
            row.state = State::Failed;
            row.slot = None;
            row.error = Some(why.to_owned());
        });
        if let Err(error) = self.db.update_sandbox(&entry.row()).await {
            tracing::warn!(sandbox = %row.id, cause = error.causes(), "failed to write a sandbox's row");
        }
    }
}
