//! Volumes in the guest: found behind their slots, mounted, unmounted without a trace, grown.

use std::ffi::CStr;
use std::path::Path;
use std::time::{Duration, Instant};

use protocol::WRITABLE_SLOTS;
use protocol::message::{ErrorCode, Failure, Mount};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, mkdirat, openat, openat2, syncfs};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::holders::holder;
use super::mountinfo::{self, Device, Mounted};
use super::slots::{Disk, Slots};
use crate::boot::mounts::pause;
use crate::failure::{failed, refuse, shown};
use crate::files::path;

/// Until the driver has seen that there is another disk behind the slot.
const APPEARANCE: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(1);
/// What has ended lets go of its files a little later.
const SETTLING: Duration = Duration::from_millis(500);
/// What is only the kernel's view of itself.
const KERNELS: [&[u8]; 3] = [b"/proc", b"/sys", b"/dev"];

/// Enough to mount it again as it was.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Former {
    pub(crate) slot: u8,
    device: Device,
    node: std::path::PathBuf,
    root: Vec<u8>,
    point: Vec<u8>,
    kind: Vec<u8>,
    flags: MountFlags,
}

/// What a slot held until a volume was put behind it.
pub(crate) enum Before {
    /// Perhaps the same volume, mounted.
    Used,
    /// Nothing. With its disk where that was found before.
    Empty(Option<Disk>),
}

/// Where it will be mounted, once its directories are there.
pub(crate) fn mount_point(wanted: &[u8]) -> Result<Vec<u8>, Failure> {
    let plain = path::resolve(wanted)?;
    if plain == b"/" || is_kernels(&plain) {
        return Err(unfit(&plain));
    }
    Ok(plain)
}

fn is_kernels(path: &[u8]) -> bool {
    KERNELS.iter().any(|kernels| {
        path.strip_prefix(*kernels).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
    })
}

fn unfit(path: &[u8]) -> Failure {
    let message =
        format!("a volume cannot be mounted at {}; use a path such as /mnt/data", shown(path));
    refuse(ErrorCode::Invalid, message)
}

pub(crate) fn must_have_directory(wanted: &Mount) -> Result<(), Failure> {
    if wanted.path.is_empty() || Path::new(as_path(&mount_point(&wanted.path)?)).is_dir() {
        return Ok(());
    }
    let point = shown(&wanted.path);
    let message =
        format!("there is no directory {point}, and nothing can be written while all stands still");
    Err(refuse(ErrorCode::Conflict, message))
}

/// An empty path: only the disk appears, and stays mounted where it is.
pub(crate) fn mount_volume(slots: &Slots, wanted: &Mount, before: Before) -> Result<(), Failure> {
    let is_mounted = !wanted.path.is_empty();
    let point = if is_mounted { mount_point(&wanted.path)? } else { Vec::new() };
    let disk = match before {
        Before::Empty(Some(disk)) => slots.bind_known(wanted.slot, disk)?,
        Before::Empty(None) => slots.bind(wanted.slot)?,
        Before::Used => {
            let here = slots.find(wanted.slot).map(|disk| mounts_of(disk.device)).transpose()?;
            let here = here.unwrap_or_default();
            if here.iter().any(|mounted| mounted.point == point && mounted.root == b"/") {
                return Ok(());
            }
            if !is_mounted && !here.is_empty() {
                return Ok(());
            }
            if let Some(other) = here.first() {
                let message = format!(
                    "the volume for {} is mounted at {} already",
                    shown(&point),
                    shown(&other.point)
                );
                return Err(refuse(ErrorCode::Conflict, message));
            }
            slots.bind(wanted.slot)?
        }
    };
    wait_for(&disk, wanted.slot)?;
    if !is_mounted {
        return Ok(());
    }
    let directory = make_directory(&point)?;
    let mut flags = MountFlags::NOATIME;
    if wanted.read_only || wanted.slot >= WRITABLE_SLOTS {
        flags |= MountFlags::RDONLY;
    }
    mount_when_whole(&disk, &directory, flags).map_err(|error| cannot_mount(&point, error))
}

/// After an error nothing more is written: what is on the disk is worth more than what is not. And a mount starts no thread
/// that reads ahead what may never be needed.
fn options(kind: &[u8], flags: MountFlags) -> &'static CStr {
    match (kind, flags.contains(MountFlags::RDONLY)) {
        (b"ext4", false) => c"errors=remount-ro,no_prefetch_block_bitmaps",
        (b"ext4", true) => c"no_prefetch_block_bitmaps",
        (_, _) => c"",
    }
}

fn wait_for(disk: &Disk, slot: u8) -> Result<(), Failure> {
    let end = Instant::now() + APPEARANCE;
    while disk.bytes() == 0 {
        if Instant::now() > end {
            let message = format!("there is no volume behind slot {slot} of this sandbox");
            return Err(refuse(ErrorCode::NotFound, message));
        }
        pause(LOOK);
    }
    Ok(())
}

/// The disk's new size may become known a little later than that it has another, and until then a file system may look
/// larger than its disk.
fn mount_when_whole(disk: &Disk, directory: &[u8], flags: MountFlags) -> Result<(), Errno> {
    let end = Instant::now() + APPEARANCE;
    let mut bytes = disk.bytes();
    loop {
        match mount(&disk.node, directory, c"ext4", flags, options(b"ext4", flags)) {
            Err(Errno::INVAL) => {}
            result => return result,
        }
        loop {
            if Instant::now() > end {
                return Err(Errno::INVAL);
            }
            pause(LOOK);
            let now = disk.bytes();
            if now != bytes {
                bytes = now;
                break;
            }
        }
    }
}

fn cannot_mount(point: &[u8], error: Errno) -> Failure {
    let reason = match error {
        Errno::INVAL | Errno::UCLEAN => "there is no whole ext4 file system on it".to_owned(),
        Errno::ROFS | Errno::ACCESS => {
            "it was not unmounted cleanly, and is attached read-only".to_owned()
        }
        error => return failed("mount a volume at", point, error),
    };
    refuse(ErrorCode::Internal, format!("mount a volume at {}: {reason}", shown(point)))
}

/// Makes it with its parents, and says where it really is.
fn make_directory(point: &[u8]) -> Result<Vec<u8>, Failure> {
    let fail = |error| failed("mount a volume at", point, error);
    for end in (1..=point.len()).filter(|&end| end == point.len() || point[end] == b'/') {
        // Asked for what is there already, a frozen file system would wait, and a read-only one refuse.
        if Path::new(as_path(&point[..end])).exists() {
            continue;
        }
        match mkdirat(CWD, &point[..end], Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(Errno::NOTDIR) => return Err(not_a_directory(point)),
            Err(error) => return Err(fail(error)),
        }
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    if openat2(CWD, point, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS).is_ok() {
        // It is what it is called, and that has been looked at.
        return Ok(point.to_vec());
    }
    let directory = openat(CWD, point, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOTDIR => not_a_directory(point),
        error => fail(error),
    })?;
    use std::os::fd::AsRawFd;
    use std::os::unix::ffi::OsStringExt;
    let real = std::fs::read_link(format!("/proc/self/fd/{}", directory.as_raw_fd()))
        .map_err(|error| fail(Errno::from_io_error(&error).unwrap_or(Errno::IO)))?;
    let real = real.into_os_string().into_vec();
    if real == b"/" || is_kernels(&real) { Err(unfit(point)) } else { Ok(real) }
}

fn not_a_directory(point: &[u8]) -> Failure {
    let message =
        format!("a volume cannot be mounted at {}: that is not a directory", shown(point));
    refuse(ErrorCode::WrongKind, message)
}

fn as_path(bytes: &[u8]) -> &std::ffi::OsStr {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::OsStr::from_bytes(bytes)
}

fn mounts_of(device: Device) -> Result<Vec<Mounted>, Failure> {
    let mounts = mountinfo::read("self")
        .map_err(|error| refuse(ErrorCode::Internal, format!("read what is mounted: {error}")))?;
    Ok(mounts.into_iter().filter(|mounted| mounted.device == device).collect())
}

/// Wherever it is mounted, by whomever: all or nothing. Afterwards nothing of it is left in memory.
pub(crate) fn unmount_volume(disk: &Disk, slot: u8) -> Result<Vec<Former>, Failure> {
    let end = Instant::now() + SETTLING;
    loop {
        let mounts = mounts_of(disk.device)?;
        flush(disk, &mounts);
        if let Some(formers) = try_to_unmount(disk, slot, &mounts) {
            return Ok(formers);
        }
        let points: Vec<Vec<u8>> = mounts.into_iter().map(|mounted| mounted.point).collect();
        let holder = match holder(disk.device, &points) {
            Some(holder) => holder,
            // Somebody who has just ended.
            None if Instant::now() < end => {
                pause(LOOK);
                continue;
            }
            None => "something in the guest's kernel".to_owned(),
        };
        let place = points.first().map_or_else(
            || format!("the disk {}", disk.node.display()),
            |point| format!("the volume at {}", shown(point)),
        );
        let message = format!("{place} is in use by {holder}; end it, or let it close its files");
        return Err(refuse(ErrorCode::Conflict, message));
    }
}

/// `None`, and everything as before: it is in use.
fn try_to_unmount(disk: &Disk, slot: u8, mounts: &[Mounted]) -> Option<Vec<Former>> {
    let mut formers: Vec<Former> = Vec::new();
    let mut unused = Vec::new();
    for mounted in mounts.iter().rev() {
        // Asked this way, the kernel only tells whether it is in use, and unmounts when it is asked twice.
        match unmount(&mounted.point[..], UnmountFlags::EXPIRE) {
            Err(Errno::AGAIN) => unused.push(mounted),
            Ok(()) => formers.insert(0, Former::of(slot, disk, mounted)),
            Err(_) => {
                mount_again(formers);
                return None;
            }
        }
    }
    for mounted in unused {
        if unmount(&mounted.point[..], UnmountFlags::NOFOLLOW).is_err() {
            mount_again(formers);
            return None;
        }
        formers.insert(0, Former::of(slot, disk, mounted));
    }
    // Somebody may still have it: in a view of his own, or as a disk.
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NONBLOCK;
    match openat(CWD, &disk.node, flags, Mode::empty()) {
        Err(Errno::BUSY) => {
            mount_again(formers);
            None
        }
        Ok(_) | Err(_) => Some(formers),
    }
}

fn flush(disk: &Disk, mounts: &[Mounted]) {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let opened = match mounts.first() {
        Some(mounted) => {
            openat(CWD, &mounted.point[..], flags, Mode::empty()).map(|top| (top, true))
        }
        None => openat(CWD, &disk.node, flags, Mode::empty()).map(|disk| (disk, false)),
    };
    // What cannot be written is told when it is unmounted, or by the file system itself.
    match opened {
        Ok((top, true)) => drop(syncfs(top)),
        Ok((disk, false)) => drop(rustix::fs::fsync(disk)),
        Err(_) => {}
    }
}

impl Former {
    fn of(slot: u8, disk: &Disk, mounted: &Mounted) -> Self {
        let known: [(&[u8], MountFlags); 7] = [
            (b"ro", MountFlags::RDONLY),
            (b"nosuid", MountFlags::NOSUID),
            (b"nodev", MountFlags::NODEV),
            (b"noexec", MountFlags::NOEXEC),
            (b"noatime", MountFlags::NOATIME),
            (b"nodiratime", MountFlags::NODIRATIME),
            (b"relatime", MountFlags::RELATIME),
        ];
        let mut flags = MountFlags::empty();
        for (name, flag) in known {
            if mounted.has_option(name) {
                flags |= flag;
            }
        }
        Self {
            slot,
            device: disk.device,
            node: disk.node.clone(),
            root: mounted.root.clone(),
            point: mounted.point.clone(),
            kind: mounted.kind.clone(),
            flags,
        }
    }
}

/// In the order in which they had been mounted; the first failure, after all were tried.
pub(crate) fn mount_again(formers: Vec<Former>) -> Option<Failure> {
    let mut failure = None;
    let mut whole: Vec<(Device, Vec<u8>)> = Vec::new();
    for former in formers {
        let source = whole.iter().find(|(device, _)| *device == former.device);
        let mounted = match source {
            // Parts of it were mounted elsewhere, too.
            Some((_, point)) => {
                let part = [&point[..], &former.root].concat();
                rustix::mount::mount_bind(&part[..], &former.point[..])
            }
            None => {
                let options = options(&former.kind, former.flags);
                mount(&former.node, &former.point[..], &former.kind[..], former.flags, options)
            }
        };
        match mounted {
            Ok(()) => whole.push((former.device, former.point)),
            Err(error) => {
                failure.get_or_insert(cannot_mount(&former.point, error));
            }
        }
    }
    failure
}

/// To the size of its disk.
pub(crate) fn grow_volume(slots: &Slots, slot: u8) -> Result<(), Failure> {
    let disk = slots.find(slot);
    let mounts = disk.as_ref().map(|disk| mounts_of(disk.device)).transpose()?.unwrap_or_default();
    let (Some(disk), Some(mounted)) = (disk, mounts.into_iter().find(Mounted::is_writable)) else {
        return Err(refuse(
            ErrorCode::NotFound,
            format!("the volume of slot {slot} is not mounted, so it cannot be grown here"),
        ));
    };
    super::growth::grow(&disk.node, Path::new(as_path(&mounted.point))).map_err(|error| {
        let point = shown(&mounted.point);
        refuse(ErrorCode::Internal, format!("grow the volume at {point}: {error}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_belongs_neither_over_the_root_nor_into_what_is_the_kernels() {
        for path in ["/", "/..", "/proc", "/proc/self", "/sys/x", "/mnt/../dev/shm", "mnt", ""] {
            assert!(mount_point(path.as_bytes()).is_err(), "{path}");
        }
        for path in ["/mnt/data", "/device", "/processes", "/mnt/dev"] {
            assert_eq!(mount_point(path.as_bytes()).unwrap(), path.as_bytes());
        }
    }
}
