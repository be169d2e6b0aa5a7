//! Rows of the templates that users built, and of their builds.

use api::{AccountId, BuildStatus, TemplateName};
use sqlx::{Row, any::AnyRow};

use super::{Db, signed, unsigned};
use crate::Error;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TemplateRow {
    pub(crate) account: AccountId,
    pub(crate) name: TemplateName,
    pub(crate) digest: String,
    pub(crate) label: String,
    pub(crate) description: String,
    pub(crate) cpu: u32,
    pub(crate) memory_mb: u64,
    pub(crate) disk_mb: u64,
    pub(crate) size_bytes: u64,
    pub(crate) created_at: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BuildRow {
    pub(crate) id: String,
    pub(crate) account: AccountId,
    pub(crate) name: TemplateName,
    pub(crate) status: BuildStatus,
    pub(crate) error: Option<String>,
    /// Of the sandboxes; none of a build of an earlier server.
    pub(crate) disk_mb: Option<u64>,
    pub(crate) created_at: i64,
    pub(crate) started_at: Option<i64>,
    pub(crate) ended_at: Option<i64>,
}

impl Db {
    /// Adds it, or replaces the one of this name.
    pub(crate) async fn put_template(&self, template: &TemplateRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO templates (account, name, digest, label, description, cpu, memory_mb, disk_mb, size_bytes, created_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)
             ON CONFLICT (account, name) DO UPDATE SET digest = excluded.digest, label = excluded.label,
                 description = excluded.description, cpu = excluded.cpu, memory_mb = excluded.memory_mb,
                 disk_mb = excluded.disk_mb, size_bytes = excluded.size_bytes, created_at = excluded.created_at",
        )
        .bind(template.account.as_str())
        .bind(template.name.as_str())
        .bind(&template.digest)
        .bind(&template.label)
        .bind(&template.description)
        .bind(i64::from(template.cpu))
        .bind(signed(template.memory_mb)?)
        .bind(signed(template.disk_mb)?)
        .bind(signed(template.size_bytes)?)
        .bind(template.created_at)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Of all accounts, by name.
    pub(crate) async fn templates(&self) -> Result<Vec<TemplateRow>, Error> {
        let rows = sqlx::query(
            "SELECT account, name, digest, label, description, cpu, memory_mb, disk_mb, size_bytes, created_at
             FROM templates ORDER BY account, name",
        )
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(template_of).collect()
    }

    /// False when there was none.
    pub(crate) async fn delete_template(
        &self,
        account: &AccountId,
        name: &TemplateName,
    ) -> Result<bool, Error> {
        let done = sqlx::query("DELETE FROM templates WHERE account = $1 AND name = $2")
            .bind(account.as_str())
            .bind(name.as_str())
            .execute(self.pool())
            .await?;
        Ok(done.rows_affected() > 0)
    }

    /// Adds it, or brings its status, error, beginning and end up to date.
    pub(crate) async fn put_build(&self, build: &BuildRow) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO builds (id, account, name, status, error, disk_mb, created_at, started_at, ended_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9)
             ON CONFLICT (id) DO UPDATE SET status = excluded.status, error = excluded.error,
                 started_at = excluded.started_at, ended_at = excluded.ended_at",
        )
        .bind(&build.id)
        .bind(build.account.as_str())
        .bind(build.name.as_str())
        .bind(build.status.to_string())
        .bind(build.error.as_deref())
        .bind(build.disk_mb.map(signed).transpose()?)
        .bind(build.created_at)
        .bind(build.started_at)
        .bind(build.ended_at)
        .execute(self.pool())
        .await?;
        Ok(())
    }

    /// Newest first.
    pub(crate) async fn builds(&self, account: &AccountId) -> Result<Vec<BuildRow>, Error> {
        let rows = sqlx::query(
            "SELECT id, account, name, status, error, disk_mb, created_at, started_at, ended_at FROM builds
             WHERE account = $1 ORDER BY created_at DESC, id",
        )
        .bind(account.as_str())
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(build_of).collect()
    }

    pub(crate) async fn build(
        &self,
        account: &AccountId,
        id: &str,
    ) -> Result<Option<BuildRow>, Error> {
        let row = sqlx::query(
            "SELECT id, account, name, status, error, disk_mb, created_at, started_at, ended_at FROM builds
             WHERE account = $1 AND id = $2",
        )
        .bind(account.as_str())
        .bind(id)
        .fetch_optional(self.pool())
        .await?;
        row.as_ref().map(build_of).transpose()
    }

    /// Builds do not survive their server: at its start, those that were under way have failed.
    pub(crate) async fn fail_unfinished_builds(&self, now: i64) -> Result<u64, Error> {
        let done = sqlx::query(
            "UPDATE builds SET status = 'failed', error = 'the server stopped during the build; start it again', ended_at = $1
             WHERE status IN ('queued', 'running', 'baking')",
        )
        .bind(now)
        .execute(self.pool())
        .await?;
        Ok(done.rows_affected())
    }
}

fn template_of(row: &AnyRow) -> Result<TemplateRow, Error> {
    Ok(TemplateRow {
        account: row.try_get::<String, _>("account")?.parse().map_err(Error::internal)?,
        name: row.try_get::<String, _>("name")?.parse().map_err(Error::internal)?,
        digest: row.try_get("digest")?,
        label: row.try_get("label")?,
        description: row.try_get("description")?,
        cpu: unsigned(row.try_get("cpu")?)?,
        memory_mb: unsigned(row.try_get("memory_mb")?)?,
        disk_mb: unsigned(row.try_get("disk_mb")?)?,
        size_bytes: unsigned(row.try_get("size_bytes")?)?,
        created_at: row.try_get("created_at")?,
    })
}

fn build_of(row: &AnyRow) -> Result<BuildRow, Error> {
    Ok(BuildRow {
        id: row.try_get("id")?,
        account: row.try_get::<String, _>("account")?.parse().map_err(Error::internal)?,
        name: row.try_get::<String, _>("name")?.parse().map_err(Error::internal)?,
        status: status_of(&row.try_get::<String, _>("status")?)?,
        error: row.try_get("error")?,
        disk_mb: row.try_get::<Option<i64>, _>("disk_mb")?.map(unsigned).transpose()?,
        created_at: row.try_get("created_at")?,
        started_at: row.try_get("started_at")?,
        ended_at: row.try_get("ended_at")?,
    })
}

fn status_of(text: &str) -> Result<BuildStatus, Error> {
    [
        BuildStatus::Queued,
        BuildStatus::Running,
        BuildStatus::Baking,
        BuildStatus::Done,
        BuildStatus::Failed,
    ]
    .into_iter()
    .find(|status| status.to_string() == text)
    .ok_or_else(|| Error::internal(format!("a build has the unknown status `{text}`")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    #[tokio::test]
    async fn a_template_is_replaced_by_the_next_of_its_name() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let first = TemplateRow {
                account: AccountId::default_account(),
                name: "mine".parse().unwrap(),
                digest: "d1".to_owned(),
                label: String::new(),
                description: String::new(),
                cpu: 2,
                memory_mb: 2048,
                disk_mb: 10_240,
                size_bytes: u64::from(u32::MAX) * 4,
                created_at: 1,
            };
            let second = TemplateRow { digest: "d2".to_owned(), created_at: 2, ..first.clone() };
            db.put_template(&first).await.unwrap();
            db.put_template(&second).await.unwrap();
            assert_eq!(db.templates().await.unwrap(), [second]);
            assert!(db.delete_template(&first.account, &first.name).await.unwrap());
            assert!(!db.delete_template(&first.account, &first.name).await.unwrap());
            db.close().await;
        }
    }

    #[tokio::test]
    async fn a_build_that_its_server_did_not_finish_has_failed() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let account = AccountId::default_account();
            let build = BuildRow {
                id: "b1".to_owned(),
                account: account.clone(),
                name: "mine".parse().unwrap(),
                status: BuildStatus::Queued,
                error: None,
                disk_mb: None,
                created_at: 1,
                started_at: None,
                ended_at: None,
            };
            let done = BuildRow {
                id: "b2".to_owned(),
                status: BuildStatus::Done,
                disk_mb: Some(10_240),
                created_at: 2,
                started_at: Some(2),
                ended_at: Some(3),
                ..build.clone()
            };
            db.put_build(&build).await.unwrap();
            let baking =
                BuildRow { status: BuildStatus::Baking, started_at: Some(4), ..build.clone() };
            db.put_build(&baking).await.unwrap();
            db.put_build(&done).await.unwrap();

            assert_eq!(db.fail_unfinished_builds(9).await.unwrap(), 1);
            let builds = db.builds(&account).await.unwrap();
            assert_eq!(builds[0], done);
            assert_eq!(
                (builds[1].status, builds[1].ended_at, builds[1].error.is_some()),
                (BuildStatus::Failed, Some(9), true)
            );
            assert_eq!((builds[1].started_at, builds[1].disk_mb), (Some(4), None));
            assert_eq!((builds[0].started_at, builds[0].disk_mb), (Some(2), Some(10_240)));
            assert_eq!(db.build(&account, "b2").await.unwrap(), Some(done));
            assert_eq!(db.build(&"other".parse().unwrap(), "b2").await.unwrap(), None);
            db.close().await;
        }
    }
}
