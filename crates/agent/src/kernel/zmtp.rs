//! ZeroMQ's wire protocol (ZMTP 3.0, RFC 23) as far as a client of a kernel needs it: DEALER and SUB sockets, no
//! authentication, over Unix sockets in a directory that only root may enter.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::RecvFlags;

/// A kernel's library answers from a thread of its own, however busy the kernel is.
const PATIENCE: Duration = Duration::from_secs(20);
/// A longer part of a message is thrown away as it comes.
const LONGEST_PART: u64 = 64 << 20;
const READ: usize = 64 << 10;
const GREETING: usize = 64;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Dealer,
    Subscriber,
}

/// The parts of one message. `None`: one of them was too long.
pub(super) type Message = Option<Vec<Vec<u8>>>;

#[derive(Debug)]
pub(super) struct Connection {
    socket: UnixStream,
    input: Vec<u8>,
    start: usize,
    parts: Vec<Vec<u8>>,
    is_damaged: bool,
    /// Of a part that is too long: still to come, and whether others follow it.
    skipping: Option<(u64, bool)>,
}

enum Frame {
    Incomplete,
    Command,
    Part { is_last: bool },
}

impl Connection {
    pub(super) fn connect(path: &Path, kind: Kind) -> anyhow::Result<Self> {
        let socket = UnixStream::connect(path).context("connect to the kernel")?;
        socket.set_write_timeout(Some(PATIENCE)).context("bound the waits for the kernel")?;
        Self::greet(socket, kind)
    }

    fn greet(socket: UnixStream, kind: Kind) -> anyhow::Result<Self> {
        let mut connection = Self {
            socket,
            input: Vec::new(),
            start: 0,
            parts: Vec::new(),
            is_damaged: false,
            skipping: None,
        };
        let mut greeting = [0; GREETING];
        greeting[0] = 0xff;
        greeting[9] = 0x7f;
        greeting[10] = 3;
        greeting[12..16].copy_from_slice(b"NULL");
        connection.write(&greeting)?;
        let end = Instant::now() + PATIENCE;
        while connection.input.len() < GREETING {
            connection.wait(end)?;
        }
        if connection.input[0] != 0xff || connection.input[10] < 3 {
            bail!("the kernel speaks another protocol");
        }
        connection.start = GREETING;
        let name: &[u8] = match kind {
            Kind::Dealer => b"DEALER",
            Kind::Subscriber => b"SUB",
        };
        let mut ready = b"\x05READY".to_vec();
        for (property, value) in [(&b"Socket-Type"[..], name), (b"Identity", b"")] {
            ready.push(u8::try_from(property.len()).unwrap_or(0));
            ready.extend_from_slice(property);
            ready.extend_from_slice(&u32::try_from(value.len()).unwrap_or(0).to_be_bytes());
            ready.extend_from_slice(value);
        }
        connection.write_frame(COMMAND, &ready)?;
        loop {
            match connection.frame() {
                Frame::Incomplete => connection.wait(end)?,
                Frame::Command => break,
                Frame::Part { .. } => bail!("the kernel began without a handshake"),
            }
        }
        if kind == Kind::Subscriber {
            // To everything.
            connection.write_frame(0, b"\x01")?;
        }
        Ok(connection)
    }

    fn wait(&mut self, end: Instant) -> anyhow::Result<()> {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            bail!("the kernel does not answer");
        }
        let mut ready = [PollFd::new(&self.socket, PollFlags::IN)];
        let _ = poll(&mut ready, left.try_into().ok().as_ref());
        if !self.fill()? {
            bail!("the kernel has closed its socket");
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> anyhow::Result<()> {
        self.socket.write_all(bytes).context("send to the kernel")
    }

    fn write_frame(&mut self, flags: u8, body: &[u8]) -> anyhow::Result<()> {
        let mut frame = Vec::with_capacity(body.len() + 9);
        match u8::try_from(body.len()) {
            Ok(length) => frame.extend_from_slice(&[flags, length]),
            Err(_) => {
                frame.push(flags | LONG);
                frame.extend_from_slice(&(body.len() as u64).to_be_bytes());
            }
        }
        frame.extend_from_slice(body);
        self.write(&frame)
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) -> anyhow::Result<()> {
        for (at, part) in parts.iter().enumerate() {
            self.write_frame(if at + 1 < parts.len() { MORE } else { 0 }, part)?;
        }
        Ok(())
    }

    /// Takes what is there; false: there is nothing, and the other end is closed.
    pub(super) fn fill(&mut self) -> anyhow::Result<bool> {
        self.input.drain(..std::mem::take(&mut self.start));
        let before = self.input.len();
        loop {
            let length = self.input.len();
            self.input.resize(length + READ, 0);
            let read =
                rustix::net::recv(&self.socket, &mut self.input[length..], RecvFlags::DONTWAIT);
            let count = read.as_ref().map_or(0, |(_, count)| *count);
            self.input.truncate(length + count);
            match read {
                Ok((_, 0)) => return Ok(length > before),
                Ok(_) if self.input.len() < READ * 16 => {}
                Ok(_) | Err(Errno::AGAIN) => return Ok(true),
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Ok(length > before),
                Err(error) => return Err(error).context("read from the kernel"),
            }
        }
    }

    /// The next whole message of what was taken.
    pub(super) fn next(&mut self) -> Option<Message> {
        loop {
            match self.frame() {
                Frame::Incomplete => return None,
                // Heartbeats are not asked for, and nothing else matters here.
                Frame::Command | Frame::Part { is_last: false } => {}
                Frame::Part { is_last: true } => {
                    let parts = std::mem::take(&mut self.parts);
                    let is_whole = !std::mem::take(&mut self.is_damaged);
                    return Some(is_whole.then_some(parts));
                }
            }
        }
    }

    fn frame(&mut self) -> Frame {
        if let Some((left, is_last)) = self.skipping {
            let there = (self.input.len() - self.start) as u64;
            let skipped = left.min(there);
            self.start += usize::try_from(skipped).unwrap_or(0);
            self.skipping = (skipped < left).then_some((left - skipped, is_last));
            return if self.skipping.is_some() {
                Frame::Incomplete
            } else {
                Frame::Part { is_last }
            };
        }
        let rest = &self.input[self.start..];
        let Some((&flags, rest)) = rest.split_first() else { return Frame::Incomplete };
        let (length, header) = if flags & LONG == 0 {
            let Some(&length) = rest.first() else { return Frame::Incomplete };
            (u64::from(length), 2)
        } else {
            let Some(length) = rest.first_chunk::<8>() else { return Frame::Incomplete };
            (u64::from_be_bytes(*length), 9)
        };
        let is_last = flags & MORE == 0;
        if length > LONGEST_PART {
            self.start += header;
            self.skipping = Some((length, is_last));
            self.is_damaged = true;
            return self.frame();
        }
        let end = header + usize::try_from(length).unwrap_or(usize::MAX);
        let Some(body) = self.input[self.start..].get(header..end) else {
            return Frame::Incomplete;
        };
        let is_command = flags & COMMAND != 0;
        if !is_command {
            self.parts.push(body.to_vec());
        }
        self.start += end;
        if is_command { Frame::Command } else { Frame::Part { is_last } }
    }
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// A peer that greets, and then says `said`.
    fn connected(kind: Kind, said: Vec<u8>) -> (Connection, std::thread::JoinHandle<Vec<u8>>) {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let peer = std::thread::spawn(move || {
            let mut greeting = [0; GREETING];
            theirs.read_exact(&mut greeting).unwrap();
            theirs.write_all(&greeting).unwrap();
            theirs.write_all(b"\x04\x06\x05READY").unwrap();
            theirs.write_all(&said).unwrap();
            theirs.shutdown(std::net::Shutdown::Write).unwrap();
            let mut heard = Vec::new();
            theirs.read_to_end(&mut heard).unwrap();
            heard
        });
        (Connection::greet(ours, kind).unwrap(), peer)
    }

    fn all(mut connection: Connection) -> Vec<Message> {
        let mut messages = Vec::new();
        let end = Instant::now() + PATIENCE;
        while connection.wait(end).is_ok() {
            messages.extend(std::iter::from_fn(|| connection.next()));
        }
        messages.extend(std::iter::from_fn(|| connection.next()));
        messages
    }

    #[test]
    fn a_client_says_what_the_protocol_wants() {
        let (mut connection, peer) = connected(Kind::Subscriber, Vec::new());
        connection.send(&[b"a", &[b'b'; 300]]).unwrap();
        drop(connection);
        let mut expected =
            b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03SUB\x08Identity\0\0\0\0".to_vec();
        expected.extend_from_slice(b"\0\x01\x01");
        expected.extend_from_slice(b"\x01\x01a\x02\0\0\0\0\0\0\x01\x2c");
        expected.extend_from_slice(&[b'b'; 300]);
        assert_eq!(peer.join().unwrap(), expected);
    }

    #[test]
    fn messages_are_whole_and_commands_between_them_do_not_matter() {
        let said = b"\x01\x01a\x04\x05\x04PING\x00\x02bc\x00\x00".to_vec();
        let (connection, peer) = connected(Kind::Dealer, said);
        let messages = all(connection);
        assert_eq!(messages, [Some(vec![b"a".to_vec(), b"bc".to_vec()]), Some(vec![Vec::new()])]);
        peer.join().unwrap();
    }

    #[test]
    fn a_part_that_is_too_long_costs_its_message_and_no_memory() {
        let mut said = b"\x01\x01a\x02".to_vec();
        said.extend_from_slice(&(LONGEST_PART + 1).to_be_bytes());
        said.resize(said.len() + usize::try_from(LONGEST_PART).unwrap() + 1, b'x');
        said.extend_from_slice(b"\x00\x01b");
        let (connection, peer) = connected(Kind::Dealer, said);
        assert_eq!(all(connection), [None, Some(vec![b"b".to_vec()])]);
        peer.join().unwrap();
    }
}
