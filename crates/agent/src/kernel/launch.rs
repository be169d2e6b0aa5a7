//! From a language to a kernel that answers: forked from a process that has imported everything already, or started.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use protocol::message::{ErrorCode, Failure};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};
use serde_json::{Value, json};

use super::HOME;
use super::channel::{self, Start};
use super::jupyter::{self, Request, Said};
use super::specifications::{self, Specification};
use super::zmtp::{Connection, Kind};
use crate::failure::refuse;

/// Runs Python's kernel, or forks it: see there.
const SCRIPT: &str = include_str!("kernel.py");
/// The signal on which Python's kernels draw their random numbers anew: a real-time one that nobody else is likely to use.
pub(crate) const RENEW: i32 = 40;

/// A first import under emulation, of a process that forks kernels or of a kernel of its own.
const LAUNCH: Duration = Duration::from_secs(150);
/// From a kernel's process to its answers.
const ANSWERS: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(20);
/// Subscriptions take effect a moment after they were made: until then outputs go astray.
const HEARD: Duration = Duration::from_millis(500);
const CHANNELS: [&str; 5] = ["shell", "iopub", "stdin", "control", "hb"];

pub(super) struct Kernel {
    /// Leads its process group.
    process: Pid,
    pidfd: OwnedFd,
    origin: Origin,
    pub(super) stdout: OwnedFd,
    pub(super) stderr: OwnedFd,
    pub(super) shell: Connection,
    pub(super) iopub: Connection,
    control: Connection,
    interrupt_by_message: bool,
    last: u64,
}

enum Origin {
    /// Of the process that forks kernels, which tells of its end on this socket.
    Forked(OwnedFd),
    Own(Child),
}

/// A process that may become a kernel that answers.
struct Begun {
    process: Pid,
    pidfd: OwnedFd,
    origin: Origin,
    stdout: OwnedFd,
    stderr: OwnedFd,
    /// Python's kernel says here that it listens.
    ready: Option<OwnedFd>,
}

pub(super) fn launch(start: &Start, nursery: Option<OwnedFd>) -> Result<Kernel, Failure> {
    check_directory(start)?;
    let directory = super::directory(std::process::id());
    let files =
        set_up(&directory).map_err(|error| fail("make a directory for the kernel", error))?;
    let language = start.language.to_lowercase();
    let is_python = matches!(language.as_str(), "python" | "python3" | "py");
    let specification =
        if is_python { None } else { specifications::find(&language, &start.environment) };
    if !is_python && specification.is_none() {
        return Err(no_kernel(&start.language));
    }
    let forked = nursery.filter(|_| is_python).and_then(|nursery| fork(nursery, start, &files));
    let begun = match forked {
        Some(begun) => begun,
        None => begin(start, specification.as_ref(), &files)
            .map_err(|error| could_not_begin(&start.language, error))?,
    };
    let interrupt = specification.and_then(|specification| specification.interrupt_mode);
    let interrupt_by_message = interrupt.as_deref() == Some("message");
    begun.connect(&start.language, &directory, interrupt_by_message)
}

/// A home that nobody made is no reason not to begin; what was asked for is.
pub(super) fn check_directory(start: &Start) -> Result<(), Failure> {
    let given = path_of(&start.directory);
    if start.directory[..] == *HOME || given.is_dir() {
        return Ok(());
    }
    let message = format!("the working directory {}: there is no such directory", given.display());
    Err(refuse(ErrorCode::Invalid, message))
}

fn path_of(bytes: &[u8]) -> &Path {
    use std::os::unix::ffi::OsStrExt;
    Path::new(std::ffi::OsStr::from_bytes(bytes))
}

fn no_kernel(language: &str) -> Failure {
    let way_out = if language.to_lowercase().starts_with("py") {
        "install one with `pip install ipykernel`, or use the template code-interpreter".to_owned()
    } else {
        "install one and its specification (`jupyter kernelspec install`), for example \
         `pip install bash_kernel && python3 -m bash_kernel.install` for bash"
            .to_owned()
    };
    let message =
        format!("this sandbox has no kernel for {}; {way_out}", language.escape_default());
    refuse(ErrorCode::Invalid, message)
}

fn could_not_begin(language: &str, error: std::io::Error) -> Failure {
    if error.kind() == std::io::ErrorKind::NotFound {
        no_kernel(language)
    } else {
        fail("start the kernel", error)
    }
}

fn fail(what: &str, error: impl std::fmt::Display) -> Failure {
    refuse(ErrorCode::Internal, format!("{what}: {error}"))
}

/// The connection file.
fn set_up(directory: &Path) -> std::io::Result<PathBuf> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    std::fs::DirBuilder::new().mode(0o700).create(directory)?;
    let mut content = json!({
        "transport": "ipc", "ip": directory.join("socket"), "key": "", "signature_scheme": "hmac-sha256",
    });
    for (channel, number) in CHANNELS.iter().zip(1..) {
        content[format!("{channel}_port")] = Value::from(number);
    }
    let file = directory.join("connection.json");
    std::fs::write(&file, content.to_string())?;
    Ok(file)
}

fn socket(directory: &Path, channel: &str) -> PathBuf {
    let number = CHANNELS.iter().position(|name| *name == channel).unwrap_or(0) + 1;
    directory.join(format!("socket-{number}"))
}

/// `None`: there is nobody who could; a kernel of its own may still begin.
fn fork(nursery: OwnedFd, start: &Start, connection_file: &Path) -> Option<Begun> {
    let nowhere = File::options().read(true).write(true).open("/dev/null").ok()?;
    let (stdout, their_stdout) = pipe_with(PipeFlags::CLOEXEC).ok()?;
    let (stderr, their_stderr) = pipe_with(PipeFlags::CLOEXEC).ok()?;
    let (ready, their_ready) = pipe_with(PipeFlags::CLOEXEC).ok()?;
    let environment: serde_json::Map<String, Value> = start
        .environment
        .iter()
        .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
        .collect();
    let request = json!({
        "connection_file": connection_file, "environment": environment, "group": own_group(),
        "directory": directory_of(start).to_string_lossy(),
    });
    let descriptors =
        [nowhere.as_fd(), their_stdout.as_fd(), their_stderr.as_fd(), their_ready.as_fd()];
    channel::send(&nursery, request.to_string().as_bytes(), &descriptors).ok()?;
    drop((their_stdout, their_stderr, their_ready));
    wait_readable(&nursery, Instant::now() + LAUNCH)?;
    let (answer, _) = channel::receive(&nursery).ok()??;
    let answer: Value = serde_json::from_slice(&answer).ok()?;
    let process = Pid::from_raw(i32::try_from(answer["pid"].as_i64()?).ok()?)?;
    let pidfd = pidfd_open(process, PidfdFlags::empty()).ok()?;
    let origin = Origin::Forked(nursery);
    Some(Begun { process, pidfd, origin, stdout, stderr, ready: Some(ready) })
}

/// The text of what runs Python's kernels, in memory: it is nobody's file, and no line of `ps` either.
pub(crate) fn script() -> std::io::Result<OwnedFd> {
    use std::io::Write;
    let mut file = File::from(memfd_create(c"kernel.py", MemfdFlags::CLOEXEC)?);
    file.write_all(SCRIPT.as_bytes())?;
    Ok(file.into())
}

/// Of control groups: the kernel shall be in ours.
fn own_group() -> Option<String> {
    let text = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let path = text.lines().find_map(|line| line.strip_prefix("0::"))?;
    let file = format!("/sys/fs/cgroup{path}/cgroup.procs");
    Path::new(&file).exists().then_some(file)
}

fn begin(
    start: &Start,
    specification: Option<&Specification>,
    connection_file: &Path,
) -> std::io::Result<Begun> {
    let mut ready = None;
    let mut command = match specification {
        Some(specification) => {
            let file = connection_file.to_string_lossy();
            let mut arguments = specification
                .argv
                .iter()
                .map(|argument| argument.replace("{connection_file}", &file));
            let mut command = Command::new(arguments.next().unwrap_or_default());
            command.args(arguments);
            command
        }
        None => {
            let (ours, theirs) = pipe_with(PipeFlags::CLOEXEC)?;
            let script = script()?;
            for inherited in [&theirs, &script] {
                fcntl_setfd(inherited, FdFlags::empty())?;
            }
            let mut command = Command::new("python3");
            command.arg(format!("/proc/self/fd/{}", script.as_raw_fd())).arg(RENEW.to_string());
            command.arg(connection_file).arg(theirs.as_raw_fd().to_string());
            ready = Some((ours, theirs, script));
            command
        }
    };
    command.env_clear().envs(start.environment.iter().map(|(name, value)| (name, value)));
    if let Some(specification) = specification {
        command.envs(&specification.env);
    }
    command.current_dir(directory_of(start));
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let mut child = command.spawn()?;
    let process = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let process = process.ok_or(Errno::SRCH)?;
    let pidfd = pidfd_open(process, PidfdFlags::empty())?;
    let none = || std::io::Error::from(Errno::BADF);
    let stdout = child.stdout.take().ok_or_else(none)?.into();
    let stderr = child.stderr.take().ok_or_else(none)?.into();
    let ready = ready.map(|(ours, ..)| ours);
    Ok(Begun { process, pidfd, origin: Origin::Own(child), stdout, stderr, ready })
}

fn directory_of(start: &Start) -> &Path {
    let wanted = path_of(&start.directory);
    if wanted.is_dir() { wanted } else { Path::new("/") }
}

fn wait_readable(descriptor: impl AsFd, end: Instant) -> Option<()> {
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let mut ready = [PollFd::new(&descriptor, PollFlags::IN)];
        match poll(&mut ready, left.try_into().ok().as_ref()) {
            Ok(0) => return None,
            Ok(_) => return Some(()),
            Err(Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

impl Begun {
    fn connect(
        self,
        language: &str,
        directory: &Path,
        interrupt_by_message: bool,
    ) -> Result<Kernel, Failure> {
        if let Some(ready) = &self.ready {
            let mut said = [0; 16];
            let is_ready = wait_readable(ready, Instant::now() + LAUNCH)
                .is_some_and(|()| rustix::io::read(ready, &mut said).is_ok_and(|count| count > 0));
            if !is_ready {
                return Err(self.never_began(language));
            }
        }
        // Whoever says nothing of it is looked for, and may still have to import what it needs.
        let end = Instant::now() + if self.ready.is_some() { ANSWERS } else { LAUNCH };
        while !socket(directory, "shell").exists() || !socket(directory, "iopub").exists() {
            let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
            let has_ended = poll(&mut ended, LOOK.try_into().ok().as_ref()) == Ok(1);
            if has_ended || Instant::now() > end {
                return Err(self.never_began(language));
            }
        }
        let connect = |channel, kind| Connection::connect(&socket(directory, channel), kind);
        let connections = || -> anyhow::Result<_> {
            let shell = connect("shell", Kind::Dealer)?;
            let iopub = connect("iopub", Kind::Subscriber)?;
            Ok((shell, iopub, connect("control", Kind::Dealer)?))
        };
        let (shell, iopub, control) =
            connections().map_err(|error| fail("reach the kernel", format!("{error:#}")))?;
        let Self { process, pidfd, origin, stdout, stderr, .. } = self;
        for output in [&stdout, &stderr] {
            rustix::io::ioctl_fionbio(output, true)
                .map_err(|error| fail("read the kernel", error))?;
        }
        let mut kernel = Kernel {
            process,
            pidfd,
            origin,
            stdout,
            stderr,
            shell,
            iopub,
            control,
            interrupt_by_message,
            last: 0,
        };
        let end = Instant::now() + ANSWERS;
        kernel.meet(end).map_err(|error| fail("talk to the kernel", format!("{error:#}")))?;
        Ok(kernel)
    }

    /// Its last words say why.
    fn never_began(self, language: &str) -> Failure {
        let _ = rustix::io::ioctl_fionbio(&self.stderr, true);
        let mut words = vec![0; 64 << 10];
        let count = rustix::io::read(&self.stderr, &mut words[..]).unwrap_or(0);
        let words = String::from_utf8_lossy(&words[..count]).into_owned();
        if words.contains("ModuleNotFoundError") || words.contains("ImportError") {
            return no_kernel(language);
        }
        let last = words.trim().lines().last().unwrap_or("it said nothing").to_owned();
        refuse(ErrorCode::Conflict, format!("the kernel for {language} did not start: {last}"))
    }
}

impl Kernel {
    /// Until it answers and is heard.
    fn meet(&mut self, end: Instant) -> anyhow::Result<()> {
        loop {
            let id = self.send("kernel_info_request", json!({}))?;
            let (mut has_answered, mut is_heard) = (false, false);
            let patience = (Instant::now() + HEARD).max(Instant::now());
            while !(has_answered && is_heard) {
                let now = Instant::now();
                anyhow::ensure!(now < end, "the kernel does not answer");
                if has_answered && now > patience {
                    break;
                }
                let left = patience.saturating_duration_since(now).max(LOOK);
                let mut ready = [
                    PollFd::new(&self.shell, PollFlags::IN),
                    PollFd::new(&self.iopub, PollFlags::IN),
                    PollFd::new(&self.pidfd, PollFlags::IN),
                ];
                let _ = poll(&mut ready, left.try_into().ok().as_ref());
                let has_ended = !ready[2].revents().is_empty();
                anyhow::ensure!(!has_ended, "the kernel ended as it began");
                self.shell.fill()?;
                self.iopub.fill()?;
                while let Some(message) = self.shell.next() {
                    let (parent, said) = jupyter::understand(message)?;
                    has_answered |= parent == id && matches!(said, Said::Answer { .. });
                }
                while let Some(message) = self.iopub.next() {
                    let (parent, said) = jupyter::understand(message)?;
                    is_heard |= parent == id && said == Said::Idle;
                }
            }
            if has_answered && is_heard {
                return Ok(());
            }
        }
    }

    /// On the shell's channel; the id by which it is answered.
    pub(super) fn send(&mut self, kind: &'static str, content: Value) -> anyhow::Result<String> {
        self.last += 1;
        let request = Request { id: format!("atoll-{}", self.last), kind, content };
        request.send(&mut self.shell)?;
        Ok(request.id)
    }

    pub(super) fn interrupt(&mut self) {
        if self.interrupt_by_message {
            self.last += 1;
            let id = format!("atoll-{}", self.last);
            let request = Request { id, kind: "interrupt_request", content: json!({}) };
            let _ = request.send(&mut self.control);
        } else {
            let _ = kill_process_group(self.process, Signal::INT);
        }
    }

    /// Readable once the kernel has ended.
    pub(super) fn pidfd(&self) -> &OwnedFd {
        &self.pidfd
    }

    /// How it ended, as far as that is known.
    pub(super) fn how_it_ended(&mut self) -> String {
        use std::os::unix::process::ExitStatusExt;
        let code = match &mut self.origin {
            Origin::Own(child) => child
                .wait()
                .ok()
                .and_then(|status| status.code().or_else(|| status.signal().map(|signal| -signal))),
            Origin::Forked(nursery) => {
                let told = wait_readable(&*nursery, Instant::now() + Duration::from_secs(5))
                    .and_then(|()| channel::receive(&*nursery).ok().flatten());
                told.and_then(|(told, _)| serde_json::from_slice::<Value>(&told).ok())
                    .and_then(|told| i32::try_from(told["ended"].as_i64()?).ok())
            }
        };
        match code {
            Some(code) if code < 0 => format!("by signal {}", -code),
            Some(code) => format!("with exit code {code}"),
            None => "for an unknown reason".to_owned(),
        }
    }
}
