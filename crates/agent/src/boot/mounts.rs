//! Mounting: the kernel's file systems, the root disk in place of the initramfs, and what programs expect besides.

use std::ffi::CStr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::io::Errno;
use rustix::mount::{MountFlags, mount, mount_move, mount_remount};

/// Where the root disk is mounted before it becomes `/`.
const NEW_ROOT: &str = "/root";
const ROOT_DISK: &str = "/dev/vda";
const DISK_DEADLINE: Duration = Duration::from_secs(30);
const DISK_INTERVAL: Duration = Duration::from_millis(5);

pub(super) fn mount_kernel_file_systems() -> anyhow::Result<()> {
    for (directory, kind) in [("/proc", "proc"), ("/sys", "sysfs"), ("/dev", "devtmpfs")] {
        let _ = std::fs::create_dir(directory);
        let flags = if directory == "/dev" { MountFlags::NOSUID } else { hardened() };
        match mount(kind, directory, kind, flags, None::<&CStr>) {
            // The kernel mounts some of them by itself if so configured.
            Ok(()) | Err(Errno::BUSY) => {}
            Err(error) => return Err(error).with_context(|| format!("mount {directory}")),
        }
    }
    Ok(())
}

fn hardened() -> MountFlags {
    MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC
}

/// Afterwards `/` is the root disk, and the initramfs is gone from memory.
pub(super) fn enter_root() -> anyhow::Result<()> {
    wait_for_disk()?;
    let _ = std::fs::create_dir(NEW_ROOT);
    // Reading a file must not write to the disk of every clone.
    let flags = MountFlags::NOATIME | MountFlags::from_bits_retain(libc::MS_LAZYTIME as u32);
    mount(ROOT_DISK, NEW_ROOT, "ext4", flags, None::<&CStr>).context("mount the root disk")?;
    for directory in ["/proc", "/sys", "/dev"] {
        let target = format!("{NEW_ROOT}{directory}");
        let _ = std::fs::create_dir(&target);
        mount_move(directory, &target).with_context(|| format!("move {directory}"))?;
    }
    // The agent itself runs on: a file that is being executed keeps its content.
    let _ = std::fs::remove_dir_all("/modules");
    let _ = std::fs::remove_file("/init");
    rustix::process::chdir(NEW_ROOT).context("enter the root disk")?;
    mount_move(".", "/").context("put the root disk in place")?;
    rustix::process::chroot(".").context("make it the root")?;
    rustix::process::chdir("/").context("begin at the root")
}

fn wait_for_disk() -> anyhow::Result<()> {
    let end = Instant::now() + DISK_DEADLINE;
    while !Path::new(ROOT_DISK).exists() {
        if Instant::now() > end {
            bail!("there is no {ROOT_DISK}");
        }
        pause(DISK_INTERVAL);
    }
    Ok(())
}

/// Only for moments at which nothing else can be waited for.
pub(crate) fn pause(span: Duration) {
    if let Ok(span) = span.try_into() {
        let _ = rustix::event::poll(&mut [], Some(&span));
    }
}

/// What programs expect and a guest can live without.
pub(super) fn mount_the_rest() {
    let pts = c"mode=0620,gid=5,ptmxmode=0666";
    let nosuid = MountFlags::NOSUID | MountFlags::NODEV;
    let mounts: [(&str, &str, MountFlags, Option<&CStr>); 5] = [
        ("/dev/pts", "devpts", MountFlags::NOSUID | MountFlags::NOEXEC, Some(pts)),
        ("/dev/shm", "tmpfs", nosuid, Some(c"mode=1777")),
        ("/run", "tmpfs", nosuid, Some(c"mode=0755,size=20%")),
        (super::CGROUPS, "cgroup2", hardened(), None),
        ("/dev/mqueue", "mqueue", hardened(), None),
    ];
    for (directory, kind, flags, data) in mounts {
        let _ = std::fs::create_dir(directory);
        super::report(&format!("mount {directory}"), mount(kind, directory, kind, flags, data));
    }
    for (link, target) in [
        ("/dev/fd", "/proc/self/fd"),
        ("/dev/stdin", "/proc/self/fd/0"),
        ("/dev/stdout", "/proc/self/fd/1"),
        ("/dev/stderr", "/proc/self/fd/2"),
    ] {
        let _ = std::os::unix::fs::symlink(target, link);
    }
    let _ = std::fs::create_dir("/run/lock");
    super::report("make /tmp", make_tmp());
}

fn make_tmp() -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    match std::fs::create_dir("/tmp") {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    std::fs::set_permissions("/tmp", std::fs::Permissions::from_mode(0o1777))
}

/// Everything is written and the root is read-only; every other file system at least written.
pub(crate) fn settle() {
    rustix::fs::sync();
    // Refused while something still writes there; it is written and its journal makes it whole.
    let _ = mount_remount("/", MountFlags::RDONLY, c"");
    rustix::fs::sync();
}
