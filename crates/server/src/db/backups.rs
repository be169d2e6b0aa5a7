//! Rows of databases' backups.

use api::DatabaseId;
use sqlx::{Row as _, any::AnyRow};

use super::{Db, signed, unsigned};
use crate::Error;

/// Unbroken write-ahead log in the store. Times are milliseconds since 1970, by the database's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ChainRow {
    pub(crate) chain: i64,
    pub(crate) timeline: u32,
    pub(crate) next_segment: u64,
    pub(crate) archived_until: Option<i64>,
    pub(crate) transactions: Option<String>,
}

/// A complete base backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BaseRow {
    pub(crate) chain: i64,
    pub(crate) base: i64,
    pub(crate) ended_at: i64,
    pub(crate) first_segment: u64,
    pub(crate) last_segment: u64,
    pub(crate) bytes: u64,
}

impl Db {
    /// Inserts it, or writes what has changed.
    pub(crate) async fn save_chain(&self, id: &DatabaseId, row: &ChainRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO database_chains (database_id, chain, timeline, next_segment, archived_until, transactions) \
             VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (database_id, chain) DO UPDATE SET \
             next_segment = excluded.next_segment, archived_until = excluded.archived_until, \
             transactions = excluded.transactions",
        )
        .bind(id.to_string())
        .bind(row.chain)
        .bind(i64::from(row.timeline))
        .bind(signed(row.next_segment)?)
        .bind(row.archived_until)
        .bind(&row.transactions)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    pub(crate) async fn insert_base(&self, id: &DatabaseId, row: &BaseRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO database_bases (database_id, chain, base, ended_at, first_segment, last_segment, bytes) \
             VALUES ($1, $2, $3, $4, $5, $6, $7)",
        )
        .bind(id.to_string())
        .bind(row.chain)
        .bind(row.base)
        .bind(row.ended_at)
        .bind(signed(row.first_segment)?)
        .bind(signed(row.last_segment)?)
        .bind(signed(row.bytes)?)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    pub(crate) async fn delete_chain(&self, id: &DatabaseId, chain: i64) -> Result<(), Error> {
        self.delete_backup(
            "DELETE FROM database_chains WHERE database_id = $1 AND chain = $2",
            id,
            chain,
        )
        .await
    }

    pub(crate) async fn delete_base(&self, id: &DatabaseId, base: i64) -> Result<(), Error> {
        self.delete_backup(
            "DELETE FROM database_bases WHERE database_id = $1 AND base = $2",
            id,
            base,
        )
        .await
    }

    async fn delete_backup(&self, query: &str, id: &DatabaseId, which: i64) -> Result<(), Error> {
        sqlx::query(query).bind(id.to_string()).bind(which).execute(self.pool()).await?;
        Ok(())
    }

    /// Oldest first.
    pub(crate) async fn chains_of(&self, id: &DatabaseId) -> Result<Vec<ChainRow>, Error> {
        let query = "SELECT chain, timeline, next_segment, archived_until, transactions FROM database_chains \
                     WHERE database_id = $1 ORDER BY chain";
        let rows = sqlx::query(query).bind(id.to_string()).fetch_all(self.pool()).await?;
        rows.iter().map(chain).collect()
    }

    /// Oldest first.
    pub(crate) async fn bases_of(&self, id: &DatabaseId) -> Result<Vec<BaseRow>, Error> {
        let query = "SELECT chain, base, ended_at, first_segment, last_segment, bytes FROM database_bases \
                     WHERE database_id = $1 ORDER BY base";
        let rows = sqlx::query(query).bind(id.to_string()).fetch_all(self.pool()).await?;
        rows.iter().map(base).collect()
    }

    /// Before the database's own row goes, so that none is forgotten. Idempotent.
    pub(crate) async fn insert_removed_backups(&self, id: &DatabaseId) -> Result<(), Error> {
        sqlx::query("INSERT INTO removed_backups (database_id) VALUES ($1) ON CONFLICT DO NOTHING")
            .bind(id.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    pub(crate) async fn removed_backups(&self) -> Result<Vec<DatabaseId>, Error> {
        let rows =
            sqlx::query("SELECT database_id FROM removed_backups").fetch_all(self.pool()).await?;
        let id = |row: &AnyRow| {
            let text: String = row.try_get("database_id")?;
            text.parse()
                .map_err(|_| Error::internal("a row of removed backups has an unreadable id"))
        };
        rows.iter().map(id).collect()
    }

    /// They are gone from the store.
    pub(crate) async fn forget_backups(&self, id: &DatabaseId) -> Result<(), Error> {
        for table in ["database_bases", "database_chains", "removed_backups"] {
            sqlx::query(&format!("DELETE FROM {table} WHERE database_id = $1"))
                .bind(id.to_string())
                .execute(self.pool())
                .await?;
        }
        Ok(())
    }
}

fn chain(row: &AnyRow) -> Result<ChainRow, Error> {
    Ok(ChainRow {
        chain: row.try_get("chain")?,
        timeline: unsigned(row.try_get("timeline")?)?,
        next_segment: unsigned(row.try_get("next_segment")?)?,
        archived_until: row.try_get("archived_until")?,
        transactions: row.try_get("transactions")?,
    })
}

fn base(row: &AnyRow) -> Result<BaseRow, Error> {
    Ok(BaseRow {
        chain: row.try_get("chain")?,
        base: row.try_get("base")?,
        ended_at: row.try_get("ended_at")?,
        first_segment: unsigned(row.try_get("first_segment")?)?,
        last_segment: unsigned(row.try_get("last_segment")?)?,
        bytes: unsigned(row.try_get("bytes")?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    #[tokio::test]
    async fn backups_come_back_as_they_went_until_they_are_forgotten() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let (id, other) = (DatabaseId::random(), DatabaseId::random());
            let mut chain = ChainRow {
                chain: 1_700_000_000_123,
                timeline: 2,
                next_segment: 7,
                archived_until: None,
                transactions: None,
            };
            db.save_chain(&id, &chain).await.unwrap();
            chain.next_segment = 9;
            chain.archived_until = Some(1_700_000_000_456);
            chain.transactions = Some("7:9:7,8".to_owned());
            db.save_chain(&id, &chain).await.unwrap();
            let base = BaseRow {
                chain: chain.chain,
                base: 1_700_000_000_200,
                ended_at: 1_700_000_000_300,
                first_segment: 7,
                last_segment: 8,
                bytes: 1 << 40,
            };
            db.insert_base(&id, &base).await.unwrap();
            assert_eq!(db.chains_of(&id).await.unwrap(), std::slice::from_ref(&chain));
            assert_eq!(db.bases_of(&id).await.unwrap(), std::slice::from_ref(&base));
            assert!(db.chains_of(&other).await.unwrap().is_empty());
            db.delete_base(&id, base.base).await.unwrap();
            db.delete_chain(&other, chain.chain).await.unwrap();
            assert!(db.bases_of(&id).await.unwrap().is_empty());
            db.insert_removed_backups(&id).await.unwrap();
            db.insert_removed_backups(&id).await.unwrap();
            assert_eq!(db.removed_backups().await.unwrap(), [id]);
            db.forget_backups(&id).await.unwrap();
            assert!(db.chains_of(&id).await.unwrap().is_empty());
            assert!(db.removed_backups().await.unwrap().is_empty());
            db.close().await;
        }
    }
}
