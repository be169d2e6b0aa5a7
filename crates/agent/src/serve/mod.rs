//! The server: one loop that waits for the port, the commands' pipes, ended children and the workers' results, and never
//! for anything else. Without something to do it sleeps; there is no periodic timer.

mod content;
mod dialed;
mod execs;
mod files;
mod kernels;
mod port;
mod quiet;
mod requests;
mod stdin;
mod stop;
mod stream;
mod terminals;
mod trees;

use std::collections::{HashMap, VecDeque};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::Context;
use protocol::Reply;
use protocol::frame::{self, Frame, Kind};
use protocol::hello::Hello;
use protocol::message::{ErrorCode, Failure};
use rustix::event::{Timespec, epoll};

use crate::exec::{Execs, Serial};
use crate::failure::refuse;
use crate::files::upload::Uploads;
use crate::reaper::Reaper;
use crate::state::State;
use crate::terminal::Terminals;
use crate::workers::Workers;
use crate::{Options, Place};
use files::FileResult;
use port::{Filled, GRANT, Port};
use quiet::{Phase, Quiescing};
use stop::Shutdown;
use stream::{Role, Stream};

/// What woke us; the upper half of an event's number, the exec or terminal in the lower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Port,
    Children,
    Workers,
    State,
    Stdout,
    Stderr,
    Stdin,
    Group,
    Pidfd,
    /// Of a stream, not of an exec.
    Dialed,
    Line,
    LinePidfd,
    LineGroup,
    /// The process of a session has something to say.
    Kernel,
    /// Of a stream.
    Watched,
}

impl Source {
    const ALL: [Self; 15] = [
        Self::Port,
        Self::Children,
        Self::Workers,
        Self::State,
        Self::Stdout,
        Self::Stderr,
        Self::Stdin,
        Self::Group,
        Self::Pidfd,
        Self::Dialed,
        Self::Line,
        Self::LinePidfd,
        Self::LineGroup,
        Self::Kernel,
        Self::Watched,
    ];

    pub(crate) fn event(self, exec: Serial) -> epoll::EventData {
        epoll::EventData::new_u64((self as u64) << 32 | u64::from(exec))
    }

    fn of(event: epoll::EventData) -> Option<(Self, Serial)> {
        let number = event.u64();
        let source = Self::ALL.into_iter().find(|source| *source as u64 == number >> 32)?;
        Some((source, u32::try_from(number & u64::from(u32::MAX)).ok()?))
    }
}

/// Some may hang on a dead network file system while the others go on.
const WORKERS: usize = 8;

/// What workers give back.
pub(crate) enum Done {
    File {
        epoch: u64,
        stream: u32,
        result: FileResult,
    },
    Started(Box<execs::Start>),
    TerminalStarted(Box<terminals::Start>),
    Spilled {
        exec: Serial,
        channel: frame::Channel,
        success: bool,
    },
    /// Everything is on the disk, volumes are unmounted, and the root file system is read-only if so asked.
    Stopped(Result<(), Failure>),
    Changed(quiet::Change),
    /// What could not be dropped while nothing was written.
    Dropped,
}

pub(crate) struct Server {
    poll: OwnedFd,
    port: Port,
    place: Place,
    spill_directory: PathBuf,
    /// Counts hellos: results for an earlier one are for nobody.
    epoch: u64,
    streams: HashMap<u32, Stream>,
    /// Streams with something to send, each once.
    ready: VecDeque<u32>,
    /// Uploads that have got something since the loop last went round.
    fed: Vec<u32>,
    uploads: Arc<Uploads>,
    execs: Execs,
    terminals: Terminals,
    /// Ends of processes that a worker is just starting and that are not known by their number yet.
    early: HashMap<i32, i32>,
    starting: usize,
    /// In this turn.
    ended: Vec<Serial>,
    reaper: Option<Reaper>,
    workers: Workers<Done>,
    state: Arc<Mutex<State>>,
    /// One thread: changes of the state come one after the other.
    keeper: Workers<Done>,
    phase: Phase,
    quiescing: Option<Quiescing>,
    quiet_limit: Duration,
    /// Requests that wait until files can be written and processes begun, in their order.
    deferred: Vec<u32>,
    /// May hold deleted files: letting go of one is a write.
    discarded: Vec<Box<dyn Send>>,
    nowhere: OwnedFd,
    buffer: Vec<u8>,
    most_held: usize,
    shutdown: Option<Shutdown>,
    program: PathBuf,
    kernels: kernels::Kernels,
}

/// Serves until the port ends (on a host) or a shutdown is complete.
pub(crate) fn run(port: OwnedFd, options: Options) -> anyhow::Result<()> {
    Server::new(port, options)?.run()
}

impl Server {
    fn new(port: OwnedFd, options: Options) -> anyhow::Result<Self> {
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).context("make the event queue")?;
        let port = Port::new(port).context("prepare the port")?;
        let edges = epoll::EventFlags::IN | epoll::EventFlags::OUT | epoll::EventFlags::ET;
        epoll::add(&poll, &port.descriptor, Source::Port.event(0), edges)
            .context("watch the port")?;
        let reaper = match options.place {
            Place::Guest => Some(Reaper::new().context("prepare for ended children")?),
            Place::Host => None,
        };
        if let Some(reaper) = &reaper {
            epoll::add(&poll, reaper.signals(), Source::Children.event(0), epoll::EventFlags::IN)
                .context("watch for ended children")?;
        }
        let workers = Workers::new(WORKERS).context("prepare the workers")?;
        epoll::add(&poll, workers.results_came(), Source::Workers.event(0), epoll::EventFlags::IN)
            .context("watch the workers")?;
        let keeper = Workers::new(1).context("prepare the keeper")?;
        epoll::add(&poll, keeper.results_came(), Source::State.event(0), epoll::EventFlags::IN)
            .context("watch the keeper")?;
        let mut state = State::new(&options);
        state.clear_empty_slots();
        let groups = options
            .groups
            .as_deref()
            .and_then(|directory| crate::cgroup::Groups::set_up(directory).ok());
        let nowhere = std::fs::File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context("open /dev/null")?;
        Ok(Self {
            poll,
            port,
            place: options.place,
            spill_directory: options.spill_directory,
            epoch: 0,
            streams: HashMap::new(),
            ready: VecDeque::new(),
            fed: Vec::new(),
            uploads: Arc::default(),
            execs: Execs::new(groups),
            terminals: Terminals::default(),
            early: HashMap::new(),
            starting: 0,
            ended: Vec::new(),
            reaper,
            workers,
            state: Arc::new(Mutex::new(state)),
            keeper,
            phase: Phase::Running,
            quiescing: None,
            quiet_limit: options.quiet_limit,
            deferred: Vec::new(),
            discarded: Vec::new(),
            nowhere: nowhere.into(),
            buffer: vec![0; 64 << 10],
            most_held: most_held(),
            shutdown: None,
            program: options.program,
            kernels: kernels::Kernels::default(),
        })
    }

    fn run(mut self) -> anyhow::Result<()> {
        let mut events = Vec::with_capacity(64);
        // The host may have been connected, and have sent, before the port was watched.
        let mut port_may_have_more = true;
        loop {
            let timeout =
                if port_may_have_more { Some(Timespec::default()) } else { self.until_deadline() };
            events.clear();
            match epoll::wait(
                &self.poll,
                rustix::buffer::spare_capacity(&mut events),
                timeout.as_ref(),
            ) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error).context("wait for something to do"),
            }
            let mut port_is_readable = port_may_have_more;
            for event in &events {
                let Some((source, exec)) = Source::of(event.data) else { continue };
                match source {
                    Source::Port => port_is_readable = true,
                    Source::Children => self.reap(),
                    Source::Workers => self.take_results(self.workers.take_results()),
                    Source::State => self.take_results(self.keeper.take_results()),
                    Source::Stdout => self.pipe_is_readable(exec, frame::Channel::Stdout),
                    Source::Stderr => self.pipe_is_readable(exec, frame::Channel::Stderr),
                    Source::Stdin => self.feed_stdin(exec),
                    Source::Group => self.group_changed(exec),
                    Source::Pidfd => self.pidfd_is_readable(exec),
                    Source::Dialed => self.drive_dialed(exec),
                    Source::Line => self.line_is_ready(exec),
                    Source::LinePidfd => self.line_pidfd_is_readable(exec),
                    Source::LineGroup => self.line_group_changed(exec),
                    Source::Kernel => self.hear_kernel(exec),
                    Source::Watched => self.watch_is_readable(exec),
                }
            }
            self.act_on_deadlines();
            if port_is_readable {
                match self.read_port().context("read the port")? {
                    Filled::Bytes => port_may_have_more = true,
                    Filled::Nothing => port_may_have_more = false,
                    Filled::End => match self.place {
                        // The port wakes us when the host connects again.
                        Place::Guest => port_may_have_more = false,
                        Place::Host => {
                            self.end_everything();
                            return Ok(());
                        }
                    },
                }
            }
            for stream in std::mem::take(&mut self.fed) {
                self.drive_write(stream);
            }
            self.produce()?;
            self.tidy_up();
            if self.is_shut_down() {
                return Ok(());
            }
        }
    }

    fn until_deadline(&self) -> Option<Timespec> {
        let shutdown = self.shutdown.as_ref().and_then(Shutdown::deadline);
        let held = self.port.output.held_until();
        let stale = self.uploads.next_stale().filter(|_| self.phase.is_running());
        let deadlines = [
            self.execs.next_deadline(),
            self.terminals.next_deadline(),
            shutdown,
            held,
            self.quiet_deadline(),
            stale,
        ];
        let next = deadlines.into_iter().flatten().min()?;
        // Rounded up: waking too early would only mean to go round once more.
        let span = next.saturating_duration_since(Instant::now()) + Duration::from_micros(50);
        Timespec::try_from(span).ok()
    }

    /// Reads and handles a bounded part of what is there; [`Filled::Bytes`]: there may be more.
    fn read_port(&mut self) -> Result<Filled, rustix::io::Errno> {
        for _ in 0..8 {
            let mut input = std::mem::take(&mut self.port.input);
            let filled = loop {
                match input.fill(&self.port.descriptor) {
                    Ok(Filled::Bytes) if !input.is_nearly_full() => {}
                    other => break other,
                }
            };
            while !input.rest().is_empty() {
                match frame::decode(input.rest()) {
                    Ok((Some(frame), used)) => {
                        self.handle(&frame);
                        input.consume(used);
                    }
                    Ok((None, 0)) => break,
                    Ok((None, used)) => input.consume(used),
                    Err(_) => {
                        let used = frame::skip_damaged(input.rest());
                        input.consume(used);
                    }
                }
            }
            self.port.input = input;
            match filled? {
                Filled::Bytes => {}
                end @ (Filled::Nothing | Filled::End) => return Ok(end),
            }
        }
        Ok(Filled::Bytes)
    }

    fn handle(&mut self, frame: &Frame<'_>) {
        let stream = frame.header.stream;
        self.phase.has_heard();
        match frame.header.kind {
            Kind::Hello => self.begin_epoch(frame.payload),
            Kind::Request => self.take_request(frame),
            Kind::Data => self.take_data(stream, frame.payload),
            Kind::Finish => self.take_finish(stream),
            Kind::Credit => {
                if let (Some(found), Ok(bytes)) =
                    (self.streams.get_mut(&stream), frame.payload.try_into())
                {
                    found.credit = found.credit.saturating_add(u32::from_le_bytes(bytes) as usize);
                    self.has_something(stream);
                }
            }
            Kind::Reset => self.close(stream),
            // Only we send those.
            Kind::Reply => {}
        }
    }

    fn begin_epoch(&mut self, payload: &[u8]) {
        let Ok(hello) = protocol::message::decode::<Hello>(payload) else { return };
        self.epoch += 1;
        let open: Vec<u32> = self.streams.keys().copied().collect();
        for stream in open {
            self.close(stream);
        }
        self.ready.clear();
        self.port.output.clear();
        self.port.output.answer(&hello);
    }

    /// The stream ends without another word.
    fn close(&mut self, stream: u32) {
        let Some(closed) = self.streams.remove(&stream) else { return };
        match closed.role {
            Role::Watching(watch) => self.stop_watching(stream, &watch),
            Role::Attached(terminal) => self.detach_terminal(stream, terminal),
            role @ (Role::Reading(_) | Role::Writing(_) | Role::Listing(_)) => self.discard(role),
            // Dropped, its socket is closed and watched no more.
            Role::Dialed(_) | Role::Opening { .. } | Role::Deferred(_) | Role::Answering => {}
        }
    }

    pub(crate) fn end_with(&mut self, stream: u32, result: Result<Reply, Failure>) {
        self.close(stream);
        match result {
            Ok(reply) => self.port.output.reply(stream, &reply),
            Err(failure) => self.port.output.reply(stream, &Reply::Failed(failure)),
        }
    }

    fn end_with_finish(&mut self, stream: u32) {
        self.close(stream);
        self.port.output.finish(stream);
    }

    fn take_data(&mut self, stream: u32, payload: &[u8]) {
        let held: usize = self.streams.values().map(Stream::held_bytes).sum::<usize>()
            + self.stdin_bytes()
            + self.typed_bytes();
        let Some(found) = self.streams.get_mut(&stream) else { return };
        let is_fed = match &found.role {
            Role::Writing(writing) => !writing.finished,
            Role::Watching(watch) => watch.feeds,
            Role::Attached(_) => true,
            Role::Deferred(deferred) => deferred.is_fed() && !deferred.finished,
            Role::Dialed(dialed) => !dialed.finished,
            // Data that nobody waits for is against the rules, or for a request that has just failed.
            Role::Opening { .. } | Role::Reading(_) | Role::Listing(_) | Role::Answering => false,
        };
        if !is_fed {
            return;
        }
        if held + payload.len() > self.most_held {
            let message =
                "too much data for this sandbox is on its way at once; send less in parallel";
            self.end_with(stream, Err(refuse(ErrorCode::Busy, message)));
            return;
        }
        match &mut found.role {
            Role::Writing(writing) => {
                if writing.inbox.is_empty() {
                    self.fed.push(stream);
                }
                writing.inbox.push(payload.to_vec());
                writing.inbox_bytes += payload.len();
            }
            Role::Watching(watch) => {
                let exec = watch.exec;
                self.take_stdin(exec, payload);
            }
            Role::Attached(terminal) => {
                let terminal = *terminal;
                self.type_in(terminal, payload);
            }
            Role::Deferred(deferred) => deferred.data.push(payload.to_vec()),
            Role::Dialed(dialed) => {
                dialed.take(payload);
                self.drive_dialed(stream);
            }
            Role::Opening { .. } | Role::Reading(_) | Role::Listing(_) | Role::Answering => {}
        }
    }

    fn take_finish(&mut self, stream: u32) {
        let Some(found) = self.streams.get_mut(&stream) else { return };
        match &mut found.role {
            Role::Writing(writing) => {
                writing.finished = true;
                self.fed.push(stream);
            }
            Role::Watching(watch) if watch.feeds => {
                watch.feeds = false;
                let exec = watch.exec;
                self.finish_stdin(exec);
            }
            Role::Deferred(deferred) => deferred.finished = true,
            Role::Dialed(dialed) => {
                dialed.finished = true;
                self.drive_dialed(stream);
            }
            Role::Watching(_)
            | Role::Attached(_)
            | Role::Opening { .. }
            | Role::Reading(_)
            | Role::Listing(_)
            | Role::Answering => {}
        }
    }

    /// Bytes of the host's were consumed, so it may send as many more.
    pub(crate) fn grant(&mut self, stream: u32, bytes: usize) {
        let Some(found) = self.streams.get_mut(&stream) else { return };
        found.consumed = found.consumed.saturating_add(u32::try_from(bytes).unwrap_or(u32::MAX));
        if found.consumed >= GRANT {
            self.port.output.credit(stream, std::mem::take(&mut found.consumed));
        }
    }

    /// To be asked for data as soon as there is room.
    pub(crate) fn has_something(&mut self, stream: u32) {
        if let Some(found) = self.streams.get_mut(&stream)
            && !found.is_ready
        {
            found.is_ready = true;
            self.ready.push_back(stream);
        }
    }

    /// Lets the streams take turns, a frame each, as long as the host takes them.
    fn produce(&mut self) -> anyhow::Result<()> {
        loop {
            while self.port.output.has_room()
                && let Some(stream) = self.ready.pop_front()
            {
                let Some(found) = self.streams.get_mut(&stream) else { continue };
                found.is_ready = false;
                let more = match found.role {
                    Role::Watching(_) => self.produce_output(stream),
                    Role::Attached(_) => self.produce_screen(stream),
                    Role::Reading(_) => self.produce_content(stream),
                    Role::Listing(_) => self.produce_entries(stream),
                    Role::Dialed(_) => self.produce_dialed(stream),
                    Role::Opening { .. }
                    | Role::Writing(_)
                    | Role::Deferred(_)
                    | Role::Answering => false,
                };
                if more {
                    self.has_something(stream);
                }
            }
            self.port.flush().context("write to the port")?;
            if !self.port.output.has_room() || self.ready.is_empty() {
                return Ok(());
            }
        }
    }

    fn take_results(&mut self, results: Vec<Done>) {
        for done in results {
            match done {
                Done::File { epoch, stream, result } if epoch == self.epoch => {
                    self.file_is_done(stream, result)
                }
                Done::File { result, .. } => self.discard(result),
                Done::Started(start) => {
                    self.starting -= 1;
                    self.exec_started(*start);
                }
                Done::TerminalStarted(start) => {
                    self.starting -= 1;
                    self.terminal_started(*start);
                }
                Done::Spilled { exec, channel, success } => self.spilled(exec, channel, success),
                Done::Stopped(result) => self.stopped(result),
                Done::Changed(change) => self.changed(change),
                Done::Dropped => {}
            }
        }
        if self.starting == 0 {
            self.early.clear();
        }
    }
}

/// An eighth of the memory, so that a host that sends without measure cannot exhaust the guest.
fn most_held() -> usize {
    let memory = usize::try_from(crate::memory_bytes()).unwrap_or(usize::MAX);
    (memory / 8).clamp(16 << 20, 256 << 20)
}
