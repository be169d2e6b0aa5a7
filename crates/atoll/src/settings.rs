//! The settings of the commands that are a server, or prepare one.

use std::{
    net::{Ipv4Addr, SocketAddr},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use clap::{Args, builder::FalseyValueParser};
use server::{Config, Destination, HostPolicy, account::Plans, volume::VolumeLimits};
use tempfile::TempDir;

use crate::{databases::DatabaseFlags, failure::Failure, limits::Limits, previews::Previews};

#[derive(Args)]
pub(crate) struct Settings {
    /// The directory below which everything lies by default
    ///
    /// On a file system whose files can share blocks (XFS, btrfs); `make setup` makes one where there is none.
    #[arg(long, env = "ATOLL_POOL", value_name = "DIR", default_value = "/var/lib/atoll")]
    pub(crate) pool: PathBuf,
    /// What this server alone keeps: its sandboxes, and its database unless --database names another [default: POOL/server]
    #[arg(long, env = "ATOLL_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,
    /// Guest kernel, templates and baked machines, shared by the servers of a host [default: POOL/cache]
    #[arg(long, env = "ATOLL_CACHE_DIR", value_name = "DIR")]
    pub(crate) cache_dir: Option<PathBuf>,
    /// `sqlite:PATH` or `postgres://…` [default: a SQLite file in the data directory]
    #[arg(long, env = "ATOLL_DATABASE", value_name = "URL", hide_env_values = true)]
    database: Option<String>,
    /// A private destination that every sandbox with the internet may reach; may be repeated
    #[arg(long, env = "ATOLL_EGRESS_ALLOW", value_name = "CIDR[:PORT]", value_delimiter = ',')]
    egress_allow: Vec<Destination>,
    /// A private destination that sandboxes may open for themselves by naming it; may be repeated
    #[arg(long, env = "ATOLL_EGRESS_PERMIT", value_name = "CIDR[:PORT]", value_delimiter = ',')]
    egress_permit: Vec<Destination>,
    /// A destination that no sandbox reaches, whatever else is said; may be repeated
    #[arg(long, env = "ATOLL_EGRESS_DENY", value_name = "CIDR[:PORT]", value_delimiter = ',')]
    egress_deny: Vec<Destination>,
    /// The time to live of sandboxes that are created without one, in seconds
    #[arg(long, env = "ATOLL_DEFAULT_TTL", value_name = "SECONDS", default_value_t = 3600, value_parser = clap::value_parser!(u64).range(1..))]
    default_ttl: u64,
    /// Machines kept ready for each size that was used recently
    #[arg(long, env = "ATOLL_READY_MACHINES", value_name = "COUNT", default_value_t = 2)]
    ready_machines: usize,
    /// Volumes that an account may have
    #[arg(long, env = "ATOLL_MOST_VOLUMES", value_name = "COUNT", default_value_t = 1000)]
    most_volumes: usize,
    /// The largest volume, in MiB
    #[arg(long, env = "ATOLL_LARGEST_VOLUME", value_name = "MIB", default_value_t = 65_536)]
    largest_volume: u64,
    /// What all volumes of an account may have together, in MiB, used or not [default: no limit]
    #[arg(long, env = "ATOLL_VOLUMES_TOTAL", value_name = "MIB")]
    volumes_total: Option<u64>,
    /// A TOML file with plans for accounts, and prices [default: the plans `unlimited` and `free`]
    #[arg(long, env = "ATOLL_SETTINGS", value_name = "FILE")]
    settings: Option<PathBuf>,
    /// Serve /metrics without a key
    #[arg(long, env = "ATOLL_OPEN_METRICS", value_parser = FalseyValueParser::new())]
    open_metrics: bool,
    #[command(flatten, next_help_heading = "Ports of sandboxes")]
    previews: Previews,
    #[command(flatten, next_help_heading = "Databases")]
    databases: DatabaseFlags,
    #[command(flatten, next_help_heading = "Limits")]
    limits: Limits,
}

impl Settings {
    pub(crate) fn config(&self, listen: SocketAddr) -> Result<Config, Failure> {
        let data_dir = self.data_dir.clone().unwrap_or_else(|| self.pool.join("server"));
        let cache_dir =
            self.cache_dir.clone().unwrap_or_else(|| default_cache(&self.pool, &data_dir));
        Ok(Config {
            listen,
            network: HostPolicy {
                deny: self.egress_deny.clone(),
                allow: self.egress_allow.clone(),
                permit: self.egress_permit.clone(),
                door: Some(self.databases.door()),
            },
            data_dir,
            cache_dir,
            database: self.database.clone(),
            // Only by the environment: a key on a command line is seen by every user of the host.
            api_key: std::env::var("ATOLL_API_KEY").ok().filter(|key| !key.is_empty()),
            open_metrics: self.open_metrics,
            default_ttl: Duration::from_secs(self.default_ttl),
            ready_machines: self.ready_machines,
            capacity: self.limits.capacity(),
            volumes: VolumeLimits {
                most: self.most_volumes,
                largest_mb: self.largest_volume,
                total_mb: self.volumes_total,
            },
            databases: self.databases.settings()?,
            execs: self.limits.execs(),
            previews: self.previews.config(),
            terminal_linger: self.limits.terminal_linger(),
            plans: Arc::new(self.plans()?),
        })
    }

    fn plans(&self) -> Result<Plans, Failure> {
        self.settings.as_deref().map_or_else(
            || Ok(Plans::default()),
            |path| {
                Plans::read(path).map_err(|error| {
                    let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
                    Failure::new(format!("{error}{}", cause.unwrap_or_default()))
                        .hint("docs/guides/accounts.md has an example of a settings file")
                })
            },
        )
    }

    /// With a data directory of its own that goes with the guard, and the shared cache: a server may be running.
    pub(crate) fn scratch_config(&self) -> anyhow::Result<(Config, TempDir)> {
        // Disks are cloned by sharing their blocks only within one file system.
        let place = self.data_dir.as_deref().unwrap_or(&self.pool);
        if !place.is_dir() {
            return Err(Failure::new(format!("there is no directory {}", place.display()))
                .hint("`make setup` makes the pool, and all else that a host needs")
                .into());
        }
        let data_dir = tempfile::Builder::new()
            .prefix("scratch-")
            .tempdir_in(place)
            .context("make a data directory")?;
        let mut config = self.config_on_any_port()?;
        config.data_dir = data_dir.path().to_owned();
        config.database = None;
        Ok((config, data_dir))
    }

    /// For commands that serve nobody, or only themselves.
    pub(crate) fn config_on_any_port(&self) -> Result<Config, Failure> {
        self.config(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
    }
}

/// Templates are cloned by sharing their blocks, which only works within one file system.
fn default_cache(pool: &Path, data_dir: &Path) -> PathBuf {
    if device(pool).is_some_and(|pool| device(data_dir) == Some(pool)) {
        pool.join("cache")
    } else {
        data_dir.join("cache")
    }
}

/// Of the nearest directory that exists.
fn device(path: &Path) -> Option<u64> {
    path.ancestors().find_map(|path| path.metadata().ok()).map(|metadata| metadata.dev())
}

pub(crate) fn require_root(command: &str) -> Result<(), Failure> {
    if rustix::process::geteuid().is_root() {
        return Ok(());
    }
    Err(Failure::new(format!(
        "`atoll {command}` needs root, for it makes machines and their networks"
    ))
    .hint(format!("run it with sudo: sudo atoll {command}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_is_shared_only_within_a_file_system() {
        let pool = tempfile::tempdir().unwrap();
        assert_eq!(
            default_cache(pool.path(), &pool.path().join("server")),
            pool.path().join("cache")
        );
        assert_eq!(
            default_cache(pool.path(), Path::new("/proc/self")),
            Path::new("/proc/self/cache")
        );
    }
}
