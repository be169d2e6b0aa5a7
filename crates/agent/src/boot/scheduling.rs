//! What makes the agent cheap: large batches, no page faults, and a kernel that does not wait for its clock.
#![expect(unsafe_code, reason = "no crate in use offers these calls")]

use std::ffi::c_int;

/// Freed memory up to this is kept instead of given back to the kernel, which would clear it anew page by page.
const KEPT: c_int = 4 << 20;
/// From here on memory comes from the kernel and goes back at once.
const LARGE: c_int = 1 << 20;

/// The agent does not interrupt a command that prints: it runs when the pipe is full, or the command waits or ends, and at
/// the latest with the next tick of the clock. With its weight it would otherwise come after each single write, at a
/// tenth of the throughput under emulation.
pub(super) fn prefer_batches() -> std::io::Result<()> {
    let parameter = libc::sched_param { sched_priority: 0 };
    // SAFETY: the structure lives through the call and is only read.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameter) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Freezing a file system waits three times until every processor has passed a point of rest, which without this comes with
/// the ticks of the clock: 40 ms in which the user's processes stand still, for 1 ms of work. It is for a kernel with few
/// processors to wake them instead.
pub(super) fn hurry_grace_periods() -> std::io::Result<()> {
    std::fs::write("/sys/kernel/rcu_expedited", "1")
}

pub(super) fn keep_freed_memory() {
    // SAFETY: settings of the allocator, made while there is one thread.
    unsafe {
        libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT);
        libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE);
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}
