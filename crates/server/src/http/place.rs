//! Where a request does its work: a sandbox, and whose it is. Kept until the end by one that takes a while.

use std::sync::Arc;

use api::{AccountId, SandboxId, Scope};

use crate::{App, Error, keys::Caller, sandbox::Running};

pub(super) struct Place {
    pub(super) app: Arc<App>,
    pub(super) account: AccountId,
    pub(super) sandbox: SandboxId,
    scope: Scope,
}

impl Place {
    pub(super) fn new(app: Arc<App>, caller: Caller, sandbox: SandboxId) -> Self {
        Self { app, account: caller.account, sandbox, scope: caller.scope }
    }

    pub(super) async fn running(&self) -> Result<Running, Error> {
        self.app.sandboxes.running(&self.account, &self.sandbox).await
    }

    /// Reading is for both scopes; waking what hibernates is a change.
    pub(super) async fn to_look(&self) -> Result<Running, Error> {
        match self.scope {
            Scope::Full => self.running().await,
            Scope::Read => self.app.sandboxes.running_already(&self.account, &self.sandbox),
        }
    }

    /// In the light of what has become of the sandbox meanwhile.
    pub(super) fn explain(&self, error: Error) -> Error {
        self.app.sandboxes.explain(&self.account, &self.sandbox, error)
    }
}
