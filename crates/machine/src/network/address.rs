//! Which names and addresses belong to which instance and slot. Pure, and without state: two servers on
//! a host never meet because their instance numbers differ, and what is left over is known by its name.

use std::net::Ipv4Addr;

use super::Error;

/// Instances on a host, and slots in an instance.
const INSTANCES: u16 = 1024;
const SLOTS: u16 = 1024;

/// Every guest has this address, so a snapshot carries no network identity.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 2);
/// The guest's gateway and resolver.
pub const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
pub const GUEST_PREFIX: u8 = 30;
pub const GUEST_MAC: &str = "52:54:00:a7:00:02";
/// The same in every namespace: a clone still has its parent's neighbour table.
pub const GATEWAY_MAC: &str = "52:54:00:a7:00:01";

/// Names inside a namespace: the guest's side, and the way to the host.
pub(super) const TAP: &str = "tap0";
pub(super) const UPLINK: &str = "up0";

/// First address of 100.64.0.0/10, the range that carriers share: no private network uses it.
const POOL: u32 = u32::from_be_bytes([100, 64, 0, 0]);
const ADDRESSES_PER_INSTANCE: u32 = 4096;
pub(super) const INSTANCE_PREFIX: u8 = 20;
pub(super) const LINK_PREFIX: u8 = 31;

/// Of the instance's range, behind those of all slots.
const DOOR: u32 = 2 * SLOTS as u32;

/// A server's number on its host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Instance(u16);

impl Instance {
    pub(super) fn new(number: u16) -> Result<Self, Error> {
        if number < INSTANCES { Ok(Self(number)) } else { Err(Error::NoSuchInstance(number)) }
    }

    /// The instance whose number comes after `prefix`, up to `end` if the name goes on. Only as we would have written
    /// it ourselves.
    pub(super) fn of_name(name: &str, prefix: &str, end: char) -> Option<Self> {
        let rest = name.strip_prefix(prefix)?;
        let text = rest.split_once(end).map_or(rest, |(number, _)| number);
        let instance = Self::new(text.parse().ok()?).ok()?;
        (instance.0.to_string() == text).then_some(instance)
    }

    pub(super) fn number(self) -> u16 {
        self.0
    }

    pub(super) fn slot(self, index: u16) -> Result<Slot, Error> {
        if index < SLOTS {
            Ok(Slot { instance: self, index })
        } else {
            Err(Error::NoSuchSlot(index))
        }
    }

    /// The first address of the range that all namespaces of this instance are in.
    pub(super) fn range(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(POOL + u32::from(self.0) * ADDRESSES_PER_INSTANCE)
    }

    /// Where sandboxes reach what the server itself offers them.
    pub(super) fn door(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.range().to_bits() + DOOR)
    }

    /// The interface that has the address of [`Instance::door`]. No slot's link is called so.
    pub(super) fn door_link(self) -> String {
        format!("atdoor{}", self.0)
    }

    /// Its other end.
    pub(super) fn door_peer(self) -> String {
        format!("atdoor{}p", self.0)
    }

    /// The slot whose namespace has this address.
    pub(super) fn slot_of_address(self, address: Ipv4Addr) -> Option<Slot> {
        let place = address.to_bits().checked_sub(self.range().to_bits())?;
        let slot = self.slot(u16::try_from(place / 2).ok()?).ok()?;
        (slot.namespace_end() == address).then_some(slot)
    }

    pub(super) fn table(self) -> String {
        format!("atoll_{}", self.0)
    }

    /// What the name of every host-side interface starts with, and of no other instance's.
    pub(super) fn link_prefix(self) -> String {
        format!("at{}.", self.0)
    }

    fn namespace_prefix(self) -> String {
        format!("atoll-{}-", self.0)
    }

    /// The slot whose host-side interface has this name.
    pub(super) fn slot_of_link(self, name: &str) -> Option<Slot> {
        self.slot_of(name.strip_prefix(&self.link_prefix())?)
    }

    /// The slot whose namespace has this name.
    pub(super) fn slot_of_namespace(self, name: &str) -> Option<Slot> {
        self.slot_of(name.strip_prefix(&self.namespace_prefix())?)
    }

    /// Only what we would have written ourselves: `007` or `+7` is somebody else's.
    fn slot_of(self, text: &str) -> Option<Slot> {
        let slot = self.slot(text.parse().ok()?).ok()?;
        (slot.index.to_string() == text).then_some(slot)
    }
}

/// One machine's place in an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot {
    instance: Instance,
    index: u16,
}

impl Slot {
    pub(super) fn instance(self) -> Instance {
        self.instance
    }

    pub(super) fn index(self) -> u16 {
        self.index
    }

    pub(super) fn namespace(self) -> String {
        format!("{}{}", self.instance.namespace_prefix(), self.index)
    }

    /// The host-side end of the veth pair; at most 11 of the 15 characters that Linux allows.
    pub(super) fn link(self) -> String {
        format!("{}{}", self.instance.link_prefix(), self.index)
    }

    pub(super) fn host_end(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.instance.range().to_bits() + 2 * u32::from(self.index))
    }

    /// The address under which the host sees the guest.
    pub(super) fn namespace_end(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.host_end().to_bits() + 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    fn slots() -> impl Strategy<Value = Slot> {
        (0..INSTANCES, 0..SLOTS)
            .prop_map(|(instance, slot)| Instance::new(instance).unwrap().slot(slot).unwrap())
    }

    proptest! {
        #[test]
        fn two_slots_share_nothing(one in slots(), other in slots()) {
            prop_assume!(one != other);
            let addresses: HashSet<_> =
                [one, other].iter().flat_map(|slot| [slot.host_end(), slot.namespace_end()]).collect();
            prop_assert_eq!(addresses.len(), 4);
            prop_assert_ne!(one.link(), other.link());
            prop_assert_ne!(one.namespace(), other.namespace());
        }

        #[test]
        fn an_address_is_in_the_range_of_its_instance_alone(slot in slots(), other in 0..INSTANCES) {
            let other = Instance::new(other).unwrap();
            let within = |instance: Instance, address: Ipv4Addr| {
                address.to_bits() >> (32 - INSTANCE_PREFIX) == instance.range().to_bits() >> (32 - INSTANCE_PREFIX)
            };
            for address in [slot.host_end(), slot.namespace_end()] {
                prop_assert_eq!(within(other, address), other == slot.instance);
                prop_assert_eq!(address.to_bits() >> 22, POOL >> 22);
            }
            prop_assert_eq!(slot.host_end().to_bits() % 2, 0);
            prop_assert!(within(slot.instance, slot.instance.door()));
            prop_assert_eq!(slot.instance.slot_of_address(slot.namespace_end()), Some(slot));
            for address in [slot.host_end(), slot.instance.door()] {
                prop_assert_eq!(slot.instance.slot_of_address(address), None);
            }
        }

        #[test]
        fn a_name_leads_back_to_its_slot_and_to_no_other_instance(slot in slots(), other in 0..INSTANCES) {
            prop_assert!(slot.link().len() <= 15);
            let other = Instance::new(other).unwrap();
            let expected = (other == slot.instance).then_some(slot);
            prop_assert_eq!(other.slot_of_link(&slot.link()), expected);
            prop_assert_eq!(other.slot_of_namespace(&slot.namespace()), expected);
            prop_assert_eq!(other.slot_of_link(&slot.instance.door_link()), None);
            prop_assert!(slot.instance.door_peer().len() <= 15);
        }
    }

    #[test]
    fn a_name_that_is_not_ours_has_no_slot() {
        let instance = Instance::new(7).unwrap();
        for name in ["at7.", "at7.1024", "at7.01", "at7.+1", "at71.1", "at7.1x", "eth0"] {
            assert_eq!(instance.slot_of_link(name), None, "{name}");
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        assert!(Instance::new(INSTANCES).is_err());
        assert!(Instance::new(0).unwrap().slot(SLOTS).is_err());
    }
}
