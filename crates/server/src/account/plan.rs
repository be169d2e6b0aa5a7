//! What a plan allows. Pure: the amounts are counted where they are written.

use std::num::NonZeroU32;

use serde::Deserialize;

use crate::Error;

const GIB: u64 = 1 << 30;

/// What accounts of one plan may have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    pub name: String,
    pub(crate) limits: Limits,
}

/// Of one account. What is `None` has no limit.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Limits {
    /// Machines are sandboxes, too.
    pub(crate) sandboxes: Option<u64>,
    pub(crate) vcpus: Option<u64>,
    pub(crate) memory_mb: Option<u64>,
    pub(crate) volumes: Option<u64>,
    pub(crate) volume_min_gb: Option<u64>,
    pub(crate) volume_max_gb: Option<u64>,
    /// Volumes and the root disks of sandboxes together.
    pub(crate) total_gb: Option<u64>,
    pub(crate) snapshots: Option<u64>,
    /// Of all keys together, twice as many in a burst.
    pub(crate) requests_per_second: Option<NonZeroU32>,
}

/// What an account has, or asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amounts {
    pub(crate) sandboxes: u64,
    pub(crate) vcpus: u64,
    pub(crate) memory_mb: u64,
    pub(crate) volumes: u64,
    pub(crate) disk_bytes: u64,
    pub(crate) snapshots: u64,
}

impl Amounts {
    pub(crate) fn times(self, count: u64) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_mul(count),
            vcpus: self.vcpus.saturating_mul(count),
            memory_mb: self.memory_mb.saturating_mul(count),
            volumes: self.volumes.saturating_mul(count),
            disk_bytes: self.disk_bytes.saturating_mul(count),
            snapshots: self.snapshots.saturating_mul(count),
        }
    }
}

impl Plan {
    pub(crate) fn new(name: &str, limits: Limits) -> Self {
        Self { name: name.to_owned(), limits }
    }

    pub(crate) fn is_unlimited(&self) -> bool {
        self.limits == Limits::default()
    }

    pub(crate) fn unlimited() -> Self {
        Self::new("unlimited", Limits::default())
    }

    /// For people who try it out: what one machine of 10 GB leaves is 20 GB for volumes.
    pub(crate) fn free() -> Self {
        let limits = Limits {
            volumes: Some(2),
            volume_min_gb: Some(5),
            total_gb: Some(30),
            ..Limits::default()
        };
        Self::new("free", limits)
    }

    /// For an account whose plan this server does not know.
    pub(crate) fn unknown(name: &str) -> Self {
        let limits = Limits {
            sandboxes: Some(0),
            volumes: Some(0),
            total_gb: Some(0),
            snapshots: Some(0),
            ..Limits::default()
        };
        Self::new(name, limits)
    }

    /// Whether an account that has `taken` may have `more`. Only what is asked for counts: whoever is over a limit since
    /// it was lowered may still have more of other things.
    ///
    /// # Errors
    /// What there is too little of.
    pub(crate) fn check(&self, taken: &Amounts, more: &Amounts) -> Result<(), Error> {
        let limits = &self.limits;
        let gib = |limit: Option<u64>| limit.map(|gb| gb.saturating_mul(GIB));
        for (limit, taken, more, what) in [
            (limits.sandboxes, taken.sandboxes, more.sandboxes, "sandboxes"),
            (limits.vcpus, taken.vcpus, more.vcpus, "vCPUs"),
            (limits.memory_mb, taken.memory_mb, more.memory_mb, "MiB of memory"),
            (limits.volumes, taken.volumes, more.volumes, "volumes"),
            (limits.snapshots, taken.snapshots, more.snapshots, "snapshots"),
        ] {
            if more > 0 && limit.is_some_and(|limit| taken.saturating_add(more) > limit) {
                return Err(self.over(&format!(
                    "{} {what} in all: {taken} are taken, and this asks for {more}",
                    limit.unwrap_or_default()
                )));
            }
        }
        let (taken, more) = (taken.disk_bytes, more.disk_bytes);
        if more > 0 && gib(limits.total_gb).is_some_and(|limit| taken.saturating_add(more) > limit)
        {
            return Err(self.over(&format!(
                "{} GB of disks in all, root disks included: {} are taken, and this asks for {}",
                limits.total_gb.unwrap_or_default(),
                gigabytes(taken),
                gigabytes(more)
            )));
        }
        Ok(())
    }

    /// How many bytes more its disks may have.
    pub(crate) fn disk_left(&self, taken: &Amounts) -> u64 {
        let limit = self.limits.total_gb.map_or(u64::MAX, |gb| gb.saturating_mul(GIB));
        limit.saturating_sub(taken.disk_bytes)
    }

    fn over(&self, what: &str) -> Error {
        Error::quota_exceeded(format!(
            "the plan `{}` allows {what}; delete something, ask for less, or have the account moved to another plan",
            self.name
        ))
    }

    /// # Errors
    /// Smaller or larger than the plan allows for one volume.
    pub(crate) fn check_volume(&self, bytes: u64) -> Result<(), Error> {
        if let Some(least) = self.limits.volume_min_gb
            && bytes < least.saturating_mul(GIB)
        {
            return Err(Error::invalid(format!(
                "`size_gb` must be at least {least} (`size_mb` {}): smaller volumes are not in the plan `{}`",
                least.saturating_mul(1024),
                self.name
            )));
        }
        match self.limits.volume_max_gb {
            Some(most) if bytes > most.saturating_mul(GIB) => Err(self.over(&format!(
                "{most} GB for one volume, and this asks for {}",
                gigabytes(bytes)
            ))),
            Some(_) | None => Ok(()),
        }
    }
}

/// With what is behind the point only where there is something.
fn gigabytes(bytes: u64) -> String {
    api::Volume::sizes(bytes).1.to_string()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn disk(gb: u64) -> Amounts {
        Amounts { disk_bytes: gb * GIB, ..Amounts::default() }
    }

    fn is_over(outcome: Result<(), Error>) -> bool {
        outcome.is_err_and(|error| error.code == api::ErrorCode::QuotaExceeded)
    }

    #[test]
    fn the_free_plan_has_two_volumes_and_thirty_gigabytes_with_root_disks() {
        let free = Plan::free();
        let machine = Amounts { sandboxes: 1, vcpus: 1, memory_mb: 1024, ..disk(10) };
        assert!(free.check(&Amounts::default(), &machine).is_ok());
        let volume = |gb| Amounts { volumes: 1, ..disk(gb) };
        assert!(free.check(&machine, &volume(20)).is_ok());
        assert!(is_over(free.check(&machine, &volume(21))));
        let full = Amounts { volumes: 2, ..disk(20) };
        assert!(is_over(free.check(&full, &volume(5))));
        assert!(free.check(&full, &disk(10)).is_ok());
        assert!(free.check_volume(5 * GIB).is_ok());
        assert_eq!(
            free.check_volume(5 * GIB - 1).unwrap_err().code,
            api::ErrorCode::InvalidRequest
        );
    }

    #[test]
    fn whoever_is_over_one_limit_may_have_more_of_other_things() {
        let plan = Plan::new("p", Limits { sandboxes: Some(1), ..Limits::default() });
        let taken = Amounts { sandboxes: 3, ..Amounts::default() };
        assert!(plan.check(&taken, &Amounts { volumes: 1, ..disk(1) }).is_ok());
        assert!(is_over(plan.check(&taken, &Amounts { sandboxes: 1, ..disk(1) })));
    }

    proptest! {
        #[test]
        fn what_is_admitted_one_by_one_never_passes_the_limit(
            limit in 0_u64..40,
            asks in proptest::collection::vec(1_u64..8, 0..30),
        ) {
            let limits = Limits { total_gb: Some(limit), vcpus: Some(limit), ..Limits::default() };
            let plan = Plan::new("p", limits);
            let mut taken = Amounts::default();
            for ask in asks {
                let more = Amounts { vcpus: ask, ..disk(ask) };
                let fits = taken.vcpus + ask <= limit;
                prop_assert_eq!(plan.check(&taken, &more).is_ok(), fits);
                if fits {
                    taken.vcpus += ask;
                    taken.disk_bytes += ask * GIB;
                }
            }
            prop_assert!(taken.disk_bytes <= limit * GIB);
        }
    }
}
