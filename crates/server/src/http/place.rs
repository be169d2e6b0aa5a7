//! Where a request that takes a while does its work, kept until its end.

use std::sync::Arc;

use api::{AccountId, SandboxId};

use crate::{App, Error};

pub(super) struct Place {
    pub(super) app: Arc<App>,
    pub(super) account: AccountId,
    pub(super) sandbox: SandboxId,
}

impl Place {
    /// In the light of what has become of the sandbox meanwhile.
    pub(super) fn explain(&self, error: Error) -> Error {
        self.app.sandboxes.explain(&self.account, &self.sandbox, error)
    }
}
