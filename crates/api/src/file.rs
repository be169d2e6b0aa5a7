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
