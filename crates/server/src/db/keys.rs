//! Rows of keys.

use api::{AccountId, KeyId, Scope};
use sqlx::{Row, any::AnyRow};

use super::Db;
use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeyRow {
    pub(crate) id: KeyId,
    pub(crate) account: AccountId,
    pub(crate) label: String,
    pub(crate) prefix: String,
    /// SHA-256 of the key, in hexadecimal.
    pub(crate) hash: String,
    pub(crate) scope: Scope,
    pub(crate) created_at: i64,
    pub(crate) expires_at: Option<i64>,
}

impl Db {
    pub(crate) async fn insert_key(&self, key: &KeyRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO keys (id, account, label, prefix, hash, scope, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(key.id.as_str())
        .bind(key.account.as_str())
        .bind(&key.label)
        .bind(&key.prefix)
        .bind(&key.hash)
        .bind(scope_text(key.scope))
        .bind(key.created_at)
        .bind(key.expires_at)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Of all accounts, oldest first.
    pub(crate) async fn keys(&self) -> Result<Vec<KeyRow>, Error> {
        let rows = sqlx::query(
            "SELECT id, account, label, prefix, hash, scope, created_at, expires_at FROM keys ORDER BY created_at, id",
        )
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(key_of).collect()
    }

    /// By id or by prefix; how many there were.
    pub(crate) async fn delete_keys(
        &self,
        account: &AccountId,
        id_or_prefix: &str,
    ) -> Result<u64, Error> {
        let done = sqlx::query("DELETE FROM keys WHERE account = $1 AND (id = $2 OR prefix = $3)")
            .bind(account.as_str())
            .bind(id_or_prefix)
            .bind(id_or_prefix)
            .execute(self.pool())
            .await?;
        Ok(done.rows_affected())
    }
}

fn key_of(row: &AnyRow) -> Result<KeyRow, Error> {
    Ok(KeyRow {
        id: row.try_get::<String, _>("id")?.parse().map_err(Error::internal)?,
        account: row.try_get::<String, _>("account")?.parse().map_err(Error::internal)?,
        label: row.try_get("label")?,
        prefix: row.try_get("prefix")?,
        hash: row.try_get("hash")?,
        scope: scope_of(&row.try_get::<String, _>("scope")?)?,
        created_at: row.try_get("created_at")?,
        expires_at: row.try_get("expires_at")?,
    })
}

fn scope_text(scope: Scope) -> &'static str {
    match scope {
        Scope::Full => "full",
        Scope::Read => "read",
    }
}

fn scope_of(text: &str) -> Result<Scope, Error> {
    match text {
        "full" => Ok(Scope::Full),
        "read" => Ok(Scope::Read),
        _ => Err(Error::internal(format!("a key has the unknown scope `{text}`"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    fn key(id: &str, expires_at: Option<i64>) -> KeyRow {
        KeyRow {
            id: id.parse().unwrap(),
            account: AccountId::default_account(),
            label: "it's \"quoted\" é".to_owned(),
            prefix: format!("atl_{id}"),
            hash: format!("hash of {id}"),
            scope: Scope::Read,
            created_at: 1_700_000_000_123,
            expires_at,
        }
    }

    #[tokio::test]
    async fn a_key_comes_back_as_it_went_and_goes_by_id_or_prefix() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let keys = [key("a", None), key("b", Some(5))];
            for key in &keys {
                db.insert_key(key).await.unwrap();
            }
            assert_eq!(db.keys().await.unwrap(), keys);
            assert!(db.insert_key(&keys[0]).await.is_err());

            assert_eq!(db.delete_keys(&"other".parse().unwrap(), "a").await.unwrap(), 0);
            assert_eq!(db.delete_keys(&AccountId::default_account(), "a").await.unwrap(), 1);
            assert_eq!(db.delete_keys(&AccountId::default_account(), "atl_b").await.unwrap(), 1);
            assert_eq!(db.keys().await.unwrap(), []);
            db.close().await;
        }
    }
}
