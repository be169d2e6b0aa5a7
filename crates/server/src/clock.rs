//! The time of day, and a time that moves evenly, as values that tests can set.

use std::{
    fs, io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use rustix::time::{ClockId, clock_gettime};
use time::OffsetDateTime;

use crate::whole_file::{Outlasts, write_whole};

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The time of day is slewed all the time; only what is more than that is a jump.
const JUMP_MS: i64 = 1000;

/// Where the server gets its times from. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Clock {
    /// Set by hand, for tests.
    held: Option<Arc<Held>>,
    /// From the time since the host's boot to the steady time.
    offset: i64,
    /// By how much the time of day has jumped away from the steady time.
    jumped: Arc<AtomicI64>,
}

#[derive(Debug)]
struct Held {
    time_of_day: AtomicI64,
    steady: AtomicI64,
}

impl Default for Clock {
    fn default() -> Self {
        Self::with_offset(time_of_day_ms() - since_boot_ms())
    }
}

impl Clock {
    fn with_offset(offset: i64) -> Self {
        Self { held: None, offset, jumped: Arc::default() }
    }

    /// The steady time goes on where the server's predecessors of the same boot had it, by what `path` says.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let boot = fs::read_to_string(BOOT_ID)?;
        let said = match fs::read_to_string(path) {
            Ok(text) => offset_of(&text, boot.trim()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        if let Some(offset) = said {
            return Ok(Self::with_offset(offset));
        }
        let clock = Self::default();
        // Of no use after this boot.
        let text = format!("{} {}\n", boot.trim(), clock.offset);
        write_whole(path, text, 0o644, Outlasts::Server)?;
        Ok(clock)
    }

    /// A clock that stands still until [`Clock::advance`].
    pub fn held_at(milliseconds: i64) -> Self {
        let held = Held { time_of_day: milliseconds.into(), steady: milliseconds.into() };
        Self { held: Some(Arc::new(held)), ..Self::with_offset(0) }
    }

    /// Lets time pass on a held clock; the host's own cannot be moved.
    pub fn advance(&self, milliseconds: i64) {
        if let Some(held) = &self.held {
            held.time_of_day.fetch_add(milliseconds, Ordering::SeqCst);
            held.steady.fetch_add(milliseconds, Ordering::SeqCst);
        }
    }

    /// Sets a held clock's time of day while no time passes.
    pub fn jump(&self, milliseconds: i64) {
        if let Some(held) = &self.held {
            held.time_of_day.fetch_add(milliseconds, Ordering::SeqCst);
        }
    }

    /// The time of day in milliseconds since 1970. It may jump either way: for what is told to people and guests, and
    /// for dates.
    pub fn now_ms(&self) -> i64 {
        self.held
            .as_ref()
            .map_or_else(time_of_day_ms, |held| held.time_of_day.load(Ordering::SeqCst))
    }

    /// The time of day in nanoseconds since 1970, for guests.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.now_ms()).unwrap_or(0).saturating_mul(1_000_000)
    }

    /// Moves evenly, also while the host sleeps, whatever happens to the time of day: for times to live. Like the time
    /// of day when the first server since the host's boot started.
    pub fn steady_ms(&self) -> i64 {
        self.held.as_ref().map_or_else(
            || since_boot_ms() + self.offset,
            |held| held.steady.load(Ordering::SeqCst),
        )
    }

    /// Which time of day it will be at this steady time, if the time of day does not jump again. The answer is the same
    /// until it does.
    pub fn time_of_day(&self, steady_ms: i64) -> OffsetDateTime {
        let (known, now) = (self.jumped.load(Ordering::Relaxed), self.now_ms() - self.steady_ms());
        let jumped = if (now - known).abs() > JUMP_MS {
            self.jumped.store(now, Ordering::Relaxed);
            now
        } else {
            known
        };
        from_ms(steady_ms.saturating_add(jumped))
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place that asks the host for the time of day"
)]
fn time_of_day_ms() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| i64::try_from(since.as_millis()).unwrap_or(i64::MAX))
}

fn since_boot_ms() -> i64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec.saturating_mul(1000).saturating_add(now.tv_nsec / 1_000_000)
}

/// Of an earlier server's line, if it is of this boot.
fn offset_of(text: &str, boot: &str) -> Option<i64> {
    let (of, offset) = text.trim().split_once(' ')?;
    if of == boot { offset.parse().ok() } else { None }
}

/// A time of the database as one of the API.
pub fn from_ms(milliseconds: i64) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp_nanos(i128::from(milliseconds) * 1_000_000)
        .unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOUR: i64 = 3_600_000;

    #[test]
    fn a_jump_of_the_time_of_day_leaves_the_steady_time_alone() {
        let clock = Clock::held_at(100 * HOUR);
        clock.jump(50 * HOUR);
        assert_eq!((clock.now_ms(), clock.steady_ms()), (150 * HOUR, 100 * HOUR));
        assert_eq!(clock.time_of_day(101 * HOUR), from_ms(151 * HOUR));
        clock.jump(-140 * HOUR);
        clock.advance(HOUR);
        assert_eq!((clock.now_ms(), clock.steady_ms()), (11 * HOUR, 101 * HOUR));
        assert_eq!(clock.time_of_day(101 * HOUR), from_ms(11 * HOUR));
    }

    #[test]
    fn a_time_that_is_told_does_not_tremble() {
        let clock = Clock::held_at(100 * HOUR);
        for nudge in [1, 3, -2, -7, 20] {
            clock.jump(nudge);
            assert_eq!(clock.time_of_day(101 * HOUR), from_ms(101 * HOUR));
        }
    }

    #[test]
    fn the_steady_time_goes_on_in_the_next_server_of_the_same_boot() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("clock");
        let first = Clock::open(&path).unwrap();
        assert!((first.steady_ms() - first.now_ms()).abs() < 1000);
        assert_eq!(Clock::open(&path).unwrap().offset, first.offset);
        // Had the time of day been another then, this server would still count as that one did.
        let boot = fs::read_to_string(BOOT_ID).unwrap();
        fs::write(&path, format!("{} {}\n", boot.trim(), first.offset + HOUR)).unwrap();
        let second = Clock::open(&path).unwrap();
        assert!((second.steady_ms() - second.now_ms() - HOUR).abs() < 1000);
        assert!(
            (second.time_of_day(second.steady_ms()) - from_ms(second.now_ms()))
                .abs()
                .whole_seconds()
                < 1
        );
    }

    #[test]
    fn another_boot_begins_with_the_time_of_day() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("clock");
        for said in ["", "a-boot-of-before 12", "garbage"] {
            fs::write(&path, said).unwrap();
            let clock = Clock::open(&path).unwrap();
            assert!((clock.steady_ms() - clock.now_ms()).abs() < 1000, "{said}");
            assert_eq!(Clock::open(&path).unwrap().offset, clock.offset);
        }
    }
}
