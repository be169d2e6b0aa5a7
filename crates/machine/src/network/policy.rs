//! What a sandbox may reach: the host's owner sets the bounds, the sandbox's own policy goes within them.

use std::ops::RangeInclusive;

use super::destination::Destination;

/// Closed to sandboxes unless the host's owner opens a part. The documentation ranges (192.0.2.0/24,
/// 198.51.100.0/24, 203.0.113.0/24) are left out on purpose: test networks use them.
pub(super) const CLOSED: [&str; 12] = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    // Shared by carriers; ours, too: all sandboxes are in it, and so is a metadata service (100.100.100.200).
    "100.64.0.0/10",
    "127.0.0.0/8",
    // A cloud's agent endpoint, at a public address but inside the host's network.
    "168.63.129.16/32",
    // Link-local, and most clouds' metadata.
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
];

/// What the host's owner says, for all sandboxes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostPolicy {
    /// Reached by no sandbox, whatever else is said.
    pub deny: Vec<Destination>,
    /// Reached by every sandbox that has the internet, although it is closed otherwise.
    pub allow: Vec<Destination>,
    /// Reached by those sandboxes alone whose own policy names it.
    pub permit: Vec<Destination>,
    /// `None`: there is no such address.
    pub door: Option<Door>,
}

/// The instance's own address, which sandboxes with the internet reach; who listens there has to look who comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Door {
    pub ports: RangeInclusive<u16>,
    /// For sandboxes every name below it, and itself, is that address. In lower case, without dots around it.
    pub suffix: Option<String>,
}

impl HostPolicy {
    /// Whether a sandbox that names `destination` would name what it can never have.
    pub fn keeps_closed(&self, destination: &Destination) -> bool {
        let closed = CLOSED.iter().any(|range| {
            let range = range.parse().expect("the ranges are written as destinations are");
            destination.is_within(&range)
        });
        closed && !self.opened().any(|opened| destination.is_within(opened))
    }

    /// Everything closed that some sandbox may reach.
    pub(super) fn opened(&self) -> impl Iterator<Item = &Destination> {
        self.allow.iter().chain(&self.permit)
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Egress {
    /// Everything that is not closed, and names are resolved.
    #[default]
    Internet,
    /// Nothing, and names are not resolved either.
    None,
}

/// What one sandbox says of itself. First `deny` is asked, then `allow`, then `egress`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    pub egress: Egress,
    pub allow: Vec<Destination>,
    pub deny: Vec<Destination>,
    /// Of each direction.
    pub rate_limit_mbit: Option<u32>,
    /// It reaches [`HostPolicy::door`] also without the internet.
    pub door: bool,
}

/// Bytes since the network was prepared, with their frames' headers; names asked of the gateway are not among them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// By the guest.
    pub sent_bytes: u64,
    pub received_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_range_can_be_named_only_within_what_is_opened() {
        let host = HostPolicy {
            deny: Vec::new(),
            allow: vec!["10.1.0.0/16".parse().unwrap()],
            permit: vec!["192.168.7.1:5432".parse().unwrap()],
            door: None,
        };
        for named in ["10.1.2.0/24:80", "192.168.7.1:5432", "1.1.1.1", "0.0.0.0/0:443", "8.0.0.0/5"]
        {
            assert!(!host.keeps_closed(&named.parse().unwrap()), "{named}");
        }
        for named in [
            "10.0.0.0/8",
            "10.2.0.1",
            "192.168.7.1",
            "192.168.7.1:80",
            "169.254.169.254:80",
            "127.0.0.1",
            "100.64.0.1",
        ] {
            assert!(host.keeps_closed(&named.parse().unwrap()), "{named}");
        }
    }
}
