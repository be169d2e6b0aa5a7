//! Pseudo-terminals: the system calls that make one and steer it.
#![expect(unsafe_code, reason = "no crate in use offers these requests to a terminal's driver")]

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::sys::termios::{InputFlags, SetArg, tcgetattr, tcsetattr};
use protocol::message::WindowSize;
use rustix::fs::{CWD, Gid, Mode, OFlags, Uid, fchmod, fchown, openat};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

/// As on any Linux: others may `write` to it, not read from it.
const TTY_GROUP: u32 = 5;

/// Our end and the one for the processes, which belongs to `user`.
pub(crate) fn open(size: WindowSize, user: u32) -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let ours = openat(CWD, "/dev/ptmx", flags, Mode::empty())?;
    let unlocked: libc::c_int = 0;
    // SAFETY: the request reads one integer, which lives through the call.
    check(unsafe { libc::ioctl(ours.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) })?;
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the request takes flags and gives a new descriptor, which nobody else owns.
    let theirs = unsafe {
        let theirs = check(libc::ioctl(ours.as_raw_fd(), libc::TIOCGPTPEER, flags))?;
        OwnedFd::from_raw_fd(theirs)
    };
    resize(&ours, size)?;
    // The rest is comfort, and a host may not allow it.
    let _ = fchown(&theirs, Some(Uid::from_raw(user)), Some(Gid::from_raw(TTY_GROUP)));
    let _ = fchmod(&theirs, Mode::from_raw_mode(0o620));
    if let Ok(mut modes) = tcgetattr(&theirs) {
        // Erasing takes a whole character away.
        modes.input_flags |= InputFlags::IUTF8;
        let _ = tcsetattr(&theirs, SetArg::TCSANOW, &modes);
    }
    Ok((ours, theirs))
}

/// Tells what is in the foreground, if it is a change.
pub(crate) fn resize(ours: impl AsFd, size: WindowSize) -> Result<(), Errno> {
    let size =
        libc::winsize { ws_row: size.rows, ws_col: size.columns, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the request reads the structure, which lives through the call.
    check(unsafe { libc::ioctl(ours.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) })
        .map(drop)
}

/// To the processes in the foreground.
pub(crate) fn signal(ours: impl AsFd, signal: Signal) -> Result<(), Errno> {
    let mut group: libc::pid_t = 0;
    // SAFETY: the request writes one process id, which lives through the call.
    check(unsafe { libc::ioctl(ours.as_fd().as_raw_fd(), libc::TIOCGPGRP, &raw mut group) })?;
    // 1 would be everybody.
    let group = Pid::from_raw(group).filter(|group| group.as_raw_nonzero().get() > 1);
    kill_process_group(group.ok_or(Errno::SRCH)?, signal)
}

fn check(result: libc::c_int) -> Result<libc::c_int, Errno> {
    if result >= 0 {
        return Ok(result);
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}
