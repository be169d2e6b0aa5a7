//! Sandboxes: who has which, what they are to become, and the way there.

mod exec;
mod files;
mod logs;

use std::{collections::BTreeMap, sync::Arc};

use api::{AccountId, CreateSandbox, Lifecycle, Sandbox, SandboxId, SandboxStatus, UpdateLifecycle};
use machine::guest::Guest;

pub use self::{exec::ExecWatch, files::FileContent, logs::Logs};
use crate::Error;

pub struct Sandboxes {}

/// A list's filter.
#[derive(Debug, Default)]
pub struct Filter {
    pub status: Option<SandboxStatus>,
    pub metadata: BTreeMap<String, String>,
    pub limit: Option<usize>,
    pub cursor: Option<String>,
}

/// A running sandbox's inside: what commands and files need.
#[derive(Clone)]
pub struct Running {
    pub guest: Guest,
    /// Of the create; given to every command.
    pub environment: Arc<BTreeMap<String, String>>,
    pub logs: Arc<Logs>,
}

impl Sandboxes {
    pub async fn create(&self, account: &AccountId, request: CreateSandbox) -> Result<Sandbox, Error> { todo!() }
    pub fn get(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> { todo!() }
    /// Newest first, and the next cursor when there is more.
    pub fn list(&self, account: &AccountId, filter: &Filter) -> Result<(Vec<Sandbox>, Option<String>), Error> { todo!() }
    pub async fn delete(&self, account: &AccountId, id: &SandboxId) -> Result<(), Error> { todo!() }
    pub fn lifecycle(&self, account: &AccountId, id: &SandboxId) -> Result<Lifecycle, Error> { todo!() }
    pub async fn update_lifecycle(&self, account: &AccountId, id: &SandboxId, update: UpdateLifecycle) -> Result<Lifecycle, Error> { todo!() }
    /// 404 when it is not theirs, gone, or expired; 409 or 503 when it is not running, with the way out.
    pub fn running(&self, account: &AccountId, id: &SandboxId) -> Result<Running, Error> { todo!() }
}
