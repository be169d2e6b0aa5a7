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

    /// More than the account may have. Sending it again does not help.
    pub fn quota_exceeded(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::QuotaExceeded, message)
    }

    /// The client learns only that it was not their fault; the log learns why. A full disk is told as such, whatever
    /// step met it.
    pub fn internal(source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let source = source.into();
        if tells_of_a_full_disk(&chain(&*source)) {
            return Self::disk_full().because(source);
        }
        Self::new(
            ErrorCode::Internal,
            "the server failed; its log has the reason under this request id",
        )
        .because(source)
    }

    /// Refused before anything was made: the same request may be sent again after `seconds`.
    pub fn busy(message: impl Into<String>, seconds: u64) -> Self {
        Self {
            retry_after: Some(Duration::from_secs(seconds)),
            ..Self::new(ErrorCode::Unavailable, message)
        }
    }

    /// Of the store, where the request's own input is not at fault.
    pub fn from_store(error: store::Error) -> Self {
        if error.is_no_space() {
            return Self::disk_full().because(error);
        }
        Self::internal(error)
    }

    /// 507: nothing was made.
    pub(crate) fn disk_full() -> Self {
        let message = "the host's disk is full; delete sandboxes or templates, or try again later";
        Self::new(ErrorCode::CapacityExceeded, message)
    }

    /// Of a template's build: what the recipe or the archive is to blame for is told.
    pub fn from_build(error: store::Error) -> Self {
        if error.is_no_space() {
            return Self::from_store(error);
        }
        match error {
            store::Error::InvalidRecipe { .. }
            | store::Error::InvalidArchive { .. }
            | store::Error::DiskTooSmall { .. } => Self::invalid(error.to_string()),
            // Its output names what could not be had, such as an unknown package.
            store::Error::ToolFailed { ref output, .. } => {
                let message = format!("the build failed: {}", output.trim());
                Self::invalid(message).because(error)
            }
            store::Error::Io { .. }
            | store::Error::ToolMissing { .. }
            | store::Error::ToolTimedOut { .. }
            | store::Error::NotFound { .. }
            | store::Error::Locked { .. }
            | store::Error::Damaged { .. }
            | store::Error::Unusable { .. }
            | store::Error::WouldShrink { .. }
            | store::Error::KernelIncomplete { .. } => Self::from_store(error),
        }
    }

    /// Told to the person who starts the server, so all of it.
    pub fn from_start(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let error = error.into();
        Self::new(ErrorCode::Internal, chain(&*error))
    }

    /// What the client is not told: why, as one sentence for the log. Empty where there is nothing more to say.
    pub fn causes(&self) -> String {
        StdError::source(self).map(chain).unwrap_or_default()
    }

    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }
}

/// The kernel's words, and those of SQLite.
fn tells_of_a_full_disk(causes: &str) -> bool {
    ["No space left on device", "database or disk is full", "Disk quota exceeded"]
        .iter()
        .any(|words| causes.contains(words))
}

/// An error with all its causes.
pub(crate) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
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

// No wildcard arm: whoever adds a variant decides here what clients see. A command may have started before any of
// these, so none of them has the words on which the published clients send a request again.
impl From<machine::Error> for Error {
    fn from(error: machine::Error) -> Self {
        use machine::Error as Machine;
        match error {
            Machine::Refused(failure) => failure.into(),
            Machine::Busy => Self::busy(
                "too much is under way in this sandbox; try again when some of it has ended",
                1,
            ),
            Machine::Silent => {
                let message = "the sandbox does not answer; it may be busy, else delete it and create another";
                Self::new(ErrorCode::Unavailable, message).because(error)
            }
            Machine::Lost | Machine::Reset => {
                let message = "the connection to the sandbox is lost; what was asked for may or may not have been done";
                Self::new(ErrorCode::Unavailable, message).because(error)
            }
            Machine::Locked { .. } => {
                let message = "a disk is in use by another machine; detach it there, or wait until that one has ended";
                Self::new(ErrorCode::Conflict, message).because(error)
            }
            Machine::OldAgent { .. } => {
                let message = "this sandbox holds an agent of an earlier version, which cannot do this; a machine gets the new one when it is stopped and started, else create a sandbox from its template and copy what is needed";
                Self::conflict(message).because(error)
            }
            Machine::QemuMissing
            | Machine::QemuTooOld { .. }
            | Machine::File { .. }
            | Machine::Host { .. }
            | Machine::Unfit(_)
            | Machine::Spawn { .. }
            | Machine::QmpRefused { .. }
            | Machine::QmpSilent { .. }
            | Machine::Exited { .. }
            | Machine::NotLoaded { .. }
            | Machine::NotBooted { .. }
            | Machine::NoMachine { .. }
            | Machine::Misbehaved(_) => Self::internal(error),
        }
    }
}

impl From<machine::guest::Failure> for Error {
    fn from(failure: machine::guest::Failure) -> Self {
        use machine::guest::ErrorCode as Guest;
        let code = match failure.code {
            Guest::Invalid | Guest::WrongKind | Guest::Denied => ErrorCode::InvalidRequest,
            Guest::NotFound => ErrorCode::NotFound,
            Guest::Exists | Guest::Conflict => ErrorCode::Conflict,
            Guest::NoSpace => ErrorCode::CapacityExceeded,
            Guest::TooLarge => ErrorCode::TooLarge,
            Guest::PreconditionFailed => ErrorCode::PreconditionFailed,
            Guest::RangeNotSatisfiable => ErrorCode::RangeNotSatisfiable,
            Guest::Busy => {
                return Self::busy(
                    "too much is under way in this sandbox; try again when some of it has ended",
                    1,
                );
            }
            // Answered where it is asked for; anywhere else it is a fault.
            Guest::NotModified | Guest::Internal => {
                let message = "something failed inside the sandbox; the server's log has the reason under this request id";
                return Self::new(ErrorCode::Internal, message).because(failure);
            }
        };
        Self::new(code, failure.message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_of_before_is_a_conflict() {
        let error = Error::from(machine::Error::OldAgent { speaks: 1, needs: 2 });
        assert_eq!(error.code, ErrorCode::Conflict);
        assert!(error.causes().contains("protocol 1"), "{}", error.causes());
    }

    #[test]
    fn a_full_disk_is_told_as_such_whatever_met_it() {
        let full = || std::io::Error::from_raw_os_error(28);
        let file = machine::Error::File { action: "write", path: "/x".into(), source: full() };
        for error in [
            Error::internal(full()),
            Error::internal(file),
            Error::internal("(code: 13) database or disk is full"),
            Error::from_build(store::Error::ToolFailed {
                tool: "tar".to_owned(),
                status: "1".to_owned(),
                output: "x: No space left on device".to_owned(),
            }),
        ] {
            assert_eq!(error.code, ErrorCode::CapacityExceeded, "{error:?}");
            assert!(!error.causes().is_empty());
        }
        assert_eq!(Error::internal("another reason").code, ErrorCode::Internal);
    }
}
