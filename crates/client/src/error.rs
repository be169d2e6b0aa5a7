//! What can go wrong between a client and its server.

use std::{error::Error as StdError, time::Duration};

use api::{ErrorBody, ErrorCode};
use http::{HeaderMap, StatusCode};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("`{url}` is not the URL of a server")]
    BadUrl { url: String },
    /// The key itself is never shown.
    #[error("the key has characters that no key has")]
    BadKey,
    #[error("set up the HTTP client")]
    Setup { source: reqwest::Error },
    #[error("reach the server at {url}")]
    Unreachable { url: String, source: reqwest::Error },
    /// The request may have been acted upon.
    #[error("the server at {url} has stopped answering")]
    Silent { url: String },
    #[error("read the server's answer")]
    Interrupted { source: reqwest::Error },
    /// A connection that lasts has broken off.
    #[error("the connection to the server is lost")]
    Lost { source: Box<dyn StdError + Send + Sync> },
    #[error("read what the server answered")]
    Unexpected { source: Box<dyn StdError + Send + Sync> },
    #[error("{0}")]
    Refused(Box<Refusal>),
}

impl Error {
    pub fn code(&self) -> Option<ErrorCode> {
        self.refusal().and_then(|refusal| refusal.code)
    }

    pub fn status(&self) -> Option<u16> {
        self.refusal().map(|refusal| refusal.status)
    }

    pub fn refusal(&self) -> Option<&Refusal> {
        match self {
            Self::Refused(refusal) => Some(refusal),
            Self::BadUrl { .. }
            | Self::BadKey
            | Self::Setup { .. }
            | Self::Unreachable { .. }
            | Self::Silent { .. }
            | Self::Interrupted { .. }
            | Self::Lost { .. }
            | Self::Unexpected { .. } => None,
        }
    }

    /// How long to wait before the same request; `None` when it should not be sent again. Nothing was done if `Some`.
    pub fn may_retry_after(&self) -> Option<Duration> {
        self.refusal().and_then(|refusal| refusal.retry_after)
    }
}

/// The server's answer to a request that it did not fulfil.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Refusal {
    pub status: u16,
    /// `None`: not one this client knows, or the answer came from something in between.
    pub code: Option<ErrorCode>,
    /// For people.
    pub message: String,
    /// Finds the cause in the server's log.
    pub request_id: Option<String>,
    pub retry_after: Option<Duration>,
    /// The whole answer, where it is JSON: a command that timed out has its output here.
    pub body: serde_json::Value,
}

impl Refusal {
    pub(crate) fn new(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let body: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
        let known: Option<ErrorBody> = serde_json::from_value(body.clone()).ok();
        let message = body["error"].as_str().map(str::to_owned);
        Self {
            status: status.as_u16(),
            code: known.as_ref().map(|known| known.code),
            message: message.unwrap_or_else(|| format!("the server answered {status}")),
            request_id: known
                .map(|known| known.request_id)
                .or_else(|| text("x-request-id").map(str::to_owned)),
            retry_after: text("retry-after")
                .and_then(|seconds| seconds.parse().ok())
                .map(Duration::from_secs),
            body,
        }
    }
}
