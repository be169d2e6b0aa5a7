//! `/repl/sessions`: kernels that keep their state, and cells that run in them, answered at their end or as they go.

use std::{sync::Arc, time::Duration};

use api::{CodeOutput, CodeResult, CodeSession, CreateCodeSession, ErrorCode, RunCode};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::StatusCode;
use machine::guest::{CellEnd, KernelEvent, kernel::KernelEnd};
use serde_json::{Map, Value, json};

use super::{
    body::{Id, InMachine, Input, Kept, Output, ok},
    edge::Refusal,
    keep_alive,
    place::Place,
    sse::{self, Characters},
};
use crate::{App, Error, buffers::Held, keys::Caller, sandbox::CellWatch};

/// Code of 3 MiB, however JSON escapes it.
const LONGEST_BODY: usize = 20 << 20;
/// As for commands: an answer is kept alive unless the cell's own limit comes first, which gets its status 504.
const SHORT_TIMEOUT_MS: u64 = 27_000;
/// A cell that is interrupted has so long, as counted from its request, before the answer no longer waits for it.
const INTERRUPTED_BY: Duration = Duration::from_millis(28_500);
/// As bytes, and as JSON.
const COPIES: u64 = 2;
/// A cell that prints and shows no more than half of this is never cut for want of memory.
const HELD_AT_FIRST: u64 = 256 << 10;
const FAILED_EXIT: i32 = 1;
/// What a shell's `timeout` exits with.
const TIMED_OUT_EXIT: i32 = 124;
/// On these words the published clients raise their timeout exception.
const TIMED_OUT: &str =
    "the cell timed out: deadline exceeded (timeout); it was interrupted, and the session goes on";
const STUCK: &str = "the cell timed out: deadline exceeded (timeout); it was told to stop and has not yet, and if it goes on its kernel is restarted";
const RESTARTED: &str = "the cell timed out: deadline exceeded (timeout); it took no notice of its interrupt, so its kernel was restarted and the session's state is lost";

/// Begins a session of a language. A template with Python's kernel has one standing ready.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/repl/sessions", tag = "interpreter", params(("id" = String, Path,)),
    request_body = CreateCodeSession, responses((status = 201, body = CodeSession)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<CreateCodeSession>,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let created = async move {
        let running = place.running().await?;
        running.create_session(request).await.map_err(|error| place.explain(error))
    };
    keep_alive::resource(StatusCode::CREATED, created).await
}

/// Sessions in the order of their starts.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/repl/sessions", tag = "interpreter", params(("id" = String, Path,)),
    responses((status = 200, body = Vec<CodeSession>)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Vec<CodeSession>>, Error> {
    let running = app.sandboxes.running_already(&caller.account, &id)?;
    running.sessions().await.map(ok)
}

/// The kernel ends, with everything that it has begun.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/repl/sessions/{session_id}", tag = "interpreter",
    params(("id" = String, Path,), ("session_id" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, session): InMachine,
) -> Result<StatusCode, Error> {
    let running = app.sandboxes.running(&caller.account, &id).await?;
    running.end_session(&session).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends everything in the session and begins it anew, under the same id: also one whose kernel has died.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/repl/sessions/{session_id}/restart", tag = "interpreter",
    params(("id" = String, Path,), ("session_id" = String, Path,)), responses((status = 200, body = CodeSession)))]
pub(super) async fn restart(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, session): InMachine,
) -> Result<Response, Error> {
    let restarted = async move {
        let running = app.sandboxes.running(&caller.account, &id).await?;
        running.restart_session(&session).await
    };
    keep_alive::resource(StatusCode::OK, restarted).await
}

/// Runs a cell to its end. Cells of one session run one after another. An answer that takes long begins with white space.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/repl/sessions/{session_id}/run", tag = "interpreter",
    params(("id" = String, Path,), ("session_id" = String, Path,)), request_body = RunCode,
    responses((status = 200, body = CodeResult), (status = 504, description = "Timed out; the body has what was printed and shown until then")))]
pub(super) async fn run(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, session): InMachine,
    Kept(request, held): Kept<RunCode, LONGEST_BODY>,
) -> Result<Response, Error> {
    let may_keep_alive = request.timeout_ms.is_none_or(|limit| limit > SHORT_TIMEOUT_MS);
    let place = Place::new(app, caller, id);
    let result = async move {
        let result = run_to_end(place, &session, request, may_keep_alive).await;
        drop(held);
        result
    };
    if !may_keep_alive {
        return result.await.map(answer);
    }
    keep_alive::answered(result, answer, late).await
}

/// A result, and the words to refuse with where it timed out.
struct Ran {
    result: CodeResult,
    timed_out: Option<&'static str>,
    held: Held,
}

fn answer(ran: Ran) -> Response {
    let mut response = match ran.timed_out {
        None => ok(ran.result).into_response(),
        Some(words) => {
            let mut more = match serde_json::to_value(ran.result) {
                Ok(Value::Object(fields)) => fields,
                Ok(_) | Err(_) => Map::new(),
            };
            // Of a refusal, `error` is its sentence.
            let traceback = more.remove("error").unwrap_or_default();
            more.insert("traceback".to_owned(), traceback);
            Refusal::with(Error::new(ErrorCode::TimedOut, words), more)
        }
    };
    response.extensions_mut().insert(Arc::new(ran.held));
    response
}

/// In the body of an answer that has begun a timeout has only its words.
fn late(outcome: Result<Ran, Error>) -> Result<(CodeResult, Option<Held>), Error> {
    match outcome {
        Ok(Ran { mut result, timed_out, held }) => {
            if let Some(words) = timed_out {
                result.exit = TIMED_OUT_EXIT;
                result.error = Some(words.to_owned());
            }
            Ok((result, Some(held)))
        }
        // A session that ends in the middle of a long cell: the cell has an error, and a place for it.
        Err(error) if error.code == ErrorCode::Conflict => {
            let error = Some(error.message);
            Ok((CodeResult { exit: FAILED_EXIT, error, ..CodeResult::default() }, None))
        }
        Err(error) => Err(error),
    }
}

/// What a cell has said so far.
struct Cell {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    results: Vec<CodeOutput>,
    results_bytes: usize,
    error: Option<String>,
    truncated: bool,
    held: Held,
}

impl Cell {
    fn holds(&mut self, more: usize) -> bool {
        let bytes = self.stdout.len() + self.stderr.len() + self.results_bytes + more;
        let holds = !self.truncated && self.held.grow_to(COPIES * bytes as u64);
        self.truncated |= !holds;
        holds
    }

    fn show(&mut self, forms: Vec<(String, String)>) {
        let bytes = forms.iter().map(|(kind, data)| kind.len() + data.len()).sum();
        if self.holds(bytes) {
            self.results_bytes += bytes;
            self.results.extend(forms.into_iter().map(|(kind, data)| CodeOutput { kind, data }));
        }
    }

    fn finish(self, end: Option<&KernelEnd>) -> Ran {
        let how = end.map(|end| &end.end);
        let timed_out = match (end, how) {
            (None, _) => Some(STUCK),
            (Some(end), Some(CellEnd::Restarted)) if end.timed_out => Some(RESTARTED),
            (Some(end), _) => end.timed_out.then_some(TIMED_OUT),
        };
        let error = self.error.or_else(|| how.and_then(died));
        let result = CodeResult {
            stdout: text(self.stdout),
            stderr: text(self.stderr),
            exit: if timed_out.is_some() {
                TIMED_OUT_EXIT
            } else if error.is_some() {
                FAILED_EXIT
            } else {
                0
            },
            duration_ms: end.map_or(0, |end| end.duration_ms),
            results: self.results,
            error,
            truncated: self.truncated || end.is_some_and(|end| end.truncated),
            timed_out: timed_out.is_some(),
        };
        Ran { result, timed_out, held: self.held }
    }
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8(bytes)
        .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
}

fn died(end: &CellEnd) -> Option<String> {
    match end {
        CellEnd::Finished | CellEnd::Failed => None,
        CellEnd::Restarted => {
            Some("the kernel was restarted; the session's state is lost".to_owned())
        }
        CellEnd::Died { how } => Some(format!(
            "the kernel died {how}; restart the session with POST …/repl/sessions/{{id}}/restart, or create a new one"
        )),
    }
}

async fn run_to_end(
    place: Place,
    session: &str,
    request: RunCode,
    may_wait: bool,
) -> Result<Ran, Error> {
    let began = tokio::time::Instant::now();
    let running = place.running().await?;
    let held = place.app.buffers.hold(HELD_AT_FIRST)?;
    let mut watch = running.run_code(session, request).map_err(|error| place.explain(error))?;
    let mut cell = Cell {
        stdout: Vec::new(),
        stderr: Vec::new(),
        results: Vec::new(),
        results_bytes: 0,
        error: None,
        truncated: false,
        held,
    };
    let mut interrupted_by = None;
    loop {
        let next = match interrupted_by {
            None => watch.next().await,
            Some(end) => match tokio::time::timeout_at(end, watch.next()).await {
                Ok(next) => next,
                // Nobody waits for it any longer; the guest sees to the rest.
                Err(_) => return Ok(cell.finish(None)),
            },
        };
        match next {
            Some(Ok(KernelEvent::Stdout(bytes))) if cell.holds(bytes.len()) => {
                cell.stdout.extend_from_slice(&bytes);
            }
            Some(Ok(KernelEvent::Stderr(bytes))) if cell.holds(bytes.len()) => {
                cell.stderr.extend_from_slice(&bytes);
            }
            Some(Ok(KernelEvent::Stdout(_) | KernelEvent::Stderr(_) | KernelEvent::Ready)) => {}
            Some(Ok(KernelEvent::Result(forms))) => cell.show(forms),
            Some(Ok(KernelEvent::Error { traceback, .. })) => cell.error = Some(traceback),
            Some(Ok(KernelEvent::TimedOut)) => {
                interrupted_by = (!may_wait).then_some(began + INTERRUPTED_BY);
            }
            Some(Ok(KernelEvent::Ended(end))) => return Ok(cell.finish(Some(&end))),
            Some(Ok(KernelEvent::Failed(failure))) => return Err(failure.into()),
            Some(Err(error)) => return Err(place.explain(error)),
            None => return Err(place.explain(machine::Error::Lost.into())),
        }
    }
}

/// Runs a cell. What it prints and shows comes as events `stdout`, `stderr` and `result`, an exception as `error`; the
/// last is `done`, or `error` where there is no end to tell of.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/repl/sessions/{session_id}/run/stream", tag = "interpreter",
    params(("id" = String, Path,), ("session_id" = String, Path,)), request_body = RunCode,
    responses((status = 200, body = String, content_type = "text/event-stream")))]
pub(super) async fn stream(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, session): InMachine,
    Kept(request, held): Kept<RunCode, LONGEST_BODY>,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let running = place.running().await?;
    let sessions = running.sessions().await.map_err(|error| place.explain(error))?;
    if !sessions.iter().any(|found| found.id == session) {
        return Err(Error::not_found(
            "there is no such session; list them with GET …/repl/sessions",
        ));
    }
    let watch = running.run_code(&session, request).map_err(|error| place.explain(error))?;
    drop(held);
    Ok(sse::response(events(place, watch)))
}

#[derive(Default)]
struct Texts {
    stdout: Characters,
    stderr: Characters,
}

fn events(place: Place, watch: CellWatch) -> impl Stream<Item = Bytes> {
    let batches =
        futures::stream::unfold(Some((place, watch, Texts::default())), |state| async move {
            let (place, mut watch, mut texts) = state?;
            let (events, goes_on) = match watch.next().await {
                Some(Ok(KernelEvent::Stdout(bytes))) => {
                    (Vec::from_iter(chunk("stdout", &texts.stdout.push(&bytes))), true)
                }
                Some(Ok(KernelEvent::Stderr(bytes))) => {
                    (Vec::from_iter(chunk("stderr", &texts.stderr.push(&bytes))), true)
                }
                Some(Ok(KernelEvent::Result(forms))) => {
                    let forms = forms.into_iter();
                    let results =
                        forms.map(|(kind, data)| sse::event("result", &CodeOutput { kind, data }));
                    (results.collect(), true)
                }
                Some(Ok(KernelEvent::Error { name, value, traceback })) => {
                    let error = json!({ "error": traceback, "name": name, "value": value });
                    (vec![sse::event("error", &error)], true)
                }
                Some(Ok(KernelEvent::TimedOut | KernelEvent::Ready)) => (Vec::new(), true),
                Some(Ok(KernelEvent::Ended(end))) => {
                    let (stdout, stderr) = (texts.stdout.finish(), texts.stderr.finish());
                    texts = Texts::default();
                    let rest = [chunk("stdout", &stdout), chunk("stderr", &stderr)];
                    (rest.into_iter().flatten().chain(last(&end)).collect(), false)
                }
                Some(Ok(KernelEvent::Failed(failure))) => {
                    (vec![failed(&place.explain(failure.into()))], false)
                }
                Some(Err(error)) => (vec![failed(&place.explain(error))], false),
                None => (vec![failed(&place.explain(machine::Error::Lost.into()))], false),
            };
            Some((events, goes_on.then_some((place, watch, texts))))
        });
    batches.flat_map(futures::stream::iter)
}

fn chunk(name: &str, text: &str) -> Option<Bytes> {
    (!text.is_empty()).then(|| sse::event(name, &json!({ "chunk": text })))
}

fn failed(error: &Error) -> Bytes {
    sse::event("error", &json!({ "error": error.message }))
}

fn last(end: &KernelEnd) -> Vec<Bytes> {
    let words = match (&end.end, end.timed_out) {
        (CellEnd::Restarted, true) => Some(RESTARTED.to_owned()),
        (_, true) => Some(TIMED_OUT.to_owned()),
        (how, false) => died(how),
    };
    let exit = match (&end.end, end.timed_out) {
        (_, true) => TIMED_OUT_EXIT,
        (CellEnd::Finished, false) => 0,
        (CellEnd::Failed | CellEnd::Restarted | CellEnd::Died { .. }, false) => FAILED_EXIT,
    };
    let done = json!({
        "exit": exit, "duration_ms": end.duration_ms, "truncated": end.truncated, "timed_out": end.timed_out,
    });
    let error = words.map(|words| sse::event("error", &json!({ "error": words })));
    error.into_iter().chain([sse::event("done", &done)]).collect()
}
