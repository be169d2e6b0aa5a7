//! Sandboxes whose time is up are deleted.

use std::{sync::Arc, time::Duration};

use super::{Sandboxes, state::Target};

/// To requests an expired sandbox is gone at once; this only bounds how long it still takes room.
const LOOK_EVERY: Duration = Duration::from_millis(500);

impl Sandboxes {
    pub(crate) async fn delete_expired(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.closed.cancelled() => return,
            }
            let now = self.clock.steady_ms();
            for entry in self.registry.all() {
                if !entry.is_expired(now) || entry.look(|row| row.target) == Target::Deleted {
                    continue;
                }
                tracing::info!(sandbox = %entry.look(|row| row.id), "expired");
                if let Err(error) = self.set_deleted(&entry).await {
                    tracing::warn!(%error, cause = error.causes(), "failed to write an expiry; it goes on all the same");
                }
            }
        }
    }
}
