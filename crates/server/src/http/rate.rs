//! How often a key may ask.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    num::NonZeroU32,
    sync::{Arc, Mutex},
};

use governor::{
    Quota, RateLimiter,
    clock::{Clock, DefaultClock},
    state::keyed::HashMapStateStore,
};

use crate::{Error, keys::Caller, sandbox::locked};

/// Keys whose bucket is full again are forgotten when there are more.
const MOST_KEYS: usize = 4096;

type Limiter = RateLimiter<u64, HashMapStateStore<u64>, DefaultClock>;

pub struct Rate {
    limiter: Option<Limiter>,
    /// By what plans allow: one for all accounts of the same limit.
    of_plans: Mutex<HashMap<NonZeroU32, Arc<Limiter>>>,
    clock: DefaultClock,
    /// Keys themselves are not kept.
    names: RandomState,
}

impl Rate {
    /// Requests a second and key, twice as many at once. `None`: without a limit.
    pub fn new(a_second: Option<NonZeroU32>) -> Self {
        Self {
            limiter: a_second.map(limiter),
            of_plans: Mutex::default(),
            clock: DefaultClock::default(),
            names: RandomState::new(),
        }
    }

    /// For keys that are valid, so that there cannot be many.
    ///
    /// # Errors
    /// 429 with a time to try again: nothing was done.
    pub(super) fn check(&self, key: &str, caller: &Caller) -> Result<(), Error> {
        if let Some(limiter) = &self.limiter {
            self.check_in(limiter, key)?;
        }
        let Some(rate) = caller.plan.limits.requests_per_second else { return Ok(()) };
        let limiter = Arc::clone(
            locked(&self.of_plans).entry(rate).or_insert_with(|| Arc::new(limiter(rate))),
        );
        self.check_in(&limiter, caller.account.as_str())
    }

    fn check_in(&self, limiter: &Limiter, whose: &str) -> Result<(), Error> {
        if limiter.len() > MOST_KEYS {
            limiter.retain_recent();
        }
        limiter.check_key(&self.names.hash_one(whose)).map_err(|not_until| {
            let message = "too many requests; send fewer, or this one again a little later";
            Error {
                retry_after: Some(not_until.wait_time_from(self.clock.now())),
                ..Error::new(api::ErrorCode::RateLimited, message)
            }
        })
    }
}

fn limiter(a_second: NonZeroU32) -> Limiter {
    let burst = a_second.saturating_mul(NonZeroU32::MIN.saturating_add(1));
    RateLimiter::hashmap(Quota::per_second(a_second).allow_burst(burst))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::account::{Limits, Plan};

    #[test]
    fn an_account_has_the_rate_of_its_plan_whatever_keys_it_uses() {
        let limits = Limits { requests_per_second: NonZeroU32::new(2), ..Limits::default() };
        let of = |name: &str| Caller {
            account: name.parse().unwrap(),
            scope: api::Scope::Full,
            plan: Arc::new(Plan::new("p", limits.clone())),
            ticket: None,
        };
        let rate = Rate::new(None);
        for name in ["one", "other"] {
            let admitted = (0..6).filter(|key| rate.check(&key.to_string(), &of(name)).is_ok());
            assert_eq!(admitted.count(), 4);
        }
    }

    #[test]
    fn each_key_has_a_burst_of_its_own() {
        let caller = Caller::testing();
        let rate = Rate::new(NonZeroU32::new(2));
        for key in ["one", "other"] {
            assert_eq!((0..4).filter(|_| rate.check(key, &caller).is_ok()).count(), 4);
            let refused = rate.check(key, &caller).unwrap_err();
            assert_eq!((refused.code.status(), refused.retry_after.is_some()), (429, true));
        }
        let without = Rate::new(None);
        assert!((0..1000).all(|_| without.check("one", &caller).is_ok()));
    }
}
