//! What is written into the files of a control group. Pure: no file is touched here.

use crate::spec::{Accelerator, MachineSpec};

/// Beside the guest's memory: QEMU itself, pages of its disks that are on their way, and, where it emulates, the
/// translations of all vCPUs.
const OVERHEAD: u64 = 384 << 20;
const OVERHEAD_PER_EMULATED_CPU: u64 = 64 << 20;
/// Threads: beside the vCPUs up to 64 that wait for disks, and a few of QEMU's own.
const THREADS: u32 = 128;
/// Microseconds.
const PERIOD: u64 = 100_000;
/// Beside the vCPUs, QEMU's own thread moves their data: half a processor, so that a busy disk does not stop them.
const OWN_THREADS: u64 = PERIOD / 2;
const SHARES_PER_CPU: u64 = 1024;
const WEIGHT_PER_CPU: u64 = 100;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    One,
    Two,
}

/// Of one machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(super) memory_bytes: u64,
    pub(super) cpus: u32,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) file: &'static str,
    pub(super) value: String,
}

impl Version {
    /// Where a group's share of the processors stands, by which a later server knows how many it has.
    pub(super) fn share(self) -> &'static str {
        match self {
            Self::One => "cpu.shares",
            Self::Two => "cpu.weight",
        }
    }

    /// What a group with that share may use at most, whether or not others want it.
    pub(super) fn quota(self, share: u64) -> Setting {
        let quota = |cpus| cpus * PERIOD + OWN_THREADS;
        match self {
            Self::One => Setting {
                file: "cpu.cfs_quota_us",
                value: quota(share / SHARES_PER_CPU).to_string(),
            },
            Self::Two => Setting {
                file: "cpu.max",
                value: format!("{} {PERIOD}", quota(share / WEIGHT_PER_CPU)),
            },
        }
    }
}

impl Limits {
    pub(crate) fn of(spec: &MachineSpec) -> Self {
        let emulated = match spec.accelerator {
            Accelerator::Kvm => 0,
            Accelerator::Tcg => u64::from(spec.shape.cpus) * OVERHEAD_PER_EMULATED_CPU,
        };
        let memory_bytes = spec.shape.memory_bytes() + OVERHEAD + emulated;
        Self { memory_bytes, cpus: spec.shape.cpus }
    }

    /// From the start on. Files that a hierarchy does not have are left out by the writer.
    pub(super) fn settings(&self, version: Version) -> Vec<Setting> {
        let cpus = u64::from(self.cpus);
        let threads = u64::from(THREADS + self.cpus);
        let set = |file, value: String| Setting { file, value };
        match version {
            Version::Two => vec![
                set("memory.max", self.memory_bytes.to_string()),
                // Half a virtual machine is of no use to anybody.
                set("memory.oom.group", "1".into()),
                set("pids.max", threads.to_string()),
                set(version.share(), (cpus * WEIGHT_PER_CPU).min(10_000).to_string()),
                // Where somebody else has given others more, these have the usual share.
                set("io.weight", "default 100".into()),
            ],
            Version::One => vec![
                set("memory.limit_in_bytes", self.memory_bytes.to_string()),
                set("pids.max", threads.to_string()),
                set(version.share(), (cpus * SHARES_PER_CPU).min(262_144).to_string()),
                set("blkio.bfq.weight", "100".into()),
                set("cpu.cfs_period_us", PERIOD.to_string()),
            ],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Shape;

    fn settings(version: Version, accelerator: Accelerator) -> Vec<(&'static str, String)> {
        let spec = MachineSpec { shape: Shape { cpus: 2, memory_mib: 1024 }, accelerator };
        let settings = Limits::of(&spec).settings(version);
        settings.into_iter().map(|setting| (setting.file, setting.value)).collect()
    }

    #[test]
    fn a_machine_gets_its_memory_its_processors_and_a_little_for_qemu() {
        let two = settings(Version::Two, Accelerator::Kvm);
        assert!(two.contains(&("memory.max", (1408_u64 << 20).to_string())), "{two:?}");
        assert!(two.contains(&("pids.max", "130".into())), "{two:?}");
        let one = settings(Version::One, Accelerator::Tcg);
        assert!(one.contains(&("memory.limit_in_bytes", (1536_u64 << 20).to_string())), "{one:?}");
    }

    #[test]
    fn the_quota_follows_from_the_share() {
        for (version, quota) in [(Version::One, "250000"), (Version::Two, "250000 100000")] {
            let settings = settings(version, Accelerator::Tcg);
            let share = settings.iter().find(|(file, _)| *file == version.share()).unwrap();
            assert_eq!(version.quota(share.1.parse().unwrap()).value, quota);
        }
    }
}
