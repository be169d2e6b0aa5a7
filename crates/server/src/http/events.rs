//! What happened to a sandbox, and what it uses.

use std::sync::Arc;

use api::{EventList, Metrics};
use axum::extract::State;

use super::{
    body::{Id, Output, ok},
    query::Query,
};
use crate::{App, Error, keys::Caller};

/// Oldest first; at most the last 1000 are kept.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/events", tag = "sandboxes", responses((status = 200, body = EventList)), params(
    ("id" = String, Path,),
    ("tail" = Option<usize>, Query, description = "Only the last so many"),
))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Output<EventList>, Error> {
    let events = app.sandboxes.events(&caller.account, &id, query.number("tail")?).await?;
    Ok(ok(EventList { events }))
}

/// Nothing is woken to be measured.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/metrics", tag = "sandboxes", params(("id" = String, Path,)), responses((status = 200, body = Metrics)))]
pub(super) async fn metrics(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Metrics>, Error> {
    Ok(ok(app.sandboxes.figures(&caller.account, &id).await?))
}
