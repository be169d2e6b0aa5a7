//! Whether the host has room for one more machine. Pure: what is in use is measured elsewhere.
//!
//! Memory is lent several times over, since clones share what they do not write: what decides is what they really take.
//! A reserve stays free, so that machines that run can grow before new ones come in. Disks are lent freely, too.

use std::fmt;

use crate::Error;

/// A clone that was just restored takes 30 to 50 MiB of its own, and more once it is worked with.
const MACHINE_BYTES: u64 = 96 << 20;
/// One that has booted has written to so much of its memory, its kernel's own and the page cache of its first programs.
const BOOTED_BYTES: u64 = 224 << 20;
/// Its first writes to a disk that shared every block.
const MACHINE_DISK_BYTES: u64 = 64 << 20;
/// Until what is short may have come back.
const RETRY_SECONDS: u64 = 5;

/// What may be used of the host.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    pub(crate) machines: usize,
    /// Memory that no machine may be created into.
    pub(crate) memory_reserve: u64,
    /// How many times the memory beyond the reserve may be promised to guests.
    pub(crate) memory_overcommit: f64,
    /// Room on the pool that no sandbox, snapshot or volume may be created into.
    pub(crate) disk_reserve: u64,
}

/// What is in use of the host.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) machines: usize,
    /// The sum of the sizes of those machines' memory.
    pub(crate) promised: u64,
    /// What all machines really have for themselves, those that stand ready as well.
    pub(crate) private: u64,
    /// What machines under way are going to take.
    pub(crate) memory_expected: u64,
    pub(crate) memory_total: u64,
    /// What a new process could have without anything being swapped out.
    pub(crate) memory_available: u64,
    pub(crate) disk_expected: u64,
    pub(crate) disk_free: u64,
}

/// What one more machine takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    pub(crate) promised: u64,
    pub(crate) memory: u64,
    pub(crate) disk: u64,
}

impl Need {
    /// Of a machine that is restored from a bake.
    pub(crate) fn of_clone(memory_bytes: u64) -> Self {
        Self {
            promised: memory_bytes,
            memory: MACHINE_BYTES.min(memory_bytes),
            disk: MACHINE_DISK_BYTES,
        }
    }

    /// Of a machine that boots from its disk.
    pub(crate) fn of_boot(memory_bytes: u64) -> Self {
        Self { memory: BOOTED_BYTES.min(memory_bytes), ..Self::of_clone(memory_bytes) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shortage {
    Machines,
    Promised,
    /// More than could be promised to it on an empty host.
    TooLarge,
    Memory,
    Disk,
}

impl Limits {
    /// How much may be promised to all guests together.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a limit need not be exact, and a cast of a float ends at the bounds"
    )]
    pub(crate) fn promises(&self, memory_total: u64) -> u64 {
        (memory_total.saturating_sub(self.memory_reserve) as f64 * self.memory_overcommit) as u64
    }

    /// Whether one more machine fits beside what is in use.
    ///
    /// # Errors
    /// What is short.
    pub(crate) fn admit(&self, usage: &Usage, need: &Need) -> Result<(), Shortage> {
        let promises = self.promises(usage.memory_total);
        if need.promised > promises {
            return Err(Shortage::TooLarge);
        }
        self.admit_bytes(usage, need.disk)?;
        if usage.machines >= self.machines {
            return Err(Shortage::Machines);
        }
        if sum([usage.promised, need.promised]) > promises.into() {
            return Err(Shortage::Promised);
        }
        let coming = [self.memory_reserve, usage.memory_expected, need.memory];
        if sum(coming) > usage.memory_available.into()
            || sum(coming) + u128::from(usage.private) > usage.memory_total.into()
        {
            return Err(Shortage::Memory);
        }
        Ok(())
    }

    /// Whether so many bytes more may lie on the pool.
    ///
    /// # Errors
    /// The disk is short.
    pub(crate) fn admit_bytes(&self, usage: &Usage, bytes: u64) -> Result<(), Shortage> {
        let wanted = sum([self.disk_reserve, usage.disk_expected, bytes]);
        if wanted > usage.disk_free.into() { Err(Shortage::Disk) } else { Ok(()) }
    }

    /// Machines stand ready only while there is room for others beside them.
    pub(crate) fn may_stand_ready(&self, usage: &Usage) -> bool {
        let generous = Self { memory_reserve: self.memory_reserve.saturating_mul(3) / 2, ..*self };
        let need = Need { promised: 0, memory: MACHINE_BYTES, disk: 0 };
        generous.admit(&Usage { machines: 0, promised: 0, ..*usage }, &need).is_ok()
    }
}

/// Without an end to it.
fn sum<const N: usize>(parts: [u64; N]) -> u128 {
    parts.into_iter().map(u128::from).sum()
}

impl Shortage {
    /// Whether it may be over within seconds, without anyone having to act.
    pub(crate) fn may_pass(self) -> bool {
        match self {
            Self::Machines | Self::Promised | Self::Memory => true,
            Self::TooLarge | Self::Disk => false,
        }
    }

    /// For the metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Machines => "machines",
            Self::Promised => "promised_memory",
            Self::TooLarge => "size",
            Self::Memory => "memory",
            Self::Disk => "disk",
        }
    }
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Machines => {
                "the host runs as many sandboxes as it is set to; delete some, or try again shortly"
            }
            Self::Promised => {
                "the host's memory is promised to other sandboxes; delete some, ask for less `memory_mb`, or try again shortly"
            }
            Self::TooLarge => "`memory_mb` is more than this host may give to a sandbox; ask for less",
            Self::Memory => {
                "the host has no memory left for another sandbox; delete some, or try again shortly"
            }
            Self::Disk => "the host's disk is full; delete sandboxes, snapshots or volumes, or try again later",
        })
    }
}

// Every one of them means that nothing was created: clients send the same request again.
impl From<Shortage> for Error {
    fn from(shortage: Shortage) -> Self {
        let message = shortage.to_string();
        if shortage.may_pass() {
            Self::busy(message, RETRY_SECONDS)
        } else {
            Self::new(api::ErrorCode::CapacityExceeded, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::Capacity;

    const GIB: u64 = 1 << 30;

    fn usages() -> impl Strategy<Value = Usage> {
        let memory = || 0..64 * GIB;
        (0usize..600, memory(), memory(), 0..4 * GIB, memory(), memory(), 0..4 * GIB, memory())
            .prop_map(|(machines, promised, private, memory_expected, total, free, disk, room)| {
                Usage {
                    machines,
                    promised,
                    private,
                    memory_expected,
                    memory_total: total,
                    memory_available: free.min(total),
                    disk_expected: disk,
                    disk_free: room,
                }
            })
    }

    fn limits() -> impl Strategy<Value = Limits> {
        (0usize..600, 0..8 * GIB, 0.0..20.0, 0..8 * GIB).prop_map(
            |(machines, memory_reserve, memory_overcommit, disk_reserve)| Limits {
                machines,
                memory_reserve,
                memory_overcommit,
                disk_reserve,
            },
        )
    }

    fn needs() -> impl Strategy<Value = Need> {
        (0..8 * GIB, 0..GIB, 0..GIB).prop_map(|(promised, memory, disk)| Need {
            promised,
            memory,
            disk,
        })
    }

    proptest! {
        #[test]
        fn nothing_is_created_into_a_reserve_or_past_a_limit(limits in limits(), usage in usages(), need in needs()) {
            if limits.admit(&usage, &need).is_ok() {
                prop_assert!(usage.machines < limits.machines);
                prop_assert!(usage.memory_available >= limits.memory_reserve + usage.memory_expected + need.memory);
                prop_assert!(usage.memory_total >= limits.memory_reserve + usage.private + usage.memory_expected + need.memory);
                prop_assert!(usage.disk_free >= limits.disk_reserve + usage.disk_expected + need.disk);
                prop_assert!(usage.promised + need.promised <= limits.promises(usage.memory_total));
            }
        }

        #[test]
        fn what_is_refused_does_not_fit_by_more_being_in_use(limits in limits(), usage in usages(), more in usages(), need in needs()) {
            let fuller = Usage {
                machines: usage.machines + more.machines,
                promised: usage.promised + more.promised,
                private: usage.private + more.private,
                memory_expected: usage.memory_expected + more.memory_expected,
                memory_total: usage.memory_total,
                memory_available: usage.memory_available.saturating_sub(more.memory_available),
                disk_expected: usage.disk_expected + more.disk_expected,
                disk_free: usage.disk_free.saturating_sub(more.disk_free),
            };
            prop_assert!(limits.admit(&usage, &need).is_ok() || limits.admit(&fuller, &need).is_err());
        }

        #[test]
        fn fifty_idle_clones_of_2_gib_fit_on_24_gib(
            // A host of 24 GiB shows a little less; its system takes some of that.
            total in 22 * GIB..=24 * GIB, system in 0..2 * GIB, idle in (30u64 << 20)..=(50 << 20), under_way in 0u64..16,
        ) {
            let limits = Capacity::default().limits(total, 74 * GIB);
            let need = Need::of_clone(2 * GIB);
            for running in 0..50u64 {
                let expected = under_way.min(running);
                let settled = running - expected;
                let usage = Usage {
                    machines: usize::try_from(running).unwrap(),
                    promised: running * 2 * GIB,
                    private: settled * idle,
                    memory_expected: expected * need.memory,
                    memory_total: total,
                    memory_available: total - system - settled * idle,
                    disk_expected: expected * need.disk,
                    disk_free: 64 * GIB - running * need.disk,
                };
                prop_assert_eq!(limits.admit(&usage, &need), Ok(()), "beside {}", running);
            }
        }

        #[test]
        fn creates_without_end_leave_the_reserve_whatever_each_takes(taken in 0u64..(4 * GIB), total in 4 * GIB..64 * GIB) {
            let limits = Limits { machines: usize::MAX, ..Capacity::default().limits(total, 64 * GIB) };
            let need = Need::of_clone(2 * GIB);
            let mut usage = Usage { memory_total: total, memory_available: total, disk_free: u64::MAX, ..Usage::default() };
            for _ in 0..1000 {
                if limits.admit(&usage, &need).is_err() {
                    break;
                }
                prop_assert!(usage.memory_available >= limits.memory_reserve);
                usage.machines += 1;
                usage.promised += need.promised;
                usage.private += taken;
                usage.memory_available = usage.memory_available.saturating_sub(taken);
            }
            prop_assert!(limits.admit(&usage, &need).is_err(), "there is always an end");
        }

        #[test]
        fn machines_stand_ready_only_where_another_could_be_created(limits in limits(), usage in usages()) {
            let limits = Limits { machines: usize::MAX, memory_overcommit: f64::INFINITY, ..limits };
            let need = Need { promised: 0, memory: MACHINE_BYTES, disk: 0 };
            prop_assert!(!limits.may_stand_ready(&usage) || limits.admit(&usage, &need).is_ok());
        }
    }

    #[test]
    fn a_refusal_is_one_that_clients_repeat() {
        for shortage in [
            Shortage::Machines,
            Shortage::Promised,
            Shortage::TooLarge,
            Shortage::Memory,
            Shortage::Disk,
        ] {
            let error = Error::from(shortage);
            match error.code.status() {
                503 => assert!(error.retry_after.is_some()),
                status => assert_eq!(status, 507),
            }
        }
    }
}
