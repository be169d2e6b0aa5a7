//! The settings of a server, each with a default that suits one host.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use machine::network::Egress;

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
    /// Private destinations that sandboxes may reach all the same.
    pub egress_allow: Vec<Egress>,
    /// A key that is valid while the server runs.
    pub api_key: Option<String>,
    /// `/metrics` without a key.
    pub open_metrics: bool,
    pub default_ttl: Duration,
    /// Machines kept ready for each size that was used recently.
    pub ready_machines: usize,
    /// Machines that may exist at once.
    pub most_machines: usize,
}

impl Config {
    pub(crate) fn database_url(&self) -> String {
        let default = || format!("sqlite:{}", self.data_dir.join("atoll.sqlite").display());
        self.database.clone().unwrap_or_else(default)
    }
}
