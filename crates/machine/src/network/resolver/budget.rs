//! How often something may be done: so many times at once, and so many in a second.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub(super) struct Budget {
    each: Duration,
    at_once: u32,
    /// When everything that was spent is earned again.
    paid_off: Instant,
}

impl Budget {
    pub(super) fn new(a_second: u32, at_once: u32) -> Self {
        Self { each: Duration::from_secs(1) / a_second, at_once, paid_off: Instant::now() }
    }

    /// # Errors
    /// How long until there is enough.
    pub(super) fn spend(&mut self) -> Result<(), Duration> {
        let now = Instant::now();
        let owed = self.paid_off.saturating_duration_since(now) + self.each;
        match owed.checked_sub(self.each * self.at_once) {
            None | Some(Duration::ZERO) => {
                self.paid_off = now + owed;
                Ok(())
            }
            Some(pause) => Err(pause),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_burst_is_followed_by_a_steady_rate() {
        let mut budget = Budget::new(100, 20);
        let burst = (0..1000).filter(|_| budget.spend().is_ok()).count();
        assert_eq!(burst, 20);
        let mut later = 0;
        for _ in 0..100 {
            tokio::time::advance(Duration::from_millis(10)).await;
            later += (0..10).filter(|_| budget.spend().is_ok()).count();
        }
        assert_eq!(later, 100);
        let pause = budget.spend().unwrap_err();
        tokio::time::advance(pause).await;
        assert!(budget.spend().is_ok());
    }
}
