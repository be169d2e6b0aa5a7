//! Saving a machine that runs on from a saved one: its devices, the pages that it has changed, and its disk, all of one
//! instant.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::disks;
use crate::error::{Error, Result};
use crate::hypervisor::explained;
use crate::machine::Machine;
use crate::memory::{GuestMemory, PAGE};
use crate::memory_copy::{Copy, WriteBack};

/// All of a save that waits for the host. A few GiB of changed memory are written in seconds.
const COPY: Duration = Duration::from_secs(60);

/// What a save is written to. The guest is quiet by then, and its disk was flushed just now.
pub struct Save<F> {
    /// Open for writing only; empty.
    pub state: File,
    pub memory: Ahead,
    /// Runs while the machine stands still: the clone of its disk.
    pub while_stopped: F,
}

/// A memory file that is nearly equal to the machine's memory already, so that little is left to write while it stands.
#[derive(Debug)]
pub struct Ahead {
    memory: GuestMemory,
    copy: Copy,
    read: Vec<(u32, u32)>,
}

#[derive(Debug, Clone)]
pub struct Saved {
    /// The machine has stood still since then.
    pub stopped_since: Instant,
    /// How long until all was written.
    pub stood: Duration,
    /// The process's own, even where they are what they were.
    pub changed_pages: u64,
    /// Of the memory file, what is not shared with that which it was cloned from.
    pub written_bytes: u64,
    /// Pages that it had used and not changed: the number of the first, and how many. Whoever goes on from here will use
    /// them, too.
    pub read_pages: Vec<(u32, u32)>,
    pub steps: Steps,
}

/// What a save took. All but the stop go on side by side.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub stop: Duration,
    pub state: Duration,
    pub scan: Duration,
    pub copy: Duration,
    pub while_stopped: Duration,
}

impl Machine {
    /// The memory that this machine started from, which nobody writes to any longer. It can be read and cloned even when
    /// its name is gone.
    ///
    /// # Errors
    /// The process is gone.
    pub fn base_memory(&self) -> Result<File> {
        GuestMemory::of(self.pid())
            .and_then(|memory| memory.open_base())
            .map_err(Error::host("open the memory of qemu"))
    }

    /// Has the host write back what its page cache holds of the disks, until little is left to be written. To be called
    /// before the guest is made quiet: the clone of a disk waits for all that is left.
    ///
    /// # Errors
    /// A disk of the host's fails, or the process is gone.
    pub async fn flush_disks(&self) -> Result<()> {
        let pid = self.pid();
        let flushing = tokio::task::spawn_blocking(move || disks::write_back(pid));
        let flushed = flushing.await.map_err(|_| Error::Lost)?;
        flushed.map_err(Error::host("write back the disks of qemu"))
    }

    /// Writes the pages that have changed over `target`, a clone of [`Machine::base_memory`], while the machine goes on.
    ///
    /// # Errors
    /// [`Error::Unfit`] when it is no such clone. The host's disk is full, or it fails; or the process is gone.
    pub async fn copy_ahead(&self, target: File, write_back: WriteBack) -> Result<Ahead> {
        let memory = GuestMemory::of(self.pid()).map_err(Error::host("find the memory of qemu"))?;
        memory.check_clone(&target)?;
        let copying = tokio::task::spawn_blocking(move || -> io::Result<_> {
            let changed = memory.changed()?;
            let mut copy = Copy::new(memory.open_base()?, target, memory.length(), &changed.0)?;
            copy.ahead(&memory, &changed.0, write_back)?;
            let read = numbered(&memory.read()?.0);
            Ok(Ahead { memory, copy, read })
        });
        let copied = copying.await.map_err(|_| Error::Lost)?;
        copied.map_err(Error::host("copy the memory of qemu"))
    }

    /// Writes the whole machine, which is stopped from then on, whatever the result: the caller resumes it. Nothing is
    /// flushed to the disk.
    ///
    /// # Errors
    /// What was written is of no use then. QEMU is gone; or the host's disk is full, or it fails.
    pub async fn save<F>(&self, save: Save<F>) -> Result<Saved>
    where
        F: FnOnce() -> io::Result<()> + Send + 'static,
    {
        explained(&self.process, self.save_all(save)).await
    }

    async fn save_all<F>(&self, save: Save<F>) -> Result<Saved>
    where
        F: FnOnce() -> io::Result<()> + Send + 'static,
    {
        let Save { state, memory: Ahead { memory, mut copy, read }, while_stopped } = save;
        let stopped_since = Instant::now();
        self.stop().await?;
        let stop = stopped_since.elapsed();
        let copying = tokio::task::spawn_blocking(move || -> io::Result<_> {
            let begun = Instant::now();
            let changed = memory.changed()?;
            let scan = begun.elapsed();
            copy.catch_up(&memory, &changed.0)?;
            Ok((changed.count(), copy.written_bytes(), scan, begun.elapsed() - scan))
        });
        let cloning = tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            while_stopped().map(|()| begun.elapsed())
        });
        let devices = async {
            let begun = Instant::now();
            self.write_state(state).await.map(|()| begun.elapsed())
        };
        // All three are waited for: none may go on when the machine does.
        let all = async { tokio::join!(devices, copying, cloning) };
        let late = |_| Error::host("save a machine")(io::ErrorKind::TimedOut.into());
        let (devices, copied, cloned) = tokio::time::timeout(COPY, all).await.map_err(late)?;
        let state = devices?;
        let copied = copied.map_err(|_| Error::Lost)?;
        // What was read in the end may not have been the machine's.
        if self.has_exited() {
            return Err(Error::Lost);
        }
        let (changed_pages, written_bytes, scan, copy) =
            copied.map_err(Error::host("copy the memory of qemu"))?;
        let cloned = cloned.map_err(|_| Error::Lost)?;
        let while_stopped = cloned.map_err(Error::host("clone the disk of a machine"))?;
        Ok(Saved {
            stopped_since,
            stood: stopped_since.elapsed(),
            changed_pages,
            written_bytes,
            read_pages: read,
            steps: Steps { stop, state, scan, copy, while_stopped },
        })
    }
}

/// As numbers of pages. What lies between two that are near each other is counted in: it would be fetched with them.
fn numbered(ranges: &[Range<u64>]) -> Vec<(u32, u32)> {
    const NEAR: u64 = 32;
    let mut numbered: Vec<(u32, u32)> = Vec::new();
    for range in ranges {
        let (start, end) = (range.start / PAGE, range.end.div_ceil(PAGE));
        let joined = numbered.last_mut().and_then(|(first, pages)| {
            let before = u64::from(*first) + u64::from(*pages);
            let longer = u32::try_from(end - u64::from(*first)).ok()?;
            (start <= before + NEAR).then(|| *pages = longer)
        });
        if joined.is_none()
            && let (Ok(first), Ok(pages)) = (u32::try_from(start), u32::try_from(end - start))
        {
            numbered.push((first, pages));
        }
    }
    numbered
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_near_each_other_are_fetched_together() {
        let pages = |from: u64, to: u64| from * PAGE..to * PAGE;
        assert_eq!(numbered(&[]), []);
        let ranges = [pages(3, 5), pages(6, 7), pages(39, 40), pages(73, 80)];
        assert_eq!(numbered(&ranges), [(3, 37), (73, 7)]);
    }
}
