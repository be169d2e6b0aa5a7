//! The backups of databases that are gone. A row says whose are left, however long the store is away.

use std::{sync::Arc, time::Duration};

use api::DatabaseId;

use super::super::Databases;
use crate::Error;

const AGAIN_EVERY: Duration = Duration::from_secs(600);

impl Databases {
    /// Before the row of a database goes.
    pub(in crate::database) async fn leave_backups(&self, id: &DatabaseId) -> Result<(), Error> {
        self.db.insert_removed_backups(id).await
    }

    /// After it has gone.
    pub(in crate::database) fn begin_to_remove_backups(&self) {
        self.backups.removed.notify_one();
    }

    /// Runs as long as the server.
    pub(in crate::database) async fn remove_backups(self: Arc<Self>) {
        loop {
            if let Err(error) = self.remove_all_backups().await {
                tracing::warn!(%error, cause = error.causes(), "backups of deleted databases are left for now");
            }
            tokio::select! {
                () = self.backups.removed.notified() => {}
                () = tokio::time::sleep(AGAIN_EVERY) => {}
                () = self.closed.cancelled() => return,
            }
        }
    }

    async fn remove_all_backups(&self) -> Result<(), Error> {
        for id in self.db.removed_backups().await? {
            // Whose row is there is being removed itself, and may still write.
            if self.all().iter().any(|entry| entry.id() == id) {
                continue;
            }
            if let Some(store) = &self.backups.store {
                store.remove(&id.to_string()).await?;
            }
            self.db.forget_backups(&id).await?;
            tracing::info!(database = %id, "removed its backups");
        }
        Ok(())
    }
}
