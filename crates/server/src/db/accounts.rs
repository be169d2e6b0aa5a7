//! Rows of accounts.

use api::AccountId;
use sqlx::Row as _;

use super::Db;
use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AccountRow {
    pub(crate) id: AccountId,
    /// `None`: the settings' default.
    pub(crate) plan: Option<String>,
    /// Milliseconds since 1970.
    pub(crate) created_at: i64,
}

impl Db {
    /// By name.
    pub(crate) async fn accounts(&self) -> Result<Vec<AccountRow>, Error> {
        let rows = sqlx::query("SELECT id, plan, created_at FROM accounts ORDER BY id")
            .fetch_all(self.pool())
            .await?;
        let read = |row: &sqlx::any::AnyRow| {
            Ok::<_, Error>(AccountRow {
                id: row.try_get::<String, _>("id")?.parse().map_err(Error::internal)?,
                plan: row.try_get("plan")?,
                created_at: row.try_get("created_at")?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// False when the name is taken.
    pub(crate) async fn insert_account(&self, row: &AccountRow) -> Result<bool, Error> {
        let done = sqlx::query(
            "INSERT INTO accounts (id, plan, created_at) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING",
        )
        .bind(row.id.as_str())
        .bind(&row.plan)
        .bind(row.created_at)
        .execute(self.pool())
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// False when there is no such account.
    pub(crate) async fn set_plan(&self, id: &AccountId, plan: Option<&str>) -> Result<bool, Error> {
        let done = sqlx::query("UPDATE accounts SET plan = $2 WHERE id = $1")
            .bind(id.as_str())
            .bind(plan)
            .execute(self.pool())
            .await?;
        Ok(done.rows_affected() == 1)
    }

    /// With its keys, builds and remembered answers; not while it has anything else: then the database refuses.
    pub(crate) async fn delete_account(&self, id: &AccountId) -> Result<bool, Error> {
        let mut transaction = self.pool().begin().await?;
        for table in ["keys", "builds", "keyed_requests"] {
            sqlx::query(&format!("DELETE FROM {table} WHERE account = $1"))
                .bind(id.as_str())
                .execute(&mut *transaction)
                .await?;
        }
        let done = sqlx::query("DELETE FROM accounts WHERE id = $1")
            .bind(id.as_str())
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    /// How many templates it has.
    pub(crate) async fn count_templates(&self, id: &AccountId) -> Result<u64, Error> {
        let count: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM templates WHERE account = $1")
            .bind(id.as_str())
            .fetch_one(self.pool())
            .await?;
        super::unsigned(count)
    }
}
