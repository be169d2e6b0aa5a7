//! From fork to exec, in the child: here it gives up, step by step, all that a root process has. Nothing here allocates:
//! of the server's threads only this one exists in the child, and another may have held the allocator's lock.
#![expect(unsafe_code, reason = "system calls that no library offers in a child")]

use std::convert::Infallible;
use std::ffi::c_char;
use std::os::fd::{BorrowedFd, RawFd};
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::resource::{Resource, setrlimit};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::unistd::{Gid, Uid};
use seccompiler::BpfProgram;

/// All of it takes a few milliseconds.
pub(super) const DEADLINE: Duration = Duration::from_secs(20);
const OPEN_FILES: u64 = 1024;
/// QEMU's threads: one for each vCPU, and up to 64 that wait for disks.
const THREADS: u64 = 512;
const HOST_NAME: &str = "machine";

/// Made before the fork, used after it.
pub(super) struct Child<'a> {
    pub(super) arguments: Texts,
    pub(super) environment: Texts,
    pub(super) null: RawFd,
    pub(super) stderr: RawFd,
    pub(super) uid: u32,
    pub(super) netns: RawFd,
    pub(super) root: RawFd,
    pub(super) groups: Vec<RawFd>,
    pub(super) inherited: &'a [RawFd],
    /// All descriptors of the above and below, in order; the rest is closed.
    pub(super) kept: Vec<RawFd>,
    pub(super) filters: &'a [BpfProgram],
    pub(super) parent: RawFd,
    pub(super) has_own_users: bool,
}

/// Pointers to texts that their maker keeps, and a null pointer behind them, as `execve` wants them.
pub(super) struct Texts(pub(super) Vec<*const c_char>);

// SAFETY: what they point to is neither changed nor freed while the thread that forks borrows them.
unsafe impl Sync for Texts {}

macro_rules! steps {
    ($($step:ident => $name:literal),+ $(,)?) => {
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(super) enum Step { $($step),+ }

        impl Step {
            const ALL: &[Self] = &[$(Self::$step),+];

            pub(super) fn name(self) -> &'static str {
                match self { $(Self::$step => $name),+ }
            }
        }
    };
}

steps! {
    Session => "leave the server's session",
    Groups => "enter its control groups",
    Network => "enter its network namespace",
    Root => "enter its root",
    Namespaces => "make its namespaces",
    Proc => "mount its /proc",
    Limits => "set its resource limits",
    Users => "make its user namespace",
    Identity => "become its user",
    Capabilities => "give up all capabilities",
    Descriptors => "close descriptors",
    Filter => "filter its system calls",
    Exec => "execute the program",
}

/// What the child tells its parent before it has become the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// It is in its user namespace, where it is nobody until its parent says who.
    MapMe,
    Failed {
        step: Step,
        errno: i32,
    },
}

impl Message {
    pub(super) const BYTES: usize = 5;

    fn encode(self) -> [u8; Self::BYTES] {
        let (first, rest) = match self {
            Self::MapMe => (u8::MAX, 0),
            Self::Failed { step, errno } => (step as u8, errno),
        };
        let [a, b, c, d] = rest.to_le_bytes();
        [first, a, b, c, d]
    }

    pub(super) fn decode([first, a, b, c, d]: [u8; Self::BYTES]) -> Self {
        match Step::ALL.get(usize::from(first)) {
            Some(&step) => Self::Failed { step, errno: i32::from_le_bytes([a, b, c, d]) },
            None => Self::MapMe,
        }
    }
}

struct Failure(Step, Errno);

trait At<T> {
    fn at(self, step: Step) -> Result<T, Failure>;
}

impl<T> At<T> for nix::Result<T> {
    fn at(self, step: Step) -> Result<T, Failure> {
        self.map_err(|errno| Failure(step, errno))
    }
}

impl Child<'_> {
    /// Becomes the program, or tells why not and ends.
    pub(super) fn run(&self) -> ! {
        let Err(Failure(step, errno)) = self.become_inmate();
        let message = Message::Failed { step, errno: errno as i32 }.encode();
        let _ = nix::unistd::write(borrow(self.parent), &message);
        // SAFETY: ends this process at once, without anything of the parent's that its exit would run.
        unsafe { libc::_exit(127) }
    }

    fn become_inmate(&self) -> Result<Infallible, Failure> {
        self.close_the_rest().at(Step::Descriptors)?;
        default_signals().at(Step::Session)?;
        nix::unistd::setsid().at(Step::Session)?;
        for &group in &self.groups {
            nix::unistd::write(borrow(group), b"0").at(Step::Groups)?;
        }
        setns(borrow(self.netns), CloneFlags::CLONE_NEWNET).at(Step::Network)?;
        setns(borrow(self.root), CloneFlags::CLONE_NEWNS).at(Step::Root)?;
        // Of its own also so that what is taken from its root later is not taken from that of others.
        unshare(
            CloneFlags::CLONE_NEWNS
                | CloneFlags::CLONE_NEWIPC
                | CloneFlags::CLONE_NEWUTS
                | CloneFlags::CLONE_NEWCGROUP,
        )
        .at(Step::Namespaces)?;
        nix::unistd::sethostname(HOST_NAME).at(Step::Namespaces)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
        mount(Some("proc"), "/proc", Some("proc"), flags, None::<&str>).at(Step::Proc)?;
        nix::unistd::chdir("/").at(Step::Root)?;
        limit().at(Step::Limits)?;
        nix::unistd::setgroups(&[]).at(Step::Identity)?;
        if self.has_own_users {
            unshare(CloneFlags::CLONE_NEWUSER).at(Step::Users)?;
            self.ask_to_be_mapped().at(Step::Users)?;
        }
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.uid));
        nix::unistd::setresgid(gid, gid, gid).at(Step::Identity)?;
        drop_bounding_set().at(Step::Capabilities)?;
        nix::unistd::setresuid(uid, uid, uid).at(Step::Identity)?;
        drop_capabilities().at(Step::Capabilities)?;
        nix::sys::prctl::set_no_new_privs().at(Step::Capabilities)?;
        leave_keyring();
        self.arrange_descriptors().at(Step::Descriptors)?;
        for filter in self.filters {
            let applied = seccompiler::apply_filter(filter);
            applied.map_err(|_| Errno::last()).at(Step::Filter)?;
        }
        // SAFETY: both arrays end with a null pointer, and their texts live in the parent's copy of this memory.
        unsafe {
            let (arguments, environment) = (&self.arguments.0, &self.environment.0);
            libc::execve(arguments[0], arguments.as_ptr(), environment.as_ptr());
        }
        Err(Failure(Step::Exec, Errno::last()))
    }

    /// First of all: were the server killed now, this process would hold its locks, and by the other end of its own
    /// socket or of a sibling's wait for its answer for ever.
    fn close_the_rest(&self) -> nix::Result<()> {
        let close = |first: RawFd, last: libc::c_uint| {
            // SAFETY: nobody in this process uses them.
            let closed = unsafe { libc::close_range(first.cast_unsigned(), last, 0) };
            Errno::result(closed).map(drop)
        };
        let mut next = libc::STDERR_FILENO + 1;
        for &kept in self.kept.iter().filter(|&&kept| kept > libc::STDERR_FILENO) {
            if kept > next {
                close(next, (kept - 1).cast_unsigned())?;
            }
            next = kept + 1;
        }
        close(next, libc::c_uint::MAX)
    }

    fn ask_to_be_mapped(&self) -> nix::Result<()> {
        nix::unistd::write(borrow(self.parent), &Message::MapMe.encode())?;
        let mut answer = [0];
        match nix::unistd::read(borrow(self.parent), &mut answer)? {
            1 => Ok(()),
            _ => Err(Errno::EPIPE),
        }
    }

    fn arrange_descriptors(&self) -> nix::Result<()> {
        // SAFETY: only flags of descriptors are changed, and those of the standard streams, which nobody here uses.
        unsafe {
            for (from, to) in [(self.null, 0), (self.null, 1), (self.stderr, 2)] {
                Errno::result(libc::dup2(from, to))?;
            }
            // Also whatever a library may have opened without it: nothing passes by accident.
            let flags = libc::CLOSE_RANGE_CLOEXEC.cast_signed();
            Errno::result(libc::close_range(3, libc::c_uint::MAX, flags))?;
        }
        for &descriptor in self.inherited {
            fcntl(borrow(descriptor), FcntlArg::F_SETFD(FdFlag::empty()))?;
        }
        Ok(())
    }
}

fn borrow(descriptor: RawFd) -> BorrowedFd<'static> {
    // SAFETY: the parent held it open at the fork, and this process never closes it.
    unsafe { BorrowedFd::borrow_raw(descriptor) }
}

fn default_signals() -> nix::Result<()> {
    SigSet::empty().thread_set_mask()?;
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: it takes a handler away.
    unsafe { sigaction(Signal::SIGPIPE, &default) }.map(drop)
}

fn limit() -> nix::Result<()> {
    for (resource, most) in [
        (Resource::RLIMIT_CORE, 0),
        (Resource::RLIMIT_MEMLOCK, 0),
        (Resource::RLIMIT_MSGQUEUE, 0),
        (Resource::RLIMIT_NOFILE, OPEN_FILES),
        (Resource::RLIMIT_NPROC, THREADS),
    ] {
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// What could come back by executing something.
fn drop_bounding_set() -> nix::Result<()> {
    for capability in 0..=63_u64 {
        // SAFETY: takes numbers only.
        match Errno::result(unsafe {
            libc::prctl(libc::PR_CAPBSET_DROP, capability, 0_u64, 0_u64, 0_u64)
        }) {
            Ok(_) => {}
            // The kernel knows no more.
            Err(Errno::EINVAL) => break,
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
}

fn drop_capabilities() -> nix::Result<()> {
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(|errno| Errno::from_raw(errno.raw_os_error()))
}

/// Whatever keys the server's session may hold. A kernel without keyrings has none to leave.
fn leave_keyring() {
    const JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: without a name, a new and empty keyring is made for this process.
    let _ = unsafe { libc::syscall(libc::SYS_keyctl, JOIN_SESSION_KEYRING, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let failures = Step::ALL.iter().map(|&step| Message::Failed { step, errno: libc::EPERM });
        for message in failures.chain([Message::MapMe]) {
            assert_eq!(Message::decode(message.encode()), message);
        }
    }
}
