//! The end of a sandbox, as it is asked for. Its driver takes the way there.

use std::time::Duration;

use api::{AccountId, ErrorCode, SandboxId};

use super::{
    Sandboxes, managed,
    registry::Entry,
    state::{Target, Wish},
};
use crate::Error;

/// How long a delete waits for its driver. The published clients give up after 30 s without an answer.
const DELETE_DEADLINE: Duration = Duration::from_secs(25);
/// The same where what it holds is needed next: a start under way ends first, within its own deadlines.
pub(crate) const GONE_DEADLINE: Duration = Duration::from_secs(60);

impl Sandboxes {
    /// Idempotent while it goes on: whoever asks again waits for the same end. One that lasts is answered before it: it is
    /// `deleting`, nothing can be done inside it any longer, and a server that dies goes on with it.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn delete(&self, account: &AccountId, id: &SandboxId) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        managed::refuse(&entry)?;
        if !self.ended_within(&entry, DELETE_DEADLINE).await? {
            tracing::warn!(sandbox = %id, "a delete is answered before the sandbox is gone");
        }
        Ok(())
    }

    /// As [`Sandboxes::delete`], for whoever needs what it holds.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 503 when it lasts.
    pub(super) async fn delete_first(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        managed::refuse(&entry)?;
        self.delete_entry(&entry, DELETE_DEADLINE).await
    }

    /// # Errors
    /// 503 when it is still there at the deadline.
    pub(super) async fn delete_entry(
        &self,
        entry: &Entry,
        deadline: Duration,
    ) -> Result<(), Error> {
        if self.ended_within(entry, deadline).await? {
            return Ok(());
        }
        Err(Error::busy("the sandbox is being deleted and will be gone shortly", 5))
    }

    /// Whether it is gone by the deadline.
    async fn ended_within(&self, entry: &Entry, deadline: Duration) -> Result<bool, Error> {
        entry.accept(Wish::Delete, self.clock.steady_ms())?;
        self.set_deleted(entry).await?;
        let mut removed = entry.removed.subscribe();
        match tokio::time::timeout(deadline, removed.wait_for(|gone| *gone)).await {
            Ok(Ok(_)) => {
                fault::point!("delete.answering");
                Ok(true)
            }
            Ok(Err(_)) => Err(Error::internal("the sandbox's driver ended")),
            Err(_) => Ok(false),
        }
    }

    /// Written before it is done, so that a server that dies now goes on with it.
    pub(super) async fn set_deleted(&self, entry: &Entry) -> Result<(), Error> {
        if entry.look(|row| row.target) != Target::Deleted {
            entry.change(|row| row.target = Target::Deleted);
            entry.target_changed.notify_one();
            fault::point!("delete.target_writing", Error::internal);
            match self.save_row(entry).await {
                // The way out of a full disk must not need room on it. Should the server die now, the row shows a
                // sandbox without a machine.
                Err(error) if error.code == ErrorCode::CapacityExceeded => {
                    tracing::warn!(
                        cause = error.causes(),
                        "a delete goes on without being written down"
                    );
                }
                outcome => outcome?,
            }
            fault::point!("delete.target_written");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use tokio::time::Instant;

    use super::*;
    use crate::{config::Capacity, db::SandboxRow, sandbox::testing::Alone};

    #[tokio::test]
    async fn a_delete_that_lasts_is_answered_before_its_client_gives_up() {
        let alone = Alone::new(Capacity::default()).await;
        let (sandboxes, account, id) =
            (&alone.sandboxes, AccountId::default_account(), SandboxId::random());
        let row = sandboxes.running_row(&account, id, BTreeMap::new());
        // Nobody ever removes it.
        let entry = sandboxes.entry(SandboxRow { target: Target::Deleted, ..row });
        sandboxes.registry.insert(&Arc::new(entry));
        tokio::time::pause();
        let began = Instant::now();
        sandboxes.delete(&account, &id).await.unwrap();
        let took = began.elapsed();
        assert!(took >= DELETE_DEADLINE && took < Duration::from_secs(30), "{took:?}");
        for refused in [
            sandboxes.delete_first(&account, &id).await.unwrap_err(),
            sandboxes.delete_managed(&account, &id).await.unwrap_err(),
        ] {
            assert_eq!(refused.code, ErrorCode::Unavailable);
            assert!(refused.retry_after.is_some());
        }
    }
}
