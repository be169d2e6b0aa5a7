//! A server's start: the rows are the truth. Running machines are found again, half-made ones are removed, and
//! directories, namespaces and processes that no row names are given back.

use std::{collections::BTreeSet, sync::Arc};

use machine::Hypervisor;

use super::{
    Sandboxes,
    driver::{ANSWER_DEADLINE, Inside},
    exec::watch_again,
    registry::{Entry, locked},
    state::{State, Target},
};
use crate::{Error, db::SandboxRow};

impl Sandboxes {
    /// Before the first request. Then one driver for each row, expiry, and the pool's filling are under way.
    ///
    /// # Errors
    /// The database cannot be read, or the directories cannot.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), Error> {
        let rows = self.db.all_sandboxes().await?;
        let mut kept = BTreeSet::new();
        let ids: Vec<_> = rows.iter().map(|row| row.id).collect();
        for row in rows {
            let entry = Arc::new(Entry::new(row));
            if let Some(slot) = self.find_again(&entry).await {
                kept.insert(slot);
            }
            self.registry.insert(&entry);
            self.tasks.spawn(Arc::clone(self).drive(entry, None));
        }
        self.sites.remove_leftovers(&kept).await?;
        store::sandbox_files::remove_all_but(&self.sites.layout, &ids).map_err(Error::internal)?;
        store::sweep::temporary(&self.sites.layout).map_err(Error::internal)?;
        self.tasks.spawn(Arc::clone(self).delete_expired());
        self.tasks.spawn(Arc::clone(&self.pool).keep_filled());
        self.tasks.spawn(Arc::clone(self).watch_room());
        Ok(())
    }

    /// The slot, when its machine still runs and answers.
    async fn find_again(&self, entry: &Entry) -> Option<u16> {
        let row = entry.row();
        let (State::Running, Target::Running, Some(slot)) = (row.state, row.target, row.slot)
        else {
            return None;
        };
        match self.adopt(slot).await {
            Ok(inside) => {
                tracing::info!(sandbox = %row.id, "found running");
                if let Err(error) = watch_again(&inside.guest, &entry.logs).await {
                    tracing::warn!(sandbox = %row.id, %error, cause = error.causes(), "commands of before are not in the log");
                }
                *locked(&entry.inside) = Some(Arc::new(inside));
                Some(slot)
            }
            Err(error) => {
                tracing::warn!(sandbox = %row.id, %error, cause = error.causes(), "a running sandbox is gone");
                self.note_lost(entry, &row).await;
                None
            }
        }
    }

    async fn adopt(&self, slot: u16) -> Result<Inside, Error> {
        let site = self.sites.adopt(slot).await?;
        let machine =
            Hypervisor::adopt(&site.place_without_tap()).await.map_err(Error::internal)?;
        let guest = machine.connect_guest(ANSWER_DEADLINE).await.map_err(Error::internal)?;
        Ok(Inside::new(machine, guest, site))
    }

    async fn note_lost(&self, entry: &Entry, row: &SandboxRow) {
        entry.change(|row| {
            row.state = State::Failed;
            row.slot = None;
            row.error = Some("its virtual machine ended while no server ran".to_owned());
        });
        if let Err(error) = self.db.update_sandbox(&entry.row()).await {
            tracing::warn!(sandbox = %row.id, cause = error.causes(), "failed to write a sandbox's row");
        }
    }
}
