//! Sandboxes: create, get, list, delete, lifecycle, network, what happened to them and what they use.

use api::{
    CreateSandbox, Event, EventList, Lifecycle, Metrics, Network, Sandbox, SandboxId,
    SandboxStatus, UpdateLifecycle, UpdateNetwork,
};
use reqwest::Method;

use crate::{Client, Error, escaped};

/// Which sandboxes a list has. The default is all.
#[derive(Debug, Clone, Default)]
pub struct SandboxFilter {
    pub status: Option<SandboxStatus>,
    /// All of these.
    pub metadata: Vec<(String, String)>,
}

impl Client {
    pub async fn create_sandbox(&self, request: &CreateSandbox) -> Result<Sandbox, Error> {
        self.json(self.request(Method::POST, "/v1/sandboxes").json(request)).await
    }

    pub async fn sandbox(&self, id: &SandboxId) -> Result<Sandbox, Error> {
        self.json(self.request(Method::GET, &format!("/v1/sandboxes/{id}"))).await
    }

    /// Newest first.
    pub async fn sandboxes(&self, filter: &SandboxFilter) -> Result<Vec<Sandbox>, Error> {
        let status = filter.status.and_then(|status| serde_json::to_value(status).ok());
        let status = status
            .as_ref()
            .and_then(|status| status.as_str())
            .map(|status| ("status".to_owned(), status));
        let metadata = filter
            .metadata
            .iter()
            .map(|(name, value)| (format!("metadata.{name}"), value.as_str()));
        let query: Vec<String> = status
            .into_iter()
            .chain(metadata)
            .map(|(name, value)| format!("{}={}", escaped(name), escaped(value)))
            .collect();
        self.json(self.request(Method::GET, &format!("/v1/sandboxes?{}", query.join("&")))).await
    }

    pub async fn delete_sandbox(&self, id: &SandboxId) -> Result<(), Error> {
        self.send(self.request(Method::DELETE, &format!("/v1/sandboxes/{id}"))).await.map(drop)
    }

    pub async fn lifecycle(&self, id: &SandboxId) -> Result<Lifecycle, Error> {
        self.json(self.request(Method::GET, &format!("/v1/sandboxes/{id}/lifecycle"))).await
    }

    pub async fn update_lifecycle(
        &self,
        id: &SandboxId,
        update: &UpdateLifecycle,
    ) -> Result<Lifecycle, Error> {
        self.json(
            self.request(Method::PATCH, &format!("/v1/sandboxes/{id}/lifecycle")).json(update),
        )
        .await
    }

    pub async fn network(&self, id: &SandboxId) -> Result<Network, Error> {
        self.json(self.request(Method::GET, &format!("/v1/sandboxes/{id}/network"))).await
    }

    /// What `update` leaves out stays as it is.
    pub async fn update_network(
        &self,
        id: &SandboxId,
        update: &UpdateNetwork,
    ) -> Result<Network, Error> {
        self.json(self.request(Method::PATCH, &format!("/v1/sandboxes/{id}/network")).json(update))
            .await
    }

    /// Its memory stays, it uses no processor, and its time to live stands still.
    pub async fn pause(&self, id: &SandboxId) -> Result<(), Error> {
        self.act(id, "pause").await
    }

    pub async fn resume(&self, id: &SandboxId) -> Result<(), Error> {
        self.act(id, "resume").await
    }

    /// Memory and disk go to the host's disk; no process is left.
    pub async fn hibernate(&self, id: &SandboxId) -> Result<(), Error> {
        self.act(id, "hibernate").await
    }

    pub async fn wake(&self, id: &SandboxId) -> Result<(), Error> {
        self.act(id, "wake").await
    }

    async fn act(&self, id: &SandboxId, verb: &'static str) -> Result<(), Error> {
        self.send(self.request(Method::POST, &format!("/v1/sandboxes/{id}/{verb}"))).await.map(drop)
    }

    /// What happened to it, oldest first; the last `tail` if given.
    pub async fn sandbox_events(
        &self,
        id: &SandboxId,
        tail: Option<u32>,
    ) -> Result<Vec<Event>, Error> {
        let query = tail.map(|tail| format!("?tail={tail}")).unwrap_or_default();
        let path = format!("/v1/sandboxes/{id}/events{query}");
        let list: EventList = self.json(self.request(Method::GET, &path)).await?;
        Ok(list.events)
    }

    pub async fn sandbox_metrics(&self, id: &SandboxId) -> Result<Metrics, Error> {
        self.json(self.request(Method::GET, &format!("/v1/sandboxes/{id}/metrics"))).await
    }
}
