//! What streams of content are about: files, parts of uploads, archives.

use std::sync::Arc;

use protocol::Reply;
use protocol::files::{FilesReply, Unpack};
use protocol::message::{Failure, FileWrite};

use crate::files::acting::{Someone, acting_as};
use crate::files::archive::pack::Packer;
use crate::files::archive::unpack::Unpacker;
use crate::files::read::Reader;
use crate::files::upload::{PartWriter, Uploads};
use crate::files::watch::Watcher;
use crate::files::write::Writer;

/// Content on its way to the host.
pub(crate) enum Outgoing {
    File(Reader),
    Archive(Box<Packer>, Someone),
    /// Has something whenever the kernel says so.
    Watch(Box<Watcher>, Someone),
}

impl Outgoing {
    pub(crate) fn is_at_end(&self) -> bool {
        match self {
            Self::File(reader) => reader.is_at_end(),
            Self::Archive(packer, _) => packer.is_at_end(),
            Self::Watch(watcher, _) => watcher.is_over(),
        }
    }

    pub(crate) fn next_frames(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        match self {
            Self::File(reader) => reader.next_frames(),
            Self::Archive(packer, user) => acting_as(user.as_deref(), || packer.next_frames()),
            Self::Watch(watcher, user) => acting_as(user.as_deref(), || Ok(watcher.next_frames())),
        }
    }
}

/// Content on its way from the host.
pub(crate) enum Incoming {
    FileAsked(Box<FileWrite>, Someone),
    File(Box<Writer>),
    ArchiveAsked(Unpack, Someone),
    Archive(Box<Unpacker>, Someone),
    PartAsked { uploads: Arc<Uploads>, id: String, number: u32, length: u64 },
    Part(Box<PartWriter>),
}

pub(crate) enum Taken {
    /// More is to come.
    Part(Incoming),
    All(Reply),
}

impl Incoming {
    /// Small things are opened, written and finished in one go.
    pub(crate) fn take(self, pieces: &[Vec<u8>], finished: bool) -> Result<Taken, Failure> {
        match self {
            Self::FileAsked(request, user) => {
                Self::File(Box::new(Writer::begin(*request, user)?)).take(pieces, finished)
            }
            Self::ArchiveAsked(request, user) => {
                let begin = || Unpacker::begin(&request, user.as_deref());
                let unpacker = acting_as(user.as_deref(), begin)?;
                Self::Archive(Box::new(unpacker), user).take(pieces, finished)
            }
            Self::PartAsked { uploads, id, number, length } => {
                Self::Part(Box::new(uploads.begin_part(&id, number, length)?))
                    .take(pieces, finished)
            }
            Self::File(mut writer) => {
                writer.append(pieces)?;
                if !finished {
                    return Ok(Taken::Part(Self::File(writer)));
                }
                let (bytes, etag) = writer.commit()?;
                Ok(Taken::All(Reply::Written { bytes, etag }))
            }
            Self::Archive(mut unpacker, user) => {
                let acting = user.as_deref();
                acting_as(acting, || unpacker.append(pieces))?;
                if !finished {
                    return Ok(Taken::Part(Self::Archive(unpacker, user)));
                }
                let (entries, bytes) = acting_as(acting, || unpacker.commit())?;
                Ok(Taken::All(Reply::Files(FilesReply::Unpacked { entries, bytes })))
            }
            Self::Part(mut part) => {
                part.append(pieces)?;
                if !finished {
                    return Ok(Taken::Part(Self::Part(part)));
                }
                part.commit()?;
                Ok(Taken::All(Reply::Done))
            }
        }
    }
}
