//! Standard input of execs: queued here, written as the pipe takes it, granted again as it is written.

use std::os::fd::OwnedFd;

use rustix::event::epoll;
use rustix::io::Errno;

use super::stream::Role;
use super::{Server, Source};
use crate::exec::{Serial, Stdin};

impl Server {
    pub(crate) fn stdin_bytes(&self) -> usize {
        self.execs.all().filter_map(|(_, exec)| exec.stdin.as_ref()).map(|stdin| stdin.bytes).sum()
    }

    pub(crate) fn take_stdin(&mut self, serial: Serial, bytes: &[u8]) {
        if let Some(stdin) = self.execs.get_mut(serial).and_then(|exec| exec.stdin.as_mut()) {
            stdin.bytes += bytes.len();
            stdin.queue.push_back(bytes.to_vec());
            self.feed_stdin(serial);
        } else {
            // It reads no longer: what is meant for it is consumed all the same.
            let feeding = self.streams.iter().find(|(_, stream)| {
                matches!(&stream.role, Role::Watching(watch) if watch.exec == serial && watch.feeds)
            });
            if let Some(stream) = feeding.map(|(&stream, _)| stream) {
                self.grant(stream, bytes.len());
            }
        }
    }

    pub(crate) fn finish_stdin(&mut self, serial: Serial) {
        if let Some(stdin) = self.execs.get_mut(serial).and_then(|exec| exec.stdin.as_mut()) {
            stdin.finished = true;
            self.feed_stdin(serial);
        }
    }

    pub(crate) fn close_stdin(&mut self, serial: Serial) {
        let Some(stdin) = self.execs.get_mut(serial).and_then(|exec| exec.stdin.take()) else {
            return;
        };
        if stdin.polled {
            let _ = epoll::delete(&self.poll, &stdin.pipe);
        }
        if let Some(stream) = stdin.stream {
            self.grant(stream, stdin.bytes);
        }
    }

    /// Writes what the pipe takes.
    pub(crate) fn feed_stdin(&mut self, serial: Serial) {
        let Some(exec) = self.execs.get_mut(serial).filter(|exec| exec.pid != 0) else { return };
        let Some(stdin) = &mut exec.stdin else { return };
        let (mut consumed, stream) = (0, stdin.stream);
        let goes_on = loop {
            let Some(first) = stdin.queue.front() else { break !stdin.finished };
            match rustix::io::write(&stdin.pipe, &first[stdin.written..]) {
                Ok(count) => {
                    stdin.written += count;
                    stdin.bytes -= count;
                    consumed += count;
                    if stdin.written == first.len() {
                        stdin.written = 0;
                        stdin.queue.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break true,
                // It does not read to the end; that is its right.
                Err(_) => break false,
            }
        };
        if goes_on && !stdin.polled {
            // By edges: while the queue is empty an empty pipe is no news.
            let events = epoll::EventFlags::OUT | epoll::EventFlags::ET;
            stdin.polled =
                epoll::add(&self.poll, &stdin.pipe, Source::Stdin.event(serial), events).is_ok();
        }
        if let Some(stream) = stream {
            self.grant(stream, consumed);
        }
        if !goes_on {
            self.close_stdin(serial);
        }
    }
}

impl Stdin {
    pub(crate) fn new(pipe: OwnedFd, stream: u32) -> Self {
        Self {
            pipe,
            queue: std::collections::VecDeque::new(),
            written: 0,
            bytes: 0,
            finished: false,
            stream: Some(stream),
            polled: false,
        }
    }
}
