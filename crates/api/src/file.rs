//! Files and directories.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    File,
    Directory,
    Link,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FileEntry {
    pub name: String,
    pub path: String,
    /// False for a link to a directory: the clients walk by it.
    pub is_dir: bool,
    pub size: u64,
    /// Octal, like `0755`.
    pub mode: String,
    /// Whole seconds since 1970: the Python client calls `int()` on it.
    pub mtime: i64,
    #[serde(rename = "type")]
    pub kind: FileKind,
    pub user: u32,
    pub group: u32,
    /// Where a link points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The exact name where `name` is not it, because it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name_b64: Option<String>,
    /// The same for `path`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DirListing {
    pub path: String,
    pub entries: Vec<FileEntry>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FileWritten {
    pub path: String,
    pub bytes: u64,
}

/// Of a tar archive.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Unpacked {
    /// The directory.
    pub path: String,
    pub entries: u64,
    /// Of content.
    pub bytes: u64,
}

/// A path is text, or where it is not UTF-8 its bytes in base64.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct BeginUpload {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    /// When known: of the whole file. The parts are then checked against it as they come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Octal. Default: that of the file it replaces, else 0644.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// `user` or `user:group`. Default: that of the file it replaces, else root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// With whose rights on files, and whose what is made will be. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Of each part but the last. Default: 16 MiB, more where that would be too many parts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub part_size: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UploadParts {
    pub first: u32,
    pub last: u32,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Upload {
    pub id: String,
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    pub part_size: u64,
    /// Those that are there, in runs; the first part is number 1. Empty in lists.
    pub parts: Vec<UploadParts>,
    /// Of all parts that are there.
    pub bytes: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct UploadList {
    pub uploads: Vec<Upload>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CompleteUpload {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Of the whole file, in hexadecimal. The sandbox reads all of it for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct MoveFile {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_b64: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_b64: Option<String>,
    /// With whose rights on files, and whose what is made will be. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A file may replace a file, and a directory an empty one.
    #[serde(default)]
    pub overwrite: bool,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct MakeDirectory {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    /// Octal. Default: 0755.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// `user` or `user:group`; also of the parents that are made. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// With whose rights on files, and whose what is made will be. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Default: true.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub create_parents: Option<bool>,
}

/// What is left out stays as it is.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ChangeFile {
    /// Octal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// `user` or `user:group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// With whose rights on files, and whose what is made will be. Default: root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Seconds since 1970, with a fraction if need be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtime: Option<f64>,
}

/// One event of a watch; its name says what happened.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FileEvent {
    pub path: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_b64: Option<String>,
    pub is_dir: bool,
    /// Where it was, if it was moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_b64: Option<String>,
}
