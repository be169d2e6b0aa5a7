//! Which backup for which time, when the next one is due, and which are needed no longer. Pure.

use std::{ops::RangeInclusive, time::Duration};

use crate::db::{BaseRow, ChainRow};

/// A base backup is due after so much of the log, so that no restore has more to go through: 1 GiB.
const MOST_SEGMENTS: u64 = 64;

/// What a database of a time is made of.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Way {
    pub(super) base: BaseRow,
    pub(super) timeline: u32,
    /// Beginning with the base's own.
    pub(super) segments: RangeInclusive<u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unreachable {
    NoBackup,
    /// Before the first base backup.
    TooEarly,
    /// Not archived yet, if the chain goes on.
    NotYet,
    /// The log broke off before, and the next backup is of a later time.
    Gap,
}

/// Of a time in milliseconds; bases and chains are in the order of their time.
pub(super) fn way_to(
    time: i64,
    chains: &[ChainRow],
    bases: &[BaseRow],
) -> Result<Way, Unreachable> {
    let Some(first) = bases.first() else { return Err(Unreachable::NoBackup) };
    if time < first.ended_at {
        return Err(Unreachable::TooEarly);
    }
    let (before, after): (Vec<&BaseRow>, Vec<&BaseRow>) =
        bases.iter().partition(|base| base.ended_at <= time);
    let base = before.last().copied().unwrap_or(first);
    let chain = chains.iter().find(|chain| chain.chain == base.chain);
    let Some(chain) = chain else { return Err(Unreachable::Gap) };
    if chain.archived_until.is_none_or(|until| until < time) {
        let goes_on = chains.last().is_some_and(|last| last.chain == chain.chain);
        return Err(if goes_on { Unreachable::NotYet } else { Unreachable::Gap });
    }
    // What ended with the next base ended after that time.
    let next = after.first().filter(|next| next.chain == base.chain);
    let last = next.map_or(chain.next_segment.saturating_sub(1), |next| next.last_segment);
    Ok(Way { base: base.clone(), timeline: chain.timeline, segments: base.first_segment..=last })
}

/// From the first to the last time that can be reached; there may be gaps between.
pub(super) fn reach(chains: &[ChainRow], bases: &[BaseRow]) -> Option<(i64, i64)> {
    let earliest = bases.first()?.ended_at;
    let latest = chains.iter().filter_map(|chain| chain.archived_until).max()?;
    Some((earliest, latest.max(earliest)))
}

/// What is looked at to find out whether a base backup is due.
#[derive(Debug, Clone, Copy)]
pub(super) struct Age {
    pub(super) now: i64,
    pub(super) created_at: i64,
    /// It had clients, who are gone: it is going to sleep.
    pub(super) is_left: bool,
}

pub(super) fn is_base_due(
    age: Age,
    chains: &[ChainRow],
    bases: &[BaseRow],
    first_after: Duration,
    every: Duration,
) -> bool {
    let passed = |since: i64, span: Duration| {
        i128::from(age.now) - i128::from(since)
            >= i128::try_from(span.as_millis()).unwrap_or(i128::MAX)
    };
    let Some(newest) = bases.last() else {
        return age.is_left || passed(age.created_at, first_after);
    };
    let Some(chain) = chains.last() else { return true };
    if newest.chain != chain.chain {
        return true;
    }
    let segments = chain.next_segment.saturating_sub(newest.last_segment + 1);
    segments >= MOST_SEGMENTS || (segments > 0 && passed(newest.base, every))
}

/// Of a chain or a base backup: the time, and in their order also where the clock was set back.
pub(super) fn next_id(now: i64, last: Option<i64>) -> i64 {
    last.map_or(now, |last| now.max(last.saturating_add(1)))
}

/// What is needed no longer, so that every time since `since` can be reached.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Outdated {
    pub(super) bases: Vec<BaseRow>,
    /// Whole chains.
    pub(super) chains: Vec<ChainRow>,
    /// Of the chains that stay: what lies before that segment.
    pub(super) segments: Vec<(i64, u64)>,
}

pub(super) fn outdated(since: i64, chains: &[ChainRow], bases: &[BaseRow]) -> Outdated {
    let kept_from = bases.iter().rposition(|base| base.ended_at <= since).unwrap_or(0);
    let (old, kept) = bases.split_at(kept_from);
    let mut outdated = Outdated { bases: old.to_vec(), ..Outdated::default() };
    for (index, chain) in chains.iter().enumerate() {
        match kept.iter().find(|base| base.chain == chain.chain) {
            Some(base) => outdated.segments.push((chain.chain, base.first_segment)),
            // One without a base is of use as long as it may get one.
            None if index + 1 == chains.len() => {}
            None => outdated.chains.push(chain.clone()),
        }
    }
    outdated
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(chain: i64, next_segment: u64, archived_until: Option<i64>) -> ChainRow {
        ChainRow { chain, timeline: 1, next_segment, archived_until, transactions: None }
    }

    fn base(chain: i64, base: i64, segment: u64) -> BaseRow {
        BaseRow {
            chain,
            base,
            ended_at: base + 5,
            first_segment: segment,
            last_segment: segment + 1,
            bytes: 1,
        }
    }

    #[test]
    fn the_newest_base_before_a_time_and_the_log_up_to_the_next_lead_to_it() {
        let chains = [chain(0, 40, Some(900))];
        let bases = [base(0, 100, 3), base(0, 500, 20)];
        let way = |time| way_to(time, &chains, &bases).map(|way| (way.base.base, way.segments));
        assert_eq!(way(104), Err(Unreachable::TooEarly));
        assert_eq!(way(105), Ok((100, 3..=21)));
        assert_eq!(way(504), Ok((100, 3..=21)));
        assert_eq!(way(505), Ok((500, 20..=39)));
        assert_eq!(way(900), Ok((500, 20..=39)));
        assert_eq!(way(901), Err(Unreachable::NotYet));
        assert_eq!(reach(&chains, &bases), Some((105, 900)));
    }

    #[test]
    fn no_way_leads_across_a_gap() {
        let chains = [chain(0, 10, Some(300)), chain(400, 30, Some(900)), chain(1000, 50, None)];
        let bases = [base(0, 100, 3), base(400, 450, 20)];
        let way = |time| way_to(time, &chains, &bases).map(|way| (way.base.base, way.segments));
        assert_eq!(way(300), Ok((100, 3..=9)));
        assert_eq!(way(301), Err(Unreachable::Gap));
        assert_eq!(way(454), Err(Unreachable::Gap));
        assert_eq!(way(455), Ok((450, 20..=29)));
        assert_eq!(way(901), Err(Unreachable::Gap));
        assert_eq!(way_to(5, &chains, &[]), Err(Unreachable::NoBackup));
        assert_eq!(reach(&chains, &[]), None);
    }

    #[test]
    fn a_base_is_due_first_then_daily_and_after_much_of_the_log_and_after_a_gap() {
        let seconds = Duration::from_secs;
        let due = |now, is_left, chains: &[ChainRow], bases: &[BaseRow]| {
            let age = Age { now, created_at: 0, is_left };
            is_base_due(age, chains, bases, seconds(1), seconds(10))
        };
        assert!(!due(999, false, &[], &[]));
        assert!(due(999, true, &[], &[]));
        assert!(due(1000, false, &[], &[]));
        let bases = [base(0, 0, 3)];
        assert!(!due(9_999, true, &[chain(0, 6, None)], &bases));
        assert!(due(10_000, false, &[chain(0, 6, None)], &bases));
        // Nothing has happened since.
        assert!(!due(10_000, false, &[chain(0, 5, None)], &bases));
        assert!(due(1, false, &[chain(0, 5 + MOST_SEGMENTS, None)], &bases));
        assert!(due(1, false, &[chain(0, 6, None), chain(7, 9, None)], &bases));
    }

    #[test]
    fn ids_keep_their_order_when_the_clock_is_set_back() {
        assert_eq!(next_id(7, None), 7);
        assert_eq!(next_id(7, Some(3)), 7);
        assert_eq!(next_id(7, Some(7)), 8);
        assert_eq!(next_id(7, Some(900)), 901);
    }

    #[test]
    fn what_no_time_that_is_kept_needs_is_outdated() {
        let chains = [chain(0, 10, Some(300)), chain(400, 90, Some(900)), chain(950, 95, None)];
        let bases = [base(0, 100, 3), base(400, 450, 20), base(400, 600, 40), base(400, 800, 60)];
        assert_eq!(outdated(104, &chains, &bases).bases, []);
        let late = outdated(700, &chains, &bases);
        assert_eq!(late.bases, &bases[..2]);
        assert_eq!(late.chains, &chains[..1]);
        assert_eq!(late.segments, [(400, 40)]);
        // The newest stays, however old it is.
        let last = outdated(i64::MAX, &chains, &bases);
        assert_eq!((last.bases, last.segments), (bases[..3].to_vec(), vec![(400, 60)]));
        assert_eq!(outdated(0, &chains[2..], &[]), Outdated::default());
    }
}
