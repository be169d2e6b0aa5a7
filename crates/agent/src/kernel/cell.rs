//! One cell: what it was asked with, how far it is, and what still has to be said to whoever waits for it.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use protocol::kernel::{CellEnd, KernelEnd, KernelEvent, KernelRun, frame};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;

/// The way back to the host. What it cannot take yet waits here; how much that may be is bounded by the cell.
pub(super) struct Answer {
    socket: Option<OwnedFd>,
    waiting: VecDeque<Vec<u8>>,
    /// Of the first.
    written: usize,
}

impl Answer {
    pub(super) fn new(socket: OwnedFd) -> Self {
        Self { socket: Some(socket), waiting: VecDeque::new(), written: 0 }
    }

    pub(super) fn say(&mut self, event: &KernelEvent) {
        if self.socket.is_some() {
            self.waiting.push_back(frame(event));
            self.flush();
        }
    }

    /// To be watched while something waits, and the end that says whether anybody still listens.
    pub(super) fn blocked(&self) -> Option<&OwnedFd> {
        self.socket.as_ref().filter(|_| !self.waiting.is_empty())
    }

    /// Nothing waits any longer.
    pub(super) fn is_said(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn flush(&mut self) {
        let Some(socket) = &self.socket else { return };
        while let Some(first) = self.waiting.front() {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(socket, &first[self.written..], flags) {
                Ok(count) => {
                    self.written += count;
                    if self.written == first.len() {
                        self.written = 0;
                        self.waiting.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                // Nobody waits for it any longer. The cell goes on.
                Err(_) => {
                    self.socket = None;
                    self.waiting.clear();
                    return;
                }
            }
        }
    }

    /// Before this process ends.
    pub(super) fn finish(&mut self, end: Instant) {
        while let Some(socket) = self.blocked() {
            let left = end.saturating_duration_since(Instant::now());
            let mut ready = [PollFd::new(socket, PollFlags::OUT)];
            if left.is_zero() || poll(&mut ready, left.try_into().ok().as_ref()) == Ok(0) {
                return;
            }
            self.flush();
        }
    }
}

pub(super) struct Waiting {
    pub(super) answer: Answer,
    pub(super) run: KernelRun,
    pub(super) asked: Instant,
    pub(super) deadline: Option<Instant>,
}

impl Waiting {
    pub(super) fn new(socket: OwnedFd, run: KernelRun) -> Self {
        let asked = Instant::now();
        let deadline = (run.timeout_ms > 0).then(|| crate::exec::after(asked, run.timeout_ms));
        Self { answer: Answer::new(socket), run, asked, deadline }
    }

    /// Its time was up before its turn came.
    pub(super) fn give_up(mut self) -> Answer {
        self.answer.say(&KernelEvent::TimedOut);
        let duration_ms = milliseconds(self.asked.elapsed());
        let end = CellEnd::Finished;
        self.answer.say(&KernelEvent::Ended(KernelEnd {
            end,
            timed_out: true,
            truncated: false,
            duration_ms,
        }));
        self.answer
    }
}

pub(super) struct Running {
    pub(super) answer: Answer,
    /// Of the request; what belongs to another is not ours.
    pub(super) id: String,
    began: Instant,
    pub(super) deadline: Option<Instant>,
    pub(super) answered: Option<Instant>,
    pub(super) idle: Option<Instant>,
    pub(super) leaves: bool,
    has_failed: bool,
    pub(super) timed_out: Option<Instant>,
    pub(super) interrupts: u32,
    left: Left,
    truncated: bool,
}

/// Bytes that may still be told.
struct Left {
    stdout: u64,
    stderr: u64,
    results: u64,
}

impl Running {
    pub(super) fn new(waiting: Waiting, id: String) -> Self {
        let limit = waiting.run.output_limit;
        Self {
            answer: waiting.answer,
            id,
            began: Instant::now(),
            deadline: waiting.deadline,
            answered: None,
            idle: None,
            leaves: false,
            has_failed: false,
            timed_out: None,
            interrupts: 0,
            left: Left { stdout: limit, stderr: limit, results: limit },
            truncated: false,
        }
    }

    pub(super) fn printed(&mut self, is_error: bool, bytes: &[u8]) {
        let left = if is_error { &mut self.left.stderr } else { &mut self.left.stdout };
        let taken = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
        *left -= taken as u64;
        self.truncated |= taken < bytes.len();
        if taken > 0 {
            let bytes = serde_bytes::ByteBuf::from(&bytes[..taken]);
            self.answer.say(&if is_error {
                KernelEvent::Stderr(bytes)
            } else {
                KernelEvent::Stdout(bytes)
            });
        }
    }

    pub(super) fn result(&mut self, forms: Vec<(String, String)>) {
        let size: usize = forms.iter().map(|(kind, data)| kind.len() + data.len()).sum();
        match self.left.results.checked_sub(size as u64) {
            Some(left) if size < protocol::kernel::MAX_EVENT => {
                self.left.results = left;
                if !forms.is_empty() {
                    self.answer.say(&KernelEvent::Result(forms));
                }
            }
            Some(_) | None => self.truncated = true,
        }
    }

    pub(super) fn is_cut(&mut self) {
        self.truncated = true;
    }

    pub(super) fn error(&mut self, name: String, value: String, traceback: String) {
        const LONGEST: usize = 1 << 20;
        let cut = |mut text: String| {
            if text.len() > LONGEST {
                let end = (0..=LONGEST).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
                text.truncate(end);
            }
            text
        };
        self.has_failed = true;
        let traceback = match (traceback.is_empty(), name.is_empty()) {
            (false, _) => traceback,
            (true, false) => format!("{name}: {value}"),
            // A shell's: its exit code.
            (true, true) => value.clone(),
        };
        self.answer.say(&KernelEvent::Error {
            name: cut(name),
            value: cut(value),
            traceback: cut(traceback),
        });
    }

    pub(super) fn failed(&mut self) {
        self.has_failed = true;
    }

    pub(super) fn finish(&mut self) {
        let end = if self.has_failed { CellEnd::Failed } else { CellEnd::Finished };
        self.end(end);
    }

    pub(super) fn end(&mut self, end: CellEnd) {
        self.answer.say(&KernelEvent::Ended(KernelEnd {
            end,
            timed_out: self.timed_out.is_some(),
            truncated: self.truncated,
            duration_ms: milliseconds(self.began.elapsed()),
        }));
    }
}

fn milliseconds(span: Duration) -> u64 {
    u64::try_from(span.as_millis()).unwrap_or(u64::MAX)
}
