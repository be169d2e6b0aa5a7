//! Execs that outlive their client: started under an id, looked at, read by offset, cancelled.

use std::time::Duration;

use api::{Exec, ExecId, ExecList, ExecOutput, ExecState, ExecStream, SandboxId, StartExec};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use reqwest::Method;

use crate::{Client, Error};

/// Asked of the server at once; longer waits ask again.
const WAIT: Duration = Duration::from_secs(30);

/// A page of what an exec printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExecPage {
    pub bytes: Vec<u8>,
    pub next_offset: u64,
    /// It has ended and this was the last of it.
    pub eof: bool,
}

impl Client {
    /// Answers at once, or after the end of a short one.
    pub async fn start_exec(
        &self,
        machine: &SandboxId,
        request: &StartExec,
    ) -> Result<Exec, Error> {
        self.json(
            self.request(Method::POST, &format!("/v1/machines/{machine}/execs")).json(request),
        )
        .await
    }

    /// Newest first.
    pub async fn execs(&self, machine: &SandboxId, limit: usize) -> Result<Vec<Exec>, Error> {
        let path = format!("/v1/machines/{machine}/execs?limit={limit}");
        let list: ExecList = self.json(self.request(Method::GET, &path)).await?;
        Ok(list.execs)
    }

    /// As it is, or once it has ended within `wait`.
    pub async fn exec_state(
        &self,
        machine: &SandboxId,
        exec: &ExecId,
        wait: Duration,
    ) -> Result<Exec, Error> {
        let path = format!("/v1/machines/{machine}/execs/{exec}?wait_ms={}", wait.as_millis());
        self.json(self.request(Method::GET, &path)).await
    }

    /// However long it takes.
    pub async fn exec_end(&self, machine: &SandboxId, exec: &ExecId) -> Result<Exec, Error> {
        loop {
            let now = self.exec_state(machine, exec, WAIT).await?;
            if now.state != ExecState::Running {
                return Ok(now);
            }
        }
    }

    /// TERM, then KILL. One that has ended stays as it is.
    pub async fn cancel_exec(&self, machine: &SandboxId, exec: &ExecId) -> Result<Exec, Error> {
        let path = format!("/v1/machines/{machine}/execs/{exec}");
        self.json(self.request(Method::DELETE, &path)).await
    }

    /// What there is from `offset` on; where there is nothing, what comes within `wait`.
    pub async fn exec_output(
        &self,
        machine: &SandboxId,
        exec: &ExecId,
        stream: ExecStream,
        offset: u64,
        wait: Duration,
    ) -> Result<ExecPage, Error> {
        let wait = wait.min(WAIT).as_millis();
        let path = format!(
            "/v1/machines/{machine}/execs/{exec}/output?stream={stream}&offset={offset}&limit=1048576&wait_ms={wait}"
        );
        let page: ExecOutput = self.json(self.request(Method::GET, &path)).await?;
        let bytes = BASE64
            .decode(page.data)
            .map_err(|source| Error::Unexpected { source: Box::new(source) })?;
        Ok(ExecPage { bytes, next_offset: page.next_offset, eof: page.eof })
    }
}
