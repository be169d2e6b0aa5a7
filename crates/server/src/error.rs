//! One error for the HTTP edge: a code for programs, a sentence for people, a cause for the log.

use std::{error::Error as StdError, fmt, time::Duration};

use api::ErrorCode;

#[derive(Debug)]
pub struct Error {
    pub code: ErrorCode,
    /// For the client: names the field or thing and says the way out. No host paths.
    pub message: String,
    /// For the log alone.
    pub source: Option<Box<dyn StdError + Send + Sync>>,
    /// Tells the client when to send the same request again; only where nothing was done.
    pub retry_after: Option<Duration>,
}

impl Error {
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), source: None, retry_after: None }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::InvalidRequest, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::NotFound, message)
    }

    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::Conflict, message)
    }

    /// The client learns only that it was not their fault; the log learns why.
    pub fn internal(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self::new(ErrorCode::Internal, "the server failed; its log has the reason under this request id").because(source)
    }

    /// Refused before anything was made: the same request may be sent again after `seconds`.
    pub fn busy(message: impl Into<String>, seconds: u64) -> Self {
        Self { retry_after: Some(Duration::from_secs(seconds)), ..Self::new(ErrorCode::Unavailable, message) }
    }

    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

impl From<sqlx::Error> for Error {
    fn from(source: sqlx::Error) -> Self {
        Self::internal(source)
    }
}
