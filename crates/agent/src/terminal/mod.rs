//! Terminals: what is known of each, from its beginning until it has ended and nobody comes back to it. Reading, typing and
//! ending happen in [`crate::serve`].

pub(crate) mod pty;
pub(crate) mod scrollback;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use protocol::message::{ErrorCode, Failure, TerminalStatus, WindowSize};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::cgroup::{Group, Groups};
use crate::exec::{Serial, tree};
use crate::failure::refuse;
use scrollback::Scrollback;

pub(crate) const MOST: usize = 128;
/// Ended ones that somebody may still come back to; the oldest go first.
const MOST_ENDED: usize = 16;
/// Whoever lost the connection just before the end still learns how it ended.
const ENDED_FOR: Duration = Duration::from_secs(60);
/// From the drop of the line to the kill.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Terminal {
    pub(crate) id: String,
    user: String,
    /// 0 while it is being started.
    pub(crate) pid: i32,
    pub(crate) pidfd: Option<OwnedFd>,
    pub(crate) group: Option<Group>,
    /// `None` once it has ended.
    pub(crate) line: Option<OwnedFd>,
    pub(crate) watched: Watched,
    pub(crate) scrollback: Scrollback,
    /// Typed, and not yet taken.
    pub(crate) typed: VecDeque<Vec<u8>>,
    /// Of the first in the queue.
    pub(crate) written: usize,
    pub(crate) typed_bytes: usize,
    pub(crate) size: WindowSize,
    /// The stream of whoever is attached, and how much of the output that one has got.
    pub(crate) attached: Option<(u32, u64)>,
    /// How the main process ended.
    pub(crate) exit_code: Option<i32>,
    pub(crate) ended: bool,
    begun: Instant,
    linger: Duration,
    /// Its line was dropped.
    dropped: bool,
    deadline: Option<Instant>,
}

/// What of the line the loop waits for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Watched {
    pub(crate) output: bool,
    pub(crate) room: bool,
}

/// What is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nobody came back.
    DropLine,
    Kill,
    Forget,
}

impl Terminal {
    /// What may be read now: whoever is attached gets all of it.
    pub(crate) fn room(&self) -> usize {
        match self.attached {
            Some((_, position)) => self.scrollback.room_behind(position),
            None => scrollback::MOST,
        }
    }

    pub(crate) fn take_typed(&mut self, bytes: &[u8]) {
        if self.line.is_some() {
            self.typed_bytes += bytes.len();
            self.typed.push_back(bytes.to_vec());
        }
    }

    /// To every process of it.
    pub(crate) fn kill(&self) {
        match &self.group {
            Some(group) => group.signal(Signal::KILL),
            // Once it is reaped, its number may be another's.
            None if self.pid > 0 && self.exit_code.is_none() => {
                tree::signal(self.pid, Signal::KILL)
            }
            None => {}
        }
    }

    /// As when a modem hangs up: the shell and what is in the foreground.
    pub(crate) fn drop_line(&mut self, grace: Duration) {
        if self.ended || self.dropped {
            return;
        }
        self.dropped = true;
        self.deadline = Some(Instant::now() + grace);
        for signal in [Signal::HUP, Signal::CONT] {
            if let Some(line) = &self.line {
                let _ = pty::signal(line, signal);
            }
            if let Some(leader) = Pid::from_raw(self.pid).filter(|_| self.exit_code.is_none()) {
                let _ = kill_process_group(leader, signal);
            }
        }
    }

    fn status(&self) -> TerminalStatus {
        TerminalStatus {
            id: self.id.clone(),
            user: self.user.clone(),
            size: self.size,
            attached: self.attached.is_some(),
            exit_code: self.exit_code.filter(|_| self.ended),
            output_bytes: self.scrollback.end(),
            age_ms: u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }
}

/// All terminals of this guest, in the order of their beginnings.
#[derive(Debug, Default)]
pub(crate) struct Terminals {
    by_serial: BTreeMap<Serial, Terminal>,
    by_pid: HashMap<i32, Serial>,
    next: Serial,
    /// Groups in which background processes live on.
    pub(crate) left_groups: HashMap<Serial, Group>,
}

/// What a terminal begins with.
pub(crate) struct New {
    pub(crate) id: String,
    pub(crate) user: String,
    pub(crate) line: OwnedFd,
    pub(crate) group: Option<Group>,
    pub(crate) size: WindowSize,
    pub(crate) linger_ms: u64,
    pub(crate) stream: u32,
}

impl Terminals {
    pub(crate) fn admit(&self, id: &str) -> Result<(), Failure> {
        crate::exec::check_id(id, "a terminal")?;
        if self.by_id(id).is_ok() {
            return Err(refuse(ErrorCode::Conflict, format!("there is a terminal {id} already")));
        }
        if self.running() >= MOST {
            let message = format!("{MOST} terminals are open; end some first");
            return Err(refuse(ErrorCode::Busy, message));
        }
        Ok(())
    }

    pub(crate) fn add(&mut self, new: New) -> Serial {
        self.next += 1;
        let terminal = Terminal {
            id: new.id,
            user: new.user,
            pid: 0,
            pidfd: None,
            group: new.group,
            line: Some(new.line),
            watched: Watched::default(),
            scrollback: Scrollback::default(),
            typed: VecDeque::new(),
            written: 0,
            typed_bytes: 0,
            size: new.size,
            attached: Some((new.stream, 0)),
            exit_code: None,
            ended: false,
            begun: Instant::now(),
            linger: Duration::from_millis(new.linger_ms),
            dropped: false,
            deadline: None,
        };
        self.by_serial.insert(self.next, terminal);
        self.next
    }

    pub(crate) fn remove(&mut self, serial: Serial) -> Option<Terminal> {
        self.by_serial.remove(&serial)
    }

    pub(crate) fn runs_as(&mut self, serial: Serial, pid: i32) {
        if let Some(terminal) = self.by_serial.get_mut(&serial) {
            terminal.pid = pid;
            self.by_pid.insert(pid, serial);
        }
    }

    /// Its main process is gone: the pid may be another's from now on.
    pub(crate) fn take_pid(&mut self, pid: i32) -> Option<Serial> {
        self.by_pid.remove(&pid)
    }

    pub(crate) fn by_id(&self, id: &str) -> Result<Serial, Failure> {
        let found = self.by_serial.iter().find(|(_, terminal)| terminal.id == id);
        found.map(|(&serial, _)| serial).ok_or_else(|| {
            let id = id.escape_default();
            refuse(ErrorCode::NotFound, format!("there is no terminal {id}; it may have ended"))
        })
    }

    pub(crate) fn get(&self, serial: Serial) -> Option<&Terminal> {
        self.by_serial.get(&serial)
    }

    pub(crate) fn get_mut(&mut self, serial: Serial) -> Option<&mut Terminal> {
        self.by_serial.get_mut(&serial)
    }

    pub(crate) fn all_mut(&mut self) -> impl Iterator<Item = &mut Terminal> {
        self.by_serial.values_mut()
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Terminal> {
        self.by_serial.values()
    }

    pub(crate) fn statuses(&self) -> Vec<TerminalStatus> {
        self.all().map(Terminal::status).collect()
    }

    pub(crate) fn running(&self) -> usize {
        self.all().filter(|terminal| !terminal.ended).count()
    }

    /// Whoever was attached has gone.
    pub(crate) fn detach(&mut self, serial: Serial, stream: u32) {
        if let Some(terminal) = self.by_serial.get_mut(&serial)
            && terminal.attached.is_some_and(|(attached, _)| attached == stream)
        {
            terminal.attached = None;
            if !terminal.ended && !terminal.dropped {
                terminal.deadline = Some(after(terminal.linger));
            }
        }
    }

    /// Whoever was attached before is not any longer.
    pub(crate) fn attach(
        &mut self,
        serial: Serial,
        stream: u32,
        offset: Option<u64>,
    ) -> Option<(u64, Option<u32>)> {
        let terminal = self.by_serial.get_mut(&serial)?;
        let (start, end) = (terminal.scrollback.start(), terminal.scrollback.end());
        let position = offset.unwrap_or(start).clamp(start, end);
        let before = terminal.attached.replace((stream, position));
        if !terminal.ended && !terminal.dropped {
            terminal.deadline = None;
        }
        Some((position, before.map(|(stream, _)| stream)))
    }

    /// Everything is known: it has ended.
    pub(crate) fn end(&mut self, serial: Serial) {
        let Some(terminal) = self.by_serial.get_mut(&serial) else { return };
        terminal.ended = true;
        terminal.line = None;
        terminal.typed = VecDeque::new();
        terminal.typed_bytes = 0;
        terminal.scrollback.shrink();
        terminal.deadline = Some(after(terminal.linger.min(ENDED_FOR)));
        if let Some(group) = terminal.group.take() {
            self.left_groups.insert(serial, group);
        }
        // Whoever is attached is told first.
        let is_left = |one: &Terminal| one.ended && one.attached.is_none();
        let ended: Vec<Serial> = self
            .by_serial
            .iter()
            .filter(|(_, one)| is_left(one))
            .map(|(&serial, _)| serial)
            .collect();
        for oldest in ended.iter().take(ended.len().saturating_sub(MOST_ENDED)) {
            self.by_serial.remove(oldest);
        }
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.all().filter_map(|terminal| terminal.deadline).min()
    }

    pub(crate) fn overdue(&mut self, now: Instant) -> Option<(Serial, Due)> {
        let (&serial, terminal) =
            self.by_serial.iter_mut().find(|(_, one)| one.deadline.is_some_and(|at| at <= now))?;
        terminal.deadline = None;
        Some((
            serial,
            match (terminal.ended, terminal.dropped) {
                (true, _) => Due::Forget,
                (false, true) => Due::Kill,
                (false, false) => Due::DropLine,
            },
        ))
    }

    pub(crate) fn give_back_group(&mut self, serial: Serial, groups: Option<&mut Groups>) {
        if let Some(group) = self.left_groups.remove(&serial)
            && let Some(groups) = groups
        {
            groups.give_back(group);
        }
    }
}

pub(crate) fn default_grace() -> Duration {
    GRACE
}

fn after(span: Duration) -> Instant {
    crate::exec::after(Instant::now(), u64::try_from(span.as_millis()).unwrap_or(u64::MAX))
}
