//! Backups. PostgreSQL's own: base backups, and the write-ahead log in whole segments, in a store outside of the machine.
//! Nothing for it runs in the guest: the server logs in, reads, and tells PostgreSQL by a replication slot what it may throw
//! away. A *chain* is log without a gap; with a base backup in it, a database can be made as of any time from there on.

mod archive;
mod base;
mod basebackup;
mod plan;
mod remove;
mod restore;
mod store;
mod wal;

pub(super) use self::restore::parse_target;

use std::{
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use api::{DatabaseId, ErrorCode};
use tokio::sync::{Mutex as AsyncMutex, Notify, Semaphore};

use self::store::BackupStore;
use super::{Databases, settings::BackupSettings};
use crate::{
    Error,
    db::{BaseRow, ChainRow, Db},
};

/// Each takes a core of the guest and of the host.
const BASES_AT_ONCE: usize = 2;

pub(super) struct Backups {
    /// `None`: there shall be none.
    store: Option<BackupStore>,
    /// Beside what the sandboxes write.
    is_on_pool: bool,
    settings: BackupSettings,
    bases: Semaphore,
    failures: AtomicU64,
    /// Somebody is to be removed from the store.
    removed: Notify,
}

impl Backups {
    pub(super) fn open(settings: &BackupSettings, data: &Path) -> Result<Self, Error> {
        let store = BackupStore::open(&settings.place, data)?;
        Ok(Self {
            is_on_pool: store.as_ref().map_or(Ok(false), |store| store.is_beside(data))?,
            store,
            settings: settings.clone(),
            bases: Semaphore::new(BASES_AT_ONCE),
            failures: AtomicU64::new(0),
            removed: Notify::new(),
        })
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Of one database: what is in the store.
#[derive(Default)]
pub(super) struct Archive {
    known: Mutex<Known>,
    /// Held by whoever reads the log.
    turn: AsyncMutex<()>,
    /// Somebody has connected.
    pub(super) visited: Notify,
}

#[derive(Debug, Clone, Default)]
struct Known {
    /// As the rows are, oldest first.
    chains: Vec<ChainRow>,
    bases: Vec<BaseRow>,
    error: Option<String>,
}

/// What is told of it.
#[derive(Debug, Clone, Default)]
pub(super) struct Told {
    /// In milliseconds.
    pub(super) last_backup_at: Option<i64>,
    pub(super) reach: Option<(i64, i64)>,
    pub(super) error: Option<String>,
}

impl Archive {
    pub(super) async fn load(&self, db: &Db, id: &DatabaseId) -> Result<(), Error> {
        let (chains, bases) = (db.chains_of(id).await?, db.bases_of(id).await?);
        self.change(|known| (known.chains, known.bases) = (chains, bases));
        Ok(())
    }

    pub(super) fn told(&self) -> Told {
        let known = self.known();
        Told {
            last_backup_at: known.bases.last().map(|base| base.ended_at),
            reach: plan::reach(&known.chains, &known.bases),
            error: known.error,
        }
    }

    fn known(&self) -> Known {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn change(&self, with: impl FnOnce(&mut Known)) {
        with(&mut self.known.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Databases {
    /// Room for so many bytes more in the store.
    ///
    /// # Errors
    /// 507: what is left of the pool is for sandboxes.
    fn admit_to_store(&self, bytes: u64) -> Result<(), Error> {
        if self.backups.is_on_pool {
            let pool = self.sandboxes.pool_room()?;
            if pool.free_bytes < pool.reserve_bytes.saturating_add(bytes) {
                return Err(Error::new(
                    ErrorCode::CapacityExceeded,
                    "the host has no room for its backups",
                ));
            }
        }
        Ok(())
    }
}

/// A segment of the log in the store.
fn segment_name(id: &DatabaseId, chain: &ChainRow, segment: u64) -> String {
    format!("{}/{}.zst", log_name(id, chain.chain), wal::file_name(chain.timeline, segment))
}

fn log_name(id: &DatabaseId, chain: i64) -> String {
    format!("{id}/{chain}/wal")
}

const BASE_PREFIX: &str = "base-";

fn base_name(id: &DatabaseId, chain: i64, base: i64) -> String {
    format!("{id}/{chain}/{BASE_PREFIX}{base}")
}
