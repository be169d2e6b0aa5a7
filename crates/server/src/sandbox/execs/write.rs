//! The ends of execs are written down beside the work itself, many at once.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use machine::guest::Guest;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{Exec, Execs, Origin, ageing};
use crate::{
    Error,
    db::{Db, ExecRow, ShortOutput},
};

/// Others come in this time: one commit does for all.
const GATHERED_FOR: Duration = Duration::from_millis(100);
const AT_ONCE: usize = 256;
/// Waiting for a database that is away. Beyond that, those that no client has named are forgotten.
const MOST_WAITING: usize = 8192;
const DATABASE_PAUSE: Duration = Duration::from_secs(1);

/// An exec whose end is to be written down.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(super) exec: Arc<Exec>,
    /// Keeps its output until then.
    pub(super) guest: Option<Guest>,
    /// How many waited before it.
    pub(super) waiting: usize,
}

/// Until the server closes; what waits then is still written.
pub(crate) async fn write(
    db: Db,
    mut waiting: mpsc::UnboundedReceiver<Ended>,
    closed: CancellationToken,
) {
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            _ = waiting.recv_many(&mut batch, AT_ONCE) => {}
            () = closed.cancelled() => waiting.close(),
        }
        if batch.is_empty() && waiting.recv_many(&mut batch, AT_ONCE).await == 0 {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep(GATHERED_FOR) => {}
            () = closed.cancelled() => {}
        }
        while batch.len() < AT_ONCE
            && let Ok(more) = waiting.try_recv()
        {
            batch.push(more);
        }
        write_batch(&db, std::mem::take(&mut batch), &closed).await;
    }
}

async fn write_batch(db: &Db, batch: Vec<Ended>, closed: &CancellationToken) {
    let (mut rows, mut written) = (Vec::new(), Vec::new());
    for Ended { exec, guest, waiting } in batch {
        exec.of().shared.waiting.fetch_sub(1, Ordering::Relaxed);
        if exec.of().is_closed() {
            continue;
        }
        if waiting > MOST_WAITING && exec.origin == Origin::Server {
            tracing::warn!(sandbox = %exec.of().sandbox, exec = %exec.id, "too many execs end while the database is away: one is forgotten");
            exec.of().forget(&exec);
            continue;
        }
        rows.push(exec.settle().await);
        written.push((exec, guest));
    }
    while let Err(error) = save(db, &rows).await {
        tracing::error!(
            cause = error.causes(),
            count = rows.len(),
            "failed to write down how execs ended"
        );
        tokio::select! {
            () = tokio::time::sleep(DATABASE_PAUSE) => {}
            // Their guests still have them for the next server.
            () = closed.cancelled() => return,
        }
    }
    let mut sandboxes: HashMap<_, Arc<Execs>> = HashMap::new();
    for (exec, guest) in written {
        fault::point!("execs.forgetting");
        let of = Arc::clone(exec.of());
        of.count.fetch_add(1, Ordering::Relaxed);
        of.forget(&exec);
        if let Some(guest) = guest {
            guest.forget_exec(exec.guest_id());
        }
        sandboxes.insert(of.sandbox, of);
    }
    for execs in sandboxes.into_values() {
        if let Err(error) = ageing::bound(db, &execs).await {
            tracing::warn!(sandbox = %execs.sandbox, cause = error.causes(), "old execs stay");
        }
    }
}

async fn save(db: &Db, rows: &[(ExecRow, ShortOutput)]) -> Result<(), Error> {
    if rows.is_empty() {
        return Ok(());
    }
    fault::point!("execs.end_writing", Error::internal);
    db.save_execs(rows).await
}
