//! What happened to sandboxes, written down beside the work itself.

use std::{
    sync::atomic::{AtomicI64, Ordering},
    time::Duration,
};

use api::{AccountId, Event, EventKind, SandboxId};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{Sandboxes, registry::Entry};
use crate::{
    Error, clock,
    clock::Clock,
    db::{Db, EventRow},
};

/// Waiting to be written. Beyond that they are lost, and that is logged.
const WAITING: usize = 4096;
const AT_ONCE: usize = 256;
const LONGEST_TAIL: usize = 1000;
/// A reader waits so long for what happened before it came; a database that is slower shows it later.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) struct Events {
    sender: mpsc::Sender<Waits>,
    /// Rises, also over restarts.
    place: AtomicI64,
}

pub(super) type Waiting = mpsc::Receiver<Waits>;

pub(super) enum Waits {
    Event(SandboxId, EventRow),
    /// Somebody wants to know when all before this is written.
    Reader(oneshot::Sender<()>),
}

impl Events {
    pub(super) fn new(clock: &Clock) -> (Self, Waiting) {
        let (sender, receiver) = mpsc::channel(WAITING);
        let place = AtomicI64::new(clock.now_ms().saturating_mul(1000));
        (Self { sender, place }, receiver)
    }
}

/// Until the server closes; what waits then is still written.
pub(super) async fn write(db: Db, mut waiting: Waiting, closed: CancellationToken) {
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            _ = waiting.recv_many(&mut batch, AT_ONCE) => {}
            () = closed.cancelled() => waiting.close(),
        }
        if batch.is_empty() && waiting.recv_many(&mut batch, AT_ONCE).await == 0 {
            return;
        }
        let (mut events, mut readers) = (Vec::new(), Vec::new());
        for waits in batch.drain(..) {
            match waits {
                Waits::Event(id, row) => events.push((id, row)),
                Waits::Reader(reader) => readers.push(reader),
            }
        }
        if !events.is_empty()
            && let Err(error) = db.insert_events(&events).await
        {
            tracing::warn!(
                cause = error.causes(),
                count = events.len(),
                "failed to write down what happened"
            );
        }
        for reader in readers {
            // It may have gone.
            let _ = reader.send(());
        }
    }
}

impl Sandboxes {
    /// Before whoever looks at the sandbox can see it, so that its events are never behind its state.
    pub(super) fn tell(&self, entry: &Entry, kind: EventKind, detail: Option<String>) {
        let place = self.events.place.fetch_add(1, Ordering::Relaxed);
        let event = EventRow { place, at: self.clock.now_ms(), kind, detail };
        let id = entry.look(|row| row.id);
        if self.events.sender.try_send(Waits::Event(id, event)).is_err() {
            tracing::warn!(sandbox = %id, kind = kind.as_str(), "too much happens at once: not written down");
        }
    }

    /// The last `tail`, oldest first.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn events(
        &self,
        account: &AccountId,
        id: &SandboxId,
        tail: Option<usize>,
    ) -> Result<Vec<Event>, Error> {
        self.registry.find(account, id)?;
        let (reader, written) = oneshot::channel();
        if self.events.sender.try_send(Waits::Reader(reader)).is_ok() {
            // What comes too late is shown to the next reader.
            let _ = tokio::time::timeout(PATIENCE, written).await;
        }
        let rows = self.db.events(id, tail.unwrap_or(LONGEST_TAIL).min(LONGEST_TAIL)).await?;
        Ok(rows
            .into_iter()
            .map(|row| Event {
                kind: row.kind,
                sandbox_id: *id,
                at: clock::from_ms(row.at),
                detail: row.detail,
            })
            .collect())
    }
}
