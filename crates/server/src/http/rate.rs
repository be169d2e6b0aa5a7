//! How often a key may ask.

use std::{
    hash::{BuildHasher, RandomState},
    num::NonZeroU32,
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, DefaultClock},
    state::keyed::HashMapStateStore,
};

use crate::Error;

/// Keys whose bucket is full again are forgotten when there are more.
const MOST_KEYS: usize = 4096;

pub struct Rate {
    limiter: Option<RateLimiter<u64, HashMapStateStore<u64>, DefaultClock>>,
    clock: DefaultClock,
    /// Keys themselves are not kept.
    names: RandomState,
}

impl Rate {
    /// Requests a second and key, twice as many at once. `None`: without a limit.
    pub fn new(a_second: Option<NonZeroU32>) -> Self {
        let quota = a_second.map(|rate| {
            Quota::per_second(rate)
                .allow_burst(rate.saturating_mul(NonZeroU32::MIN.saturating_add(1)))
        });
        Self {
            limiter: quota.map(RateLimiter::hashmap),
            clock: DefaultClock::default(),
            names: RandomState::new(),
        }
    }

    /// For keys that are valid, so that there cannot be many.
    ///
    /// # Errors
    /// 429 with a time to try again: nothing was done.
    pub(super) fn check(&self, key: &str) -> Result<(), Error> {
        let Some(limiter) = &self.limiter else { return Ok(()) };
        if limiter.len() > MOST_KEYS {
            limiter.retain_recent();
        }
        limiter.check_key(&self.names.hash_one(key)).map_err(|not_until| {
            let message =
                "too many requests with this key; send fewer, or this one again a little later";
            Error {
                retry_after: Some(not_until.wait_time_from(self.clock.now())),
                ..Error::new(api::ErrorCode::RateLimited, message)
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_key_has_a_burst_of_its_own() {
        let rate = Rate::new(NonZeroU32::new(2));
        for key in ["one", "other"] {
            assert_eq!((0..4).filter(|_| rate.check(key).is_ok()).count(), 4);
            let refused = rate.check(key).unwrap_err();
            assert_eq!((refused.code.status(), refused.retry_after.is_some()), (429, true));
        }
        let without = Rate::new(None);
        assert!((0..1000).all(|_| without.check("one").is_ok()));
    }
}
