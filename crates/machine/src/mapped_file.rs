//! Comparing with a file where the kernel keeps it, instead of with a copy of what it holds.
#![expect(unsafe_code, reason = "a mapping of a file that changes, compared in place")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

/// Whoever writes to the file writes elsewhere at that moment, and nobody makes it shorter.
#[derive(Debug)]
pub(crate) struct MappedFile {
    start: NonNull<u8>,
    length: usize,
}

// SAFETY: nothing is written through it, and it belongs to no thread.
unsafe impl Send for MappedFile {}
// SAFETY: as above.
unsafe impl Sync for MappedFile {}

impl MappedFile {
    pub(crate) fn of(file: &File, length: u64) -> io::Result<Self> {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let start = unsafe {
            mmap(std::ptr::null_mut(), length, ProtFlags::READ, MapFlags::SHARED, file, 0)
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        Ok(Self { start, length })
    }

    /// So that to compare with it does not have to wait for its pages. In whole pages.
    pub(crate) fn fetch(&self, range: Range<usize>) -> io::Result<()> {
        let start = self.at(&range);
        // SAFETY: within the mapping, which stays as it is.
        match unsafe { madvise(start.cast(), range.len(), Advice::LinuxPopulateRead) } {
            // Kernels before 5.14 know no such request.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn is_equal(&self, at: usize, bytes: &[u8]) -> bool {
        let start = self.at(&(at..at + bytes.len()));
        // SAFETY: both are that long. No reference is made to what others may write to at some other time.
        unsafe { libc::memcmp(start.cast(), bytes.as_ptr().cast(), bytes.len()) == 0 }
    }

    fn at(&self, range: &Range<usize>) -> *mut u8 {
        assert!(range.start <= range.end && range.end <= self.length, "beyond the file");
        // SAFETY: within the mapping.
        unsafe { self.start.as_ptr().add(range.start) }
    }
}

impl Drop for MappedFile {
    fn drop(&mut self) {
        // SAFETY: nobody has it any longer.
        if let Err(error) = unsafe { munmap(self.start.as_ptr().cast(), self.length) } {
            tracing::warn!(%error, "failed to unmap a file");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn what_is_written_to_the_file_is_what_it_is_compared_with() {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&[1; 8192], 0).unwrap();
        let mapped = MappedFile::of(&file, 8192).unwrap();
        mapped.fetch(0..8192).unwrap();
        assert!(mapped.is_equal(4096, &[1; 4096]));
        file.write_all_at(&[2], 8191).unwrap();
        assert!(!mapped.is_equal(4096, &[1; 4096]));
        assert!(mapped.is_equal(8191, &[2]));
        assert!(mapped.is_equal(0, &[1; 4096]));
    }
}
