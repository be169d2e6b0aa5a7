//! Volumes of a machine that is off: attached and detached. Who has one is settled by the database, as at a create.

use std::{sync::Arc, time::Duration};

use api::{AccountId, SandboxId, Volume, VolumeId, VolumeKind};
use machine::WRITABLE_SLOTS;
use tokio::sync::MutexGuard;

use super::{
    Sandboxes,
    registry::{Entry, locked},
    state::{RootDisk, Wish},
};
use crate::{
    Error,
    db::{AttachmentRow, ROOT_SLOT, VolumeRow},
    volume::taken,
};

/// For whatever else is just being done to the machine.
const TURN: Duration = Duration::from_secs(25);

impl Entry {
    pub(super) fn has_volume(&self, id: &VolumeId) -> bool {
        self.root_volume() == Some(*id)
            || locked(&self.attachments).iter().any(|held| held.volume == *id)
    }

    /// All that it has, as the rows say.
    pub(super) fn set_volumes(&self, mut rows: Vec<AttachmentRow>) {
        rows.sort_unstable_by_key(|row| row.slot);
        let root = rows.iter().position(|row| row.slot == ROOT_SLOT).map(|at| rows.remove(at));
        *locked(&self.root_volume) = root.map(|row| row.volume);
        *locked(&self.attachments) = rows;
    }

    fn add_volume(&self, row: AttachmentRow) {
        if row.slot == ROOT_SLOT {
            *locked(&self.root_volume) = Some(row.volume);
        } else {
            let mut held = locked(&self.attachments);
            held.push(row);
            held.sort_unstable_by_key(|row| row.slot);
        }
    }
}

impl Sandboxes {
    /// Behind the next slot of a machine that is off: the first is `/dev/vdb`. A root disk becomes that of a machine without
    /// one. Idempotent.
    ///
    /// # Errors
    /// 404 when one of the two is not theirs or gone; 409 names another holder, or says to stop the machine first; 400 when
    /// there is no slot left.
    pub async fn attach_volume(
        self: &Arc<Self>,
        account: &AccountId,
        volume: &str,
        machine: &SandboxId,
    ) -> Result<Volume, Error> {
        let row = self.volumes.find(account, volume).await?;
        let entry = self.registry.find(account, machine)?;
        if !entry.has_volume(&row.id) {
            let (sandboxes, row) = (Arc::clone(self), row.clone());
            // Goes on to its end when whoever asked has gone: the machine is told of what it has.
            let task = self.tasks.spawn(async move { sandboxes.attach(&entry, row).await });
            task.await.map_err(Error::internal)??;
        }
        self.volumes.get(account, &row.id.to_string()).await
    }

    async fn attach(&self, entry: &Entry, row: VolumeRow) -> Result<(), Error> {
        super::managed::refuse(entry)?;
        let _turn = self.turn_at_disks(entry).await?;
        if entry.has_volume(&row.id) {
            return Ok(());
        }
        entry.accept(Wish::Disks, self.clock.steady_ms())?;
        let becomes_root = row.kind == VolumeKind::Root && entry.root_disk() == RootDisk::None;
        let held = AttachmentRow {
            volume: row.id,
            sandbox: entry.look(|row| row.id),
            slot: if becomes_root { ROOT_SLOT } else { next_slot(entry)? },
            read_only: false,
            mount_path: String::new(),
            name: row.name,
        };
        fault::point!("attach.claiming", Error::internal);
        self.volumes.claim(std::slice::from_ref(&held)).await?;
        fault::point!("attach.claimed");
        entry.add_volume(held);
        if becomes_root {
            entry.change(|entry| entry.disk_mb = row.size_bytes >> 20);
            self.write_down(entry).await;
        }
        Ok(())
    }

    /// From a machine that is off; without a name, from whichever has it. What it holds is in order then. Idempotent.
    ///
    /// # Errors
    /// 404 when one of the two is not theirs or gone; 409 when another machine has it, or says to stop the machine first.
    pub async fn detach_volume(
        self: &Arc<Self>,
        account: &AccountId,
        volume: &str,
        machine: Option<&SandboxId>,
    ) -> Result<Volume, Error> {
        let row = self.volumes.find(account, volume).await?;
        let holders = self.volumes.holders(&row.id).await?;
        let machine = match (machine, holders.as_slice()) {
            (Some(machine), _) => *machine,
            (None, []) => return self.volumes.get(account, volume).await,
            (None, [holder]) => *holder,
            (None, [..]) => {
                return Err(Error::invalid(
                    "`machine_id` is missing: several have this volume for reading",
                ));
            }
        };
        let entry = self.registry.find(account, &machine)?;
        if entry.has_volume(&row.id) {
            let (sandboxes, id) = (Arc::clone(self), row.id);
            let task = self.tasks.spawn(async move { sandboxes.detach(&entry, &id).await });
            task.await.map_err(Error::internal)??;
        } else if let Some(other) = holders.first() {
            return Err(taken(other));
        }
        self.volumes.get(account, &row.id.to_string()).await
    }

    async fn detach(&self, entry: &Entry, volume: &VolumeId) -> Result<(), Error> {
        super::managed::refuse(entry)?;
        let _turn = self.turn_at_disks(entry).await?;
        if !entry.has_volume(volume) {
            return Ok(());
        }
        entry.accept(Wish::Disks, self.clock.steady_ms())?;
        let is_read_only =
            locked(&entry.attachments).iter().any(|held| held.volume == *volume && held.read_only);
        if !is_read_only {
            self.volumes.put_in_order(volume).await;
        }
        fault::point!("detach.releasing", Error::internal);
        let left = self.volumes.release(volume, &entry.look(|row| row.id)).await?;
        fault::point!("detach.released");
        let had_root = entry.root_volume();
        entry.set_volumes(left);
        if had_root.is_some() && entry.root_volume().is_none() {
            // It counts as a volume of its own now.
            entry.change(|row| row.disk_mb = 0);
            self.write_down(entry).await;
        }
        Ok(())
    }

    /// Neither a start, a stop nor a delete is under way while the answer is held.
    async fn turn_at_disks<'a>(&self, entry: &'a Entry) -> Result<[MutexGuard<'a, ()>; 2], Error> {
        let both = async { [entry.requests.lock().await, entry.turn.lock().await] };
        tokio::time::timeout(TURN, both).await.map_err(|_| {
            Error::busy("something else is just being done to the machine; try again shortly", 2)
        })
    }
}

fn next_slot(entry: &Entry) -> Result<u8, Error> {
    let written = locked(&entry.attachments).iter().filter(|held| !held.read_only).count();
    match u8::try_from(written) {
        Ok(slot) if written < WRITABLE_SLOTS => Ok(slot),
        Ok(_) | Err(_) => Err(Error::invalid(format!(
            "a machine can have {WRITABLE_SLOTS} volumes beside its root disk; detach one first"
        ))),
    }
}
