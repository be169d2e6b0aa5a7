//! Copies of files that share their blocks until one is written. The only place that knows whether the file system can
//! do that; where it cannot, holes stay holes.

use std::{
    fs::{self, File, OpenOptions},
    io::ErrorKind,
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use rustix::{
    fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek},
    io::Errno,
};

use crate::{Error, Result, draft::Draft};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Blocks are shared; a matter of milliseconds.
    Reflink,
    /// Every block was copied.
    Copy,
}

/// `target` must not exist. It is readable by its owner only and not yet synced to disk.
pub fn clone_file(source: &Path, target: &Path) -> Result<Method> {
    let input = File::open(source).map_err(Error::io("open", source))?;
    let output = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(target)
        .map_err(Error::io("create", target))?;
    clone_into(&input, &output).map_err(|errno| {
        let _ = fs::remove_file(target);
        Error::system("clone to", target)(errno)
    })
}

/// What `output` held before is replaced.
pub fn clone_into(input: &File, output: &File) -> Result<Method, Errno> {
    match ioctl_ficlone(output, input) {
        Ok(()) => Ok(Method::Reflink),
        // Another file system, one without reflinks, or an odd kind of file: each of them can be copied.
        Err(Errno::OPNOTSUPP | Errno::XDEV | Errno::INVAL | Errno::NOTTY | Errno::NOSYS) => {
            sparse_copy(input, output)?;
            Ok(Method::Copy)
        }
        Err(error) => Err(error),
    }
}

fn sparse_copy(input: &File, output: &File) -> Result<(), Errno> {
    let io = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let size = input.metadata().map_err(io)?.len();
    output.set_len(0).map_err(io)?;
    output.set_len(size).map_err(io)?;
    let mut position = 0;
    while position < size {
        let start = match seek(input, SeekFrom::Data(position)) {
            Ok(start) => start,
            // Nothing but a hole until the end.
            Err(Errno::NXIO) => break,
            Err(error) => return Err(error),
        };
        let end = seek(input, SeekFrom::Hole(start))?;
        copy_range(input, output, start, end)?;
        position = end;
    }
    Ok(())
}

fn copy_range(input: &File, output: &File, start: u64, end: u64) -> Result<(), Errno> {
    let (mut from, mut to) = (start, start);
    while from < end {
        let length = usize::try_from((end - from).min(1 << 30)).expect("at most 1 GiB");
        match copy_file_range(input, Some(&mut from), output, Some(&mut to), length) {
            // The source was cut while it was read.
            Ok(0) => return Err(Errno::IO),
            Ok(_) | Err(Errno::INTR) => {}
            Err(Errno::XDEV | Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS) => {
                return copy_by_reading(input, output, from, end);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn copy_by_reading(input: &File, output: &File, start: u64, end: u64) -> Result<(), Errno> {
    use std::os::unix::fs::FileExt;
    let io = |error: std::io::Error| Errno::from_io_error(&error).unwrap_or(Errno::IO);
    let mut block = vec![0; 1 << 20];
    let mut position = start;
    while position < end {
        let length = block.len().min(usize::try_from(end - position).unwrap_or(usize::MAX));
        match input.read_at(&mut block[..length], position) {
            Ok(0) => return Err(Errno::IO),
            Ok(n) => {
                output.write_all_at(&block[..n], position).map_err(io)?;
                position += n as u64;
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(io(error)),
        }
    }
    Ok(())
}

/// Whether files in `directory` can share blocks. Tried, because no table of file systems would be right.
pub fn can_reflink(directory: &Path) -> Result<bool> {
    let draft = Draft::create(directory, "reflink-probe")?;
    let (source, target) = (draft.path().join("a"), draft.path().join("b"));
    // An empty file can be "cloned" nearly anywhere.
    fs::write(&source, [1; 65536]).map_err(Error::io("write", &source))?;
    Ok(clone_file(&source, &target)? == Method::Reflink)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt, MetadataExt};

    use super::*;

    fn sparse_file(path: &Path) {
        let file = File::create(path).unwrap();
        file.set_len(64 << 20).unwrap();
        for (offset, byte) in [(0, 1), (5 << 20, 2), ((63 << 20) + 4096, 3)] {
            file.write_all_at(&[byte; 100_000], offset).unwrap();
        }
    }

    #[test]
    fn a_clone_is_equal_sparse_and_independent() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("source"), directory.path().join("target"));
        sparse_file(&source);
        clone_file(&source, &target).unwrap();
        let original = fs::read(&source).unwrap();
        assert!(original == fs::read(&target).unwrap());
        assert!(target.metadata().unwrap().blocks() * 512 < 1 << 20);
        assert_eq!(target.metadata().unwrap().mode() & 0o777, 0o600);
        OpenOptions::new().write(true).open(&target).unwrap().write_all_at(b"changed", 0).unwrap();
        assert!(original == fs::read(&source).unwrap());
    }

    #[test]
    fn a_sparse_copy_is_equal_and_sparse() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("source"), directory.path().join("target"));
        sparse_file(&source);
        let output =
            OpenOptions::new().read(true).write(true).create_new(true).open(&target).unwrap();
        sparse_copy(&File::open(&source).unwrap(), &output).unwrap();
        assert!(fs::read(&source).unwrap() == fs::read(&target).unwrap());
        assert!(target.metadata().unwrap().blocks() * 512 < 1 << 20);
        // What the target held before is gone.
        fs::write(&source, b"short").unwrap();
        sparse_copy(&File::open(&source).unwrap(), &output).unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"short");
    }

    #[test]
    fn a_clone_replaces_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let (source, target) = (directory.path().join("source"), directory.path().join("target"));
        fs::write(&source, b"new").unwrap();
        fs::write(&target, b"old").unwrap();
        assert!(clone_file(&source, &target).is_err());
        assert_eq!(fs::read(&target).unwrap(), b"old");
    }
}
