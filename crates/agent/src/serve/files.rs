//! Streams about files: each has at most one job with the workers, and asks for the next when the host takes what the
//! last one gave.

use std::collections::VecDeque;

use protocol::Reply;
use protocol::frame::{Channel, HEADER};
use protocol::message::{Entry, Failure, FileHead, FileRead, FileWrite};

use super::stream::{Listed, Reading, Role, WriteState, Writing};
use super::{Done, Server};
use crate::files::acting::{Someone, acting_as};
use crate::files::list::Listing;
use crate::files::read::Reader;
use crate::files::write::Writer;
use crate::files::{delete, list, read};

/// While fewer frames than this are at hand, a worker reads ahead.
const AHEAD: usize = 6;

pub(crate) enum FileResult {
    Answer(Result<Reply, Failure>),
    Opened(Result<(FileHead, Reader, Vec<Vec<u8>>), Failure>),
    Read(Result<(Reader, Vec<Vec<u8>>), Failure>),
    Written(Result<Written, Failure>),
    Listed(Result<(Listing, Vec<Entry>, bool), Failure>),
}

pub(crate) enum Written {
    Part(Box<Writer>),
    All { bytes: u64, etag: String },
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
                Ok((head, reader, frames))
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
        if let Some(found) = self.streams.get_mut(&stream) {
            let state = WriteState::Asked(Box::new(request), user);
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
        let state = match std::mem::replace(&mut writing.state, WriteState::Away) {
            WriteState::Away => return,
            WriteState::Open(writer) if writing.inbox.is_empty() && !writing.finished => {
                writing.state = WriteState::Open(writer);
                return;
            }
            state @ (WriteState::Asked(..) | WriteState::Open(_)) => state,
        };
        let pieces = std::mem::take(&mut writing.inbox);
        writing.taken_bytes = std::mem::take(&mut writing.inbox_bytes);
        let finished = writing.finished;
        self.submit(stream, move || FileResult::Written(write(state, &pieces, finished)));
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
            FileResult::Opened(Ok((head, reader, frames))) => {
                self.port.output.reply(stream, &Reply::File(head));
                self.got_frames(stream, reader, frames.into());
            }
            FileResult::Read(Ok((reader, frames))) => {
                self.got_frames(stream, reader, frames.into())
            }
            FileResult::Written(Ok(Written::All { bytes, etag })) => {
                self.end_with(stream, Ok(Reply::Written { bytes, etag }));
            }
            FileResult::Written(Ok(Written::Part(writer))) => {
                let mut consumed = 0;
                if let Some(found) = self.streams.get_mut(&stream)
                    && let Role::Writing(writing) = &mut found.role
                {
                    writing.state = WriteState::Open(writer);
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

    fn got_frames(&mut self, stream: u32, reader: Reader, mut frames: VecDeque<Vec<u8>>) {
        if let Some(found) = self.streams.get_mut(&stream) {
            if let Role::Reading(reading) = &mut found.role {
                reading.frames.append(&mut frames);
                reading.reader = Some(reader);
            } else {
                found.role = Role::Reading(Reading { reader: Some(reader), frames });
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
            && let Some(mut reader) = reading.reader.take_if(|reader| !reader.is_at_end())
        {
            self.submit(stream, move || {
                FileResult::Read(reader.next_frames().map(|frames| (reader, frames)))
            });
            return sent;
        }
        if reading.frames.is_empty() && reading.reader.is_some() {
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

fn write(state: WriteState, pieces: &[Vec<u8>], finished: bool) -> Result<Written, Failure> {
    let mut writer = match state {
        WriteState::Asked(request, user) => Box::new(Writer::begin(*request, user)?),
        WriteState::Open(writer) => writer,
        WriteState::Away => unreachable!("a stream has one job at a time"),
    };
    writer.append(pieces)?;
    if !finished {
        return Ok(Written::Part(writer));
    }
    let (bytes, etag) = writer.commit()?;
    Ok(Written::All { bytes, etag })
}
