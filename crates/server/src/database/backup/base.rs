//! Base backups: made, and removed when no time that is kept needs them any longer.

use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use time::OffsetDateTime;
use tokio::time::{Instant, timeout};

use super::{
    super::{Databases, Entry},
    BASE_PREFIX,
    archive::{Turn, pause},
    base_name,
    basebackup::{BaseBackup, Piece},
    log_name, plan,
    store::{BackupStore, Upload},
    wal::{self, Lsn, SEGMENT_BYTES},
};
use crate::{
    Error, clock,
    db::{BaseRow, ChainRow},
};

/// A line for each file of a cluster: more than any will have.
const LONGEST_MANIFEST: usize = 256 << 20;
/// While a base backup is copied: the log that is written meanwhile.
const FETCH_EVERY: Duration = Duration::from_secs(5);
pub(super) const ARCHIVE: &str = "base.tar.zst";
pub(super) const MANIFEST: &str = "backup_manifest";

/// Beside a base backup, for whoever has nothing but the store: it is written last.
#[derive(Serialize)]
struct Label<'a> {
    database: String,
    label: &'a str,
    role: &'a str,
    database_name: &'a str,
    timeline: u32,
    first_segment: String,
    last_segment: String,
    #[serde(with = "time::serde::rfc3339")]
    ended_at: OffsetDateTime,
    log: String,
}

impl Databases {
    /// With the log that belongs to it: when this returns it is of use.
    pub(super) async fn make_base(&self, turn: &mut Turn<'_>) -> Result<(), Error> {
        let (entry, store) = (turn.entry, turn.store);
        let id = entry.id();
        let last = entry.archive.known().bases.last().map(|last| last.base);
        let base = plan::next_id(self.clock.now_ms(), last);
        self.sweep_bases(turn).await?;
        let name = base_name(&id, turn.chain.chain, base);
        let began = Instant::now();
        let copied = self.copy_base(turn, base);
        let copied = timeout(longest(self.disk_of(entry)?), copied).await;
        let row = copied.map_err(|_| Error::internal("a base backup took too long"))??;
        let label = label(entry, &turn.chain, &row);
        store.put(&format!("{name}/backup.json"), label?).await?;
        fault::point!("backup.base_labelled");
        self.db.insert_base(&id, &row).await?;
        let bytes = row.bytes;
        entry.archive.change(|known| known.bases.push(row));
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(database = %id, bytes, seconds, "made a base backup");
        Ok(())
    }

    /// Until the log that belongs to it is in the store as well.
    async fn copy_base(&self, turn: &mut Turn<'_>, base: i64) -> Result<BaseRow, Error> {
        let (entry, store) = (turn.entry, turn.store);
        let stream = self.dial_for_backups(entry).await?;
        let password = entry.look(|row| row.credentials.admin_password.clone());
        let mut backup = BaseBackup::begin(stream, &password).await?;
        if backup.timeline != turn.chain.timeline {
            return Err(Error::internal("a base backup is of another timeline than its log"));
        }
        let name = base_name(&entry.id(), turn.chain.chain, base);
        let first_segment = backup.start.segment();
        let most = most_bytes(self.disk_of(entry)?);
        let mut upload = store.upload(&format!("{name}/{ARCHIVE}"), most);
        let copied = self.copy_archive(turn, &mut backup, &mut upload);
        let manifest = match copied.await {
            Ok(manifest) => manifest,
            Err(error) => {
                upload.give_up().await;
                return Err(error);
            }
        };
        let bytes = upload.finish().await?;
        store.put(&format!("{name}/{MANIFEST}"), manifest).await?;
        fault::point!("backup.base_copied", Error::internal);
        let now = "SELECT (floor(extract(epoch FROM clock_timestamp()) * 1000) + 1)::bigint";
        let row = turn.admin.row(now).await?;
        let ended_at = row.first().and_then(Option::as_deref).unwrap_or_default();
        let ended_at = ended_at.parse().map_err(Error::internal)?;
        // The transaction that marks the end comes after that millisecond.
        pause().await;
        self.mark(turn).await?;
        let last_segment = turn.chain.next_segment.saturating_sub(1);
        Ok(BaseRow { chain: turn.chain.chain, base, ended_at, first_segment, last_segment, bytes })
    }

    /// Returns the list of its files.
    async fn copy_archive(
        &self,
        turn: &mut Turn<'_>,
        backup: &mut BaseBackup,
        upload: &mut Upload,
    ) -> Result<Bytes, Error> {
        let (mut manifest, mut copied, mut admitted) = (Vec::new(), 0, 0);
        let mut fetched = Instant::now();
        let end: Lsn = loop {
            match backup.next().await? {
                Piece::Archive(bytes) => {
                    copied += bytes.len() as u64;
                    if copied > admitted {
                        if copied > most_bytes(self.disk_of(turn.entry)?) {
                            return Err(Error::internal("a base backup is larger than its disk"));
                        }
                        self.admit_to_store(SEGMENT_BYTES)?;
                        admitted = copied + SEGMENT_BYTES;
                    }
                    upload.write(&bytes).await?;
                }
                Piece::Manifest(bytes) if manifest.len() + bytes.len() <= LONGEST_MANIFEST => {
                    manifest.extend_from_slice(&bytes);
                }
                Piece::Manifest(_) => {
                    return Err(Error::internal("the manifest of a base backup is too long"));
                }
                Piece::End(end) => break end,
            }
            // PostgreSQL keeps only so much of it, and a copy may take hours.
            if fetched.elapsed() >= FETCH_EVERY {
                self.keep_up(turn).await?;
                fetched = Instant::now();
            }
        };
        tracing::debug!(%end, "copied a base backup");
        Ok(manifest.into())
    }

    fn disk_of(&self, entry: &Entry) -> Result<u64, Error> {
        let (account, sandbox) = entry.sandbox();
        self.sandboxes.disk_of(&account, &sandbox)
    }

    /// What servers that died meanwhile have left.
    async fn sweep_bases(&self, turn: &Turn<'_>) -> Result<(), Error> {
        let (id, known) = (turn.entry.id(), turn.entry.archive.known());
        let chain = turn.chain.chain;
        for name in turn.store.names(&format!("{id}/{chain}")).await? {
            let base = name.strip_prefix(BASE_PREFIX).map(str::parse::<i64>);
            if let Some(Ok(base)) = base
                && known.bases.iter().all(|known| known.base != base)
            {
                turn.store.remove(&base_name(&id, chain, base)).await?;
            }
        }
        Ok(())
    }

    /// Rows first: what is removed half-way is found no longer, and swept before the next base backup.
    pub(super) async fn remove_outdated(
        &self,
        entry: &Entry,
        store: &BackupStore,
    ) -> Result<(), Error> {
        let (id, known) = (entry.id(), entry.archive.known());
        let keep = i64::try_from(self.backups.settings.keep.as_millis()).unwrap_or(i64::MAX);
        let since = self.clock.now_ms().saturating_sub(keep);
        let outdated = plan::outdated(since, &known.chains, &known.bases);
        for base in &outdated.bases {
            self.db.delete_base(&id, base.base).await?;
            entry.archive.change(|known| known.bases.retain(|known| known.base != base.base));
            store.remove(&base_name(&id, base.chain, base.base)).await?;
        }
        for (chain, first) in outdated.segments {
            let Some(row) = known.chains.iter().find(|row| row.chain == chain) else { continue };
            let first = wal::file_name(row.timeline, first);
            for name in store.names(&log_name(&id, chain)).await? {
                if name < first {
                    store.remove(&format!("{}/{name}", log_name(&id, chain))).await?;
                }
            }
        }
        for chain in &outdated.chains {
            store.remove(&format!("{id}/{}", chain.chain)).await?;
            self.db.delete_chain(&id, chain.chain).await?;
            entry.archive.change(|known| known.chains.retain(|known| known.chain != chain.chain));
        }
        Ok(())
    }
}

/// Of what a base backup may take in the store: files may be replaced while they are copied.
fn most_bytes(disk: u64) -> u64 {
    disk.saturating_mul(2)
}

/// Others wait for it: a megabyte in a second is less than any guest and any store do.
fn longest(disk: u64) -> Duration {
    Duration::from_secs(600 + disk / 1_000_000)
}

fn label(entry: &Entry, chain: &ChainRow, base: &BaseRow) -> Result<Bytes, Error> {
    let row = entry.row();
    let label = Label {
        database: row.id.to_string(),
        label: &row.label,
        role: &row.credentials.role,
        database_name: &row.credentials.database,
        timeline: chain.timeline,
        first_segment: wal::file_name(chain.timeline, base.first_segment),
        last_segment: wal::file_name(chain.timeline, base.last_segment),
        ended_at: clock::from_ms(base.ended_at),
        log: log_name(&row.id, chain.chain),
    };
    Ok(serde_json::to_vec_pretty(&label).map_err(Error::internal)?.into())
}
