//! What listens in a sandbox.

use api::{Port, PortList, SandboxId};
use reqwest::Method;

use crate::{Client, Error};

impl Client {
    /// What listens, also on the loopback, and what was exposed, by number.
    pub async fn ports(&self, sandbox: &SandboxId) -> Result<Vec<Port>, Error> {
        let request = self.request(Method::GET, &format!("/v1/sandboxes/{sandbox}/ports"));
        Ok(self.json::<PortList>(request).await?.ports)
    }
}
