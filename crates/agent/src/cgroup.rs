//! Control groups: the agent's own, which gets CPU and memory before all others, and `work` with one group for each exec.
//! Without version 2 (tests on a host) everything works, only the tree of an exec is then found by its processes.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, mkdirat, openat, unlinkat};
use rustix::io::{Errno, pread, read, write};
use rustix::process::{Pid, Signal, kill_process};

/// Groups made ahead, so that no exec waits for its own; those of a baked machine are there after its restore.
const SPARE: usize = 2;

/// The group `work`.
#[derive(Debug)]
pub(crate) struct Groups {
    work: OwnedFd,
    spare: Vec<Group>,
    next: u32,
    /// Of one exec: less than of all, so that one fork bomb leaves room for the command that ends it.
    most_processes: Option<u64>,
}

/// One exec's group.
#[derive(Debug)]
pub(crate) struct Group {
    directory: OwnedFd,
    /// `cgroup.events`: tells when the last process is gone.
    events: OwnedFd,
    name: String,
    /// As counted by the kernel when the group was taken: groups are used again.
    memory_kills: u64,
}

impl Groups {
    /// `directory`: of the hierarchy, or a part of it that is ours.
    pub(crate) fn set_up(directory: &Path) -> Result<Self, Errno> {
        let root = open(CWD, directory.as_os_str().as_encoded_bytes())?;
        match mkdirat(&root, "work", Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
        let work = open(&root, b"work")?;
        let most: Option<u64> =
            read_file(&work, "pids.max").ok().and_then(|text| text.trim().parse().ok());
        let most_processes = most.map(|most| most / 8 * 7);
        let mut groups = Self { work, spare: Vec::new(), next: 0, most_processes };
        groups.refill();
        Ok(groups)
    }

    pub(crate) fn take(&mut self) -> Option<Group> {
        while let Some(mut group) = self.spare.pop() {
            // Root in the guest may have removed it.
            if group.is_populated() == Ok(false) {
                group.memory_kills = group.count_memory_kills();
                return Some(group);
            }
        }
        self.make().ok()
    }

    /// For an empty group that is needed no longer.
    pub(crate) fn give_back(&mut self, group: Group) {
        if self.spare.len() < SPARE && group.is_populated() == Ok(false) && !group.has_subgroups() {
            self.spare.push(group);
        } else {
            remove(&self.work, &group.name, 0);
        }
    }

    pub(crate) fn refill(&mut self) {
        while self.spare.len() < SPARE
            && let Ok(group) = self.make()
        {
            self.spare.insert(0, group);
        }
    }

    /// Every process of every exec, those of ended ones included.
    pub(crate) fn signal_all(&self, signal: Signal) {
        signal_tree(self.work.as_fd(), signal);
    }

    pub(crate) fn are_populated(&self) -> bool {
        let events =
            openat(&self.work, "cgroup.events", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        events.and_then(populated).unwrap_or(false)
    }

    fn make(&mut self) -> Result<Group, Errno> {
        loop {
            self.next += 1;
            let name = self.next.to_string();
            match mkdirat(&self.work, name.as_str(), Mode::from_raw_mode(0o755)) {
                Ok(()) => {}
                Err(Errno::EXIST) => continue,
                Err(error) => return Err(error),
            }
            let directory = open(&self.work, name.as_bytes())?;
            let events = openat(
                &directory,
                "cgroup.events",
                OFlags::RDONLY | OFlags::CLOEXEC,
                Mode::empty(),
            )?;
            // One process of a command that is out of memory takes all of it along: half a command helps nobody.
            let _ = write_file(&directory, "memory.oom.group", b"1");
            if let Some(most) = self.most_processes {
                let _ = write_number(&directory, "pids.max", most);
            }
            return Ok(Group { directory, events, name, memory_kills: 0 });
        }
    }
}

impl Group {
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Readable as an exceptional condition whenever the group becomes empty.
    pub(crate) fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    pub(crate) fn is_populated(&self) -> Result<bool, Errno> {
        populated(&self.events)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        signal_tree(self.directory.as_fd(), signal);
    }

    /// Whether the kernel killed something in here for lack of memory since the group was taken.
    pub(crate) fn was_killed_for_memory(&self) -> bool {
        self.count_memory_kills() > self.memory_kills
    }

    fn count_memory_kills(&self) -> u64 {
        let Ok(text) = read_file(&self.directory, "memory.events") else { return 0 };
        let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        count.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
    }

    fn has_subgroups(&self) -> bool {
        let text = read_file(&self.directory, "cgroup.stat").unwrap_or_default();
        !text.lines().any(|line| line == "nr_descendants 0")
    }
}

/// Moves the calling process into `group`.
pub(crate) fn enter(group: impl AsFd) -> Result<(), Errno> {
    write_file(group, "cgroup.procs", b"0")
}

pub(crate) fn open(directory: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    openat(directory, name, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

fn populated(events: impl AsFd) -> Result<bool, Errno> {
    let mut text = [0; 64];
    let length = pread(events, &mut text, 0)?;
    Ok(!text[..length].starts_with(b"populated 0"))
}

/// Also the groups that root in the guest has made below.
fn signal_tree(directory: BorrowedFd<'_>, signal: Signal) {
    if signal == Signal::KILL && write_file(directory, "cgroup.kill", b"1").is_ok() {
        return;
    }
    let Ok(text) = read_file(directory, "cgroup.procs") else { return };
    for pid in text.lines().filter_map(|line| line.parse().ok()).filter_map(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
    for below in subgroups(directory) {
        if let Ok(below) = open(directory, &below) {
            signal_tree(below.as_fd(), signal);
        }
    }
}

pub(crate) fn subgroups(directory: BorrowedFd<'_>) -> impl Iterator<Item = Vec<u8>> {
    let entries = rustix::fs::Dir::read_from(directory).into_iter().flatten().flatten();
    entries
        .filter(|entry| {
            entry.file_type().is_dir() && !entry.file_name().to_bytes().starts_with(b".")
        })
        .map(|entry| entry.file_name().to_bytes().to_vec())
}

fn remove(directory: impl AsFd, name: &str, depth: u32) {
    let gone = unlinkat(&directory, name, AtFlags::REMOVEDIR);
    if gone != Err(Errno::BUSY) || depth > 16 {
        return;
    }
    if let Ok(group) = open(&directory, name.as_bytes()) {
        for below in subgroups(group.as_fd()) {
            remove(&group, &String::from_utf8_lossy(&below), depth + 1);
        }
    }
    let _ = unlinkat(&directory, name, AtFlags::REMOVEDIR);
}

pub(crate) fn write_file(directory: impl AsFd, name: &str, value: &[u8]) -> Result<(), Errno> {
    let file = openat(directory, name, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    write(file, value).map(drop)
}

pub(crate) fn read_file(directory: impl AsFd, name: &str) -> Result<String, Errno> {
    let file = openat(directory, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut text = Vec::new();
    loop {
        text.reserve(4096);
        if read(&file, rustix::buffer::spare_capacity(&mut text))? == 0 {
            return Ok(String::from_utf8_lossy(&text).into_owned());
        }
    }
}

/// What the guest's kernel has for everybody.
pub(crate) struct Resources {
    pub(crate) memory_bytes: u64,
    pub(crate) threads: u64,
}

/// At boot: the agent's own group and the bounds of `work`. A controller that is missing is a bound that is missing, not a
/// reason not to start.
pub(crate) fn divide(directory: &Path, resources: &Resources) -> Result<(), Errno> {
    let root = open(CWD, directory.as_os_str().as_encoded_bytes())?;
    for name in ["agent", "work"] {
        match mkdirat(&root, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => return Err(error),
        }
    }
    let (agent, work) = (open(&root, b"agent")?, open(&root, b"work")?);
    enter(&agent)?;
    for group in [&root, &work] {
        for controller in ["+cpu", "+memory", "+pids"] {
            let _ = write_file(group, "cgroup.subtree_control", controller.as_bytes());
        }
    }
    let reserve = reserve(resources.memory_bytes);
    // The agent's buffers and code stay in memory whatever the work does.
    let _ = write_file(&agent, "cpu.weight", b"10000");
    let _ = write_number(&agent, "memory.min", reserve / 2);
    let _ = write_number(&work, "memory.max", resources.memory_bytes.saturating_sub(reserve));
    let _ = write_number(&work, "pids.max", most_processes(resources));
    Ok(())
}

/// Memory that work never gets: for the kernel's own needs and the agent.
fn reserve(total: u64) -> u64 {
    (24 << 20).max(total / 100 * 6)
}

/// So that even if each is a small shell, a fork bomb leaves memory for others: otherwise every new command would wait for
/// its own program to be read again and again.
fn most_processes(resources: &Resources) -> u64 {
    const EACH: u64 = 768 << 10;
    const ENOUGH: u64 = 512;
    (resources.threads / 5 * 4).min((resources.memory_bytes / EACH).max(ENOUGH))
}

fn write_number(directory: impl AsFd, name: &str, value: u64) -> Result<(), Errno> {
    let mut text = Vec::new();
    let _ = write!(text, "{value}");
    write_file(directory, name, &text)
}
