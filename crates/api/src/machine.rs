//! Machines: sandboxes in the words of the second dialect. They have no time to live, and their root disk is a volume.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{SandboxId, SandboxStatus, TemplateName, VolumeId, VolumeName};

/// Every sandbox can be seen as one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Machine {
    pub id: SandboxId,
    /// For people; empty when it has none.
    pub name: String,
    pub state: SandboxStatus,
    pub vcpus: u32,
    /// MiB.
    pub memory_mb: u64,
    /// GiB: whole where the disk's size is.
    #[schema(value_type = f64)]
    pub rootfs_size_gb: serde_json::Number,
    /// The template it was made from.
    pub stack: TemplateName,
    pub metadata: BTreeMap<String, String>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    /// In the order in which they were attached.
    pub volumes: Vec<MachineVolume>,
    /// Its root disk. `null`: it was detached, or goes with the sandbox.
    #[serde(default)]
    pub root_volume_id: Option<VolumeId>,
    /// Why it failed.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineVolume {
    pub id: VolumeId,
    pub name: VolumeName,
    /// Where the guest finds it: `/dev/vdb` is the first.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device: Option<String>,
    pub read_only: bool,
    /// `null`: it is not mounted by us.
    #[serde(default)]
    pub mount_path: Option<String>,
}

/// Fields may be missing or null; what is unknown is ignored.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CreateMachine {
    /// For people; several may have the same.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Default 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u32>,
    /// MiB. Default 1024.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// GiB. Default 10.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs_size_gb: Option<u64>,
    /// The template. Default `base`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<BTreeMap<String, String>>,
    /// Boots from this root disk, by id or name: size and stack are the volume's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root_volume_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MachineList {
    /// Newest first.
    pub machines: Vec<Machine>,
}

/// Which machine gets a volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachVolume {
    pub machine_id: String,
}

/// Which machine gives a volume back.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DetachVolume {
    /// Default: whichever has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_id: Option<String>,
}

/// Which volume a machine gets or gives back, by id or name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MachineVolumeRequest {
    pub volume_id: String,
}
