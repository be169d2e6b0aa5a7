//! The few calls of the HTTP API that the suite and the bench make. Not crate `client`, which the bench would measure.

use std::{
    io::Read as _,
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};
use ureq::{Agent, Body, http::Response};

use crate::wait;

/// A size that must be baked first, and a template that must be built first, are answered with "later".
const FIRST_CREATE_LIMIT: Duration = Duration::from_secs(1200);

const LONGEST_CALL: Duration = Duration::from_secs(300);

/// One client with its own connections, kept alive.
pub(crate) struct Api {
    agent: Agent,
    url: String,
    authorization: String,
}

impl Api {
    pub(crate) fn new(url: &str, key: &str) -> Self {
        Self::patient_for(url, key, LONGEST_CALL)
    }

    pub(crate) fn patient_for(url: &str, key: &str, time: Duration) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .timeout_global(Some(time))
            .max_idle_connections_per_host(16)
            .max_idle_connections(16)
            .build();
        Self { agent: config.into(), url: url.to_owned(), authorization: format!("Bearer {key}") }
    }

    pub(crate) fn get(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        let answer =
            self.agent.get(self.address(path)).header("Authorization", &self.authorization).call();
        content(answer, &format!("GET {path}")).map(|(_, body)| body)
    }

    /// How many bytes come, without holding them. `look` is called now and then.
    pub(crate) fn drain(
        &self,
        path: &str,
        mut look: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let answer =
            self.agent.get(self.address(path)).header("Authorization", &self.authorization).call();
        let answer = answer.with_context(|| format!("call GET {path}"))?;
        ensure!(answer.status() == 200, "call GET {path}: {}", answer.status());
        let (mut reader, mut buffer) = (answer.into_body().into_reader(), vec![0; 256 << 10]);
        let (mut bytes, mut looked) = (0, 0);
        loop {
            let count = reader.read(&mut buffer).with_context(|| format!("read GET {path}"))?;
            if count == 0 {
                return Ok(bytes);
            }
            bytes += count as u64;
            if bytes - looked >= 32 << 20 {
                looked = bytes;
                look()?;
            }
        }
    }

    pub(crate) fn get_json(&self, path: &str) -> anyhow::Result<Value> {
        serde_json::from_slice(&self.get(path)?)
            .with_context(|| format!("read the answer to GET {path}"))
    }

    pub(crate) fn put(&self, path: &str, bytes: &[u8]) -> anyhow::Result<()> {
        let answer = self
            .agent
            .put(self.address(path))
            .header("Authorization", &self.authorization)
            .send(bytes);
        content(answer, &format!("PUT {path}")).map(drop)
    }

    pub(crate) fn delete(&self, path: &str) -> anyhow::Result<()> {
        let answer = self
            .agent
            .delete(self.address(path))
            .header("Authorization", &self.authorization)
            .call();
        content(answer, &format!("DELETE {path}")).map(drop)
    }

    pub(crate) fn post(&self, path: &str, body: &Value) -> anyhow::Result<Value> {
        self.post_once(path, body)?
            .with_context(|| format!("call POST {path}: the server asks to come again"))
    }

    /// Of calls whose answer may be empty.
    pub(crate) fn post_empty(&self, path: &str) -> anyhow::Result<()> {
        let answer = self
            .agent
            .post(self.address(path))
            .header("Authorization", &self.authorization)
            .send_empty();
        content(answer, &format!("POST {path}")).map(drop)
    }

    /// The answer as it comes.
    pub(crate) fn post_stream(
        &self,
        path: &str,
        body: &Value,
    ) -> anyhow::Result<impl std::io::Read + Send + 'static> {
        let answer = self
            .agent
            .post(self.address(path))
            .header("Authorization", &self.authorization)
            .send_json(body);
        let answer = answer.with_context(|| format!("call POST {path}"))?;
        ensure!(answer.status() == 200, "call POST {path}: {}", answer.status());
        Ok(answer.into_body().into_reader())
    }

    /// `None`: not now, and nothing was done.
    fn post_once(&self, path: &str, body: &Value) -> anyhow::Result<Option<Value>> {
        let answer = self
            .agent
            .post(self.address(path))
            .header("Authorization", &self.authorization)
            .send_json(body);
        let answer = answer.with_context(|| format!("call POST {path}"))?;
        let is_later = answer.headers().contains_key("Retry-After")
            && [429, 503].contains(&answer.status().as_u16());
        if is_later || answer.status() == 507 {
            return Ok(None);
        }
        let (_, body) = content(Ok(answer), &format!("POST {path}"))?;
        Ok(Some(serde_json::from_slice(&body)?))
    }

    fn address(&self, path: &str) -> String {
        format!("{}{path}", self.url)
    }

    pub(crate) fn create(&self, request: &Value) -> anyhow::Result<Value> {
        self.post("/v1/sandboxes", request)
    }

    /// Waits while the server makes what the request needs.
    pub(crate) fn create_patiently(&self, request: &Value) -> anyhow::Result<Value> {
        wait::until(
            "the first sandbox of a size",
            FIRST_CREATE_LIMIT,
            Duration::from_secs(1),
            || self.create_unless_busy(request),
        )
    }

    /// `None`: the server asks to come again, and made nothing.
    pub(crate) fn create_unless_busy(&self, request: &Value) -> anyhow::Result<Option<Value>> {
        self.post_once("/v1/sandboxes", request)
    }

    /// The time from the call to the answer.
    pub(crate) fn exec(&self, id: &str, command: &str) -> anyhow::Result<Duration> {
        let start = Instant::now();
        let answer = self.post(&format!("/v1/sandboxes/{id}/exec"), &json!({"cmd": command}))?;
        let time = start.elapsed();
        ensure!(answer["exit_code"] == 0, "run `{command}`: {answer}");
        Ok(time)
    }

    pub(crate) fn delete_all(&self) -> anyhow::Result<()> {
        for sandbox in self.get_json("/v1/sandboxes")?.as_array().into_iter().flatten() {
            self.delete(&format!("/v1/sandboxes/{}", id_of(sandbox)?))?;
        }
        Ok(())
    }
}

pub(crate) fn id_of(sandbox: &Value) -> anyhow::Result<&str> {
    sandbox["id"].as_str().with_context(|| format!("find the id in {sandbox}"))
}

fn content(
    answer: Result<Response<Body>, ureq::Error>,
    call: &str,
) -> anyhow::Result<(u16, Vec<u8>)> {
    let mut answer = answer.with_context(|| format!("call {call}"))?;
    let status = answer.status().as_u16();
    let body = answer
        .body_mut()
        .with_config()
        .limit(256 << 20)
        .read_to_vec()
        .with_context(|| format!("call {call}"))?;
    if status >= 400 {
        bail!("call {call}: {status} {}", String::from_utf8_lossy(&body));
    }
    Ok((status, body))
}
