//! This test program itself, started as QEMU is, tries what an attacker would: [`inmate`] runs in the jail, the others
//! start it and hear what went otherwise than it should.
#![expect(unsafe_code, reason = "an attacker does not use libraries")]

use std::io::{BufRead, BufReader};
use std::os::fd::{BorrowedFd, FromRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use nix::errno::Errno;
use rustix::process::{Signal, WaitOptions};
use serde::{Deserialize, Serialize};

use super::*;
use crate::cgroup::{Cgroups, Group, Limits};
use crate::spec::{Accelerator, MachineSpec, Shape};
use crate::tap::Tap;

const UID: u32 = 1_899_999_200;
/// How the inmate learns its descriptors, as QEMU does from its arguments.
const DESCRIPTORS: &str = "descriptors:";

/// What the inmate is told to look for.
#[derive(Debug, Serialize, Deserialize)]
struct Host {
    pid: i32,
    file: PathBuf,
    socket: PathBuf,
    abstract_socket: String,
    message_queue: i32,
}

struct Prison {
    started: Started,
    channel: BufReader<UnixStream>,
    group: Group,
    _handed: (UnixStream, File),
}

impl Prison {
    fn start(jail: &Jail, uid: u32) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(child::DEADLINE)).unwrap();
        let handed = File::open("/etc/passwd").unwrap();
        let inherited = [theirs.as_raw_fd(), handed.as_raw_fd()];
        let [channel, file] = inherited;
        let arguments = [
            "jail::tests::inmate",
            &format!("{DESCRIPTORS}{channel},{file}"),
            "--exact",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ];
        let shape = Shape { cpus: 1, memory_mib: 256 };
        let limits = Limits::of(&MachineSpec { shape, accelerator: Accelerator::Kvm });
        let group = Cgroups::find().create(uid, &limits).unwrap();
        let tap = Tap::unconnected().unwrap();
        let stderr = File::options().write(true).open("/dev/null").unwrap().into();
        let inmate = Inmate {
            arguments: &arguments.map(str::to_owned),
            uid,
            netns: &tap.netns,
            groups: &group.doors().unwrap(),
            stderr: &stderr,
            inherited: &inherited,
        };
        let started = jail.start(&inmate).unwrap();
        let channel = BufReader::new(ours);
        Self { started, channel, group, _handed: (theirs, handed) }
    }

    fn of_this_program() -> Jail {
        Jail::new(&std::env::current_exe().unwrap(), &[]).unwrap()
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        self.channel.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn of_proc(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.started.pid).into()
    }
}

impl Drop for Prison {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.started.pidfd, Signal::KILL);
        let _ = rustix::process::waitpid(
            Pid::from_raw(self.started.pid.cast_signed()),
            WaitOptions::empty(),
        );
        self.group.remove();
    }
}

fn try_everything(jail: &Jail, uid: u32) {
    let mut prison = Prison::start(jail, uid);
    assert_eq!(prison.hear(), "started");
    close(&prison.started.pidfd).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let host = Host {
        pid: std::process::id().cast_signed(),
        file: directory.path().join("file"),
        socket: directory.path().join("socket"),
        abstract_socket: format!("atoll-jail-test-{uid}"),
        message_queue: i32::try_from(uid).unwrap(),
    };
    std::fs::write(&host.file, "secret").unwrap();
    let _named = UnixListener::bind(&host.socket).unwrap();
    let address = SocketAddr::from_abstract_name(&host.abstract_socket).unwrap();
    let _abstract = UnixListener::bind_addr(&address).unwrap();
    // SAFETY: numbers only.
    let queue = unsafe { libc::msgget(host.message_queue, libc::IPC_CREAT | 0o666) };
    let told = serde_json::to_string(&host).unwrap();
    writeln!(prison.channel.get_mut(), "{told}").unwrap();
    let surprises = prison.hear();
    // SAFETY: as above.
    unsafe { libc::msgctl(queue, libc::IPC_RMID, std::ptr::null_mut()) };
    assert_eq!(surprises, "[]");
}

#[test]
fn an_inmate_reaches_nothing_of_the_host() {
    let jail = Prison::of_this_program();
    assert_eq!(jail.users, Users::Own, "this test needs user namespaces");
    try_everything(&jail, UID);
}

#[test]
fn nor_does_one_on_a_host_without_user_namespaces() {
    try_everything(&Jail { users: Users::OfTheHost, ..Prison::of_this_program() }, UID + 1);
}

#[test]
fn an_inmate_is_in_namespaces_of_its_own_without_any_capability() {
    let jail = Prison::of_this_program();
    let mut prison = Prison::start(&jail, UID + 2);
    assert_eq!(prison.hear(), "started");
    for namespace in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let theirs = std::fs::read_link(prison.of_proc(&format!("ns/{namespace}"))).unwrap();
        let ours = std::fs::read_link(format!("/proc/self/ns/{namespace}")).unwrap();
        assert_ne!(theirs, ours, "{namespace}");
    }
    let status = std::fs::read_to_string(prison.of_proc("status")).unwrap();
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim_start_matches(':').split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(field(set), ["0000000000000000"], "{set}");
    }
    let uid = (UID + 2).to_string();
    assert_eq!((field("Uid"), field("Gid")), (vec![uid.clone(); 4], vec![uid; 4]));
    assert_eq!(
        (field("Groups"), field("NoNewPrivs"), field("Seccomp")),
        (vec![], vec!["1".to_owned()], vec!["2".to_owned()])
    );
    assert_eq!(field("NSpid").last().unwrap(), "1");
    let groups = std::fs::read_to_string(prison.of_proc("cgroup")).unwrap();
    assert!(
        prison.group.paths().count() == 0 || groups.contains(&format!("atoll-{}.", UID + 2)),
        "{groups}"
    );
}

#[test]
fn until_its_root_is_closed_an_inmate_sees_its_own_files_only() {
    let jail = Prison::of_this_program();
    let mut prison = Prison::start(&jail, UID + 3);
    assert_eq!(prison.hear(), "started");
    let root = prison.of_proc("root");
    let mut seen: Vec<_> = files_below(&root)
        .into_iter()
        .map(|path| Path::new("/").join(path.strip_prefix(&root).unwrap()))
        .collect();
    let program = std::env::current_exe().unwrap();
    assert!(seen.contains(&program), "{seen:?}");
    seen.retain(|path| *path != program && !is_library(path));
    seen.sort();
    let expected =
        ["/dev/null", "/dev/urandom", "/empty/dev/null", "/etc/ld.so.cache"].map(PathBuf::from);
    assert_eq!(seen, expected);
    close(&prison.started.pidfd).unwrap();
    assert_eq!(files_below(&root), [root.join("dev/null")]);
    let mounts = std::fs::read_to_string(prison.of_proc("mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 2, "{mounts}");
}

fn is_library(path: &Path) -> bool {
    path.to_str().is_some_and(|path| path.contains("/lib") && path.contains(".so."))
}

fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap()) {
        let kind = entry.file_type().unwrap();
        // Its own view of processes is looked at elsewhere.
        if kind.is_dir() && entry.file_name() != "proc" {
            found.extend(files_below(&entry.path()));
        } else if !kind.is_dir() && !kind.is_symlink() {
            found.push(entry.path());
        }
    }
    found
}

#[test]
fn what_fails_before_the_program_runs_is_told() {
    let mut jail = Prison::of_this_program();
    jail.program = "/no/such/program".into();
    let tap = Tap::unconnected().unwrap();
    let stderr = File::options().write(true).open("/dev/null").unwrap().into();
    let inmate = Inmate {
        arguments: &[],
        uid: UID + 4,
        netns: &tap.netns,
        groups: &[],
        stderr: &stderr,
        inherited: &[],
    };
    let error = jail.start(&inmate).map(|started| started.pid).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::NotFound);
    assert!(error.to_string().starts_with("execute the program"), "{error}");
}

/// Whatever else the server starts ends sometimes.
#[test]
fn a_signal_meanwhile_does_not_keep_a_program_from_starting() {
    use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

    extern "C" fn nothing(_: libc::c_int) {}
    let action = SigAction::new(SigHandler::Handler(nothing), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler does nothing.
    unsafe { sigaction(Signal::SIGUSR2, &action) }.unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    // SAFETY: always succeeds.
    let waiting = unsafe { libc::pthread_self() };
    let signals = std::thread::spawn(move || {
        for _ in 0..50 {
            // SAFETY: that thread waits for this one's end.
            assert_eq!(unsafe { libc::pthread_kill(waiting, libc::SIGUSR2) }, 0);
            std::thread::park_timeout(std::time::Duration::from_millis(2));
        }
        // As the program's start closes it.
        drop(theirs);
    });
    attend(ours, rustix::process::getpid(), UID).unwrap();
    signals.join().unwrap();
}

#[test]
fn the_end_of_an_inmate_ends_whatever_it_has_started() {
    let jail = Prison::of_this_program();
    let mut prison = Prison::start(&jail, UID + 5);
    assert_eq!(prison.hear(), "started");
    writeln!(prison.channel.get_mut(), "fork").unwrap();
    assert_eq!(prison.hear(), "forked");
    // Any of its threads may have forked.
    let tasks = std::fs::read_dir(prison.of_proc("task")).unwrap();
    let children: String = tasks
        .map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).unwrap())
        .collect();
    let child = children.split_whitespace().next().expect("it has a child").to_owned();
    drop(prison);
    assert!(!Path::new(&format!("/proc/{child}")).exists());
}

#[test]
#[ignore = "prints figures"]
#[expect(clippy::print_stdout, reason = "the figures are its output")]
fn figures_of_a_jail() {
    const STARTS: usize = 50;
    let begun = std::time::Instant::now();
    let jail = Prison::of_this_program();
    println!("root made once, ms {:.1}", begun.elapsed().as_secs_f64() * 1e3);
    let median = |mut samples: Vec<f64>| {
        samples.sort_by(f64::total_cmp);
        samples[samples.len() / 2]
    };
    let tap = Tap::unconnected().unwrap();
    let stderr = File::options().write(true).open("/dev/null").unwrap().into();
    let (mut plain, mut jailed, mut closed) = (Vec::new(), Vec::new(), Vec::new());
    for n in 0..STARTS {
        let begun = std::time::Instant::now();
        let mut command = std::process::Command::new(&jail.program);
        command.arg("--list").stdout(std::process::Stdio::null());
        // SAFETY: nothing is done; it only keeps the library from a faster way that QEMU could never take.
        unsafe { std::os::unix::process::CommandExt::pre_exec(&mut command, || Ok(())) };
        let mut child = command.spawn().unwrap();
        plain.push(begun.elapsed().as_secs_f64() * 1e3);
        child.wait().unwrap();
        let inmate = Inmate {
            arguments: &["--list".to_owned()],
            uid: UID + 50 + u32::try_from(n).unwrap(),
            netns: &tap.netns,
            groups: &[],
            stderr: &stderr,
            inherited: &[],
        };
        let begun = std::time::Instant::now();
        let started = jail.start(&inmate).unwrap();
        jailed.push(begun.elapsed().as_secs_f64() * 1e3);
        let begun = std::time::Instant::now();
        // It may be faster.
        if close(&started.pidfd).is_ok() {
            closed.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        let pid = Pid::from_raw(started.pid.cast_signed());
        rustix::process::waitpid(pid, WaitOptions::empty()).unwrap();
    }
    println!("start without a jail, ms {:.2}", median(plain));
    println!("start in a jail, ms {:.2}", median(jailed));
    println!("its root closed, ms {:.2}", median(closed));
}

/// Not a test: what the others start.
#[test]
#[ignore = "runs in the jail only"]
fn inmate() {
    let numbers =
        std::env::args().find_map(|argument| argument.strip_prefix(DESCRIPTORS).map(str::to_owned));
    let numbers = numbers.expect("started by another test");
    let (channel, file) = numbers.split_once(',').unwrap();
    let inherited: [RawFd; 2] = [channel.parse().unwrap(), file.parse().unwrap()];
    // SAFETY: it was left open for this.
    let mut channel = BufReader::new(unsafe { UnixStream::from_raw_fd(inherited[0]) });
    writeln!(channel.get_mut(), "started").unwrap();
    let mut line = String::new();
    channel.read_line(&mut line).unwrap();
    if line == "fork\n" {
        // SAFETY: the child only waits to be ended.
        match unsafe { fork() }.unwrap() {
            ForkResult::Child => loop {
                std::thread::park();
            },
            ForkResult::Parent { .. } => writeln!(channel.get_mut(), "forked").unwrap(),
        }
    } else {
        let surprises = surprises(&serde_json::from_str(&line).unwrap(), inherited);
        writeln!(channel.get_mut(), "{surprises:?}").unwrap();
    }
    loop {
        std::thread::park();
    }
}

fn result(returned: libc::c_long) -> nix::Result<()> {
    Errno::result(returned).map(drop)
}

macro_rules! call {
    ($number:ident $(, $argument:expr)*) => {
        // SAFETY: none of them may succeed, and those that could only change this process.
        result(unsafe { libc::syscall(libc::$number $(, $argument)*) })
    };
}

fn open(path: impl AsRef<Path>) -> nix::Result<()> {
    io_result(File::open(path))
}

fn io_result<T>(result: io::Result<T>) -> nix::Result<()> {
    result.map(drop).map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(0)))
}

/// What went otherwise than it should.
fn surprises(host: &Host, inherited: [RawFd; 2]) -> Vec<String> {
    let nothing = std::ptr::null::<libc::c_void>();
    let null_path = c"/".as_ptr();
    let [channel, file] = inherited;
    let abstract_address = SocketAddr::from_abstract_name(&host.abstract_socket).unwrap();
    let exe = std::env::args_os().next().unwrap();
    let exec = |path: &Path| {
        let path = CString::new(path.as_os_str().as_bytes()).unwrap();
        call!(SYS_execve, path.as_ptr(), [path.as_ptr(), std::ptr::null()].as_ptr(), nothing)
    };
    let new_user = libc::CLONE_NEWUSER | libc::SIGCHLD;
    let expected: Vec<(&str, Errno, nix::Result<()>)> = vec![
        ("open a file", Errno::ENOENT, open(&host.file)),
        ("open /etc/passwd", Errno::ENOENT, open("/etc/passwd")),
        ("open /proc", Errno::ENOENT, open("/proc/self/status")),
        ("open a descriptor anew", Errno::ENOENT, open(format!("/proc/self/fd/{file}"))),
        ("open /sys", Errno::ENOENT, open("/sys")),
        ("open its own program", Errno::ENOENT, open(&exe)),
        ("open /dev/kvm", Errno::ENOENT, open("/dev/kvm")),
        ("open /dev/net/tun", Errno::ENOENT, open("/dev/net/tun")),
        ("leave through ..", Errno::ENOENT, open("/../../../etc/passwd")),
        ("create a file", Errno::EROFS, io_result(File::create("/file"))),
        (
            "create a device",
            Errno::EPERM,
            call!(SYS_mknodat, libc::AT_FDCWD, c"/x".as_ptr(), libc::S_IFCHR, 1),
        ),
        ("execute a shell", Errno::ENOENT, exec(Path::new("/bin/sh"))),
        ("execute itself", Errno::ENOENT, exec(Path::new(&exe))),
        ("write to a file it may read", Errno::EINVAL, call!(SYS_ftruncate, file, 0)),
        ("enter a descriptor", Errno::ENOTDIR, call!(SYS_fchdir, file)),
        ("signal a process", Errno::ESRCH, call!(SYS_kill, host.pid, 0)),
        ("signal all processes", Errno::ESRCH, call!(SYS_kill, -1, 0)),
        ("trace a process", Errno::EPERM, call!(SYS_ptrace, libc::PTRACE_ATTACH, host.pid, 0, 0)),
        (
            "read another's memory",
            Errno::EPERM,
            call!(SYS_process_vm_readv, host.pid, nothing, 0, nothing, 0, 0),
        ),
        ("find a process", Errno::ESRCH, call!(SYS_pidfd_open, host.pid, 0)),
        ("connect to a socket", Errno::ENOENT, io_result(UnixStream::connect(&host.socket))),
        (
            "connect to an abstract socket",
            Errno::ECONNREFUSED,
            io_result(UnixStream::connect_addr(&abstract_address)),
        ),
        (
            "make an internet socket",
            Errno::EPERM,
            call!(SYS_socket, libc::AF_INET, libc::SOCK_STREAM, 0),
        ),
        (
            "make a raw socket",
            Errno::EPERM,
            call!(SYS_socket, libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
        ),
        (
            "make a packet socket",
            Errno::EPERM,
            call!(SYS_socket, libc::AF_PACKET, libc::SOCK_RAW, 0),
        ),
        (
            "make a netlink socket",
            Errno::EPERM,
            call!(SYS_socket, libc::AF_NETLINK, libc::SOCK_RAW, 0),
        ),
        ("make a vsock", Errno::EPERM, call!(SYS_socket, libc::AF_VSOCK, libc::SOCK_STREAM, 0)),
        ("find a message queue", Errno::ENOENT, call!(SYS_msgget, host.message_queue, 0)),
        ("become root", Errno::EPERM, call!(SYS_setuid, 0)),
        ("become root by all three", Errno::EPERM, call!(SYS_setresuid, 0, 0, 0)),
        ("enter a group", Errno::EPERM, call!(SYS_setgroups, 0, nothing)),
        ("make a user namespace", Errno::EPERM, call!(SYS_unshare, libc::CLONE_NEWUSER)),
        ("start in a user namespace", Errno::EPERM, call!(SYS_clone, new_user, 0, 0, 0, 0)),
        ("start unseen by the filter", Errno::ENOSYS, call!(SYS_clone3, nothing, 0)),
        ("enter a namespace", Errno::EPERM, call!(SYS_setns, file, 0)),
        (
            "mount",
            Errno::EPERM,
            call!(SYS_mount, nothing, null_path, c"tmpfs".as_ptr(), 0, nothing),
        ),
        ("unmount", Errno::EPERM, call!(SYS_umount2, null_path, libc::MNT_DETACH)),
        ("change the root", Errno::EPERM, call!(SYS_chroot, null_path)),
        ("open by handle", Errno::EPERM, call!(SYS_open_by_handle_at, file, nothing, 0)),
        ("read keys", Errno::EPERM, call!(SYS_keyctl, 0, -3, 0, 0, 0)),
        (
            "add a key",
            Errno::EPERM,
            call!(SYS_add_key, c"user".as_ptr(), c"x".as_ptr(), nothing, 0, -3),
        ),
        ("load a program into the kernel", Errno::EPERM, call!(SYS_bpf, 0, nothing, 0)),
        ("count events", Errno::EPERM, call!(SYS_perf_event_open, nothing, 0, -1, -1, 0)),
        ("handle faults", Errno::EPERM, call!(SYS_userfaultfd, 0)),
        ("make a ring", Errno::EPERM, call!(SYS_io_uring_setup, 1, nothing)),
        ("load a module", Errno::EPERM, call!(SYS_init_module, nothing, 0, nothing)),
        ("set the clock", Errno::EPERM, call!(SYS_clock_settime, 0, nothing)),
        ("rename the host", Errno::EPERM, call!(SYS_sethostname, nothing, 0)),
        ("go first", Errno::EACCES, call!(SYS_setpriority, libc::PRIO_PROCESS, 0, -20)),
        ("open more files", Errno::EPERM, io_result(raise_limit(libc::RLIMIT_NOFILE))),
        ("dump core", Errno::EPERM, io_result(raise_limit(libc::RLIMIT_CORE))),
        ("lock memory", Errno::EPERM, call!(SYS_mlockall, libc::MCL_CURRENT)),
    ];
    let mut surprises: Vec<String> = expected
        .into_iter()
        .filter(|(_, expected, result)| *result != Err(*expected))
        .map(|(what, _, result)| format!("{what}: {result:?}"))
        .collect();
    let mut expect = |what: &str, holds: bool| {
        if !holds {
            surprises.push(what.to_owned());
        }
    };
    let names = |path: &str| -> Vec<String> {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    expect("its root holds only dev", names("/") == ["dev"]);
    expect("dev holds only null", names("/dev") == ["null"]);
    expect(
        "null is a device",
        std::fs::metadata("/dev/null").is_ok_and(|null| null.file_type().is_char_device()),
    );
    expect("it is process 1", std::process::id() == 1);
    let is_open = |fd: RawFd| call!(SYS_fcntl, fd, libc::F_GETFD).is_ok();
    let open: Vec<RawFd> = (0..1024).filter(|&fd| is_open(fd)).collect();
    let mut handed = vec![0, 1, 2, channel, file];
    handed.sort_unstable();
    expect(&format!("it has {open:?} open and was handed {handed:?}"), open == handed);
    for fd in open {
        // SAFETY: it was just found open, and nothing closes it.
        let stat = rustix::fs::fstat(unsafe { BorrowedFd::borrow_raw(fd) });
        let is_directory =
            stat.is_ok_and(|stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_dir());
        expect("none of its descriptors is a directory", !is_directory);
    }
    let threads = threads();
    expect(&format!("it could start {threads} threads"), threads < 200);
    surprises
}

fn raise_limit(resource: libc::__rlimit_resource_t) -> io::Result<()> {
    let limit = libc::rlimit { rlim_cur: 1 << 20, rlim_max: 1 << 20 };
    // SAFETY: the structure lives until the call returns.
    Errno::result(unsafe { libc::setrlimit(resource, &raw const limit) })
        .map(drop)
        .map_err(Into::into)
}

/// Until it may have no more.
fn threads() -> usize {
    let start = || {
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        thread.spawn(|| {
            loop {
                std::thread::park();
            }
        })
    };
    (0..1000).take_while(|_| start().is_ok()).count()
}
