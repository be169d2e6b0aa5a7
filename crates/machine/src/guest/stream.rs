//! One stream: what of it waits here, and how fast each side may go on.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use protocol::files::FilesReply;
use protocol::frame::{self, Assembler, Channel, Header, Kind, MAX_PAYLOAD};
use protocol::message::{self, Failure, Reply, Request};
use tokio::sync::Notify;

use super::connection::{Budget, Connection, Outgoing, Place};
use crate::error::{Error, Result};
use crate::text::plain;

/// Consumed data is granted anew in such portions.
const GRANT: u32 = protocol::INITIAL_CREDIT / 4;
/// Smaller payloads are copied: a slice would keep the whole buffer alive that it was read into.
const SLICED: usize = 16 * 1024;
/// Replies are not subject to credit, so what may wait of them is limited here: bytes, and pieces of any kind.
const WAITING_REPLIES: usize = 4 * protocol::MAX_MESSAGE;
const WAITING_PIECES: usize = 64 * 1024;
/// What a piece costs beside its bytes.
const PIECE: usize = 64;
/// The reason of a failure is passed on to people, and into the log.
const LONGEST_REASON: usize = 1024;

/// What comes on a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    Reply(Reply),
    Data(Channel, Bytes),
    /// Nothing more comes.
    Finished,
}

/// Dropping it resets the stream, if it is not over.
#[derive(Debug)]
pub struct Stream {
    id: u32,
    connection: Arc<Connection>,
    state: Arc<StreamState>,
    place: Place,
}

/// Shared with the connection's reader.
#[derive(Debug)]
pub(super) struct StreamState {
    inner: Mutex<Inner>,
    arrived: Notify,
    may_send: Notify,
}

#[derive(Debug)]
struct Inner {
    waiting: VecDeque<Piece>,
    waiting_replies: usize,
    waiting_data: usize,
    assembler: Assembler,
    /// Of a reply that is not whole yet.
    partial: usize,
    /// Of the connection, and how much of it this stream has taken.
    budget: Arc<Budget>,
    taken: usize,
    /// Bytes of data the agent may still send, and those consumed for which it has not been granted new ones.
    allowed: u32,
    consumed: u32,
    /// Bytes of data we may send.
    credit: u64,
    finish_sent: bool,
    end: Option<End>,
    /// The consumer knows of the end.
    end_told: bool,
    /// The agent has given the whole answer and knows nothing of this stream any longer.
    answered: bool,
    /// Each side ends for itself: what the agent still takes does not end with what it says.
    two_way: bool,
    takes_no_more: bool,
}

#[derive(Debug)]
enum Piece {
    /// Encoded: that is many times smaller than what a hostile reply decodes to.
    Reply(Vec<u8>),
    Data(Channel, Bytes),
    /// Grows while more of the same kind comes.
    Small(Channel, BytesMut),
}

/// Why nothing more comes.
#[derive(Debug, Clone)]
pub(super) enum End {
    Finished,
    Failed(Failure),
    Reset,
    Misbehaved(&'static str),
    /// All streams together hold more than their connection may.
    Crowded,
    Lost,
}

impl End {
    /// `None`: not a failure.
    fn error(&self) -> Option<Error> {
        match self {
            Self::Finished => None,
            Self::Failed(failure) => Some(Error::Refused(failure.clone())),
            Self::Reset => Some(Error::Reset),
            Self::Misbehaved(how) => Some(Error::Misbehaved(how)),
            Self::Crowded => Some(Error::Busy),
            Self::Lost => Some(Error::Lost),
        }
    }

    fn failed(mut failure: Failure) -> Self {
        failure.message = plain(&failure.message, LONGEST_REASON);
        Self::Failed(failure)
    }
}

impl Inner {
    fn new(budget: Arc<Budget>) -> Self {
        Self {
            waiting: VecDeque::new(),
            waiting_replies: 0,
            waiting_data: 0,
            assembler: Assembler::default(),
            partial: 0,
            budget,
            taken: 0,
            allowed: protocol::INITIAL_CREDIT,
            consumed: 0,
            credit: u64::from(protocol::INITIAL_CREDIT),
            finish_sent: false,
            end: None,
            end_told: false,
            answered: false,
            two_way: false,
            takes_no_more: false,
        }
    }
}

impl StreamState {
    pub(super) fn new(budget: Arc<Budget>) -> Self {
        let inner = Mutex::new(Inner::new(budget));
        Self { inner, arrived: Notify::new(), may_send: Notify::new() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.arrived.notify_waiters();
        self.may_send.notify_waiters();
    }

    pub(super) fn end(&self, end: End) {
        self.inner().end.get_or_insert(end);
        self.wake();
    }

    /// One frame from the agent. Never waits.
    pub(super) fn receive(&self, header: &Header, payload: BytesMut) {
        {
            let mut inner = self.inner();
            let outcome = inner.receive(header, payload);
            let outcome = outcome.and_then(|()| match inner.settle() {
                true => Ok(()),
                false => Err(End::Crowded),
            });
            if let Err(end) = outcome {
                inner.clear();
                inner.end = Some(end);
            }
        }
        self.wake();
    }
}

impl Inner {
    /// Tells the connection how much waits here now; false when that is too much for all streams together.
    fn settle(&mut self) -> bool {
        let waits = self.waiting_replies + self.waiting_data + self.partial;
        let now = waits + self.waiting.len() * PIECE;
        let before = std::mem::replace(&mut self.taken, now);
        self.budget.change(before, now)
    }

    fn clear(&mut self) {
        self.waiting = VecDeque::new();
        self.assembler = Assembler::default();
        (self.waiting_replies, self.waiting_data, self.partial) = (0, 0, 0);
        self.settle();
    }

    fn receive(&mut self, header: &Header, payload: BytesMut) -> std::result::Result<(), End> {
        match self.end {
            // It still takes what we send, and may give up.
            Some(End::Finished) if self.two_way => match header.kind {
                Kind::Credit => {}
                Kind::Reset => {
                    self.takes_no_more = true;
                    return Ok(());
                }
                Kind::Hello | Kind::Request | Kind::Reply | Kind::Data | Kind::Finish => {
                    return Ok(());
                }
            },
            Some(_) => return Ok(()),
            None => {}
        }
        match header.kind {
            Kind::Data => self.receive_data(header.channel, payload)?,
            Kind::Reply => {
                let frame = frame::Frame { header: *header, payload: &payload };
                self.partial = if header.more { self.partial + payload.len() } else { 0 };
                let whole = self
                    .assembler
                    .push(&frame)
                    .map_err(|_| End::Misbehaved("a reply without end"))?;
                if let Some(reply) = whole {
                    self.waiting_replies += reply.len();
                    self.waiting.push_back(Piece::Reply(reply));
                }
            }
            Kind::Finish => self.end = Some(End::Finished),
            Kind::Credit => {
                let grant = payload[..].try_into().map(u32::from_le_bytes);
                let grant = grant.map_err(|_| End::Misbehaved("a credit of the wrong length"))?;
                self.credit = self.credit.saturating_add(u64::from(grant));
            }
            Kind::Reset => self.end = Some(End::Reset),
            // The connection has refused them.
            Kind::Hello | Kind::Request => {}
        }
        if self.waiting_replies > WAITING_REPLIES || self.waiting.len() > WAITING_PIECES {
            return Err(End::Misbehaved("more replies than can wait"));
        }
        Ok(())
    }

    fn receive_data(
        &mut self,
        channel: Channel,
        payload: BytesMut,
    ) -> std::result::Result<(), End> {
        let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        self.allowed = self
            .allowed
            .checked_sub(length)
            .ok_or(End::Misbehaved("more data than it was granted"))?;
        self.waiting_data += payload.len();
        if payload.len() >= SLICED {
            self.waiting.push_back(Piece::Data(channel, payload.freeze()));
            return Ok(());
        }
        match self.waiting.back_mut() {
            Some(Piece::Small(last, bytes))
                if *last == channel && bytes.len() + payload.len() <= MAX_PAYLOAD =>
            {
                bytes.extend_from_slice(&payload);
            }
            _ if payload.is_empty() => {}
            _ => self.waiting.push_back(Piece::Small(channel, BytesMut::from(&payload[..]))),
        }
        Ok(())
    }

    /// Data was taken away: the grant that is due, if any.
    fn consume(&mut self, bytes: &Bytes) -> Option<u32> {
        self.consumed =
            self.consumed.saturating_add(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        if self.consumed < GRANT || self.end.is_some() {
            return None;
        }
        self.allowed = self.allowed.saturating_add(self.consumed);
        Some(std::mem::take(&mut self.consumed))
    }

    /// Why sending is pointless.
    fn refusal(&self) -> Option<Error> {
        if self.finish_sent || self.takes_no_more {
            return Some(Error::Reset);
        }
        match &self.end {
            Some(End::Finished) if self.two_way => {}
            Some(end) => return Some(end.error().unwrap_or(Error::Reset)),
            None => {}
        }
        let Some(Piece::Reply(reply)) = self.waiting.front() else { return None };
        match message::decode(reply) {
            Ok(Reply::Failed(failure)) => End::failed(failure).error(),
            Ok(_) | Err(_) => None,
        }
    }
}

impl Stream {
    pub(super) fn open(connection: &Arc<Connection>, request: &Request) -> Result<Self> {
        let (speaks, needs) = (connection.version(), request.since());
        if speaks < needs {
            return Err(Error::OldAgent { speaks, needs });
        }
        let two_way = matches!(request, Request::Dial { .. });
        let request = message::encode(request);
        if request.len() > protocol::MAX_MESSAGE {
            return Err(Error::Unfit(format!(
                "a request is limited to {} bytes",
                protocol::MAX_MESSAGE
            )));
        }
        let (id, state, place) = connection.admit()?;
        state.inner().two_way = two_way;
        let mut head = Vec::with_capacity(request.len() + frame::HEADER);
        frame::encode_message(&mut head, Kind::Request, id, &request);
        let stream = Self { id, connection: connection.clone(), state, place };
        stream.send_small(head)?;
        Ok(stream)
    }

    /// The next event; `None` after [`Event::Finished`] or an error. Cancel safe.
    pub async fn next(&self) -> Option<Result<Event>> {
        loop {
            let arrived = self.state.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            match self.take() {
                Taken::Event(event) => return Some(event),
                Taken::Nothing => arrived.await,
                Taken::End => return None,
            }
        }
    }

    fn take(&self) -> Taken {
        let mut inner = self.state.inner();
        let (channel, bytes) = match inner.waiting.pop_front() {
            Some(Piece::Data(channel, bytes)) => (channel, bytes),
            Some(Piece::Small(channel, bytes)) => (channel, bytes.freeze()),
            Some(Piece::Reply(reply)) => {
                inner.waiting_replies -= reply.len();
                inner.settle();
                let end = match message::decode(&reply) {
                    Ok(Reply::Failed(failure)) => End::failed(failure),
                    Ok(reply) => {
                        inner.answered |= is_whole_answer(&reply);
                        return Taken::Event(Ok(Event::Reply(reply)));
                    }
                    Err(_) => End::Misbehaved("a reply that cannot be read"),
                };
                inner.clear();
                inner.end = Some(end);
                return Taken::of_end(&mut inner);
            }
            None => return Taken::of_end(&mut inner),
        };
        inner.waiting_data -= bytes.len();
        inner.settle();
        let grant = inner.consume(&bytes);
        drop(inner);
        if let Some(grant) = grant {
            let mut head = Vec::with_capacity(frame::HEADER + 4);
            frame::encode(
                &mut head,
                Kind::Credit,
                Channel::Content,
                self.id,
                false,
                &grant.to_le_bytes(),
            );
            // A lost connection is noticed when the queue is empty.
            let _ = self.send_small(head);
        }
        Taken::Event(Ok(Event::Data(channel, bytes)))
    }

    /// Sends data, as fast as the agent takes it.
    ///
    /// # Errors
    /// What the agent said instead of taking it, or that it is gone.
    pub async fn send(&self, mut bytes: Bytes) -> Result<()> {
        while !bytes.is_empty() {
            let may_send = self.state.may_send.notified();
            tokio::pin!(may_send);
            may_send.as_mut().enable();
            let length = {
                let mut inner = self.state.inner();
                if let Some(error) = inner.refusal() {
                    return Err(error);
                }
                let length = bytes
                    .len()
                    .min(MAX_PAYLOAD)
                    .min(usize::try_from(inner.credit).unwrap_or(usize::MAX));
                inner.credit -= length as u64;
                length
            };
            if length == 0 {
                may_send.await;
                continue;
            }
            let payload = bytes.split_to(length);
            let head = frame::encode_header(Kind::Data, Channel::Content, self.id, false, &payload);
            let head = Bytes::copy_from_slice(&head);
            self.connection
                .send_bulk(Outgoing { head, payload, place: self.place.clone() })
                .await?;
        }
        Ok(())
    }

    /// Says that no more data will be sent.
    ///
    /// # Errors
    /// As [`Stream::send`].
    pub async fn finish(&self) -> Result<()> {
        {
            let mut inner = self.state.inner();
            if let Some(error) = inner.refusal() {
                return Err(error);
            }
            inner.finish_sent = true;
        }
        let mut head = Vec::with_capacity(frame::HEADER);
        frame::encode(&mut head, Kind::Finish, Channel::Content, self.id, false, &[]);
        // Behind the data.
        let outgoing =
            Outgoing { head: head.into(), payload: Bytes::new(), place: self.place.clone() };
        self.connection.send_bulk(outgoing).await
    }

    fn send_small(&self, head: Vec<u8>) -> Result<()> {
        self.connection.send_small(Outgoing {
            head: head.into(),
            payload: Bytes::new(),
            place: self.place.clone(),
        })
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.budget.change(self.taken, 0);
    }
}

/// Nothing follows these, so a reset would only wake the guest once more.
fn is_whole_answer(reply: &Reply) -> bool {
    match reply {
        Reply::Done
        | Reply::Failed(_)
        | Reply::ExecStatus(_)
        | Reply::Execs(_)
        | Reply::Listeners(_)
        | Reply::Written { .. }
        | Reply::Kernels(_)
        | Reply::Terminals(_)
        | Reply::Files(
            FilesReply::Unpacked { .. }
            | FilesReply::Upload(_)
            | FilesReply::Uploads(_)
            | FilesReply::Entry(_),
        ) => true,
        Reply::Files(FilesReply::Packing | FilesReply::Watching)
        | Reply::ExecStarted { .. }
        | Reply::ExecEnded(_)
        | Reply::File(_)
        | Reply::Connected
        | Reply::Entries(_)
        | Reply::TerminalAttached { .. }
        | Reply::TerminalEnded { .. } => false,
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.connection.forget(self.id);
        let is_over = {
            let inner = self.state.inner();
            let is_over = match inner.end {
                Some(End::Finished) => !inner.two_way || inner.finish_sent || inner.takes_no_more,
                Some(End::Failed(_) | End::Reset | End::Lost) => true,
                Some(End::Misbehaved(_) | End::Crowded) | None => false,
            };
            is_over || inner.answered
        };
        if !is_over {
            let mut head = Vec::with_capacity(frame::HEADER);
            frame::encode(&mut head, Kind::Reset, Channel::Content, self.id, false, &[]);
            // A lost connection has no streams to reset.
            let _ = self.send_small(head);
        }
    }
}

enum Taken {
    Event(Result<Event>),
    Nothing,
    End,
}

impl Taken {
    fn of_end(inner: &mut Inner) -> Self {
        match &inner.end {
            None => Self::Nothing,
            Some(_) if inner.end_told => Self::End,
            Some(end) => {
                inner.end_told = true;
                Self::Event(end.error().map_or(Ok(Event::Finished), Err))
            }
        }
    }
}
