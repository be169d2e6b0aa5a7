//! Forks: sandboxes made from one instant of another.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{Sandbox, SandboxId, SnapshotId};

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Fork {
    /// Added to the parent's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// How many; 1 unless said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Forked {
    /// The first of the children.
    pub sandbox: Sandbox,
    pub children: Vec<Sandbox>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ForkTree {
    /// From 1 to 16.
    #[serde(default)]
    pub count: u32,
    /// Added to the parent's. `explore_ttl`, in seconds, is the children's time to live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ForkedTree {
    /// Also in each child's metadata, as `fork_tree_id`.
    pub tree_id: String,
    pub parent_id: SandboxId,
    /// The instant that the children share.
    pub snapshot_id: SnapshotId,
    pub children: Vec<Sandbox>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Promote {
    /// Deletes the other children of the tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cleanup_siblings: Option<bool>,
    /// Default: the one in the sandbox's metadata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Promoted {
    pub winner: SandboxId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree_id: Option<String>,
    pub deleted: Vec<SandboxId>,
    /// Siblings that could not be deleted, by id, with the reason.
    pub failures: BTreeMap<String, String>,
}
