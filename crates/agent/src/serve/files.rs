//! Streams about files: each has at most one job with the workers, and asks for the next when the host takes what the
//! last one gave.

use std::collections::VecDeque;

use protocol::Reply;
use protocol::frame::{Channel, HEADER};
use protocol::message::{Entry, Failure, FileRead, FileWrite};
use rustix::event::epoll;

use super::content::{Incoming, Outgoing, Taken};
use super::stream::{Listed, Reading, Role, WriteState, Writing};
use super::{Done, Server, Source};
use crate::failure::failed;
use crate::files::acting::{Someone, acting_as};
use crate::files::list::Listing;
use crate::files::{delete, list, read};

/// While fewer frames than this are at hand, a worker reads ahead.
const AHEAD: usize = 6;

pub(crate) enum FileResult {
    Answer(Result<Reply, Failure>),
    Opened(Result<(Reply, Outgoing, Vec<Vec<u8>>), Failure>),
    Read(Result<(Outgoing, Vec<Vec<u8>>), Failure>),
    Written(Result<Taken, Failure>),
    Listed(Result<(Listing, Vec<Entry>, bool), Failure>),
}

impl Server {
    pub(crate) fn submit(&self, stream: u32, work: impl FnOnce() -> FileResult + Send + 'static) {
        let epoch = self.epoch;
        self.workers.submit(move || Done::File { epoch, stream, result: work() });
    }

    pub(crate) fn read_file(&mut self, stream: u32, user: Someone, request: FileRead) {
        self.submit(stream, move || {
            FileResult::Opened(acting_as(user.as_deref(), || {
                let (head, mut reader) = read::open(&request)?;
                let frames = reader.next_frames()?;
                Ok((Reply::File(head), Outgoing::File(reader), frames))
            }))
        });
    }

    pub(crate) fn delete_file(&mut self, stream: u32, user: Someone, path: Vec<u8>) {
        self.submit(stream, move || {
            let deleted = acting_as(user.as_deref(), || delete::delete(&path));
            FileResult::Answer(deleted.map(|()| Reply::Done))
        });
    }

    pub(crate) fn stat_file(&mut self, stream: u32, user: Someone, path: Vec<u8>) {
        self.submit(stream, move || {
            let found = acting_as(user.as_deref(), || list::stat(&path));
            FileResult::Answer(found.map(|entry| Reply::Entries(vec![entry])))
        });
    }

    pub(crate) fn list_directory(&mut self, stream: u32, user: Someone, path: Vec<u8>, depth: u32) {
        if let Some(found) = self.streams.get_mut(&stream) {
            let user = user.clone();
            found.role = Role::Listing(Listed { user, listing: None, batch: None });
        }
        self.submit(stream, move || {
            FileResult::Listed(acting_as(user.as_deref(), || {
                let mut listing = Listing::begin(&path, depth)?;
                let (batch, at_end) = listing.next_batch()?;
                Ok((listing, batch, at_end))
            }))
        });
    }

    pub(crate) fn write_file(&mut self, stream: u32, user: Someone, request: FileWrite) {
        self.take_in(stream, Incoming::FileAsked(Box::new(request), user));
    }

    /// Content from the host begins to come.
    pub(crate) fn take_in(&mut self, stream: u32, incoming: Incoming) {
        if let Some(found) = self.streams.get_mut(&stream) {
            let state = WriteState::Asked(incoming);
            found.role = Role::Writing(Writing {
                state,
                inbox: Vec::new(),
                inbox_bytes: 0,
                taken_bytes: 0,
                finished: false,
            });
            self.fed.push(stream);
        }
    }

    /// Gives the worker what has come since the last time; small files are opened, written and finished in one go.
    pub(crate) fn drive_write(&mut self, stream: u32) {
        if !self.phase.is_running() {
            // Driven again afterwards.
            return;
        }
        let Some(found) = self.streams.get_mut(&stream) else { return };
        let Role::Writing(writing) = &mut found.role else { return };
        let incoming = match std::mem::replace(&mut writing.state, WriteState::Away) {
            WriteState::Away => return,
            WriteState::Open(incoming) if writing.inbox.is_empty() && !writing.finished => {
                writing.state = WriteState::Open(incoming);
                return;
            }
            WriteState::Asked(incoming) | WriteState::Open(incoming) => incoming,
        };
        let pieces = std::mem::take(&mut writing.inbox);
        writing.taken_bytes = std::mem::take(&mut writing.inbox_bytes);
        let finished = writing.finished;
        self.submit(stream, move || FileResult::Written(incoming.take(&pieces, finished)));
    }

    pub(crate) fn file_is_done(&mut self, stream: u32, result: FileResult) {
        if !self.streams.contains_key(&stream) {
            self.discard(result);
            return;
        }
        match result {
            FileResult::Answer(result) => self.end_with(stream, result),
            FileResult::Opened(Err(failure))
            | FileResult::Read(Err(failure))
            | FileResult::Written(Err(failure))
            | FileResult::Listed(Err(failure)) => self.end_with(stream, Err(failure)),
            FileResult::Opened(Ok((reply, outgoing, frames))) => {
                if let Outgoing::Watch(watcher, _) = &outgoing {
                    let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
                    let event = Source::Watched.event(stream);
                    if let Err(error) = epoll::add(&self.poll, watcher.queue(), event, edges) {
                        self.end_with(stream, Err(failed("watch", b"files", error)));
                        return;
                    }
                }
                self.port.output.reply(stream, &reply);
                self.got_frames(stream, outgoing, frames.into());
            }
            FileResult::Read(Ok((reader, frames))) => {
                self.got_frames(stream, reader, frames.into())
            }
            FileResult::Written(Ok(Taken::All(reply))) => self.end_with(stream, Ok(reply)),
            FileResult::Written(Ok(Taken::Part(incoming))) => {
                let mut consumed = 0;
                if let Some(found) = self.streams.get_mut(&stream)
                    && let Role::Writing(writing) = &mut found.role
                {
                    writing.state = WriteState::Open(incoming);
                    consumed = std::mem::take(&mut writing.taken_bytes);
                }
                self.grant(stream, consumed);
                self.drive_write(stream);
            }
            FileResult::Listed(Ok((listing, batch, at_end))) => {
                if let Some(found) = self.streams.get_mut(&stream)
                    && let Role::Listing(listed) = &mut found.role
                {
                    listed.listing = Some(listing);
                    listed.batch = Some((batch, at_end));
                    self.has_something(stream);
                }
            }
        }
    }

    fn got_frames(&mut self, stream: u32, reader: Outgoing, mut frames: VecDeque<Vec<u8>>) {
        if let Some(found) = self.streams.get_mut(&stream) {
            if let Role::Reading(reading) = &mut found.role {
                reading.may_have_more |= !frames.is_empty();
                reading.frames.append(&mut frames);
                reading.reader = Some(reader);
            } else {
                let reader = Some(reader);
                found.role = Role::Reading(Reading { reader, frames, may_have_more: true });
            }
            self.has_something(stream);
        }
    }

    /// The next frame of a file; whether there may be another at once.
    pub(crate) fn produce_content(&mut self, stream: u32) -> bool {
        let Some(found) = self.streams.get_mut(&stream) else { return false };
        let Role::Reading(reading) = &mut found.role else { return false };
        let mut sent = false;
        if reading.frames.front().is_some_and(|frame| frame.len() - HEADER <= found.credit)
            && let Some(frame) = reading.frames.pop_front()
        {
            found.credit -= frame.len() - HEADER;
            self.port.output.data(stream, Channel::Content, frame);
            sent = true;
        }
        if reading.frames.len() < AHEAD
            && reading.may_have_more
            && let Some(mut reader) = reading.reader.take_if(|reader| !reader.is_at_end())
        {
            reading.may_have_more = !matches!(reader, Outgoing::Watch(..));
            self.submit(stream, move || {
                FileResult::Read(reader.next_frames().map(|frames| (reader, frames)))
            });
            return sent;
        }
        if reading.frames.is_empty() && reading.reader.as_ref().is_some_and(Outgoing::is_at_end) {
            self.end_with_finish(stream);
            return false;
        }
        sent
    }

    /// The next batch of a directory. Replies need no credit, so the next is only read when this one has gone.
    pub(crate) fn produce_entries(&mut self, stream: u32) -> bool {
        let Some(found) = self.streams.get_mut(&stream) else { return false };
        let Role::Listing(listed) = &mut found.role else { return false };
        let Some((batch, at_end)) = listed.batch.take() else { return false };
        if !batch.is_empty() {
            self.port.output.reply(stream, &Reply::Entries(batch));
        }
        if at_end {
            self.end_with_finish(stream);
        } else if let Some(mut listing) = listed.listing.take() {
            let user = listed.user.clone();
            self.submit(stream, move || {
                FileResult::Listed(acting_as(user.as_deref(), || {
                    listing.next_batch().map(|(batch, at_end)| (listing, batch, at_end))
                }))
            });
        }
        false
    }
}
