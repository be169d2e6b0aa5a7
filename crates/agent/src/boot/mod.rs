//! From the kernel's first process in the initramfs to a running guest: file systems, network, names, groups.

mod identity;
mod modules;
pub(crate) mod mounts;
pub(crate) mod network;
mod port;
mod scheduling;

use std::os::fd::OwnedFd;

use anyhow::Context;
use protocol::message::Network;
use rustix::process::{Resource, Rlimit};

use crate::cgroup::{self, Resources};

pub(crate) use identity::{set_host_name, set_machine_id, set_resolver};

pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";
/// Every guest has this address on its own wire, so a snapshot carries no identity of the network.
pub(crate) const NETWORK: Network =
    Network { address: [10, 200, 0, 2], prefix: 30, gateway: [10, 200, 0, 1] };
const HOST_NAME: &str = "sandbox";
/// Descriptors: what a command begins with, and what it may raise that to.
const DESCRIPTORS: (u64, u64) = (65_536, 1_048_576);

/// Makes a guest out of a bare kernel, and gives the port to the host.
///
/// # Errors
/// Without a root disk or a port there is nothing to serve. What a guest can live without is reported on the console.
pub fn boot() -> anyhow::Result<OwnedFd> {
    mounts::mount_kernel_file_systems().context("mount the kernel's file systems")?;
    report("hurry the kernel", scheduling::hurry_grace_periods());
    modules::load_all().context("load the kernel's modules")?;
    mounts::enter_root().context("enter the root disk")?;
    mounts::mount_the_rest();
    // A template may come without /etc/hosts and the like, or with a read-only /etc: none of this is worth a failed boot.
    let _ = std::fs::create_dir("/etc");
    report("set the host name", set_host_name(HOST_NAME));
    report("name the resolver", set_resolver(NETWORK.gateway));
    report("bring up the network", network::configure(&NETWORK));
    report("divide the machine", divide());
    report("protect the agent", protect());
    report("schedule the agent", scheduling::prefer_batches());
    scheduling::keep_freed_memory();
    port::open().context("open the port to the host")
}

fn divide() -> rustix::io::Result<()> {
    let threads = [number("/proc/sys/kernel/pid_max"), number("/proc/sys/kernel/threads-max")]
        .into_iter()
        .min();
    let resources =
        Resources { memory_bytes: crate::memory_bytes(), threads: threads.unwrap_or(1024) };
    cgroup::divide(CGROUPS.as_ref(), &resources)
}

fn number(path: &str) -> u64 {
    std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(4096)
}

/// What user code does shall not reach us. The kernel never kills PID 1 for lack of memory (Linux `mm/oom_kill.c`,
/// `oom_unkillable_task`).
fn protect() -> anyhow::Result<()> {
    let flags = rustix::mm::MlockAllFlags::CURRENT
        | rustix::mm::MlockAllFlags::FUTURE
        | rustix::mm::MlockAllFlags::ONFAULT;
    rustix::mm::mlockall(flags).context("stay in memory")?;
    let (current, maximum) = DESCRIPTORS;
    let limit = Rlimit { current: Some(current), maximum: Some(maximum) };
    rustix::process::setrlimit(Resource::Nofile, limit).context("allow many descriptors")?;
    rustix::process::setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: None })
        .context("forbid core files")
}

/// On the console, which the host keeps.
pub fn report<T, E: Into<anyhow::Error>>(what: &str, result: Result<T, E>) {
    use std::io::Write;
    if let Err(error) = result {
        let _ = writeln!(std::io::stderr(), "atoll-agent failed to {what}: {:#}", error.into());
    }
}

/// The last thing: without it the kernel would panic.
pub fn power_off() {
    rustix::fs::sync();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
}
