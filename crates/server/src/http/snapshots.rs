//! Snapshots: taken, listed, deleted.

use std::sync::Arc;

use api::{CreateSnapshot, SandboxId, Snapshot, SnapshotId, SnapshotList};
use axum::{extract::State, response::Response};
use http::StatusCode;

use super::{
    body::{Id, Input, Named, Output, ok},
    keep_alive,
    query::Query,
};
use crate::{App, Error, keys::Caller};

/// Memory and disk as they are now. The sandbox goes on. An answer that takes long begins with white space.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/snapshots", tag = "snapshots", params(("id" = String, Path,)),
    request_body = CreateSnapshot, responses((status = 201, body = Snapshot)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<CreateSnapshot>,
) -> Result<Response, Error> {
    let taken = async move {
        let taken = app.sandboxes.snapshot(&caller, &id, request.name).await;
        taken.map_err(|error| app.sandboxes.explain_save(&caller.account, &id, error))
    };
    keep_alive::resource(StatusCode::CREATED, taken).await
}

/// Newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", responses((status = 200, body = SnapshotList)), params(
    ("sandbox_id" = Option<String>, Query, description = "Only those of this sandbox"),
))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: Query,
) -> Result<Output<SnapshotList>, Error> {
    let sandbox = match query.text("sandbox_id")?.filter(|text| !text.is_empty()) {
        Some(text) => Some(
            text.parse::<SandboxId>()
                .map_err(|_| Error::invalid("`sandbox_id` must be the id of a sandbox"))?,
        ),
        None => None,
    };
    let snapshots = app.sandboxes.list_snapshots(&caller.account, sandbox.as_ref()).await?;
    Ok(ok(SnapshotList { snapshots }))
}

#[utoipa::path(get, path = "/v1/snapshots/{id}", tag = "snapshots", params(("id" = String, Path,)), responses((status = 200, body = Snapshot)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Snapshot>, Error> {
    Ok(ok(app.sandboxes.get_snapshot(&caller.account, &parse(&id)?).await?))
}

/// Sandboxes that were made from it go on, and can be made into snapshots themselves.
#[utoipa::path(delete, path = "/v1/snapshots/{id}", tag = "snapshots", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<StatusCode, Error> {
    app.sandboxes.delete_snapshot(&caller.account, &parse(&id)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is no id belongs to no snapshot.
fn parse(id: &str) -> Result<SnapshotId, Error> {
    id.parse().map_err(|_| {
        Error::not_found("there is no snapshot with this id; list them with GET /v1/snapshots")
    })
}
