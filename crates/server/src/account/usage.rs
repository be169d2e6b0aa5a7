//! How much was used between two times. Pure: what was had from when to when comes from the rows.

use super::settings::Prices;

const GIB: f64 = (1_u64 << 30) as f64;
/// Of which months have thirty.
const DAY_SECONDS: f64 = 86_400.0;
const MONTH_SECONDS: f64 = 30.0 * DAY_SECONDS;

/// What kind of thing is paid for as long as it is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Of a sandbox, while it runs.
    Machine,
    Volume,
    Snapshot,
}

/// Something that was had from one steady time to another, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) kind: Kind,
    pub(crate) vcpus: u64,
    pub(crate) memory_mb: u64,
    pub(crate) bytes: u64,
    pub(crate) began: i64,
    /// `None`: it is still there.
    pub(crate) ended: Option<i64>,
}

/// Amounts times milliseconds, exact.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Used {
    vcpu: u128,
    memory_mb: u128,
    volume_bytes: u128,
    snapshot_bytes: u128,
}

impl Used {
    /// From `from` on and before `to`; what is still there is so until `to`.
    pub(crate) fn between(uses: &[Use], from: i64, to: i64) -> Self {
        let mut used = Self::default();
        for one in uses {
            let (began, ended) = (one.began.max(from), one.ended.unwrap_or(to).min(to));
            let time = u128::try_from(ended.saturating_sub(began)).unwrap_or(0);
            match one.kind {
                Kind::Machine => {
                    used.vcpu += time * u128::from(one.vcpus);
                    used.memory_mb += time * u128::from(one.memory_mb);
                }
                Kind::Volume => used.volume_bytes += time * u128::from(one.bytes),
                Kind::Snapshot => used.snapshot_bytes += time * u128::from(one.bytes),
            }
        }
        used
    }

    /// In the API's units.
    pub(crate) fn shown(&self, egress_bytes: u64) -> api::UsedAmounts {
        let seconds = |amount: u128| amount as f64 / 1000.0;
        let gib_months = |amount| seconds(amount) / GIB / MONTH_SECONDS;
        api::UsedAmounts {
            vcpu_seconds: seconds(self.vcpu),
            memory_gb_seconds: seconds(self.memory_mb) / 1024.0,
            volume_gb_seconds: seconds(self.volume_bytes) / GIB,
            volume_gb_months: gib_months(self.volume_bytes),
            snapshot_gb_seconds: seconds(self.snapshot_bytes) / GIB,
            snapshot_gb_months: gib_months(self.snapshot_bytes),
            egress_bytes,
        }
    }
}

impl Prices {
    pub(crate) fn of(&self, used: &api::UsedAmounts) -> api::Price {
        let vcpus = used.vcpu_seconds / 3600.0 * self.vcpu_hour;
        let memory = used.memory_gb_seconds / 3600.0 * self.memory_gb_hour;
        let volumes = used.volume_gb_months * self.volume_gb_month;
        let snapshots = used.snapshot_gb_months * self.snapshot_gb_month;
        let egress = used.egress_bytes as f64 / GIB * self.egress_gb;
        api::Price {
            currency: self.currency.clone(),
            vcpus,
            memory,
            volumes,
            snapshots,
            egress,
            total: vcpus + memory + volumes + snapshots + egress,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn uses() -> impl Strategy<Value = Vec<Use>> {
        let kinds = prop::sample::select(vec![Kind::Machine, Kind::Volume, Kind::Snapshot]);
        let one = (kinds, 1_u64..9, 0_i64..10_000, prop::option::of(0_i64..10_000)).prop_map(
            |(kind, amount, began, length)| Use {
                kind,
                vcpus: amount,
                memory_mb: amount * 1024,
                bytes: amount << 30,
                began,
                ended: length.map(|length| began + length),
            },
        );
        proptest::collection::vec(one, 0..20)
    }

    fn plus(one: Used, other: Used) -> Used {
        Used {
            vcpu: one.vcpu + other.vcpu,
            memory_mb: one.memory_mb + other.memory_mb,
            volume_bytes: one.volume_bytes + other.volume_bytes,
            snapshot_bytes: one.snapshot_bytes + other.snapshot_bytes,
        }
    }

    proptest! {
        #[test]
        fn what_is_used_in_two_parts_is_what_is_used_in_the_whole(
            uses in uses(), from in 0_i64..25_000, first in 0_i64..25_000, second in 0_i64..25_000,
        ) {
            let (middle, to) = (from + first, from + first + second);
            let parts = plus(Used::between(&uses, from, middle), Used::between(&uses, middle, to));
            prop_assert_eq!(parts, Used::between(&uses, from, to));
        }

        #[test]
        fn a_use_that_is_cut_and_goes_on_is_the_same(uses in uses(), cut in 0_i64..25_000, to in 0_i64..25_000) {
            // As by a restart, or by a volume that is found again with its size.
            let halves: Vec<Use> = uses.iter().flat_map(|one| {
                let inside = cut > one.began && one.ended.is_none_or(|end| cut < end);
                let cut = if inside { cut } else { one.began };
                [Use { ended: Some(cut), ..one.clone() }, Use { began: cut, ..one.clone() }]
            }).collect();
            prop_assert_eq!(Used::between(&halves, 0, to), Used::between(&uses, 0, to));
        }

        #[test]
        fn nothing_is_used_outside(uses in uses(), at in 0_i64..25_000, earlier in 0_i64..100) {
            prop_assert_eq!(Used::between(&uses, at, at - earlier), Used::default());
            prop_assert_eq!(Used::between(&uses, 30_000, 20_000 - earlier), Used::default());
        }
    }

    #[test]
    fn a_gigabyte_for_thirty_days_is_a_month_of_one() {
        let day = 86_400_000;
        let kept = |kind, bytes| Use { kind, vcpus: 0, memory_mb: 0, bytes, began: 0, ended: None };
        let machine = Use {
            kind: Kind::Machine,
            vcpus: 2,
            memory_mb: 1536,
            bytes: 0,
            began: day,
            ended: Some(day + 1500),
        };
        let uses = [kept(Kind::Volume, 5 << 30), kept(Kind::Snapshot, 1 << 29), machine];
        let shown = Used::between(&uses, 0, 30 * day).shown(1 << 31);
        assert_eq!((shown.volume_gb_months, shown.snapshot_gb_months), (5.0, 0.5));
        assert_eq!((shown.vcpu_seconds, shown.memory_gb_seconds), (3.0, 2.25));
        let prices = Prices {
            currency: "EUR".to_owned(),
            volume_gb_month: 0.1,
            vcpu_hour: 1.2,
            egress_gb: 0.25,
            ..Prices::default()
        };
        let price = prices.of(&shown);
        assert_eq!((price.volumes, price.egress, price.memory), (0.5, 0.5, 0.0));
        assert!((price.vcpus - 0.001).abs() < 1e-12 && (price.total - 1.001).abs() < 1e-12);
    }
}
