//! A mounted ext4 file system takes the size of its disk.
#![expect(unsafe_code, reason = "ext4 takes a request that no crate in use knows")]

use std::ffi::c_ulong;
use std::fs::File;
use std::io::{self, Seek};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::boot::mounts::pause;

// Linux `fs/ext4/ext4.h`.
const EXT4_IOC_RESIZE_FS: c_ulong = 0x4008_6610;
const SUPERBLOCK: u64 = 1024;
const MAGIC: u16 = 0xEF53;
const INCOMPAT_64BIT: u32 = 0x80;

/// How long the driver may take to notice that its disk has become larger.
const LONGEST: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(2);

#[derive(Debug, PartialEq, Eq)]
struct Size {
    blocks: u64,
    block: u64,
}

/// The file system that is mounted at `point`, of `disk`. That there is nothing to grow is no failure.
pub(crate) fn grow(disk: &Path, point: &Path) -> io::Result<()> {
    let mut disk = File::open(disk)?;
    let top = File::open(point)?;
    let mut superblock = [0; 1024];
    disk.read_exact_at(&mut superblock, SUPERBLOCK)?;
    let size = size(&superblock).ok_or(io::ErrorKind::InvalidData)?;
    let end = Instant::now() + LONGEST;
    loop {
        let mut blocks = disk.seek(io::SeekFrom::End(0))? / size.block;
        if blocks > size.blocks {
            // SAFETY: the kernel reads one number.
            let result = unsafe {
                libc::ioctl(top.as_raw_fd(), EXT4_IOC_RESIZE_FS as libc::Ioctl, &raw mut blocks)
            };
            return if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
        }
        if Instant::now() > end {
            return Ok(());
        }
        pause(LOOK);
    }
}

/// Of the whole file system; `statvfs` leaves out its own tables.
fn size(superblock: &[u8; 1024]) -> Option<Size> {
    let number = |at: usize| Some(u32::from_le_bytes(superblock.get(at..at + 4)?.try_into().ok()?));
    if superblock[0x38..0x3A] != MAGIC.to_le_bytes() {
        return None;
    }
    let high = if number(0x60)? & INCOMPAT_64BIT != 0 { number(0x150)? } else { 0 };
    let blocks = u64::from(high) << 32 | u64::from(number(0x4)?);
    Some(Size { blocks, block: 1024_u64.checked_shl(number(0x18)?).filter(|&block| block > 0)? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_size_is_the_whole_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        File::create(&path).unwrap().set_len(40 << 20).unwrap();
        let made =
            std::process::Command::new("mke2fs").args(["-q", "-b", "4096"]).arg(&path).status();
        assert!(made.unwrap().success());
        let mut superblock = [0; 1024];
        File::open(&path).unwrap().read_exact_at(&mut superblock, SUPERBLOCK).unwrap();
        assert_eq!(size(&superblock), Some(Size { blocks: (40 << 20) / 4096, block: 4096 }));
        assert_eq!(size(&[0; 1024]), None);
    }
}
