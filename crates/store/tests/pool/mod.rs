//! File systems to lie on: XFS in a loop device, which shares blocks, and whatever the temporary directory is, which may
//! not. Needs root, as set-up and the server do.

#![allow(dead_code, reason = "each test binary uses what it needs")]
#![allow(
    clippy::allow_attributes,
    reason = "as above: an expectation would fail in those that use all"
)]
#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use store::Layout;

/// A file system with reflinks, gone when dropped.
pub(crate) struct Xfs {
    directory: tempfile::TempDir,
}

impl Xfs {
    pub(crate) fn mount() -> Self {
        let xfs = Self { directory: tempfile::tempdir().unwrap() };
        let image = xfs.directory.path().join("image");
        File::create(&image).unwrap().set_len(400 << 20).unwrap();
        fs::create_dir(xfs.path()).unwrap();
        run(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image));
        run(Command::new("mount").args(["-t", "xfs", "-o", "loop"]).arg(&image).arg(xfs.path()));
        xfs
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("mounted")
    }

    pub(crate) fn layout(&self) -> Layout {
        layout(&self.path())
    }

    /// Until hardly more than `spare` bytes are left.
    pub(crate) fn fill_but(&self, spare: u64) {
        let filler = File::create(self.path().join("filler")).unwrap();
        let (mut length, mut piece) = (0, 64 << 20);
        while piece >= 4096 {
            let free = store::pool::room(&self.path()).unwrap().free_bytes;
            let nothing = rustix::fs::FallocateFlags::empty();
            if free < spare + piece
                || rustix::fs::fallocate(&filler, nothing, length, piece).is_err()
            {
                piece /= 2;
            } else {
                length += piece;
            }
        }
    }

    pub(crate) fn make_room(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.path()));
    }
}

pub(crate) fn layout(directory: &Path) -> Layout {
    Layout::create(directory.join("data"), directory.join("cache")).unwrap()
}

pub(crate) fn run(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

/// `length` bytes that are not zero, flushed to the disk.
pub(crate) fn write_at(path: &Path, offset: u64, length: usize, byte: u8) {
    let file = File::options().write(true).create(true).truncate(false).open(path).unwrap();
    file.write_all_at(&vec![byte; length], offset).unwrap();
    file.sync_all().unwrap();
}

pub(crate) fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().count() == 0
}

/// `e2fsck -fn` finds nothing.
pub(crate) fn assert_clean(image: &Path) {
    store::ext4::check(image).unwrap();
}
