//! Requests about more than one file at a time: archives, uploads by parts, changes in place, watching.

use std::sync::Arc;
use std::time::Instant;

use protocol::Reply;
use protocol::files::{FilesReply, FilesRequest};
use protocol::message::Failure;

use super::content::{Incoming, Outgoing};
use super::files::FileResult;
use super::stream::Role;
use super::{Done, Server};
use crate::files::acting::{Someone, acting_as};
use crate::files::archive::pack::Packer;
use crate::files::change;
use crate::files::watch::Watcher;

impl Server {
    pub(crate) fn handle_files(&mut self, stream: u32, user: Someone, request: FilesRequest) {
        let uploads = Arc::clone(&self.uploads);
        match request {
            FilesRequest::Unpack(request) => {
                self.take_in(stream, Incoming::ArchiveAsked(request, user));
            }
            FilesRequest::UploadPart { id, number, length } => {
                self.take_in(stream, Incoming::PartAsked { uploads, id, number, length });
            }
            FilesRequest::Pack { path } => self.submit(stream, move || {
                FileResult::Opened(acting_as(user.clone().as_deref(), || {
                    let mut packer = Packer::begin(&path)?;
                    let frames = packer.next_frames()?;
                    let archive = Outgoing::Archive(Box::new(packer), user);
                    Ok((Reply::Files(FilesReply::Packing), archive, frames))
                }))
            }),
            FilesRequest::Watch { path, recursive } => self.submit(stream, move || {
                FileResult::Opened(acting_as(user.clone().as_deref(), || {
                    let watcher = Box::new(Watcher::begin(&path, recursive)?);
                    let reply = Reply::Files(FilesReply::Watching);
                    Ok((reply, Outgoing::Watch(watcher, user), Vec::new()))
                }))
            }),
            FilesRequest::UploadBegin(request) => {
                self.answer_files(stream, None, move || {
                    uploads.begin(request, user).map(FilesReply::Upload)
                });
            }
            FilesRequest::UploadStatus { id } => {
                self.answer_files(stream, None, move || {
                    uploads.status(&id).map(FilesReply::Upload)
                });
            }
            FilesRequest::UploadList => {
                self.end_with(stream, Ok(Reply::Files(FilesReply::Uploads(uploads.list()))));
            }
            FilesRequest::UploadComplete { id, size, sha256 } => self.submit(stream, move || {
                let completed = uploads.complete(&id, size, sha256);
                FileResult::Answer(completed.map(|(bytes, etag)| Reply::Written { bytes, etag }))
            }),
            FilesRequest::UploadAbort { id } => self.submit(stream, move || {
                uploads.abort(&id);
                FileResult::Answer(Ok(Reply::Done))
            }),
            FilesRequest::Move { from, to, overwrite } => {
                self.answer_files(stream, user, move || {
                    change::move_to(&from, &to, overwrite).map(FilesReply::Entry)
                });
            }
            FilesRequest::MakeDirectory(request) => {
                self.answer_files(stream, user, move || {
                    change::make_directory(&request).map(FilesReply::Entry)
                });
            }
            FilesRequest::Change(request) => {
                self.answer_files(stream, user, move || {
                    change::change(&request).map(FilesReply::Entry)
                });
            }
        }
    }

    fn answer_files(
        &self,
        stream: u32,
        user: Someone,
        work: impl FnOnce() -> Result<FilesReply, Failure> + Send + 'static,
    ) {
        self.submit(stream, move || {
            FileResult::Answer(acting_as(user.as_deref(), work).map(Reply::Files))
        });
    }

    /// Uploads that nobody has asked for in a day are given up.
    pub(crate) fn drop_stale_uploads(&self) {
        let now = Instant::now();
        if self.phase.is_running() && self.uploads.next_stale().is_some_and(|stale| stale <= now) {
            let uploads = Arc::clone(&self.uploads);
            self.workers.submit(move || {
                uploads.abort_stale();
                Done::Dropped
            });
        }
    }

    /// What is watched has changed.
    pub(crate) fn watch_is_readable(&mut self, stream: u32) {
        if let Some(found) = self.streams.get_mut(&stream)
            && let Role::Reading(reading) = &mut found.role
        {
            reading.may_have_more = true;
            self.has_something(stream);
        }
    }
}
