//! What holds a QEMU process that a guest has taken over: namespaces of its own, a root with nothing in it, an unprivileged
//! uid without any capability, no way to gain one, fewer system calls, and only the descriptors it was handed.
//!
//! To start, QEMU needs its program, libraries, firmware and `/proc`. It finds them, and nothing else of the host, in a
//! root made once for all; once it has started, before a guest runs, [`close`] takes even that away.

mod child;
mod root;
mod system_calls;
#[cfg(test)]
mod tests;

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::sched::{CloneFlags, unshare};
use nix::unistd::{ForkResult, fork};
use rustix::process::{Pid, PidfdFlags};
use seccompiler::BpfProgram;

use self::child::{Child, Message};
pub(crate) use self::root::close;
use crate::error::{Error, Result};

/// Made once, for any number of processes of one program.
#[derive(Debug)]
pub(crate) struct Jail {
    program: PathBuf,
    root: OwnedFd,
    filters: Vec<BpfProgram>,
    users: Users,
}

/// Not every host has user namespaces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Users {
    Own,
    OfTheHost,
}

/// One process to be.
pub(crate) struct Inmate<'a> {
    pub(crate) arguments: &'a [String],
    /// Also the group. No other process may have it.
    pub(crate) uid: u32,
    pub(crate) netns: &'a OwnedFd,
    /// The `cgroup.procs` of the groups it belongs to.
    pub(crate) groups: &'a [File],
    pub(crate) stderr: &'a OwnedFd,
    /// These, and no others, stay open beside the standard streams, under the numbers they have here.
    pub(crate) inherited: &'a [RawFd],
}

pub(crate) struct Started {
    pub(crate) pid: u32,
    pub(crate) pidfd: OwnedFd,
}

impl Jail {
    /// For `program`, which reads `data` while it starts. Blocks for some tens of milliseconds.
    pub(crate) fn new(program: &Path, data: &[PathBuf]) -> Result<Self> {
        let failed = Error::host("make the root of virtual machines' processes");
        let mut files =
            root::libraries(program).map_err(Error::file("list libraries of", program))?;
        files.push(program.to_owned());
        files.extend_from_slice(data);
        let root = root::make(files).map_err(failed)?;
        let filters = system_calls::filters().map_err(|error| {
            Error::host("make a filter of system calls")(io::Error::other(error))
        })?;
        let users = if has_user_namespaces() { Users::Own } else { Users::OfTheHost };
        if users == Users::OfTheHost {
            tracing::warn!(
                "this host has no user namespaces, so a virtual machine's process has one wall less: set user.max_user_namespaces above 0"
            );
        }
        Ok(Self { program: program.to_owned(), root, filters, users })
    }

    /// Blocks until the program runs.
    pub(crate) fn start(&self, inmate: &Inmate<'_>) -> io::Result<Started> {
        let program = text(self.program.as_os_str().as_encoded_bytes())?;
        let arguments = std::iter::once(Ok(program.clone()))
            .chain(inmate.arguments.iter().map(|argument| text(argument.as_bytes())))
            .collect::<io::Result<Vec<_>>>()?;
        // One arena: QEMU's few threads do not need more, and each costs memory in every machine.
        let environment = [c"MALLOC_ARENA_MAX=1".to_owned()];
        let (ours, theirs) = UnixStream::pair()?;
        let null = File::options().read(true).write(true).open("/dev/null")?;
        let groups: Vec<_> = inmate.groups.iter().map(AsRawFd::as_raw_fd).collect();
        let mut kept = vec![null.as_raw_fd(), inmate.stderr.as_raw_fd(), inmate.netns.as_raw_fd()];
        kept.extend([self.root.as_raw_fd(), theirs.as_raw_fd()]);
        kept.extend(groups.iter().chain(inmate.inherited));
        kept.sort_unstable();
        let child = Child {
            arguments: pointers(&arguments),
            environment: pointers(&environment),
            null: null.as_raw_fd(),
            stderr: inmate.stderr.as_raw_fd(),
            uid: inmate.uid,
            netns: inmate.netns.as_raw_fd(),
            root: self.root.as_raw_fd(),
            groups,
            inherited: inmate.inherited,
            kept,
            filters: &self.filters,
            parent: theirs.as_raw_fd(),
            has_own_users: self.users == Users::Own,
        };
        // The namespace of processes belongs to the children of the thread that asked for it, so that thread must not
        // have others.
        let pid = std::thread::scope(|scope| {
            let forking = || -> io::Result<Pid> {
                unshare(CloneFlags::CLONE_NEWPID)?;
                #[expect(unsafe_code, reason = "no library starts a process in such a way")]
                // SAFETY: the child makes system calls only, on what was made before; it allocates nothing.
                match unsafe { fork() }? {
                    ForkResult::Child => child.run(),
                    ForkResult::Parent { child } => Pid::from_raw(child.as_raw())
                        .ok_or_else(|| io::ErrorKind::InvalidData.into()),
                }
            };
            std::thread::Builder::new()
                .name("jail".into())
                .spawn_scoped(scope, forking)?
                .join()
                .map_err(|_| io::Error::other("the thread that starts a process panicked"))?
        })?;
        drop(theirs);
        let started = (|| {
            let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK)?;
            attend(ours, pid, inmate.uid)?;
            Ok(Started { pid: pid.as_raw_nonzero().get().unsigned_abs(), pidfd })
        })();
        if started.is_err() {
            // Not reaped by anybody yet, so the number is still its own.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let _ = rustix::io::retry_on_intr(|| {
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
            });
        }
        started
    }
}

/// Does for the child what it cannot, and hears why it failed, until it has become the program.
fn attend(mut child: UnixStream, pid: Pid, uid: u32) -> io::Result<()> {
    child.set_read_timeout(Some(child::DEADLINE))?;
    let mut message = [0; Message::BYTES];
    loop {
        let mut length = 0;
        while length < message.len() {
            match child.read(&mut message[length..]) {
                Ok(0) if length == 0 => return Ok(()),
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => length += count,
                // signal(7): a read with a timeout is not restarted, and any child of the server that ends is a signal.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        match Message::decode(message) {
            Message::MapMe => {
                fault::point!("create.process_mapping", std::convert::identity);
                let process = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
                let map = format!("{uid} {uid} 1\n");
                std::fs::write(process.join("uid_map"), &map)?;
                std::fs::write(process.join("gid_map"), &map)?;
                child.write_all(&[0])?;
            }
            Message::Failed { step, errno } => {
                let cause = io::Error::from_raw_os_error(errno);
                return Err(io::Error::new(cause.kind(), format!("{}: {cause}", step.name())));
            }
        }
    }
}

fn has_user_namespaces() -> bool {
    Path::new("/proc/self/ns/user").exists()
        && std::fs::read_to_string("/proc/sys/user/max_user_namespaces")
            .is_ok_and(|most| most.trim() != "0")
}

fn text(bytes: &[u8]) -> io::Result<CString> {
    CString::new(bytes).map_err(io::Error::other)
}

fn pointers(texts: &[CString]) -> child::Texts {
    child::Texts(texts.iter().map(|text| text.as_ptr()).chain([std::ptr::null()]).collect())
}
