//! What accounts had from when to when. A use is opened and closed in the transaction that changes the thing, by what the
//! thing's row says then.

use api::{AccountId, SandboxId, SnapshotId, VolumeId};
use sqlx::{AnyConnection, Row as _};

use super::{Db, signed, unsigned};
use crate::{
    Error,
    account::{Kind, Use},
};

const MINUTE_MS: i64 = 60_000;

/// Of a sandbox: while it runs. `$1` is its id, `$2` and `$3` the time.
const SANDBOX: [&str; 2] = [
    "UPDATE uses SET ended = CASE WHEN began > $2 THEN began ELSE $2 END WHERE thing = $1 AND ended IS NULL \
         AND NOT EXISTS (SELECT 1 FROM sandboxes WHERE id = $1 AND state = 'running')",
    "INSERT INTO uses (account, kind, thing, vcpus, memory_mb, bytes, began) \
         SELECT account, 'machine', id, cpu, memory_mb, 0, CAST($2 AS BIGINT) FROM sandboxes WHERE id = $1 AND state = 'running' \
         ON CONFLICT DO NOTHING",
];
/// Of a volume: as long as there is one, by its size.
const VOLUME: [&str; 2] = [
    "UPDATE uses SET ended = CASE WHEN began > $2 THEN began ELSE $2 END WHERE thing = $1 AND ended IS NULL \
         AND NOT EXISTS (SELECT 1 FROM volumes WHERE id = $1 AND size_bytes = uses.bytes)",
    "INSERT INTO uses (account, kind, thing, vcpus, memory_mb, bytes, began) \
         SELECT account, 'volume', id, 0, 0, size_bytes, CAST($2 AS BIGINT) FROM volumes WHERE id = $1 \
         ON CONFLICT DO NOTHING",
];

impl Db {
    /// Until the second call, with nothing, what is found to have ended did so then.
    pub(crate) fn set_end(&self, at: Option<i64>) {
        *crate::sandbox::locked(&self.end) = at;
    }

    /// When something ends that is ended now, and when something begins.
    fn times(&self) -> (i64, i64) {
        let now = self.clock.steady_ms();
        (crate::sandbox::locked(&self.end).unwrap_or(now), now)
    }

    /// After its row was changed, made, or deleted.
    pub(super) async fn meter_sandbox(
        &self,
        connection: &mut AnyConnection,
        id: &SandboxId,
    ) -> Result<(), Error> {
        self.meter(connection, &id.to_string(), SANDBOX).await
    }

    /// After its row was changed, made, or deleted.
    pub(super) async fn meter_volume(
        &self,
        connection: &mut AnyConnection,
        id: &VolumeId,
    ) -> Result<(), Error> {
        self.meter(connection, &id.to_string(), VOLUME).await
    }

    async fn meter(
        &self,
        connection: &mut AnyConnection,
        id: &str,
        [end, begin]: [&str; 2],
    ) -> Result<(), Error> {
        let (ended, began) = self.times();
        for (statement, at) in [(end, ended), (begin, began)] {
            sqlx::query(statement).bind(id).bind(at).execute(&mut *connection).await?;
        }
        Ok(())
    }

    /// Of so many bytes, which the row does not say.
    pub(super) async fn begin_snapshot(
        &self,
        connection: &mut AnyConnection,
        account: &AccountId,
        id: &SnapshotId,
        bytes: u64,
    ) -> Result<(), Error> {
        sqlx::query(
            "INSERT INTO uses (account, kind, thing, vcpus, memory_mb, bytes, began) \
             VALUES ($1, 'snapshot', $2, 0, 0, $3, $4)",
        )
        .bind(account.as_str())
        .bind(id.to_string())
        .bind(signed(bytes)?)
        .bind(self.times().1)
        .execute(connection)
        .await?;
        Ok(())
    }

    pub(super) async fn end_snapshot(
        &self,
        connection: &mut AnyConnection,
        id: &SnapshotId,
    ) -> Result<(), Error> {
        sqlx::query("UPDATE uses SET ended = $2 WHERE thing = $1 AND ended IS NULL")
            .bind(id.to_string())
            .bind(self.times().0)
            .execute(connection)
            .await?;
        Ok(())
    }

    /// What a sandbox has sent in all its life; what was not counted yet is of this minute.
    pub(crate) async fn meter_egress(&self, id: &SandboxId, sent: u64) -> Result<(), Error> {
        let (_, now) = self.times();
        let (id, sent) = (id.to_string(), signed(sent)?);
        let mut transaction = self.pool().begin().await?;
        sqlx::query(
            "INSERT INTO egress (account, minute, bytes) \
             SELECT account, CAST($3 AS BIGINT), CAST($2 AS BIGINT) - metered_bytes FROM sandboxes \
                 WHERE id = $1 AND metered_bytes < $2 \
             ON CONFLICT (account, minute) DO UPDATE SET bytes = egress.bytes + excluded.bytes",
        )
        .bind(&id)
        .bind(sent)
        .bind(now - now.rem_euclid(MINUTE_MS))
        .execute(&mut *transaction)
        .await?;
        sqlx::query("UPDATE sandboxes SET metered_bytes = $2 WHERE id = $1 AND metered_bytes < $2")
            .bind(&id)
            .bind(sent)
            .execute(&mut *transaction)
            .await?;
        transaction.commit().await?;
        Ok(())
    }

    /// In all minutes that have begun from `from` on and before `to`.
    pub(crate) async fn egress(
        &self,
        account: &AccountId,
        from: i64,
        to: i64,
    ) -> Result<u64, Error> {
        let bytes: i64 = sqlx::query_scalar(
            "SELECT CAST(COALESCE(SUM(bytes), 0) AS BIGINT) FROM egress \
             WHERE account = $1 AND minute >= $2 AND minute < $3",
        )
        .bind(account.as_str())
        .bind(from)
        .bind(to)
        .fetch_one(self.pool())
        .await?;
        unsigned(bytes)
    }

    /// Those that touch the time between the two.
    pub(crate) async fn uses(
        &self,
        account: &AccountId,
        from: i64,
        to: i64,
    ) -> Result<Vec<Use>, Error> {
        let rows = sqlx::query(
            "SELECT kind, vcpus, memory_mb, bytes, began, ended FROM uses \
             WHERE account = $1 AND began < $3 AND (ended IS NULL OR ended > $2)",
        )
        .bind(account.as_str())
        .bind(from)
        .bind(to)
        .fetch_all(self.pool())
        .await?;
        let number = |row: &sqlx::any::AnyRow, column| unsigned::<u64>(row.try_get(column)?);
        let read = |row: &sqlx::any::AnyRow| {
            Ok(Use {
                kind: match row.try_get::<String, _>("kind")?.as_str() {
                    "machine" => Kind::Machine,
                    "volume" => Kind::Volume,
                    "snapshot" => Kind::Snapshot,
                    other => {
                        return Err(Error::internal(format!("a use of the unknown `{other}`")));
                    }
                },
                vcpus: number(row, "vcpus")?,
                memory_mb: number(row, "memory_mb")?,
                bytes: number(row, "bytes")?,
                began: row.try_get("began")?,
                ended: row.try_get("ended")?,
            })
        };
        rows.iter().map(read).collect()
    }

    /// Moves what began or ended from `since` on by so many milliseconds.
    pub(crate) async fn shift_uses(&self, since: i64, by: i64) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        for statement in [
            "UPDATE uses SET ended = ended + $2 WHERE ended >= $1",
            "UPDATE uses SET began = began + $2 WHERE began >= $1",
            "UPDATE uses SET ended = began WHERE ended < began",
        ] {
            let query = sqlx::query(statement);
            let query = if statement.contains('$') { query.bind(since).bind(by) } else { query };
            query.execute(&mut *transaction).await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) async fn begin_use_for_test(&self, kind: Kind, at: i64) {
        assert_eq!(kind, Kind::Volume);
        sqlx::query(
            "INSERT INTO uses (account, kind, thing, vcpus, memory_mb, bytes, began) \
             VALUES ('default', 'volume', 'v', 0, 0, 1073741824, $1)",
        )
        .bind(at)
        .execute(self.pool())
        .await
        .unwrap();
    }
}

#[cfg(test)]
mod tests {
    use api::VolumeKind;

    use super::*;
    use crate::{
        account::{Plan, Used},
        clock::Clock,
        db::{VolumeRow, testing},
    };

    #[tokio::test]
    async fn a_volume_is_used_from_its_row_on_by_its_size_to_its_end() {
        for database in testing::databases().await {
            let clock = Clock::held_at(1_000_000);
            let db = Db::connect(database.url()).await.unwrap().with_clock(&clock);
            let (account, plan) = (AccountId::default_account(), Plan::unlimited());
            let row = VolumeRow {
                id: VolumeId::random(),
                account: account.clone(),
                name: "v".parse().unwrap(),
                kind: VolumeKind::Data,
                size_bytes: 1 << 30,
                created_at: 1,
                template: None,
            };
            let used = async |from, to| {
                let uses = db.uses(&account, from, to).await.unwrap();
                Used::between(&uses, from, to).shown(0).volume_gb_seconds
            };
            assert!(db.insert_volume(&row, &plan).await.unwrap());
            clock.advance(2000);
            // Whatever the time of day does.
            clock.jump(-500_000);
            db.set_volume_size(&row, 3 << 30, &plan).await.unwrap();
            // The same size again is no other use.
            clock.advance(1000);
            db.set_volume_size(&row, 3 << 30, &plan).await.unwrap();
            assert_eq!(used(0, clock.steady_ms()).await, 2.0 + 3.0);
            assert_eq!(used(1_001_500, 1_002_500).await, 0.5 + 1.5);
            clock.advance(1000);
            db.delete_volume(&row.id).await.unwrap();
            clock.advance(50_000);
            assert_eq!(used(0, clock.steady_ms()).await, 2.0 + 6.0);
            assert_eq!(used(1_010_000, 2_000_000).await, 0.0);
            db.close().await;
        }
    }
}
