//! Terminals as the loop sees them: their beginning, their lines, their end, and the stream that is attached to each.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::Reply;
use protocol::frame::{Channel, HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, Failure, TerminalOpen, WindowSize};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::Signal;

use super::stream::Role;
use super::{Done, Server, Source};
use crate::exec::Serial;
use crate::exec::command::{self, Plan, Wanted};
use crate::exec::spawn::{Descriptors, Spawned, spawn};
use crate::failure::{failed, refuse};
use crate::reaper;
use crate::terminal::{Due, New, Terminal, Watched, default_grace, pty};

/// Read from one line before the others get their turn.
const TURN: usize = 256 << 10;
/// Nobody has such a window, and programs reserve memory by it.
const LARGEST: u16 = 4096;

/// A terminal on its way to having a process.
pub(crate) struct Start {
    stream: u32,
    epoch: u64,
    terminal: Serial,
    plan: Plan,
    line: OwnedFd,
    group: Option<OwnedFd>,
    with_pidfd: bool,
    result: Option<Result<Spawned, (Failure, Option<OwnedFd>)>>,
}

impl Start {
    fn spawn(&mut self) {
        let line = self.line.as_fd();
        let descriptors = Descriptors { stdin: line, stdout: line, stderr: line, controls: true };
        let group = self.group.as_ref().map(AsFd::as_fd);
        self.result = Some(spawn(&mut self.plan, &descriptors, group, self.with_pidfd));
    }
}

impl Server {
    pub(crate) fn open_terminal(
        &mut self,
        stream: u32,
        request: TerminalOpen,
    ) -> Result<(), Failure> {
        if self.is_ending() {
            let message = "the sandbox is being stopped; start it again first";
            return Err(refuse(ErrorCode::Conflict, message));
        }
        self.terminals.admit(&request.id)?;
        check_size(request.size)?;
        let plan = command::plan(&Wanted::of_terminal(&request))?;
        let owner = plan.user.as_ref().map_or(0, |user| user.uid);
        let (ours, theirs) = pty::open(request.size, owner)
            .map_err(|error| failed("make a terminal from", b"/dev/ptmx", error))?;
        let group = self.execs.groups.as_mut().and_then(crate::cgroup::Groups::take);
        let directory =
            group.as_ref().and_then(|group| group.directory().try_clone_to_owned().ok());
        let terminal = self.terminals.add(New {
            id: request.id,
            user: plan.user_name.clone(),
            line: ours,
            group,
            size: request.size,
            linger_ms: request.linger_ms,
            stream,
        });
        if let Some(found) = self.streams.get_mut(&stream) {
            found.role = Role::Attached(terminal);
        }
        let mut start = Box::new(Start {
            stream,
            epoch: self.epoch,
            terminal,
            plan,
            line: theirs,
            group: directory,
            with_pidfd: self.reaper.is_none(),
            result: None,
        });
        self.starting += 1;
        self.workers.submit(move || {
            start.spawn();
            Done::TerminalStarted(start)
        });
        Ok(())
    }

    pub(crate) fn terminal_started(&mut self, start: Start) {
        // Our hold of its end goes with `start`: the line ends with the processes.
        let Start { stream, epoch, terminal: serial, result, .. } = start;
        let is_attached = epoch == self.epoch && self.streams.contains_key(&stream);
        let spawned = match result {
            Some(Ok(spawned)) => spawned,
            Some(Err((failure, pidfd))) => {
                if let Some(pidfd) = pidfd {
                    reaper::bury(&pidfd, 0);
                }
                let group = self.terminals.remove(serial).and_then(|terminal| terminal.group);
                self.execs.give_back(group);
                if is_attached {
                    self.end_with(stream, Err(failure));
                }
                return;
            }
            None => return,
        };
        self.terminals.runs_as(serial, spawned.pid);
        let Some(terminal) = self.terminals.get_mut(serial) else { return };
        let unused = if spawned.in_group { None } else { terminal.group.take() };
        terminal.pidfd = spawned.pidfd;
        if let Some(pidfd) = &terminal.pidfd {
            let events = epoll::EventFlags::IN;
            let _ = epoll::add(&self.poll, pidfd, Source::LinePidfd.event(serial), events);
        }
        self.execs.give_back(unused);
        if is_attached {
            self.port.output.reply(stream, &Reply::TerminalAttached { offset: 0 });
        }
        if self.is_ending() {
            self.drop_lines();
        }
        self.line_is_ready(serial);
        if let Some(exit_code) = self.early.remove(&spawned.pid) {
            self.main_process_ended(spawned.pid, exit_code);
        }
    }

    pub(crate) fn attach_terminal(
        &mut self,
        stream: u32,
        id: &str,
        offset: Option<u64>,
        size: Option<WindowSize>,
    ) -> Result<(), Failure> {
        size.map_or(Ok(()), check_size)?;
        let serial = self.terminals.by_id(id)?;
        let Some((offset, before)) = self.terminals.attach(serial, stream, offset) else {
            return Ok(());
        };
        if let Some(before) = before {
            let message = "somebody else has attached to this terminal";
            self.end_with(before, Err(refuse(ErrorCode::Conflict, message)));
        }
        if let Some(found) = self.streams.get_mut(&stream) {
            found.role = Role::Attached(serial);
        }
        if let Some(size) = size {
            self.resize_terminal(id, size)?;
        }
        self.port.output.reply(stream, &Reply::TerminalAttached { offset });
        self.has_something(stream);
        self.line_is_ready(serial);
        Ok(())
    }

    pub(crate) fn resize_terminal(&mut self, id: &str, size: WindowSize) -> Result<(), Failure> {
        check_size(size)?;
        let serial = self.terminals.by_id(id)?;
        if let Some(terminal) = self.terminals.get_mut(serial)
            && let Some(line) = &terminal.line
        {
            pty::resize(line, size).map_err(|error| failed("resize", id.as_bytes(), error))?;
            terminal.size = size;
        }
        Ok(())
    }

    pub(crate) fn signal_terminal(&self, id: &str, signal: u8) -> Result<(), Failure> {
        let signal = Signal::from_named_raw(signal.into())
            .ok_or_else(|| refuse(ErrorCode::Invalid, "there is no such signal"))?;
        let serial = self.terminals.by_id(id)?;
        let Some(terminal) = self.terminals.get(serial) else { return Ok(()) };
        match terminal.line.as_ref().map(|line| pty::signal(line, signal)) {
            // Nothing is in the foreground, or it has just ended.
            None | Some(Ok(()) | Err(Errno::SRCH | Errno::NOTTY)) => Ok(()),
            Some(Err(error)) => Err(failed("signal", id.as_bytes(), error)),
        }
    }

    pub(crate) fn end_terminal(&mut self, id: &str, grace_ms: u32) -> Result<(), Failure> {
        let serial = self.terminals.by_id(id)?;
        if let Some(terminal) = self.terminals.get_mut(serial) {
            terminal.drop_line(Duration::from_millis(grace_ms.into()));
        }
        Ok(())
    }

    pub(crate) fn typed_bytes(&self) -> usize {
        self.terminals.all().map(|terminal| terminal.typed_bytes).sum()
    }

    pub(crate) fn type_in(&mut self, serial: Serial, bytes: &[u8]) {
        if let Some(terminal) = self.terminals.get_mut(serial) {
            terminal.take_typed(bytes);
            self.line_is_ready(serial);
        }
    }

    /// Reads and writes what the line gives and takes now, and waits for what it does not.
    pub(crate) fn line_is_ready(&mut self, serial: Serial) {
        let Some(terminal) = self.terminals.get_mut(serial).filter(|terminal| terminal.pid != 0)
        else {
            return;
        };
        let granted = write_typed(terminal);
        let found = read_line(terminal, &mut self.buffer);
        let attached = terminal.attached.map(|(stream, _)| stream);
        let has_exited = terminal.exit_code.is_some() && !terminal.ended;
        match (found, has_exited) {
            // What comes later is a background process's, which the end of the line reaches.
            (Found::End | Found::Nothing, true) => {
                self.stop_watching_line(serial);
                self.terminals.end(serial);
                self.line_group_changed(serial);
            }
            (Found::End, false) => self.stop_watching_line(serial),
            (Found::Nothing, false) | (Found::More, _) => self.watch_line(serial),
        }
        if let Some(stream) = attached {
            self.grant(stream, granted);
            self.has_something(stream);
        }
    }

    fn watch_line(&mut self, serial: Serial) {
        let Some(terminal) = self.terminals.get_mut(serial) else { return };
        let Some(line) = &terminal.line else { return };
        let wanted = Watched { output: terminal.room() > 0, room: !terminal.typed.is_empty() };
        if wanted == terminal.watched {
            return;
        }
        let mut events = epoll::EventFlags::empty();
        events.set(epoll::EventFlags::IN, wanted.output);
        events.set(epoll::EventFlags::OUT, wanted.room);
        let event = Source::Line.event(serial);
        // Not with an empty set: the end of a line is told whatever is asked for, again and again.
        let nothing = Watched::default();
        let _ = match (terminal.watched == nothing, wanted == nothing) {
            (true, _) => epoll::add(&self.poll, line, event, events),
            (false, false) => epoll::modify(&self.poll, line, event, events),
            (false, true) => epoll::delete(&self.poll, line),
        };
        terminal.watched = wanted;
    }

    fn stop_watching_line(&mut self, serial: Serial) {
        let Some(terminal) = self.terminals.get_mut(serial) else { return };
        if let Some(line) = &terminal.line
            && terminal.watched != Watched::default()
        {
            let _ = epoll::delete(&self.poll, line);
        }
        terminal.watched = Watched::default();
    }

    /// The next piece of output; whether there may be another at once. Without credit or output the stream waits.
    pub(crate) fn produce_screen(&mut self, stream: u32) -> bool {
        let Some(found) = self.streams.get_mut(&stream) else { return false };
        let Role::Attached(serial) = found.role else { return false };
        let Some(terminal) = self.terminals.get_mut(serial).filter(|terminal| terminal.pid != 0)
        else {
            return false;
        };
        let Some((attached, position)) = terminal.attached else { return false };
        if attached != stream {
            return false;
        }
        let left = usize::try_from(terminal.scrollback.end() - position).unwrap_or(usize::MAX);
        if left == 0 {
            if terminal.ended {
                let exit_code = terminal.exit_code.unwrap_or(-1);
                self.port.output.reply(stream, &Reply::TerminalEnded { exit_code });
                self.end_with_finish(stream);
            }
            return false;
        }
        let most = left.min(MAX_PAYLOAD).min(found.credit);
        if most == 0 {
            return false;
        }
        let mut frame = Vec::with_capacity(HEADER + most);
        frame.resize(HEADER, 0);
        terminal.scrollback.copy(position, most, &mut frame);
        terminal.attached = Some((stream, position + most as u64));
        found.credit -= most;
        let waits = !terminal.watched.output && !terminal.ended;
        self.port.output.data(stream, Channel::Content, frame);
        if waits {
            self.line_is_ready(serial);
        }
        true
    }

    pub(crate) fn line_pidfd_is_readable(&mut self, serial: Serial) {
        let Some(terminal) = self.terminals.get_mut(serial) else { return };
        let Some(pidfd) = terminal.pidfd.take() else { return };
        let _ = epoll::delete(&self.poll, &pidfd);
        if let Some(ended) = reaper::bury(&pidfd, terminal.pid) {
            self.main_process_ended(ended.pid, ended.exit_code);
        }
    }

    pub(crate) fn terminal_process_ended(&mut self, serial: Serial, exit_code: i32) {
        if let Some(terminal) = self.terminals.get_mut(serial) {
            terminal.exit_code = Some(exit_code);
            self.line_is_ready(serial);
        }
    }

    /// An empty group is used again.
    pub(crate) fn line_group_changed(&mut self, serial: Serial) {
        let Some(group) = self.terminals.left_groups.get(&serial) else { return };
        if group.is_populated() == Ok(false) {
            let _ = epoll::delete(&self.poll, group.events());
            self.terminals.give_back_group(serial, self.execs.groups.as_mut());
        } else {
            let events = epoll::EventFlags::PRI | epoll::EventFlags::ET;
            // Fails where it is watched already.
            let event = Source::LineGroup.event(serial);
            let _ = epoll::add(&self.poll, group.events(), event, events);
        }
    }

    pub(crate) fn act_on_terminals(&mut self) {
        if self.terminals.next_deadline().is_none() {
            return;
        }
        let now = Instant::now();
        while let Some((serial, due)) = self.terminals.overdue(now) {
            match due {
                Due::Forget => drop(self.terminals.remove(serial)),
                Due::DropLine => {
                    if let Some(terminal) = self.terminals.get_mut(serial) {
                        terminal.drop_line(default_grace());
                    }
                }
                Due::Kill => {
                    if let Some(terminal) = self.terminals.get(serial) {
                        terminal.kill();
                    }
                }
            }
        }
    }

    pub(crate) fn detach_terminal(&mut self, stream: u32, serial: Serial) {
        self.terminals.detach(serial, stream);
        // It may have waited for whoever was attached.
        self.line_is_ready(serial);
    }

    /// All of them, when everything comes to its end.
    pub(crate) fn drop_lines(&mut self) {
        for terminal in self.terminals.all_mut() {
            terminal.drop_line(default_grace());
        }
    }

    /// On a host, where nothing ends with us.
    pub(crate) fn end_terminals(&mut self) {
        for terminal in self.terminals.all_mut() {
            terminal.kill();
            if let Some(pidfd) = terminal.pidfd.take() {
                reaper::bury(&pidfd, terminal.pid);
            }
        }
    }
}

fn check_size(size: WindowSize) -> Result<(), Failure> {
    let fits = |lines| (1..=LARGEST).contains(&lines);
    if fits(size.rows) && fits(size.columns) {
        return Ok(());
    }
    let message = format!("a terminal has 1 to {LARGEST} rows and columns");
    Err(refuse(ErrorCode::Invalid, message))
}

/// How much of it was taken, or will never be.
fn write_typed(terminal: &mut Terminal) -> usize {
    let Some(line) = &terminal.line else { return 0 };
    let mut taken = 0;
    while let Some(first) = terminal.typed.front() {
        match rustix::io::write(line, &first[terminal.written..]) {
            Ok(count) => {
                terminal.written += count;
                taken += count;
                if terminal.written == first.len() {
                    terminal.written = 0;
                    terminal.typed.pop_front();
                }
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => break,
            // Nobody is there any more.
            Err(_) => {
                taken = terminal.typed_bytes;
                terminal.typed.clear();
                terminal.written = 0;
                break;
            }
        }
    }
    terminal.typed_bytes -= taken;
    taken
}

/// What a line gives now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    /// Or there is no room for it.
    More,
    /// No process holds the other end.
    End,
}

fn read_line(terminal: &mut Terminal, buffer: &mut [u8]) -> Found {
    let Some(line) = &terminal.line else { return Found::End };
    let mut turn = TURN;
    while turn > 0 {
        let most = match terminal.attached {
            Some((_, position)) => terminal.scrollback.room_behind(position).min(buffer.len()),
            None => buffer.len(),
        };
        if most == 0 {
            break;
        }
        match rustix::io::read(line, &mut buffer[..most]) {
            Ok(0) => return Found::End,
            Ok(count) => {
                terminal.scrollback.push(&buffer[..count]);
                turn = turn.saturating_sub(count);
            }
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Found::Nothing,
            // As Linux tells it.
            Err(_) => return Found::End,
        }
    }
    Found::More
}
