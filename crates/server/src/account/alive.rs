//! The server's signs of life. Where it is killed, what had ended when the next one looks has ended with the last of them.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use crate::{
    Error,
    clock::Clock,
    db::Db,
    whole_file::{Outlasts, write_whole},
};

/// Use is told to the second.
const BEAT: Duration = Duration::from_secs(1);
/// Less than that is how a clock is slewed.
const JUMP_MS: i64 = 1000;

/// The last one, and the boot of the host that its steady times are of.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Sign {
    boot: String,
    /// Steady time of the boot's first.
    since: i64,
    steady: i64,
    time_of_day: i64,
}

pub(crate) struct Alive {
    path: PathBuf,
    clock: Clock,
    boot: String,
    since: i64,
    /// Steady time at which what is found to have ended did so.
    last: i64,
}

impl Alive {
    /// Rows of an earlier boot are put where the time of day at its end says that they were.
    ///
    /// # Errors
    /// The file or the rows cannot be read.
    pub(crate) async fn open(data: &Path, clock: &Clock, db: &Db) -> Result<Self, Error> {
        let path = data.join("alive");
        let sign = match fs::read_to_string(&path) {
            Ok(text) => Sign::parse(&text),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(Error::internal(error)),
        };
        let boot = machine::host_boot_id().map_err(Error::internal)?;
        let now = clock.steady_ms();
        let (since, last, by) = match sign {
            None => (now, now, 0),
            Some(sign) if sign.boot == boot => (sign.since, sign.steady.min(now), 0),
            Some(sign) => {
                let by = sign.shift(clock.now_ms());
                if by != 0 {
                    db.shift_uses(sign.since, by).await?;
                }
                (now, sign.steady.saturating_add(by).min(now), by)
            }
        };
        let alive = Self { path, clock: clock.clone(), boot, since, last };
        match alive.tell(last) {
            // A server that dies before its first beat must not have the rows moved twice.
            Err(error) if by != 0 => Err(error),
            // On a full disk a server starts all the same: sandboxes can be deleted.
            Err(error) => {
                tracing::warn!(cause = error.causes(), "a sign of life cannot be written");
                Ok(alive)
            }
            Ok(()) => Ok(alive),
        }
    }

    pub(crate) fn last(&self) -> i64 {
        self.last
    }

    /// Until it is dropped.
    pub(crate) async fn beat(self) {
        loop {
            if let Err(error) = self.tell(self.clock.steady_ms()) {
                tracing::warn!(cause = error.causes(), "a sign of life cannot be written");
            }
            tokio::time::sleep(BEAT).await;
        }
    }

    /// Not flushed each second: a host that dies loses a few.
    fn tell(&self, steady: i64) -> Result<(), Error> {
        let sign = Sign {
            boot: self.boot.clone(),
            since: self.since,
            steady,
            time_of_day: self.clock.now_ms(),
        };
        write_whole(&self.path, sign.text(), 0o644, Outlasts::Server).map_err(Error::internal)
    }
}

impl Sign {
    fn text(&self) -> String {
        format!("{} {} {} {}\n", self.boot, self.since, self.steady, self.time_of_day)
    }

    /// A damaged one is none.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace();
        let boot = words.next()?.to_owned();
        let mut number = || words.next()?.parse().ok();
        Some(Self { boot, since: number()?, steady: number()?, time_of_day: number()? })
    }

    /// What to add to the steady times of a boot that is over: they went on evenly from how the clock was set at first,
    /// and it may have been set right since, at the latest now.
    fn shift(&self, time_of_day: i64) -> i64 {
        let by = self.time_of_day.min(time_of_day).saturating_sub(self.steady);
        if by.abs() < JUMP_MS { 0 } else { by }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        account::{Kind, Used},
        db::testing,
    };

    const HOUR: i64 = 3_600_000;

    #[test]
    fn a_sign_comes_back_as_it_went() {
        let sign = Sign { boot: "b".to_owned(), since: -1, steady: 2, time_of_day: 3 };
        assert_eq!(Sign::parse(&sign.text()), Some(sign));
        for damaged in ["", "b", "b 1 2", "b 1 2 x"] {
            assert_eq!(Sign::parse(damaged), None);
        }
    }

    #[test]
    fn a_clock_that_was_set_right_moves_what_was_written_before() {
        let sign =
            |steady, time_of_day| Sign { boot: String::new(), since: 0, steady, time_of_day };
        assert_eq!(sign(5 * HOUR, 5 * HOUR + 900).shift(9 * HOUR), 0);
        assert_eq!(sign(5 * HOUR, 4 * HOUR).shift(9 * HOUR), -HOUR);
        // Set right only after the boot was over.
        assert_eq!(sign(50 * HOUR, 50 * HOUR).shift(9 * HOUR), -41 * HOUR);
    }

    #[tokio::test]
    async fn use_adds_up_over_another_boot_whose_clock_is_set_right() {
        let directory = tempfile::tempdir().unwrap();
        for database in testing::databases().await {
            let clock = Clock::held_at(100 * HOUR);
            let db = Db::connect(database.url()).await.unwrap().with_clock(&clock);
            let account = api::AccountId::default_account();
            // The time of day was 40 hours ahead in a boot that lasted for two, and a volume was made after one.
            let sign = Sign {
                boot: "another".to_owned(),
                since: 138 * HOUR,
                steady: 140 * HOUR,
                time_of_day: 140 * HOUR,
            };
            db.begin_use_for_test(Kind::Volume, 139 * HOUR).await;
            fs::write(directory.path().join("alive"), sign.text()).unwrap();
            let alive = Alive::open(directory.path(), &clock, &db).await.unwrap();
            assert_eq!(alive.last(), 100 * HOUR);
            clock.advance(HOUR);
            let uses = db.uses(&account, 0, 101 * HOUR).await.unwrap();
            let shown = Used::between(&uses, 0, 101 * HOUR).shown(0);
            assert_eq!(shown.volume_gb_seconds, 2.0 * 3600.0);
            // Once only.
            Alive::open(directory.path(), &clock, &db).await.unwrap();
            assert_eq!(db.uses(&account, 0, 101 * HOUR).await.unwrap(), uses);
            db.close().await;
        }
    }
}
