//! What an account has, counted and limited in the transaction that adds to it.

use api::AccountId;
use sqlx::{AnyConnection, Row as _};

use super::{Db, unsigned};
use crate::{
    Error,
    account::{Amounts, Plan},
};

/// A root disk is counted with the sandbox that has it (255 is [`ROOT_SLOT`](super::ROOT_SLOT)); where it was detached, or
/// stayed, it is a volume. What a fork keeps of its parent is no snapshot of the account's own.
const AMOUNTS: &str = "SELECT \
     (SELECT COUNT(*) FROM sandboxes WHERE account = $1) AS sandboxes, \
     (SELECT CAST(COALESCE(SUM(cpu), 0) AS BIGINT) FROM sandboxes WHERE account = $1) AS vcpus, \
     (SELECT CAST(COALESCE(SUM(memory_mb), 0) AS BIGINT) FROM sandboxes WHERE account = $1) AS memory_mb, \
     (SELECT CAST(COALESCE(SUM(disk_mb), 0) AS BIGINT) FROM sandboxes WHERE account = $1 AND (durable = 0 OR EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.sandbox = sandboxes.id AND slot = 255))) AS disk_mb, \
     (SELECT COUNT(*) FROM volumes WHERE account = $1 AND NOT (kind = 'root' AND EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.volume = volumes.id AND slot = 255))) AS volumes, \
     (SELECT CAST(COALESCE(SUM(size_bytes), 0) AS BIGINT) FROM volumes WHERE account = $1 AND NOT (kind = 'root' AND EXISTS \
         (SELECT 1 FROM attachments WHERE attachments.volume = volumes.id AND slot = 255))) AS volume_bytes, \
     (SELECT COUNT(*) FROM snapshots WHERE account = $1 AND tree IS NULL) AS snapshots";

impl Db {
    pub(crate) async fn amounts(&self, account: &AccountId) -> Result<Amounts, Error> {
        let mut connection = self.pool().acquire().await?;
        amounts(&mut connection, account).await
    }

    /// Of what will be admitted later, when its row is written.
    ///
    /// # Errors
    /// The plan does not allow it.
    pub(crate) async fn check_quota(
        &self,
        account: &AccountId,
        plan: &Plan,
        more: &Amounts,
    ) -> Result<(), Error> {
        if plan.is_unlimited() {
            return Ok(());
        }
        plan.check(&self.amounts(account).await?, more)
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

async fn amounts(connection: &mut AnyConnection, account: &AccountId) -> Result<Amounts, Error> {
    let row = sqlx::query(AMOUNTS).bind(account.as_str()).fetch_one(connection).await?;
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

/// Before `more` is added in the same transaction. Until its end nobody else adds to the account.
///
/// # Errors
/// The plan does not allow it.
pub(super) async fn admit(
    connection: &mut AnyConnection,
    account: &AccountId,
    plan: &Plan,
    more: &Amounts,
) -> Result<(), Error> {
    if plan.is_unlimited() {
        return Ok(());
    }
    // SQLite has one writer at a time; PostgreSQL locks the row that is written.
    sqlx::query("UPDATE accounts SET created_at = created_at WHERE id = $1")
        .bind(account.as_str())
        .execute(&mut *connection)
        .await?;
    plan.check(&amounts(connection, account).await?, more)
}

#[cfg(test)]
mod tests {
    use api::{VolumeId, VolumeKind};

    use super::*;
    use crate::{
        account::Limits,
        db::{VolumeRow, testing},
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
