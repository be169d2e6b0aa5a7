//! Which blocks of a file are its own, and which it shares with clones: the file system's own map of it.

use std::{fs::File, io, path::Path};

use rustix::{
    io::Errno,
    ioctl::{Opcode, Updater, ioctl, opcode},
};

/// `FS_IOC_FIEMAP`, whose size counts the header alone.
const FIEMAP: Opcode = opcode::read_write::<Header>(b'f', 11);
const EXTENT_LAST: u32 = 0x1;
const EXTENT_SHARED: u32 = 0x2000;
const BATCH: usize = 512;

/// `struct fiemap`.
#[repr(C)]
struct Header {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// `struct fiemap_extent`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Extent {
    logical: u64,
    physical: u64,
    length: u64,
    reserved64: [u64; 2],
    flags: u32,
    reserved: [u32; 3],
}

#[repr(C)]
struct Request {
    header: Header,
    extents: [Extent; BATCH],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// Blocks that no other file has.
    pub(crate) own_bytes: u64,
    pub(crate) total_bytes: u64,
}

/// What `path` holds on the disk. Takes time with the number of pieces that the file is in: 10 000 cost some
/// milliseconds.
pub(crate) fn held(path: &Path) -> io::Result<Held> {
    use std::os::unix::fs::MetadataExt;
    let file = File::open(path)?;
    match sum(&file) {
        Ok(held) => Ok(held),
        // No such map here, so no reflinks either.
        Err(Errno::OPNOTSUPP | Errno::NOTTY | Errno::INVAL | Errno::NOSYS) => {
            let bytes = file.metadata()?.blocks() * 512;
            Ok(Held { own_bytes: bytes, total_bytes: bytes })
        }
        Err(error) => Err(error.into()),
    }
}

fn sum(file: &File) -> Result<Held, Errno> {
    let mut request = Box::new(Request {
        header: Header {
            start: 0,
            length: 0,
            flags: 0,
            mapped_extents: 0,
            extent_count: 0,
            reserved: 0,
        },
        extents: [Extent::default(); BATCH],
    });
    let mut held = Held::default();
    let mut start = 0;
    loop {
        request.header = Header {
            start,
            length: u64::MAX - start,
            flags: 0,
            mapped_extents: 0,
            extent_count: u32::try_from(BATCH).expect("a small number"),
            reserved: 0,
        };
        ask(file, &mut request)?;
        let count = usize::try_from(request.header.mapped_extents).unwrap_or(BATCH).min(BATCH);
        let extents = &request.extents[..count];
        for extent in extents {
            held.total_bytes += extent.length;
            if extent.flags & EXTENT_SHARED == 0 {
                held.own_bytes += extent.length;
            }
        }
        match extents.last() {
            Some(last) if last.flags & EXTENT_LAST == 0 => {
                let end = last.logical.saturating_add(last.length);
                // Whatever the file system says, this ends.
                if end <= start {
                    return Ok(held);
                }
                start = end;
            }
            Some(_) | None => return Ok(held),
        }
    }
}

#[expect(unsafe_code, reason = "no library of ours has this call")]
fn ask(file: &File, request: &mut Request) -> Result<(), Errno> {
    // SAFETY: the kernel reads the header and writes it and at most `extent_count` extents, and both structures are
    // laid out as the kernel's headers have them.
    unsafe { ioctl(file, Updater::<FIEMAP, Request>::new(request)) }
}
