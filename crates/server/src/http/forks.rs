//! Forks: sandboxes out of one instant of another.

use std::sync::Arc;

use api::{Fork, ForkTree, Forked, ForkedTree, Promote, Promoted};
use axum::{extract::State, response::Response};
use http::StatusCode;

use super::{
    body::{Id, Input, Output, ok},
    keep_alive,
};
use crate::{App, Error, keys::Caller};

/// Children as the sandbox is now, memory included; without its volumes.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork", tag = "sandboxes", params(("id" = String, Path,)), request_body = Fork,
    responses((status = 201, body = Forked)))]
pub(super) async fn fork(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<Fork>,
) -> Result<Response, Error> {
    let forked = async move {
        let forked = app.sandboxes.fork(&caller, &id, request).await;
        forked.map_err(|error| app.sandboxes.explain_save(&caller.account, &id, error))
    };
    keep_alive::resource(StatusCode::CREATED, forked).await
}

/// Children that know each other as one tree, for a search of which one is promoted in the end.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fork-tree", tag = "sandboxes", params(("id" = String, Path,)),
    request_body = ForkTree, responses((status = 201, body = ForkedTree)))]
pub(super) async fn fork_tree(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<ForkTree>,
) -> Result<Response, Error> {
    let forked = async move {
        let forked = app.sandboxes.fork_tree(&caller, &id, request).await;
        forked.map_err(|error| app.sandboxes.explain_save(&caller.account, &id, error))
    };
    keep_alive::resource(StatusCode::CREATED, forked).await
}

/// Takes a child out of its tree; with `cleanup_siblings` the others are deleted.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/promote", tag = "sandboxes", params(("id" = String, Path,)),
    request_body = Promote, responses((status = 200, body = Promoted)))]
pub(super) async fn promote(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<Promote>,
) -> Result<Output<Promoted>, Error> {
    Ok(ok(app.sandboxes.promote(&caller.account, &id, request).await?))
}
