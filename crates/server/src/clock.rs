//! The time of day, as a value that tests can set.

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use time::OffsetDateTime;

/// Where the server gets the time of day from.
#[derive(Debug, Clone, Default)]
pub struct Clock {
    /// Milliseconds since 1970, when a test holds the clock.
    held: Option<Arc<AtomicI64>>,
}

impl Clock {
    /// A clock that stands still until [`Clock::advance`].
    pub fn held_at(milliseconds: i64) -> Self {
        Self { held: Some(Arc::new(AtomicI64::new(milliseconds))) }
    }

    /// Moves a held clock; the host's own cannot be moved.
    pub fn advance(&self, milliseconds: i64) {
        if let Some(held) = &self.held {
            held.fetch_add(milliseconds, Ordering::SeqCst);
        }
    }

    /// Milliseconds since 1970.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place that asks the host for the time of day"
    )]
    pub fn now_ms(&self) -> i64 {
        self.held.as_ref().map_or_else(
            || {
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
            },
            |held| held.load(Ordering::SeqCst),
        )
    }
}

/// A time of the database as one of the API.
pub fn from_ms(milliseconds: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(milliseconds) * 1_000_000)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
