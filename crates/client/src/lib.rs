//! Rust client of Atoll's HTTP API, for the command line and the end-to-end tests.
//!
//! Every call answers with the resource or an [`Error`]; nothing is repeated behind the caller's back, but
//! [`Error::may_retry_after`] tells when a refusal invites that. Waits are bounded by silence, never by a total: a slow
//! transfer that moves is not cut.

mod database;
mod error;
mod exec;
mod file;
mod fork;
mod key;
mod machine;
mod machine_exec;
mod port;
mod sandbox;
mod snapshot;
pub mod sse;
mod template;
mod terminal;
mod tree;
mod volume;

use std::{future::Future, time::Duration};

use bytes::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
pub use reqwest::{Body, Method, RequestBuilder, Response, StatusCode};
use serde::de::DeserializeOwned;
use tokio::io::AsyncRead;
use tokio_util::io::ReaderStream;

pub use crate::{
    error::{Error, Refusal},
    exec::{ExecEvent, ExecEvents, LogLines, LogStream},
    file::{FileContent, WriteOptions},
    machine::RootDisk,
    machine_exec::ExecPage,
    sandbox::SandboxFilter,
    template::{BuildLines, BuildSource},
    terminal::{Keyboard, Screen, ScreenEvent, TerminalConnection, TerminalOptions},
};

/// The server sends something (white space, a comment) at least every 15 s, whatever it is doing.
const LONGEST_SILENCE: Duration = Duration::from_secs(90);
const CONNECT_WITHIN: Duration = Duration::from_secs(10);
/// The longest answer held in memory: two streams of an exec, 16 MiB each, with every byte escaped.
const LONGEST_ANSWER: usize = 256 << 20;

/// Cheap to clone.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    /// Without a slash at its end.
    url: String,
    key: Option<http::HeaderValue>,
}

impl Client {
    /// `url` is the server's origin, like `http://127.0.0.1:8080`.
    pub fn new(url: &str, key: Option<&str>) -> Result<Self, Error> {
        let url = url.trim_end_matches('/');
        let parsed = reqwest::Url::parse(url).map_err(|_| Error::BadUrl { url: url.to_owned() })?;
        if !matches!(parsed.scheme(), "http" | "https") || !parsed.has_host() {
            return Err(Error::BadUrl { url: url.to_owned() });
        }
        let key = key.map(|key| bearer(key.trim())).transpose()?;
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_WITHIN)
            .tcp_keepalive(Duration::from_secs(15))
            .user_agent(concat!("atoll/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|source| Error::Setup { source })?;
        Ok(Self { http, url: url.to_owned(), key })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// A request to any route, with the key; for what has no method of its own. Send it with [`Client::send`].
    pub fn request(&self, method: Method, path_and_query: &str) -> RequestBuilder {
        let request = self.http.request(method, format!("{}{path_and_query}", self.url));
        match &self.key {
            Some(key) => request.header(http::header::AUTHORIZATION, key.clone()),
            None => request,
        }
    }

    /// The answer's head, if its status is a success.
    pub async fn send(&self, request: RequestBuilder) -> Result<Response, Error> {
        let response = self.unless_silent(request.send()).await?;
        self.refuse_failures(response.map_err(|source| self.unreachable(source))?).await
    }

    /// As [`Client::send`], for a body that may take any time to go out.
    async fn send_upload(&self, request: RequestBuilder) -> Result<Response, Error> {
        let response = request.send().await.map_err(|source| self.unreachable(source))?;
        self.refuse_failures(response).await
    }

    async fn refuse_failures(&self, response: Response) -> Result<Response, Error> {
        if response.status().is_success() {
            return Ok(response);
        }
        let (status, headers) = (response.status(), response.headers().clone());
        let body = self.whole(response).await?;
        Err(Error::Refused(Box::new(Refusal::new(status, &headers, &body))))
    }

    async fn json<T: DeserializeOwned>(&self, request: RequestBuilder) -> Result<T, Error> {
        let response = self.send(request).await?;
        self.decode(response).await
    }

    async fn decode<T: DeserializeOwned>(&self, response: Response) -> Result<T, Error> {
        let body = self.whole(response).await?;
        serde_json::from_slice(&body)
            .map_err(|source| Error::Unexpected { source: Box::new(source) })
    }

    /// Reads by chunks: white space keeps a long answer alive.
    async fn whole(&self, mut response: Response) -> Result<Bytes, Error> {
        let mut whole = Vec::new();
        while let Some(chunk) = next_chunk(&mut response, &self.url).await? {
            if whole.len() + chunk.len() > LONGEST_ANSWER {
                return Err(Error::Unexpected { source: "the answer is too long".into() });
            }
            whole.extend_from_slice(&chunk);
        }
        Ok(whole.into())
    }

    async fn unless_silent<T>(&self, wait: impl Future<Output = T>) -> Result<T, Error> {
        unless_silent(wait, &self.url).await
    }

    fn unreachable(&self, source: reqwest::Error) -> Error {
        Error::Unreachable { url: self.url.clone(), source: source.without_url() }
    }
}

async fn unless_silent<T>(wait: impl Future<Output = T>, url: &str) -> Result<T, Error> {
    tokio::time::timeout(LONGEST_SILENCE, wait)
        .await
        .map_err(|_| Error::Silent { url: url.to_owned() })
}

async fn next_chunk(response: &mut Response, url: &str) -> Result<Option<Bytes>, Error> {
    unless_silent(response.chunk(), url)
        .await?
        .map_err(|source| Error::Interrupted { source: source.without_url() })
}

fn bearer(key: &str) -> Result<http::HeaderValue, Error> {
    let mut value =
        http::HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| Error::BadKey)?;
    value.set_sensitive(true);
    Ok(value)
}

/// What `reader` gives until its end, as the content of a file or a root file system.
pub fn body_of(reader: impl AsyncRead + Send + 'static) -> Body {
    Body::wrap_stream(ReaderStream::with_capacity(reader, 64 << 10))
}

/// A value of a query or a segment of a path. Bytes, because names in a guest need not be UTF-8.
fn escaped(value: impl AsRef<[u8]>) -> String {
    const KEPT: AsciiSet = NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
    percent_encode(value.as_ref(), &KEPT).to_string()
}

#[cfg(test)]
mod tests;
