//! Memory for what the server holds whole: bodies of requests, and what commands print until they are answered. Each
//! has a limit of its own; here is the one of their sum.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::Error;

/// What a permit of the semaphore stands for.
const UNIT: u64 = 1024;
const RETRY_SECONDS: u64 = 2;

pub struct Buffers {
    units: Arc<Semaphore>,
    total: u64,
}

/// Bytes that count as used until this is dropped.
pub(crate) struct Held {
    units: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
    bytes: u64,
}

impl Buffers {
    pub fn new(bytes: u64) -> Self {
        let units = usize::try_from(bytes / UNIT).unwrap_or(usize::MAX);
        let units = units.min(Semaphore::MAX_PERMITS);
        Self { units: Arc::new(Semaphore::new(units)), total: units as u64 * UNIT }
    }

    /// Holds nothing yet.
    pub(crate) fn nothing(&self) -> Held {
        Held { units: Arc::clone(&self.units), permit: None, bytes: 0 }
    }

    /// # Errors
    /// 503: nothing was begun.
    pub(crate) fn hold(&self, bytes: u64) -> Result<Held, Error> {
        let mut held = self.nothing();
        if held.grow_to(bytes) { Ok(held) } else { Err(Self::short()) }
    }

    /// Only before anything was begun.
    pub(crate) fn short() -> Error {
        Error::busy(
            "the server is busy with large requests and answers; try again shortly",
            RETRY_SECONDS,
        )
    }

    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    pub(crate) fn used(&self) -> u64 {
        self.total - self.units.available_permits() as u64 * UNIT
    }
}

impl Held {
    /// Whether there was so much; if not, nothing has changed.
    pub(crate) fn grow_to(&mut self, bytes: u64) -> bool {
        let missing = bytes.div_ceil(UNIT).saturating_sub(self.bytes.div_ceil(UNIT));
        let Ok(missing) = u32::try_from(missing) else { return false };
        let Ok(more) = Arc::clone(&self.units).try_acquire_many_owned(missing) else {
            return false;
        };
        match &mut self.permit {
            Some(permit) => permit.merge(more),
            None => self.permit = Some(more),
        }
        self.bytes = self.bytes.max(bytes);
        true
    }

    pub(crate) fn shrink_to(&mut self, bytes: u64) {
        let spare = self.bytes.div_ceil(UNIT).saturating_sub(bytes.div_ceil(UNIT));
        let spare = usize::try_from(spare).unwrap_or(usize::MAX);
        if let Some(permit) = &mut self.permit {
            // Given back by being dropped.
            drop(permit.split(spare));
            self.bytes = self.bytes.min(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_until_it_is_dropped() {
        let buffers = Buffers::new(100 * UNIT);
        let mut one = buffers.hold(1).unwrap();
        assert_eq!(buffers.used(), UNIT);
        assert!(one.grow_to(40 * UNIT));
        assert!(one.grow_to(10), "it has them already");
        let two = buffers.hold(60 * UNIT).unwrap();
        assert_eq!(buffers.used(), 100 * UNIT);
        assert!(!one.grow_to(40 * UNIT + 1));
        assert_eq!(buffers.hold(1).map(drop).unwrap_err().code.status(), 503);
        one.shrink_to(10 * UNIT);
        assert_eq!(buffers.used(), 70 * UNIT);
        drop(two);
        assert!(one.grow_to(100 * UNIT));
        drop(one);
        assert_eq!(buffers.used(), 0);
        assert!(buffers.hold(u64::MAX).is_err());
    }
}
