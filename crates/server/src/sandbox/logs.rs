//! What the commands of a sandbox printed: the last lines, in order, for `/logs`.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use api::ExecStream;
use bytes::{Bytes, BytesMut};
use tokio::sync::watch;

/// Kept of all lines together.
pub(super) const LONGEST_LOG: usize = 1 << 20;
/// A longer line is told in pieces: output without a newline must not wait for one for ever.
const LONGEST_LINE: usize = 16 << 10;
/// What an empty line costs, so that many of them are bounded too.
const LINE_COST: usize = 64;
/// Commands that have ended and may still turn up in a list of the guest's.
const MOST_ENDED: usize = 256;
/// The number of the first line: there may be some that are put before it.
const FIRST_LINE: u64 = 1 << 32;

/// Without its newline.
#[derive(Clone, PartialEq, Eq)]
pub struct Line {
    pub output: ExecStream,
    pub text: Bytes,
}

impl fmt::Debug for Line {
    /// What commands print may be secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Line")
            .field("output", &self.output)
            .field("length", &self.text.len())
            .finish()
    }
}

/// Shared by a sandbox's commands, which write, and its readers.
#[derive(Debug)]
pub struct Logs {
    ring: Mutex<Ring>,
    seen: Mutex<SeenByCommand>,
    changed: watch::Sender<Progress>,
}

/// How much of a command's streams was taken in, so that whoever watches it again goes on from there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) stdout: u64,
    pub(super) stderr: u64,
}

#[derive(Debug, Default)]
struct SeenByCommand {
    seen: HashMap<String, Seen>,
    /// Oldest first. A guest that hibernates may not have learned yet that these are needed no longer.
    ended: VecDeque<String>,
}

#[derive(Debug, Clone, Copy)]
struct Progress {
    /// Lines there ever were.
    end: u64,
    closed: bool,
}

#[derive(Debug)]
struct Ring {
    lines: VecDeque<Line>,
    /// The number of the first line that is still here.
    first: u64,
    cost: usize,
}

impl Default for Logs {
    fn default() -> Self {
        Self {
            ring: Mutex::new(Ring { lines: VecDeque::new(), first: FIRST_LINE, cost: 0 }),
            seen: Mutex::default(),
            changed: watch::Sender::new(Progress { end: FIRST_LINE, closed: false }),
        }
    }
}

impl Logs {
    /// For one command.
    pub fn writer(self: &Arc<Self>) -> LogWriter {
        LogWriter { logs: Arc::clone(self), stdout: BytesMut::new(), stderr: BytesMut::new() }
    }

    pub(super) fn seen(&self, command: &str) -> Seen {
        self.all_seen().seen.get(command).copied().unwrap_or_default()
    }

    pub(super) fn set_seen(&self, command: &str, seen: Seen) {
        self.all_seen().seen.insert(command.to_owned(), seen);
    }

    pub(super) fn saw(&self, command: &str, output: ExecStream, length: usize) {
        let mut all = self.all_seen();
        let seen = all.seen.entry(command.to_owned()).or_default();
        match output {
            ExecStream::Stdout => seen.stdout += length as u64,
            ExecStream::Stderr => seen.stderr += length as u64,
        }
    }

    /// None but these will be watched again.
    pub(super) fn keep_seen(&self, commands: &BTreeSet<&str>) {
        let mut all = self.all_seen();
        all.seen.retain(|command, _| commands.contains(command.as_str()));
        all.ended.retain(|command| commands.contains(command.as_str()));
    }

    pub(super) fn ended(&self, command: &str) {
        let mut all = self.all_seen();
        all.ended.push_back(command.to_owned());
        if all.ended.len() > MOST_ENDED
            && let Some(oldest) = all.ended.pop_front()
        {
            all.seen.remove(&oldest);
        }
    }

    fn all_seen(&self) -> MutexGuard<'_, SeenByCommand> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader from the oldest kept line on.
    pub fn reader(self: &Arc<Self>) -> LogReader {
        LogReader { logs: Arc::clone(self), next: 0, changed: self.changed.subscribe() }
    }

    /// Older lines, as far as there is room. Before anyone reads.
    pub(super) fn put_before(&self, mut older: LogWriter) {
        for stream in ExecStream::ALL {
            older.end_line(stream);
        }
        let older = std::mem::take(&mut older.logs.ring().lines);
        let mut ring = self.ring();
        for line in older.into_iter().rev() {
            let cost = line.text.len() + LINE_COST;
            if ring.cost + cost > LONGEST_LOG || ring.first == 0 {
                break;
            }
            ring.cost += cost;
            ring.first -= 1;
            ring.lines.push_front(line);
        }
    }

    /// The sandbox is gone: readers that follow come to an end.
    pub fn close(&self) {
        self.changed.send_modify(|progress| progress.closed = true);
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, output: ExecStream, text: Bytes) {
        let end = {
            let mut ring = self.ring();
            ring.cost += text.len() + LINE_COST;
            ring.lines.push_back(Line { output, text });
            while ring.cost > LONGEST_LOG
                && let Some(oldest) = ring.lines.pop_front()
            {
                ring.cost -= oldest.text.len() + LINE_COST;
                ring.first += 1;
            }
            ring.first + ring.lines.len() as u64
        };
        self.changed.send_modify(|progress| progress.end = progress.end.max(end));
    }
}

/// Cuts one command's output into lines. What is left without a newline becomes a line when it is dropped.
#[derive(Debug)]
pub struct LogWriter {
    logs: Arc<Logs>,
    stdout: BytesMut,
    stderr: BytesMut,
}

impl LogWriter {
    /// For lines that belong to no log yet.
    pub(super) fn apart() -> Self {
        Arc::<Logs>::default().writer()
    }

    /// What has come of a line is one.
    pub(super) fn end_line(&mut self, stream: ExecStream) {
        let partial = match stream {
            ExecStream::Stdout => &mut self.stdout,
            ExecStream::Stderr => &mut self.stderr,
        };
        if !partial.is_empty() {
            self.logs.push(stream, partial.split().freeze());
        }
    }

    pub fn write(&mut self, output: ExecStream, mut bytes: &[u8]) {
        let partial = match output {
            ExecStream::Stdout => &mut self.stdout,
            ExecStream::Stderr => &mut self.stderr,
        };
        while !bytes.is_empty() {
            let room = LONGEST_LINE - partial.len();
            let window = &bytes[..bytes.len().min(room)];
            match window.iter().position(|&byte| byte == b'\n') {
                Some(end) => {
                    partial.extend_from_slice(&window[..end]);
                    bytes = &bytes[end + 1..];
                    self.logs.push(output, partial.split().freeze());
                }
                None => {
                    partial.extend_from_slice(window);
                    bytes = &bytes[window.len()..];
                    if partial.len() == LONGEST_LINE {
                        self.logs.push(output, partial.split().freeze());
                    }
                }
            }
        }
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        for stream in ExecStream::ALL {
            self.end_line(stream);
        }
    }
}

/// One reader's place in the lines.
#[derive(Debug)]
pub struct LogReader {
    logs: Arc<Logs>,
    next: u64,
    changed: watch::Receiver<Progress>,
}

impl LogReader {
    /// The lines since the last call. One who reads slower than the commands print misses the oldest.
    pub fn take(&mut self) -> Vec<Line> {
        let ring = self.logs.ring();
        let skip = usize::try_from(self.next.saturating_sub(ring.first)).unwrap_or(usize::MAX);
        let lines: Vec<Line> = ring.lines.iter().skip(skip).cloned().collect();
        self.next = ring.first + ring.lines.len() as u64;
        lines
    }

    /// Waits until there is more to take; false when there never will be.
    pub async fn more(&mut self) -> bool {
        let next = self.next;
        match self.changed.wait_for(|progress| progress.closed || progress.end > next).await {
            Ok(progress) => progress.end > next,
            Err(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn texts(lines: &[Line]) -> Vec<Vec<u8>> {
        lines.iter().map(|line| line.text.to_vec()).collect()
    }

    proptest! {
        #[test]
        fn lines_are_the_same_however_the_output_was_cut(text in "[ab\n]{0,60}", cuts in prop::collection::vec(0usize..60, 0..6)) {
            let logs = Arc::new(Logs::default());
            let mut writer = logs.writer();
            let mut cuts: Vec<usize> = cuts.into_iter().filter(|cut| *cut <= text.len()).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            for pair in cuts.windows(2) {
                writer.write(ExecStream::Stdout, &text.as_bytes()[pair[0]..pair[1]]);
            }
            drop(writer);
            let expected: Vec<Vec<u8>> = text.lines().map(|line| line.as_bytes().to_vec()).collect();
            prop_assert_eq!(texts(&logs.reader().take()), expected);
        }
    }

    #[test]
    fn much_output_keeps_its_end_and_a_bounded_size() {
        let logs = Arc::new(Logs::default());
        let mut writer = logs.writer();
        for number in 0..200_000 {
            writer.write(ExecStream::Stderr, format!("{number}\n").as_bytes());
        }
        writer.write(ExecStream::Stdout, &vec![b'x'; 3 * LONGEST_LINE]);
        let lines = logs.reader().take();
        assert!(lines.iter().map(|line| line.text.len()).sum::<usize>() <= LONGEST_LOG);
        assert_eq!(lines[lines.len() - 4].text, "199999");
        assert_eq!(
            lines.last().map(|line| (line.output, line.text.len())),
            Some((ExecStream::Stdout, LONGEST_LINE))
        );
    }

    #[tokio::test]
    async fn a_follower_gets_every_line_once_and_ends_with_the_sandbox() {
        let logs = Arc::new(Logs::default());
        let mut writer = logs.writer();
        writer.write(ExecStream::Stdout, b"one\n");
        let mut reader = logs.reader();
        assert!(reader.more().await);
        assert_eq!(texts(&reader.take()), [b"one"]);
        writer.write(ExecStream::Stdout, b"two\nthr");
        assert!(reader.more().await);
        assert_eq!(texts(&reader.take()), [b"two"]);
        drop(writer);
        logs.close();
        assert!(reader.more().await);
        assert_eq!(texts(&reader.take()), [b"thr"]);
        assert!(!reader.more().await);
    }
}
