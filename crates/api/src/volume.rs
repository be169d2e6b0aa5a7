//! Volumes: named disks that outlive sandboxes.

use std::fmt;

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{SandboxId, VolumeId, VolumeName};

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeKind {
    Data,
    /// The root disk of a machine.
    Root,
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Data => "data",
            Self::Root => "root",
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VolumeState {
    Available,
    Attached,
}

impl fmt::Display for VolumeState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Available => "available",
            Self::Attached => "attached",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    pub id: VolumeId,
    pub name: VolumeName,
    pub kind: VolumeKind,
    /// MiB, rounded up.
    pub size_mb: u64,
    /// The same in GiB: whole where `size_mb` is a multiple of 1024.
    #[schema(value_type = f64)]
    pub size_gb: serde_json::Number,
    /// Its size as a sandbox sees it. It takes less of the host while it is not full.
    pub size_bytes: u64,
    pub state: VolumeState,
    /// Who has it; the first of them where several read it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attached_to: Option<SandboxId>,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

impl Volume {
    /// `size_mb` and `size_gb` of so many bytes.
    pub fn sizes(bytes: u64) -> (u64, serde_json::Number) {
        let size_mb = bytes.div_ceil(MIB);
        let size_gb = if size_mb.is_multiple_of(1024) {
            (size_mb / 1024).into()
        } else {
            let gibibytes = bytes as f64 / (1_u64 << 30) as f64;
            serde_json::Number::from_f64(gibibytes).expect("a quotient of numbers is finite")
        };
        (size_mb, size_gb)
    }
}

/// `size_mb` or `size_gb`, not both; the default is 256 MiB, or the size of `from_volume`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CreateVolume {
    pub name: VolumeName,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mb: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_gb: Option<u64>,
    /// Name or id of a volume that nobody writes: the new one starts as its copy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_volume: Option<String>,
}

/// Volumes grow, attached or not; they never shrink.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpdateVolume {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_mb: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_gb: Option<u64>,
}

/// The same list twice: each of the published clients reads one of the two.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VolumeList {
    pub items: Vec<Volume>,
    pub volumes: Vec<Volume>,
}

impl From<Vec<Volume>> for VolumeList {
    fn from(volumes: Vec<Volume>) -> Self {
        Self { items: volumes.clone(), volumes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_in_gib_is_a_whole_number_where_it_can_be() {
        let shown = |bytes| {
            let (size_mb, size_gb) = Volume::sizes(bytes);
            format!("{size_mb} {size_gb}")
        };
        assert_eq!(shown(5 << 30), "5120 5");
        assert_eq!(shown(256 << 20), "256 0.25");
        assert_eq!(shown((1 << 20) + 1), "2 0.0009765634313225746");
    }
}
