//! Snapshots: take, get, list, delete. [`Client::create_sandbox`] makes sandboxes from them.

use api::{CreateSnapshot, SandboxId, Snapshot, SnapshotId, SnapshotList};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// Of a running, paused or hibernated sandbox, which goes on as it was.
    pub async fn create_snapshot(
        &self,
        sandbox: &SandboxId,
        request: &CreateSnapshot,
    ) -> Result<Snapshot, Error> {
        let path = format!("/v1/sandboxes/{sandbox}/snapshots");
        self.json(self.request(Method::POST, &path).json(request)).await
    }

    /// Newest first; of one sandbox only if one is given.
    pub async fn snapshots(&self, sandbox: Option<&SandboxId>) -> Result<Vec<Snapshot>, Error> {
        let path = match sandbox {
            Some(sandbox) => format!("/v1/snapshots?sandbox_id={sandbox}"),
            None => "/v1/snapshots".to_owned(),
        };
        let list: SnapshotList = self.json(self.request(Method::GET, &path)).await?;
        Ok(list.snapshots)
    }

    pub async fn snapshot(&self, id: &SnapshotId) -> Result<Snapshot, Error> {
        self.json(self.request(Method::GET, &format!("/v1/snapshots/{id}"))).await
    }

    pub async fn delete_snapshot(&self, id: &SnapshotId) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/snapshots/{id}"))).await.map(drop)
    }
}
