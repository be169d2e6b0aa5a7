//! A machine's memory, seen from the host: what it costs, and which pages are no longer those of the file it came from.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

const PAGE: u64 = 4096;
/// Changed pages are written together with their neighbours: a file rewritten page by page falls into so many pieces
/// that cloning it takes a hundred times as long.
const BLOCK: u64 = 64 * 1024;
const PIECE: u64 = 1 << 20;
/// More wait for each other at the file, and the host has other machines.
const MOST_THREADS: usize = 4;

/// Pages that are the process's own, in memory or swapped out. Pages of a file are not, even where nobody else maps them
/// yet; nor is `Private_Dirty` the right count, for that includes a file's pages not yet written back.
pub(crate) fn private_bytes(pid: u32) -> io::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    Ok(sum(&text))
}

fn sum(smaps_rollup: &str) -> u64 {
    let kilobytes = |line: &str| line.split_whitespace().nth(1)?.parse::<u64>().ok();
    let counted = smaps_rollup
        .lines()
        .filter(|line| ["Anonymous:", "Swap:"].iter().any(|field| line.starts_with(field)));
    counted.filter_map(kilobytes).sum::<u64>() * 1024
}

/// The guest's memory in a QEMU that maps its file privately.
pub(crate) struct GuestMemory {
    pid: Pid,
    /// Where the file's first byte is mapped.
    address: u64,
    length: u64,
    file: Identity,
    /// The first piece of the mapping, by which the kernel hands the file out although its name may be gone.
    handle: PathBuf,
}

/// Of a file: device and inode, as `/proc/PID/maps` has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity(u64, u64);

/// What differs from the file.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Changed {
    pub(crate) pages: u64,
    /// In the file, in order, apart from each other.
    pub(crate) blocks: Vec<Range<u64>>,
}

impl Changed {
    /// In order.
    fn add(&mut self, pages: Range<u64>, length: u64) {
        self.pages += (pages.end - pages.start) / PAGE;
        let start = pages.start / BLOCK * BLOCK;
        let end = pages.end.next_multiple_of(BLOCK).min(length);
        match self.blocks.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            Some(_) | None => self.blocks.push(start..end),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    file: Identity,
}

impl Mapping {
    /// Of a line in `/proc/PID/maps`, if it is a file's that is mapped privately to be written.
    fn of(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        if words.next()? != "rw-p" {
            return None;
        }
        let number = |text| u64::from_str_radix(text, 16).ok();
        let offset = number(words.next()?)?;
        let (major, minor) = words.next()?.split_once(':')?;
        let device =
            libc::makedev(number(major)?.try_into().ok()?, number(minor)?.try_into().ok()?);
        let inode: u64 = words.next()?.parse().ok()?;
        (inode != 0).then_some(())?;
        Some(Self {
            start: number(start)?,
            end: number(end)?,
            offset,
            file: Identity(device, inode),
        })
    }
}

impl GuestMemory {
    pub(crate) fn of(pid: u32) -> io::Result<Self> {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
        let found =
            largest(&maps).ok_or_else(|| io::Error::other("qemu maps no memory privately"))?;
        let (first, length) = found;
        Ok(Self {
            pid: Pid::from_raw(pid.cast_signed()),
            address: first.start,
            length,
            file: first.file,
            handle: format!("/proc/{pid}/map_files/{:x}-{:x}", first.start, first.end).into(),
        })
    }

    pub(crate) fn open_base(&self) -> io::Result<File> {
        File::open(&self.handle)
    }

    /// That the file can take this memory, and is not the very one that other machines read.
    pub(crate) fn check_clone(&self, target: &File) -> crate::Result<()> {
        let metadata = target.metadata().map_err(crate::Error::host("measure a memory file"))?;
        if metadata.len() != self.length {
            let length = metadata.len();
            return Err(crate::Error::Unfit(format!(
                "a memory file of {length} bytes is not one of {}",
                self.length
            )));
        }
        if Identity(metadata.dev(), metadata.ino()) == self.file {
            return Err(crate::Error::Unfit("memory in use cannot be written over".into()));
        }
        Ok(())
    }

    /// While the machine stands still.
    pub(crate) fn changed(&self) -> io::Result<Changed> {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.pid))?;
        match self.scan(&pagemap) {
            // Kernels before 6.7 know no such request.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.read(&pagemap),
            scanned => scanned,
        }
    }

    fn scan(&self, pagemap: &File) -> io::Result<Changed> {
        const REGIONS: usize = 4096;
        let mut regions = vec![Region::default(); REGIONS];
        let mut changed = Changed::default();
        let (mut start, end) = (self.address, self.address + self.length);
        while start < end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start,
                end,
                regions: regions.as_mut_ptr() as u64,
                regions_length: REGIONS as u64,
                category_inverted: IS_FILE,
                category_mask: IS_FILE,
                category_any_of: IS_PRESENT | IS_SWAPPED,
                return_mask: IS_FILE,
                ..Scan::default()
            };
            // SAFETY: the kernel writes to `scan`, and to `regions` as many as it is told that there are.
            #[expect(unsafe_code, reason = "an ioctl without a wrapper")]
            let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut scan) }?;
            for region in regions.iter().take(usize::try_from(count).unwrap_or(0)) {
                changed.add(region.start - self.address..region.end - self.address, self.length);
            }
            if scan.walk_end <= start {
                return Err(io::Error::other("the kernel's scan of pages does not go on"));
            }
            start = scan.walk_end;
        }
        Ok(changed)
    }

    fn read(&self, pagemap: &File) -> io::Result<Changed> {
        const ENTRY: u64 = 8;
        let mut changed = Changed::default();
        let mut entries = vec![0; 64 * 1024];
        let mut offset = 0;
        while offset < self.length {
            let wanted = ((self.length - offset) / PAGE * ENTRY).min(entries.len() as u64);
            let entries = &mut entries[..usize::try_from(wanted).map_err(io::Error::other)?];
            pagemap.read_exact_at(entries, (self.address + offset) / PAGE * ENTRY)?;
            for entry in entries.chunks_exact(8) {
                let entry = u64::from_le_bytes(entry.try_into().map_err(io::Error::other)?);
                if is_changed(entry) {
                    changed.add(offset..offset + PAGE, self.length);
                }
                offset += PAGE;
            }
        }
        Ok(changed)
    }

    /// To the same places in `target`, by as many threads as help: half of the time goes into reading, which they do side
    /// by side.
    pub(crate) fn copy(&self, blocks: &[Range<u64>], target: &File) -> io::Result<()> {
        let pieces: Vec<Range<u64>> = blocks.iter().flat_map(pieces).collect();
        let next = AtomicUsize::new(0);
        let work = || -> io::Result<()> {
            let mut buffer = vec![0; PIECE as usize];
            while let Some(piece) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                let buffer = &mut buffer[..(piece.end - piece.start) as usize];
                self.read_exact(piece.start, buffer)?;
                target.write_all_at(buffer, piece.start)?;
            }
            Ok(())
        };
        let threads =
            std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
            let mut result = work();
            for other in others {
                result = result
                    .and(other.join().map_err(|_| io::Error::other("a copying thread panicked"))?);
            }
            result
        })
    }

    fn read_exact(&self, mut at: u64, mut buffer: &mut [u8]) -> io::Result<()> {
        while !buffer.is_empty() {
            let base = usize::try_from(self.address + at).map_err(io::Error::other)?;
            let remote = [RemoteIoVec { base, len: buffer.len() }];
            match process_vm_readv(self.pid, &mut [IoSliceMut::new(buffer)], &remote) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => {
                    at += count as u64;
                    buffer = &mut buffer[count..];
                }
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

fn pieces(block: &Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
    let end = block.end;
    (block.start..end).step_by(PIECE as usize).map(move |start| start..end.min(start + PIECE))
}

/// The file of which most is mapped, without a gap and from its start: its first piece, and its length.
fn largest(maps: &str) -> Option<(Mapping, u64)> {
    let mut found: Vec<(Mapping, u64)> = Vec::new();
    for mapping in maps.lines().filter_map(Mapping::of) {
        let size = mapping.end - mapping.start;
        match found.last_mut() {
            Some((first, length))
                if first.file == mapping.file
                    && first.start + *length == mapping.start
                    && *length == mapping.offset =>
            {
                *length += size;
            }
            Some(_) | None if mapping.offset == 0 => found.push((mapping, size)),
            Some(_) | None => {}
        }
    }
    found.into_iter().max_by_key(|(_, length)| *length)
}

/// An entry of `/proc/PID/pagemap`.
fn is_changed(entry: u64) -> bool {
    let (is_present, is_swapped, is_file) = (entry >> 63 & 1, entry >> 62 & 1, entry >> 61 & 1);
    is_swapped == 1 || (is_present == 1 && is_file == 0)
}

// From `linux/fs.h`.
const IS_FILE: u64 = 1 << 2;
const IS_PRESENT: u64 = 1 << 3;
const IS_SWAPPED: u64 = 1 << 4;

#[repr(C)]
#[derive(Default)]
pub(crate) struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    regions: u64,
    regions_length: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_any_of: u64,
    return_mask: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

nix::ioctl_readwrite!(pagemap_scan, b'f', 16, Scan);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_files_are_not_counted() {
        let text = "5581-7ffe ---p 00000000 00:00 0 [rollup]\nRss: 90000 kB\nPss: 30000 kB\nShared_Clean: 60000 kB\n\
                    Private_Clean: 1000 kB\nPrivate_Dirty: 40000 kB\nAnonymous: 27000 kB\nSwap: 500 kB\nSwapPss: 500 kB\n";
        assert_eq!(sum(text), 27_500 * 1024);
    }

    #[test]
    fn the_guests_memory_is_found_among_all_mappings_in_pieces_too() {
        let maps = "555555554000-555555600000 r--p 00000000 fe:00 77 /usr/bin/qemu-system-x86_64\n\
                    555555800000-555555810000 rw-p 00200000 fe:00 77 /usr/bin/qemu-system-x86_64\n\
                    555555900000-555556900000 rw-p 00000000 00:00 0 [heap]\n\
                    7fff00000000-7fff10000000 rw-p 00000000 07:00 4711 /pool/with a blank/memory (deleted)\n\
                    7fff10000000-7fff20000000 rw-p 10000000 07:00 4711 /pool/with a blank/memory (deleted)\n\
                    7fff20001000-7fff20002000 rw-p 00000000 fe:00 78 /usr/lib/libc.so.6\n";
        let (first, length) = largest(maps).unwrap();
        assert_eq!((first.start, length), (0x7fff_0000_0000, 0x2000_0000));
        assert_eq!(first.file, Identity(libc::makedev(7, 0), 4711));
        assert_eq!(
            largest("7fff00000000-7fff10000000 rw-s 00000000 07:00 4711 /pool/memory\n"),
            None
        );
    }

    #[test]
    fn a_swapped_page_is_a_changed_one_and_a_page_of_the_file_is_not() {
        assert!(is_changed(1 << 62));
        assert!(is_changed(1 << 63));
        assert!(!is_changed(1 << 63 | 1 << 61));
        assert!(!is_changed(0));
    }

    #[test]
    fn changed_pages_become_whole_blocks() {
        let mut changed = Changed::default();
        let length = 10 * BLOCK;
        for page in [1, 2, 15, 16, 100] {
            changed.add(page * PAGE..(page + 1) * PAGE, length);
        }
        changed.add(length - PAGE..length, length);
        let blocks = vec![0..2 * BLOCK, 6 * BLOCK..7 * BLOCK, 9 * BLOCK..length];
        assert_eq!(changed, Changed { pages: 6, blocks });
    }

    #[test]
    fn both_ways_to_find_changed_pages_find_the_same() {
        let file = tempfile::tempfile().unwrap();
        let length = 64 * BLOCK;
        file.write_all_at(&vec![1; length as usize], 0).unwrap();
        let private = MappedPrivately::of(&file, length);
        for page in [3, 4, 500, 1023] {
            private.write((page * PAGE) as usize, 2);
        }
        // A page that was only read stays the file's.
        assert_eq!(private.read((700 * PAGE) as usize), 1);
        let memory = GuestMemory {
            pid: Pid::this(),
            address: private.0 as u64,
            length,
            file: Identity(0, 0),
            handle: PathBuf::new(),
        };
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        let read = memory.read(&pagemap).unwrap();
        assert_eq!(read.pages, 4);
        match memory.scan(&pagemap) {
            Ok(scanned) => assert_eq!(scanned, read),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
        }
        let copy = tempfile::tempfile().unwrap();
        copy.write_all_at(&vec![1; length as usize], 0).unwrap();
        memory.copy(&read.blocks, &copy).unwrap();
        let mut bytes = vec![0; length as usize];
        copy.read_exact_at(&mut bytes, 0).unwrap();
        let differing: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at] != 1).collect();
        assert_eq!(differing, [3, 4, 500, 1023].map(|page| page * PAGE as usize));
    }

    /// Never unmapped: the test's process is.
    struct MappedPrivately(*mut u8);

    #[expect(unsafe_code, reason = "a mapping as QEMU has it")]
    impl MappedPrivately {
        fn of(file: &File, length: u64) -> Self {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            let (access, length) = (ProtFlags::READ | ProtFlags::WRITE, length as usize);
            // SAFETY: a new mapping, at an address of the kernel's choice.
            Self(
                unsafe { mmap(std::ptr::null_mut(), length, access, MapFlags::PRIVATE, file, 0) }
                    .unwrap()
                    .cast(),
            )
        }

        fn write(&self, at: usize, byte: u8) {
            // SAFETY: within the mapping.
            unsafe { self.0.add(at).write_volatile(byte) }
        }

        fn read(&self, at: usize) -> u8 {
            // SAFETY: within the mapping.
            unsafe { self.0.add(at).read_volatile() }
        }
    }
}
