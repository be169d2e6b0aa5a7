//! Ended execs that the agent need not keep any longer. It is told of many at once and a little later: told of each at
//! its end, it would be busy with the last command when the next one comes.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use protocol::message::Request;

use super::Guest;
use super::connection::Connection;
use crate::error::Result;

const GATHERED_FOR: Duration = Duration::from_secs(1);
const DEADLINE: Duration = Duration::from_secs(30);
/// The agent's own bounds are higher; one request has room for many more.
const MOST: usize = 512;

#[derive(Debug, Default)]
pub(super) struct Forgetting {
    ids: Mutex<Vec<String>>,
}

impl Forgetting {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.ids.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn push(&self, id: String) -> usize {
        let mut ids = self.ids.lock().unwrap_or_else(PoisonError::into_inner);
        ids.push(id);
        ids.len()
    }
}

impl Guest {
    /// The record and output of this ended exec are needed no longer. The agent learns of it within moments; where the
    /// connection ends before, the agent's own bounds take care of it.
    pub fn forget_exec(&self, id: String) {
        let count = self.forgetting.push(id);
        if count != 1 && count < MOST {
            return;
        }
        let (connection, forgetting) =
            (Arc::downgrade(&self.connection), Arc::clone(&self.forgetting));
        let pause = if count == 1 { GATHERED_FOR } else { Duration::ZERO };
        tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            let upgraded: Option<Arc<Connection>> = connection.upgrade();
            if let Some(connection) = upgraded
                && let Err(error) = (Self { connection, forgetting }).forget_now().await
            {
                tracing::debug!(%error, "ended execs stay in their guest");
            }
        });
    }

    /// Tells the agent at once of all that were gathered.
    ///
    /// # Errors
    /// As of [`Guest::call`].
    pub async fn forget_now(&self) -> Result<()> {
        let ids = self.forgetting.take();
        if !ids.is_empty() {
            self.call(Request::ExecsForget { ids }, DEADLINE).await?;
        }
        Ok(())
    }
}
