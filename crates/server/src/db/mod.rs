//! Rows: all the SQL there is, one text for SQLite and PostgreSQL.

mod accounts;
mod backups;
mod databases;
mod events;
mod execs;
mod keyed;
mod keys;
mod ports;
mod quotas;
mod sandboxes;
mod snapshots;
mod templates;
#[cfg(test)]
pub(crate) mod testing;
mod usage;
mod volumes;

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::future::BoxFuture;
use sqlx::{
    AnyPool, Executor,
    any::AnyPoolOptions,
    error::BoxDynError,
    migrate::{Migration, MigrationSource, MigrationType, Migrator},
};

pub(crate) use self::{
    accounts::AccountRow,
    backups::{BaseRow, ChainRow},
    databases::{DatabaseRow, NO_PORT},
    events::EventRow,
    execs::{ExecPlace, ExecRow, ExecSum, ShortOutput},
    keyed::KeyedRow,
    keys::KeyRow,
    ports::PreviewRow,
    sandboxes::SandboxRow,
    snapshots::SnapshotRow,
    templates::{BuildRow, TemplateRow},
    volumes::{AttachmentRow, Claim, ROOT_SLOT, VolumeRow},
};
use crate::{Error, clock::Clock};

/// Released migrations are never changed; a new one is added below.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "foundation", include_str!("migrations/0001_foundation.sql")),
    (2, "network", include_str!("migrations/0002_network.sql")),
    (3, "state", include_str!("migrations/0003_state.sql")),
    (4, "execs", include_str!("migrations/0004_execs.sql")),
    (5, "machines", include_str!("migrations/0005_machines.sql")),
    (6, "accounts", include_str!("migrations/0006_accounts.sql")),
    (7, "snapshot network", include_str!("migrations/0007_snapshot_network.sql")),
    (11, "ports", include_str!("migrations/0011_ports.sql")),
    (12, "databases", include_str!("migrations/0012_databases.sql")),
    (13, "backups", include_str!("migrations/0013_backups.sql")),
    (14, "ports of databases", include_str!("migrations/0014_ports_of_databases.sql")),
    (15, "builds", include_str!("migrations/0015_builds.sql")),
];

/// `FULL`: a row that was acknowledged is still there after a power failure.
const SQLITE_SETTINGS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; PRAGMA busy_timeout = 10000;";

/// A connection to the rows, cheap to clone.
#[derive(Clone)]
pub struct Db {
    pool: AnyPool,
    /// By which use is measured.
    clock: Clock,
    /// When what is found to have ended did so, where that was not now.
    end: Arc<Mutex<Option<i64>>>,
}

impl Db {
    /// Connects, makes a missing SQLite file, and brings the tables up to date.
    ///
    /// # Errors
    /// The database cannot be reached, or was written by a newer server.
    pub async fn connect(url: &str) -> Result<Self, sqlx::Error> {
        sqlx::any::install_default_drivers();
        let sqlite = url.starts_with("sqlite:");
        let options = AnyPoolOptions::new()
            .acquire_timeout(Duration::from_secs(10))
            .idle_timeout(None)
            .max_lifetime(None);
        let pool = if sqlite {
            // SQLite has one writer at a time anyway. With one connection our own statements queue here, in order,
            // instead of failing as busy when a transaction turns from reading to writing.
            options
                .max_connections(1)
                .after_connect(|connection, _| {
                    Box::pin(async move { connection.execute(SQLITE_SETTINGS).await.map(|_| ()) })
                })
                .connect(&creating(url))
                .await?
        } else {
            options.max_connections(8).connect(url).await?
        };
        Migrator::new(Embedded).await?.run(&pool).await?;
        Ok(Self::new(pool))
    }

    /// Connects and changes nothing: neither makes a SQLite file nor brings tables up to date.
    ///
    /// # Errors
    /// There is no such database.
    pub(crate) async fn look_into(url: &str) -> Result<Self, sqlx::Error> {
        sqlx::any::install_default_drivers();
        let options =
            AnyPoolOptions::new().acquire_timeout(Duration::from_secs(10)).max_connections(1);
        let pool = options.connect(url).await?;
        Ok(Self::new(pool))
    }

    fn new(pool: AnyPool) -> Self {
        Self { pool, clock: Clock::default(), end: Arc::default() }
    }

    #[must_use]
    pub fn with_clock(mut self, clock: &Clock) -> Self {
        self.clock = clock.clone();
        self
    }

    /// For the files of this folder alone.
    fn pool(&self) -> &AnyPool {
        &self.pool
    }

    /// Waits for statements under way and lets go of the database.
    pub async fn close(&self) {
        self.pool.close().await;
    }
}

/// The URL of a SQLite file that is made when it is missing.
fn creating(url: &str) -> String {
    if url.contains(":memory:") || url.contains("mode=") {
        url.to_owned()
    } else {
        format!("{url}{}mode=rwc", if url.contains('?') { '&' } else { '?' })
    }
}

#[derive(Debug)]
struct Embedded;

impl MigrationSource<'static> for Embedded {
    fn resolve(self) -> BoxFuture<'static, Result<Vec<Migration>, BoxDynError>> {
        let migrations = MIGRATIONS.iter().map(|&(version, name, sql)| {
            Migration::new(version, name.into(), MigrationType::Simple, sql.into(), false)
        });
        Box::pin(std::future::ready(Ok(migrations.collect())))
    }
}

/// A number that the API shows as unsigned. What we write is never negative, so a negative one is damage.
fn unsigned<T: TryFrom<i64>>(value: i64) -> Result<T, Error> {
    T::try_from(value).map_err(|_| {
        Error::internal(format!("a row holds {value} where no such number was ever written"))
    })
}

fn signed<T: TryInto<i64>>(value: T) -> Result<i64, Error> {
    value.try_into().map_err(|_| Error::invalid("a number is too large"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_second_server_finds_the_tables_of_the_first() {
        for database in testing::databases().await {
            drop(Db::connect(database.url()).await.unwrap());
            let again = Db::connect(database.url()).await.unwrap();
            let accounts: Vec<String> = sqlx::query_scalar("SELECT id FROM accounts")
                .fetch_all(again.pool())
                .await
                .unwrap();
            assert_eq!(accounts, ["default"], "{}", database.url());
            again.close().await;
        }
    }

    #[tokio::test]
    async fn a_row_of_an_unknown_account_is_refused() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let refused = sqlx::query("INSERT INTO builds (id, account, name, status, created_at) VALUES ($1, $2, $3, $4, $5)")
                .bind("b")
                .bind("nobody")
                .bind("t")
                .bind("queued")
                .bind(1_i64)
                .execute(db.pool())
                .await;
            assert!(refused.is_err(), "{}", database.url());
            db.close().await;
        }
    }

    #[tokio::test]
    async fn a_sandbox_comes_back_as_it_went_until_it_is_deleted() {
        use machine::network::Traffic;

        use crate::sandbox::{State, Target};
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let map = |pairs: &[(&str, &str)]| {
                pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
            };
            let mut row = SandboxRow {
                id: api::SandboxId::random(),
                account: api::AccountId::default_account(),
                template: "base".parse().unwrap(),
                bake: "key".to_owned(),
                from_snapshot: None,
                cpu: 2,
                memory_mb: 2048,
                disk_mb: 10_240,
                state: State::Creating,
                target: Target::Running,
                metadata: map(&[("job", "é \"quoted\"")]),
                environment: map(&[("A", "1\n2")]),
                created_at: 1_700_000_000_123,
                ttl_seconds: Some(3600),
                expires_at: None,
                ttl_left_ms: None,
                idle_seconds: None,
                slot: None,
                boot_ms: 0,
                error: None,
                network: api::NetworkPolicy::default(),
                past_traffic: Traffic::default(),
                name: Some("a machine".to_owned()),
                durable: true,
                keeps_root: false,
                cold_boot: false,
                managed: true,
                databases: vec![api::DatabaseId::random()],
            };
            let same = async |row: &SandboxRow| {
                let read = db.all_sandboxes().await.unwrap();
                assert_eq!(read.len(), 1);
                let tell = |row: &SandboxRow| {
                    let numbers = (row.cpu, row.memory_mb, row.disk_mb, row.boot_ms, row.slot);
                    let times = (
                        row.created_at,
                        row.ttl_seconds,
                        row.expires_at,
                        row.ttl_left_ms,
                        row.idle_seconds,
                    );
                    let maps = (row.metadata.clone(), row.environment.clone());
                    let states = (row.state, row.target, row.error.clone());
                    let network = (row.network.clone(), row.past_traffic);
                    let disk = (row.durable, row.keeps_root, row.cold_boot);
                    let databases = (row.managed, row.databases.clone());
                    let names =
                        (row.id, row.template.clone(), row.bake.clone(), row.name.clone(), disk);
                    (names, numbers, times, maps, states, network, databases)
                };
                assert_eq!(tell(&read[0]), tell(row));
            };
            let plan = crate::account::Plan::unlimited();
            db.insert_sandbox(&row, None, &plan).await.unwrap();
            same(&row).await;
            assert!(db.insert_sandbox(&row, None, &plan).await.is_err());

            row = SandboxRow {
                state: State::Running,
                ttl_seconds: None,
                expires_at: Some(9),
                ttl_left_ms: Some(8),
                idle_seconds: Some(7),
                slot: Some(1023),
                boot_ms: 150,
                error: Some("why".to_owned()),
                network: api::NetworkPolicy {
                    egress: api::Egress::None,
                    allow: vec!["203.0.113.0/24:443".to_owned()],
                    deny: vec!["203.0.113.9/32".to_owned()],
                    rate_limit_mbit: Some(10),
                },
                past_traffic: Traffic { sent_bytes: 1 << 40, received_bytes: 7 },
                disk_mb: 20_480,
                keeps_root: true,
                cold_boot: true,
                ..row
            };
            db.update_sandbox(&row).await.unwrap();
            same(&row).await;
            db.delete_sandbox(&row.id, None).await.unwrap();
            db.delete_sandbox(&row.id, None).await.unwrap();
            assert!(db.all_sandboxes().await.unwrap().is_empty());
            db.close().await;
        }
    }
}
