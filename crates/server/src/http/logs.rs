//! `/logs`: what the commands of a sandbox printed.

use std::sync::Arc;

use api::ExecStream;
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{HeaderValue, header::CONTENT_TYPE};
use serde_json::json;

use super::{body::Id, query::Query, sse};
use crate::{
    App, Error,
    keys::Caller,
    sandbox::{Line, LogReader},
};

/// The last lines of all commands, in order; with `follow` as events `line`, and those to come.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/logs", tag = "execs", responses((status = 200, body = String, content_type = "text/plain")), params(
    ("id" = String, Path,),
    ("stream" = Option<String>, Query, description = "`stdout`, `stderr` or `both`, the default"),
    ("follow" = Option<bool>, Query,),
))]
pub(super) async fn read(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Response, Error> {
    let wanted = wanted(&query)?;
    let mut reader = app.sandboxes.logs(&caller.account, &id).await?.reader();
    if query.flag("follow", false)? {
        return Ok(sse::response(follow(reader, wanted)));
    }
    let mut text = String::new();
    for line in reader.take().iter().filter(|line| wants(wanted, line)) {
        text.push_str(&String::from_utf8_lossy(&line.text));
        text.push('\n');
    }
    Ok(([(CONTENT_TYPE, HeaderValue::from_static("text/plain; charset=utf-8"))], text)
        .into_response())
}

/// `None`: both.
fn wanted(query: &Query) -> Result<Option<ExecStream>, Error> {
    match query.text("stream")? {
        None | Some("" | "both") => Ok(None),
        Some("stdout") => Ok(Some(ExecStream::Stdout)),
        Some("stderr") => Ok(Some(ExecStream::Stderr)),
        Some(_) => Err(Error::invalid("`stream` must be `stdout`, `stderr` or `both`")),
    }
}

fn wants(wanted: Option<ExecStream>, line: &Line) -> bool {
    wanted.is_none_or(|output| output == line.output)
}

/// Ends with the sandbox.
fn follow(reader: LogReader, wanted: Option<ExecStream>) -> impl Stream<Item = Bytes> {
    let batches = futures::stream::unfold(reader, |mut reader| async move {
        let more = reader.more().await;
        more.then(|| (reader.take(), reader))
    });
    batches.flat_map(move |lines| {
        let events = lines.into_iter().filter(move |line| wants(wanted, line));
        futures::stream::iter(events.map(|line| {
            sse::event("line", &json!({ "line": String::from_utf8_lossy(&line.text) }))
        }))
    })
}
