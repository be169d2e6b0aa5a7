//! Files of the guest. Everything here may block on a disk and therefore runs on a worker; nothing here holds more than
//! a few hundred KiB, whatever the size of a file or directory.

pub(crate) mod acting;
pub(crate) mod archive;
pub(crate) mod change;
pub(crate) mod delete;
pub(crate) mod list;
pub(crate) mod path;
pub(crate) mod read;
pub(crate) mod upload;
pub(crate) mod watch;
pub(crate) mod write;

use std::fs::File;
use std::os::fd::AsFd;

use rustix::fs::{CWD, FileType, Mode, OFlags, Stat, fcntl_setfl, fstat, openat};
use rustix::io::Errno;

/// Opens a regular file for reading. FIFOs, devices and the like are [`Errno::NXIO`], without ever waiting for them.
pub(crate) fn open_regular(path: &[u8]) -> Result<File, Errno> {
    // NONBLOCK: the open of a FIFO returns at once. NOCTTY: a terminal does not become ours.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(CWD, path, flags, Mode::empty())?;
    match FileType::from_raw_mode(fstat(&file)?.st_mode) {
        FileType::RegularFile => Ok(File::from(file)),
        FileType::Directory => Err(Errno::ISDIR),
        FileType::Symlink
        | FileType::Fifo
        | FileType::Socket
        | FileType::CharacterDevice
        | FileType::BlockDevice
        | FileType::Unknown => Err(Errno::NXIO),
    }
}

/// For a file opened by [`open_regular`] whose reads may wait for the disk.
pub(crate) fn set_blocking(file: impl AsFd) -> Result<(), Errno> {
    fcntl_setfl(file, OFlags::empty())
}

pub(crate) fn modified_ns(stat: &Stat) -> i64 {
    stat.st_mtime
        .saturating_mul(1_000_000_000)
        .saturating_add(i64::try_from(stat.st_mtime_nsec).unwrap_or(0))
}

pub(crate) fn size(stat: &Stat) -> u64 {
    u64::try_from(stat.st_size).unwrap_or(0)
}

/// Changes with every replacement (the inode) and every write in place (time and size).
pub(crate) fn etag(stat: &Stat) -> String {
    format!("\"{:x}-{:x}-{:x}\"", modified_ns(stat), stat.st_size, stat.st_ino)
}

/// Whether one of the client's etags (`W/` is no difference here, `*` is any) is this one.
pub(crate) fn any_matches(etags: &[String], etag: &str) -> bool {
    etags.iter().any(|given| given == "*" || given.strip_prefix("W/").unwrap_or(given) == etag)
}
