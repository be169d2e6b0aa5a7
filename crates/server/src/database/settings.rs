//! What the operator says of databases.

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, time::Duration};

use super::CertificateFiles;

#[derive(Debug, Clone)]
pub struct DatabaseSettings {
    /// One for each; sandboxes reach all of them, and the server decides whose they are.
    pub ports: RangeInclusive<u16>,
    /// In URLs, instead of the address at which sandboxes reach the server.
    pub host: Option<String>,
    /// With it each has a name, its id below that, and all are reached by their names at the first of the ports. In lower
    /// case, without dots around it.
    pub suffix: Option<String>,
    /// Beside the server's own address, for clients from elsewhere.
    pub listen: Option<IpAddr>,
    /// Default: one that the server makes for itself.
    pub certificate: Option<CertificateFiles>,
    /// Without connections for so long, a database hibernates unless it says otherwise.
    pub idle: Duration,
    /// Up to so many bytes a disk grows by itself.
    pub largest_disk: u64,
    pub backups: BackupSettings,
}

#[derive(Debug, Clone)]
pub struct BackupSettings {
    pub place: BackupPlace,
    /// Every time since so long ago can be reached.
    pub keep: Duration,
    /// Between two base backups of a database in which something happens.
    pub every: Duration,
    /// From the create to the first.
    pub first_after: Duration,
    /// What was written is in the store after so long, or when nobody is connected any longer.
    pub archive_after: Duration,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackupPlace {
    /// A folder of the data directory.
    Data,
    Folder(PathBuf),
    /// `s3://bucket/path`.
    Url(String),
    /// There are none.
    Nowhere,
}

impl Default for BackupSettings {
    fn default() -> Self {
        Self {
            place: BackupPlace::Data,
            keep: Duration::from_secs(7 * 86_400),
            every: Duration::from_secs(86_400),
            first_after: Duration::from_secs(60),
            archive_after: Duration::from_secs(60),
        }
    }
}

impl Default for DatabaseSettings {
    fn default() -> Self {
        Self {
            ports: 15_432..=19_999,
            host: None,
            suffix: None,
            listen: None,
            certificate: None,
            idle: Duration::from_secs(300),
            largest_disk: 64 << 30,
            backups: BackupSettings::default(),
        }
    }
}
