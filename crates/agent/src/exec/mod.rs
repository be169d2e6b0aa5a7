//! Commands: what is known of each, by its id, from its start until the host has forgotten it. Starting, reading and
//! killing happen in [`crate::serve`], which alone waits for anything.

pub(crate) mod command;
pub(crate) mod output;
pub(crate) mod spawn;
pub(crate) mod tree;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use protocol::frame::Channel;
use protocol::message::{ErrorCode, ExecState, ExecStatus, Failure};
use rustix::process::Signal;

use crate::cgroup::{Group, Groups};
use crate::failure::refuse;
use output::{Kept, Memory, Order, Position};

pub(crate) const MOST_RUNNING: usize = 1024;
/// Records of ended execs; the oldest go first.
const MOST_ENDED: usize = 2048;
/// Output of ended execs; the oldest goes first.
const MOST_KEPT: u64 = 1 << 30;
/// The part of it that is in memory; more goes to files.
const MOST_KEPT_IN_MEMORY: usize = 8 << 20;
/// So many at once have less memory each for what they print.
const MANY: usize = 64;
const LONGEST_ID: usize = 128;

/// Numbers an exec inside the agent, also after its id is forgotten.
pub(crate) type Serial = u32;

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: String,
    /// 0 while it is being started.
    pub(crate) pid: i32,
    pub(crate) pidfd: Option<OwnedFd>,
    pub(crate) group: Option<Group>,
    started: Instant,
    pub(crate) stdout: Output,
    pub(crate) stderr: Output,
    pub(crate) order: Order,
    pub(crate) stdin: Option<Stdin>,
    /// Streams that wait for what it prints next.
    pub(crate) watchers: Vec<u32>,
    pub(crate) stop: Option<Stop>,
    /// How the main process ended.
    pub(crate) exit_code: Option<i32>,
    pub(crate) killed_for_memory: bool,
    ended: Option<ExecStatus>,
    /// When to kill what is left.
    deadline: Option<Instant>,
    pub(crate) forgotten: bool,
}

#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) pipe: Option<OwnedFd>,
    pub(crate) kept: Kept,
    /// Once the main process has ended: what was in the pipe then and still counts as its output.
    pub(crate) left: Option<usize>,
    /// Not watched because the disk is slower than the command.
    pub(crate) paused: bool,
}

#[derive(Debug)]
pub(crate) struct Stdin {
    pub(crate) pipe: OwnedFd,
    pub(crate) queue: VecDeque<Vec<u8>>,
    /// Of the first in the queue.
    pub(crate) written: usize,
    pub(crate) bytes: usize,
    pub(crate) finished: bool,
    /// Where credit goes.
    pub(crate) stream: Option<u32>,
    pub(crate) polled: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stop {
    TimedOut,
    Cancelled,
}

impl Exec {
    pub(crate) fn output(&mut self, channel: Channel) -> &mut Output {
        match channel {
            Channel::Stdout => &mut self.stdout,
            Channel::Stderr | Channel::Content => &mut self.stderr,
        }
    }

    pub(crate) fn note_order(&mut self) {
        let now = Position { stdout: self.stdout.kept.kept(), stderr: self.stderr.kept.kept() };
        self.order.note(now);
    }

    /// The disk was full: a part of the output is gone.
    pub(crate) fn has_lost_output(&mut self) {
        self.note_order();
        if let Some(status) = &mut self.ended {
            status.truncated = true;
        }
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended.is_some()
    }

    /// Everything is known and delivered to the record: the main process has ended and both streams are drained.
    pub(crate) fn is_complete(&self) -> bool {
        let drained = |output: &Output| output.pipe.is_none() || output.left == Some(0);
        self.exit_code.is_some() && drained(&self.stdout) && drained(&self.stderr)
    }

    pub(crate) fn status(&self) -> ExecStatus {
        if let Some(status) = &self.ended {
            return status.clone();
        }
        let (stdout, stderr) = (&self.stdout.kept, &self.stderr.kept);
        ExecStatus {
            state: ExecState::Running,
            exit_code: None,
            killed_for_memory: false,
            stdout_bytes: stdout.total(),
            stderr_bytes: stderr.total(),
            truncated: stdout.total() > stdout.kept() || stderr.total() > stderr.kept(),
            duration_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// To every process of it.
    pub(crate) fn signal(&self, signal: Signal) {
        match &self.group {
            Some(group) => group.signal(signal),
            // Once it is reaped, its number may be another's.
            None if self.pid > 0 && self.exit_code.is_none() => tree::signal(self.pid, signal),
            None => {}
        }
    }

    fn kept_bytes(&self) -> u64 {
        self.stdout.kept.kept() + self.stderr.kept.kept()
    }

    fn memory_bytes(&self) -> usize {
        self.stdout.kept.in_memory() + self.stderr.kept.in_memory()
    }

    fn forget_output(&mut self) {
        self.stdout.kept.forget();
        self.stderr.kept.forget();
        self.order = Order::default();
        if let Some(status) = &mut self.ended {
            status.truncated |= status.stdout_bytes + status.stderr_bytes > 0;
        }
    }

    /// Nothing of it is needed or watched any longer.
    fn is_over(&self) -> bool {
        self.forgotten
            && self.has_ended()
            && self.stdout.pipe.is_none()
            && self.stderr.pipe.is_none()
            && self.group.is_none()
    }
}

/// All execs of this guest.
#[derive(Debug)]
pub(crate) struct Execs {
    by_serial: HashMap<Serial, Exec>,
    by_id: HashMap<String, Serial>,
    by_pid: HashMap<i32, Serial>,
    running: usize,
    ended: VecDeque<Serial>,
    deadlines: BTreeSet<(Instant, Serial)>,
    next: Serial,
    /// No file may be let go of: nothing is written at the moment.
    pub(crate) keeps_files: bool,
    pub(crate) groups: Option<Groups>,
}

impl Execs {
    pub(crate) fn new(groups: Option<Groups>) -> Self {
        Self {
            by_serial: HashMap::new(),
            by_id: HashMap::new(),
            by_pid: HashMap::new(),
            running: 0,
            ended: VecDeque::new(),
            deadlines: BTreeSet::new(),
            next: 0,
            keeps_files: false,
            groups,
        }
    }

    /// Whether an exec under `id` may begin.
    pub(crate) fn admit(&self, id: &str) -> Result<(), Failure> {
        check_id(id, "an exec")?;
        if self.by_id.contains_key(id) {
            return Err(refuse(ErrorCode::Conflict, format!("there is an exec {id} already")));
        }
        if self.running >= MOST_RUNNING {
            let message =
                format!("{MOST_RUNNING} execs are running; wait for some to end, or cancel them");
            return Err(refuse(ErrorCode::Busy, message));
        }
        Ok(())
    }

    pub(crate) fn add(
        &mut self,
        id: String,
        stdout: OwnedFd,
        stderr: OwnedFd,
        limit: u64,
    ) -> Serial {
        self.next += 1;
        let output =
            |pipe| Output { pipe: Some(pipe), kept: Kept::new(limit), left: None, paused: false };
        let exec = Exec {
            id: id.clone(),
            pid: 0,
            pidfd: None,
            group: self.groups.as_mut().and_then(Groups::take),
            started: Instant::now(),
            stdout: output(stdout),
            stderr: output(stderr),
            order: Order::default(),
            stdin: None,
            watchers: Vec::new(),
            stop: None,
            exit_code: None,
            killed_for_memory: false,
            ended: None,
            deadline: None,
            forgotten: false,
        };
        self.by_serial.insert(self.next, exec);
        self.by_id.insert(id, self.next);
        self.running += 1;
        self.next
    }

    /// It never ran.
    pub(crate) fn withdraw(&mut self, serial: Serial) {
        self.set_deadline(serial, None);
        let Some(exec) = self.by_serial.remove(&serial) else { return };
        self.by_id.remove(&exec.id);
        self.running -= 1;
        self.give_back(exec.group);
    }

    pub(crate) fn runs_as(&mut self, serial: Serial, pid: i32) {
        if let Some(exec) = self.by_serial.get_mut(&serial) {
            exec.pid = pid;
            self.by_pid.insert(pid, serial);
        }
    }

    pub(crate) fn by_id(&self, id: &str) -> Result<Serial, Failure> {
        let serial = self.by_id.get(id).copied();
        serial.ok_or_else(|| {
            refuse(ErrorCode::NotFound, format!("there is no exec {}", id.escape_default()))
        })
    }

    pub(crate) fn get(&self, serial: Serial) -> Option<&Exec> {
        self.by_serial.get(&serial)
    }

    pub(crate) fn get_mut(&mut self, serial: Serial) -> Option<&mut Exec> {
        self.by_serial.get_mut(&serial)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = (Serial, &Exec)> {
        self.by_serial.iter().map(|(&serial, exec)| (serial, exec))
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = (Serial, &mut Exec)> {
        self.by_serial.iter_mut().map(|(&serial, exec)| (serial, exec))
    }

    /// In the order of their starts.
    pub(crate) fn statuses(&self) -> Vec<(String, ExecStatus)> {
        // An id with a colon is of a process of the agent's own: no host can choose one.
        let mut all: Vec<_> = self.by_id.iter().filter(|(id, _)| !id.contains(':')).collect();
        all.sort_unstable_by_key(|(_, serial)| **serial);
        all.into_iter()
            .filter_map(|(id, serial)| Some((id.clone(), self.get(*serial)?.status())))
            .collect()
    }

    /// Its main process is gone: the pid may be another's from now on.
    pub(crate) fn take_pid(&mut self, pid: i32) -> Option<Serial> {
        self.by_pid.remove(&pid)
    }

    pub(crate) fn set_deadline(&mut self, serial: Serial, deadline: Option<Instant>) {
        let Some(exec) = self.by_serial.get_mut(&serial) else { return };
        if let Some(old) = std::mem::replace(&mut exec.deadline, deadline) {
            self.deadlines.remove(&(old, serial));
        }
        if let Some(new) = deadline {
            self.deadlines.insert((new, serial));
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|&(at, _)| at)
    }

    pub(crate) fn overdue(&mut self, now: Instant) -> Option<Serial> {
        let &(at, serial) = self.deadlines.first().filter(|(at, _)| *at <= now)?;
        self.deadlines.remove(&(at, serial));
        if let Some(exec) = self.by_serial.get_mut(&serial) {
            exec.deadline = None;
        }
        Some(serial)
    }

    /// Everything is known: the exec has ended.
    pub(crate) fn end(&mut self, serial: Serial) {
        self.set_deadline(serial, None);
        let Some(exec) = self.by_serial.get_mut(&serial) else { return };
        let state = match exec.stop {
            None => ExecState::Exited,
            Some(Stop::TimedOut) => ExecState::TimedOut,
            Some(Stop::Cancelled) => ExecState::Cancelled,
        };
        let status = exec.status();
        let (exit_code, killed_for_memory) = (exec.exit_code, exec.killed_for_memory);
        exec.ended = Some(ExecStatus { state, exit_code, killed_for_memory, ..status });
        exec.stdin = None;
        exec.stdout.kept.shrink();
        exec.stderr.kept.shrink();
        self.running -= 1;
        self.ended.push_back(serial);
        self.bound_ended();
    }

    pub(crate) fn bound_ended(&mut self) {
        if self.keeps_files {
            return;
        }
        while self.ended.len() > MOST_ENDED
            && let Some(oldest) = self.ended.pop_front()
        {
            self.forget(oldest);
        }
        let mut kept: u64 =
            self.ended.iter().filter_map(|serial| self.get(*serial)).map(Exec::kept_bytes).sum();
        for at in 0..self.ended.len() {
            if kept <= MOST_KEPT {
                break;
            }
            if let Some(exec) = self.by_serial.get_mut(&self.ended[at]) {
                kept -= exec.kept_bytes();
                exec.forget_output();
            }
        }
    }

    /// For whoever prints now.
    pub(crate) fn memory(&self) -> Memory {
        if self.running > MANY { Memory::Short } else { Memory::Enough }
    }

    /// Ended execs whose output should go from memory to files, the oldest first.
    pub(crate) fn too_much_in_memory(&self) -> Vec<Serial> {
        // The sum costs, so it is made now and then only.
        if !self.ended.len().is_multiple_of(16) {
            return Vec::new();
        }
        let memory = |serial: &Serial| self.get(*serial).map_or(0, Exec::memory_bytes);
        let mut excess =
            self.ended.iter().map(memory).sum::<usize>().saturating_sub(MOST_KEPT_IN_MEMORY);
        let oldest = self.ended.iter().take_while(|serial| {
            let goes_on = excess > 0;
            excess = excess.saturating_sub(memory(serial));
            goes_on
        });
        oldest.copied().collect()
    }

    /// The record goes now, the rest with the last background process.
    pub(crate) fn forget(&mut self, serial: Serial) {
        let Some(exec) = self.by_serial.get_mut(&serial) else { return };
        exec.forgotten = true;
        exec.forget_output();
        let id = exec.id.clone();
        self.by_id.remove(&id);
        self.ended.retain(|&other| other != serial);
        self.clean(serial);
    }

    /// After a pipe or the group of an exec came to its end.
    pub(crate) fn clean(&mut self, serial: Serial) {
        if self.get(serial).is_some_and(Exec::is_over) {
            self.by_serial.remove(&serial);
        }
    }

    pub(crate) fn give_back(&mut self, group: Option<Group>) {
        if let (Some(groups), Some(group)) = (&mut self.groups, group) {
            groups.give_back(group);
        }
    }

    pub(crate) fn running(&self) -> usize {
        self.running
    }
}

pub(crate) fn check_id(id: &str, of: &str) -> Result<(), Failure> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if id.is_empty() || id.len() > LONGEST_ID || !id.bytes().all(plain) {
        let message =
            format!("the id of {of} consists of 1 to 128 letters, digits, '.', '_' and '-'");
        return Err(refuse(ErrorCode::Invalid, message));
    }
    Ok(())
}

/// Much later than any use of it, and still a point in time.
pub(crate) fn after(now: Instant, span_ms: u64) -> Instant {
    const LONGEST: u64 = 1000 * 3600 * 24 * 365;
    now + Duration::from_millis(span_ms.min(LONGEST))
}
