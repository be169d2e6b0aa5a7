//! `/v1/machines/{id}/execs`: scripts that outlive the request that started them.

use std::{sync::Arc, time::Duration};

use api::{ErrorCode, ExecId, ExecList, ExecOutput, ExecStream, StartExec};
use axum::{
    Extension,
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;
use serde_json::{Map, Value};

use super::{
    body::{Id, InMachine, Input, Output, ok},
    edge::Refusal,
    query::Query,
    stopping::Stopping,
};
use crate::{
    App, Error,
    keys::Caller,
    sandbox::{Page, Started},
};

/// A script of 3 MiB, its environment and its standard input, however JSON escapes them.
const LONGEST_BODY: usize = 64 << 20;

/// Answers with the exec, after its end where that comes within `wait_ms` (300 by default). A 503 whose body has an
/// `exec_id` means that it may have started: ask for that one instead of starting it again.
#[utoipa::path(post, path = "/v1/machines/{id}/execs", tag = "execs", request_body = StartExec,
    params(("id" = String, Path,), ("wait_ms" = Option<u64>, Query,)),
    responses((status = 202, body = api::Exec), (status = 409, description = "There is or was an exec with this id; it does not run again"),
        (status = 503, description = "With `exec_id`: it may have started; without: it has not")))]
pub(super) async fn start(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    stopping: Option<Extension<Stopping>>,
    Input(mut request): Input<StartExec, LONGEST_BODY>,
) -> Result<Response, Error> {
    let wait = milliseconds(&query)?;
    // The same for a request that comes again.
    let exec_id = request.exec_id.get_or_insert_with(|| caller.new_id(0)).clone();
    let starting = async {
        if caller.asks_again()
            && let Ok(exec) = app.sandboxes.exec(&caller.account, &id, exec_id.as_str(), wait).await
        {
            return Ok(Started::Is(exec));
        }
        app.sandboxes.start_exec(&caller.account, &id, request, wait).await
    };
    let started = match &stopping {
        Some(Extension(stopping)) => stopping.in_time(starting).await,
        None => Some(starting.await),
    };
    match started.transpose()? {
        Some(Started::Is(exec)) => Ok(Output(StatusCode::ACCEPTED, exec).into_response()),
        Some(Started::May(exec_id, error)) => Ok(may_have_started(&exec_id, error)),
        // Without its id a client would take it for one that never ran.
        None => Ok(may_have_started(&exec_id, Error::internal("the server is being stopped"))),
    }
}

fn may_have_started(id: &ExecId, error: Error) -> Response {
    let message = format!(
        "the exec `{id}` may have started, but nobody has said so yet; look at it instead of starting it again"
    );
    let error = Error::new(ErrorCode::Unavailable, message).because(error);
    let exec_id = ("exec_id".to_owned(), Value::String(id.to_string()));
    Refusal::with(error, Map::from_iter([exec_id]))
}

/// The newest 50 of the execs that are kept, newest first; those of the other routes as well.
#[utoipa::path(get, path = "/v1/machines/{id}/execs", tag = "execs",
    params(("id" = String, Path,), ("limit" = Option<usize>, Query,)), responses((status = 200, body = ExecList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Output<ExecList>, Error> {
    let execs = app.sandboxes.execs(&caller.account, &id, query.number("limit")?).await?;
    Ok(ok(ExecList { execs }))
}

/// One that was started a moment ago and runs is waited for, for a second; `wait_ms` asks for more or less.
#[utoipa::path(get, path = "/v1/machines/{id}/execs/{exec_id}", tag = "execs",
    params(("id" = String, Path,), ("exec_id" = String, Path,), ("wait_ms" = Option<u64>, Query,)),
    responses((status = 200, body = api::Exec), (status = 410, description = "It ended so long ago that nothing is kept of it")))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, exec): InMachine,
    query: Query,
) -> Result<Output<api::Exec>, Error> {
    let wait = milliseconds(&query)?;
    Ok(ok(app.sandboxes.exec(&caller.account, &id, &exec, wait).await?))
}

/// TERM to all its processes, KILL after five seconds. One that has ended stays as it is.
#[utoipa::path(delete, path = "/v1/machines/{id}/execs/{exec_id}", tag = "execs",
    params(("id" = String, Path,), ("exec_id" = String, Path,), ("wait_ms" = Option<u64>, Query,)),
    responses((status = 200, body = api::Exec)))]
pub(super) async fn cancel(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, exec): InMachine,
    query: Query,
) -> Result<Output<api::Exec>, Error> {
    let wait = milliseconds(&query)?;
    Ok(ok(app.sandboxes.cancel_exec(&caller.account, &id, &exec, wait).await?))
}

/// A page of what it printed, while it runs and afterwards, whatever became of its machine. The last page has `eof`.
#[utoipa::path(get, path = "/v1/machines/{id}/execs/{exec_id}/output", tag = "execs",
    params(("id" = String, Path,), ("exec_id" = String, Path,),
        ("stream" = Option<String>, Query, description = "`stdout`, the default, or `stderr`"),
        ("offset" = Option<u64>, Query,),
        ("limit" = Option<usize>, Query, description = "Bytes; 65536 by default, at most 1048576"),
        ("wait_ms" = Option<u64>, Query, description = "How long to wait for more; 0 by default")),
    responses((status = 200, body = ExecOutput)))]
pub(super) async fn output(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, exec): InMachine,
    query: Query,
) -> Result<Output<ExecOutput>, Error> {
    let page = Page {
        stream: stream(&query)?,
        offset: query.number("offset")?.unwrap_or(0),
        limit: query.number("limit")?,
        wait: milliseconds(&query)?.unwrap_or_default(),
    };
    Ok(ok(app.sandboxes.exec_output(&caller.account, &id, &exec, page).await?))
}

fn stream(query: &Query) -> Result<ExecStream, Error> {
    match query.text("stream")? {
        None | Some("" | "stdout") => Ok(ExecStream::Stdout),
        Some("stderr") => Ok(ExecStream::Stderr),
        Some(_) => Err(Error::invalid("`stream` must be `stdout` or `stderr`")),
    }
}

fn milliseconds(query: &Query) -> Result<Option<Duration>, Error> {
    Ok(query.number("wait_ms")?.map(Duration::from_millis))
}
