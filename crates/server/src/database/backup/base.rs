//! Base backups: made, and removed when no time that is kept needs them any longer.

use std::sync::Arc;

use bytes::Bytes;
use serde::Serialize;
use time::OffsetDateTime;

use super::{
    super::{Databases, Entry, admin::Admin},
    BASE_PREFIX,
    archive::pause,
    base_name,
    basebackup::{BaseBackup, Piece},
    log_name, plan,
    store::{BackupStore, Upload},
    wal::{self, Lsn},
};
use crate::{
    Error, clock,
    db::{BaseRow, ChainRow},
};

/// A line for each file of a cluster: more than any will have.
const LONGEST_MANIFEST: usize = 256 << 20;
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
    pub(super) async fn make_base(
        self: &Arc<Self>,
        entry: &Entry,
        store: &BackupStore,
        admin: &Admin,
        chain: &mut ChainRow,
    ) -> Result<(), Error> {
        let _permit = self.backups.bases.acquire().await.map_err(Error::internal)?;
        let (id, base) = (entry.id(), self.clock.now_ms());
        self.sweep_bases(entry, store, chain.chain).await?;
        let stream = self.dial_for_backups(entry).await?;
        let password = entry.look(|row| row.credentials.admin_password.clone());
        let began = tokio::time::Instant::now();
        let mut backup = BaseBackup::begin(stream, &password).await?;
        if backup.timeline != chain.timeline {
            return Err(Error::internal("a base backup is of another timeline than its log"));
        }
        let name = base_name(&id, chain.chain, base);
        let (first, bytes) = (backup.start.segment(), copy(&mut backup, store, &name).await?);
        fault::point!("backup.base_copied", Error::internal);
        let now = "SELECT (floor(extract(epoch FROM clock_timestamp()) * 1000) + 1)::bigint";
        let row = admin.row(now).await?;
        let ended_at = row.first().and_then(Option::as_deref).unwrap_or_default();
        let ended_at = ended_at.parse().map_err(Error::internal)?;
        // The transaction that marks the end comes after that millisecond.
        pause().await;
        self.mark(entry, store, admin, chain).await?;
        let row = BaseRow {
            chain: chain.chain,
            base,
            ended_at,
            first_segment: first,
            last_segment: chain.next_segment.saturating_sub(1),
            bytes,
        };
        let label = label(entry, chain, &row);
        store.put(&format!("{name}/backup.json"), label?).await?;
        fault::point!("backup.base_labelled");
        self.db.insert_base(&id, &row).await?;
        entry.archive.change(|known| known.bases.push(row));
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(database = %id, bytes, seconds, "made a base backup");
        Ok(())
    }

    /// What servers that died meanwhile have left.
    async fn sweep_bases(
        &self,
        entry: &Entry,
        store: &BackupStore,
        chain: i64,
    ) -> Result<(), Error> {
        let (id, known) = (entry.id(), entry.archive.known());
        for name in store.names(&format!("{id}/{chain}")).await? {
            let base = name.strip_prefix(BASE_PREFIX).map(str::parse::<i64>);
            if let Some(Ok(base)) = base
                && known.bases.iter().all(|known| known.base != base)
            {
                store.remove(&base_name(&id, chain, base)).await?;
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

/// How many bytes it takes in the store.
async fn copy(backup: &mut BaseBackup, store: &BackupStore, name: &str) -> Result<u64, Error> {
    let mut upload = store.upload(&format!("{name}/{ARCHIVE}"));
    match copy_archive(backup, &mut upload).await {
        Ok(manifest) => {
            let bytes = upload.finish().await?;
            store.put(&format!("{name}/{MANIFEST}"), manifest).await?;
            Ok(bytes)
        }
        Err(error) => {
            upload.give_up().await;
            Err(error)
        }
    }
}

/// Returns the list of its files.
async fn copy_archive(backup: &mut BaseBackup, upload: &mut Upload) -> Result<Bytes, Error> {
    let mut manifest = Vec::new();
    let end: Lsn = loop {
        match backup.next().await? {
            Piece::Archive(bytes) => upload.write(&bytes).await?,
            Piece::Manifest(bytes) if manifest.len() + bytes.len() <= LONGEST_MANIFEST => {
                manifest.extend_from_slice(&bytes);
            }
            Piece::Manifest(_) => {
                return Err(Error::internal("the manifest of a base backup is too long"));
            }
            Piece::End(end) => break end,
        }
    };
    tracing::debug!(%end, "copied a base backup");
    Ok(manifest.into())
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
