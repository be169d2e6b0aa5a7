//! What a host's owner opens to sandboxes although it is denied by default.

use std::{fmt, net::Ipv4Addr, str::FromStr};

/// Destinations that sandboxes may reach: `CIDR` or `CIDR:PORT`; one address may stand for its /32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Egress {
    network: Ipv4Addr,
    prefix: u8,
    /// TCP and UDP alike; `None` opens every port and protocol.
    port: Option<u16>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
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

impl Egress {
    /// In the notation of nftables.
    pub(super) fn network(&self) -> String {
        format!("{}/{}", self.network, self.prefix)
    }

    pub(super) fn port(&self) -> Option<u16> {
        self.port
    }
}

impl FromStr for Egress {
    type Err = EgressError;

    fn from_str(text: &str) -> Result<Self, EgressError> {
        let (range, port) = match text.split_once(':') {
            Some((range, port)) => (range, Some(port)),
            None => (text, None),
        };
        let (address, prefix) = match range.split_once('/') {
            Some((address, prefix)) => (address, number(prefix).filter(|prefix| *prefix <= 32)),
            None => (range, Some(32)),
        };
        let address: Ipv4Addr =
            address.parse().map_err(|_| EgressError::Network(text.to_owned()))?;
        let prefix: u8 = prefix.ok_or_else(|| EgressError::Prefix(text.to_owned()))?;
        let port = match port {
            None => None,
            Some(port) => Some(
                number(port)
                    .filter(|port| *port != 0)
                    .ok_or_else(|| EgressError::Port(port.to_owned()))?,
            ),
        };
        let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
        let network = Ipv4Addr::from_bits(address.to_bits() & mask);
        if network != address {
            return Err(EgressError::HostBits { given: text.to_owned(), network, prefix });
        }
        Ok(Self { network, prefix, port })
    }
}

/// Digits only: the standard parser also takes a leading `+`.
fn number<T: FromStr>(text: &str) -> Option<T> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

impl fmt::Display for Egress {
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
            let egress = Egress { network: Ipv4Addr::from_bits(bits & mask), prefix, port };
            prop_assert_eq!(egress.to_string().parse(), Ok(egress));
        }

        #[test]
        fn any_text_is_read_or_refused_and_never_reaches_nft_as_it_came(text in "\\PC*") {
            if let Ok(egress) = text.parse::<Egress>() {
                prop_assert!(egress.network().bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b'/'));
            }
        }

        #[test]
        fn an_address_alone_is_its_own_range(bits: u32) {
            let address = Ipv4Addr::from_bits(bits);
            prop_assert_eq!(address.to_string().parse::<Egress>(), format!("{address}/32").parse());
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let refusal = |text: &str| text.parse::<Egress>().unwrap_err();
        assert!(matches!(refusal("example.com"), EgressError::Network(_)));
        assert!(matches!(refusal("fd00::/8"), EgressError::Network(_)));
        assert!(matches!(refusal(""), EgressError::Network(_)));
        assert!(matches!(refusal("10.0.0.0/33"), EgressError::Prefix(_)));
        assert!(matches!(refusal("10.0.0.0/"), EgressError::Prefix(_)));
        assert!(matches!(refusal("10.0.0.0/8:0"), EgressError::Port(_)));
        assert!(matches!(refusal("10.0.0.0/8:+1"), EgressError::Port(_)));
        assert!(matches!(refusal("10.0.0.0/8:65536"), EgressError::Port(_)));
        assert!(matches!(refusal("10.0.0.1/8"), EgressError::HostBits { prefix: 8, .. }));
    }
}
