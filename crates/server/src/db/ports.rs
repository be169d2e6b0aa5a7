//! Rows of exposed ports and preview tokens, and of what the latter are signed with.

use api::{PreviewTokenId, SandboxId};
use sqlx::{Row, any::AnyRow};

use super::Db;
use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PreviewRow {
    pub(crate) id: PreviewTokenId,
    pub(crate) sandbox: SandboxId,
    pub(crate) port: u16,
    pub(crate) created_at: i64,
    pub(crate) expires_at: i64,
}

impl Db {
    /// The one that is there, or `new` from now on.
    pub(crate) async fn secret(&self, name: &str, new: &str) -> Result<String, Error> {
        sqlx::query("INSERT INTO secrets (name, value) VALUES ($1, $2) ON CONFLICT DO NOTHING")
            .bind(name)
            .bind(new)
            .execute(self.pool())
            .await?;
        let row = sqlx::query("SELECT value FROM secrets WHERE name = $1")
            .bind(name)
            .fetch_one(self.pool())
            .await?;
        Ok(row.try_get("value")?)
    }

    pub(crate) async fn insert_preview(&self, row: &PreviewRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO preview_tokens (id, sandbox, port, created_at, expires_at) VALUES ($1, $2, $3, $4, $5)",
        )
        .bind(row.id.to_string())
        .bind(row.sandbox.to_string())
        .bind(i64::from(row.port))
        .bind(row.created_at)
        .bind(row.expires_at)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Oldest first.
    pub(crate) async fn previews(&self, sandbox: &SandboxId) -> Result<Vec<PreviewRow>, Error> {
        let rows = sqlx::query(
            "SELECT id, sandbox, port, created_at, expires_at FROM preview_tokens WHERE sandbox = $1 ORDER BY created_at, id",
        )
        .bind(sandbox.to_string())
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(preview_of).collect()
    }

    pub(crate) async fn has_preview(&self, id: &PreviewTokenId) -> Result<bool, Error> {
        let row = sqlx::query("SELECT id FROM preview_tokens WHERE id = $1")
            .bind(id.to_string())
            .fetch_optional(self.pool())
            .await?;
        Ok(row.is_some())
    }

    /// Idempotent.
    pub(crate) async fn delete_preview(
        &self,
        sandbox: &SandboxId,
        id: &PreviewTokenId,
    ) -> Result<(), Error> {
        sqlx::query("DELETE FROM preview_tokens WHERE sandbox = $1 AND id = $2")
            .bind(sandbox.to_string())
            .bind(id.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Of one sandbox, those that ended before.
    pub(crate) async fn delete_previews_before(
        &self,
        sandbox: &SandboxId,
        time: i64,
    ) -> Result<(), Error> {
        sqlx::query("DELETE FROM preview_tokens WHERE sandbox = $1 AND expires_at < $2")
            .bind(sandbox.to_string())
            .bind(time)
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Idempotent.
    pub(crate) async fn expose_port(&self, sandbox: &SandboxId, port: u16) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO exposed_ports (sandbox, port) VALUES ($1, $2) ON CONFLICT DO NOTHING",
        )
        .bind(sandbox.to_string())
        .bind(i64::from(port))
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Idempotent.
    pub(crate) async fn withdraw_port(&self, sandbox: &SandboxId, port: u16) -> Result<(), Error> {
        sqlx::query("DELETE FROM exposed_ports WHERE sandbox = $1 AND port = $2")
            .bind(sandbox.to_string())
            .bind(i64::from(port))
            .execute(self.pool())
            .await?;
        Ok(())
    }

    pub(crate) async fn exposed_ports(&self, sandbox: &SandboxId) -> Result<Vec<u16>, Error> {
        let rows = sqlx::query("SELECT port FROM exposed_ports WHERE sandbox = $1 ORDER BY port")
            .bind(sandbox.to_string())
            .fetch_all(self.pool())
            .await?;
        rows.iter().map(port_of).collect()
    }
}

fn preview_of(row: &AnyRow) -> Result<PreviewRow, Error> {
    Ok(PreviewRow {
        id: row.try_get::<String, _>("id")?.parse().map_err(Error::internal)?,
        sandbox: row.try_get::<String, _>("sandbox")?.parse().map_err(Error::internal)?,
        port: port_of(row)?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
    })
}

fn port_of(row: &AnyRow) -> Result<u16, Error> {
    u16::try_from(row.try_get::<i64, _>("port")?).map_err(Error::internal)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    #[tokio::test]
    async fn tokens_and_ports_go_with_their_sandbox_or_before() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let (sandbox, other) = (SandboxId::random(), SandboxId::random());
            let row = |sandbox, port, expires_at| PreviewRow {
                id: PreviewTokenId::random(),
                sandbox,
                port,
                created_at: i64::from(port),
                expires_at,
            };
            let rows = [row(sandbox, 80, 10), row(sandbox, 65_535, 20), row(other, 80, 10)];
            for row in &rows {
                db.insert_preview(row).await.unwrap();
            }
            assert_eq!(db.previews(&sandbox).await.unwrap(), rows[..2]);
            db.delete_previews_before(&sandbox, 15).await.unwrap();
            assert_eq!(db.previews(&sandbox).await.unwrap(), rows[1..2]);
            db.delete_preview(&other, &rows[1].id).await.unwrap();
            assert!(db.has_preview(&rows[1].id).await.unwrap());
            db.delete_preview(&sandbox, &rows[1].id).await.unwrap();
            assert!(!db.has_preview(&rows[1].id).await.unwrap());

            for port in [8080, 80, 8080] {
                db.expose_port(&sandbox, port).await.unwrap();
            }
            assert_eq!(db.exposed_ports(&sandbox).await.unwrap(), [80, 8080]);
            db.withdraw_port(&sandbox, 80).await.unwrap();
            db.withdraw_port(&sandbox, 80).await.unwrap();
            assert_eq!(db.exposed_ports(&sandbox).await.unwrap(), [8080]);
            db.delete_sandbox(&sandbox, None).await.unwrap();
            assert!(db.exposed_ports(&sandbox).await.unwrap().is_empty());

            assert_eq!(db.secret("a", "first").await.unwrap(), "first");
            assert_eq!(db.secret("a", "second").await.unwrap(), "first");
            db.close().await;
        }
    }
}
