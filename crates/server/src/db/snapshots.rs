//! Rows of snapshots.

use api::{AccountId, NetworkPolicy, SandboxId, SnapshotId, TemplateName};
use sqlx::{Row as _, any::AnyRow};

use super::{Db, quotas::admit, sandboxes::json, signed, unsigned};
use crate::{
    Error,
    account::{Amounts, Plan},
};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SnapshotRow {
    pub(crate) id: SnapshotId,
    pub(crate) account: AccountId,
    /// Its source, which may be gone.
    pub(crate) sandbox: SandboxId,
    pub(crate) template: TemplateName,
    pub(crate) name: String,
    pub(crate) cpu: u32,
    pub(crate) memory_mb: u64,
    pub(crate) disk_mb: u64,
    /// Goes with the last child of this fork tree.
    pub(crate) tree: Option<String>,
    /// Milliseconds since 1970.
    pub(crate) created_at: i64,
    /// Its source's.
    pub(crate) network: Option<NetworkPolicy>,
}

const COLUMNS: &str =
    "id, account, sandbox_id, template, name, cpu, memory_mb, disk_mb, tree, created_at, network";

impl Db {
    /// That takes so many bytes of the store.
    ///
    /// # Errors
    /// The plan does not allow one more of the account's own.
    pub(crate) async fn insert_snapshot(
        &self,
        row: &SnapshotRow,
        bytes: u64,
        plan: Option<&Plan>,
    ) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        if let Some(plan) = plan {
            let one = Amounts { snapshots: 1, ..Amounts::default() };
            admit(&mut transaction, &row.account, plan, &one, None).await?;
        }
        sqlx::query(&format!(
            "INSERT INTO snapshots ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)"
        ))
        .bind(row.id.to_string())
        .bind(row.account.as_str())
        .bind(row.sandbox.to_string())
        .bind(row.template.as_str())
        .bind(&row.name)
        .bind(i64::from(row.cpu))
        .bind(signed(row.memory_mb)?)
        .bind(signed(row.disk_mb)?)
        .bind(&row.tree)
        .bind(row.created_at)
        .bind(row.network.as_ref().map(json))
        .execute(&mut *transaction)
        .await?;
        self.begin_snapshot(&mut transaction, &row.account, &row.id, bytes).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// Newest first.
    pub(crate) async fn snapshots(&self, account: &AccountId) -> Result<Vec<SnapshotRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM snapshots WHERE account = $1 ORDER BY created_at DESC, id"
        ))
        .bind(account.as_str())
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(from_row).collect()
    }

    pub(crate) async fn snapshot(
        &self,
        account: &AccountId,
        id: &SnapshotId,
    ) -> Result<Option<SnapshotRow>, Error> {
        let row =
            sqlx::query(&format!("SELECT {COLUMNS} FROM snapshots WHERE account = $1 AND id = $2"))
                .bind(account.as_str())
                .bind(id.to_string())
                .fetch_optional(self.pool())
                .await?;
        row.as_ref().map(from_row).transpose()
    }

    pub(crate) async fn snapshot_of_tree(&self, tree: &str) -> Result<Option<SnapshotId>, Error> {
        let id: Option<String> = sqlx::query_scalar("SELECT id FROM snapshots WHERE tree = $1")
            .bind(tree)
            .fetch_optional(self.pool())
            .await?;
        id.map(|id| id.parse().map_err(|_| unread("id"))).transpose()
    }

    /// Fork trees that have a snapshot, and whose they are.
    pub(crate) async fn trees(&self) -> Result<Vec<(AccountId, String)>, Error> {
        let rows: Vec<(String, String)> =
            sqlx::query_as("SELECT account, tree FROM snapshots WHERE tree IS NOT NULL")
                .fetch_all(self.pool())
                .await?;
        let read = |(account, tree): (String, String)| {
            Ok((account.parse().map_err(|_| unread("account"))?, tree))
        };
        rows.into_iter().map(read).collect()
    }

    pub(crate) async fn all_snapshots(&self) -> Result<Vec<SnapshotId>, Error> {
        let ids: Vec<String> =
            sqlx::query_scalar("SELECT id FROM snapshots").fetch_all(self.pool()).await?;
        ids.iter().map(|id| id.parse().map_err(|_| unread("id"))).collect()
    }

    /// Whether there was one.
    pub(crate) async fn delete_snapshot(&self, id: &SnapshotId) -> Result<bool, Error> {
        let mut transaction = self.pool().begin().await?;
        let done = sqlx::query("DELETE FROM snapshots WHERE id = $1")
            .bind(id.to_string())
            .execute(&mut *transaction)
            .await?;
        self.end_snapshot(&mut transaction, id).await?;
        transaction.commit().await?;
        Ok(done.rows_affected() > 0)
    }
}

fn unread(what: &str) -> Error {
    Error::internal(format!("a row of snapshots has an unreadable {what}"))
}

fn from_row(row: &AnyRow) -> Result<SnapshotRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let number = |column: &str| row.try_get::<i64, _>(column);
    Ok(SnapshotRow {
        id: text("id")?.parse().map_err(|_| unread("id"))?,
        account: text("account")?.parse().map_err(|_| unread("account"))?,
        sandbox: text("sandbox_id")?.parse().map_err(|_| unread("sandbox"))?,
        template: text("template")?.parse().map_err(|_| unread("template"))?,
        name: text("name")?,
        cpu: unsigned(number("cpu")?)?,
        memory_mb: unsigned(number("memory_mb")?)?,
        disk_mb: unsigned(number("disk_mb")?)?,
        tree: row.try_get("tree")?,
        created_at: number("created_at")?,
        network: (row.try_get::<Option<String>, _>("network")?)
            .map(|text| serde_json::from_str(&text).map_err(|_| unread("network")))
            .transpose()?,
    })
}
