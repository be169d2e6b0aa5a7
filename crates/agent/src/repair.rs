//! After a restore: what makes a clone a machine of its own, in the order in which it matters, before any answer.
#![expect(unsafe_code, reason = "the kernel's generator takes requests that no crate in use knows")]

use std::ffi::{c_int, c_ulong, c_void};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use protocol::message::{ErrorCode, Failure, Network, Repair};
use rustix::fs::Timespec;
use rustix::time::{ClockId, clock_settime};

use crate::boot;
use crate::cgroup;
use crate::failure::refuse;
use crate::kernel::RENEW;
use crate::state::growth;

// Linux `include/uapi/linux/random.h`.
const RNDADDENTROPY: c_ulong = 0x4008_5203;
const RNDRESEEDCRNG: c_ulong = 0x5207;

/// Without its own random numbers, its own time and its own names a clone must not run.
pub(crate) fn identify(wanted: &Repair) -> Result<(), Failure> {
    if wanted.machine_id.len() != 32
        || !wanted.machine_id.bytes().all(|byte| byte.is_ascii_hexdigit())
    {
        return Err(refuse(ErrorCode::Invalid, "a machine id has 32 hexadecimal digits"));
    }
    add_entropy(&wanted.entropy).map_err(|error| fail("reseed the random numbers", &error))?;
    set_clock(wanted.unix_time_ns).map_err(|error| fail("set the clock", &error))
}

/// Once files can be written. `network` is what the guest has, so that nothing is done when nothing changes.
pub(crate) fn settle_in(wanted: &Repair, network: &mut Network) -> Result<(), Failure> {
    // A root file system on which these cannot be written is the user's doing, and can be restored all the same.
    boot::report("set the machine id", boot::set_machine_id(&wanted.machine_id));
    boot::report("set the host name", boot::set_host_name(&wanted.host_name));
    if *network != wanted.network {
        boot::network::configure(&wanted.network)
            .map_err(|error| fail("bring up the network", &error))?;
        *network = wanted.network.clone();
        boot::report("name the resolver", boot::set_resolver(wanted.network.gateway));
    }
    if wanted.grow_root {
        boot::report("grow the root file system", growth::grow("/dev/vda".as_ref(), "/".as_ref()));
    }
    Ok(())
}

fn fail(what: &str, error: &std::io::Error) -> Failure {
    refuse(ErrorCode::Internal, format!("{what}: {error}"))
}

/// Adding alone would leave all clones with equal numbers until the next reseed, minutes later.
fn add_entropy(entropy: &[u8; 32]) -> std::io::Result<()> {
    #[repr(C)]
    struct Pool {
        bits: c_int,
        size: c_int,
        bytes: [u8; 32],
    }
    let random = File::options().write(true).open("/dev/urandom")?;
    let mut pool = Pool { bits: 256, size: 32, bytes: *entropy };
    call(&random, RNDADDENTROPY, (&raw mut pool).cast())?;
    call(&random, RNDRESEEDCRNG, std::ptr::null_mut())
}

pub(crate) fn set_clock(unix_time_ns: u64) -> std::io::Result<()> {
    const SECOND: u64 = 1_000_000_000;
    let seconds = i64::try_from(unix_time_ns / SECOND).unwrap_or(i64::MAX);
    let nanoseconds = i64::try_from(unix_time_ns % SECOND).unwrap_or(0);
    clock_settime(ClockId::Realtime, Timespec { tv_sec: seconds, tv_nsec: nanoseconds })?;
    Ok(())
}

/// To all of this group that listen for it: see `kernel.py`.
pub(crate) fn renew_randomness(group: BorrowedFd<'_>) {
    let text = cgroup::read_file(group, "cgroup.procs").unwrap_or_default();
    for process in text.lines().filter_map(|line| line.parse().ok()).filter(|pid| listens(*pid)) {
        // SAFETY: a system call without pointers.
        unsafe {
            libc::kill(process, RENEW);
        }
    }
    for below in cgroup::subgroups(group) {
        if let Ok(below) = cgroup::open(group, &below) {
            renew_randomness(below.as_fd());
        }
    }
}

/// Whoever has no handler for it would die of the signal.
fn listens(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.is_some_and(|mask| mask & (1 << (RENEW - 1)) != 0)
}

fn call(file: &File, request: c_ulong, argument: *mut c_void) -> std::io::Result<()> {
    // SAFETY: every caller passes the structure that this request reads or fills, or null where it takes none.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as libc::Ioctl, argument) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}
