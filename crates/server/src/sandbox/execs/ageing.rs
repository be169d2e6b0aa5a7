//! Ended execs are kept for a while: bounded by their number, their age and the room that they take.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use api::{ExecId, SandboxId};

use super::Execs;
use crate::{
    Error,
    blocking::blocking,
    db::{Db, ExecRow},
    sandbox::Sandboxes,
};

/// How many times as many as are kept can still be told to be gone.
const TOMBSTONES: usize = 10;
const AT_ONCE: usize = 256;
const LOOK_AT_LEAST_EVERY: Duration = Duration::from_secs(60);
const LOOK_AT_MOST_EVERY: Duration = Duration::from_millis(500);

/// No more of them, and no more of their output, than may be kept.
pub(super) async fn bound(db: &Db, execs: &Arc<Execs>) -> Result<(), Error> {
    let limits = &execs.shared.limits;
    // A new one has room for both its streams, if it can.
    let most = limits.total_output_bytes;
    let most = most - (2 * limits.output_bytes).min(most / 2);
    loop {
        let too_many = execs.count.load(Ordering::Relaxed).saturating_sub(limits.kept);
        let too_much = execs.kept_bytes.load(Ordering::Relaxed) > most;
        if too_many == 0 && !too_much {
            return Ok(());
        }
        let count = if too_much { too_many.max(1) } else { too_many };
        let oldest = db.oldest_ended_execs(&execs.sandbox, count.min(AT_ONCE)).await?;
        if oldest.is_empty() {
            return Ok(());
        }
        age(db, execs, &oldest).await?;
    }
}

async fn age(db: &Db, execs: &Arc<Execs>, rows: &[ExecRow]) -> Result<(), Error> {
    let ids: Vec<ExecId> = rows.iter().map(|row| row.id.clone()).collect();
    let tombstones = execs.shared.limits.kept.saturating_mul(TOMBSTONES);
    // The rows first: output without a row is swept, a row without its output would be a lie.
    db.age_execs(&execs.sandbox, &ids, tombstones).await?;
    let kept: u64 = rows.iter().map(|row| row.kept_bytes).sum();
    // Counted once, whoever else lets them go meanwhile.
    let _ = execs.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        Some(count.saturating_sub(ids.len()))
    });
    execs.give_back_room(kept);
    let files = execs.files.clone();
    blocking(move || ids.iter().try_for_each(|id| files.remove(id))).await
}

impl Sandboxes {
    pub(in crate::sandbox) async fn age_execs(self: Arc<Self>) {
        let kept_for = self.execs.limits.kept_for;
        let pause = (kept_for / 4).clamp(LOOK_AT_MOST_EVERY, LOOK_AT_LEAST_EVERY);
        let kept_ms = i64::try_from(kept_for.as_millis()).unwrap_or(i64::MAX);
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = self.closed.cancelled() => return,
            }
            let before = self.clock.steady_ms().saturating_sub(kept_ms);
            if let Err(error) = self.age_all(before).await {
                tracing::warn!(cause = error.causes(), "old execs stay");
            }
        }
    }

    /// Those that ended before this steady time.
    async fn age_all(&self, before: i64) -> Result<(), Error> {
        loop {
            let old = self.db.execs_ended_before(before, AT_ONCE).await?;
            let Some(sandbox) = old.first().map(|row| row.sandbox) else { return Ok(()) };
            let rows: Vec<_> = old.into_iter().filter(|row| row.sandbox == sandbox).collect();
            self.age_of(&sandbox, &rows).await?;
        }
    }

    async fn age_of(&self, sandbox: &SandboxId, rows: &[ExecRow]) -> Result<(), Error> {
        match self.registry.all().into_iter().find(|entry| entry.look(|row| row.id == *sandbox)) {
            Some(entry) => age(&self.db, &entry.execs, rows).await,
            // Left by one that was deleted while it ended.
            None => self.db.delete_execs(sandbox).await,
        }
    }
}
