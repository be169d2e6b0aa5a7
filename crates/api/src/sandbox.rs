//! The sandbox as its users see it.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{CreateNetwork, SandboxId, SnapshotId, TemplateName};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxStatus {
    Creating,
    Running,
    Paused,
    Hibernated,
    Stopped,
    Deleting,
    Failed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BootMode {
    /// Restored from a baked machine or a snapshot.
    Snapshot,
    Cold,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Sandbox {
    pub id: SandboxId,
    pub template: TemplateName,
    /// Virtual CPUs.
    pub cpu: u32,
    /// MiB.
    pub memory_mb: u64,
    /// MiB.
    pub disk_mb: u64,
    pub status: SandboxStatus,
    /// Unique on this host; the guest itself has another address, the same in all sandboxes.
    pub guest_ip: String,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(
        with = "time::serde::rfc3339::option",
        skip_serializing_if = "Option::is_none",
        default
    )]
    pub expires_at: Option<OffsetDateTime>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ttl_seconds: Option<u64>,
    pub metadata: BTreeMap<String, String>,
    /// What it was created from, if not from its template alone.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub from_snapshot: Option<SnapshotId>,
    /// Milliseconds from the request until the guest had answered.
    pub boot_ms: u64,
    pub boot_mode: BootMode,
    pub persistent: bool,
    pub volumes: Vec<VolumeMount>,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VolumeMount {
    pub name: String,
    #[serde(default)]
    pub read_only: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mount_path: Option<String>,
}

/// Fields may be missing or null. Unknown ones are ignored: the clients send some that are theirs alone.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CreateSandbox {
    /// Default `base`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// Virtual CPUs. Default: the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    /// MiB. Default: the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// MiB. Default: the template's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_mb: Option<u64>,
    /// Counts from the first `running`. Default: the server's setting, 1 hour.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    /// No time to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Given to every command; never written to the guest's disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_snapshot: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<VolumeMount>>,
    /// Default: the internet, without private addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<CreateNetwork>,
    /// Its commands find the URL of the first in `DATABASE_URL`, of the second in `DATABASE_URL_2`, and so on; never
    /// written to the guest's disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub databases: Option<Vec<String>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lifecycle {
    pub status: SandboxStatus,
    pub persistent: bool,
    pub ttl_seconds: Option<u64>,
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub expires_at: Option<OffsetDateTime>,
    /// Unused for so long, it hibernates. `null`: it stays running.
    #[serde(default)]
    pub idle_seconds: Option<u64>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct UpdateLifecycle {
    /// The time to live starts again with this many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// Unused for so long, it hibernates; whoever uses it then wakes it. 0: it stays running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_seconds: Option<i64>,
}
