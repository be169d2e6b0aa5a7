//! Execs as the loop sees them: their start, their pipes, their end, and the streams that watch.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::Reply;
use protocol::frame::{Channel, HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, ExecStart, Failure};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::Signal;

use super::stream::{Role, Watch};
use super::{Done, Server, Source};
use crate::exec::command::{self, Plan, Wanted};
use crate::exec::output::{Memory, Position, Taken, drop_from};
use crate::exec::spawn::{Descriptors, Spawned, spawn};
use crate::exec::{Exec, Serial, Stdin, Stop, after};
use crate::failure::{failed, refuse};
use crate::reaper;

/// Read from one pipe before the others get their turn.
const TURN: usize = 256 << 10;
/// A command may end so soon that its start and its end are told together.
const SHORT_COMMAND: Duration = Duration::from_millis(20);

/// A command on its way to being a process: what the child is given, then what came of it.
pub(crate) struct Start {
    stream: u32,
    epoch: u64,
    exec: Serial,
    timeout_ms: u64,
    plan: Plan,
    stdin: Option<OwnedFd>,
    stdout: OwnedFd,
    stderr: OwnedFd,
    nowhere: OwnedFd,
    group: Option<OwnedFd>,
    with_pidfd: bool,
    result: Option<Result<Spawned, (Failure, Option<OwnedFd>)>>,
}

impl Start {
    fn spawn(&mut self) {
        let descriptors = Descriptors {
            stdin: self.stdin.as_ref().unwrap_or(&self.nowhere).as_fd(),
            stdout: self.stdout.as_fd(),
            stderr: self.stderr.as_fd(),
            controls: false,
        };
        let group = self.group.as_ref().map(AsFd::as_fd);
        self.result = Some(spawn(&mut self.plan, &descriptors, group, self.with_pidfd));
    }
}

impl Server {
    pub(crate) fn start_exec(&mut self, stream: u32, request: ExecStart) -> Result<(), Failure> {
        if self.is_ending() {
            let message = "the sandbox is being stopped; start it again first";
            return Err(refuse(ErrorCode::Conflict, message));
        }
        self.execs.admit(&request.id)?;
        let plan = command::plan(&Wanted::of_exec(&request))?;
        let mut stdin = None;
        if request.has_stdin {
            let fail = |error| failed("make the pipes of", request.id.as_bytes(), error);
            let (child, ours) = pipe_with(PipeFlags::CLOEXEC).map_err(fail)?;
            rustix::io::ioctl_fionbio(&ours, true).map_err(fail)?;
            stdin = Some((child, ours));
        }
        let mut start = self.begin_exec(request.id, plan, request.output_limit)?;
        let serial = start.exec;
        if let Some((child, ours)) = stdin
            && let Some(exec) = self.execs.get_mut(serial)
        {
            start.stdin = Some(child);
            exec.stdin = Some(Stdin::new(ours, stream));
        }
        let position = Position::default();
        if let Some(found) = self.streams.get_mut(&stream) {
            found.role = Role::Watching(Watch { exec: serial, position, feeds: request.has_stdin });
        }
        (start.stream, start.epoch, start.timeout_ms) = (stream, self.epoch, request.timeout_ms);
        if start.plan.may_hang {
            self.starting += 1;
            self.workers.submit(move || {
                start.spawn();
                Done::Started(start)
            });
        } else {
            start.spawn();
            self.exec_started(*start);
        }
        Ok(())
    }

    /// All that it needs to be spawned. Watched by nobody yet, without a standard input or a limit of time.
    pub(crate) fn begin_exec(
        &mut self,
        id: String,
        plan: Plan,
        output_limit: u64,
    ) -> Result<Box<Start>, Failure> {
        let fail = |error| failed("make the pipes of", id.as_bytes(), error);
        let pipe = || pipe_with(PipeFlags::CLOEXEC).map_err(fail);
        let (stdout, child_stdout) = pipe()?;
        let (stderr, child_stderr) = pipe()?;
        for ours in [&stdout, &stderr] {
            rustix::io::ioctl_fionbio(ours, true).map_err(fail)?;
        }
        let nowhere = self.nowhere.try_clone().map_err(|_| fail(Errno::MFILE))?;
        let exec = self.execs.add(id, stdout, stderr, output_limit);
        let group = self.execs.get(exec).and_then(|exec| exec.group.as_ref());
        let group = group.and_then(|group| group.directory().try_clone_to_owned().ok());
        Ok(Box::new(Start {
            stream: 0,
            epoch: u64::MAX,
            exec,
            timeout_ms: 0,
            plan,
            stdin: None,
            stdout: child_stdout,
            stderr: child_stderr,
            nowhere,
            group,
            with_pidfd: self.reaper.is_none(),
            result: None,
        }))
    }

    /// A process of the agent's own, beside what the host has asked for. It is not listed. `None`: it could not begin.
    pub(crate) fn run_own(
        &mut self,
        id: String,
        mut plan: Plan,
        stdin: OwnedFd,
    ) -> Result<Option<Serial>, Failure> {
        const DIAGNOSTICS: u64 = 64 << 10;
        plan.may_hang = false;
        let mut start = self.begin_exec(id, plan, DIAGNOSTICS)?;
        start.stdin = Some(stdin);
        let serial = start.exec;
        start.spawn();
        self.exec_started(*start);
        Ok(self.execs.get(serial).map(|_| serial))
    }

    pub(crate) fn exec_started(&mut self, start: Start) {
        let serial = start.exec;
        // The children's ends go with `start`: an end of file comes only without them.
        let Start { stream, epoch, timeout_ms, result, .. } = start;
        let is_watched = epoch == self.epoch && self.streams.contains_key(&stream);
        let spawned = match result {
            Some(Ok(spawned)) => spawned,
            Some(Err((failure, pidfd))) => {
                if let Some(pidfd) = pidfd {
                    reaper::bury(&pidfd, 0);
                }
                self.execs.withdraw(serial);
                if is_watched {
                    self.end_with(stream, Err(failure));
                }
                return;
            }
            None => return,
        };
        let pid = spawned.pid;
        self.execs.runs_as(serial, pid);
        let Some(exec) = self.execs.get_mut(serial) else { return };
        let unused = if spawned.in_group { None } else { exec.group.take() };
        exec.pidfd = spawned.pidfd;
        let events = epoll::EventFlags::IN;
        for (output, source) in [(&exec.stdout, Source::Stdout), (&exec.stderr, Source::Stderr)] {
            if let Some(pipe) = &output.pipe {
                let _ = epoll::add(&self.poll, pipe, source.event(serial), events);
            }
        }
        if let Some(pidfd) = &exec.pidfd {
            let _ = epoll::add(&self.poll, pidfd, Source::Pidfd.event(serial), events);
        }
        let stopped = exec.stop;
        self.execs.give_back(unused);
        if stopped.is_some() {
            // Cancelled before it was there.
            self.signal(serial, Signal::KILL);
        } else if timeout_ms > 0 {
            self.execs.set_deadline(serial, Some(after(Instant::now(), timeout_ms)));
        }
        if is_watched {
            let started = Reply::ExecStarted { pid: u32::try_from(pid).unwrap_or(0) };
            self.port.output.reply_with_the_next(stream, &started, SHORT_COMMAND);
            self.has_something(stream);
        }
        self.feed_stdin(serial);
        if let Some(exit_code) = self.early.remove(&pid) {
            self.main_process_ended(pid, exit_code);
        }
    }

    fn signal(&self, serial: Serial, signal: Signal) {
        if let Some(exec) = self.execs.get(serial) {
            exec.signal(signal);
        }
    }

    pub(crate) fn watch_exec(
        &mut self,
        stream: u32,
        id: &str,
        stdout: u64,
        stderr: u64,
    ) -> Result<(), Failure> {
        let serial = self.execs.by_id(id)?;
        let Some(exec) = self.execs.get(serial) else { return Ok(()) };
        self.port
            .output
            .reply(stream, &Reply::ExecStarted { pid: u32::try_from(exec.pid).unwrap_or(0) });
        if let Some(found) = self.streams.get_mut(&stream) {
            let position = Position { stdout, stderr };
            found.role = Role::Watching(Watch { exec: serial, position, feeds: false });
        }
        self.has_something(stream);
        Ok(())
    }

    pub(crate) fn stop_watching(&mut self, stream: u32, watch: &Watch) {
        if let Some(exec) = self.execs.get_mut(watch.exec) {
            exec.watchers.retain(|&other| other != stream);
            if let Some(stdin) = &mut exec.stdin
                && stdin.stream == Some(stream)
            {
                // Nobody can continue it: what has come is delivered, then it ends.
                stdin.stream = None;
                self.finish_stdin(watch.exec);
            }
        }
    }

    /// The next piece of output; whether there may be another at once. Without credit or output the stream waits.
    pub(crate) fn produce_output(&mut self, stream: u32) -> bool {
        let Some(found) = self.streams.get_mut(&stream) else { return false };
        let Role::Watching(watch) = &mut found.role else { return false };
        let Some(exec) = self.execs.get_mut(watch.exec) else { return false };
        if exec.pid == 0 {
            return false;
        }
        let Some((channel, end)) = exec.order.next(watch.position) else {
            if exec.has_ended() {
                let status = exec.status();
                self.port.output.reply(stream, &Reply::ExecEnded(status));
                self.end_with_finish(stream);
            } else if !exec.watchers.contains(&stream) {
                exec.watchers.push(stream);
            }
            return false;
        };
        if found.credit == 0 {
            return false;
        }
        let at = *watch.offset(channel);
        let most =
            usize::try_from(end - at).unwrap_or(usize::MAX).min(MAX_PAYLOAD).min(found.credit);
        let mut frame = Vec::with_capacity(HEADER + most);
        frame.resize(HEADER, 0);
        if let Err(error) = exec.output(channel).kept.copy(at, most, &mut frame) {
            let failure = failed("read the output of", exec.id.as_bytes(), error);
            self.end_with(stream, Err(failure));
            return false;
        }
        let length = frame.len() - HEADER;
        *watch.offset(channel) += length as u64;
        found.credit -= length;
        self.port.output.data(stream, channel, frame);
        true
    }

    fn wake_watchers(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        for stream in std::mem::take(&mut exec.watchers) {
            self.has_something(stream);
        }
    }

    /// Takes what is there, within a turn. After the end of the exec everything is dropped, but never refused: the
    /// background process that prints it shall not die of it.
    pub(crate) fn pipe_is_readable(&mut self, serial: Serial, channel: Channel) {
        let memory = self.execs.memory();
        let Some(exec) = self.execs.get_mut(serial) else { return };
        let has_ended = exec.has_ended();
        let output = exec.output(channel);
        let Some(pipe) = &output.pipe else { return };
        let (mut turn, mut at_end) = (TURN, false);
        while turn > 0 && !output.kept.is_full() && output.left != Some(0) {
            let most = output.left.unwrap_or(usize::MAX);
            match output.kept.take_from(pipe, most, &mut self.buffer, &self.nowhere) {
                Taken::Bytes(count) => {
                    turn = turn.saturating_sub(count);
                    output.left = output.left.map(|left| left - count);
                    // The pipe is empty most of the time after a short read; if not, the loop comes back.
                    if count < self.buffer.len() {
                        break;
                    }
                }
                Taken::Nothing => {
                    // Somebody else reads the same pipe.
                    output.left = output.left.map(|_| 0);
                    break;
                }
                Taken::End => {
                    at_end = true;
                    break;
                }
            }
        }
        if has_ended && !at_end {
            at_end = drop_from(pipe, TURN, &self.nowhere) == Taken::End;
        }
        if at_end {
            let _ = epoll::delete(&self.poll, pipe);
            output.pipe = None;
            output.paused = false;
        }
        if self.phase.is_running()
            && let Some(spill) = output.kept.spill(memory, &self.spill_directory)
        {
            self.workers.submit(move || Done::Spilled {
                exec: serial,
                channel,
                success: spill.write(),
            });
        }
        if output.kept.is_full()
            && !output.paused
            && let Some(pipe) = &output.pipe
        {
            let _ = epoll::delete(&self.poll, pipe);
            output.paused = true;
        }
        if !has_ended {
            exec.note_order();
            self.wake_watchers(serial);
            self.end_if_complete(serial);
        }
        self.execs.clean(serial);
    }

    /// From memory to a file, what is worth one.
    fn save_output(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        for channel in [Channel::Stdout, Channel::Stderr] {
            if let Some(spill) =
                exec.output(channel).kept.spill(Memory::Short, &self.spill_directory)
            {
                self.workers.submit(move || Done::Spilled {
                    exec: serial,
                    channel,
                    success: spill.write(),
                });
            }
        }
    }

    pub(crate) fn spilled(&mut self, serial: Serial, channel: Channel, success: bool) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        let output = exec.output(channel);
        output.kept.spilled(success);
        if !success {
            exec.has_lost_output();
        }
        let output = exec.output(channel);
        if output.paused {
            output.paused = false;
            if let Some(pipe) = &output.pipe {
                let source =
                    if channel == Channel::Stdout { Source::Stdout } else { Source::Stderr };
                let _ = epoll::add(&self.poll, pipe, source.event(serial), epoll::EventFlags::IN);
            }
        }
        self.pipe_is_readable(serial, channel);
    }

    pub(crate) fn reap(&mut self) {
        let mut ended = Vec::new();
        if let Some(reaper) = &self.reaper {
            reaper.acknowledge();
            ended.extend(std::iter::from_fn(|| reaper.next()));
        }
        for ended in ended {
            self.main_process_ended(ended.pid, ended.exit_code);
        }
    }

    pub(crate) fn pidfd_is_readable(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        let Some(pidfd) = exec.pidfd.take() else { return };
        let _ = epoll::delete(&self.poll, &pidfd);
        if let Some(ended) = reaper::bury(&pidfd, exec.pid) {
            self.main_process_ended(ended.pid, ended.exit_code);
        }
    }

    /// Of an exec, a terminal, or any orphan.
    pub(crate) fn main_process_ended(&mut self, pid: i32, exit_code: i32) {
        let Some(serial) = self.execs.take_pid(pid) else {
            if let Some(serial) = self.terminals.take_pid(pid) {
                self.terminal_process_ended(serial, exit_code);
            } else if self.starting > 0 {
                self.early.insert(pid, exit_code);
            }
            return;
        };
        let Some(exec) = self.execs.get_mut(serial) else { return };
        exec.exit_code = Some(exit_code);
        if exit_code == 128 + libc::SIGKILL {
            exec.killed_for_memory =
                exec.group.as_ref().is_some_and(crate::cgroup::Group::was_killed_for_memory);
        }
        for channel in [Channel::Stdout, Channel::Stderr] {
            let output = exec.output(channel);
            if let Some(pipe) = &output.pipe {
                // Whatever it has printed is in the pipe now; what comes later is a background process's.
                let there = rustix::io::ioctl_fionread(pipe).unwrap_or(0);
                output.left = Some(usize::try_from(there).unwrap_or(usize::MAX));
            }
        }
        for channel in [Channel::Stdout, Channel::Stderr] {
            self.pipe_is_readable(serial, channel);
        }
        self.end_if_complete(serial);
    }

    fn end_if_complete(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        if exec.has_ended() || !exec.is_complete() {
            return;
        }
        let watchers = std::mem::take(&mut exec.watchers);
        self.close_stdin(serial);
        self.execs.end(serial);
        for stream in watchers {
            self.has_something(stream);
        }
        self.own_process_ended(serial);
        if self.phase.is_running() {
            for oldest in self.execs.too_much_in_memory() {
                self.save_output(oldest);
            }
        }
        self.ended.push(serial);
    }

    /// What an ended exec leaves is taken care of once the host has been told of its end.
    pub(crate) fn tidy_up(&mut self) {
        for serial in std::mem::take(&mut self.ended) {
            if let Some(group) = self.execs.get(serial).and_then(|exec| exec.group.as_ref()) {
                let events = epoll::EventFlags::PRI | epoll::EventFlags::ET;
                if group.is_populated() != Ok(false) {
                    let source = Source::Group.event(serial);
                    let _ = epoll::add(&self.poll, group.events(), source, events);
                }
            }
            self.group_changed(serial);
        }
    }

    /// An empty group is used again.
    pub(crate) fn group_changed(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial) else { return };
        if !exec.has_ended() {
            return;
        }
        let Some(group) = exec.group.take_if(|group| group.is_populated() == Ok(false)) else {
            return;
        };
        let _ = epoll::delete(&self.poll, group.events());
        self.execs.give_back(Some(group));
        self.execs.clean(serial);
    }

    pub(crate) fn cancel_exec(&mut self, id: &str, grace_ms: u32) -> Result<(), Failure> {
        let serial = self.execs.by_id(id)?;
        let Some(exec) = self.execs.get_mut(serial) else { return Ok(()) };
        if exec.has_ended() || exec.stop.is_some() {
            return Ok(());
        }
        exec.stop = Some(Stop::Cancelled);
        if grace_ms == 0 {
            exec.signal(Signal::KILL);
            self.execs.set_deadline(serial, None);
        } else {
            exec.signal(Signal::TERM);
            self.execs.set_deadline(serial, Some(after(Instant::now(), grace_ms.into())));
        }
        Ok(())
    }

    /// One that still runs, or runs again under the same id, is not meant.
    pub(crate) fn forget_exec(&mut self, id: &str) {
        if let Ok(serial) = self.execs.by_id(id)
            && self.execs.get(serial).is_some_and(Exec::has_ended)
        {
            self.execs.forget(serial);
        }
    }

    pub(crate) fn act_on_deadlines(&mut self) {
        if self.execs.next_deadline().is_some() {
            let now = Instant::now();
            while let Some(serial) = self.execs.overdue(now) {
                let Some(exec) = self.execs.get_mut(serial) else { continue };
                if exec.exit_code.is_none() {
                    exec.stop.get_or_insert(Stop::TimedOut);
                }
                exec.signal(Signal::KILL);
            }
        }
        self.act_on_terminals();
        self.drop_stale_uploads();
        self.act_on_quiet();
        self.go_on_shutting_down();
    }

    /// On a host, where nothing ends with us: no command outlives its server.
    pub(crate) fn end_everything(&mut self) {
        let running: Vec<&Exec> = self.execs.all().map(|(_, exec)| exec).collect();
        for exec in running {
            exec.signal(Signal::KILL);
        }
        self.end_terminals();
        for (_, exec) in self.execs.all_mut() {
            if let (Some(pidfd), pid) = (exec.pidfd.take(), exec.pid) {
                reaper::bury(&pidfd, pid);
            }
        }
    }

    /// Keeps what could fail later out of the way of the first exec after a restore.
    pub(crate) fn prepare_groups(&mut self) {
        if let Some(groups) = &mut self.execs.groups {
            groups.refill();
        }
    }
}
