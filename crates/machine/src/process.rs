//! A QEMU process: how it is started, watched, found again by a later server, and ended.
//!
//! It outlives the server: it has a session of its own, its sockets lie in its directory, and what it writes to standard
//! error goes to a pipe that neither blocks it nor grows. It never owns a file by name: all it uses is inherited.
#![expect(unsafe_code, reason = "a descriptor is watched by one who does not own it")]

use std::collections::VecDeque;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::fcntl::OFlag;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, WaitId, WaitIdOptions};
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::watch;

use crate::cgroup::Group;
use crate::error::{Error, Result};
use crate::jail::{self, Inmate, Jail};
use crate::text::plain;

const PID_FILE: &str = "qemu.pid";
/// What is kept of standard error: its end.
const STDERR_BYTES: usize = 8 * 1024;
/// A killed process is gone once the kernel has let go of its memory.
const DEATH: Duration = Duration::from_secs(20);
/// From when a guest runs until its processor time is limited: the pages that a restored machine touches first come from
/// the host's files, which is not its doing.
const SETTLED: Duration = Duration::from_secs(2);

/// How a process is started. Not in the child's environment or arguments: nothing secret is needed there.
pub(crate) struct Launch<'a> {
    pub(crate) jail: &'a Jail,
    pub(crate) group: Group,
    pub(crate) arguments: Vec<String>,
    pub(crate) directory: &'a Path,
    /// Also the group. No other process may have it.
    pub(crate) uid: u32,
    pub(crate) netns: &'a OwnedFd,
    /// These, and no others, stay open in the child, under the numbers they have here.
    pub(crate) inherited: &'a [RawFd],
}

/// Dropping it ends the process, unless that was told to outlive us.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    pidfd: OwnedFd,
    directory: PathBuf,
    exit: watch::Receiver<Option<Exit>>,
    stderr: Arc<Mutex<VecDeque<u8>>>,
    outlives: AtomicBool,
    group: Group,
    is_settled: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    Code(i32),
    Signal(i32),
    /// Of a process that another server started.
    Unknown,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "status {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
            Self::Unknown => f.write_str("nobody knows how"),
        }
    }
}

impl Process {
    /// Blocks while the child is made. Its group is removed with it, also when it cannot be made.
    pub(crate) fn start(launch: Launch<'_>) -> Result<Self> {
        let Launch { jail, group, arguments, directory, uid, netns, inherited } = launch;
        let made = || {
            // Not blocking: when nobody reads, what does not fit is dropped. With no reader, writes fail, which QEMU
            // ignores.
            let (stderr, child_stderr) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK)?;
            let groups = group.doors().map_err(io::Error::other)?;
            let inmate = Inmate {
                arguments: &arguments,
                uid,
                netns,
                groups: &groups,
                stderr: &child_stderr,
                inherited,
            };
            Ok((jail.start(&inmate)?, stderr))
        };
        match made() {
            Ok((child, stderr)) => {
                let process = Self::watch(child.pid, child.pidfd, directory, Some(stderr), group)?;
                process.write_pid_file()?;
                Ok(process)
            }
            Err(source) => {
                group.remove();
                Err(Error::Spawn { directory: directory.into(), source })
            }
        }
    }

    /// Finds a process that an earlier server started, and makes sure that it is that one.
    pub(crate) fn adopt(directory: &Path, uid: u32) -> Result<Self> {
        let path = directory.join(PID_FILE);
        let missing = || Error::NoMachine { directory: directory.into() };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(missing()),
            Err(error) => return Err(Error::file("read", path)(error)),
        };
        let mut words = text.split_whitespace();
        let pid: u32 = words.next().and_then(|word| word.parse().ok()).ok_or_else(missing)?;
        let raw = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(missing)?;
        let pidfd =
            rustix::process::pidfd_open(raw, PidfdFlags::NONBLOCK).map_err(|_| missing())?;
        let process = Self::watch(pid, pidfd, directory, None, Group::of(pid))?;
        process.outlive();
        // The descriptor is held, so the number cannot pass to another process behind this comparison.
        let is_ours = words.eq(identity(pid).unwrap_or_default().split_whitespace())
            && std::fs::metadata(format!("/proc/{pid}"))
                .is_ok_and(|metadata| metadata.uid() == uid);
        if is_ours { Ok(process) } else { Err(missing()) }
    }

    fn watch(
        pid: u32,
        pidfd: OwnedFd,
        directory: &Path,
        stderr: Option<OwnedFd>,
        group: Group,
    ) -> Result<Self> {
        // After a restart the pipe is found through the process that still holds it.
        let stderr = stderr.map(File::from).or_else(|| {
            use std::os::unix::fs::OpenOptionsExt;
            let path = format!("/proc/{pid}/fd/2");
            File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path).ok()
        });
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let (end, exit) = watch::channel(None);
        let watched = pidfd.try_clone().map_err(Error::host("watch qemu"))?;
        // SAFETY: it owns the descriptor, and nothing takes it out.
        let watched = unsafe { AsyncFd::register(watched) };
        let watched = watched.map_err(|error| Error::host("watch qemu")(error.into()))?;
        tokio::spawn(keep_stderr_until_the_end(watched, stderr, kept.clone(), group.clone(), end));
        Ok(Self {
            pid,
            pidfd,
            directory: directory.into(),
            exit,
            stderr: kept,
            outlives: AtomicBool::new(false),
            group,
            is_settled: AtomicBool::new(false),
        })
    }

    /// Once it has started, and before a guest runs: takes away the files that it started from. Blocks shortly.
    pub(crate) fn close_jail(&self) -> Result<()> {
        jail::close(&self.pidfd).map_err(Error::host("take qemu's files away from it"))
    }

    /// A guest runs: soon it has no more processor time than it was given.
    pub(crate) fn settle(&self) {
        if self.is_settled.swap(true, Ordering::Relaxed) {
            return;
        }
        let (group, exit) = (self.group.clone(), self.exit());
        tokio::spawn(async move {
            if tokio::time::timeout(SETTLED, exit).await.is_err()
                && let Err(error) = group.limit_processor()
            {
                tracing::warn!(%error, "the processor time of a virtual machine is not limited");
            }
        });
    }

    fn write_pid_file(&self) -> Result<()> {
        let path = self.directory.join(PID_FILE);
        let draft = self.directory.join("qemu.pid.draft");
        let identity = identity(self.pid).map_err(Error::host("read the identity of qemu"))?;
        std::fs::write(&draft, format!("{} {identity}\n", self.pid))
            .map_err(Error::file("write", &draft))?;
        fault::point!("create.mark_renaming", Error::file("write", &path));
        std::fs::rename(&draft, &path).map_err(Error::file("write", path))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    /// From now on the process goes on without us.
    pub(crate) fn outlive(&self) {
        self.outlives.store(true, Ordering::Relaxed);
    }

    /// Waits until the process has ended, however long that takes.
    pub(crate) fn exit(&self) -> impl Future<Output = Exit> + Send + use<> {
        let mut exit = self.exit.clone();
        async move {
            exit.wait_for(Option::is_some)
                .await
                .ok()
                .and_then(|exit| *exit)
                .unwrap_or(Exit::Unknown)
        }
    }

    /// The same, as the reason why something else failed.
    pub(crate) fn ended(&self) -> impl Future<Output = Error> + Send + use<> {
        let (exit, stderr) = (self.exit(), self.stderr.clone());
        async move { Error::Exited { status: exit.await.to_string(), stderr: text_of(&stderr) } }
    }

    /// At once, though the task that watches may learn of it a moment later.
    pub(crate) fn has_ended(&self) -> bool {
        // pidfd_open(2): readable from the end of the process on.
        let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.exit.borrow().is_some()
            || rustix::event::poll(&mut ended, Some(&at_once)).is_ok_and(|count| count > 0)
    }

    pub(crate) fn stderr(&self) -> String {
        text_of(&self.stderr)
    }

    pub(crate) fn send_kill(&self) {
        // An error means that it is gone already.
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, Signal::KILL);
    }

    pub(crate) async fn kill(&self) -> Result<()> {
        self.send_kill();
        tokio::time::timeout(DEATH, self.ended()).await.map_err(|_| Error::Host {
            action: "kill qemu",
            source: io::ErrorKind::TimedOut.into(),
        })?;
        match std::fs::remove_file(self.directory.join(PID_FILE)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::file("remove", self.directory.join(PID_FILE))(error))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !*self.outlives.get_mut() {
            self.send_kill();
        }
    }
}

/// Owned by the process it watches: it ends with that one, and reaps it.
async fn keep_stderr_until_the_end(
    pidfd: AsyncFd<OwnedFd>,
    stderr: Option<File>,
    kept: Arc<Mutex<VecDeque<u8>>>,
    group: Group,
    end: watch::Sender<Option<Exit>>,
) {
    let mut stderr = stderr.and_then(|file| pipe::Receiver::from_file(file).ok());
    loop {
        let mut is_over = false;
        tokio::select! {
            ready = pidfd.readable() => {
                drop(ready);
                is_over = true;
            }
            more = read_more(stderr.as_ref(), &kept) => {
                if !more {
                    stderr = None;
                }
            }
        }
        if is_over {
            break;
        }
    }
    if let Some(stderr) = &stderr {
        while read_now(stderr, &kept).is_ok_and(|count| count > 0) {}
    }
    let exit = match rustix::process::waitid(
        WaitId::PidFd(pidfd.get_ref().as_fd()),
        WaitIdOptions::EXITED,
    ) {
        Ok(Some(status)) => match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Exit::Code(code),
            (None, Some(signal)) => Exit::Signal(signal),
            (None, None) => Exit::Unknown,
        },
        // An adopted process is not our child.
        Ok(None) | Err(_) => Exit::Unknown,
    };
    // Before anybody learns of the end, so that who waits for it finds nothing left.
    let _ = tokio::task::spawn_blocking(move || group.remove()).await;
    let _ = end.send(Some(exit));
}

/// False when no more can come.
async fn read_more(stderr: Option<&pipe::Receiver>, kept: &Mutex<VecDeque<u8>>) -> bool {
    let Some(stderr) = stderr else { return std::future::pending().await };
    if stderr.readable().await.is_err() {
        return false;
    }
    match read_now(stderr, kept) {
        Ok(count) => count > 0,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

fn read_now(stderr: &pipe::Receiver, kept: &Mutex<VecDeque<u8>>) -> io::Result<usize> {
    let mut buffer = [0; 4096];
    let count = stderr.try_read(&mut buffer)?;
    let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    kept.extend(&buffer[..count]);
    let excess = kept.len().saturating_sub(STDERR_BYTES);
    kept.drain(..excess);
    Ok(count)
}

fn text_of(kept: &Mutex<VecDeque<u8>>) -> String {
    let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
    let bytes: Vec<u8> = kept.iter().copied().collect();
    plain(String::from_utf8_lossy(&bytes).trim(), 2 * STDERR_BYTES)
}

/// What no other process with this number has: when it was started, and since which boot that counts.
fn identity(pid: u32) -> io::Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the name in parentheses, which may hold anything; the start time is the 22nd.
    let start = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19));
    let start = start.ok_or_else(|| io::Error::other("a process without a start time"))?;
    Ok(format!("{start} {}", host_boot_id()?))
}

/// Different after every start of the host.
///
/// # Errors
/// There is no `/proc`.
pub fn host_boot_id() -> io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}
