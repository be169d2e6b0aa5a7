//! The backups of databases that are gone. A row says whose are left, however long the store is away.

use std::{sync::Arc, time::Duration};

use api::DatabaseId;

use super::{super::Databases, store::BackupStore};
use crate::Error;

const AGAIN_EVERY: Duration = Duration::from_secs(600);

impl Databases {
    /// Before the row of a database goes.
    pub(in crate::database) async fn leave_backups(&self, id: &DatabaseId) -> Result<(), Error> {
        // A clone that is being made may still bring its log there.
        if let Some(entry) = self.all().into_iter().find(|entry| entry.id() == *id) {
            drop(entry.archive.turn.lock().await);
        }
        self.db.insert_removed_backups(id).await
    }

    /// After it has gone.
    pub(in crate::database) fn begin_to_remove_backups(&self) {
        self.backups.removed.notify_one();
    }

    /// Runs as long as the server.
    pub(in crate::database) async fn remove_backups(self: Arc<Self>) {
        while !self.closed.is_cancelled() {
            tokio::select! {
                () = self.remove_backups_until_more() => {}
                () = self.closed.cancelled() => {}
            }
        }
    }

    /// What there is, until there may be more of it.
    async fn remove_backups_until_more(&self) {
        // Without one, as in a server that makes no backups now, the rows wait for it.
        if let Some(store) = &self.backups.store
            && let Err(error) = self.remove_all_backups(store).await
        {
            tracing::warn!(%error, cause = error.causes(), "failed to look for backups of deleted databases");
        }
        tokio::select! {
            () = self.backups.removed.notified() => {}
            () = tokio::time::sleep(AGAIN_EVERY) => {}
        }
    }

    async fn remove_all_backups(&self, store: &BackupStore) -> Result<(), Error> {
        for id in self.db.removed_backups().await? {
            // Whose row is there is being removed itself, and may still write.
            if self.all().iter().any(|entry| entry.id() == id) {
                continue;
            }
            match self.remove_backups_of(&id, store).await {
                Ok(()) => tracing::info!(database = %id, "removed its backups"),
                Err(error) => {
                    tracing::warn!(database = %id, %error, cause = error.causes(), "its backups are left for now");
                }
            }
        }
        Ok(())
    }

    async fn remove_backups_of(&self, id: &DatabaseId, store: &BackupStore) -> Result<(), Error> {
        // What its keeper was uploading when it ended comes to an end of its own, and would lie there for ever.
        store.settled(&id.to_string()).await?;
        store.remove(&id.to_string()).await?;
        self.db.forget_backups(id).await
    }
}
