//! Making a file equal to a machine's memory, of which it is a clone of an earlier state. Nothing tells which pages have
//! changed since a first copy, so that is found by comparing: to read is several times as fast as to write.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use crate::disks;
use crate::mapped_file::MappedFile;
use crate::memory::{GuestMemory, PAGE};

/// Written together when memory lies in many pieces already.
const LARGE_BLOCK: u64 = 64 * 1024;
/// In a file that falls into more, to clone it takes long: a tenth of a second for this many.
const MOST_PIECES: usize = 8192;
/// What is read at once; a multiple of every block. It stays in a processor's own cache until it was compared.
const PIECE: u64 = 512 * 1024;
/// More wait for each other at the file, and the host has other machines.
const MOST_THREADS: usize = 4;

/// When a copy goes from the host's page cache to its disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteBack {
    /// On its way beside all else, since it will be flushed.
    Now,
    /// When the kernel finds the time: nobody waits for it, and it may be gone by then. The guest, which flushes its disks
    /// when it is made quiet, need not wait behind it.
    Later,
}

/// What is known of a block since it was last looked at.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Known {
    /// The target has what the base has.
    #[default]
    AsBase,
    /// So does the memory, and it is nothing but zeros.
    Zeros,
    /// The target has what the memory had.
    Written,
}

/// A file that becomes equal to the memory, block by block.
#[derive(Debug)]
pub(crate) struct Copy {
    base: File,
    target: File,
    /// The target, to be compared with.
    mapped: MappedFile,
    block: u64,
    length: u64,
    known: Vec<Known>,
}

impl Copy {
    /// `target` is a clone of `base`, the file that the memory is mapped from.
    pub(crate) fn new(
        base: File,
        target: File,
        length: u64,
        changed: &[Range<u64>],
    ) -> io::Result<Self> {
        let is_scattered = pieces_of(&base).saturating_add(changed.len()) > MOST_PIECES;
        let block = if is_scattered { LARGE_BLOCK } else { PAGE };
        let blocks = usize::try_from(length.div_ceil(block)).unwrap_or(0);
        let mapped = MappedFile::of(&target, length)?;
        Ok(Self { base, target, mapped, block, length, known: vec![Known::default(); blocks] })
    }

    /// The first time, while the memory goes on changing: whatever would take long in [`Copy::catch_up`] is done here.
    /// `changed` are all pages that are not the base's.
    pub(crate) fn ahead(
        &mut self,
        memory: &GuestMemory,
        changed: &[Range<u64>],
        write_back: WriteBack,
    ) -> io::Result<()> {
        self.go_over(changed, |start, buffer| {
            memory.read_exact(start, buffer)?;
            // The kernel counts a page as an active one when it is read for the second time, and puts it into another
            // list then, one after the other. That takes as long as to compare it.
            memory.touch(start, buffer.len());
            Ok(())
        })?;
        if write_back == WriteBack::Now {
            // Whoever flushes the file in the end waits for less, and hears of what goes wrong.
            let target = self.target.try_clone()?;
            std::thread::spawn(move || disks::begin_to_write_back(&target));
        }
        self.fetch_written()
    }

    /// Of memory that stands still. `changed` as above, now.
    pub(crate) fn catch_up(
        &mut self,
        memory: &GuestMemory,
        changed: &[Range<u64>],
    ) -> io::Result<()> {
        self.go_over(changed, |start, buffer| memory.read_exact(start, buffer))
    }

    fn go_over(
        &mut self,
        changed: &[Range<u64>],
        read: impl Fn(u64, &mut [u8]) -> io::Result<()> + Sync,
    ) -> io::Result<()> {
        let threads =
            std::thread::available_parallelism().map_or(1, NonZero::get).min(MOST_THREADS);
        let shares = Shares::of(&self.pieces(changed), threads);
        let this = &*self;
        let work = |own: usize| -> io::Result<Vec<(usize, Known)>> {
            let (mut found, mut here, mut base) = (Vec::new(), Vec::new(), Vec::new());
            while let Some(piece) = shares.next(own) {
                let length = (piece.end - piece.start) as usize;
                if here.len() < length {
                    here.resize(length, 0);
                }
                let here = &mut here[..length];
                read(piece.start, here)?;
                this.write_differing(piece.start, here, &mut base, &mut found)?;
            }
            Ok(found)
        };
        let work = &work;
        let found = std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|own| scope.spawn(move || work(own))).collect();
            let mut all = vec![work(0)];
            all.extend(others.into_iter().map(|other| {
                other.join().map_err(|_| io::Error::other("a copying thread panicked"))?
            }));
            all
        });
        for found in found {
            for (block, known) in found? {
                self.known[block] = known;
            }
        }
        Ok(())
    }

    fn fetch_written(&self) -> io::Result<()> {
        let mut at = 0;
        for run in self.known.chunk_by(|one, other| one == other) {
            let start = at;
            at += run.len() * self.block as usize;
            if run[0] == Known::Written {
                self.mapped.fetch(start..at.min(self.length as usize))?;
            }
        }
        Ok(())
    }

    /// Of the target's bytes, those that are not the base's.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.known.iter().filter(|&&known| known == Known::Written).count() as u64 * self.block
    }

    /// Everything to look at, in whole blocks: also what was written before, should the memory have become the base's
    /// again since.
    fn pieces(&self, changed: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut wanted: Vec<bool> =
            self.known.iter().map(|&known| known == Known::Written).collect();
        for range in changed {
            let end = range.end.div_ceil(self.block) as usize;
            wanted[(range.start / self.block) as usize..end].fill(true);
        }
        let mut pieces = Vec::new();
        let mut at = 0;
        for run in wanted.chunk_by(|one, other| one == other) {
            let start = at as u64 * self.block;
            at += run.len();
            let end = (at as u64 * self.block).min(self.length);
            if run[0] {
                let starts = (start..end).step_by(PIECE as usize);
                pieces.extend(starts.map(|start| start..end.min(start + PIECE)));
            }
        }
        pieces
    }

    fn write_differing(
        &self,
        start: u64,
        here: &[u8],
        base: &mut Vec<u8>,
        found: &mut Vec<(usize, Known)>,
    ) -> io::Result<()> {
        static ZEROS: [u8; LARGE_BLOCK as usize] = [0; LARGE_BLOCK as usize];
        let size = self.block as usize;
        let mut unwritten: Range<usize> = 0..0;
        let write = |range: &Range<usize>| {
            self.target.write_all_at(&here[range.clone()], start + range.start as u64)
        };
        let mut block = (start / self.block) as usize;
        let mut at = 0;
        let known = &self.known[block..block + here.len().div_ceil(size)];
        for run in known.chunk_by(|one, other| one == other) {
            let end = here.len().min(at + run.len() * size);
            if run[0] == Known::AsBase {
                if base.len() < end {
                    base.resize(here.len(), 0);
                }
                self.base.read_exact_at(&mut base[at..end], start + at as u64)?;
            }
            for here in here[at..end].chunks(size) {
                let is_zeros = || *here == ZEROS[..here.len()];
                let is_equal = match run[0] {
                    Known::AsBase => *here == base[at..at + here.len()],
                    Known::Zeros => is_zeros(),
                    Known::Written => self.mapped.is_equal(start as usize + at, here),
                };
                if !is_equal {
                    found.push((block, Known::Written));
                    if unwritten.end != at {
                        write(&unwritten)?;
                        unwritten.start = at;
                    }
                    unwritten.end = at + here.len();
                } else if run[0] == Known::AsBase && is_zeros() {
                    found.push((block, Known::Zeros));
                }
                block += 1;
                at += here.len();
            }
        }
        write(&unwritten)
    }
}

/// What each thread goes over. Neighbours lie in one page table, whose lock two threads would wait for: so each begins
/// elsewhere, and helps another from its end.
struct Shares(Vec<Mutex<VecDeque<Range<u64>>>>);

impl Shares {
    fn of(pieces: &[Range<u64>], threads: usize) -> Self {
        let share = pieces.len().div_ceil(threads).max(1);
        Self(
            pieces.chunks(share).map(|share| Mutex::new(share.iter().cloned().collect())).collect(),
        )
    }

    fn next(&self, own: usize) -> Option<Range<u64>> {
        let share = |at: usize| {
            self.0.get(at).map(|share| share.lock().unwrap_or_else(PoisonError::into_inner))
        };
        let first = share(own).and_then(|mut share| share.pop_front());
        first.or_else(|| (0..self.0.len()).find_map(|other| share(other)?.pop_back()))
    }
}

/// Into how many a file falls on its disk.
fn pieces_of(file: &File) -> usize {
    let mut map = Map { length: u64::MAX, ..Map::default() };
    // SAFETY: without room for extents the kernel only fills in the header, with their number.
    #[expect(unsafe_code, reason = "an ioctl without a wrapper")]
    let asked = unsafe { fiemap(file.as_raw_fd(), &raw mut map) };
    // A file system without such a map has no clones either.
    asked.map_or(0, |_| map.mapped_extents as usize)
}

/// `struct fiemap`, without extents.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Map {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

nix::ioctl_readwrite!(fiemap, b'f', 11, Map);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::mapped::MappedPrivately;

    const PAGES: u64 = 1024;
    const LENGTH: u64 = PAGES * PAGE;

    /// Page 2 is nothing but zeros, all others are not.
    fn file() -> File {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&vec![1; LENGTH as usize], 0).unwrap();
        file.write_all_at(&[0; PAGE as usize], 2 * PAGE).unwrap();
        file
    }

    fn content(file: &File) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    fn memory_of(memory: &GuestMemory) -> Vec<u8> {
        let mut bytes = vec![0; LENGTH as usize];
        memory.read_exact(0, &mut bytes).unwrap();
        bytes
    }

    fn at(page: u64) -> usize {
        (page * PAGE) as usize + 7
    }

    #[test]
    fn every_piece_is_gone_over_once_whoever_works() {
        for (pieces, threads) in [(0, 2), (1, 2), (5, 2), (7, 4), (3, 4)] {
            let pieces: Vec<_> = (0..pieces).map(|at| at * PIECE..(at + 1) * PIECE).collect();
            for own in 0..threads {
                let shares = Shares::of(&pieces, threads);
                let mut found: Vec<_> = std::iter::from_fn(|| shares.next(own)).collect();
                found.sort_unstable_by_key(|piece| piece.start);
                assert_eq!(found, pieces);
            }
        }
    }

    /// Exactly what differs, in pages.
    fn copy(mapped: &MappedPrivately, base: &File) -> (Copy, File) {
        let target = file();
        let changed = mapped.memory().changed().unwrap().0;
        let (base, clone) = (base.try_clone().unwrap(), target.try_clone().unwrap());
        let mut copy = Copy::new(base, clone, LENGTH, &changed).unwrap();
        copy.ahead(&mapped.memory(), &changed, WriteBack::Later).unwrap();
        (copy, target)
    }

    #[test]
    fn only_what_differs_is_written() {
        let base = file();
        let mapped = MappedPrivately::of(&base, LENGTH);
        for (page, byte) in [(2, 0), (3, 1), (4, 9), (5, 9), (64, 9), (1023, 9)] {
            mapped.write(at(page), byte);
        }
        let (copy, target) = copy(&mapped, &base);
        assert!(content(&target) == memory_of(&mapped.memory()));
        assert_eq!(copy.written_bytes(), 4 * PAGE);
    }

    #[test]
    fn whatever_has_changed_since_is_caught_up_with() {
        let base = file();
        let mapped = MappedPrivately::of(&base, LENGTH);
        let pages = [(2, 0), (3, 1), (4, 9), (5, 9), (6, 9), (900, 9)];
        for (page, byte) in pages {
            mapped.write(at(page), byte);
        }
        let (mut copy, target) = copy(&mapped, &base);
        // Zeros no longer, equal no longer, different again, and back to what the base has.
        for (page, byte) in [(2, 5), (3, 5), (4, 8), (5, 1), (700, 5)] {
            mapped.write(at(page), byte);
        }
        copy.catch_up(&mapped.memory(), &mapped.memory().changed().unwrap().0).unwrap();
        assert!(content(&target) == memory_of(&mapped.memory()));
        // Page 5 was written before.
        assert_eq!(copy.written_bytes(), 7 * PAGE);
        copy.catch_up(&mapped.memory(), &mapped.memory().changed().unwrap().0).unwrap();
        assert!(content(&target) == memory_of(&mapped.memory()));
    }

    #[test]
    fn what_was_written_and_is_the_bases_again_is_caught_up_with() {
        let base = file();
        let mapped = MappedPrivately::of(&base, LENGTH);
        mapped.write(at(4), 9);
        let (mut copy, target) = copy(&mapped, &base);
        let fresh = MappedPrivately::of(&base, LENGTH);
        copy.catch_up(&fresh.memory(), &[]).unwrap();
        assert!(content(&target) == content(&base));
    }

    #[test]
    fn scattered_memory_is_written_in_large_blocks() {
        let base = file();
        let mapped = MappedPrivately::of(&base, LENGTH);
        mapped.write(at(20), 9);
        let changed = mapped.memory().changed().unwrap().0;
        let many = vec![20 * PAGE..21 * PAGE; MOST_PIECES + 1];
        let target = file();
        let (base, clone) = (base.try_clone().unwrap(), target.try_clone().unwrap());
        let mut copy = Copy::new(base, clone, LENGTH, &many).unwrap();
        copy.ahead(&mapped.memory(), &changed, WriteBack::Later).unwrap();
        assert!(content(&target) == memory_of(&mapped.memory()));
        assert_eq!(copy.written_bytes(), LARGE_BLOCK);
    }
}
