//! Files that a sandbox fetches and puts itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ImportFile {
    /// `http://…` or `https://…`. Its query may be a credential: it is told to nobody and kept nowhere.
    pub url: String,
    /// Absolute.
    pub path: String,
    /// In hexadecimal; the file appears only if its content has it.
    #[serde(default)]
    pub sha256: Option<String>,
    /// Sent with the request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// Octal. Default: that of the file it replaces, else 0644.
    #[serde(default)]
    pub mode: Option<String>,
    /// `user` or `user:group`. Default: that of the file it replaces, else root.
    #[serde(default)]
    pub owner: Option<String>,
    /// For all attempts together. Default: an hour.
    #[serde(default)]
    pub timeout_seconds: Option<f64>,
}

#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ExportFile {
    /// Absolute.
    pub path: String,
    /// `http://…` or `https://…`. Its query may be a credential: it is told to nobody and kept nowhere.
    pub url: String,
    /// `PUT` (the default) or `POST`.
    #[serde(default)]
    pub method: Option<String>,
    /// Sent with the request.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// For all attempts together. Default: an hour.
    #[serde(default)]
    pub timeout_seconds: Option<f64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FileTransferred {
    pub path: String,
    pub bytes: u64,
    /// In hexadecimal.
    pub sha256: String,
    /// Of the content, as the other side has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
}
