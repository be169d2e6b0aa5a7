//! Pausing, hibernating, and going on.

use std::sync::Arc;

use api::Sandbox;
use axum::{extract::State, response::Response};
use http::StatusCode;

use super::{body::Id, keep_alive};
use crate::{App, Error, keys::Caller};

/// Its virtual CPUs stand still, its memory stays. Its time to live stands still, too.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/pause", tag = "sandboxes", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn pause(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    app.sandboxes.pause(&caller.account, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// It goes on where it was paused.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/resume", tag = "sandboxes", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn resume(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    app.sandboxes.run(&caller.account, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Memory and disk go to the store; no process is left. Whoever uses it next wakes it. An answer that takes long begins with
/// white space.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/hibernate", tag = "sandboxes", params(("id" = String, Path,)),
    responses((status = 200, body = Sandbox)))]
pub(super) async fn hibernate(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Response, Error> {
    let hibernated = async move { app.sandboxes.hibernate(&caller.account, &id).await };
    keep_alive::resource(StatusCode::OK, hibernated).await
}

/// It runs again, as it was.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/wake", tag = "sandboxes", params(("id" = String, Path,)),
    responses((status = 200, body = Sandbox)))]
pub(super) async fn wake(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Response, Error> {
    let woken = async move { app.sandboxes.run(&caller.account, &id).await };
    keep_alive::resource(StatusCode::OK, woken).await
}
