//! One stream of the channel: what it was opened for and how far that is.

use std::collections::VecDeque;

use protocol::Request;
use protocol::frame::{Assembler, Channel};

use super::dialed::Dialed;
use crate::exec::Serial;
use crate::exec::output::Position;
use crate::files::acting::Someone;
use crate::files::list::Listing;

use super::content::{Incoming, Outgoing};

pub(crate) struct Stream {
    /// Data that the host still takes.
    pub(crate) credit: usize,
    /// Data consumed here and not yet granted again.
    pub(crate) consumed: u32,
    /// In the queue of those that have something to send.
    pub(crate) is_ready: bool,
    pub(crate) role: Role,
}

pub(crate) enum Role {
    /// The request is not complete.
    Opening {
        assembler: Assembler,
        bytes: usize,
    },
    Watching(Watch),
    /// To a terminal.
    Attached(Serial),
    Reading(Reading),
    Writing(Writing),
    Listing(Listed),
    Dialed(Dialed),
    /// The request waits until everything goes on.
    Deferred(Deferred),
    /// A worker or a later moment has the answer; nothing more is expected from the host.
    Answering,
}

pub(crate) struct Deferred {
    pub(crate) request: Box<Request>,
    /// Of its standard input, what has come meanwhile.
    pub(crate) data: Vec<Vec<u8>>,
    pub(crate) finished: bool,
}

impl Deferred {
    pub(crate) fn is_fed(&self) -> bool {
        matches!(&*self.request, Request::ExecStart(start) if start.has_stdin)
            || matches!(&*self.request, Request::TerminalOpen(_))
    }
}

pub(crate) struct Watch {
    pub(crate) exec: Serial,
    pub(crate) position: Position,
    /// Data on this stream is its standard input.
    pub(crate) feeds: bool,
}

impl Watch {
    pub(crate) fn offset(&mut self, channel: Channel) -> &mut u64 {
        match channel {
            Channel::Stdout => &mut self.position.stdout,
            Channel::Stderr | Channel::Content => &mut self.position.stderr,
        }
    }
}

pub(crate) struct Reading {
    /// `None` while a worker reads.
    pub(crate) reader: Option<Outgoing>,
    pub(crate) frames: VecDeque<Vec<u8>>,
    /// Always, but of what is watched: then something has happened since it was looked at.
    pub(crate) may_have_more: bool,
}

pub(crate) struct Writing {
    pub(crate) state: WriteState,
    pub(crate) inbox: Vec<Vec<u8>>,
    pub(crate) inbox_bytes: usize,
    /// With the worker.
    pub(crate) taken_bytes: usize,
    pub(crate) finished: bool,
}

pub(crate) enum WriteState {
    /// Nothing of it has been begun.
    Asked(Incoming),
    Open(Incoming),
    /// A worker has it.
    Away,
}

pub(crate) struct Listed {
    pub(crate) user: Someone,
    /// `None` while a worker reads, or at the end.
    pub(crate) listing: Option<Listing>,
    pub(crate) batch: Option<(Vec<protocol::message::Entry>, bool)>,
}

impl Stream {
    pub(crate) fn new() -> Self {
        let role = Role::Opening { assembler: Assembler::default(), bytes: 0 };
        Self { credit: protocol::INITIAL_CREDIT as usize, consumed: 0, is_ready: false, role }
    }

    /// Bytes from the host that are held for it.
    pub(crate) fn held_bytes(&self) -> usize {
        match &self.role {
            Role::Opening { bytes, .. } => *bytes,
            Role::Writing(writing) => writing.inbox_bytes + writing.taken_bytes,
            Role::Deferred(deferred) => deferred.data.iter().map(Vec::len).sum(),
            Role::Dialed(dialed) => dialed.inbox_bytes,
            Role::Watching(_)
            | Role::Attached(_)
            | Role::Reading(_)
            | Role::Listing(_)
            | Role::Answering => 0,
        }
    }
}
