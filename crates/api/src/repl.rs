//! Sessions of the interpreter, and cells that run in them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CreateCodeSession {
    /// `python` by default; `bash`, `node` and others where the sandbox has a kernel for them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
    /// Default: root's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
}

impl fmt::Debug for CreateCodeSession {
    /// The environment may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreateCodeSession")
            .field("language", &self.language)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CodeSession {
    pub id: String,
    pub language: String,
    pub status: CodeSessionStatus,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum CodeSessionStatus {
    Starting,
    Idle,
    Busy,
    /// Its kernel has ended by itself: restart it.
    Dead,
}

#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct RunCode {
    pub code: String,
    /// Counts from the request on, so it includes the wait for cells before. The cell is interrupted then. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
}

impl fmt::Debug for RunCode {
    /// The code may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunCode").field("timeout_ms", &self.timeout_ms).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CodeResult {
    /// Bytes that are not UTF-8 become U+FFFD.
    pub stdout: String,
    pub stderr: String,
    /// 0, or 1 where there is an error; 124 where a timeout can only be told here.
    pub exit: i32,
    pub duration_ms: u64,
    pub results: Vec<CodeOutput>,
    /// A formatted traceback.
    pub error: Option<String>,
    /// More was printed or shown than this answer holds.
    pub truncated: bool,
    pub timed_out: bool,
}

/// One output in one form. A value that has several comes as several of these, its text last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CodeOutput {
    /// A MIME type.
    #[serde(rename = "type")]
    pub kind: String,
    /// Images are base64 (SVG is text), JSON is its text.
    pub data: String,
}
