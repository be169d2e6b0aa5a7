//! What the operator says of databases.

use std::{net::IpAddr, ops::RangeInclusive, time::Duration};

use super::CertificateFiles;

#[derive(Debug, Clone)]
pub struct DatabaseSettings {
    /// One for each; sandboxes reach all of them, and the server decides whose they are.
    pub ports: RangeInclusive<u16>,
    /// In URLs, instead of the address at which sandboxes reach the server.
    pub host: Option<String>,
    /// Beside that address, for clients from elsewhere.
    pub listen: Option<IpAddr>,
    /// Default: one that the server makes for itself.
    pub certificate: Option<CertificateFiles>,
    /// Without connections for so long, a database hibernates unless it says otherwise.
    pub idle: Duration,
    /// Up to so many bytes a disk grows by itself.
    pub largest_disk: u64,
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self {
            ports: 15_432..=19_999,
            host: None,
            listen: None,
            certificate: None,
            idle: Duration::from_secs(300),
            largest_disk: 64 << 30,
        }
    }
}
