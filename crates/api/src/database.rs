//! Databases: PostgreSQL in a machine of its own.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::DatabaseId;

/// Memory, to which PostgreSQL is tuned; virtual CPUs follow from it.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    ToSchema,
)]
pub enum DatabaseSize {
    /// 1 GiB, 1 virtual CPU.
    #[default]
    #[serde(rename = "1g")]
    OneG,
    /// 4 GiB, 2 virtual CPUs.
    #[serde(rename = "4g")]
    FourG,
    /// 16 GiB, 4 virtual CPUs.
    #[serde(rename = "16g")]
    SixteenG,
}

impl DatabaseSize {
    pub const ALL: [Self; 3] = [Self::OneG, Self::FourG, Self::SixteenG];

    pub fn name(self) -> &'static str {
        match self {
            Self::OneG => "1g",
            Self::FourG => "4g",
            Self::SixteenG => "16g",
        }
    }

    pub fn memory_mb(self) -> u64 {
        match self {
            Self::OneG => 1 << 10,
            Self::FourG => 4 << 10,
            Self::SixteenG => 16 << 10,
        }
    }

    pub fn cpu(self) -> u32 {
        match self {
            Self::OneG => 1,
            Self::FourG => 2,
            Self::SixteenG => 4,
        }
    }
}

impl fmt::Display for DatabaseSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for DatabaseSize {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|size| size.name() == text);
        found.ok_or_else(|| "a size is 1g, 4g or 16g".to_owned())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DatabaseStatus {
    Provisioning,
    Running,
    Paused,
    /// Unused; a connection wakes it.
    Hibernated,
    /// A connection starts it.
    Stopped,
    /// Its machine ended, and is being started again from its disk.
    Recovering,
    Deleting,
    /// It could not be made.
    Failed,
}

impl DatabaseStatus {
    pub fn name(self) -> &'static str {
        match self {
            Self::Provisioning => "provisioning",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Hibernated => "hibernated",
            Self::Stopped => "stopped",
            Self::Recovering => "recovering",
            Self::Deleting => "deleting",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for DatabaseStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Every field may be missing. Without `size`, `memory_mb` is rounded up to one.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateDatabase {
    /// For people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<DatabaseSize>,
    /// It does not hibernate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub always_on: Option<bool>,
    /// Without connections for so long, it hibernates. Default: the server's setting, 300.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
    /// Virtual CPUs. Default: the size's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateDatabase {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub always_on: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<u64>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CloneDatabase {
    /// Default: the source's, with ` (clone)` behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// RFC 3339: as the source was then, from its backups. Default: as it is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_time: Option<String>,
    /// Default: the source's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<DatabaseSize>,
}

/// How it is reached.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatabaseConnection {
    /// From the host, from its network, and from every sandbox of the same account that has the internet.
    pub connection_url: String,
    pub host: String,
    pub port: u16,
    pub username: String,
    pub password: String,
    pub database: String,
    /// PEM of what signed the server's certificate, where that is its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ca_certificate: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Database {
    pub id: DatabaseId,
    pub label: String,
    pub status: DatabaseStatus,
    /// Why it failed, does not run, or refuses writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub size: DatabaseSize,
    pub cpu: u32,
    pub memory_mb: u64,
    /// What it takes of the host's disk.
    pub disk_bytes: u64,
    pub always_on: bool,
    pub idle_seconds: u64,
    /// That are open now.
    pub connections: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloned_from: Option<DatabaseId>,
    /// Of the newest base backup.
    #[serde(
        with = "time::serde::rfc3339::option",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub last_backup_at: Option<OffsetDateTime>,
    /// The first `target_time` that a clone of it may have.
    #[serde(
        with = "time::serde::rfc3339::option",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub restorable_from: Option<OffsetDateTime>,
    /// Everything until then is in the store. While it runs, a `target_time` may be later than that.
    #[serde(
        with = "time::serde::rfc3339::option",
        default,
        skip_serializing_if = "Option::is_none"
    )]
    pub restorable_until: Option<OffsetDateTime>,
    /// Why nothing of it reaches the store at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup_error: Option<String>,
    /// There is no other host that it could go to.
    pub failover_available: bool,
    /// Once it can be reached, and to keys of scope `full` alone; never in a list.
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    pub connection: Option<DatabaseConnection>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DatabaseList {
    /// Newest first.
    pub items: Vec<Database>,
    pub count: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_read_as_it_is_written() {
        for size in DatabaseSize::ALL {
            assert_eq!(size.name().parse(), Ok(size));
            assert_eq!(serde_json::to_string(&size).unwrap(), format!("\"{size}\""));
        }
        assert!("2g".parse::<DatabaseSize>().is_err());
    }
}
