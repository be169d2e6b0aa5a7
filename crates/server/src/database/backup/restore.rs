//! A database as another was at a time: a machine of its own, in it the base backup before that time, and the log from there
//! on until then.

use std::{sync::Arc, time::Duration};

use api::{DatabaseId, ErrorCode};
use bytes::Bytes;
use futures::Stream;
use machine::guest::{FileWrite, Unpack};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};
use tokio::time::{Instant, timeout_at};
use tokio_util::io::ReaderStream;

use super::{
    super::{Credentials, Databases, Entry, credentials::verifier},
    archive::{Urge, pause},
    base::{ARCHIVE, MANIFEST},
    base_name,
    plan::{Unreachable, Way, reach, way_to},
    store::BackupStore,
    wal::{self, SEGMENT_BYTES},
};
use crate::{
    Error, clock,
    db::DatabaseRow,
    keys::Caller,
    sandbox::{AsUser, InUse, Running},
};

/// For the log of a database that runs to reach the store.
const REACH_DEADLINE: Duration = Duration::from_secs(180);
const EMPTY_DEADLINE: Duration = Duration::from_secs(120);
/// Of up to a few gigabytes of log, under emulation.
const RECOVER_DEADLINE: Duration = Duration::from_secs(3600);
const PIECE: usize = 256 << 10;
const DATA: &str = "/var/lib/postgresql/data";
const RESTORE: &str = "/var/lib/postgresql/restore";

/// Microseconds since 1970.
///
/// # Errors
/// 400.
pub(in crate::database) fn parse_target(text: &str) -> Result<i64, Error> {
    let time = OffsetDateTime::parse(text, &Rfc3339).map_err(|_| {
        Error::invalid("`target_time` must be a time as in 2026-11-30T12:00:00.5Z (RFC 3339)")
    })?;
    i64::try_from(time.unix_timestamp_nanos() / 1000)
        .map_err(|_| Error::invalid("`target_time` is out of range"))
}

impl Databases {
    /// # Errors
    /// 400 with what can be reached, 409 when there is nothing yet.
    pub(in crate::database) fn check_target(
        &self,
        source: &Entry,
        target: i64,
    ) -> Result<(), Error> {
        if self.backups.store.is_none() {
            return Err(Error::conflict(
                "`target_time`: this server keeps no backups; leave it out for the database's state of now",
            ));
        }
        if target.div_euclid(1000) > self.clock.now_ms() {
            return Err(Error::invalid("`target_time` is in the future"));
        }
        let known = source.archive.known();
        match way_to(target.div_euclid(1000), &known.chains, &known.bases) {
            Ok(_) | Err(Unreachable::NotYet) => Ok(()),
            Err(unreachable) => Err(self.cannot_reach(source, &unreachable)),
        }
    }

    fn cannot_reach(&self, source: &Entry, unreachable: &Unreachable) -> Error {
        let known = source.archive.known();
        let Some((earliest, _)) = reach(&known.chains, &known.bases) else {
            return Error::conflict(
                "`target_time`: there is no backup of this database yet; the first is made soon after it is, see `last_backup_at`",
            );
        };
        let written = |time| clock::from_ms(time).format(&Rfc3339).unwrap_or_default();
        let message = match unreachable {
            Unreachable::NoBackup | Unreachable::TooEarly | Unreachable::NotYet => format!(
                "`target_time` must be between {}, the first backup that is kept, and now",
                written(earliest)
            ),
            Unreachable::Gap => {
                "`target_time` lies where the backups have a gap; name a time before or after it"
                    .to_owned()
            }
        };
        Error::invalid(message)
    }

    /// Repeated from the beginning until it is done.
    pub(in crate::database) async fn rewind(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        caller: &Caller,
        source: &DatabaseId,
        target: i64,
    ) -> Result<(), Error> {
        let row = entry.row();
        let (account, sandbox) = entry.sandbox();
        // Ahead of its source, which it no longer needs then and which may be gone.
        if is_filled(&row.origin) && self.sandboxes.state_of(&account, &sandbox).is_some() {
            return Ok(());
        }
        let source = self.find(&row.account, &source.to_string())?;
        let origin = source.look(|row| row.credentials.clone());
        let Some(store) = &self.backups.store else {
            return Err(Error::conflict("this server keeps no backups"));
        };
        // Ahead of the machine, for which nothing may be given up half-way.
        let way = tokio::select! {
            way = self.way(&source, target) => way?,
            () = entry.deleted() => return Ok(()),
            () = source.closed.cancelled() => {
                return Err(Error::not_found("its source was deleted meanwhile"));
            }
        };
        self.sandboxes.delete_managed(&account, &sandbox).await?;
        let began = Instant::now();
        let _in_use = self.machine_for(entry, &row, caller).await?;
        let origin = Credentials { admin_password: Credentials::random().admin_password, ..origin };
        let from = source.id();
        // Its files were on a disk of that size.
        let disk = self.sandboxes.disk_of(&account, &from.sandbox())?;
        tokio::select! {
            filled = self.fill(entry, (store, &from, disk), &way, target, &origin) => filled?,
            () = entry.deleted() => return Ok(()),
        }
        entry.change(|row| row.origin = origin);
        self.save(entry).await?;
        let (segments, seconds) = (way.segments.count(), began.elapsed().as_secs_f64());
        tracing::info!(database = %row.id, source = %from, segments, seconds, "restored from backups");
        Ok(())
    }

    async fn fill(
        &self,
        entry: &Entry,
        (store, source, disk): (&BackupStore, &DatabaseId, u64),
        way: &Way,
        target: i64,
        origin: &Credentials,
    ) -> Result<(), Error> {
        let bytes = way.segments.clone().count() as u64 * SEGMENT_BYTES + disk;
        let (account, sandbox) = entry.sandbox();
        if self.sandboxes.disk_of(&account, &sandbox)? < bytes {
            self.grow(entry, bytes).await?;
        }
        self.run_inside_within(entry, "atoll-postgres empty", EMPTY_DEADLINE).await?;
        self.put_in_place(entry, store, source, way).await?;
        let password = verifier(&origin.admin_password);
        let command = format!("atoll-postgres recover '{}' '{password}'", written(target));
        self.run_inside_within(entry, &command, RECOVER_DEADLINE).await.map(drop)
    }

    async fn machine_for(
        self: &Arc<Self>,
        entry: &Entry,
        row: &DatabaseRow,
        caller: &Caller,
    ) -> Result<InUse, Error> {
        self.restore(row, caller).await?;
        let (account, sandbox) = entry.sandbox();
        self.sandboxes.keep_running(&account, &sandbox).await
    }

    /// Of a source that runs, or is woken, every time until now can be reached.
    async fn way(self: &Arc<Self>, source: &Arc<Entry>, target: i64) -> Result<Way, Error> {
        let until = Instant::now() + REACH_DEADLINE;
        let too_late = || Error::busy("the source's log does not reach the store", 10);
        loop {
            let known = source.archive.known();
            match way_to(target.div_euclid(1000), &known.chains, &known.bases) {
                Ok(way) => return Ok(way),
                Err(Unreachable::NotYet) if Instant::now() < until => {}
                Err(Unreachable::NotYet) => return Err(too_late()),
                Err(unreachable) => return Err(self.cannot_reach(source, &unreachable)),
            }
            self.bring_up(source).await?;
            let (account, sandbox) = source.sandbox();
            let _in_use = self.sandboxes.unnoticed_use_of(&account, &sandbox)?;
            // Its turn may be taken by a base backup.
            timeout_at(until, self.archive(source, &mut None, Urge::Always, false))
                .await
                .map_err(|_| too_late())??;
            pause().await;
        }
    }

    /// Manifest and log beside the data directory, the base backup in it.
    async fn put_in_place(
        &self,
        entry: &Entry,
        store: &BackupStore,
        source: &DatabaseId,
        way: &Way,
    ) -> Result<(), Error> {
        let (account, sandbox) = entry.sandbox();
        let inside = self.sandboxes.inside_now(&account, &sandbox)?;
        let base = base_name(source, way.base.chain, way.base.base);
        let archive = store.content(&format!("{base}/{ARCHIVE}")).await?;
        let mut archive = ReaderStream::with_capacity(archive, PIECE);
        let request = Unpack {
            path: DATA.as_bytes().to_vec().into(),
            owner: Some("postgres:postgres".to_owned()),
        };
        inside.unpack(None, request, &mut archive).await.map_err(of_the_store)?;
        let manifest = store.get(&format!("{base}/{MANIFEST}")).await?;
        let mut manifest = futures::stream::iter([Ok::<_, std::io::Error>(manifest)]);
        write(&inside, MANIFEST, &mut manifest).await?;
        let chain = way.base.chain;
        for segment in way.segments.clone() {
            let name = wal::file_name(way.timeline, segment);
            let object = format!("{}/{name}.zst", super::log_name(source, chain));
            let mut content = ReaderStream::with_capacity(store.content(&object).await?, PIECE);
            let bytes = write(&inside, &name, &mut content).await?;
            if bytes != SEGMENT_BYTES {
                return Err(Error::internal(format!("{name} in the store is no whole segment")));
            }
        }
        Ok(())
    }
}

/// Whether all of the backup is there: only then its row is told what is in it.
fn is_filled(origin: &Credentials) -> bool {
    *origin != Credentials::of_template()
}

async fn write(
    inside: &Running,
    name: &str,
    content: &mut (impl Stream<Item = Result<Bytes, std::io::Error>> + Unpin),
) -> Result<u64, Error> {
    let request = FileWrite {
        path: format!("{RESTORE}/{name}").into_bytes().into(),
        mode: Some(0o600),
        owner: Some("postgres:postgres".to_owned()),
        create_parents: true,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    };
    let user = AsUser::named(None)?;
    Ok(inside.write_file(user, request, u64::MAX, content).await.map_err(of_the_store)?.bytes)
}

/// A guest and a stream of ours: nobody's input is at fault.
fn of_the_store(error: Error) -> Error {
    if error.code == ErrorCode::InvalidRequest { Error::internal(error) } else { error }
}

/// As PostgreSQL reads it, in UTC.
fn written(target: i64) -> String {
    let time = OffsetDateTime::from_unix_timestamp_nanos(i128::from(target) * 1000);
    let text = time.unwrap_or(OffsetDateTime::UNIX_EPOCH).format(&Rfc3339).unwrap_or_default();
    // Abbreviations of zones are not known yet where it reads this.
    text.replace('Z', "+00")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_whose_row_knows_what_is_in_it_needs_no_source() {
        assert!(!is_filled(&Credentials::of_template()));
        assert!(is_filled(&Credentials::random()));
    }

    #[test]
    fn a_target_is_read_to_the_microsecond_in_any_zone() {
        let target = parse_target("2026-11-30T12:00:00.123456+02:00").unwrap();
        assert_eq!(written(target), "2026-11-30T10:00:00.123456+00");
        assert_eq!(
            written(parse_target("2026-11-30T10:00:00Z").unwrap()),
            "2026-11-30T10:00:00+00"
        );
        for bad in ["", "now", "2026-11-30", "2026-11-30 10:00:00"] {
            assert_eq!(parse_target(bad).unwrap_err().code, ErrorCode::InvalidRequest, "{bad}");
        }
    }
}
