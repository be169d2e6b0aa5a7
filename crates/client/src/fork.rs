//! Forks of a sandbox: children that go on from one instant of it.

use api::{Fork, ForkTree, Forked, ForkedTree, Promote, Promoted, SandboxId};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    pub async fn fork(&self, id: &SandboxId, request: &Fork) -> Result<Forked, Error> {
        let path = format!("/v1/sandboxes/{id}/fork");
        self.json(self.request(Method::POST, &path).json(request)).await
    }

    pub async fn fork_tree(&self, id: &SandboxId, request: &ForkTree) -> Result<ForkedTree, Error> {
        let path = format!("/v1/sandboxes/{id}/fork-tree");
        self.json(self.request(Method::POST, &path).json(request)).await
    }

    /// Makes the child of a tree a sandbox by itself.
    pub async fn promote(&self, id: &SandboxId, request: &Promote) -> Result<Promoted, Error> {
        let path = format!("/v1/sandboxes/{id}/promote");
        self.json(self.request(Method::POST, &path).json(request)).await
    }
}
