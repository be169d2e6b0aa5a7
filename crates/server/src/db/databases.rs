//! Rows of databases.

use api::{AccountId, DatabaseId, DatabaseSize};
use sqlx::{Row as _, any::AnyRow};

use super::{Db, quotas::admit, sandboxes::json, signed, unsigned};
use crate::{
    Error,
    account::{Amounts, Plan},
    database::{Credentials, DatabaseState},
};

/// What the template gives it, and so what no database has less of.
const LEAST_DISK_MB: u64 = 2048;

/// Everything that is remembered of a database. Times are milliseconds since 1970.
#[derive(Clone)]
pub(crate) struct DatabaseRow {
    pub(crate) id: DatabaseId,
    pub(crate) account: AccountId,
    pub(crate) label: String,
    pub(crate) size: DatabaseSize,
    pub(crate) cpu: u32,
    pub(crate) always_on: bool,
    pub(crate) idle_seconds: u64,
    /// [`NO_PORT`]: of one that could not be made.
    pub(crate) port: u16,
    pub(crate) state: DatabaseState,
    pub(crate) error: Option<String>,
    pub(crate) credentials: Credentials,
    /// Of what it is made from.
    pub(crate) origin: Credentials,
    pub(crate) cloned_from: Option<DatabaseId>,
    /// As the source was then, in microseconds since 1970. `None`: as it was when this was made.
    pub(crate) target_time: Option<i64>,
    pub(crate) created_at: i64,
}

pub(crate) const NO_PORT: u16 = 0;

impl DatabaseRow {
    /// Its passwords are being changed: PostgreSQL knows the ones or the others.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.origin.role == self.credentials.role && self.origin != self.credentials
    }

    /// It knows its own.
    pub(crate) fn settle(&mut self) {
        if self.is_unsettled() {
            self.origin = self.credentials.clone();
        }
    }
}

const COLUMNS: &str = "id, account, label, size, cpu, always_on, idle_seconds, port, state, error, credentials, origin, \
     cloned_from, created_at, target_time";

impl DatabaseRow {
    /// What it takes of its account's until it has its sandbox, which takes that then.
    pub(crate) fn amounts(&self) -> Amounts {
        Amounts {
            sandboxes: 1,
            vcpus: self.cpu.into(),
            memory_mb: self.size.memory_mb(),
            disk_bytes: LEAST_DISK_MB << 20,
            ..Amounts::default()
        }
    }
}

impl Db {
    /// False when the port is taken.
    ///
    /// # Errors
    /// The plan does not allow one more.
    pub(crate) async fn insert_database(
        &self,
        row: &DatabaseRow,
        plan: &Plan,
    ) -> Result<bool, Error> {
        let mut transaction = self.pool().begin().await?;
        admit(&mut transaction, &row.account, plan, &row.amounts(), None).await?;
        let done = sqlx::query(&format!(
            "INSERT INTO databases ({COLUMNS}) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15) \
             ON CONFLICT (port) WHERE port > 0 DO NOTHING"
        ))
        .bind(row.id.to_string())
        .bind(row.account.as_str())
        .bind(&row.label)
        .bind(row.size.name())
        .bind(i64::from(row.cpu))
        .bind(i64::from(row.always_on))
        .bind(signed(row.idle_seconds)?)
        .bind(i64::from(row.port))
        .bind(row.state.name())
        .bind(&row.error)
        .bind(json(&row.credentials))
        .bind(json(&row.origin))
        .bind(row.cloned_from.map(|id| id.to_string()))
        .bind(row.created_at)
        .bind(row.target_time)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(done.rows_affected() == 1)
    }

    /// Writes what changes in a database's life.
    pub(crate) async fn update_database(&self, row: &DatabaseRow) -> Result<(), Error> {
        sqlx::query(
            "UPDATE databases SET label = $2, always_on = $3, idle_seconds = $4, state = $5, error = $6, \
             credentials = $7, origin = $8, port = $9 WHERE id = $1",
        )
        .bind(row.id.to_string())
        .bind(&row.label)
        .bind(i64::from(row.always_on))
        .bind(signed(row.idle_seconds)?)
        .bind(row.state.name())
        .bind(&row.error)
        .bind(json(&row.credentials))
        .bind(json(&row.origin))
        .bind(i64::from(row.port))
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Idempotent.
    pub(crate) async fn delete_database(&self, id: &DatabaseId) -> Result<(), Error> {
        sqlx::query("DELETE FROM databases WHERE id = $1")
            .bind(id.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    pub(crate) async fn all_databases(&self) -> Result<Vec<DatabaseRow>, Error> {
        let rows =
            sqlx::query(&format!("SELECT {COLUMNS} FROM databases")).fetch_all(self.pool()).await?;
        rows.iter().map(from_row).collect()
    }
}

fn from_row(row: &AnyRow) -> Result<DatabaseRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let number = |column: &str| row.try_get::<i64, _>(column);
    let unread =
        |what: &str| Error::internal(format!("a row of databases has an unreadable {what}"));
    Ok(DatabaseRow {
        id: text("id")?.parse().map_err(|_| unread("id"))?,
        account: text("account")?.parse().map_err(|_| unread("account"))?,
        label: text("label")?,
        size: text("size")?.parse().map_err(|_| unread("size"))?,
        cpu: unsigned(number("cpu")?)?,
        always_on: number("always_on")? != 0,
        idle_seconds: unsigned(number("idle_seconds")?)?,
        port: unsigned(number("port")?)?,
        state: DatabaseState::from_name(&text("state")?).ok_or_else(|| unread("state"))?,
        error: row.try_get("error")?,
        credentials: serde_json::from_str(&text("credentials")?)
            .map_err(|_| unread("credentials"))?,
        origin: serde_json::from_str(&text("origin")?).map_err(|_| unread("origin"))?,
        cloned_from: row
            .try_get::<Option<String>, _>("cloned_from")?
            .map(|id| id.parse().map_err(|_| unread("source")))
            .transpose()?,
        created_at: number("created_at")?,
        target_time: row.try_get("target_time")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    fn row() -> DatabaseRow {
        DatabaseRow {
            id: DatabaseId::random(),
            account: AccountId::default_account(),
            label: "é \"quoted\"".to_owned(),
            size: DatabaseSize::FourG,
            cpu: 2,
            always_on: false,
            idle_seconds: 300,
            port: 65_535,
            state: DatabaseState::Provisioning,
            error: None,
            credentials: Credentials::random(),
            origin: Credentials::of_template(),
            cloned_from: Some(DatabaseId::random()),
            created_at: 1_700_000_000_123,
            target_time: Some(1_700_000_000_123_456),
        }
    }

    #[test]
    fn passwords_are_unsettled_from_the_change_of_the_row_until_postgresql_knows_them() {
        let mut row = row();
        assert!(!row.is_unsettled(), "it is made with names of its own");
        let before = row.credentials.clone();
        row.credentials = before.renewed();
        row.origin = before;
        assert!(row.is_unsettled());
        row.settle();
        assert!(!row.is_unsettled());
        assert_eq!(row.origin, row.credentials);
    }

    #[tokio::test]
    async fn a_database_comes_back_as_it_went_and_no_two_have_one_port() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let mut row = row();
            let tell = |row: &DatabaseRow| {
                let names = (row.id, row.account.clone(), row.label.clone(), row.cloned_from);
                let numbers = (row.size, row.cpu, row.always_on, row.idle_seconds, row.port);
                let state = (row.state, row.error.clone(), row.created_at, row.target_time);
                (names, numbers, state, row.credentials.clone(), row.origin.clone())
            };
            let plan = Plan::unlimited();
            assert!(db.insert_database(&row, &plan).await.unwrap());
            assert_eq!(tell(&db.all_databases().await.unwrap()[0]), tell(&row));
            let other = DatabaseRow { id: DatabaseId::random(), ..row.clone() };
            assert!(!db.insert_database(&other, &plan).await.unwrap());
            row = DatabaseRow {
                label: "other".to_owned(),
                always_on: true,
                idle_seconds: 5,
                port: NO_PORT,
                state: DatabaseState::Failed,
                error: Some("why".to_owned()),
                credentials: Credentials::random(),
                origin: Credentials::random(),
                ..row
            };
            db.update_database(&row).await.unwrap();
            assert_eq!(tell(&db.all_databases().await.unwrap()[0]), tell(&row));
            // It has given its port back, and is not the only one that has none.
            assert!(db.insert_database(&other, &plan).await.unwrap());
            db.update_database(&DatabaseRow { port: NO_PORT, ..other.clone() }).await.unwrap();
            assert_eq!(db.all_databases().await.unwrap().len(), 2);
            db.delete_database(&other.id).await.unwrap();
            db.delete_database(&row.id).await.unwrap();
            db.delete_database(&row.id).await.unwrap();
            assert!(db.all_databases().await.unwrap().is_empty());
            db.close().await;
        }
    }
}
