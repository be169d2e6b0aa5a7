//! The settings of a server, each with a default that suits one host.

use std::{net::SocketAddr, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};

use machine::network::HostPolicy;

use crate::{
    account::Plans,
    database::DatabaseSettings,
    sandbox::{ExecLimits, Limits},
    volume::VolumeLimits,
};

#[derive(Debug, Clone)]
pub struct Config {
    /// Port 0: any free one.
    pub listen: SocketAddr,
    /// Rows, sandboxes, logs. Locked by its server.
    pub data_dir: PathBuf,
    /// Kernel, templates and bakes, shared by the servers of a host. On the data directory's file system.
    pub cache_dir: PathBuf,
    /// `sqlite:…` or `postgres://…`. Default: a SQLite file in the data directory.
    pub database: Option<String>,
    /// The bounds of what sandboxes may reach.
    pub network: HostPolicy,
    /// A key that is valid while the server runs.
    pub api_key: Option<String>,
    /// `/metrics` without a key.
    pub open_metrics: bool,
    pub default_ttl: Duration,
    /// Machines kept ready for each size that was used recently.
    pub ready_machines: usize,
    pub capacity: Capacity,
    pub volumes: VolumeLimits,
    pub databases: DatabaseSettings,
    pub execs: ExecLimits,
    pub previews: PreviewConfig,
    /// How long a terminal goes on with nobody attached to it.
    pub terminal_linger: Duration,
    pub plans: Arc<Plans>,
}

/// How much of the host may be used, and how much of the server by one client.
#[derive(Debug, Clone)]
pub struct Capacity {
    /// Machines that may run at once, beside those that stand ready.
    pub most_machines: usize,
    /// Bytes of memory into which nothing is created. Default: by the host.
    pub memory_reserve: Option<u64>,
    /// How many times the memory beyond the reserve may be promised to guests.
    pub memory_overcommit: f64,
    /// Bytes of the pool into which nothing is created. Default: by the pool.
    pub disk_reserve: Option<u64>,
    /// Bodies and answers that the server holds whole, all together.
    pub buffer_bytes: u64,
    pub most_connections: usize,
    /// Requests a second with one key. `None`: as many as it likes.
    pub rate_limit: Option<NonZeroU32>,
}

/// Ports of sandboxes, and who may look at them on hosts of their own.
#[derive(Debug, Clone)]
pub struct PreviewConfig {
    pub access: PreviewAccess,
    /// Of `{port}-{id}.{suffix}`. `None`: whatever stands there.
    pub suffix: Option<String>,
    /// For the head of an answer, once the request has been sent. What follows may take as long as it likes.
    pub answer_deadline: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreviewAccess {
    /// Whoever knows the sandbox's id.
    Open,
    /// Whoever has a preview token.
    Token,
    /// There are no such hosts.
    Off,
}

impl Default for PreviewConfig {
    fn default() -> Self {
        Self {
            access: PreviewAccess::Open,
            suffix: None,
            answer_deadline: Duration::from_secs(120),
        }
    }
}

impl Default for Capacity {
    fn default() -> Self {
        Self {
            most_machines: 256,
            memory_reserve: None,
            memory_overcommit: 8.0,
            disk_reserve: None,
            buffer_bytes: 512 << 20,
            most_connections: 4096,
            rate_limit: None,
        }
    }
}

impl Capacity {
    /// On a host with so many bytes of memory and on its pool.
    pub(crate) fn limits(&self, memory: u64, pool: u64) -> Limits {
        Limits {
            machines: self.most_machines,
            memory_reserve: self.memory_reserve.unwrap_or((memory / 10).min(4 << 30)),
            memory_overcommit: self.memory_overcommit,
            disk_reserve: self.disk_reserve.unwrap_or((pool / 20).min(10 << 30)),
        }
    }
}

impl Config {
    /// At any port, in directories that do not exist.
    #[cfg(test)]
    pub(crate) fn testing() -> Self {
        Self {
            listen: ([127, 0, 0, 1], 0).into(),
            data_dir: "/nowhere".into(),
            cache_dir: "/nowhere".into(),
            database: None,
            network: HostPolicy::default(),
            api_key: None,
            open_metrics: false,
            default_ttl: Duration::from_secs(3600),
            ready_machines: 0,
            capacity: Capacity::default(),
            databases: DatabaseSettings::default(),
            volumes: VolumeLimits { most: 8, largest_mb: 1024, total_mb: None },
            execs: ExecLimits::default(),
            previews: PreviewConfig::default(),
            terminal_linger: Duration::from_secs(300),
            plans: Arc::default(),
        }
    }

    pub(crate) fn database_url(&self) -> String {
        let default = || format!("sqlite:{}", self.data_dir.join("atoll.sqlite").display());
        self.database.clone().unwrap_or_else(default)
    }
}
