//! Freezing everybody but the agent, by control groups: all groups beside the agent's own, for root in the guest may make
//! more, and move processes out of those they began in.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use protocol::message::{ErrorCode, Failure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags, mkdirat, openat};
use rustix::io::Errno;

use super::attempt::Attempt;
use super::process::Process;
use crate::cgroup::{open, read_file, subgroups, write_file};
use crate::failure::refuse;

/// For a process that waits for a disk. Meanwhile all others stand already.
const LONGEST: Duration = Duration::from_secs(10);
/// How late a given-up attempt may be noticed.
const LOOK: Duration = Duration::from_millis(500);
const AGENT: &[u8] = b"agent";
const WORK: &[u8] = b"work";

#[derive(Debug)]
pub(crate) struct Groups {
    root: OwnedFd,
    /// The whole hierarchy, and every process of this machine, are ours to look after.
    is_whole: bool,
    /// They are many, stay, and cost a look each.
    kernel_threads: HashSet<i32>,
}

/// A group that was not frozen before.
#[derive(Debug)]
pub(crate) struct Frozen {
    directory: OwnedFd,
    name: Vec<u8>,
}

impl Frozen {
    pub(crate) fn thaw(&self) {
        let thawed = write_file(&self.directory, "cgroup.freeze", b"0");
        // Root in the guest may have removed it, once it was empty.
        if thawed != Err(Errno::NODEV) {
            crate::boot::report("let processes go on", thawed);
        }
    }
}

impl Groups {
    pub(crate) fn of(directory: &Path, is_whole: bool) -> Result<Self, Errno> {
        let root = open(CWD, directory.as_os_str().as_encoded_bytes())?;
        Ok(Self { root, is_whole, kernel_threads: HashSet::new() })
    }

    /// On failure, what stands already is in `attempt`.
    pub(crate) fn freeze(&mut self, attempt: &Attempt) -> Result<(), Failure> {
        if self.is_whole {
            self.gather_strays();
        }
        let mut waiting = Vec::new();
        for name in subgroups(self.root.as_fd()).filter(|name| name != AGENT) {
            // One that is being removed, or that its user has frozen, is none of our business. `work` is.
            let Ok(directory) = open(&self.root, &name) else { continue };
            // Without a process there is nothing to stop, and nobody but us begins one. To thaw a group costs a restore
            // more than all else that it repairs.
            let events = read_file(&directory, "cgroup.events");
            if events.is_ok_and(|text| text.lines().any(|line| line == "populated 0")) {
                continue;
            }
            let frozen_before = read_file(&directory, "cgroup.freeze");
            if name != WORK && frozen_before.is_ok_and(|text| text.trim() == "1") {
                continue;
            }
            let Ok(again) = directory.try_clone() else { continue };
            attempt.freezes(Frozen { directory: again, name: name.clone() });
            match write_file(&directory, "cgroup.freeze", b"1") {
                Ok(()) => waiting.push(Frozen { directory, name }),
                Err(Errno::NODEV) => {}
                Err(error) => {
                    return Err(refuse(
                        ErrorCode::Internal,
                        format!("stop the processes of this sandbox: {error}"),
                    ));
                }
            }
        }
        let end = (Instant::now() + LONGEST).min(attempt.deadline());
        for group in waiting {
            group.wait(end, attempt)?;
        }
        Ok(())
    }

    /// Every process that [`Groups::freeze`] stops.
    pub(crate) fn processes(&self) -> Vec<i32> {
        let mut found = Vec::new();
        for name in subgroups(self.root.as_fd()).filter(|name| name != AGENT) {
            if let Ok(directory) = open(&self.root, &name) {
                collect(directory.as_fd(), &mut found);
            }
        }
        found
    }

    /// Processes that root has put where no group of theirs can be frozen: beside the agent, or at the top.
    fn gather_strays(&mut self) {
        let Ok(work) = open(&self.root, WORK) else { return };
        let mut strays = Vec::new();
        for place in [open(&self.root, AGENT).ok().as_ref(), Some(&self.root)].into_iter().flatten()
        {
            let Ok(text) = read_file(place, "cgroup.procs") else { continue };
            for pid in text.lines().filter_map(|line| line.parse().ok()) {
                if pid == 1 || self.kernel_threads.contains(&pid) {
                    continue;
                }
                match Process::of(pid) {
                    Some(process) if process.is_of_kernel => drop(self.kernel_threads.insert(pid)),
                    Some(_) => strays.push(pid),
                    None => {}
                }
            }
        }
        if strays.is_empty() {
            return;
        }
        let _ = mkdirat(&work, "strays", Mode::from_raw_mode(0o755));
        let Ok(group) = open(&work, b"strays") else { return };
        for pid in strays {
            let _ = write_file(&group, "cgroup.procs", pid.to_string().as_bytes());
        }
    }
}

fn collect(group: BorrowedFd<'_>, found: &mut Vec<i32>) {
    let events = read_file(group, "cgroup.events").unwrap_or_default();
    if events.lines().any(|line| line == "populated 0") {
        return;
    }
    let text = read_file(group, "cgroup.procs").unwrap_or_default();
    found.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()));
    for below in subgroups(group) {
        if let Ok(below) = open(group, &below) {
            collect(below.as_fd(), found);
        }
    }
}

impl Frozen {
    fn wait(&self, end: Instant, attempt: &Attempt) -> Result<(), Failure> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let Ok(events) = openat(&self.directory, "cgroup.events", flags, Mode::empty()) else {
            return Ok(());
        };
        loop {
            let mut text = [0; 128];
            match rustix::io::pread(&events, &mut text, 0) {
                Ok(length) if text[..length].windows(8).any(|part| part == b"frozen 1") => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(_) => return Ok(()),
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || attempt.is_given_up() {
                return Err(self.does_not_stop());
            }
            let mut changed = [PollFd::new(&events, PollFlags::PRI)];
            let _ = poll(&mut changed, left.min(LOOK).try_into().ok().as_ref());
        }
    }

    fn does_not_stop(&self) -> Failure {
        let who = self.first_that_waits(self.directory.as_fd()).map_or_else(
            || format!("a process in the group {}", crate::failure::shown(&self.name)),
            |process| process.to_string(),
        );
        let message =
            format!("{who} cannot be stopped: it waits for a disk or a file system; end it first");
        refuse(ErrorCode::Conflict, message)
    }

    fn first_that_waits(&self, group: BorrowedFd<'_>) -> Option<Process> {
        let text = read_file(group, "cgroup.procs").unwrap_or_default();
        let pids = text.lines().filter_map(|line| line.parse().ok());
        pids.filter_map(Process::of).find(|process| process.waits_for_disk).or_else(|| {
            subgroups(group)
                .find_map(|below| self.first_that_waits(open(group, &below).ok()?.as_fd()))
        })
    }
}
