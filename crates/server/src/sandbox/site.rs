//! Where a machine lives on this host: a slot, and by it a uid, a network namespace and a directory.

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    ops::RangeInclusive,
    sync::{Arc, Mutex},
};

use machine::{
    Place, kill_all_of,
    network::{Gate, Namespace, Networks, Policy},
};
use store::Layout;

use super::registry::locked;
use crate::Error;

/// As many as an instance has uids and addresses.
const SLOTS: u16 = 1024;
const UIDS_FROM: u32 = 1_900_000_000;

/// Of an instance's machines, in the order of their slots.
pub(crate) fn uids(instance: u16) -> RangeInclusive<u32> {
    let first = UIDS_FROM + u32::from(instance) * u32::from(SLOTS);
    first..=first + u32::from(SLOTS) - 1
}

/// Whose machines [`uids`] has this one for.
pub(crate) fn instance_of(uid: u32) -> Option<u16> {
    u16::try_from(uid.checked_sub(UIDS_FROM)? / u32::from(SLOTS)).ok()
}

/// Which slots are taken. A slot is given back when it is dropped.
#[derive(Debug, Default, Clone)]
pub(crate) struct Slots {
    taken: Arc<Mutex<BTreeSet<u16>>>,
}

#[derive(Debug)]
pub(crate) struct Slot {
    number: u16,
    slots: Slots,
}

impl Slots {
    pub(crate) fn take(&self) -> Option<Slot> {
        let number = { (0..SLOTS).find(|number| !locked(&self.taken).contains(number))? };
        self.take_this(number).or_else(|| self.take())
    }

    /// For a machine that has it already.
    pub(crate) fn take_this(&self, number: u16) -> Option<Slot> {
        locked(&self.taken).insert(number).then(|| Slot { number, slots: self.clone() })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        locked(&self.slots.taken).remove(&self.number);
    }
}

/// What every site is made from.
#[derive(Clone)]
pub(crate) struct Sites {
    pub(crate) layout: Layout,
    pub(crate) networks: Arc<Networks>,
    pub(crate) slots: Slots,
    pub(crate) instance: u16,
}

/// Belongs to one machine. [`Site::remove`] gives everything back; a site that is only dropped leaves its files and
/// namespace to the next start's recovery.
pub(crate) struct Site {
    slot: Slot,
    namespace: Namespace,
    layout: Layout,
    uid: u32,
}

impl Sites {
    /// A fresh one, with an empty directory.
    pub(crate) async fn prepare(&self) -> Result<Site, Error> {
        let slot = self.slots.take().ok_or_else(|| {
            Error::busy("the host runs as many machines as it can; delete some", 5)
        })?;
        fault::point!("create.site_making", Error::internal);
        store::machine_files::create(&self.layout, slot.number).map_err(Error::from_store)?;
        match self.networks.prepare(slot.number).await {
            Ok(namespace) => Ok(self.site(slot, namespace)),
            Err(error) => {
                if let Err(leftover) = store::machine_files::remove(&self.layout, slot.number) {
                    tracing::error!(slot = slot.number, error = %leftover, "failed to remove a machine's files");
                }
                Err(Error::internal(error))
            }
        }
    }

    /// The site that a running machine has had since before this server started.
    pub(crate) async fn adopt(&self, number: u16, policy: &Policy) -> Result<Site, Error> {
        let slot = self
            .slots
            .take_this(number)
            .ok_or_else(|| Error::internal(format!("slot {number} is taken twice")))?;
        let namespace = self.networks.adopt(number, policy).await.map_err(Error::internal)?;
        Ok(self.site(slot, namespace))
    }

    fn site(&self, slot: Slot, namespace: Namespace) -> Site {
        Site { uid: self.uid(slot.number), slot, namespace, layout: self.layout.clone() }
    }

    pub(crate) fn uid(&self, slot: u16) -> u32 {
        uids(self.instance).start() + u32::from(slot)
    }

    /// What an earlier server left in the slots other than `kept`: processes, directories, namespaces.
    pub(crate) async fn remove_leftovers(&self, kept: &BTreeSet<u16>) -> Result<(), Error> {
        for slot in (0..SLOTS).filter(|slot| !kept.contains(slot)) {
            if store::machine_files::exists(&self.layout, slot) {
                tracing::info!(slot, "removing a leftover machine");
                fault::point!("sweep.machine_removing", Error::internal);
                kill_all_of(self.uid(slot)).await.map_err(Error::internal)?;
                store::machine_files::remove(&self.layout, slot).map_err(Error::internal)?;
            }
        }
        fault::point!("sweep.groups_removing", Error::internal);
        let uids = self.uid(0)..=self.uid(SLOTS - 1);
        let kept_uids: BTreeSet<u32> = kept.iter().map(|slot| self.uid(*slot)).collect();
        let swept = tokio::task::spawn_blocking(move || {
            machine::remove_groups(&uids, |uid| kept_uids.contains(&uid))
        });
        swept.await.map_err(Error::internal)?.map_err(Error::internal)?;
        fault::point!("sweep.networks_removing", Error::internal);
        self.networks.sweep(kept).await.map_err(Error::internal)?;
        Ok(())
    }
}

impl Site {
    pub(crate) fn number(&self) -> u16 {
        self.slot.number
    }

    pub(crate) fn address(&self) -> Ipv4Addr {
        self.namespace.host_address()
    }

    pub(crate) fn gate(&self) -> &Gate {
        self.namespace.gate()
    }

    pub(crate) fn place(&self) -> Result<Place, Error> {
        let tap = self.namespace.tap().map_err(Error::internal)?;
        Ok(Place { tap: Some(tap), ..self.place_without_tap() })
    }

    /// Of a machine that has its tap already.
    pub(crate) fn place_without_tap(&self) -> Place {
        Place { directory: self.layout.machine(self.slot.number), uid: self.uid, tap: None }
    }

    /// Ends whatever runs here, and removes files, namespace and claim on the slot. Goes on past what fails, so that
    /// one stubborn thing does not leave the others behind; the next start's recovery tries again.
    pub(crate) async fn remove(self) {
        self.end_machine().await;
        self.remove_network().await;
    }

    /// The first half of [`Site::remove`], after which nothing of the sandbox runs or is stored.
    pub(crate) async fn end_machine(&self) {
        if let Err(error) = kill_all_of(self.uid).await {
            tracing::error!(slot = self.slot.number, %error, "failed to end a virtual machine");
        }
        // A few sockets: not worth a thread of its own.
        if let Err(error) = store::machine_files::remove(&self.layout, self.slot.number) {
            tracing::error!(slot = self.slot.number, %error, "failed to remove a machine's files");
        }
    }

    /// The slow half: nobody needs to wait for it.
    pub(crate) async fn remove_network(self) {
        let Self { slot, namespace, layout: _, uid: _ } = self;
        fault::point!("delete.network_removing");
        if let Err(error) = namespace.remove().await {
            tracing::error!(slot = slot.number, %error, "failed to remove a network namespace");
        }
        fault::point!("delete.network_removed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_held_by_one_and_free_again_when_dropped() {
        let slots = Slots::default();
        let first = slots.take().unwrap();
        let second = slots.take().unwrap();
        assert_ne!(first.number, second.number);
        assert!(slots.take_this(second.number).is_none());
        drop(first);
        assert_eq!(slots.take().unwrap().number, 0);
    }

    #[test]
    fn the_last_slot_is_followed_by_none() {
        let slots = Slots::default();
        let all: Vec<_> = (0..SLOTS).map(|_| slots.take().unwrap()).collect();
        assert!(slots.take().is_none());
        drop(all);
        assert!(slots.take().is_some());
    }
}
