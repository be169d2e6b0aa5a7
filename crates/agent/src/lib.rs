//! `atoll-agent`: PID 1 of the guest, the guest's end of crate `protocol`. A library, so that tests can run the server on
//! a host over a socket pair.

pub mod boot;
mod cgroup;
mod exec;
mod failure;
mod files;
pub mod kernel;
mod ports;
mod reaper;
mod repair;
mod serve;
mod state;
mod terminal;
pub mod transfer;
mod users;
mod workers;

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

/// Where and how an agent serves.
#[derive(Debug)]
pub struct Options {
    pub place: Place,
    /// This program, to be run again as a process of its own.
    pub program: PathBuf,
    /// Holds the files without names in which long output of execs is kept.
    pub spill_directory: PathBuf,
    /// A version 2 control group in which the agent may make `work` and a group for each exec below it.
    pub groups: Option<PathBuf>,
    /// File systems mounted at or below it are frozen in quiet moments; `None`: none are.
    pub file_systems: Option<PathBuf>,
    /// On a host: block devices that stand for the slots of volumes. A guest finds its own.
    pub disks: Vec<(u8, PathBuf)>,
    /// How long everything may stand still without a word from the host.
    pub quiet_limit: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// As PID 1: repairs and shutdowns are done, the port never ends, all orphans are ours.
    Guest,
    /// In any process, for tests: the machine is left as it is, and the end of the port ends the server.
    Host,
}

impl Options {
    pub fn guest() -> Self {
        Self {
            place: Place::Guest,
            // Also when its file is gone, as that of an initramfs is.
            program: PathBuf::from("/proc/self/exe"),
            spill_directory: PathBuf::from("/"),
            groups: Some(boot::CGROUPS.into()),
            file_systems: Some(PathBuf::from("/")),
            disks: Vec::new(),
            quiet_limit: protocol::QUIET_LIMIT,
        }
    }

    pub fn hosted() -> Self {
        Self {
            place: Place::Host,
            program: PathBuf::from("/proc/self/exe"),
            spill_directory: std::env::temp_dir(),
            groups: None,
            file_systems: None,
            disks: Vec::new(),
            quiet_limit: protocol::QUIET_LIMIT,
        }
    }
}

/// Serves the host on `port`; returns after a shutdown, or, on a host, at the end of the port.
///
/// # Errors
/// The loop itself cannot go on; failures of requests are answered.
pub fn serve(port: OwnedFd, options: Options) -> anyhow::Result<()> {
    serve::run(port, options)
}

fn memory_bytes() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}
