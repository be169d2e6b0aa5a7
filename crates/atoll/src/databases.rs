//! What the commands that are a server take for databases.

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use server::database::{CertificateFiles, DatabaseSettings};

use crate::failure::Failure;

#[derive(Args)]
pub(crate) struct DatabaseFlags {
    /// Ports at which databases are reached, one for each
    #[arg(
        long,
        env = "ATOLL_DATABASES_PORTS",
        value_name = "FIRST-LAST",
        default_value = "15432-19999"
    )]
    pub(crate) databases_ports: Ports,
    /// The host in their URLs [default: an address of the server's own, for this host and its sandboxes]
    #[arg(long, env = "ATOLL_DATABASES_HOST", value_name = "HOST")]
    databases_host: Option<String>,
    /// An address of this host at which they are reached as well, for clients elsewhere
    #[arg(long, env = "ATOLL_DATABASES_LISTEN", value_name = "ADDRESS")]
    databases_listen: Option<IpAddr>,
    /// A PEM file with the certificate that clients see, and those that lead to it [default: one that signs itself]
    #[arg(long, env = "ATOLL_DATABASES_CERTIFICATE", value_name = "FILE")]
    databases_certificate: Option<PathBuf>,
    /// A PEM file with its private key
    #[arg(long, env = "ATOLL_DATABASES_KEY", value_name = "FILE")]
    databases_key: Option<PathBuf>,
    /// Without connections for so long, a database hibernates
    #[arg(
        long,
        env = "ATOLL_DATABASES_IDLE",
        value_name = "SECONDS",
        default_value_t = 300,
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    databases_idle: u64,
    /// Up to which a database's disk grows by itself
    #[arg(
        long,
        env = "ATOLL_DATABASES_DISK_MB",
        value_name = "MB",
        default_value_t = 65_536,
        value_parser = clap::value_parser!(u64).range(1..1 << 30)
    )]
    databases_disk_mb: u64,
}

impl DatabaseFlags {
    pub(crate) fn settings(&self) -> Result<DatabaseSettings, Failure> {
        let certificate = match (self.databases_certificate.clone(), self.databases_key.clone()) {
            (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                return Err(Failure::new(
                    "--databases-certificate and --databases-key go together",
                ));
            }
        };
        Ok(DatabaseSettings {
            ports: self.databases_ports.range(),
            host: self.databases_host.clone(),
            listen: self.databases_listen,
            certificate,
            idle: Duration::from_secs(self.databases_idle),
            largest_disk: self.databases_disk_mb << 20,
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ports(RangeInclusive<u16>);

impl Ports {
    pub(crate) fn range(&self) -> RangeInclusive<u16> {
        self.0.clone()
    }
}

impl FromStr for Ports {
    type Err = &'static str;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = "write two ports as in 15432-19999";
        let (first, last) = text.split_once('-').ok_or(wrong)?;
        let (first, last) = (first.parse().map_err(|_| wrong)?, last.parse().map_err(|_| wrong)?);
        if first == 0 || first > last { Err(wrong) } else { Ok(Self(first..=last)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_of_ports_has_two_ends_in_order() {
        assert_eq!("1-65535".parse(), Ok(Ports(1..=65_535)));
        for bad in ["", "5", "0-5", "6-5", "1-65536", "a-b"] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }
}
