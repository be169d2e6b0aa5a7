//! What happened to sandboxes.

use api::{EventKind, SandboxId};
use sqlx::Row as _;

use super::{Db, signed};
use crate::Error;

/// Of one sandbox; older ones go.
const KEPT: i64 = 1000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EventRow {
    /// Orders the events of one sandbox; rises.
    pub(crate) place: i64,
    /// Milliseconds since 1970.
    pub(crate) at: i64,
    pub(crate) kind: EventKind,
    pub(crate) detail: Option<String>,
}

impl Db {
    pub(crate) async fn insert_events(
        &self,
        events: &[(SandboxId, EventRow)],
    ) -> Result<(), Error> {
        let mut transaction = self.pool().begin().await?;
        for (sandbox, event) in events {
            sqlx::query(
                "INSERT INTO events (sandbox, place, at, kind, detail) VALUES ($1, $2, $3, $4, $5)",
            )
            .bind(sandbox.to_string())
            .bind(event.place)
            .bind(event.at)
            .bind(event.kind.as_str())
            .bind(&event.detail)
            .execute(&mut *transaction)
            .await?;
            sqlx::query(
                "DELETE FROM events WHERE sandbox = $1 AND place <= \
                 (SELECT place FROM events WHERE sandbox = $1 ORDER BY place DESC LIMIT 1 OFFSET $2)",
            )
            .bind(sandbox.to_string())
            .bind(KEPT)
            .execute(&mut *transaction)
            .await?;
        }
        transaction.commit().await?;
        Ok(())
    }

    /// The last `count` of them, oldest first.
    pub(crate) async fn events(
        &self,
        sandbox: &SandboxId,
        count: usize,
    ) -> Result<Vec<EventRow>, Error> {
        let rows = sqlx::query(
            "SELECT place, at, kind, detail FROM events WHERE sandbox = $1 ORDER BY place DESC LIMIT $2",
        )
        .bind(sandbox.to_string())
        .bind(signed(count)?)
        .fetch_all(self.pool())
        .await?;
        let mut events: Vec<_> = rows
            .iter()
            .map(|row| {
                Ok(EventRow {
                    place: row.try_get("place")?,
                    at: row.try_get("at")?,
                    kind: kind(&row.try_get::<String, _>("kind")?)?,
                    detail: row.try_get("detail")?,
                })
            })
            .collect::<Result<_, Error>>()?;
        events.reverse();
        Ok(events)
    }

    pub(crate) async fn delete_events(&self, sandbox: &SandboxId) -> Result<(), Error> {
        sqlx::query("DELETE FROM events WHERE sandbox = $1")
            .bind(sandbox.to_string())
            .execute(self.pool())
            .await?;
        Ok(())
    }

    /// Of sandboxes that are no more: some are written after their sandbox has gone.
    pub(crate) async fn delete_stray_events(&self) -> Result<(), Error> {
        sqlx::query("DELETE FROM events WHERE sandbox NOT IN (SELECT id FROM sandboxes)")
            .execute(self.pool())
            .await?;
        Ok(())
    }
}

fn kind(name: &str) -> Result<EventKind, Error> {
    EventKind::ALL
        .into_iter()
        .find(|kind| kind.as_str() == name)
        .ok_or_else(|| Error::internal(format!("a row of events has an unknown kind `{name}`")))
}
