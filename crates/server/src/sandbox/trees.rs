//! Archives, uploads by parts, and what else of a sandbox's files is more than reading and writing one of them.

use std::{fmt::Display, sync::Arc, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use futures::Stream;
use machine::guest::{
    self, Channel, Entry, Event, FilesReply, FilesRequest, Noticed, PathBytes, Reply, Request,
    Unpack, UploadBegin, UploadStatus,
};

use super::{
    Running, Written,
    files::{DEADLINE, next, pour},
    usage::InUse,
};
use crate::Error;

/// The guest may have to read all of a file for its digest, or to flush it.
const COMPLETE_DEADLINE: Duration = Duration::from_secs(3600);
/// Longest message about something that was noticed: two paths and a little.
const LONGEST_NOTICED: usize = 16 << 10;

/// A tar archive on its way out of the sandbox.
pub struct PackedTree {
    stream: guest::Stream,
    _in_use: Option<Arc<InUse>>,
}

impl PackedTree {
    /// `None` at its end.
    pub async fn next(&mut self) -> Option<Result<Bytes, Error>> {
        match next(&self.stream).await {
            Ok(Some(Event::Data(Channel::Content, bytes))) => Some(Ok(bytes)),
            Ok(Some(Event::Finished)) => None,
            Ok(_) => Some(Err(machine::Error::Misbehaved("an archive held something else").into())),
            Err(error) => Some(Err(error)),
        }
    }
}

/// What happens to files, as it happens.
pub struct FileWatch {
    stream: guest::Stream,
    buffer: BytesMut,
    _in_use: Option<Arc<InUse>>,
}

impl FileWatch {
    /// `None` at its end.
    pub async fn next(&mut self) -> Option<Result<Noticed, Error>> {
        let misbehaved = |how| Some(Err(machine::Error::Misbehaved(how).into()));
        loop {
            if let Some(length) = self.buffer.first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                if length > LONGEST_NOTICED {
                    return misbehaved("a watch told something that is too long");
                }
                if self.buffer.len() >= 4 + length {
                    self.buffer.advance(4);
                    let message = self.buffer.split_to(length);
                    return match guest::decode(&message) {
                        Ok(noticed) => Some(Ok(noticed)),
                        Err(_) => misbehaved("a watch told something that cannot be read"),
                    };
                }
            }
            // Without a deadline: nothing need ever happen.
            match self.stream.next().await {
                Some(Ok(Event::Data(Channel::Content, bytes))) => self.buffer.extend(bytes),
                Some(Ok(Event::Finished)) | None => return None,
                Some(Ok(_)) => return misbehaved("a watch held something else"),
                Some(Err(error)) => return Some(Err(error.into())),
            }
        }
    }
}

impl Running {
    /// Unpacks a tar archive as it comes: how many entries, and how many bytes of content. Returns at the first refusal,
    /// with what is left of `archive` unread; what was unpacked until then stays.
    ///
    /// # Errors
    /// 400 names the entry that is at fault, 507 when the disk is full.
    pub async fn unpack<E: Display>(
        &self,
        user: Option<String>,
        request: Unpack,
        archive: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    ) -> Result<(u64, u64), Error> {
        let stream = self.guest.open(ask(user, FilesRequest::Unpack(request)))?;
        let otherwise = "what came before is unpacked";
        let Reply::Files(FilesReply::Unpacked { entries, bytes }) =
            pour(&stream, archive, u64::MAX, otherwise).await?
        else {
            return Err(surprised());
        };
        Ok((entries, bytes))
    }

    /// # Errors
    /// 404 when it is missing, 400 when it is no file and no directory.
    pub async fn pack(&self, user: Option<String>, path: PathBytes) -> Result<PackedTree, Error> {
        let stream = self.guest.open(ask(user, FilesRequest::Pack { path }))?;
        let Some(Event::Reply(Reply::Files(FilesReply::Packing))) = next(&stream).await? else {
            return Err(surprised());
        };
        Ok(PackedTree { stream, _in_use: self.in_use.clone() })
    }

    /// # Errors
    /// 404 when it is missing, 413 when there are too many directories.
    pub async fn watch_files(
        &self,
        user: Option<String>,
        path: PathBytes,
        recursive: bool,
    ) -> Result<FileWatch, Error> {
        let stream = self.guest.open(ask(user, FilesRequest::Watch { path, recursive }))?;
        let Some(Event::Reply(Reply::Files(FilesReply::Watching))) = next(&stream).await? else {
            return Err(surprised());
        };
        let (buffer, in_use) = (BytesMut::new(), self.in_use.clone());
        Ok(FileWatch { stream, buffer, _in_use: in_use })
    }

    /// Begun again under the same id: what there is of it.
    ///
    /// # Errors
    /// 400 when the file could not be written, 409 when too many uploads are under way, 507 when it does not fit.
    pub async fn begin_upload(
        &self,
        user: Option<String>,
        request: UploadBegin,
    ) -> Result<UploadStatus, Error> {
        self.upload_status(user, FilesRequest::UploadBegin(request)).await
    }

    /// # Errors
    /// 404 when there is none, or none any more.
    pub async fn upload(&self, id: String) -> Result<UploadStatus, Error> {
        self.upload_status(None, FilesRequest::UploadStatus { id }).await
    }

    async fn upload_status(
        &self,
        user: Option<String>,
        request: FilesRequest,
    ) -> Result<UploadStatus, Error> {
        let Reply::Files(FilesReply::Upload(status)) =
            self.guest.call(ask(user, request), DEADLINE).await?
        else {
            return Err(surprised());
        };
        Ok(status)
    }

    pub async fn uploads(&self) -> Result<Vec<UploadStatus>, Error> {
        let Reply::Files(FilesReply::Uploads(uploads)) =
            self.guest.call(ask(None, FilesRequest::UploadList), DEADLINE).await?
        else {
            return Err(surprised());
        };
        Ok(uploads)
    }

    /// The part is there once this has succeeded, and not if it fails. An error of `content` fails it.
    ///
    /// # Errors
    /// 400 when it has another length than it should, 503 while the same part is under way.
    pub async fn write_part<E: Display>(
        &self,
        id: String,
        number: u32,
        length: u64,
        content: &mut (impl Stream<Item = Result<Bytes, E>> + Unpin),
    ) -> Result<(), Error> {
        let request = FilesRequest::UploadPart { id, number, length };
        let stream = self.guest.open(ask(None, request))?;
        let Reply::Done = pour(&stream, content, length, "this part was not kept").await? else {
            return Err(surprised());
        };
        Ok(())
    }

    /// # Errors
    /// 409 while a part is missing or the size is another, 412 when the digest is another.
    pub async fn complete_upload(
        &self,
        id: String,
        size: Option<u64>,
        sha256: Option<[u8; 32]>,
    ) -> Result<Written, Error> {
        let request = FilesRequest::UploadComplete { id, size, sha256 };
        let Reply::Written { bytes, etag } =
            self.guest.call(ask(None, request), COMPLETE_DEADLINE).await?
        else {
            return Err(surprised());
        };
        Ok(Written { bytes, etag })
    }

    /// Also fine when there is none.
    pub async fn abort_upload(&self, id: String) -> Result<(), Error> {
        self.guest.call(ask(None, FilesRequest::UploadAbort { id }), DEADLINE).await?;
        Ok(())
    }

    /// Moves, makes or changes something: what is there then.
    ///
    /// # Errors
    /// 404 when it is missing, 409 when something is in the way.
    pub async fn change_files(
        &self,
        user: Option<String>,
        request: FilesRequest,
    ) -> Result<Entry, Error> {
        let Reply::Files(FilesReply::Entry(entry)) =
            self.guest.call(ask(user, request), DEADLINE).await?
        else {
            return Err(surprised());
        };
        Ok(entry)
    }
}

/// With the rights of this user, of root where there is none.
fn ask(user: Option<String>, request: FilesRequest) -> Request {
    Request::Files { user, request }
}

fn surprised() -> Error {
    machine::Error::Misbehaved("a request about files was answered with something else").into()
}
