//! Volumes: made, listed, grown, deleted. Wherever one is named, its id or its name will do.

use std::sync::Arc;

use api::{AttachVolume, CreateVolume, DetachVolume, SandboxId, UpdateVolume, Volume, VolumeList};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;

use super::{
    body::{Input, Named, Output, ok},
    edge::in_machines_dialect,
};
use crate::{App, Error, keys::Caller};

/// With a file system from the start; it takes of the disk what is written to it.
#[utoipa::path(post, path = "/v1/volumes", tag = "volumes", request_body = CreateVolume, responses((status = 201, body = Volume)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(request): Input<CreateVolume>,
) -> Response {
    let by_gb = request.size_gb.is_some();
    match app.sandboxes.create_volume(&caller, request).await {
        Ok(volume) => Output(StatusCode::CREATED, volume).into_response(),
        Err(error) if by_gb => in_machines_dialect(error),
        Err(error) => error.into_response(),
    }
}

/// Oldest first; the same list under both names.
#[utoipa::path(get, path = "/v1/volumes", tag = "volumes", responses((status = 200, body = VolumeList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<VolumeList>, Error> {
    Ok(ok(app.volumes.list(&caller.account).await?.into()))
}

#[utoipa::path(get, path = "/v1/volumes/{id}", tag = "volumes", params(("id" = String, Path,)), responses((status = 200, body = Volume)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Volume>, Error> {
    Ok(ok(app.volumes.get(&caller.account, &id).await?))
}

/// It grows with its file system, attached or not; it never shrinks.
#[utoipa::path(patch, path = "/v1/volumes/{id}", tag = "volumes", params(("id" = String, Path,)), request_body = UpdateVolume,
    responses((status = 200, body = Volume)))]
pub(super) async fn update(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    Input(request): Input<UpdateVolume>,
) -> Response {
    let by_gb = request.size_gb.is_some();
    match app.sandboxes.grow_volume(&caller, &id, request).await {
        Ok(volume) => ok(volume).into_response(),
        Err(error) if by_gb => in_machines_dialect(error),
        Err(error) => error.into_response(),
    }
}

/// For ever. Not while it is attached.
#[utoipa::path(delete, path = "/v1/volumes/{id}", tag = "volumes", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<StatusCode, Error> {
    app.volumes.delete(&caller.account, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// To a machine that is stopped, behind its next disk: `/dev/vdb` is the first. Not mounted. Once more is as good as once.
#[utoipa::path(post, path = "/v1/volumes/{id}/attach", tag = "volumes", params(("id" = String, Path,)), request_body = AttachVolume,
    responses((status = 200, body = Volume)))]
pub(super) async fn attach(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    Input(request): Input<AttachVolume>,
) -> Result<Output<Volume>, Error> {
    let machine = machine_id(&request.machine_id)?;
    Ok(ok(app.sandboxes.attach_volume(&caller.account, &id, &machine).await?))
}

/// From a machine that is stopped. Once more is as good as once.
#[utoipa::path(post, path = "/v1/volumes/{id}/detach", tag = "volumes", params(("id" = String, Path,)), request_body = DetachVolume,
    responses((status = 200, body = Volume)))]
pub(super) async fn detach(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    Input(request): Input<DetachVolume>,
) -> Result<Output<Volume>, Error> {
    let machine = request.machine_id.as_deref().map(machine_id).transpose()?;
    Ok(ok(app.sandboxes.detach_volume(&caller.account, &id, machine.as_ref()).await?))
}

/// What is no id belongs to no machine.
fn machine_id(text: &str) -> Result<SandboxId, Error> {
    text.parse().map_err(|_| {
        Error::not_found(
            "`machine_id`: there is no machine with this id; list them with GET /v1/machines",
        )
    })
}
