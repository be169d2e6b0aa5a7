//! The one place that makes processes. Like `vfork`: the child shares our memory until it has become the program, so
//! that nothing is copied and nothing of ours has to be copied on write afterwards. It may therefore neither allocate
//! nor call anything that keeps state; it only makes system calls on what was prepared.
#![expect(
    unsafe_code,
    reason = "a process that shares our memory is made by a system call that no crate offers"
)]

use std::ffi::{CStr, c_char, c_int};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use protocol::message::{ErrorCode, Failure};
use rustix::io::Errno;

use super::command::{Plan, SCRIPT};
use crate::failure::refuse;

const STACK: usize = 64 << 10;

/// The ends that the child gets.
pub(crate) struct Descriptors<'a> {
    pub(crate) stdin: BorrowedFd<'a>,
    pub(crate) stdout: BorrowedFd<'a>,
    pub(crate) stderr: BorrowedFd<'a>,
    /// They are a terminal, which controls the new session.
    pub(crate) controls: bool,
}

#[derive(Debug)]
pub(crate) struct Spawned {
    pub(crate) pid: i32,
    /// Whether it runs in the group that was given.
    pub(crate) in_group: bool,
    /// To learn of its end where nobody reaps all children.
    pub(crate) pidfd: Option<OwnedFd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
enum Step {
    Descriptors,
    User,
    Directory,
    Program,
}

/// What the child reads, and where it writes why it failed.
struct Order {
    stdin: RawFd,
    stdout: RawFd,
    stderr: RawFd,
    script: RawFd,
    controls: bool,
    user: Option<(u32, u32, *const u32, usize)>,
    directory: *const c_char,
    any_directory: bool,
    programs: *const *const c_char,
    arguments: *const *const c_char,
    environment: *const *const c_char,
    failure: Option<(Step, i32, usize)>,
}

/// `struct clone_args` of Linux, with its first size that has `cgroup`.
#[derive(Default)]
#[repr(C, align(8))]
struct CloneArguments {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Starts the program, and returns when it runs.
pub(crate) fn spawn(
    plan: &mut Plan,
    descriptors: &Descriptors<'_>,
    group: Option<BorrowedFd<'_>>,
    with_pidfd: bool,
) -> Result<Spawned, (Failure, Option<OwnedFd>)> {
    loop {
        let (spawned, failure) =
            try_spawn(plan, descriptors, group, with_pidfd).map_err(|error| {
                let message = match error {
                    Errno::AGAIN | Errno::NOMEM => {
                        "the sandbox has too many processes; end some, or cancel execs"
                    }
                    _ => "no process can be made",
                };
                let code = if matches!(error, Errno::AGAIN | Errno::NOMEM) {
                    ErrorCode::Busy
                } else {
                    ErrorCode::Internal
                };
                (refuse(code, message), None)
            })?;
        match failure {
            None => return Ok(spawned),
            Some((Step::Program, libc::ENOEXEC, program))
                if plan.programs[program].as_c_str() != c"/bin/sh" =>
            {
                plan.as_script(program);
            }
            Some((step, error, _)) => return Err((explain(plan, step, error), spawned.pidfd)),
        }
    }
}

fn explain(plan: &Plan, step: Step, error: i32) -> Failure {
    let reason = std::io::Error::from_raw_os_error(error);
    let (code, what) = match (step, error) {
        (Step::Directory, _) => {
            (ErrorCode::Invalid, format!("the working directory {}", shown(&plan.directory)))
        }
        (Step::Program, libc::E2BIG) => (
            ErrorCode::TooLarge,
            "arguments and environment are longer than the kernel allows; use a file".to_owned(),
        ),
        (Step::Program, libc::EAGAIN | libc::ENOMEM) => {
            (ErrorCode::Busy, format!("start {}", plan.program_shown()))
        }
        (Step::Program, _) => (ErrorCode::Invalid, format!("the program {}", plan.program_shown())),
        (Step::User, _) => (ErrorCode::Internal, "become the user".to_owned()),
        (Step::Descriptors, _) => (ErrorCode::Internal, "prepare the streams".to_owned()),
    };
    refuse(code, format!("{what}: {reason}"))
}

fn shown(text: &CStr) -> String {
    crate::failure::shown(text.to_bytes())
}

type Failed = (Step, i32, usize);

fn try_spawn(
    plan: &Plan,
    descriptors: &Descriptors<'_>,
    group: Option<BorrowedFd<'_>>,
    with_pidfd: bool,
) -> Result<(Spawned, Option<Failed>), Errno> {
    let programs = pointers(&plan.programs);
    let arguments = pointers(&plan.arguments);
    let environment = pointers(&plan.environment);
    let mut order = Order {
        stdin: descriptors.stdin.as_raw_fd(),
        stdout: descriptors.stdout.as_raw_fd(),
        stderr: descriptors.stderr.as_raw_fd(),
        script: plan.script.as_ref().map_or(-1, AsRawFd::as_raw_fd),
        controls: descriptors.controls,
        user: plan
            .user
            .as_ref()
            .map(|user| (user.uid, user.gid, user.groups.as_ptr(), user.groups.len())),
        directory: plan.directory.as_ptr(),
        any_directory: plan.any_directory,
        programs: programs.as_ptr(),
        arguments: arguments.as_ptr(),
        environment: environment.as_ptr(),
        failure: None,
    };
    let mut pidfd: c_int = -1;
    let mut stack = Vec::<u128>::with_capacity(STACK / 16);
    let flags = (libc::CLONE_VM | libc::CLONE_VFORK) as u64 | CLONE_CLEAR_SIGHAND;
    let mut clone = CloneArguments {
        flags: flags | if with_pidfd { libc::CLONE_PIDFD as u64 } else { 0 },
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        stack: stack.as_mut_ptr() as u64,
        stack_size: STACK as u64,
        ..CloneArguments::default()
    };
    let blocked = Blocked::all();
    let mut made = Err(Errno::INVAL);
    let mut in_group = false;
    if let Some(group) = group {
        let mut into = CloneArguments { cgroup: group.as_raw_fd() as u64, ..clone };
        into.flags |= CLONE_INTO_CGROUP;
        // SAFETY: see `clone_and_run`; `order`, what it points to, `pidfd` and `stack` outlive the call, which returns
        // only after the child has left our memory.
        made = unsafe { clone_and_run(&mut into, &mut order) };
        in_group = made.is_ok();
    }
    // A group that root in the guest has removed, or a kernel without such groups: rather outside than not at all.
    if matches!(
        made,
        Err(Errno::INVAL | Errno::NODEV | Errno::BADF | Errno::OPNOTSUPP | Errno::BUSY)
    ) {
        // SAFETY: as above.
        made = unsafe { clone_and_run(&mut clone, &mut order) };
    }
    drop(blocked);
    let pid = made?;
    // SAFETY: the kernel has put a new descriptor there, which nobody else owns.
    let pidfd = (pidfd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(pidfd) });
    Ok((Spawned { pid, in_group, pidfd }, order.failure))
}

fn pointers(texts: &[std::ffi::CString]) -> Vec<*const c_char> {
    texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect()
}

/// No handler of ours may run in the child.
struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    fn all() -> Self {
        // SAFETY: both sets are ours; a zeroed set is a valid value to be overwritten.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
            Self { before }
        }
    }
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // SAFETY: `before` was filled by the kernel.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, ptr::null_mut());
        }
    }
}

/// Makes the child and lets it run [`child`] on its own stack; returns in the parent only.
///
/// # Safety
/// `arguments` ask for a child that shares memory and is waited for (`CLONE_VM`, `CLONE_VFORK`), on a stack of its own.
#[cfg(target_arch = "x86_64")]
unsafe fn clone_and_run(arguments: &mut CloneArguments, order: &mut Order) -> Result<i32, Errno> {
    let result: i64;
    // SAFETY: the child begins with a new, 16-aligned stack and the registers below; it never returns from `child`, so it
    // touches nothing of this frame. The parent goes on at `2` with its own stack.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, r12",
            "call r13",
            "ud2",
            "2:",
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") ptr::from_mut(arguments),
            in("rsi") size_of::<CloneArguments>(),
            in("r12") ptr::from_mut(order),
            in("r13") child as extern "sysv64" fn(*mut Order) -> !,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    i32::try_from(result)
        .ok()
        .filter(|&pid| pid > 0)
        .ok_or_else(|| Errno::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL)))
}

/// In the child: becomes the program or says why not.
extern "sysv64" fn child(order: *mut Order) -> ! {
    // SAFETY: the parent waits until we have left its memory and does not touch `order` meanwhile.
    let order = unsafe { &mut *order };
    order.failure = Some(become_program(order));
    loop {
        // SAFETY: ends this process and nothing else.
        unsafe {
            libc::syscall(libc::SYS_exit_group, 127);
        }
    }
}

/// Returns only what failed.
fn become_program(order: &Order) -> Failed {
    // SAFETY: only system calls, on descriptors and memory that the parent keeps for us; the wrappers of the C library
    // that are used keep no state besides errno. User and group are changed by bare system calls: the wrappers would
    // change all of the parent's threads.
    unsafe {
        libc::setsid();
        // The streams may have numbers below 3 themselves: first out of the way.
        let mut high = [order.stdin, order.stdout, order.stderr, order.script];
        for descriptor in high.iter_mut().filter(|descriptor| **descriptor >= 0) {
            if *descriptor <= SCRIPT {
                *descriptor = libc::fcntl(*descriptor, libc::F_DUPFD_CLOEXEC, SCRIPT + 1);
                if *descriptor < 0 {
                    return (Step::Descriptors, *libc::__errno_location(), 0);
                }
            }
        }
        for (descriptor, number) in high.into_iter().zip([0, 1, 2, SCRIPT]) {
            if descriptor >= 0 && libc::dup2(descriptor, number) < 0 {
                return (Step::Descriptors, *libc::__errno_location(), 0);
            }
        }
        if order.controls && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return (Step::Descriptors, *libc::__errno_location(), 0);
        }
        if order.script >= 0 {
            libc::syscall(libc::SYS_close_range, 3, SCRIPT - 1, 0);
            libc::syscall(libc::SYS_close_range, SCRIPT + 1, c_int::MAX, 0);
        } else {
            libc::syscall(libc::SYS_close_range, 3, c_int::MAX, 0);
        }
        libc::umask(0o022);
        if let Some((uid, gid, groups, count)) = order.user
            && (libc::syscall(libc::SYS_setgroups, count, groups) != 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) != 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) != 0)
        {
            return (Step::User, *libc::__errno_location(), 0);
        }
        if libc::chdir(order.directory) != 0 {
            let error = *libc::__errno_location();
            if !order.any_directory || libc::chdir(c"/".as_ptr()) != 0 {
                return (Step::Directory, error, 0);
            }
        }
        // Handlers were cleared by the kernel; what is ignored here, or was where this program was started, is not there.
        let mut default: libc::sigaction = std::mem::zeroed();
        default.sa_sigaction = libc::SIG_DFL;
        for signal in [libc::SIGPIPE, libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGTERM] {
            libc::sigaction(signal, &default, ptr::null_mut());
        }
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &none, ptr::null_mut());

        let (mut failed, mut at) = ((Step::Program, libc::ENOENT, 0), 0);
        while !(*order.programs.add(at)).is_null() {
            libc::execve(*order.programs.add(at), order.arguments, order.environment);
            match *libc::__errno_location() {
                // A later directory of the PATH may have it.
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => failed = (Step::Program, libc::EACCES, at),
                error => return (Step::Program, error, at),
            }
            at += 1;
        }
        failed
    }
}
