//! How a command that failed tells why: `error: …`, and `hint: …` where there is a way out.

use std::{error::Error as StdError, io, process::ExitCode};

use api::ErrorCode;

/// A whole sentence for people, where "could not …" would not read well.
#[derive(Debug, thiserror::Error)]
#[error("{sentence}")]
pub(crate) struct Failure {
    sentence: String,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(sentence: impl Into<String>) -> Self {
        Self { sentence: sentence.into(), hint: None }
    }

    pub(crate) fn hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }
}

#[expect(clippy::print_stderr, reason = "the last words of a failed command")]
pub(crate) fn report(error: &anyhow::Error) -> ExitCode {
    if reader_went_away(error) {
        // As a shell tells of a program that died by SIGPIPE.
        return ExitCode::from(141);
    }
    let (sentence, hint) = explain(error);
    eprintln!("error: {sentence}");
    if let Some(hint) = hint {
        eprintln!("hint: {hint}");
    }
    ExitCode::FAILURE
}

fn reader_went_away(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

fn explain(error: &anyhow::Error) -> (String, Option<String>) {
    if let Some(failure) = error.downcast_ref::<Failure>() {
        return (failure.sentence.clone(), failure.hint.clone());
    }
    if let Some(error) = error.downcast_ref::<client::Error>() {
        return explain_client(error);
    }
    if let Some(error) = error.downcast_ref::<server::Error>() {
        return (with_causes(error), None);
    }
    (format!("could not {error:#}"), None)
}

fn explain_client(error: &client::Error) -> (String, Option<String>) {
    use client::Error;
    match error {
        Error::Refused(refusal) => (
            refusal.message.clone(),
            way_out(refusal).map(str::to_owned).or_else(|| whom_to_ask(refusal)),
        ),
        Error::Unreachable { .. } => (
            format!("could not {error}: {}", innermost(error)),
            Some(
                "start one with `atoll serve`, or name another with --url or ATOLL_URL".to_owned(),
            ),
        ),
        Error::BadUrl { .. } => {
            (error.to_string(), Some("write it like http://127.0.0.1:8080".to_owned()))
        }
        Error::BadKey | Error::Silent { .. } | Error::Lost { .. } => (error.to_string(), None),
        Error::Setup { .. } | Error::Interrupted { .. } | Error::Unexpected { .. } => {
            (format!("could not {}", with_causes(error)), None)
        }
    }
}

/// Only what a user of the command line does otherwise than a user of the API; the message has the rest.
fn way_out(refusal: &client::Refusal) -> Option<&'static str> {
    match refusal.code? {
        ErrorCode::Unauthenticated => Some(
            "put a key into ATOLL_KEY; `atoll key create --local`, as root on the server's host, makes one",
        ),
        ErrorCode::Forbidden => Some("use a key of scope full"),
        ErrorCode::InvalidRequest
        | ErrorCode::QuotaExceeded
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::Conflict
        | ErrorCode::Gone
        | ErrorCode::PreconditionFailed
        | ErrorCode::TooLarge
        | ErrorCode::RangeNotSatisfiable
        | ErrorCode::RateLimited
        | ErrorCode::Internal
        | ErrorCode::BadGateway
        | ErrorCode::Unavailable
        | ErrorCode::TimedOut
        | ErrorCode::CapacityExceeded => None,
    }
}

/// For failures that only the server's log explains.
fn whom_to_ask(refusal: &client::Refusal) -> Option<String> {
    let id = refusal.request_id.as_ref().filter(|_| refusal.status == 500)?;
    Some(format!("the server's log has the reason under request id {id}"))
}

fn with_causes(error: &(dyn StdError + 'static)) -> String {
    let mut sentence = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        sentence.push_str(&format!(": {error}"));
        cause = error.source();
    }
    sentence
}

/// The layers between say only that a connection was being made.
fn innermost<'a>(error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    let mut innermost = error;
    while let Some(cause) = innermost.source() {
        innermost = cause;
    }
    innermost
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_chain_of_contexts_reads_as_a_sentence() {
        let error =
            Err::<(), _>(io::Error::other("no such disk")).context("read the recipe").unwrap_err();
        assert_eq!(explain(&error), ("could not read the recipe: no such disk".to_owned(), None));
    }

    #[test]
    fn a_reader_that_goes_away_is_no_error() {
        let error = anyhow::Error::from(io::Error::from(io::ErrorKind::BrokenPipe));
        assert!(reader_went_away(&error));
    }
}
