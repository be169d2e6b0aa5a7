//! `/fs/import` and `/fs/export`: a sandbox fetches and puts files itself.

use std::{collections::BTreeMap, sync::Arc};

use api::{ErrorCode, ExportFile, FileTransferred, ImportFile};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use machine::guest::{
    FileWrite,
    transfer::{Outcome, Task, Transfer, TransferFailure, Transferred},
};
use serde_json::{Map, Value, json};

use super::{
    body::{Id, Input, ok},
    edge::Refusal,
    place::Place,
};
use crate::{App, Error, keys::Caller};

const DEFAULT_TIMEOUT: f64 = 3600.0;
const LONGEST_TIMEOUT: f64 = 86_400.0;
const LONGEST_PATH: usize = 4096;
const LONGEST_URL: usize = 16 << 10;
const LONGEST_OWNER: usize = 128;
const MOST_HEADERS: usize = 64;
const LONGEST_HEADER: usize = 8 << 10;

/// Fetches a file from an address, inside the sandbox and by its network. It appears whole, or not at all; what breaks off is
/// gone on with where the other side can do that.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/import", tag = "files", params(("id" = String, Path,)), request_body = ImportFile,
    responses((status = 200, body = FileTransferred), (status = 412, description = "Another content than `sha256` names"), (status = 502)))]
pub(super) async fn import(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<ImportFile>,
) -> Result<Response, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let transfer = import_of(&request)?;
    run(Place::new(app, caller, id), request.path, transfer).await
}

/// Puts a file to an address, inside the sandbox and by its network, with its length in the head.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/export", tag = "files", params(("id" = String, Path,)), request_body = ExportFile,
    responses((status = 200, body = FileTransferred), (status = 502)))]
pub(super) async fn export(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<ExportFile>,
) -> Result<Response, Error> {
    app.sandboxes.get(&caller.account, &id)?;
    let transfer = export_of(&request)?;
    run(Place::new(app, caller, id), request.path, transfer).await
}

async fn run(place: Place, path: String, transfer: Transfer) -> Result<Response, Error> {
    let outcome = place.running().await?.transfer(&transfer).await;
    match outcome.map_err(|error| place.explain(error))? {
        Outcome::Done(Transferred { bytes, sha256, status: _, etag }) => {
            Ok(ok(FileTransferred { path, bytes, sha256, etag }).into_response())
        }
        Outcome::Failed(failure) => {
            let (error, more) = refusal(failure);
            Ok(Refusal::with(error, more))
        }
    }
}

fn import_of(request: &ImportFile) -> Result<Transfer, Error> {
    let sha256 = request.sha256.as_ref().map(|digest| digest.to_ascii_lowercase());
    if sha256.as_ref().is_some_and(|digest| {
        digest.len() != 64 || !digest.bytes().all(|digit| digit.is_ascii_hexdigit())
    }) {
        return Err(Error::invalid("`sha256` must be 64 hexadecimal digits"));
    }
    let mode = request.mode.as_deref().map(mode_of).transpose()?;
    if request.owner.as_ref().is_some_and(|owner| owner.len() > LONGEST_OWNER) {
        return Err(Error::invalid(format!("`owner` may have at most {LONGEST_OWNER} bytes")));
    }
    let file = FileWrite {
        path: path_of(&request.path)?,
        mode,
        owner: request.owner.clone(),
        create_parents: true,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    };
    let task = Task::Import { file, sha256 };
    transfer_of(task, &request.url, &request.headers, request.timeout_seconds)
}

fn export_of(request: &ExportFile) -> Result<Transfer, Error> {
    let method = request.method.as_deref().unwrap_or("PUT").to_ascii_uppercase();
    if !["PUT", "POST"].contains(&method.as_str()) {
        return Err(Error::invalid("`method` must be `PUT` or `POST`"));
    }
    let task = Task::Export { path: path_of(&request.path)?, method };
    transfer_of(task, &request.url, &request.headers, request.timeout_seconds)
}

fn transfer_of(
    task: Task,
    url: &str,
    headers: &BTreeMap<String, String>,
    timeout_seconds: Option<f64>,
) -> Result<Transfer, Error> {
    let is_web = ["http://", "https://"].iter().any(|scheme| {
        url.get(..scheme.len()).is_some_and(|start| start.eq_ignore_ascii_case(scheme))
    });
    if !is_web || url.len() > LONGEST_URL || url.chars().any(char::is_control) {
        return Err(Error::invalid(format!(
            "`url` must be `http://…` or `https://…`, of at most {LONGEST_URL} bytes"
        )));
    }
    let too_long = |(name, value): (&String, &String)| name.len() + value.len() > LONGEST_HEADER;
    if headers.len() > MOST_HEADERS || headers.iter().any(too_long) {
        return Err(Error::invalid(format!(
            "`headers` may be at most {MOST_HEADERS}, of at most {LONGEST_HEADER} bytes each"
        )));
    }
    // The ones by which a request is framed are the agent's own.
    let framing =
        ["content-length", "transfer-encoding", "host", "connection", "range", "if-range"];
    if let Some(name) =
        headers.keys().find(|name| framing.contains(&name.to_ascii_lowercase().as_str()))
    {
        return Err(Error::invalid(format!("`headers` must not name `{name}`: it is set for you")));
    }
    let timeout = timeout_seconds.unwrap_or(DEFAULT_TIMEOUT);
    if !(timeout > 0.0 && timeout <= LONGEST_TIMEOUT) {
        return Err(Error::invalid("`timeout_seconds` must be more than 0 and at most 86400"));
    }
    let headers = headers.iter().map(|(name, value)| (name.clone(), value.clone())).collect();
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 0 and a day, as was just checked"
    )]
    let deadline_ms = (timeout * 1000.0).ceil() as u64;
    Ok(Transfer { task, url: url.to_owned(), headers, deadline_ms })
}

fn path_of(path: &str) -> Result<machine::guest::PathBytes, Error> {
    if !path.starts_with('/') || path.contains('\0') || path.len() > LONGEST_PATH {
        return Err(Error::invalid("`path` must be absolute, without NUL, of at most 4096 bytes"));
    }
    Ok(path.as_bytes().to_vec().into())
}

fn mode_of(text: &str) -> Result<u32, Error> {
    u32::from_str_radix(text, 8)
        .ok()
        .filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| Error::invalid("`mode` must be octal, such as `0755`"))
}

/// None of the words has the address in it.
fn refusal(failure: TransferFailure) -> (Error, Map<String, Value>) {
    let mut more = Map::new();
    let error = match failure {
        TransferFailure::Invalid(message) => Error::invalid(message),
        TransferFailure::File(failure) => failure.into(),
        TransferFailure::Answered { status, code, message } => {
            let said = match &code {
                Some(code) => format!(" ({code}: {message})"),
                // A page for people.
                None if message.is_empty() || message.starts_with('<') => String::new(),
                None => format!(" ({message})"),
            };
            more.insert("upstream_status".to_owned(), json!(status));
            more.insert("upstream_code".to_owned(), json!(code));
            // Whoever made the address can make another; a storage that fails may work later.
            let ours = if status < 500 { ErrorCode::InvalidRequest } else { ErrorCode::BadGateway };
            let hint =
                if status == 403 { "; an address that is signed may have expired" } else { "" };
            Error::new(ours, format!("the other side answered {status}{said}{hint}"))
        }
        TransferFailure::Unreachable(reason) => Error::new(
            ErrorCode::BadGateway,
            format!("the other side could not be reached from inside the sandbox: {reason}"),
        ),
        TransferFailure::Digest { sha256 } => Error::new(
            ErrorCode::PreconditionFailed,
            format!(
                "the content has the SHA-256 {sha256}, not the one that was named; nothing was written"
            ),
        ),
        TransferFailure::OutOfTime => Error::new(
            ErrorCode::TimedOut,
            "it was not done within its `timeout_seconds`; nothing was written",
        ),
    };
    (error, more)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_is_refused_with_the_field() {
        let fine = ImportFile {
            url: "https://a/b?c".to_owned(),
            path: "/a".to_owned(),
            ..ImportFile::default()
        };
        assert!(import_of(&fine).is_ok());
        let header = |name: &str| BTreeMap::from([(name.to_owned(), "x".to_owned())]);
        for (bad, field) in [
            (ImportFile { url: "ftp://a".to_owned(), ..fine.clone() }, "`url`"),
            (ImportFile { url: "file:///etc/passwd".to_owned(), ..fine.clone() }, "`url`"),
            (ImportFile { path: "a".to_owned(), ..fine.clone() }, "`path`"),
            (ImportFile { sha256: Some("x".repeat(64)), ..fine.clone() }, "`sha256`"),
            (ImportFile { mode: Some("999".to_owned()), ..fine.clone() }, "`mode`"),
            (ImportFile { headers: header("Host"), ..fine.clone() }, "`headers`"),
            (ImportFile { timeout_seconds: Some(f64::NAN), ..fine.clone() }, "`timeout_seconds`"),
        ] {
            let error = import_of(&bad).map(drop).unwrap_err();
            assert!(error.message.starts_with(field), "{}", error.message);
        }
        let export = ExportFile { path: "/a".to_owned(), url: fine.url, ..ExportFile::default() };
        assert!(export_of(&export).is_ok());
        let bad = ExportFile { method: Some("DELETE".to_owned()), ..export };
        assert!(export_of(&bad).is_err());
    }

    #[test]
    fn what_the_other_side_said_is_told() {
        let (error, more) = refusal(TransferFailure::Answered {
            status: 403,
            code: Some("AccessDenied".to_owned()),
            message: "Request has expired".to_owned(),
        });
        assert_eq!(error.code, ErrorCode::InvalidRequest);
        assert!(error.message.contains("403") && error.message.contains("Request has expired"));
        assert_eq!(
            (&more["upstream_status"], &more["upstream_code"]),
            (&json!(403), &json!("AccessDenied"))
        );
    }
}
