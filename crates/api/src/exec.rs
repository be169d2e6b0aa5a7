//! Commands.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ExecRequest {
    /// For `bash -c` where there is bash, else `sh -c`.
    pub cmd: String,
    /// The whole process tree is killed then. Default: none, up to the server's limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Default: the user's home.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// Name or number, also `user:group`. Default root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExecResult {
    /// Bytes that are not UTF-8 become U+FFFD.
    pub stdout: String,
    pub stderr: String,
    /// 128 + n for a death by signal n; 124 where a timeout can only be told here.
    pub exit_code: i32,
    pub duration_ms: u64,
    /// More was printed than this answer holds.
    pub truncated: bool,
    pub timed_out: bool,
    /// `memory`: the guest ran out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub killed: Option<String>,
}
