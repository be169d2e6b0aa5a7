//! What an exec has printed, kept by offset so that watchers come and go: the newest in memory, the rest in a file
//! without a name. The file is written by workers, because a full disk cache makes a writer wait.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use protocol::frame::Channel;
use rustix::fs::{CWD, Mode, OFlags, openat, unlinkat};
use rustix::io::{Errno, read};

/// So much stays in memory before it goes to the file; short output never does.
const IN_MEMORY: usize = 64 << 10;
/// The same while many execs print much.
const IN_MEMORY_WHEN_SHORT: usize = 4 << 10;
/// The pipe is left alone while so much waits for a worker.
const WAITING: usize = 256 << 10;
/// The order of both streams is remembered exactly for so many changes between them, beyond that more coarsely.
const MARKS: usize = 1024;

/// One of the two streams.
#[derive(Debug)]
pub(crate) struct Kept {
    limit: u64,
    total: u64,
    kept: u64,
    file: Option<Arc<File>>,
    in_file: u64,
    on_the_way: Option<Arc<Vec<u8>>>,
    newest: Vec<u8>,
    /// There can be no file: what is in memory is all that is kept.
    without_file: bool,
}

/// Bytes for a worker to write with [`Spill::write`]; tell [`Kept::spilled`] what came of it.
#[derive(Debug)]
pub(crate) struct Spill {
    file: Arc<File>,
    at: u64,
    bytes: Arc<Vec<u8>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Memory {
    Enough,
    Short,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Bytes(usize),
    /// Nothing there at the moment.
    Nothing,
    End,
}

impl Kept {
    pub(crate) fn new(limit: u64) -> Self {
        Self {
            limit,
            total: 0,
            kept: 0,
            file: None,
            in_file: 0,
            on_the_way: None,
            newest: Vec::new(),
            without_file: false,
        }
    }

    /// Everything that was printed, also what is not kept.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn kept(&self) -> u64 {
        self.kept
    }

    pub(crate) fn in_memory(&self) -> usize {
        self.newest.capacity() + self.on_the_way.as_ref().map_or(0, |bytes| bytes.capacity())
    }

    /// No more than `most` bytes from the pipe, by way of `buffer`.
    pub(crate) fn take_from(
        &mut self,
        pipe: &OwnedFd,
        most: usize,
        buffer: &mut [u8],
        nowhere: &OwnedFd,
    ) -> Taken {
        let room = usize::try_from(self.limit - self.kept).unwrap_or(usize::MAX);
        if room == 0 {
            let dropped = drop_from(pipe, most, nowhere);
            if let Taken::Bytes(count) = dropped {
                self.total += count as u64;
            }
            return dropped;
        }
        let most = most.min(buffer.len()).min(room);
        loop {
            return match read(pipe, &mut buffer[..most]) {
                Ok(0) => Taken::End,
                Ok(count) => {
                    self.newest.extend_from_slice(&buffer[..count]);
                    self.total += count as u64;
                    self.kept += count as u64;
                    Taken::Bytes(count)
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Taken::Nothing,
                // A pipe has no other errors; what would make one is as good as its end.
                Err(_) => Taken::End,
            };
        }
    }

    /// Nothing more comes.
    pub(crate) fn shrink(&mut self) {
        self.newest.shrink_to_fit();
    }

    /// The pipe must wait: the disk is slower than the command.
    pub(crate) fn is_full(&self) -> bool {
        self.on_the_way.is_some() && self.newest.len() >= WAITING
    }

    /// What should go to the file now.
    pub(crate) fn spill(&mut self, memory: Memory, directory: &Path) -> Option<Spill> {
        let bound = match memory {
            Memory::Enough => IN_MEMORY,
            Memory::Short => IN_MEMORY_WHEN_SHORT,
        };
        if self.on_the_way.is_some() || self.without_file || self.newest.len() <= bound {
            return None;
        }
        let file = match &self.file {
            Some(file) => Arc::clone(file),
            None => match nameless_file(directory) {
                Ok(file) => Arc::clone(self.file.insert(Arc::new(file))),
                Err(_) => {
                    self.without_file = true;
                    self.limit = self.kept;
                    return None;
                }
            },
        };
        let bytes = Arc::new(std::mem::take(&mut self.newest));
        self.on_the_way = Some(Arc::clone(&bytes));
        Some(Spill { file, at: self.in_file, bytes })
    }

    pub(crate) fn spilled(&mut self, success: bool) {
        let Some(bytes) = self.on_the_way.take() else { return };
        if success {
            self.in_file += bytes.len() as u64;
        } else {
            self.lose();
        }
    }

    /// The disk is full: what could not be written is gone, and so is what comes after it.
    fn lose(&mut self) {
        self.newest = Vec::new();
        self.on_the_way = None;
        self.kept = self.in_file;
        self.limit = self.kept;
    }

    /// Everything kept is dropped; the count stays.
    pub(crate) fn forget(&mut self) {
        *self = Self { total: self.total, ..Self::new(0) };
    }

    /// Appends up to `most` bytes from `offset` on; there must be some.
    pub(crate) fn copy(&self, offset: u64, most: usize, out: &mut Vec<u8>) -> Result<(), Errno> {
        let on_the_way = self.on_the_way.as_deref().map_or(&[][..], |bytes| bytes);
        let memory = [
            (self.in_file, on_the_way),
            (self.in_file + on_the_way.len() as u64, &self.newest[..]),
        ];
        for (start, bytes) in memory {
            let from = offset.checked_sub(start).and_then(|at| usize::try_from(at).ok());
            if let Some(bytes) =
                from.and_then(|from| bytes.get(from..)).filter(|bytes| !bytes.is_empty())
            {
                out.extend_from_slice(&bytes[..bytes.len().min(most)]);
                return Ok(());
            }
        }
        let file = self.file.as_ref().ok_or(Errno::IO)?;
        let most =
            most.min(usize::try_from(self.in_file.saturating_sub(offset)).unwrap_or(usize::MAX));
        let length = out.len();
        out.resize(length + most, 0);
        let copied = file.read_exact_at(&mut out[length..], offset);
        copied.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }
}

impl Spill {
    pub(crate) fn write(&self) -> bool {
        self.file.write_all_at(&self.bytes, self.at).is_ok()
    }
}

/// Reads and forgets; without copying, where the kernel can.
pub(crate) fn drop_from(pipe: &OwnedFd, most: usize, nowhere: &OwnedFd) -> Taken {
    let flags = rustix::pipe::SpliceFlags::NONBLOCK;
    loop {
        match rustix::pipe::splice(pipe, None, nowhere, None, most.min(1 << 20), flags) {
            Ok(0) => return Taken::End,
            Ok(count) => return Taken::Bytes(count),
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => return Taken::Nothing,
            Err(_) => return Taken::End,
        }
    }
}

fn nameless_file(directory: &Path) -> Result<File, Errno> {
    let mode = Mode::RUSR | Mode::WUSR;
    match openat(CWD, directory, OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
        Ok(file) => return Ok(file.into()),
        Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::INVAL) => {}
        Err(error) => return Err(error),
    }
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    let name = directory.join(format!(".atoll-output-{:016x}", u64::from_ne_bytes(random)));
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = openat(CWD, &name, flags, mode)?;
    unlinkat(CWD, &name, rustix::fs::AtFlags::empty())?;
    Ok(file.into())
}

/// In which order both streams came, as positions in both after each change from one to the other.
#[derive(Debug, Default)]
pub(crate) struct Order {
    marks: Vec<Position>,
}

/// Offsets in standard output and standard error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) stdout: u64,
    pub(crate) stderr: u64,
}

impl Order {
    /// Both streams are kept up to `now`: more than before, or less, when a part was lost.
    pub(crate) fn note(&mut self, now: Position) {
        if self
            .marks
            .last()
            .is_some_and(|last| last.stdout > now.stdout || last.stderr > now.stderr)
        {
            for mark in &mut self.marks {
                mark.stdout = mark.stdout.min(now.stdout);
                mark.stderr = mark.stderr.min(now.stderr);
            }
        }
        let before =
            self.marks.len().checked_sub(2).map_or(Position::default(), |at| self.marks[at]);
        match self.marks.last_mut() {
            Some(last) if *last == now => {}
            // The same stream goes on.
            Some(last) if last.stderr == now.stderr && last.stderr == before.stderr => *last = now,
            Some(last) if last.stdout == now.stdout && last.stdout == before.stdout => *last = now,
            Some(_) | None => self.marks.push(now),
        }
        if self.marks.len() > MARKS {
            let mut at = 0;
            self.marks.retain(|_| {
                at += 1;
                at % 2 == 0 || at > MARKS / 2
            });
        }
    }

    /// The stream to go on with after `position`, and up to which offset of it.
    pub(crate) fn next(&self, position: Position) -> Option<(Channel, u64)> {
        let at = self.marks.partition_point(|mark| {
            mark.stdout <= position.stdout && mark.stderr <= position.stderr
        });
        let mark = self.marks.get(at)?;
        Some(if mark.stdout > position.stdout {
            (Channel::Stdout, mark.stdout)
        } else {
            (Channel::Stderr, mark.stderr)
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn play(order: &Order, from: Position) -> (Vec<(Channel, u64)>, Position) {
        let (mut now, mut pieces) = (from, Vec::new());
        while let Some((channel, end)) = order.next(now) {
            pieces.push((channel, end));
            match channel {
                Channel::Stdout => now.stdout = end,
                Channel::Stderr => now.stderr = end,
                Channel::Content => unreachable!("an exec prints on two streams"),
            }
        }
        (pieces, now)
    }

    proptest! {
        #[test]
        fn a_watcher_from_any_offset_sees_every_byte_to_the_end(steps in prop::collection::vec((any::<bool>(), 1u64..50), 0..3000),
                stdout in 0u64..100, stderr in 0u64..100) {
            let (mut order, mut end) = (Order::default(), Position::default());
            for (to_stdout, length) in steps {
                if to_stdout { end.stdout += length } else { end.stderr += length }
                order.note(end);
            }
            prop_assert!(order.marks.len() <= MARKS + 1);
            let from = Position { stdout: stdout.min(end.stdout), stderr: stderr.min(end.stderr) };
            prop_assert_eq!(play(&order, from).1, end);
        }

        #[test]
        fn nothing_that_was_lost_is_promised(steps in prop::collection::vec((0u64..50, 0u64..50), 1..100), stdout in 0u64..2000, stderr in 0u64..2000) {
            let (mut order, mut end) = (Order::default(), Position::default());
            for (out, err) in steps {
                end = Position { stdout: end.stdout + out, stderr: end.stderr + err };
                order.note(end);
            }
            let left = Position { stdout: stdout.min(end.stdout), stderr: stderr.min(end.stderr) };
            order.note(left);
            prop_assert_eq!(play(&order, Position::default()).1, left);
        }

        #[test]
        fn up_to_a_thousand_changes_are_replayed_in_their_order(steps in prop::collection::vec((any::<bool>(), 1u64..50), 1..900)) {
            let (mut order, mut end, mut expected) = (Order::default(), Position::default(), Vec::<(Channel, u64)>::new());
            for (to_stdout, length) in steps {
                let piece = if to_stdout { end.stdout += length; (Channel::Stdout, end.stdout) } else { end.stderr += length; (Channel::Stderr, end.stderr) };
                order.note(end);
                match expected.last_mut() {
                    Some(last) if last.0 == piece.0 => *last = piece,
                    _ => expected.push(piece),
                }
            }
            prop_assert_eq!(play(&order, Position::default()).0, expected);
        }

        #[test]
        fn every_offset_is_found_wherever_its_bytes_are(pieces in prop::collection::vec(1usize..3000, 1..8), spill_after in 0usize..8) {
            let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
            let nowhere = std::fs::File::options().write(true).open("/dev/null").unwrap().into();
            let (mut kept, mut whole) = (Kept::new(u64::MAX), Vec::new());
            for (at, length) in pieces.iter().enumerate() {
                let piece: Vec<u8> = (0..*length).map(|byte| (byte + at) as u8).collect();
                rustix::io::write(&writer, &piece).unwrap();
                whole.extend_from_slice(&piece);
                prop_assert_eq!(kept.take_from(&reader, usize::MAX, &mut [0; 4096], &nowhere), Taken::Bytes(*length));
                let spill = if at == spill_after { kept.spill(Memory::Short, &std::env::temp_dir()) } else { None };
                if let Some(spill) = spill.filter(|_| at % 2 == 0) {
                    prop_assert!(spill.write());
                    kept.spilled(true);
                }
            }
            let mut copied = Vec::new();
            while (copied.len() as u64) < kept.kept() {
                kept.copy(copied.len() as u64, 700, &mut copied).unwrap();
            }
            prop_assert_eq!(copied, whole);
        }
    }
}
