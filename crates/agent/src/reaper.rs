//! The one place that waits for processes. In the guest every orphan becomes our child; on a host only our own execs are
//! ours to wait for.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use rustix::process::{WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, WaitStatus, wait, waitid};

/// A process that has ended, and as what a shell reports its end: its code, or 128 + the signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ended {
    pub(crate) pid: i32,
    pub(crate) exit_code: i32,
}

/// Reaps every child.
#[derive(Debug)]
pub(crate) struct Reaper {
    signals: SignalFd,
}

impl Reaper {
    /// Before any thread begins: they inherit that the signal is blocked.
    pub(crate) fn new() -> nix::Result<Self> {
        let mut set = SigSet::empty();
        set.add(Signal::SIGCHLD);
        set.thread_block()?;
        Ok(Self {
            signals: SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?,
        })
    }

    /// Readable when children may have ended.
    pub(crate) fn signals(&self) -> BorrowedFd<'_> {
        self.signals.as_fd()
    }

    /// The next one that has ended, an orphan of whatever origin included.
    pub(crate) fn next(&self) -> Option<Ended> {
        let (pid, status) = wait(WaitOptions::NOHANG).ok()??;
        Some(Ended { pid: pid.as_raw_nonzero().get(), exit_code: exit_code(status) })
    }

    /// Once, before [`Reaper::next`] is called until nothing is left.
    pub(crate) fn acknowledge(&self) {
        while let Ok(Some(_)) = self.signals.read_signal() {}
    }
}

fn exit_code(status: WaitStatus) -> i32 {
    match (status.exit_status(), status.terminating_signal()) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 0,
    }
}

/// Where others have children in this process, too: `pidfd`'s process, which has ended.
pub(crate) fn bury(pidfd: &OwnedFd, pid: i32) -> Option<Ended> {
    let status: WaitIdStatus =
        waitid(WaitId::PidFd(pidfd.as_fd()), WaitIdOptions::EXITED).ok()??;
    let exit_code =
        status.exit_status().or_else(|| status.terminating_signal().map(|signal| 128 + signal));
    Some(Ended { pid, exit_code: exit_code.unwrap_or(0) })
}
