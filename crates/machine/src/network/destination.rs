//! Where packets go: a range of addresses, or one port in it.

use std::{fmt, net::Ipv4Addr, str::FromStr};

/// `CIDR` or `CIDR:PORT`; one address may stand for its /32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Destination {
    network: Ipv4Addr,
    prefix: u8,
    /// TCP and UDP alike; `None` is every port and protocol.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DestinationError {
    #[error(
        "`{0}` is not an IPv4 range; write 10.1.2.0/24 or 10.1.2.3:443 (sandboxes have no IPv6)"
    )]
    Network(String),
    #[error("`{0}` is not a prefix length; write 0 to 32")]
    Prefix(String),
    #[error("`{0}` is not a port; write 1 to 65535")]
    Port(String),
    #[error(
        "`{given}` names one address of a range; write {network}/{prefix}, or the address alone"
    )]
    HostBits { given: String, network: Ipv4Addr, prefix: u8 },
}

impl Destination {
    /// In the notation of nftables.
    pub(super) fn network(&self) -> String {
        format!("{}/{}", self.network, self.prefix)
    }

    pub(super) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether all of it is in `other`.
    pub(super) fn is_within(&self, other: &Self) -> bool {
        let mask = u32::MAX.checked_shl(32 - u32::from(other.prefix)).unwrap_or(0);
        self.prefix >= other.prefix
            && self.network.to_bits() & mask == other.network.to_bits()
            && (other.port.is_none() || other.port == self.port)
    }
}

impl FromStr for Destination {
    type Err = DestinationError;

    fn from_str(text: &str) -> Result<Self, DestinationError> {
        let (range, port) = match text.split_once(':') {
            Some((range, port)) => (range, Some(port)),
            None => (text, None),
        };
        let (address, prefix) = match range.split_once('/') {
            Some((address, prefix)) => (address, number(prefix).filter(|prefix| *prefix <= 32)),
            None => (range, Some(32)),
        };
        let address: Ipv4Addr =
            address.parse().map_err(|_| DestinationError::Network(text.to_owned()))?;
        let prefix: u8 = prefix.ok_or_else(|| DestinationError::Prefix(text.to_owned()))?;
        let port = match port {
            None => None,
            Some(port) => Some(
                number(port)
                    .filter(|port| *port != 0)
                    .ok_or_else(|| DestinationError::Port(port.to_owned()))?,
            ),
        };
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let network = Ipv4Addr::from_bits(address.to_bits() & mask);
        if network != address {
            return Err(DestinationError::HostBits { given: text.to_owned(), network, prefix });
        }
        Ok(Self { network, prefix, port })
    }
}

/// Digits only: the standard parser also takes a leading `+`.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for Destination {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.network, self.prefix)?;
        match self.port {
            Some(port) => write!(formatter, ":{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read_again(bits: u32, prefix in 0..=32_u8, port in proptest::option::of(1_u16..)) {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
            let destination = Destination { network: Ipv4Addr::from_bits(bits & mask), prefix, port };
            prop_assert_eq!(destination.to_string().parse(), Ok(destination));
        }

        #[test]
        fn any_text_is_read_or_refused_and_never_reaches_nft_as_it_came(text in "\\PC*") {
            if let Ok(destination) = text.parse::<Destination>() {
                prop_assert!(destination.network().bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b'/'));
            }
        }

        #[test]
        fn an_address_alone_is_its_own_range(bits: u32) {
            let address = Ipv4Addr::from_bits(bits);
            prop_assert_eq!(address.to_string().parse::<Destination>(), format!("{address}/32").parse());
        }
    }

    #[test]
    fn a_range_is_within_a_wider_one_and_a_port_within_all() {
        let within = |inner: &str, outer: &str| {
            inner.parse::<Destination>().unwrap().is_within(&outer.parse().unwrap())
        };
        for (inner, outer) in [
            ("10.1.2.3", "10.1.2.3"),
            ("10.1.2.0/24", "10.0.0.0/8"),
            ("10.1.2.0/24:443", "10.1.0.0/16"),
            ("10.1.2.3:443", "10.1.2.0/24:443"),
            ("192.0.2.1", "0.0.0.0/0"),
        ] {
            assert!(within(inner, outer), "{inner} in {outer}");
        }
        for (inner, outer) in [
            ("10.0.0.0/8", "10.1.0.0/16"),
            ("11.0.0.0/8", "10.0.0.0/8"),
            ("10.1.2.3", "10.1.2.3:443"),
            ("10.1.2.3:80", "10.1.2.3:443"),
            ("0.0.0.0/0", "10.0.0.0/8"),
        ] {
            assert!(!within(inner, outer), "{inner} in {outer}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refusal = |text: &str| text.parse::<Destination>().unwrap_err();
        assert!(matches!(refusal("example.com"), DestinationError::Network(_)));
        assert!(matches!(refusal("fd00::/8"), DestinationError::Network(_)));
        assert!(matches!(refusal(""), DestinationError::Network(_)));
        assert!(matches!(refusal("10.0.0.0/33"), DestinationError::Prefix(_)));
        assert!(matches!(refusal("10.0.0.0/"), DestinationError::Prefix(_)));
        assert!(matches!(refusal("10.0.0.0/8:0"), DestinationError::Port(_)));
        assert!(matches!(refusal("10.0.0.0/8:+1"), DestinationError::Port(_)));
        assert!(matches!(refusal("10.0.0.0/8:65536"), DestinationError::Port(_)));
        assert!(matches!(refusal("10.0.0.1/8"), DestinationError::HostBits { prefix: 8, .. }));
    }
}
