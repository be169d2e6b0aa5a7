//! Commands.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{ExecId, SandboxId};

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

/// A script that outlives the request that started it.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct StartExec {
    /// Unique within its machine: the same id again is refused, whatever became of the first. Default: one is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exec_id: Option<ExecId>,
    /// For `bash -c` where there is bash, else `sh -c`.
    pub script: String,
    /// The whole process tree is killed then. Default 120, at most 86400.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_sec: Option<f64>,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecState {
    Running,
    /// Exit code 0.
    Succeeded,
    /// Any other exit code.
    Failed,
    Cancelled,
    /// Its timeout ran out.
    Expired,
    /// Nobody can say whether it ran, or how far: its machine ended.
    Lost,
}

impl ExecState {
    pub const ALL: [Self; 6] =
        [Self::Running, Self::Succeeded, Self::Failed, Self::Cancelled, Self::Expired, Self::Lost];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
            Self::Expired => "expired",
            Self::Lost => "lost",
        }
    }
}

impl fmt::Display for ExecState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A command as it is remembered, whoever started it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Exec {
    pub exec_id: ExecId,
    pub machine_id: SandboxId,
    pub state: ExecState,
    /// `null` until it is known, and for ever when it is lost. 128 + n for a death by signal n.
    pub exit_code: Option<i32>,
    /// True counts, also of what is not kept.
    pub stdout_bytes: u64,
    pub stderr_bytes: u64,
    /// More was printed than is kept.
    pub truncated: bool,
    #[serde(with = "time::serde::rfc3339")]
    pub started_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub finished_at: Option<OffsetDateTime>,
    /// `memory`: the guest ran out of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub killed: Option<String>,
}

/// Newest first.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExecList {
    pub execs: Vec<Exec>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExecStream {
    Stdout,
    Stderr,
}

impl ExecStream {
    pub const ALL: [Self; 2] = [Self::Stdout, Self::Stderr];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

impl fmt::Display for ExecStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A page of what an exec printed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExecOutput {
    pub stream: ExecStream,
    pub offset: u64,
    /// Where the next page begins.
    pub next_offset: u64,
    /// Base64.
    pub data: String,
    /// It has ended and this was the last of it. An empty page of one that runs is not the end.
    pub eof: bool,
}
