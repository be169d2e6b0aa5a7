//! Templates and their builds.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::TemplateName;

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Template {
    pub name: TemplateName,
    pub label: String,
    pub description: String,
    pub aliases: Vec<TemplateName>,
    /// Default size of its sandboxes.
    pub cpu: u32,
    /// MiB.
    pub memory_mb: u64,
    /// MiB.
    pub disk_mb: u64,
    /// What its root file system takes on the host.
    pub size_bytes: u64,
    /// Built in, for every account.
    pub is_global: bool,
    /// Of the recipe or root file system it was built from.
    pub digest: String,
    /// Not before its first build.
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub created_at: Option<OffsetDateTime>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BuildStatus {
    Queued,
    Running,
    Baking,
    Done,
    Failed,
}

impl fmt::Display for BuildStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Baking => "baking",
            Self::Done => "done",
            Self::Failed => "failed",
        })
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Build {
    pub id: String,
    pub name: TemplateName,
    pub status: BuildStatus,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// MiB: the disk of its sandboxes.
    #[serde(default)]
    pub size_mb: Option<u64>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// Not while it is queued.
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub started_at: Option<OffsetDateTime>,
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub ended_at: Option<OffsetDateTime>,
}
