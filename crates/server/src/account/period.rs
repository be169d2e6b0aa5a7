//! From when to when use is told, by the time of day.

use api::{AccountId, Usage};
use time::OffsetDateTime;

use super::{Plans, Used};
use crate::{
    Error,
    clock::{self, Clock},
    db::Db,
};

/// Less than that is how a clock is slewed.
const JUMP_MS: i64 = 1000;

pub(crate) struct Period {
    /// By the time of day, in milliseconds since 1970.
    from: i64,
    to: i64,
    /// What to add to a steady time for the time of day.
    ahead: i64,
}

impl Period {
    /// By default from the beginning of the month until now.
    ///
    /// # Errors
    /// 400 when it ends before it begins.
    pub(crate) fn new(
        from: Option<OffsetDateTime>,
        to: Option<OffsetDateTime>,
        clock: &Clock,
    ) -> Result<Self, Error> {
        let now = clock.now_ms();
        let in_ms = |time: OffsetDateTime| {
            i64::try_from(time.unix_timestamp_nanos() / 1_000_000).unwrap_or(i64::MAX)
        };
        let month =
            clock::from_ms(now).replace_day(1).map(|day| day.replace_time(time::Time::MIDNIGHT));
        let from = from.or(month.ok()).map_or(0, in_ms);
        let to = to.map_or(now, in_ms);
        if from > to {
            return Err(Error::invalid("`from` must not be later than `to`"));
        }
        let ahead = now - clock.steady_ms();
        let ahead = if ahead.abs() < JUMP_MS { 0 } else { ahead };
        Ok(Self { from, to: to.min(now), ahead })
    }

    /// # Errors
    /// The rows cannot be read.
    pub(crate) async fn usage(
        &self,
        account: &AccountId,
        db: &Db,
        plans: &Plans,
    ) -> Result<Usage, Error> {
        let (from, to) = (self.from - self.ahead, self.to - self.ahead);
        let uses = db.uses(account, from, to).await?;
        let egress = db.egress(account, from, to).await?;
        let used = Used::between(&uses, from, to).shown(egress);
        Ok(Usage {
            account: account.clone(),
            from: clock::from_ms(self.from),
            to: clock::from_ms(self.to),
            price: plans.prices.as_ref().map(|prices| prices.of(&used)),
            used,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400_000;

    #[test]
    fn a_period_begins_with_the_month_and_ends_now() {
        // The 11th of January 1971.
        let clock = Clock::held_at(375 * DAY + 5);
        let period = Period::new(None, None, &clock).unwrap();
        assert_eq!((period.from, period.to, period.ahead), (365 * DAY, 375 * DAY + 5, 0));
        let later = Some(clock::from_ms(400 * DAY));
        assert_eq!(Period::new(None, later, &clock).unwrap().to, 375 * DAY + 5);
        assert!(Period::new(later, None, &clock).is_err());
        clock.jump(DAY);
        assert_eq!(Period::new(None, None, &clock).unwrap().ahead, DAY);
    }
}
