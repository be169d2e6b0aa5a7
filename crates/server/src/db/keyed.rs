//! Rows of requests with an `Idempotency-Key`.

use api::AccountId;
use sqlx::Row as _;
use uuid::Uuid;

use super::Db;
use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyedRow {
    pub(crate) id: Uuid,
    pub(crate) fingerprint: String,
    /// A steady time.
    pub(crate) begun_at: i64,
    /// JSON; `None` until it is answered.
    pub(crate) answer: Option<String>,
}

impl Db {
    pub(crate) async fn keyed(
        &self,
        account: &AccountId,
        key: &str,
    ) -> Result<Option<KeyedRow>, Error> {
        let row = sqlx::query(
            "SELECT id, fingerprint, begun_at, answer FROM keyed_requests WHERE account = $1 AND key = $2",
        )
        .bind(account.as_str())
        .bind(key)
        .fetch_optional(self.pool())
        .await?;
        let read = |row: &sqlx::any::AnyRow| {
            Ok::<_, Error>(KeyedRow {
                id: row.try_get::<String, _>("id")?.parse().map_err(Error::internal)?,
                fingerprint: row.try_get("fingerprint")?,
                begun_at: row.try_get("begun_at")?,
                answer: row.try_get("answer")?,
            })
        };
        row.as_ref().map(read).transpose()
    }

    pub(crate) async fn insert_keyed(
        &self,
        account: &AccountId,
        key: &str,
        row: &KeyedRow,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO keyed_requests (id, account, key, fingerprint, begun_at, answer) VALUES ($1, $2, $3, $4, $5, $6)",
        )
        .bind(row.id.to_string())
        .bind(account.as_str())
        .bind(key)
        .bind(&row.fingerprint)
        .bind(row.begun_at)
        .bind(&row.answer)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    pub(crate) async fn answer_keyed(&self, id: &Uuid, answer: &str) -> Result<(), Error> {
        sqlx::query("UPDATE keyed_requests SET answer = $2 WHERE id = $1")
            .bind(id.to_string())
            .bind(answer)
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Idempotent.
    pub(crate) async fn forget_keyed(&self, id: &Uuid) -> Result<(), Error> {
        sqlx::query("DELETE FROM keyed_requests WHERE id = $1")
            .bind(id.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Those begun before the first time or after the second; how many there were.
    pub(crate) async fn forget_keyed_outside(
        &self,
        earliest: i64,
        latest: i64,
    ) -> Result<u64, Error> {
        let done = sqlx::query("DELETE FROM keyed_requests WHERE begun_at < $1 OR begun_at > $2")
            .bind(earliest)
            .bind(latest)
            .execute(self.pool())
            .await?;
        Ok(done.rows_affected())
    }

    pub(crate) async fn count_keyed(&self, account: &AccountId) -> Result<u64, Error> {
        let count: i64 =
            sqlx::query_scalar("SELECT COUNT(*) FROM keyed_requests WHERE account = $1")
                .bind(account.as_str())
                .fetch_one(self.pool())
                .await?;
        super::unsigned(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    #[tokio::test]
    async fn a_request_is_found_by_its_key_until_it_is_forgotten() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let account = AccountId::default_account();
            let row = KeyedRow {
                id: Uuid::new_v4(),
                fingerprint: "f".to_owned(),
                begun_at: 5,
                answer: None,
            };
            db.insert_keyed(&account, "k", &row).await.unwrap();
            assert!(db.insert_keyed(&account, "k", &row).await.is_err());
            assert_eq!(db.keyed(&account, "k").await.unwrap(), Some(row.clone()));
            assert_eq!(db.keyed(&"other".parse().unwrap(), "k").await.unwrap(), None);
            db.answer_keyed(&row.id, "{\"é\": 1}").await.unwrap();
            let answered = KeyedRow { answer: Some("{\"é\": 1}".to_owned()), ..row.clone() };
            assert_eq!(db.keyed(&account, "k").await.unwrap(), Some(answered));
            assert_eq!(db.count_keyed(&account).await.unwrap(), 1);
            assert_eq!(db.forget_keyed_outside(5, 5).await.unwrap(), 0);
            assert_eq!(db.forget_keyed_outside(0, 4).await.unwrap(), 1);
            db.insert_keyed(&account, "k", &row).await.unwrap();
            db.forget_keyed(&row.id).await.unwrap();
            assert_eq!(db.keyed(&account, "k").await.unwrap(), None);
            db.close().await;
        }
    }
}
