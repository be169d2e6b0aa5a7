//! What a machine is. Everything by which two machines may differ, and the text that a saved state is keyed by.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::qemu_args;

/// Counts up when a state saved before would no longer load although [`qemu_args::hardware`] stayed the same.
const FORMAT: u32 = 2;

/// Versioned, so that a state survives an upgrade of QEMU.
pub const MACHINE_TYPE: &str = "pc-q35-8.2";

/// Disks a machine can be given beside its root disk: empty slots of each kind, there from the boot on.
pub const WRITABLE_SLOTS: usize = 8;
pub const READ_ONLY_SLOTS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Shape {
    pub cpus: u32,
    pub memory_mib: u32,
}

impl Shape {
    pub fn memory_bytes(self) -> u64 {
        u64::from(self.memory_mib) << 20
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Accelerator {
    Kvm,
    Tcg,
}

impl fmt::Display for Accelerator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        })
    }
}

#[derive(Debug, thiserror::Error)]
#[error("an accelerator is `kvm` or `tcg`")]
pub struct UnknownAccelerator;

impl FromStr for Accelerator {
    type Err = UnknownAccelerator;

    fn from_str(text: &str) -> Result<Self, UnknownAccelerator> {
        [Self::Kvm, Self::Tcg]
            .into_iter()
            .find(|accelerator| accelerator.to_string() == text)
            .ok_or(UnknownAccelerator)
    }
}

/// Everything else about a machine is the same in all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MachineSpec {
    pub shape: Shape,
    pub accelerator: Accelerator,
}

impl MachineSpec {
    /// All that decides whether a saved state loads. QEMU hardly checks it (a wrong CPU model hangs, a wrong memory
    /// size "completes"), so whoever keeps a state compares this text first. Disk sizes are not in it.
    pub fn description(&self) -> String {
        let mut text = format!("format {FORMAT}\naccelerator {}\n", self.accelerator);
        match self.accelerator {
            Accelerator::Kvm => text.push_str(&format!("host cpu {}\n", host_cpu())),
            Accelerator::Tcg => {}
        }
        for argument in qemu_args::hardware(self) {
            text.push_str(&argument);
            text.push('\n');
        }
        text
    }
}

/// Under KVM the guest sees the host's processor: a state saved on another model would find features missing.
fn host_cpu() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let first = text.split("\n\n").next().unwrap_or_default();
    let identity: Vec<&str> = first
        .lines()
        .filter(|line| {
            ["vendor_id", "cpu family", "model", "stepping", "flags"]
                .iter()
                .any(|name| line.split(':').next().is_some_and(|key| key.trim() == *name))
        })
        .collect();
    let digest = Sha256::digest(identity.join("\n"));
    digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(cpus: u32, memory_mib: u32, accelerator: Accelerator) -> MachineSpec {
        MachineSpec { shape: Shape { cpus, memory_mib }, accelerator }
    }

    #[test]
    fn whatever_differs_shows_in_the_description() {
        let specs = [
            spec(1, 512, Accelerator::Tcg),
            spec(2, 512, Accelerator::Tcg),
            spec(1, 1024, Accelerator::Tcg),
            spec(1, 512, Accelerator::Kvm),
        ];
        let texts: std::collections::BTreeSet<_> =
            specs.iter().map(MachineSpec::description).collect();
        assert_eq!(texts.len(), specs.len());
    }

    #[test]
    fn the_description_is_the_same_each_time_and_knows_no_descriptor() {
        let text = spec(1, 512, Accelerator::Tcg).description();
        assert_eq!(text, spec(1, 512, Accelerator::Tcg).description());
        assert!(!text.contains(",fd=") && !text.contains("/proc"), "{text}");
        assert!(text.contains("pc-q35-8.2"), "{text}");
    }

    #[test]
    fn an_accelerator_is_read_as_it_is_shown() {
        for accelerator in [Accelerator::Kvm, Accelerator::Tcg] {
            assert_eq!(accelerator.to_string().parse::<Accelerator>().unwrap(), accelerator);
        }
        assert!("auto".parse::<Accelerator>().is_err());
    }
}
