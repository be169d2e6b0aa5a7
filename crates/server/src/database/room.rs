//! Room for what a database writes. Its disk grows before it is full. At its limit, and while the pool has no room, the
//! database refuses writes and goes on answering reads: PostgreSQL shall not find its disk full in the middle of its log.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use api::AccountId;
use tokio::time::{Instant, sleep};

use super::{Databases, Entry};
use crate::{Error, account::Plan, sandbox::State};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// From the first look to the first login: whoever waits for an answer has it by then.
const LET_BE: Duration = Duration::from_secs(5);
/// Between two attempts at what did not succeed. It goes on writing meanwhile.
const PAUSE: Duration = Duration::from_secs(3);
const MIB: u64 = 1 << 20;
/// A disk with less free grows: more than is written between two looks.
const SCARCE: u64 = 512 * MIB;
/// What is kept free by refusing writes.
const RESERVE: u64 = 256 * MIB;
/// A disk doubles, within these bounds.
const STEP: std::ops::RangeInclusive<u64> = 1024 * MIB..=16 * 1024 * MIB;

/// Of the file system that PostgreSQL writes to, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Room {
    total: u64,
    free: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Nothing,
    /// To so many bytes.
    Growth(u64),
    /// It may not grow.
    Limit,
}

/// `disk`: what the disk has. The file system has a little less, or much less where it has not grown with it yet.
fn need(room: Room, disk: u64, largest: u64) -> Need {
    if room.free >= SCARCE.max(room.total / 4) {
        Need::Nothing
    } else if room.total < disk / 10 * 9 {
        Need::Growth(disk)
    } else if disk < largest {
        Need::Growth(largest.min(disk + disk.clamp(*STEP.start(), *STEP.end())))
    } else {
        Need::Limit
    }
}

/// Whether so little is left that writes are refused: more has to be free for them to be taken again.
fn is_short(free: u64, reserve: u64, refuses: bool) -> bool {
    free < if refuses { reserve.saturating_mul(2) } else { reserve }
}

/// Whether somebody goes on writing all the same, as they may to make room.
fn is_spent(free: u64, reserve: u64) -> bool {
    free < reserve / 2
}

impl Databases {
    /// For as long as it lives.
    pub(super) async fn keep_room(self: &Arc<Self>, entry: &Arc<Entry>) {
        let mut refuses = None;
        let mut let_be = None;
        loop {
            sleep(LOOK_EVERY).await;
            let (account, sandbox) = entry.sandbox();
            let runs =
                matches!(self.sandboxes.state_of(&account, &sandbox), Some((State::Running, _)));
            // What nobody is connected to does not grow. Where writes are refused, they are to be taken again before the next
            // one comes.
            if !runs || (entry.sessions() == 0 && refuses == Some(false)) {
                continue;
            }
            let in_use = self.sandboxes.unnoticed_use_of(&account, &sandbox);
            let let_be = *let_be.get_or_insert_with(|| Instant::now() + LET_BE);
            let looked = match refuses {
                // Meanwhile it may write.
                None if Instant::now() < let_be => {
                    self.see_to_room(entry, false).await.map(|refuses| refuses.then_some(true))
                }
                None => self.ask_whether_it_refuses(entry).await.map(Some),
                Some(refuses) => self.see_to_room(entry, refuses).await.map(Some),
            };
            drop(in_use);
            match looked {
                Ok(now) => refuses = now,
                Err(error) => {
                    // It may have been told so, half-way.
                    refuses = None;
                    tracing::warn!(database = %entry.id(), %error, cause = error.causes(), "failed to see to a database's room");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    /// PostgreSQL itself remembers, over restarts of both.
    async fn ask_whether_it_refuses(&self, entry: &Entry) -> Result<bool, Error> {
        let _turn = entry.turn.lock().await;
        self.admin(entry).await?.refuses_writes().await
    }

    /// Whether it refuses writes from now on.
    async fn see_to_room(self: &Arc<Self>, entry: &Entry, refuses: bool) -> Result<bool, Error> {
        let (account, sandbox) = entry.sandbox();
        let pool = self.sandboxes.pool_room()?;
        let reserve = pool.reserve_bytes / 2;
        let mut short = is_short(pool.free_bytes, reserve, refuses)
            .then(|| "the host has no room for what it writes".to_owned());
        let mut must_end = is_spent(pool.free_bytes, reserve);
        let disk = self.sandboxes.disk_of(&account, &sandbox)?;
        // Without asking the guest: what it has freed may still count here, but no more can be in use.
        let is_sure = self.sandboxes.disk_use_of(&account, &sandbox) < disk / 2;
        if short.is_none() && (refuses || !is_sure) {
            let room = self.room_in(entry).await?;
            let is_short = is_short(room.free, RESERVE, refuses);
            let limit = match need(room, disk, self.settings.largest_disk) {
                Need::Nothing => None,
                Need::Growth(wanted) => match wanted.min(self.allowed(&account, disk).await?) {
                    bytes if bytes == disk && wanted > disk => {
                        Some("the account's plan allows no larger disk".to_owned())
                    }
                    bytes => match self.grow(entry, bytes).await {
                        Ok(()) => None,
                        Err(error) if is_short => {
                            Some(format!("its disk cannot grow: {}", error.message))
                        }
                        Err(error) => return Err(error),
                    },
                },
                Need::Limit => {
                    let largest = self.settings.largest_disk / MIB;
                    Some(format!("its disk has reached its limit of {largest} MB"))
                }
            };
            short = limit.filter(|_| is_short);
            must_end |= is_spent(room.free, RESERVE);
        }
        if short.is_some() && must_end {
            self.admin(entry).await?.end_writers().await?;
        }
        if short.is_some() != refuses {
            self.refuse_writes(entry, short.is_some()).await?;
        }
        let reason = short.map(|why| format!("writes are refused: {why}"));
        let refuses = reason.is_some();
        *entry.short_of.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        Ok(refuses)
    }

    /// How large the plan lets a disk be that has so many bytes.
    async fn allowed(&self, account: &AccountId, disk: u64) -> Result<u64, Error> {
        let plan = self.plan_of(account).await?;
        Ok(disk.saturating_add(plan.disk_left(&self.db.amounts(account).await?)))
    }

    async fn plan_of(&self, account: &AccountId) -> Result<Arc<Plan>, Error> {
        Ok(self.plans.plan_of(account, &self.db.accounts().await?))
    }

    async fn refuse_writes(&self, entry: &Entry, refuse: bool) -> Result<(), Error> {
        let _turn = entry.turn.lock().await;
        let admin = self.admin(entry).await?;
        admin.refuse_writes(refuse).await?;
        if refuse {
            admin.end_writers().await?;
            tracing::warn!(database = %entry.id(), "refuses writes for want of room");
        } else {
            tracing::info!(database = %entry.id(), "takes writes again");
        }
        Ok(())
    }

    pub(super) async fn grow(&self, entry: &Entry, bytes: u64) -> Result<(), Error> {
        let (account, sandbox) = entry.sandbox();
        let begun = Instant::now();
        let plan = self.plan_of(&account).await?;
        self.sandboxes.grow_root(&account, &sandbox, bytes, &plan).await?;
        self.run_inside(entry, "resize2fs /dev/vda").await?;
        tracing::info!(database = %entry.id(), mb = bytes / MIB, seconds = begun.elapsed().as_secs_f64(), "its disk has grown");
        Ok(())
    }

    async fn room_in(&self, entry: &Entry) -> Result<Room, Error> {
        let told = self.run_inside(entry, "stat -f -c '%S %b %a' /").await?;
        let numbers: Vec<u64> =
            told.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        match numbers[..] {
            [block, total, free] => {
                Ok(Room { total: block.saturating_mul(total), free: block.saturating_mul(free) })
            }
            _ => Err(Error::internal(format!("a guest told of its room: {told}"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_disk_grows_before_it_is_full_and_up_to_its_limit() {
        let room = |total, free| Room { total, free };
        assert_eq!(need(room(2 * GIB, GIB), 2 * GIB, 64 * GIB), Need::Nothing);
        assert_eq!(need(room(2 * GIB, SCARCE - 1), 2 * GIB, 64 * GIB), Need::Growth(4 * GIB));
        assert_eq!(need(room(40 * GIB, 9 * GIB), 40 * GIB, 64 * GIB), Need::Growth(56 * GIB));
        assert_eq!(need(room(56 * GIB, GIB), 56 * GIB, 64 * GIB), Need::Growth(64 * GIB));
        assert_eq!(need(room(64 * GIB, GIB), 64 * GIB, 64 * GIB), Need::Limit);
        // The disk has grown, and the file system did not.
        assert_eq!(need(room(2 * GIB, GIB / 4), 4 * GIB, 4 * GIB), Need::Growth(4 * GIB));
        assert_eq!(need(room(2 * GIB, GIB / 4), 2 * GIB, GIB), Need::Limit);
    }

    #[test]
    fn writes_are_taken_again_when_more_is_free_than_what_ended_them() {
        assert!(is_short(RESERVE - 1, RESERVE, false) && is_short(2 * RESERVE - 1, RESERVE, true));
        assert!(!is_short(RESERVE, RESERVE, false) && !is_short(2 * RESERVE, RESERVE, true));
        assert!(!is_short(0, 0, true));
    }
}
