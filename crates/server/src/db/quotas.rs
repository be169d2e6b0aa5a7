//! What an account has, counted and limited in the transaction that adds to it.

use api::{AccountId, SandboxId};
use sqlx::{AnyConnection, Row as _};

use super::{Db, unsigned};
use crate::{
    Error,
    account::{Amounts, Plan},
};

/// A root disk is counted with the sandbox that has it (255 is [`ROOT_SLOT`](super::ROOT_SLOT)); where it was detached, or
/// stayed, it is a volume. What a fork keeps of its parent is no snapshot of the account's own. A database that is still to
/// get its sandbox counts as one, with the least disk that it will have ([`LEAST_DISK_MB`](super::databases)) until it has
/// one; what could not be made, or goes, is none. `$2` is the sandbox that is asked for: its database does not count beside it.
const AMOUNTS: &str = "WITH awaited AS (SELECT id, cpu, \
         CASE size WHEN '1g' THEN 1024 WHEN '4g' THEN 4096 ELSE 16384 END AS memory_mb, \
         CASE WHEN EXISTS (SELECT 1 FROM volumes WHERE volumes.id = databases.id) THEN 0 ELSE 2048 END AS disk_mb \
         FROM databases WHERE account = $1 AND id <> $2 AND state NOT IN ('failed', 'deleting') \
             AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE sandboxes.id = databases.id)) \
     SELECT (SELECT COUNT(*) FROM sandboxes WHERE account = $1) + (SELECT COUNT(*) FROM awaited) AS sandboxes, \
     (SELECT CAST(COALESCE(SUM(cpu), 0) AS BIGINT) FROM sandboxes WHERE account = $1) \
         + (SELECT CAST(COALESCE(SUM(cpu), 0) AS BIGINT) FROM awaited) AS vcpus, \
     (SELECT CAST(COALESCE(SUM(memory_mb), 0) AS BIGINT) FROM sandboxes WHERE account = $1) \
         + (SELECT CAST(COALESCE(SUM(memory_mb), 0) AS BIGINT) FROM awaited) AS memory_mb, \
     (SELECT CAST(COALESCE(SUM(disk_mb), 0) AS BIGINT) FROM sandboxes WHERE account = $1 AND (durable = 0 OR EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.sandbox = sandboxes.id AND slot = 255))) \
         + (SELECT CAST(COALESCE(SUM(disk_mb), 0) AS BIGINT) FROM awaited) AS disk_mb, \
     (SELECT COUNT(*) FROM volumes WHERE account = $1 AND NOT (kind = 'root' AND EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.volume = volumes.id AND slot = 255))) AS volumes, \
     (SELECT CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT) FROM volumes WHERE account = $1 AND NOT (kind = 'root' AND EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.volume = volumes.id AND slot = 255))) AS volume_bytes, \
     (SELECT COUNT(*) FROM snapshots WHERE account = $1 AND tree IS NULL) AS snapshots";

impl Db {
    pub(crate) async fn amounts(&self, account: &AccountId) -> Result<Amounts, Error> {
        let mut connection = self.pool().acquire().await?;
        amounts(&mut connection, account, None).await
    }

    /// Of what will be admitted later, when its row is written; see [`admit`].
    ///
    /// # Errors
    /// The plan does not allow it.
    pub(crate) async fn check_quota(
        &self,
        account: &AccountId,
        plan: &Plan,
        more: &Amounts,
        sandbox: Option<&SandboxId>,
    ) -> Result<(), Error> {
        if plan.is_unlimited() {
            return Ok(());
        }
        let mut connection = self.pool().acquire().await?;
        plan.check(&amounts(&mut connection, account, sandbox).await?, more)
    }

    /// Of the smallest and the largest volume; nothing without any.
    pub(crate) async fn volume_extremes(&self, account: &AccountId) -> Result<(u64, u64), Error> {
        let row = sqlx::query(
            "SELECT COALESCE(MIN(size_bytes), 0) AS least, COALESCE(MAX(size_bytes), 0) AS most \
             FROM volumes WHERE account = $1",
        )
        .bind(account.as_str())
        .fetch_one(self.pool())
        .await?;
        Ok((unsigned(row.try_get("least")?)?, unsigned(row.try_get("most")?)?))
    }
}

async fn amounts(
    connection: &mut AnyConnection,
    account: &AccountId,
    sandbox: Option<&SandboxId>,
) -> Result<Amounts, Error> {
    let row = sqlx::query(AMOUNTS)
        .bind(account.as_str())
        .bind(sandbox.map(SandboxId::to_string).unwrap_or_default())
        .fetch_one(connection)
        .await?;
    let number = |column: &str| unsigned::<u64>(row.try_get(column)?);
    Ok(Amounts {
        sandboxes: number("sandboxes")?,
        vcpus: number("vcpus")?,
        memory_mb: number("memory_mb")?,
        volumes: number("volumes")?,
        disk_bytes: (number("disk_mb")? << 20).saturating_add(number("volume_bytes")?),
        snapshots: number("snapshots")?,
    })
}

/// Before `more` is added in the same transaction. Until its end nobody else adds to the account. `sandbox`: that is added;
/// where it is a database's, that one has counted so far.
///
/// # Errors
/// The plan does not allow it.
pub(super) async fn admit(
    connection: &mut AnyConnection,
    account: &AccountId,
    plan: &Plan,
    more: &Amounts,
    sandbox: Option<&SandboxId>,
) -> Result<(), Error> {
    if plan.is_unlimited() {
        return Ok(());
    }
    // SQLite has one writer at a time; PostgreSQL locks the row that is written.
    sqlx::query("UPDATE accounts SET created_at = created_at WHERE id = $1")
        .bind(account.as_str())
        .execute(&mut *connection)
        .await?;
    plan.check(&amounts(connection, account, sandbox).await?, more)
}

#[cfg(test)]
mod tests {
    use api::{DatabaseSize, VolumeId, VolumeKind};

    use super::*;
    use crate::{
        account::Limits,
        database::DatabaseState,
        db::{DatabaseRow, VolumeRow, testing},
    };

    fn volume(name: &str, gb: u64) -> VolumeRow {
        VolumeRow {
            id: VolumeId::random(),
            account: AccountId::default_account(),
            name: name.parse().unwrap(),
            kind: VolumeKind::Data,
            size_bytes: gb << 30,
            created_at: 1,
            template: None,
        }
    }

    #[tokio::test]
    async fn of_twenty_who_ask_at_once_ten_are_admitted() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let limits = Limits { volumes: Some(10), ..Limits::default() };
            let plan = Plan::new("p", limits);
            let asks = (0..20).map(|number| {
                let (db, plan) = (db.clone(), plan.clone());
                async move { db.insert_volume(&volume(&format!("v{number}"), 1), &plan).await }
            });
            let outcomes = futures::future::join_all(asks).await;
            let admitted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert_eq!(admitted, 10, "{outcomes:?}");
            let has = db.amounts(&AccountId::default_account()).await.unwrap();
            assert_eq!((has.volumes, has.disk_bytes, has.sandboxes), (10, 10 << 30, 0));
            let (least, most) = db.volume_extremes(&AccountId::default_account()).await.unwrap();
            assert_eq!((least, most), (1 << 30, 1 << 30));
            db.close().await;
        }
    }

    #[tokio::test]
    async fn of_databases_that_are_asked_for_at_once_so_many_are_made_as_the_plan_allows() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let plan = Plan::new("p", Limits { sandboxes: Some(1), ..Limits::default() });
            let asks = (0..20).map(|number| {
                let (db, plan) = (db.clone(), plan.clone());
                async move { db.insert_database(&testing::database_row(5000 + number), &plan).await }
            });
            let outcomes = futures::future::join_all(asks).await;
            let admitted = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
            assert_eq!(admitted, 1, "{outcomes:?}");
            db.close().await;
        }
    }

    #[tokio::test]
    async fn a_database_counts_once_before_and_after_it_has_its_sandbox_and_not_when_it_failed() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let account = AccountId::default_account();
            for (port, size) in (5000..).zip(DatabaseSize::ALL) {
                let mut row = DatabaseRow { size, cpu: 3, ..testing::database_row(port) };
                assert!(db.insert_database(&row, &Plan::unlimited()).await.unwrap());
                assert_eq!(db.amounts(&account).await.unwrap(), row.amounts());
                row.state = DatabaseState::Failed;
                db.update_database(&row).await.unwrap();
                assert_eq!(db.amounts(&account).await.unwrap(), Amounts::default());
            }
            let limits = Limits { sandboxes: Some(1), total_gb: Some(2), ..Limits::default() };
            let plan = Plan::new("p", limits);
            let row = testing::database_row(6000);
            assert!(db.insert_database(&row, &plan).await.unwrap());
            let refused = db.insert_database(&testing::database_row(6001), &plan).await;
            assert_eq!(refused.unwrap_err().code, api::ErrorCode::QuotaExceeded);
            let own = testing::sandbox_row(row.id.sandbox());
            db.check_quota(&account, &plan, &own.amounts(), Some(&own.id)).await.unwrap();
            let other = testing::sandbox_row(SandboxId::random());
            for sandbox in [None, Some(&other.id)] {
                let refused = db.check_quota(&account, &plan, &other.amounts(), sandbox).await;
                assert_eq!(refused.unwrap_err().code, api::ErrorCode::QuotaExceeded);
            }
            let refused = db.insert_sandbox(&other, None, &plan).await;
            assert_eq!(refused.unwrap_err().code, api::ErrorCode::QuotaExceeded);
            let root = VolumeRow { kind: VolumeKind::Root, ..volume("root", 2) };
            db.insert_sandbox(&own, Some(&root), &plan).await.unwrap();
            assert_eq!(db.amounts(&account).await.unwrap(), row.amounts());
            db.close().await;
        }
    }

    #[tokio::test]
    async fn what_a_volume_grows_by_counts() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let plan = Plan::new("p", Limits { total_gb: Some(10), ..Limits::default() });
            let row = volume("v", 4);
            assert!(db.insert_volume(&row, &plan).await.unwrap());
            let code = |refused: Result<(), Error>| refused.unwrap_err().code;
            let refused = db.set_volume_size(&row, 11 << 30, &plan).await;
            assert_eq!(code(refused), api::ErrorCode::QuotaExceeded);
            db.set_volume_size(&row, 10 << 30, &plan).await.unwrap();
            let has = db.amounts(&AccountId::default_account()).await.unwrap();
            assert_eq!(has.disk_bytes, 10 << 30);
            db.close().await;
        }
    }
}
