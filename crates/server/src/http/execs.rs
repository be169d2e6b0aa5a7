//! `/exec`: commands, answered at their end or as they print.

use std::sync::Arc;

use api::{ErrorCode, ExecRequest, ExecResult};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use machine::guest::{ExecState, ExecStatus};
use serde_json::{Map, Value, json};

use super::{
    body::{Id, Kept, ok},
    edge::Refusal,
    keep_alive,
    place::Place,
    sse::{self, Characters},
};
use crate::{
    App, Error,
    buffers::Held,
    keys::Caller,
    metrics::ExecEnd,
    sandbox::{ExecEvent, ExecWatch},
};

/// Of each stream, in an answer that has it whole.
const MOST_OUTPUT: usize = 16 << 20;
/// A command, its environment and its standard input: 10 MB of that, however JSON escapes them.
const LONGEST_BODY: usize = 64 << 20;
/// An answer is kept alive unless the command's own limit comes first: it gets its status 504, which such an answer cannot have.
const SHORT_TIMEOUT: f64 = 27.0;
/// As bytes, and as JSON.
const COPIES: u64 = 2;
/// A command that prints no more than half of this is never cut for want of memory.
const HELD_AT_FIRST: u64 = 128 << 10;
/// What a shell's `timeout` exits with.
const TIMED_OUT_EXIT: i32 = 124;
/// On these words the published clients raise their timeout exception.
const TIMED_OUT: &str = "command timed out: deadline exceeded";
/// In an event, one of them looks for a word more.
const TIMED_OUT_EVENT: &str = "command timed out: deadline exceeded (timeout)";

/// Runs a command to its end. An answer that takes long begins with white space.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec", tag = "execs", params(("id" = String, Path,)), request_body = ExecRequest,
    responses((status = 200, body = ExecResult), (status = 504, description = "Timed out; the body has what was printed until then")))]
pub(super) async fn run(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Kept(request, held): Kept<ExecRequest, LONGEST_BODY>,
) -> Result<Response, Error> {
    let may_keep_alive = request.timeout_seconds.is_none_or(|seconds| seconds > SHORT_TIMEOUT);
    let place = Place::new(app, caller, id);
    let result = async move {
        let result = run_to_end(place, request).await;
        drop(held);
        result
    };
    if !may_keep_alive {
        return result.await.map(answer);
    }
    keep_alive::answered(result, answer, std::convert::identity).await
}

fn answer((result, held): (ExecResult, Held)) -> Response {
    let mut response = if result.timed_out {
        let more = match serde_json::to_value(result) {
            Ok(Value::Object(fields)) => fields,
            Ok(_) | Err(_) => Map::new(),
        };
        Refusal::with(Error::new(ErrorCode::TimedOut, TIMED_OUT), more)
    } else {
        ok(result).into_response()
    };
    response.extensions_mut().insert(Arc::new(held));
    response
}

async fn run_to_end(place: Place, request: ExecRequest) -> Result<(ExecResult, Held), Error> {
    let running = place.running().await?;
    // Refused now or never: once the command runs, what it prints is cut where there is no more memory for it.
    let mut held = place.app.buffers.hold(HELD_AT_FIRST)?;
    let mut watch = running.start_exec(request).await.map_err(|error| place.explain(error))?;
    let (mut stdout, mut stderr) = (Collected::default(), Collected::default());
    let status = loop {
        let other = |one: &Collected| one.bytes.len();
        match watch.next().await {
            Some(Ok(ExecEvent::Stdout(bytes))) => stdout.push(&bytes, other(&stderr), &mut held),
            Some(Ok(ExecEvent::Stderr(bytes))) => stderr.push(&bytes, other(&stdout), &mut held),
            Some(Ok(ExecEvent::Ended(status))) => break status,
            Some(Err(error)) => return Err(place.lost(error)),
            None => return Err(place.lost(machine::Error::Lost.into())),
        }
    };
    place.ended(&status);
    let timed_out = timed_out(&status);
    let result = ExecResult {
        truncated: status.truncated || stdout.truncated || stderr.truncated,
        stdout: stdout.text(),
        stderr: stderr.text(),
        exit_code: exit_code(&status),
        duration_ms: status.duration_ms,
        timed_out,
        killed: killed(&status).map(str::to_owned),
    };
    Ok((result, held))
}

/// Runs a command; what it prints comes as events `stdout` and `stderr`, its end as `exit` or `error`.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/exec/stream", tag = "execs", params(("id" = String, Path,)), request_body = ExecRequest,
    responses((status = 200, body = String, content_type = "text/event-stream")))]
pub(super) async fn stream(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Kept(request, held): Kept<ExecRequest, LONGEST_BODY>,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let running = place.running().await?;
    let watch = running.start_exec(request).await.map_err(|error| place.explain(error))?;
    let mut response = sse::response(events(place, watch));
    // Standard input is given to the command bit by bit.
    response.extensions_mut().insert(Arc::new(held));
    Ok(response)
}

#[derive(Default)]
struct Texts {
    stdout: Characters,
    stderr: Characters,
}

fn events(place: Place, watch: ExecWatch) -> impl Stream<Item = Bytes> {
    let batches =
        futures::stream::unfold(Some((place, watch, Texts::default())), |state| async move {
            let (place, mut watch, mut texts) = state?;
            match watch.next().await {
                Some(Ok(ExecEvent::Stdout(bytes))) => {
                    let events = chunk("stdout", &texts.stdout.push(&bytes));
                    Some((Vec::from_iter(events), Some((place, watch, texts))))
                }
                Some(Ok(ExecEvent::Stderr(bytes))) => {
                    let events = chunk("stderr", &texts.stderr.push(&bytes));
                    Some((Vec::from_iter(events), Some((place, watch, texts))))
                }
                Some(Ok(ExecEvent::Ended(status))) => {
                    place.ended(&status);
                    let rest = [
                        chunk("stdout", &texts.stdout.finish()),
                        chunk("stderr", &texts.stderr.finish()),
                    ];
                    Some((rest.into_iter().flatten().chain([end(&status)]).collect(), None))
                }
                lost @ (Some(Err(_)) | None) => {
                    let error =
                        lost.and_then(Result::err).unwrap_or_else(|| machine::Error::Lost.into());
                    Some((
                        vec![sse::event("error", &json!({ "error": place.lost(error).message }))],
                        None,
                    ))
                }
            }
        });
    batches.flat_map(futures::stream::iter)
}

fn chunk(name: &str, text: &str) -> Option<Bytes> {
    (!text.is_empty()).then(|| sse::event(name, &json!({ "chunk": text })))
}

fn end(status: &ExecStatus) -> Bytes {
    if timed_out(status) {
        return sse::event("error", &json!({ "error": TIMED_OUT_EVENT }));
    }
    match killed(status) {
        None => sse::event("exit", &json!({ "exit_code": exit_code(status) })),
        Some(killed) => {
            sse::event("exit", &json!({ "exit_code": exit_code(status), "killed": killed }))
        }
    }
}

fn timed_out(status: &ExecStatus) -> bool {
    match status.state {
        ExecState::TimedOut => true,
        ExecState::Running | ExecState::Exited | ExecState::Cancelled => false,
    }
}

fn exit_code(status: &ExecStatus) -> i32 {
    if timed_out(status) { TIMED_OUT_EXIT } else { status.exit_code.unwrap_or(-1) }
}

fn killed(status: &ExecStatus) -> Option<&'static str> {
    status.killed_for_memory.then_some("memory")
}

impl Place {
    fn ended(&self, status: &ExecStatus) {
        self.app.metrics.exec_ended(if timed_out(status) {
            ExecEnd::TimedOut
        } else if status.exit_code == Some(0) {
            ExecEnd::Succeeded
        } else {
            ExecEnd::Failed
        });
    }

    fn lost(&self, error: Error) -> Error {
        self.app.metrics.exec_ended(ExecEnd::Lost);
        self.explain(error)
    }
}

/// The first of what a command printed.
#[derive(Default)]
struct Collected {
    bytes: Vec<u8>,
    truncated: bool,
}

impl Collected {
    /// `beside`: what `held` has to have memory for as well.
    fn push(&mut self, bytes: &[u8], beside: usize, held: &mut Held) {
        let room = MOST_OUTPUT - self.bytes.len();
        let taken = bytes.len().min(room);
        let held = held.grow_to(COPIES * (beside + self.bytes.len() + taken) as u64);
        // What comes behind a gap is left out as well.
        if held && !self.truncated {
            self.bytes.extend_from_slice(&bytes[..taken]);
        }
        self.truncated |= !held || bytes.len() > room;
    }

    fn text(self) -> String {
        String::from_utf8(self.bytes)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffers::Buffers;

    #[test]
    fn output_is_cut_at_its_limit_and_says_so() {
        let mut collected = Collected::default();
        let mut held = Buffers::new(1 << 30).nothing();
        collected.push(&vec![b'x'; MOST_OUTPUT], 0, &mut held);
        assert!(!collected.truncated);
        collected.push(b"y", 0, &mut held);
        assert!(collected.truncated);
        assert_eq!(collected.text().len(), MOST_OUTPUT);
    }

    #[test]
    fn output_is_cut_where_memory_for_it_ends_and_has_no_gap() {
        let buffers = Buffers::new(1 << 20);
        let (mut collected, mut held) = (Collected::default(), buffers.nothing());
        collected.push(&[b'x'; 400_000], 0, &mut held);
        assert!(!collected.truncated);
        collected.push(&[b'y'; 200_000], 0, &mut held);
        collected.push(b"z", 0, &mut held);
        assert!(collected.truncated);
        assert_eq!(collected.text(), "x".repeat(400_000));
        let mut beside = Collected::default();
        beside.push(&[b'e'; 200_000], 400_000, &mut held);
        assert!(beside.truncated);
    }
}
