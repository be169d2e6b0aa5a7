//! The byte stream to the host: bounded buffers on both sides, nothing that waits.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::frame::{self, Channel, HEADER, Kind, MAX_FRAME};
use protocol::{Reply, hello};
use rustix::io::{Errno, read, write};

/// Two frames and then some; the kernel gives at most 4 KiB at a time anyway.
const INPUT: usize = 128 << 10;
/// Producers of data stop here; what must be said is said nevertheless.
const OUTPUT: usize = 256 << 10;
/// Grants are gathered up to this, a quarter of what a stream begins with.
pub(crate) const GRANT: u32 = protocol::INITIAL_CREDIT / 4;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Filled {
    Bytes,
    /// Wait for the port to be readable.
    Nothing,
    /// Nobody is at the other end (any more, or yet).
    End,
}

/// What has come and is not yet understood.
#[derive(Debug, Default)]
pub(crate) struct Input {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl Input {
    pub(crate) fn fill(&mut self, port: &OwnedFd) -> Result<Filled, Errno> {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INPUT];
        }
        if self.start > 0 && self.bytes.len() - self.end < MAX_FRAME {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        loop {
            return match read(port, &mut self.bytes[self.end..]) {
                Ok(0) => Ok(Filled::End),
                Ok(count) => {
                    self.end += count;
                    Ok(Filled::Bytes)
                }
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Ok(Filled::Nothing),
                Err(Errno::CONNRESET) => Ok(Filled::End),
                Err(error) => Err(error),
            };
        }
    }

    pub(crate) fn is_nearly_full(&self) -> bool {
        self.bytes.len() - self.end < MAX_FRAME
    }

    pub(crate) fn rest(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    pub(crate) fn consume(&mut self, count: usize) {
        self.start += count;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }
}

/// What the host has not yet taken. One write is never longer than a frame, so that the port takes all of it or nothing.
#[derive(Debug, Default)]
pub(crate) struct Output {
    queue: VecDeque<Vec<u8>>,
    /// Of the first in the queue (sockets take parts).
    written: usize,
    bytes: usize,
    /// What is in the queue can wait so long for company.
    held_until: Option<Instant>,
}

impl Output {
    pub(crate) fn has_room(&self) -> bool {
        self.bytes < OUTPUT
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn answer(&mut self, hello: &hello::Hello) {
        self.push(hello::answer(&hello.nonce, protocol::VERSION.min(hello.version)).to_vec());
    }

    pub(crate) fn reply(&mut self, stream: u32, reply: &Reply) {
        let message = protocol::message::encode(reply);
        for piece in pieces(&message) {
            let more = piece.end < message.len();
            self.small(Kind::Reply, stream, more, &message[piece]);
        }
    }

    pub(crate) fn finish(&mut self, stream: u32) {
        self.small(Kind::Finish, stream, false, &[]);
    }

    pub(crate) fn reset(&mut self, stream: u32) {
        self.small(Kind::Reset, stream, false, &[]);
    }

    pub(crate) fn credit(&mut self, stream: u32, bytes: u32) {
        self.small(Kind::Credit, stream, false, &bytes.to_le_bytes());
    }

    /// A frame whose first [`HEADER`] bytes are still to be written, the payload behind them.
    pub(crate) fn data(&mut self, stream: u32, channel: Channel, mut frame: Vec<u8>) {
        let header = frame::encode_header(Kind::Data, channel, stream, false, &frame[HEADER..]);
        frame[..HEADER].copy_from_slice(&header);
        self.push(frame);
    }

    fn small(&mut self, kind: Kind, stream: u32, more: bool, payload: &[u8]) {
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        frame::encode(&mut bytes, kind, Channel::Content, stream, more, payload);
        self.push(bytes);
    }

    /// Like [`Output::reply`], for what the host does not wait for: sent with the next that comes, or after `span`.
    pub(crate) fn reply_with_the_next(&mut self, stream: u32, reply: &Reply, span: Duration) {
        let was_empty = self.is_empty();
        self.reply(stream, reply);
        if was_empty {
            self.held_until = Some(Instant::now() + span);
        }
    }

    pub(crate) fn held_until(&self) -> Option<Instant> {
        self.held_until
    }

    /// Small pieces travel together: each write costs an exit from the virtual machine.
    fn push(&mut self, bytes: Vec<u8>) {
        self.held_until = None;
        self.bytes += bytes.len();
        let is_being_written = self.queue.len() == 1 && self.written > 0;
        match self.queue.back_mut() {
            Some(last) if !is_being_written && last.len() + bytes.len() <= MAX_FRAME => {
                last.extend_from_slice(&bytes)
            }
            Some(_) | None => self.queue.push_back(bytes),
        }
    }

    /// Writes what the port takes now.
    pub(crate) fn flush(&mut self, port: BorrowedFd<'_>) -> Result<(), Errno> {
        if self.held_until.is_some_and(|until| Instant::now() < until) {
            return Ok(());
        }
        self.held_until = None;
        while let Some(first) = self.queue.front() {
            match write(port, &first[self.written..]) {
                Ok(count) => {
                    self.written += count;
                    if self.written == first.len() {
                        self.bytes -= first.len();
                        self.written = 0;
                        self.queue.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(()),
                // Nobody reads any more; the next hello begins anew.
                Err(Errno::PIPE | Errno::CONNRESET) => {
                    self.clear();
                    return Ok(());
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

fn pieces(message: &[u8]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let most = frame::MAX_PAYLOAD;
    let count = message.len().div_ceil(most).max(1);
    (0..count).map(move |at| at * most..message.len().min((at + 1) * most))
}

/// The port as the loop sees it.
#[derive(Debug)]
pub(crate) struct Port {
    pub(crate) descriptor: OwnedFd,
    pub(crate) input: Input,
    pub(crate) output: Output,
}

impl Port {
    pub(crate) fn new(descriptor: OwnedFd) -> Result<Self, Errno> {
        rustix::io::ioctl_fionbio(&descriptor, true)?;
        Ok(Self { descriptor, input: Input::default(), output: Output::default() })
    }

    pub(crate) fn flush(&mut self) -> Result<(), Errno> {
        self.output.flush(self.descriptor.as_fd())
    }
}
