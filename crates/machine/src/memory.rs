//! A machine's memory, seen from the host: what it costs, and which pages are no longer those of the file it came from.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

pub(crate) const PAGE: u64 = 4096;

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
#[derive(Debug)]
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

/// Some of its pages: bytes in the file, in order, apart from each other.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Pages(pub(crate) Vec<Range<u64>>);

/// Which pages.
#[derive(Debug, Clone, Copy)]
enum Which {
    /// That are no longer the file's.
    Changed,
    /// That are the file's, and were read.
    Read,
}

impl Pages {
    /// In any order, and more than once: so the kernel finds them.
    fn of(mut found: Vec<Range<u64>>) -> Self {
        found.sort_unstable_by_key(|range| range.start);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in found {
            match ranges.last_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                Some(_) | None => ranges.push(range),
            }
        }
        Self(ranges)
    }

    pub(crate) fn count(&self) -> u64 {
        self.0.iter().map(|range| (range.end - range.start) / PAGE).sum()
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

    pub(crate) fn length(&self) -> u64 {
        self.length
    }

    /// Of a machine that runs, more may have changed by the time that this is known.
    pub(crate) fn changed(&self) -> io::Result<Pages> {
        self.find(Which::Changed)
    }

    /// What it has used, and not changed. Not more than the kernel remembers.
    pub(crate) fn read(&self) -> io::Result<Pages> {
        self.find(Which::Read)
    }

    fn find(&self, which: Which) -> io::Result<Pages> {
        let pagemap = File::open(format!("/proc/{}/pagemap", self.pid))?;
        match self.scan(&pagemap, which) {
            // Kernels before 6.7 know no such request.
            Err(error) if error.raw_os_error() == Some(libc::ENOTTY) => self.walk(&pagemap, which),
            scanned => scanned,
        }
    }

    fn scan(&self, pagemap: &File, which: Which) -> io::Result<Pages> {
        const REGIONS: usize = 4096;
        let (inverted, any_of) = match which {
            Which::Changed => (IS_FILE, IS_PRESENT | IS_SWAPPED),
            Which::Read => (0, IS_PRESENT),
        };
        let mut regions = vec![Region::default(); REGIONS];
        let mut found = Vec::new();
        let (mut start, end) = (self.address, self.address + self.length);
        while start < end {
            let mut scan = Scan {
                size: size_of::<Scan>() as u64,
                start,
                end,
                regions: regions.as_mut_ptr() as u64,
                regions_length: REGIONS as u64,
                category_inverted: inverted,
                category_mask: IS_FILE,
                category_any_of: any_of,
                return_mask: IS_FILE,
                ..Scan::default()
            };
            // SAFETY: the kernel writes to `scan`, and to `regions` as many as it is told that there are.
            #[expect(unsafe_code, reason = "an ioctl without a wrapper")]
            let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut scan) }?;
            let filled = regions.iter().take(usize::try_from(count).unwrap_or(0));
            found.extend(
                filled.map(|region| region.start - self.address..region.end - self.address),
            );
            if scan.walk_end <= start {
                return Err(io::Error::other("the kernel's scan of pages does not go on"));
            }
            start = scan.walk_end;
        }
        Ok(Pages::of(found))
    }

    fn walk(&self, pagemap: &File, which: Which) -> io::Result<Pages> {
        const ENTRY: u64 = 8;
        let mut found = Vec::new();
        let mut entries = vec![0; 64 * 1024];
        let mut offset = 0;
        while offset < self.length {
            let wanted = ((self.length - offset) / PAGE * ENTRY).min(entries.len() as u64);
            let entries = &mut entries[..usize::try_from(wanted).map_err(io::Error::other)?];
            pagemap.read_exact_at(entries, (self.address + offset) / PAGE * ENTRY)?;
            for entry in entries.chunks_exact(8) {
                let entry = u64::from_le_bytes(entry.try_into().map_err(io::Error::other)?);
                if is_wanted(entry, which) {
                    found.push(offset..offset + PAGE);
                }
                offset += PAGE;
            }
        }
        Ok(Pages::of(found))
    }

    pub(crate) fn read_exact(&self, mut at: u64, mut buffer: &mut [u8]) -> io::Result<()> {
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

    /// Reads a byte of each page, for what the kernel does when a page is read.
    pub(crate) fn touch(&self, at: u64, bytes: usize) {
        // What the kernel takes in one call: `UIO_MAXIOV` in `linux/uio.h`.
        const MOST: usize = 1024;
        let first = (self.address + at) as usize;
        let pages: Vec<_> = (first..first + bytes)
            .step_by(PAGE as usize)
            .map(|base| RemoteIoVec { base, len: 1 })
            .collect();
        let mut buffer = [0; MOST];
        for pages in pages.chunks(MOST) {
            // Nothing depends on it.
            let _ = process_vm_readv(
                self.pid,
                &mut [IoSliceMut::new(&mut buffer[..pages.len()])],
                pages,
            );
        }
    }
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
fn is_wanted(entry: u64, which: Which) -> bool {
    let (is_present, is_swapped, is_file) = (entry >> 63 & 1, entry >> 62 & 1, entry >> 61 & 1);
    match which {
        Which::Changed => is_swapped == 1 || (is_present == 1 && is_file == 0),
        Which::Read => is_present == 1 && is_file == 1,
    }
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
    use super::mapped::MappedPrivately;
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
        let is_changed = |entry| is_wanted(entry, Which::Changed);
        assert!(is_changed(1 << 62));
        assert!(is_changed(1 << 63));
        assert!(!is_changed(1 << 63 | 1 << 61));
        assert!(!is_changed(0));
    }

    #[test]
    fn changed_pages_beside_each_other_are_one_range_and_counted_once() {
        let found = [(1, 2), (100, 101), (2, 3), (15, 16), (2, 3), (16, 17), (15, 17)];
        let changed = Pages::of(found.map(|(start, end)| start * PAGE..end * PAGE).to_vec());
        assert_eq!(changed.0, [PAGE..3 * PAGE, 15 * PAGE..17 * PAGE, 100 * PAGE..101 * PAGE]);
        assert_eq!(changed.count(), 5);
    }

    #[test]
    fn both_ways_to_find_pages_find_the_same() {
        let file = tempfile::tempfile().unwrap();
        let length = 1024 * PAGE;
        file.write_all_at(&vec![1; length as usize], 0).unwrap();
        let private = MappedPrivately::of(&file, length);
        for page in [3, 4, 500, 1023] {
            private.write((page * PAGE) as usize, 2);
        }
        // A page that was only read stays the file's.
        assert_eq!(private.read((700 * PAGE) as usize), 1);
        let memory = private.memory();
        let pagemap = File::open("/proc/self/pagemap").unwrap();
        assert_eq!(memory.walk(&pagemap, Which::Changed).unwrap().count(), 4);
        let read = memory.read().unwrap();
        assert!(read.0.iter().any(|range| range.contains(&(700 * PAGE))), "{read:?}");
        assert!(!read.0.iter().any(|range| range.contains(&(500 * PAGE))), "{read:?}");
        for which in [Which::Changed, Which::Read] {
            match memory.scan(&pagemap, which) {
                Ok(scanned) => assert_eq!(scanned, memory.walk(&pagemap, which).unwrap()),
                Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ENOTTY)),
            }
        }
    }
}

/// Memory as a QEMU has it, in this process.
#[cfg(test)]
pub(crate) mod mapped {
    use super::*;

    /// Never unmapped: the test's process is.
    pub(crate) struct MappedPrivately(*mut u8, u64);

    #[expect(unsafe_code, reason = "a mapping as QEMU has it")]
    impl MappedPrivately {
        pub(crate) fn of(file: &File, length: u64) -> Self {
            use rustix::mm::{MapFlags, ProtFlags, mmap};
            let (access, bytes) = (ProtFlags::READ | ProtFlags::WRITE, length as usize);
            // SAFETY: a new mapping, at an address of the kernel's choice.
            Self(
                unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::PRIVATE, file, 0) }
                    .unwrap()
                    .cast(),
                length,
            )
        }

        pub(crate) fn memory(&self) -> GuestMemory {
            GuestMemory {
                pid: Pid::this(),
                address: self.0 as u64,
                length: self.1,
                file: Identity(0, 0),
                handle: PathBuf::new(),
            }
        }

        pub(crate) fn write(&self, at: usize, byte: u8) {
            // SAFETY: within the mapping.
            unsafe { self.0.add(at).write_volatile(byte) }
        }

        pub(crate) fn read(&self, at: usize) -> u8 {
            // SAFETY: within the mapping.
            unsafe { self.0.add(at).read_volatile() }
        }
    }
}
