//! Snapshots: a sandbox's memory and disk at one instant, from which sandboxes are created.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{SandboxId, SnapshotId, TemplateName};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Snapshot {
    pub id: SnapshotId,
    /// What it was taken of, which may be gone.
    pub sandbox_id: SandboxId,
    /// Of that sandbox; the template may be gone, too.
    pub template: TemplateName,
    /// As given; empty where none was. Names need not differ.
    pub name: String,
    /// Virtual CPUs of its sandboxes.
    pub cpu: u32,
    /// MiB.
    pub memory_mb: u64,
    /// MiB.
    pub disk_mb: u64,
    /// What this snapshot alone holds, so what deleting it frees. It grows when others that share with it go.
    pub size_bytes: u64,
    /// All that it takes, what it shares included.
    pub total_bytes: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateSnapshot {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotList {
    /// Newest first.
    pub snapshots: Vec<Snapshot>,
}
