//! Reading: the head first, then pieces of content as the client takes them.

use std::fs::File;
use std::os::fd::AsFd;

use protocol::frame::{HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, Failure, FileHead, FileRead, ReadRange};
use rustix::buffer::spare_capacity;
use rustix::fs::{fstat, fstatfs};
use rustix::io::{Errno, pread, read};

use super::{any_matches, etag, modified_ns, open_regular, path, set_blocking, size};
use crate::failure::{failed, refuse, shown};

/// Files that the kernel makes up (`/proc`, `/sys`) have no size that means anything, so they are read whole first.
const LONGEST_MADE_UP: usize = 16 << 20;
/// Frames read in one go, about 256 KiB.
const FRAMES: usize = 8;

/// An open file, and which part of it is still to be sent.
#[derive(Debug)]
pub(crate) struct Reader {
    path: Vec<u8>,
    content: Content,
    start: u64,
    end: u64,
}

#[derive(Debug)]
enum Content {
    File(File),
    Memory(Vec<u8>),
}

pub(crate) fn open(request: &FileRead) -> Result<(FileHead, Reader), Failure> {
    let path = path::resolve(&request.path)?;
    let file = open_regular(&path).map_err(|error| match error {
        Errno::NXIO => {
            let shown = shown(&path);
            refuse(
                ErrorCode::WrongKind,
                format!("read {shown}: it is a device, a FIFO or a socket, not a file"),
            )
        }
        error => failed("read", &path, error),
    })?;
    let stat = fstat(&file).map_err(|error| failed("read", &path, error))?;
    let etag = etag(&stat);
    if any_matches(&request.unless_etags, &etag) {
        return Err(refuse(ErrorCode::NotModified, etag));
    }
    let (content, size) = if stat.st_size == 0 || is_made_up(&file) {
        let bytes = read_whole(&file, &path)?;
        let size = bytes.len() as u64;
        (Content::Memory(bytes), size)
    } else {
        set_blocking(&file).map_err(|error| failed("read", &path, error))?;
        (Content::File(file), size(&stat))
    };
    let wanted = request.range.filter(|_| {
        request
            .range_if_etag
            .as_ref()
            .is_none_or(|required| any_matches(std::slice::from_ref(required), &etag))
    });
    let (start, end) = match wanted {
        None => (0, size),
        Some(range) => part(range, size).ok_or_else(|| Failure {
            code: ErrorCode::RangeNotSatisfiable,
            message: size.to_string(),
        })?,
    };
    let head = FileHead {
        size,
        start,
        length: end - start,
        partial: wanted.is_some(),
        modified_ns: modified_ns(&stat),
        etag,
    };
    Ok((head, Reader { path, content, start, end }))
}

/// The bytes that a range selects, the end exclusive; `None` when there are none.
fn part(range: ReadRange, size: u64) -> Option<(u64, u64)> {
    let (start, end) = match range {
        ReadRange::From { start, end } => (start, end.unwrap_or(size).min(size)),
        ReadRange::Last(length) => (size.saturating_sub(length), size),
    };
    (start < end).then_some((start, end))
}

impl Reader {
    pub(crate) fn is_at_end(&self) -> bool {
        self.start == self.end
    }

    /// The next frames: each has room for its header in front of the payload.
    pub(crate) fn next_frames(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        let mut frames = Vec::with_capacity(FRAMES);
        while frames.len() < FRAMES && !self.is_at_end() {
            let length =
                usize::try_from(self.end - self.start).unwrap_or(usize::MAX).min(MAX_PAYLOAD);
            let mut frame = Vec::with_capacity(HEADER + length);
            frame.resize(HEADER, 0);
            match &self.content {
                Content::Memory(bytes) => {
                    let at = usize::try_from(self.start).unwrap_or(usize::MAX);
                    frame.extend_from_slice(&bytes[at..at + length]);
                }
                Content::File(file) => {
                    while frame.len() < HEADER + length {
                        let at = self.start + (frame.len() - HEADER) as u64;
                        match pread(file, spare_capacity(&mut frame), at) {
                            Ok(0) => {
                                let shown = shown(&self.path);
                                return Err(refuse(
                                    ErrorCode::Conflict,
                                    format!("read {shown}: it became shorter meanwhile"),
                                ));
                            }
                            Ok(_) | Err(Errno::INTR) => {}
                            Err(error) => return Err(failed("read", &self.path, error)),
                        }
                    }
                    frame.truncate(HEADER + length);
                }
            }
            self.start += length as u64;
            frames.push(frame);
        }
        Ok(frames)
    }
}

fn read_whole(file: &File, path: &[u8]) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    loop {
        if bytes.len() > LONGEST_MADE_UP {
            let shown = shown(path);
            return Err(refuse(
                ErrorCode::TooLarge,
                format!("read {shown}: it has no end; read it with a command"),
            ));
        }
        bytes.reserve(64 << 10);
        match read(file, spare_capacity(&mut bytes)) {
            Err(Errno::INTR) => {}
            // It would wait for something to happen (`/proc/kmsg`): what is there now is the content.
            Ok(0) | Err(Errno::AGAIN) => return Ok(bytes),
            Ok(_) => {}
            // Not a failure of a disk: the kernel has nothing to say there (`/proc/1/mem`).
            Err(Errno::IO) => {
                let shown = shown(path);
                let message = format!("read {shown}: it has no content that can be read");
                return Err(refuse(ErrorCode::WrongKind, message));
            }
            Err(error) => return Err(failed("read", path, error)),
        }
    }
}

/// On a file system without a disk whose sizes are inventions (sysfs says 4096 for everything).
pub(crate) fn is_made_up(file: impl AsFd) -> bool {
    // Linux `include/uapi/linux/magic.h`: proc, sysfs, cgroup2, cgroup, debugfs, tracefs, securityfs, bpf.
    const MADE_UP: [u64; 8] = [
        0x9fa0,
        0x6265_6572,
        0x6367_7270,
        0x0027_e0eb,
        0x6462_6720,
        0x7472_6163,
        0x7363_6673,
        0xcafe_4a11,
    ];
    fstatfs(file)
        .is_ok_and(|system| u64::try_from(system.f_type).is_ok_and(|kind| MADE_UP.contains(&kind)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_range_is_inside_the_file_and_not_empty(start in 0u64..200, end in prop::option::of(0u64..200), size in 0u64..100) {
            for range in [ReadRange::From { start, end }, ReadRange::Last(start)] {
                if let Some((start, end)) = part(range, size) {
                    prop_assert!(start < end && end <= size);
                }
            }
        }
    }

    #[test]
    fn the_last_bytes_of_a_short_file_are_the_whole_file() {
        assert_eq!(part(ReadRange::Last(500), 10), Some((0, 10)));
        assert_eq!(part(ReadRange::Last(0), 10), None);
        assert_eq!(part(ReadRange::From { start: 10, end: None }, 10), None);
    }
}
