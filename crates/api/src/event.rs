//! What happened to a sandbox, and what it uses.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::SandboxId;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
pub enum EventKind {
    #[serde(rename = "sandbox.creating")]
    Creating,
    #[serde(rename = "sandbox.running")]
    Running,
    #[serde(rename = "sandbox.paused")]
    Paused,
    #[serde(rename = "sandbox.resumed")]
    Resumed,
    #[serde(rename = "sandbox.hibernated")]
    Hibernated,
    #[serde(rename = "sandbox.woken")]
    Woken,
    #[serde(rename = "sandbox.stopped")]
    Stopped,
    #[serde(rename = "sandbox.snapshotted")]
    Snapshotted,
    #[serde(rename = "sandbox.forked")]
    Forked,
    #[serde(rename = "sandbox.promoted")]
    Promoted,
    #[serde(rename = "sandbox.expired")]
    Expired,
    #[serde(rename = "sandbox.deleting")]
    Deleting,
    #[serde(rename = "sandbox.failed")]
    Failed,
}

impl EventKind {
    pub const ALL: [Self; 13] = [
        Self::Creating,
        Self::Running,
        Self::Paused,
        Self::Resumed,
        Self::Hibernated,
        Self::Woken,
        Self::Stopped,
        Self::Snapshotted,
        Self::Forked,
        Self::Promoted,
        Self::Expired,
        Self::Deleting,
        Self::Failed,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Creating => "sandbox.creating",
            Self::Running => "sandbox.running",
            Self::Paused => "sandbox.paused",
            Self::Resumed => "sandbox.resumed",
            Self::Hibernated => "sandbox.hibernated",
            Self::Woken => "sandbox.woken",
            Self::Stopped => "sandbox.stopped",
            Self::Snapshotted => "sandbox.snapshotted",
            Self::Forked => "sandbox.forked",
            Self::Promoted => "sandbox.promoted",
            Self::Expired => "sandbox.expired",
            Self::Deleting => "sandbox.deleting",
            Self::Failed => "sandbox.failed",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    #[serde(rename = "type")]
    pub kind: EventKind,
    pub sandbox_id: SandboxId,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    /// Such as the id of a snapshot, or why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventList {
    /// Oldest first.
    pub events: Vec<Event>,
}

/// Counters start with the machine: again at a wake. All are 0 while there is none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Metrics {
    pub sandbox_id: SandboxId,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    pub cpu: CpuMetrics,
    pub memory: MemoryMetrics,
    pub disk: DiskMetrics,
    pub network: NetworkMetrics,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CpuMetrics {
    /// Virtual CPUs.
    pub count: u32,
    /// Time that they ran.
    pub seconds: f64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemoryMetrics {
    /// What the guest has.
    pub total_bytes: u64,
    /// What it takes of the host for itself alone.
    pub private_bytes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskMetrics {
    /// What the guest has.
    pub total_bytes: u64,
    /// What it takes of the host, what it shares with others included.
    pub used_bytes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub reads: u64,
    pub writes: u64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkMetrics {
    pub received_bytes: u64,
    pub sent_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_of_event_has_one_name() {
        for kind in EventKind::ALL {
            let json = serde_json::to_value(kind).unwrap();
            assert_eq!(json, kind.as_str());
            assert_eq!(serde_json::from_value::<EventKind>(json).unwrap(), kind);
        }
    }
}
