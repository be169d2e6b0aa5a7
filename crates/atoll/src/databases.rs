//! What the commands that are a server take for databases.

use std::{net::IpAddr, ops::RangeInclusive, path::PathBuf, str::FromStr, time::Duration};

use clap::Args;
use server::Door;
use server::database::{BackupPlace, BackupSettings, CertificateFiles, DatabaseSettings};

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
    databases_ports: Ports,
    /// The host in their URLs [default: an address of the server's own, for this host and its sandboxes]
    #[arg(long, env = "ATOLL_DATABASES_HOST", value_name = "HOST")]
    databases_host: Option<String>,
    /// A domain: each database is reached by its id below it, such as ID.db.example.com, and all at the first of the ports
    ///
    /// In sandboxes these names are known. Elsewhere they have to lead to --databases-listen, by a wildcard record.
    #[arg(
        long,
        env = "ATOLL_DATABASES_SUFFIX",
        value_name = "DOMAIN",
        value_parser = suffix,
        conflicts_with = "databases_host"
    )]
    databases_suffix: Option<String>,
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
    /// Where their backups lie: a folder, `s3://BUCKET/PATH`, or `none` [default: a folder of the data directory]
    ///
    /// Keys, region and endpoint of an object storage are taken from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION,
    /// AWS_ENDPOINT and AWS_ALLOW_HTTP.
    #[arg(long, env = "ATOLL_DATABASES_BACKUPS", value_name = "PLACE", value_parser = place)]
    databases_backups: Option<BackupPlace>,
    /// Databases can be made as of any time of the last days
    #[arg(
        long,
        env = "ATOLL_DATABASES_BACKUP_DAYS",
        value_name = "DAYS",
        default_value_t = 7,
        value_parser = clap::value_parser!(u32).range(1..=3650)
    )]
    databases_backup_days: u32,
    /// Between two base backups of a database in which something happens
    #[arg(
        long,
        env = "ATOLL_DATABASES_BACKUP_HOURS",
        value_name = "HOURS",
        default_value_t = 24,
        value_parser = clap::value_parser!(u32).range(1..=8760)
    )]
    databases_backup_hours: u32,
    /// From a create to the first base backup
    #[arg(
        long,
        env = "ATOLL_DATABASES_BACKUP_AFTER",
        value_name = "SECONDS",
        default_value_t = 60
    )]
    databases_backup_after: u32,
    /// What was written reaches the backups after so long, and when nobody is connected any longer
    #[arg(
        long,
        env = "ATOLL_DATABASES_ARCHIVE_AFTER",
        value_name = "SECONDS",
        default_value_t = 60,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    databases_archive_after: u32,
}

impl DatabaseFlags {
    /// Where sandboxes reach them.
    pub(crate) fn door(&self) -> Door {
        Door { ports: self.databases_ports.range(), suffix: self.databases_suffix.clone() }
    }

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
            suffix: self.databases_suffix.clone(),
            listen: self.databases_listen,
            certificate,
            idle: Duration::from_secs(self.databases_idle),
            largest_disk: self.databases_disk_mb << 20,
            backups: BackupSettings {
                place: self.databases_backups.clone().unwrap_or(BackupPlace::Data),
                keep: Duration::from_secs(86_400) * self.databases_backup_days,
                every: Duration::from_secs(3600) * self.databases_backup_hours,
                first_after: Duration::from_secs(self.databases_backup_after.into()),
                archive_after: Duration::from_secs(self.databases_archive_after.into()),
            },
        })
    }
}

fn suffix(text: &str) -> Result<String, &'static str> {
    let name = text.trim_matches('.').to_ascii_lowercase();
    let is_label = |label: &str| {
        (1..=63).contains(&label.len())
            && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte))
    };
    // With an id before it it is still a name.
    if name.len() <= 200 && name.split('.').all(is_label) {
        Ok(name)
    } else {
        Err("write a domain as in db.example.com")
    }
}

fn place(text: &str) -> Result<BackupPlace, &'static str> {
    match text.split_once("://") {
        Some(("s3", rest)) if !rest.is_empty() => Ok(BackupPlace::Url(text.to_owned())),
        Some(_) => Err("write s3://BUCKET/PATH, a folder, or none"),
        None if text == "none" => Ok(BackupPlace::Nowhere),
        None if text.is_empty() => Err("write s3://BUCKET/PATH, a folder, or none"),
        None => Ok(BackupPlace::Folder(text.into())),
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
    fn a_place_of_backups_is_a_folder_a_bucket_or_none() {
        assert_eq!(place("none"), Ok(BackupPlace::Nowhere));
        assert_eq!(place("/backups"), Ok(BackupPlace::Folder("/backups".into())));
        assert_eq!(place("s3://a/b"), Ok(BackupPlace::Url("s3://a/b".to_owned())));
        for bad in ["", "s3://", "ftp://a", "http://a/b"] {
            assert!(place(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_suffix_is_a_domain() {
        assert_eq!(suffix(".DB.example.com."), Ok("db.example.com".to_owned()));
        for bad in ["", ".", "a..b", "a b", "*.example.com", "a/b", &"a.".repeat(101)] {
            assert!(suffix(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_range_of_ports_has_two_ends_in_order() {
        assert_eq!("1-65535".parse(), Ok(Ports(1..=65_535)));
        for bad in ["", "5", "0-5", "6-5", "1-65536", "a-b"] {
            assert!(bad.parse::<Ports>().is_err(), "{bad}");
        }
    }
}
