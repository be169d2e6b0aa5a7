//! Files, beyond one at a time: archives, uploads by parts, and changes in place. Of version 2.

use serde::{Deserialize, Serialize};

use crate::message::{Entry, FileWrite, PathBytes};

/// Beside each: what comes back on its stream.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub enum FilesRequest {
    /// `Content` data, a tar archive, and a finish from the host, then [`FilesReply::Unpacked`].
    Unpack(Unpack),
    /// [`FilesReply::Packing`], then `Content` data, a tar archive, and a finish. What is no file, directory or link is left
    /// out, and named in a comment of the archive.
    Pack { path: PathBytes },

    /// [`FilesReply::Upload`]. Begun again under the same id: what there is of it.
    UploadBegin(UploadBegin),
    /// [`FilesReply::Upload`].
    UploadStatus { id: String },
    /// [`FilesReply::Uploads`], without their parts.
    UploadList,
    /// `Content` data and a finish from the host, then [`crate::Reply::Done`]. A part that was there already is replaced;
    /// without the finish it is not there.
    UploadPart { id: String, number: u32, length: u64 },
    /// [`crate::Reply::Written`]: the file is in its place, and the upload forgotten.
    UploadComplete { id: String, size: Option<u64>, sha256: Option<[u8; 32]> },
    /// [`crate::Reply::Done`], also when there is none.
    UploadAbort { id: String },

    /// [`FilesReply::Entry`]. Parents of the new place are made.
    Move { from: PathBytes, to: PathBytes, overwrite: bool },
    /// [`FilesReply::Entry`], also when it is there already: then it stays as it is.
    MakeDirectory(MakeDirectory),
    /// [`FilesReply::Entry`]. Links are followed.
    Change(Change),

    /// [`FilesReply::Watching`], then `Content` data without end: each a length (u32, little-endian) and an encoded
    /// [`Noticed`].
    Watch { path: PathBytes, recursive: bool },
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
pub enum FilesReply {
    Unpacked { entries: u64, bytes: u64 },
    Packing,
    Upload(UploadStatus),
    Uploads(Vec<UploadStatus>),
    Entry(Entry),
    Watching,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Unpack {
    /// A directory; made if missing.
    pub path: PathBytes,
    /// Of everything that is unpacked. Default: as in the archive, by number.
    pub owner: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct UploadBegin {
    /// Unique in this guest; `[A-Za-z0-9-]{1,64}`.
    pub id: String,
    /// Its size is that of the whole.
    pub write: FileWrite,
    /// All parts but the last have it.
    pub part_size: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct UploadStatus {
    pub id: String,
    pub path: PathBytes,
    pub size: Option<u64>,
    pub part_size: u64,
    /// Numbers of the parts that are there: first and last of each run.
    pub parts: Vec<(u32, u32)>,
    /// Of all parts that are there.
    pub bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct MakeDirectory {
    pub path: PathBytes,
    /// Default: 0755.
    pub mode: Option<u32>,
    /// Also of the parents that are made.
    pub owner: Option<String>,
    pub create_parents: bool,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Change {
    pub path: PathBytes,
    pub mode: Option<u32>,
    pub owner: Option<String>,
    pub modified_ns: Option<i64>,
}

/// What became of a file or directory.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Noticed {
    pub what: What,
    /// Empty for [`What::Overflow`].
    pub path: PathBytes,
    pub is_directory: bool,
    /// Of [`What::Moved`].
    pub from: Option<PathBytes>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum What {
    Created,
    Modified,
    /// Mode, owner or times.
    Changed,
    Deleted,
    Moved,
    /// More happened than could be told: look at everything again.
    Overflow,
    /// What is watched is gone; nothing more comes.
    Gone,
}
