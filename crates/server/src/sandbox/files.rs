//! Files of a sandbox, streamed both ways: nothing here holds a whole one.

use std::{fmt::Display, sync::Arc, time::Duration};

use api::ErrorCode;
use bytes::Bytes;
use futures::{Stream, StreamExt};
use machine::guest::{
    self, Channel, Entry, Event, FileHead, FileRead, FileRequest, FileWrite, PathBytes, Reply,
    Request,
};

use super::{Running, exec::check_user, usage::InUse};
use crate::Error;

/// For the next piece of an answer.
pub(super) const DEADLINE: Duration = Duration::from_secs(60);
/// For the guest's disk to take what was written.
const WRITTEN_DEADLINE: Duration = Duration::from_secs(300);
/// A deep tree may take the guest a while.
const DELETE_DEADLINE: Duration = Duration::from_secs(300);
/// Nothing came from the client for so long: it is gone.
const CLIENT_DEADLINE: Duration = Duration::from_secs(60);

/// What a read may come to, short of an error.
pub enum Read {
    Content(FileContent),
    /// With its etag.
    NotModified(String),
    /// With the file's size.
    OutOfRange(u64),
}

/// A file, or a part of one, on its way out of the sandbox.
pub struct FileContent {
    pub head: FileHead,
    stream: guest::Stream,
    left: u64,
    _in_use: Option<Arc<InUse>>,
}

impl FileContent {
    /// `None` at the end, after as many bytes as [`FileHead::length`] says.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        if self.left == 0 {
            return None;
        }
        Some(match next(&self.stream).await {
            Ok(Some(Event::Data(Channel::Content, bytes))) if bytes.len() as u64 <= self.left => {
                self.left -= bytes.len() as u64;
                Ok(bytes)
            }
            Ok(_) => {
                Err(machine::Error::Misbehaved("a file's content is not as long as its head said")
                    .into())
            }
            Err(error) => Err(error),
        })
    }
}

/// The entries of a directory in the guest's order, in batches.
pub struct DirEntries {
    _in_use: Option<Arc<InUse>>,
    stream: guest::Stream,
    first: Option<Vec<Entry>>,
}

impl DirEntries {
    pub async fn next(&mut self) -> Option<Result<Vec<Entry>, Error>> {
        if let Some(first) = self.first.take() {
            return Some(Ok(first));
        }
        match next(&self.stream).await {
            Ok(Some(Event::Reply(Reply::Entries(entries)))) => Some(Ok(entries)),
            Ok(Some(Event::Finished) | None) => None,
            Ok(Some(Event::Reply(_) | Event::Data(..))) => {
                Some(Err(machine::Error::Misbehaved("a listing held something else").into()))
            }
            Err(error) => Some(Err(error)),
        }
    }
}

/// Whose rights on files are used, and to whom new files belong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AsUser(Option<String>);

impl AsUser {
    /// # Errors
    /// 400 when no user can be called so.
    pub fn named(user: Option<&str>) -> Result<Self, Error> {
        user.map_or(Ok(()), check_user)?;
        Ok(Self(user.map(str::to_owned)))
    }

    fn asks(self, request: FileRequest) -> Request {
        if let Some(user) = self.0 {
            return Request::FileAs { user, request };
        }
        // As agents of every version know it.
        match request {
            FileRequest::Read(read) => Request::FileRead(read),
            FileRequest::Write(write) => Request::FileWrite(write),
            FileRequest::Delete { path } => Request::FileDelete { path },
            FileRequest::List { path, depth } => Request::DirList { path, depth },
            FileRequest::Stat { path } => Request::FileStat { path },
        }
    }
}

/// How a write ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Written {
    pub bytes: u64,
    pub etag: String,
}

impl Running {
    /// # Errors
    /// 404 when it is missing, 400 when it is not a regular file.
    pub async fn read_file(&self, user: AsUser, request: FileRead) -> Result<Read, Error> {
        let stream = self.guest.open(user.asks(FileRequest::Read(request)))?;
        match next_raw(&stream).await {
            Ok(Some(Event::Reply(Reply::File(head)))) => {
                let in_use = self.in_use.clone();
                Ok(Read::Content(FileContent { left: head.length, head, stream, _in_use: in_use }))
            }
            Ok(_) => Err(machine::Error::Misbehaved("a file did not begin with its head").into()),
            Err(machine::Error::Refused(failure))
                if failure.code == guest::ErrorCode::NotModified =>
            {
                Ok(Read::NotModified(failure.message))
            }
            Err(machine::Error::Refused(failure))
                if failure.code == guest::ErrorCode::RangeNotSatisfiable =>
            {
                Ok(Read::OutOfRange(failure.message.parse().unwrap_or(0)))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The file appears when all of `content` has arrived, or not at all. Returns at the first refusal, with what is
    /// left of `content` unread.
    ///
    /// # Errors
    /// 413 when there are more than `limit` bytes; 507 when they do not fit.
    pub async fn write_file<E: Display>(
        &self,
        user: AsUser,
        request: FileWrite,
        limit: u64,
        content: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    ) -> Result<Written, Error> {
        fault::point!("write.opening", Error::internal);
        let stream = self.guest.open(user.asks(FileRequest::Write(request)))?;
        fault::point!("write.opened");
        let Reply::Written { bytes, etag } =
            pour(&stream, content, limit, "nothing was written").await?
        else {
            return Err(machine::Error::Misbehaved("a write ended with something else").into());
        };
        Ok(Written { bytes, etag })
    }

    /// Recursive; also fine when it is missing.
    pub async fn delete_file(&self, user: AsUser, path: PathBytes) -> Result<(), Error> {
        self.guest.call(user.asks(FileRequest::Delete { path }), DELETE_DEADLINE).await?;
        Ok(())
    }

    /// # Errors
    /// 404 when it is missing, 400 when it is not a directory.
    pub async fn list_directory(
        &self,
        user: AsUser,
        path: PathBytes,
        depth: u32,
    ) -> Result<DirEntries, Error> {
        let stream = self.guest.open(user.asks(FileRequest::List { path, depth }))?;
        match next(&stream).await? {
            Some(Event::Reply(Reply::Entries(entries))) => {
                Ok(DirEntries { _in_use: self.in_use.clone(), stream, first: Some(entries) })
            }
            Some(Event::Finished) | None => {
                Ok(DirEntries { _in_use: self.in_use.clone(), stream, first: Some(Vec::new()) })
            }
            Some(Event::Reply(_) | Event::Data(..)) => {
                Err(machine::Error::Misbehaved("a listing began with something else").into())
            }
        }
    }

    /// Links are not followed.
    ///
    /// # Errors
    /// 404 when it is missing.
    pub async fn stat_file(&self, user: AsUser, path: PathBytes) -> Result<Entry, Error> {
        let misbehaved = || machine::Error::Misbehaved("a stat was answered with something else");
        let reply = self.guest.call(user.asks(FileRequest::Stat { path }), DEADLINE).await?;
        let Reply::Entries(entries) = reply else { return Err(misbehaved().into()) };
        entries.into_iter().next().ok_or_else(|| misbehaved().into())
    }
}

/// Sends all of `content`, and hears how it ends. Returns at the first refusal, with what is left of `content` unread;
/// `otherwise` says what has become of the rest.
pub(super) async fn pour<E: Display>(
    stream: &guest::Stream,
    content: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    limit: u64,
    otherwise: &str,
) -> Result<Reply, Error> {
    let mut bytes = 0;
    loop {
        let piece = tokio::select! {
            biased;
            // A sandbox that is gone, or has no room, is told to a client that sends slowly, too.
            early = stream.next() => {
                early.transpose()?;
                let early = "a write ended before its content";
                return Err(machine::Error::Misbehaved(early).into());
            }
            piece = tokio::time::timeout(CLIENT_DEADLINE, content.next()) => piece.map_err(|_| {
                Error::invalid(format!("the content stopped coming; {otherwise}, send it again"))
            })?,
        };
        let Some(piece) = piece else { break };
        let piece = piece.map_err(|error| {
            Error::invalid(format!("the content broke off ({error}); {otherwise}"))
        })?;
        bytes += piece.len() as u64;
        if bytes > limit {
            return Err(too_large());
        }
        if send(stream, piece).await.is_err() {
            // The guest has given up; its reason is waiting.
            break;
        }
        fault::point!("write.piece_sent", Error::internal);
    }
    fault::point!("write.finishing", Error::internal);
    // Fails where the guest has given up.
    let _ = stream.finish().await;
    fault::point!("write.finished");
    match tokio::time::timeout(WRITTEN_DEADLINE, stream.next())
        .await
        .map_err(|_| machine::Error::Silent)?
        .transpose()?
    {
        Some(Event::Reply(reply)) => {
            fault::point!("write.answering");
            Ok(reply)
        }
        Some(Event::Data(..) | Event::Finished) => {
            Err(machine::Error::Misbehaved("a write ended with something else").into())
        }
        None => Err(machine::Error::Lost.into()),
    }
}

/// For an upload over the limit: names the ways out.
pub fn too_large() -> Error {
    Error::new(
        ErrorCode::TooLarge,
        "a file written in one request may have at most 32 MiB (33554432 bytes): send it in parts with POST …/fs/uploads, \
         or let a command in the sandbox fetch it",
    )
}

pub(super) async fn next(stream: &guest::Stream) -> Result<Option<Event>, Error> {
    Ok(next_raw(stream).await?)
}

async fn next_raw(stream: &guest::Stream) -> machine::Result<Option<Event>> {
    tokio::time::timeout(DEADLINE, stream.next())
        .await
        .map_err(|_| machine::Error::Silent)?
        .transpose()
}

async fn send(stream: &guest::Stream, piece: Bytes) -> machine::Result<()> {
    tokio::time::timeout(DEADLINE, stream.send(piece)).await.map_err(|_| machine::Error::Silent)?
}
