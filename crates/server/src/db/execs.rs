//! Rows of execs.

use std::collections::HashMap;

use api::{ExecId, ExecState, SandboxId};
use sqlx::{Row as _, any::AnyRow};

use super::{Db, signed, unsigned};
use crate::Error;

/// Where the output of an exec is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExecPlace {
    /// Of one that runs: with the server and the guest.
    None,
    Row,
    Files,
    /// Gone, and with it all that is told of the exec but that there was one.
    Aged,
}

/// Times are milliseconds since 1970.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExecRow {
    pub(crate) sandbox: SandboxId,
    pub(crate) id: ExecId,
    /// Orders the execs of one sandbox; rises.
    pub(crate) place: i64,
    pub(crate) state: ExecState,
    pub(crate) exit_code: Option<i32>,
    pub(crate) killed_for_memory: bool,
    pub(crate) stdout_bytes: u64,
    pub(crate) stderr_bytes: u64,
    pub(crate) truncated: bool,
    pub(crate) started_at: i64,
    pub(crate) finished_at: Option<i64>,
    /// A steady time; see [`crate::clock`].
    pub(crate) ended_steady: Option<i64>,
    pub(crate) output: ExecPlace,
    pub(crate) kept_bytes: u64,
}

/// What a row holds of short output, in base64.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ShortOutput {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// What all kept execs of a sandbox are together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ExecSum {
    pub(crate) count: usize,
    pub(crate) kept_bytes: u64,
}

const COLUMNS: &str = "sandbox, id, place, state, exit_code, killed_for_memory, stdout_bytes, stderr_bytes, truncated, \
     started_at, finished_at, ended_steady, output, kept_bytes";
const INSERT: &str =
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)";

impl Db {
    /// False: there is one with this id already, or there was.
    pub(crate) async fn insert_exec(&self, row: &ExecRow) -> Result<bool, Error> {
        let insert = format!(
            "INSERT INTO execs ({COLUMNS}, stdout, stderr) {INSERT} ON CONFLICT (sandbox, id) DO NOTHING"
        );
        let done =
            bound(sqlx::query(&insert), row, &ShortOutput::default())?.execute(self.pool()).await?;
        Ok(done.rows_affected() == 1)
    }

    /// How these have ended. What a row says of an end is never changed.
    pub(crate) async fn save_execs(&self, rows: &[(ExecRow, ShortOutput)]) -> Result<(), Error> {
        let upsert = format!(
            "INSERT INTO execs ({COLUMNS}, stdout, stderr) {INSERT} ON CONFLICT (sandbox, id) DO UPDATE SET \
             state = excluded.state, exit_code = excluded.exit_code, killed_for_memory = excluded.killed_for_memory, \
             stdout_bytes = excluded.stdout_bytes, stderr_bytes = excluded.stderr_bytes, truncated = excluded.truncated, \
             finished_at = excluded.finished_at, ended_steady = excluded.ended_steady, output = excluded.output, \
             kept_bytes = excluded.kept_bytes, stdout = excluded.stdout, stderr = excluded.stderr \
             WHERE execs.state = 'running'"
        );
        let mut transaction = self.pool().begin().await?;
        for (row, output) in rows {
            bound(sqlx::query(&upsert), row, output)?.execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    pub(crate) async fn exec(
        &self,
        sandbox: &SandboxId,
        id: &ExecId,
    ) -> Result<Option<ExecRow>, Error> {
        let row =
            sqlx::query(&format!("SELECT {COLUMNS} FROM execs WHERE sandbox = $1 AND id = $2"))
                .bind(sandbox.to_string())
                .bind(id.as_str())
                .fetch_optional(self.pool())
                .await?;
        row.as_ref().map(from_row).transpose()
    }

    pub(crate) async fn short_output(
        &self,
        sandbox: &SandboxId,
        id: &ExecId,
    ) -> Result<ShortOutput, Error> {
        let row = sqlx::query("SELECT stdout, stderr FROM execs WHERE sandbox = $1 AND id = $2")
            .bind(sandbox.to_string())
            .bind(id.as_str())
            .fetch_optional(self.pool())
            .await?;
        let Some(row) = row else { return Ok(ShortOutput::default()) };
        Ok(ShortOutput { stdout: row.try_get("stdout")?, stderr: row.try_get("stderr")? })
    }

    /// Newest first, before this place; none that has aged out.
    pub(crate) async fn execs(
        &self,
        sandbox: &SandboxId,
        before: i64,
        limit: usize,
    ) -> Result<Vec<ExecRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM execs WHERE sandbox = $1 AND place < $2 AND output <> 'aged' ORDER BY place DESC LIMIT $3"
        ))
        .bind(sandbox.to_string())
        .bind(before)
        .bind(signed(limit)?)
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(from_row).collect()
    }

    /// Of all sandboxes.
    pub(crate) async fn running_execs(&self) -> Result<Vec<ExecRow>, Error> {
        let rows = sqlx::query(&format!("SELECT {COLUMNS} FROM execs WHERE state = 'running'"))
            .fetch_all(self.pool())
            .await?;
        rows.iter().map(from_row).collect()
    }

    /// Those whose output is in files, or may be.
    pub(crate) async fn execs_with_files(&self, sandbox: &SandboxId) -> Result<Vec<ExecId>, Error> {
        let ids: Vec<String> = sqlx::query_scalar(
            "SELECT id FROM execs WHERE sandbox = $1 AND (output = 'files' OR state = 'running')",
        )
        .bind(sandbox.to_string())
        .fetch_all(self.pool())
        .await?;
        ids.iter().map(|id| id.parse().map_err(|_| unread("id"))).collect()
    }

    pub(crate) async fn exec_sums(&self) -> Result<HashMap<SandboxId, ExecSum>, Error> {
        let rows = sqlx::query(
            "SELECT sandbox, COUNT(*) AS count, CAST(SUM(kept_bytes) AS BIGINT) AS kept FROM execs \
             WHERE output IN ('row', 'files') GROUP BY sandbox",
        )
        .fetch_all(self.pool())
        .await?;
        rows.iter()
            .map(|row| {
                let sandbox: String = row.try_get("sandbox")?;
                let sum = ExecSum {
                    count: unsigned(row.try_get("count")?)?,
                    kept_bytes: unsigned(row.try_get("kept")?)?,
                };
                Ok((sandbox.parse().map_err(|_| unread("sandbox"))?, sum))
            })
            .collect()
    }

    /// Those that have ended and are still kept, oldest first.
    pub(crate) async fn oldest_ended_execs(
        &self,
        sandbox: &SandboxId,
        limit: usize,
    ) -> Result<Vec<ExecRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM execs WHERE sandbox = $1 AND output IN ('row', 'files') ORDER BY place LIMIT $2"
        ))
        .bind(sandbox.to_string())
        .bind(signed(limit)?)
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(from_row).collect()
    }

    /// Those that ended before this steady time and are still kept, of all sandboxes.
    pub(crate) async fn execs_ended_before(
        &self,
        steady: i64,
        limit: usize,
    ) -> Result<Vec<ExecRow>, Error> {
        let rows = sqlx::query(&format!(
            "SELECT {COLUMNS} FROM execs WHERE ended_steady < $1 AND output IN ('row', 'files') ORDER BY ended_steady LIMIT $2"
        ))
        .bind(steady)
        .bind(signed(limit)?)
        .fetch_all(self.pool())
        .await?;
        rows.iter().map(from_row).collect()
    }

    /// Nothing is told of these any longer but that there were such. Of the sandbox's oldest not even that, beyond `tombstones`.
    pub(crate) async fn age_execs(
        &self,
        sandbox: &SandboxId,
        ids: &[ExecId],
        tombstones: usize,
    ) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        for id in ids {
            sqlx::query(
                "UPDATE execs SET output = 'aged', kept_bytes = 0, stdout = '', stderr = '' \
                 WHERE sandbox = $1 AND id = $2 AND state <> 'running'",
            )
            .bind(sandbox.to_string())
            .bind(id.as_str())
            .execute(&mut *transaction)
            .await?;
        }
        sqlx::query(
            "DELETE FROM execs WHERE sandbox = $1 AND output = 'aged' AND place <= \
             (SELECT place FROM execs WHERE sandbox = $1 AND output = 'aged' ORDER BY place DESC LIMIT 1 OFFSET $2)",
        )
        .bind(sandbox.to_string())
        .bind(signed(tombstones)?)
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// It never ran.
    pub(crate) async fn delete_exec(&self, sandbox: &SandboxId, id: &ExecId) -> Result<(), Error> {
        sqlx::query("DELETE FROM execs WHERE sandbox = $1 AND id = $2 AND state = 'running'")
            .bind(sandbox.to_string())
            .bind(id.as_str())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    pub(crate) async fn delete_execs(&self, sandbox: &SandboxId) -> Result<(), Error> {
        sqlx::query("DELETE FROM execs WHERE sandbox = $1")
            .bind(sandbox.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Of sandboxes that are no more.
    pub(crate) async fn delete_stray_execs(&self) -> Result<(), Error> {
        sqlx::query("DELETE FROM execs WHERE sandbox NOT IN (SELECT id FROM sandboxes)")
            .execute(self.pool())
            .await?;
        Ok(())
    }
}

type Query<'q> = sqlx::query::Query<'q, sqlx::Any, sqlx::any::AnyArguments<'q>>;

fn bound<'q>(
    query: Query<'q>,
    row: &'q ExecRow,
    output: &'q ShortOutput,
) -> Result<Query<'q>, Error> {
    Ok(query
        .bind(row.sandbox.to_string())
        .bind(row.id.as_str())
        .bind(row.place)
        .bind(row.state.as_str())
        .bind(row.exit_code.map(i64::from))
        .bind(i64::from(row.killed_for_memory))
        .bind(signed(row.stdout_bytes)?)
        .bind(signed(row.stderr_bytes)?)
        .bind(i64::from(row.truncated))
        .bind(row.started_at)
        .bind(row.finished_at)
        .bind(row.ended_steady)
        .bind(row.output.as_str())
        .bind(signed(row.kept_bytes)?)
        .bind(output.stdout.as_str())
        .bind(output.stderr.as_str()))
}

impl ExecPlace {
    const ALL: [Self; 4] = [Self::None, Self::Row, Self::Files, Self::Aged];

    fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Row => "row",
            Self::Files => "files",
            Self::Aged => "aged",
        }
    }
}

fn unread(what: &str) -> Error {
    Error::internal(format!("a row of execs has an unreadable {what}"))
}

fn from_row(row: &AnyRow) -> Result<ExecRow, Error> {
    let text = |column: &str| row.try_get::<String, _>(column);
    let number = |column: &str| row.try_get::<i64, _>(column);
    let maybe = |column: &str| row.try_get::<Option<i64>, _>(column);
    let (state, output) = (text("state")?, text("output")?);
    Ok(ExecRow {
        sandbox: text("sandbox")?.parse().map_err(|_| unread("sandbox"))?,
        id: text("id")?.parse().map_err(|_| unread("id"))?,
        place: number("place")?,
        state: ExecState::ALL
            .into_iter()
            .find(|known| known.as_str() == state)
            .ok_or_else(|| unread("state"))?,
        exit_code: maybe("exit_code")?
            .map(|code| i32::try_from(code).map_err(|_| unread("exit code")))
            .transpose()?,
        killed_for_memory: number("killed_for_memory")? != 0,
        stdout_bytes: unsigned(number("stdout_bytes")?)?,
        stderr_bytes: unsigned(number("stderr_bytes")?)?,
        truncated: number("truncated")? != 0,
        started_at: number("started_at")?,
        finished_at: maybe("finished_at")?,
        ended_steady: maybe("ended_steady")?,
        output: ExecPlace::ALL
            .into_iter()
            .find(|known| known.as_str() == output)
            .ok_or_else(|| unread("place of its output"))?,
        kept_bytes: unsigned(number("kept_bytes")?)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::db::testing;

    fn running(sandbox: SandboxId, id: &str, place: i64) -> ExecRow {
        ExecRow {
            sandbox,
            id: id.parse().unwrap(),
            place,
            state: ExecState::Running,
            exit_code: None,
            killed_for_memory: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            truncated: false,
            started_at: 1,
            finished_at: None,
            ended_steady: None,
            output: ExecPlace::None,
            kept_bytes: 0,
        }
    }

    fn ended(row: &ExecRow) -> (ExecRow, ShortOutput) {
        let row = ExecRow {
            state: ExecState::Failed,
            exit_code: Some(137),
            killed_for_memory: true,
            stdout_bytes: 1 << 40,
            stderr_bytes: 3,
            truncated: true,
            finished_at: Some(2),
            ended_steady: Some(5),
            output: ExecPlace::Row,
            kept_bytes: 6,
            ..row.clone()
        };
        (row, ShortOutput { stdout: "YWJj".to_owned(), stderr: "ZGVm".to_owned() })
    }

    #[tokio::test]
    async fn an_id_is_taken_for_ever_and_an_end_is_final() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let sandbox = SandboxId::random();
            let row = running(sandbox, "mount-1", 1);
            assert!(db.insert_exec(&row).await.unwrap());
            assert!(!db.insert_exec(&row).await.unwrap());
            assert_eq!(db.running_execs().await.unwrap(), std::slice::from_ref(&row));

            let (end, output) = ended(&row);
            db.save_execs(&[(end.clone(), output.clone())]).await.unwrap();
            assert_eq!(db.exec(&sandbox, &row.id).await.unwrap(), Some(end.clone()));
            assert_eq!(db.short_output(&sandbox, &row.id).await.unwrap(), output);
            let lost = ExecRow { state: ExecState::Lost, exit_code: None, ..end.clone() };
            db.save_execs(&[(lost, ShortOutput::default())]).await.unwrap();
            assert_eq!(db.exec(&sandbox, &row.id).await.unwrap(), Some(end.clone()));
            assert!(!db.insert_exec(&row).await.unwrap());
            let sum = ExecSum { count: 1, kept_bytes: 6 };
            assert_eq!(db.exec_sums().await.unwrap(), HashMap::from([(sandbox, sum)]));

            db.age_execs(&sandbox, std::slice::from_ref(&row.id), 10).await.unwrap();
            let aged = db.exec(&sandbox, &row.id).await.unwrap().unwrap();
            assert_eq!(aged.output, ExecPlace::Aged);
            assert!(!db.insert_exec(&row).await.unwrap());
            assert!(db.execs(&sandbox, i64::MAX, 10).await.unwrap().is_empty());
            db.close().await;
        }
    }

    #[tokio::test]
    async fn the_newest_come_first_and_the_oldest_tombstones_go() {
        for database in testing::databases().await {
            let db = Db::connect(database.url()).await.unwrap();
            let sandbox = SandboxId::random();
            let rows: Vec<_> =
                (0..5).map(|at| ended(&running(sandbox, &format!("e{at}"), at))).collect();
            db.save_execs(&rows).await.unwrap();
            let listed = async |before, limit| -> Vec<String> {
                let rows = db.execs(&sandbox, before, limit).await.unwrap();
                rows.into_iter().map(|row| row.id.to_string()).collect()
            };
            assert_eq!(listed(i64::MAX, 2).await, ["e4", "e3"]);
            assert_eq!(listed(3, 9).await, ["e2", "e1", "e0"]);
            let oldest = db.oldest_ended_execs(&sandbox, 3).await.unwrap();
            let ids: Vec<_> = oldest.into_iter().map(|row| row.id).collect();
            db.age_execs(&sandbox, &ids, 1).await.unwrap();
            assert_eq!(listed(i64::MAX, 9).await, ["e4", "e3"]);
            assert_eq!(db.exec(&sandbox, &ids[1]).await.unwrap(), None);
            assert!(db.exec(&sandbox, &ids[2]).await.unwrap().is_some());
            assert_eq!(db.execs_ended_before(5, 9).await.unwrap(), []);
            assert_eq!(db.execs_ended_before(6, 9).await.unwrap().len(), 2);
            db.delete_stray_execs().await.unwrap();
            assert!(db.exec_sums().await.unwrap().is_empty());
            db.close().await;
        }
    }
}
