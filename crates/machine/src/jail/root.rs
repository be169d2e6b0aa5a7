//! The root directory that a process starts in, and the one it lives in.
//!
//! The first is a small file system with the very files the program needs, bound read-only, under the paths they have on
//! the host; it is made once, in a mount namespace without anything else, of which each process gets a copy. In it waits
//! the second, with nothing but `/dev/null`, which becomes the root of the started process, while the first goes.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::unistd::{chdir, pivot_root};

/// Of the host, covered while the root is built: any directory will do that every host has and that holds nothing needed.
const BUILDING_SITE: &str = "/sys";
/// Where the second root waits in the first.
const LAST: &str = "/empty";
/// A loop of links is longer.
const MOST_LINKS: usize = 40;
const BUSY: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(5);
const NOTHING: Option<&str> = None;
/// Beside what the program itself needs. Of these QEMU opens the first when it first locks a disk, long after its start.
const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
const LIBRARY_CACHE: &str = "/etc/ld.so.cache";

/// A mount namespace that holds these files of the host, and only them, readable under their paths there.
pub(super) fn make(files: Vec<PathBuf>) -> io::Result<OwnedFd> {
    on_a_thread(move || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let namespace = File::open("/proc/thread-self/ns/mnt")?;
        // Nothing done here shows on the host, nor the other way round.
        mount(NOTHING, "/", NOTHING, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NOTHING)?;
        let site = Path::new(BUILDING_SITE);
        tmpfs(site)?;
        for file in &files {
            bind(site, file)?;
        }
        for device in DEVICES {
            bind(site, Path::new(device))?;
        }
        if Path::new(LIBRARY_CACHE).exists() {
            bind(site, Path::new(LIBRARY_CACHE))?;
        }
        for directory in ["proc", LAST.trim_start_matches('/')] {
            make_directory(&site.join(directory))?;
        }
        let last = site.join(LAST.trim_start_matches('/'));
        tmpfs(&last)?;
        bind(&last, Path::new(DEVICES[0]))?;
        seal(&last)?;
        seal(site)?;
        change_root(site)?;
        Ok(namespace.into())
    })
}

/// Takes from a process that has started all of the root that it started in.
pub(crate) fn close(pidfd: &OwnedFd) -> io::Result<()> {
    let pidfd = pidfd.try_clone()?;
    on_a_thread(move || {
        // Threads share their root unless told otherwise.
        unshare(CloneFlags::CLONE_FS)?;
        setns(pidfd, CloneFlags::CLONE_NEWNS)?;
        // The kernel moves every process of the namespace that has the old root to the new one.
        change_root(Path::new(LAST))
    })
}

fn change_root(to: &Path) -> io::Result<()> {
    chdir(to)?;
    // The old root then lies over the new one, from where it is taken with all that is mounted in it.
    pivot_root(".", ".")?;
    umount2(".", MntFlags::MNT_DETACH)?;
    Ok(())
}

/// A thread's mount namespace and root stay with it, so it must be our own and end with the work.
fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    std::thread::Builder::new()
        .name("jail".into())
        .spawn(work)?
        .join()
        .map_err(|_| io::Error::other("the thread that arranges a root panicked"))?
}

fn tmpfs(at: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    Ok(mount(Some("atoll"), at, Some("tmpfs"), flags, Some("mode=0755,size=1m"))?)
}

/// Another thread may be starting a program, which has what we just wrote open for writing until it runs.
fn seal(at: &Path) -> io::Result<()> {
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC | MsFlags::MS_RDONLY;
    let remount = flags | MsFlags::MS_REMOUNT | MsFlags::MS_BIND;
    let end = Instant::now() + BUSY;
    loop {
        match mount(NOTHING, at, NOTHING, remount, NOTHING) {
            Err(Errno::EBUSY) if Instant::now() < end => std::thread::park_timeout(LOOK_AGAIN),
            result => return Ok(result?),
        }
    }
}

/// Makes `path` mean in `root` what it means on the host: links are copied, the file they lead to is bound.
fn bind(root: &Path, path: &Path) -> io::Result<()> {
    let mut here = PathBuf::from("/");
    let mut ahead: VecDeque<OsString> = parts(path).collect();
    let mut links = 0;
    while let Some(part) = ahead.pop_front() {
        if part == ".." {
            here.pop();
            continue;
        }
        let on_host = here.join(&part);
        let inside = root.join(on_host.strip_prefix("/").map_err(io::Error::other)?);
        let metadata = fs::symlink_metadata(&on_host)?;
        if metadata.is_symlink() {
            links += 1;
            if links > MOST_LINKS {
                return Err(io::Error::from_raw_os_error(libc::ELOOP));
            }
            let target = fs::read_link(&on_host)?;
            match std::os::unix::fs::symlink(&target, &inside) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                Ok(()) | Err(_) => {}
            }
            if target.is_absolute() {
                here = PathBuf::from("/");
            }
            for part in parts(&target).collect::<Vec<_>>().into_iter().rev() {
                ahead.push_front(part);
            }
        } else if metadata.is_dir() {
            make_directory(&inside)?;
            here = on_host;
        } else if !inside.exists() {
            File::create(&inside)?;
            mount(Some(&on_host), &inside, NOTHING, MsFlags::MS_BIND, NOTHING)?;
            let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
            flags |= MsFlags::MS_NOSUID;
            if metadata.is_file() {
                flags |= MsFlags::MS_NODEV;
            }
            mount(NOTHING, &inside, NOTHING, flags, NOTHING)?;
        }
    }
    Ok(())
}

/// Whatever this process's umask: another user enters it.
fn make_directory(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => Err(error),
        Ok(()) => fs::set_permissions(path, fs::Permissions::from_mode(0o755)),
    }
}

fn parts(path: &Path) -> impl Iterator<Item = OsString> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    })
}

/// What the dynamic loader would load for `program`, itself included; nothing for a static one.
pub(super) fn libraries(program: &Path) -> io::Result<Vec<PathBuf>> {
    let output = Command::new(program)
        // The loader lists and ends. A program without that loader shall end as well.
        .env_clear()
        .env("LD_TRACE_LOADED_OBJECTS", "1")
        .arg("--version")
        .stdin(Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if let Some(missing) = text.lines().find(|line| line.contains("=> not found")) {
        return Err(io::Error::new(io::ErrorKind::NotFound, missing.trim().to_owned()));
    }
    Ok(text.lines().filter_map(library).collect())
}

/// `libz.so.1 => /lib/libz.so.1 (0x7f…)`, or the loader itself, which has no arrow.
fn library(line: &str) -> Option<PathBuf> {
    let path = line.split_once(" => ").map_or(line, |(_, path)| path);
    let (path, address) = path.trim().rsplit_once(' ')?;
    (path.starts_with('/') && address.starts_with("(0x")).then(|| path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loaders_list_is_read() {
        assert_eq!(library("\tlinux-vdso.so.1 (0x00007ffd)"), None);
        assert_eq!(
            library("\tlibz.so.1 => /lib/libz.so.1 (0x00007f)"),
            Some("/lib/libz.so.1".into())
        );
        assert_eq!(
            library("\t/lib64/ld-linux-x86-64.so.2 (0x7f)"),
            Some("/lib64/ld-linux-x86-64.so.2".into())
        );
        assert_eq!(library("QEMU emulator version 10.0.2"), None);
    }
}
