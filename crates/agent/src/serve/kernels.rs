//! Sessions of the interpreter as the loop sees them: a process for each, calls handed over to it, answers relayed. See
//! [`crate::kernel`] for the other side.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use protocol::kernel::{KernelRun, KernelStart, KernelState, KernelStatus};
use protocol::message::{Command, ErrorCode, Failure};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::Signal;

use super::{Done, Server, Source};
use crate::cgroup::{Group, write_file};
use crate::exec::Serial;
use crate::exec::command::{self, Plan, Wanted};
use crate::failure::{failed, refuse};
use crate::files::path;
use crate::kernel::channel::{self, Call, Start};
use crate::kernel::{self, HOME, RENEW, exit};

/// Each is a language with its libraries in memory.
const MOST_SESSIONS: usize = 64;
const PYTHON: &str = "python";

#[derive(Default)]
pub(crate) struct Kernels {
    sessions: HashMap<String, Session>,
    /// Begun ahead, for the first session.
    spare: Option<Session>,
    /// Forks Python's kernels.
    nursery: Option<Nursery>,
    /// Spare and nursery stand still until somebody wants them: a restore need not wake them.
    resting: bool,
    begun: u64,
}

struct Nursery {
    exec: Serial,
    channel: OwnedFd,
}

struct Session {
    /// Orders them by their starts.
    number: u64,
    exec: Serial,
    channel: OwnedFd,
    start: Start,
    state: State,
    /// The process is just ending; these wait for what comes after it.
    waiting: Vec<(u32, KernelRun)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// For the first time.
    Beginning,
    Starting,
    Idle,
    Busy,
    Dead {
        for_memory: bool,
    },
}

impl Kernels {
    pub(crate) fn statuses(&self) -> Vec<KernelStatus> {
        let mut all: Vec<_> = self.sessions.iter().collect();
        all.sort_unstable_by_key(|(_, session)| session.number);
        let status = |(id, session): (&String, &Session)| KernelStatus {
            id: id.clone(),
            language: session.start.language.clone(),
            state: match session.state {
                State::Beginning | State::Starting => KernelState::Starting,
                State::Idle => KernelState::Idle,
                State::Busy => KernelState::Busy,
                State::Dead { for_memory: false } => KernelState::Dead,
                State::Dead { for_memory: true } => KernelState::OutOfMemory,
            },
        };
        all.into_iter().map(status).collect()
    }

    fn find(&mut self, id: &str) -> Result<&mut Session, Failure> {
        self.sessions.get_mut(id).ok_or_else(|| {
            refuse(ErrorCode::NotFound, format!("there is no session {}", id.escape_default()))
        })
    }

    fn of_exec(&mut self, exec: Serial) -> Option<&mut Session> {
        self.sessions.values_mut().chain(&mut self.spare).find(|session| session.exec == exec)
    }
}

impl Server {
    pub(crate) fn prepare_kernels(&mut self, stream: u32) -> Result<(), Failure> {
        if self.kernels.nursery.is_some() || self.kernels.spare.is_some() {
            return Err(refuse(ErrorCode::Conflict, "kernels are prepared already"));
        }
        if !kernel::may_have_python() {
            return Err(refuse(ErrorCode::NotFound, "this sandbox has no ipykernel"));
        }
        let (ours, theirs) = channel::packets().map_err(no_channel)?;
        let text = format!("/proc/self/fd/{}", command::SCRIPT);
        let arguments = ["python3", &text, &RENEW.to_string()];
        let mut plan = plan(&arguments.map(|argument| argument.as_bytes().to_vec()))?;
        plan.script = Some(kernel::script().map_err(|error| {
            refuse(ErrorCode::Busy, format!("keep the text of kernels in memory: {error}"))
        })?);
        let nursery = self.run_own("kernel:nursery".to_owned(), plan, theirs)?;
        let exec =
            nursery.ok_or_else(|| refuse(ErrorCode::NotFound, "this sandbox has no python3"))?;
        self.kernels.nursery = Some(Nursery { exec, channel: ours });
        let start = start_of(PYTHON, &[], HOME.to_vec());
        let spare = self.begin_session(start, Some(stream))?;
        self.kernels.spare = Some(spare);
        Ok(())
    }

    pub(crate) fn start_kernel(
        &mut self,
        stream: u32,
        request: &KernelStart,
    ) -> Result<(), Failure> {
        if self.is_ending() {
            let message = "the sandbox is being stopped; start it again first";
            return Err(refuse(ErrorCode::Conflict, message));
        }
        if self.kernels.sessions.contains_key(&request.id) {
            let message = format!("there is a session {} already", request.id.escape_default());
            return Err(refuse(ErrorCode::Conflict, message));
        }
        if self.kernels.sessions.len() >= MOST_SESSIONS {
            let message = format!("{MOST_SESSIONS} sessions are open; delete one first");
            return Err(refuse(ErrorCode::Busy, message));
        }
        let directory = match &request.working_directory {
            Some(directory) => path::resolve(directory)?,
            None => HOME.to_vec(),
        };
        let language = match request.language.to_lowercase().as_str() {
            "" | "python3" | "py" => PYTHON.to_owned(),
            other => other.to_owned(),
        };
        let start = start_of(&language, &request.environment, directory);
        self.wake_spare_kernel();
        let spare =
            self.kernels.spare.take_if(|spare| language == PYTHON && spare.state == State::Idle);
        let session = match spare {
            Some(mut spare) => {
                (spare.start, spare.state) = (start, State::Beginning);
                let call = Call::Start(spare.start.clone());
                self.hand_over(&spare, &call, None, Some(stream))?;
                spare
            }
            None => self.begin_session(start, Some(stream))?,
        };
        self.kernels.sessions.insert(request.id.clone(), session);
        Ok(())
    }

    /// Its first answer goes to `stream`.
    fn begin_session(&mut self, start: Start, stream: Option<u32>) -> Result<Session, Failure> {
        let (ours, theirs) = channel::packets().map_err(no_channel)?;
        self.kernels.begun += 1;
        let number = self.kernels.begun;
        let mut plan = plan(&[b"atoll-agent".to_vec(), kernel::ARGUMENT.as_bytes().to_vec()])?;
        let program = self.program.as_os_str().as_encoded_bytes().to_vec();
        plan.programs = vec![
            std::ffi::CString::new(program)
                .map_err(|_| refuse(ErrorCode::Internal, "the agent's path holds a NUL byte"))?,
        ];
        let exec = self.run_own(format!("kernel:{number}"), plan, theirs)?;
        let exec = exec.ok_or_else(|| {
            refuse(ErrorCode::Busy, "no process can be made for the session; end some others first")
        })?;
        let events = epoll::EventFlags::IN | epoll::EventFlags::ET;
        let _ = epoll::add(&self.poll, &ours, Source::Kernel.event(exec), events);
        let session = Session {
            number,
            exec,
            channel: ours,
            start,
            state: State::Beginning,
            waiting: Vec::new(),
        };
        let nursery = if session.start.language == PYTHON { self.ask_nursery() } else { None };
        let call = Call::Start(session.start.clone());
        if let Err(failure) =
            self.hand_over(&session, &call, nursery.as_ref().map(AsFd::as_fd), stream)
        {
            self.kill_own(exec);
            return Err(failure);
        }
        Ok(session)
    }

    /// A way to ask for one kernel.
    fn ask_nursery(&self) -> Option<OwnedFd> {
        let nursery = self.kernels.nursery.as_ref()?;
        let (ours, theirs) = channel::packets().ok()?;
        channel::send(&nursery.channel, b"k", &[theirs.as_fd()]).ok()?;
        Some(ours)
    }

    /// The answer goes to `stream`, if there is one.
    fn hand_over(
        &mut self,
        session: &Session,
        call: &Call,
        third: Option<BorrowedFd<'_>>,
        stream: Option<u32>,
    ) -> Result<(), Failure> {
        let (ours, theirs) = channel::pair().map_err(no_channel)?;
        send_call(&session.channel, call, &theirs, third).map_err(no_channel)?;
        match stream {
            Some(stream) => self.relay(stream, ours),
            None => Ok(()),
        }
    }

    pub(crate) fn run_cell(&mut self, stream: u32, run: KernelRun) -> Result<(), Failure> {
        let id = run.id.clone();
        let session = self.kernels.find(&id)?;
        if let State::Dead { for_memory } = session.state {
            return Err(is_dead(for_memory));
        }
        let (ours, theirs) = channel::pair().map_err(no_channel)?;
        let call = Call::Run(run);
        match send_call(&session.channel, &call, &theirs, None) {
            Ok(()) => self.relay(stream, ours),
            // It has just ended; what becomes of the session is known in a moment.
            Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => {
                if let Call::Run(run) = call {
                    session.waiting.push((stream, run));
                }
                Ok(())
            }
            Err(Errno::AGAIN) => {
                let message =
                    "too much waits in this session already; wait for it, or use another session";
                Err(refuse(ErrorCode::Busy, message))
            }
            Err(error) => Err(no_channel(error)),
        }
    }

    pub(crate) fn restart_kernel(&mut self, stream: u32, id: &str) -> Result<(), Failure> {
        let session = self.kernels.find(id)?;
        let (old, start, number) = (session.exec, session.start.clone(), session.number);
        let waiting = std::mem::take(&mut session.waiting);
        self.wake_spare_kernel();
        let session = self.begin_session(start, Some(stream))?;
        // One that cannot begin again is dead, and may be begun again later.
        let session = Session { number, state: State::Starting, ..session };
        self.kernels.sessions.insert(id.to_owned(), session);
        self.kill_own(old);
        self.send_again(waiting);
        Ok(())
    }

    pub(crate) fn end_kernel(&mut self, id: &str) -> Result<(), Failure> {
        let session = self.kernels.find(id)?;
        let (exec, waiting) = (session.exec, std::mem::take(&mut session.waiting));
        self.kernels.sessions.remove(id);
        self.kill_own(exec);
        self.send_again(waiting);
        Ok(())
    }

    fn send_again(&mut self, waiting: Vec<(u32, KernelRun)>) {
        for (stream, run) in waiting {
            if self.streams.contains_key(&stream)
                && let Err(failure) = self.run_cell(stream, run)
            {
                self.end_with(stream, Err(failure));
            }
        }
    }

    fn kill_own(&self, exec: Serial) {
        if let Some(exec) = self.execs.get(exec) {
            exec.signal(Signal::KILL);
        }
    }

    pub(crate) fn hear_kernel(&mut self, exec: Serial) {
        let Some(session) = self.kernels.of_exec(exec) else { return };
        while let Ok(Some((said, _))) = channel::receive(&session.channel) {
            match said.first() {
                Some(&channel::IDLE) => session.state = State::Idle,
                Some(&channel::BUSY) => session.state = State::Busy,
                Some(_) | None => {}
            }
        }
    }

    /// Of an exec that nobody outside has asked for.
    pub(crate) fn own_process_ended(&mut self, exec: Serial) {
        let Some(found) = self.execs.get(exec) else { return };
        if !found.id.starts_with("kernel:") {
            return;
        }
        let (status, process) = (found.status(), found.pid);
        // Whatever the session has left behind.
        found.signal(Signal::KILL);
        self.execs.forget(exec);
        self.kernels.nursery.take_if(|nursery| nursery.exec == exec);
        self.kernels.spare.take_if(|spare| spare.exec == exec);
        if let Ok(process) = u32::try_from(process)
            && process > 0
        {
            self.workers.submit(move || {
                // It may never have been made.
                let _ = std::fs::remove_dir_all(kernel::directory(process));
                Done::Dropped
            });
        }
        let id = self.kernels.sessions.iter().find(|(_, session)| session.exec == exec);
        let Some(id) = id.map(|(id, _)| id.clone()) else { return };
        let is_ending = self.is_ending();
        let Some(session) = self.kernels.sessions.get_mut(&id) else { return };
        let waiting = std::mem::take(&mut session.waiting);
        let code = status.exit_code.unwrap_or(exit::DEAD);
        if code == exit::NOT_BEGUN && session.state == State::Beginning {
            self.kernels.sessions.remove(&id);
        } else if code == exit::RESTART && !is_ending {
            self.begin_again(&id);
        } else {
            session.state = State::Dead { for_memory: status.killed_for_memory };
        }
        self.send_again(waiting);
    }

    fn begin_again(&mut self, id: &str) {
        let Some(session) = self.kernels.sessions.get(id) else { return };
        let (start, number) = (session.start.clone(), session.number);
        let again = self.begin_session(start, None);
        if let Some(session) = self.kernels.sessions.get_mut(id) {
            match again {
                Ok(again) => *session = Session { number, state: State::Starting, ..again },
                Err(_) => session.state = State::Dead { for_memory: false },
            }
        }
    }

    /// So that no clone has to wake what it may never use.
    pub(crate) fn rest_spare_kernel(&mut self) {
        if self.kernels.spare.as_ref().is_some_and(|spare| spare.state == State::Idle) {
            self.kernels.resting = true;
            self.freeze_spare(b"1");
        }
    }

    fn wake_spare_kernel(&mut self) {
        if std::mem::take(&mut self.kernels.resting) {
            self.freeze_spare(b"0");
        }
    }

    fn freeze_spare(&self, frozen: &[u8]) {
        for group in self.spare_execs().filter_map(|exec| self.execs.get(exec)?.group.as_ref()) {
            crate::boot::report(
                "rest a kernel",
                write_file(group.directory(), "cgroup.freeze", frozen),
            );
        }
    }

    fn spare_execs(&self) -> impl Iterator<Item = Serial> {
        let spare = self.kernels.spare.as_ref().map(|spare| spare.exec);
        self.kernels.nursery.as_ref().map(|nursery| nursery.exec).into_iter().chain(spare)
    }

    /// Nobody's work is in them.
    pub(crate) fn end_spare_kernel(&mut self) {
        self.spare_execs().for_each(|exec| self.kill_own(exec));
    }

    /// Of sessions, whose random numbers are the users' concern. The spare draws its own when it becomes one.
    pub(crate) fn kernel_groups(&self) -> Vec<OwnedFd> {
        let execs =
            self.kernels.sessions.values().filter_map(|session| self.execs.get(session.exec));
        let groups = execs.filter_map(|exec| exec.group.as_ref()).map(Group::directory);
        groups.filter_map(|group| group.try_clone_to_owned().ok()).collect()
    }
}

fn send_call(
    channel: &OwnedFd,
    call: &Call,
    answer: &OwnedFd,
    third: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let file = channel::in_memory(call)
        .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::NOMEM))?;
    let descriptors: Vec<_> = [file.as_fd(), answer.as_fd()].into_iter().chain(third).collect();
    channel::send(channel, b"c", &descriptors)
}

fn start_of(language: &str, environment: &[(String, String)], directory: Vec<u8>) -> Start {
    let defaults = [
        ("HOME", "/root"),
        ("PATH", command::PATH),
        ("LANG", "C.UTF-8"),
        ("USER", "root"),
        ("LOGNAME", "root"),
    ];
    let mut all: Vec<(String, String)> = Vec::new();
    let defaults = defaults.map(|(name, value)| (name.to_owned(), value.to_owned()));
    for (name, value) in defaults.into_iter().chain(environment.iter().cloned()) {
        all.retain(|(given, _)| *given != name);
        all.push((name, value));
    }
    Start { language: language.to_owned(), environment: all, directory: directory.into() }
}

fn plan(arguments: &[Vec<u8>]) -> Result<Plan, Failure> {
    let arguments = arguments.iter().map(|argument| argument.clone().into());
    let command = Command::Arguments(arguments.collect());
    command::plan(&Wanted {
        command: Some(&command),
        working_directory: None,
        environment: &[],
        user: None,
    })
}

fn no_channel(error: Errno) -> Failure {
    failed("talk to", b"a session", error)
}

fn is_dead(for_memory: bool) -> Failure {
    let why = if for_memory { ": the sandbox was out of memory" } else { "" };
    let message = format!(
        "the kernel of this session has died{why}; restart it with POST …/repl/sessions/{{id}}/restart, or create a new one"
    );
    refuse(ErrorCode::Conflict, message)
}
