//! Freezing file systems, so that a disk is whole at the instant it is copied: those that lie on disks, each once. One may
//! lie in a file of another, so the last come first; and only one that lies on a disk is ever flushed here, because others
//! wait for a process or a host that may not answer.
#![expect(unsafe_code, reason = "freezing is asked for by ioctls that no crate in use knows")]

use std::collections::HashSet;
use std::ffi::{c_int, c_ulong};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use protocol::message::{ErrorCode, Failure};
use rustix::fs::{CWD, Mode, OFlags, fstat, openat, syncfs};
use rustix::io::Errno;

use super::attempt::Attempt;
use super::mountinfo::{self, Device, Mounted};
use crate::failure::{refuse, shown};

// Linux `include/uapi/linux/fs.h`, `include/uapi/linux/loop.h`.
const FIFREEZE: c_ulong = 0xC004_5877;
const FITHAW: c_ulong = 0xC004_5878;
const LOOP_GET_STATUS64: c_ulong = 0x4C05;
/// Files in file systems in files; more is no use of anybody's.
const DEEPEST: u32 = 8;

#[derive(Debug)]
pub(crate) struct FileSystem {
    pub(crate) device: Device,
    point: Vec<u8>,
    descriptor: OwnedFd,
    depth: u32,
}

/// Those below a directory; on a host, others are none of ours.
#[derive(Debug, Clone)]
pub(crate) struct Reach(pub(crate) PathBuf);

impl Reach {
    fn holds(&self, mounted: &Mounted) -> bool {
        use std::os::unix::ffi::OsStrExt;
        Path::new(std::ffi::OsStr::from_bytes(&mounted.point)).starts_with(&self.0)
    }
}

/// Opens all that can be frozen and are not in `known`.
pub(crate) fn find(reach: &Reach, known: &HashSet<Device>) -> Vec<FileSystem> {
    let mut seen = known.clone();
    let mut found = Vec::new();
    let mounts = mountinfo::read("self").unwrap_or_default();
    open_new(&mounts, "", reach, &mut seen, &mut found);
    found
}

/// Like [`find`], and in the view of each of these processes: it may have mounts of its own.
pub(crate) fn find_everywhere(
    reach: &Reach,
    known: &HashSet<Device>,
    processes: impl Iterator<Item = i32>,
) -> Vec<FileSystem> {
    let mut found = find(reach, known);
    let mut seen: HashSet<Device> =
        known.iter().copied().chain(found.iter().map(|found| found.device)).collect();
    for (pid, mounts) in others_mounts(processes) {
        open_new(&mounts, &format!("/proc/{pid}/root"), reach, &mut seen, &mut found);
    }
    found
}

/// What is mounted in each of their views but ours, with one process that has it.
pub(crate) fn others_mounts(
    processes: impl Iterator<Item = i32>,
) -> impl Iterator<Item = (i32, Vec<Mounted>)> {
    let view = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok();
    let mut views: HashSet<PathBuf> = view("self").into_iter().collect();
    processes.filter_map(move |pid| {
        if !views.insert(view(&pid.to_string())?) {
            return None;
        }
        Some((pid, mountinfo::read(&pid.to_string()).ok()?))
    })
}

fn open_new(
    mounts: &[Mounted],
    root: &str,
    reach: &Reach,
    seen: &mut HashSet<Device>,
    found: &mut Vec<FileSystem>,
) {
    for mounted in mounts {
        if !mounted.is_on_disk()
            || !mounted.is_writable()
            || seen.contains(&mounted.device)
            || !reach.holds(mounted)
        {
            continue;
        }
        // Another may have been mounted on top of it; then it may still be found elsewhere.
        if let Some(file_system) = open(mounted, root) {
            seen.insert(mounted.device);
            found.push(file_system);
        }
    }
}

fn open(mounted: &Mounted, root: &str) -> Option<FileSystem> {
    let path = [root.as_bytes(), &mounted.point].concat();
    // The mount of a single file is possible, too: it must neither wait nor become our terminal.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let descriptor = openat(CWD, path, flags, Mode::empty()).ok()?;
    let stat = fstat(&descriptor).ok()?;
    // Of btrfs every subvolume has a number of its own.
    if Device::of(stat.st_dev) != mounted.device && mounted.kind != b"btrfs" {
        return None;
    }
    let depth = depth(mounted.device);
    Some(FileSystem { device: mounted.device, point: mounted.point.clone(), descriptor, depth })
}

/// How many file systems lie below this one.
fn depth(mut device: Device) -> u32 {
    let mut depth = 0;
    while depth < DEEPEST
        && let Some(below) = holder_of_file(device)
    {
        device = below;
        depth += 1;
    }
    depth
}

/// The device with the file that a loop device shows.
fn holder_of_file(device: Device) -> Option<Device> {
    const LOOP: u32 = 7;
    if device.major != LOOP {
        return None;
    }
    let path = format!("/dev/loop{}", device.minor);
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let descriptor = openat(CWD, path, flags, Mode::empty()).ok()?;
    if Device::of(fstat(&descriptor).ok()?.st_rdev) != device {
        return None;
    }
    // `lo_device` is the first of its fields.
    let mut status = [0_u64; 29];
    // SAFETY: the kernel fills a structure of 232 bytes.
    let result = unsafe {
        libc::ioctl(descriptor.as_raw_fd(), LOOP_GET_STATUS64 as libc::Ioctl, &raw mut status)
    };
    (result == 0).then(|| Device::of(status[0]))
}

impl FileSystem {
    pub(crate) fn flush(&self) -> Result<(), Failure> {
        syncfs(&self.descriptor)
            .map_err(|error| self.fail(&format!("cannot be written to its disk: {error}")))
    }

    /// False: it cannot be frozen, or somebody else has frozen it and may thaw it.
    pub(crate) fn freeze(&self) -> Result<bool, Failure> {
        match self.call(FIFREEZE) {
            Ok(()) => Ok(true),
            Err(Errno::BUSY) => Ok(false),
            Err(Errno::OPNOTSUPP | Errno::INVAL | Errno::NOTTY | Errno::ROFS) => {
                self.flush().map(|()| false)
            }
            Err(error) => Err(self.fail(&format!("cannot be frozen: {error}"))),
        }
    }

    fn fail(&self, what: &str) -> Failure {
        refuse(ErrorCode::Internal, format!("the file system at {} {what}", shown(&self.point)))
    }

    pub(crate) fn thaw(&self) {
        match self.call(FITHAW) {
            // It is not frozen (any more).
            Ok(()) | Err(Errno::INVAL) => {}
            Err(error) => crate::boot::report("let a file system go on", Err::<(), _>(error)),
        }
    }

    pub(crate) fn is_root(&self) -> bool {
        self.point == b"/"
    }

    fn call(&self, request: c_ulong) -> Result<(), Errno> {
        let unused: c_int = 0;
        // SAFETY: neither of the two reads or writes what it is given.
        let result = unsafe {
            libc::ioctl(self.descriptor.as_raw_fd(), request as libc::Ioctl, &raw const unused)
        };
        if result < 0 {
            let error = std::io::Error::last_os_error();
            return Err(Errno::from_io_error(&error).unwrap_or(Errno::IO));
        }
        Ok(())
    }
}

pub(crate) fn thaw_root() {
    let root = mountinfo::read("self").unwrap_or_default();
    let root = root.iter().rev().find(|mounted| mounted.point == b"/");
    if let Some(root) = root.and_then(|root| open(root, "")) {
        root.thaw();
    }
}

/// In the order in which it was done; on failure what is in `frozen` is to be thawed all the same.
pub(crate) fn freeze(
    mut file_systems: Vec<FileSystem>,
    frozen: &mut Vec<FileSystem>,
    attempt: &Attempt,
) -> Result<(), Failure> {
    // Of equal depth, the last first.
    file_systems.reverse();
    file_systems.sort_by_key(|file_system| std::cmp::Reverse(file_system.depth));
    for file_system in file_systems {
        if attempt.is_given_up() {
            return Err(refuse(
                ErrorCode::Busy,
                "the disks of this sandbox are too slow to freeze",
            ));
        }
        match file_system.freeze() {
            Ok(true) => frozen.push(file_system),
            Ok(false) => {}
            // A broken one that the user has mounted shall not keep the sandbox from being saved.
            Err(failure) if !file_system.is_root() => {
                crate::boot::report("freeze a file system", Err::<(), _>(failure));
            }
            Err(failure) => return Err(failure),
        }
    }
    Ok(())
}
