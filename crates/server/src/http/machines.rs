//! `/v1/machines`: the same sandboxes in the words of the second dialect; off and on; their volumes.

use std::sync::Arc;

use api::{CreateMachine, Machine, MachineList, MachineVolumeRequest, Volume};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;

use super::{
    body::{Id, Input, Output, ok},
    edge::in_machines_dialect,
    query::Query,
};
use crate::{App, Error, keys::Caller};

/// Makes a machine, which lives until it is deleted; answers once it has booted.
#[utoipa::path(post, path = "/v1/machines", tag = "machines", request_body = CreateMachine, responses((status = 201, body = Machine)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(request): Input<CreateMachine>,
) -> Response {
    match app.sandboxes.create_machine(&caller, request).await {
        Ok(machine) => Output(StatusCode::CREATED, machine).into_response(),
        Err(error) => in_machines_dialect(error),
    }
}

/// Newest first; every sandbox is one of them.
#[utoipa::path(get, path = "/v1/machines", tag = "machines", responses((status = 200, body = MachineList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<MachineList>, Error> {
    Ok(ok(MachineList { machines: app.sandboxes.list_machines(&caller.account) }))
}

#[utoipa::path(get, path = "/v1/machines/{id}", tag = "machines", params(("id" = String, Path,)), responses((status = 200, body = Machine)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Machine>, Error> {
    Ok(ok(app.sandboxes.machine(&caller.account, &id)?))
}

/// In any state. Its volumes are free then; its root disk goes with it, or stays as a volume. One that takes longer than 25
/// seconds is answered before it is gone, or, where its root disk stays, with a 503: then it goes on by itself.
#[utoipa::path(delete, path = "/v1/machines/{id}", tag = "machines", responses((status = 204)), params(
    ("id" = String, Path,),
    ("preserve_storage" = Option<bool>, Query, description = "Its root disk stays, as a volume of kind `root`"),
))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<StatusCode, Error> {
    let preserve = query.flag("preserve_storage", false)?;
    app.sandboxes.delete_machine(&caller.account, &id, preserve).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Boots it from its disk; answers once it has. It goes on where it was paused or hibernated.
#[utoipa::path(post, path = "/v1/machines/{id}/start", tag = "machines", params(("id" = String, Path,)),
    responses((status = 200, body = Machine)))]
pub(super) async fn start(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Machine>, Error> {
    app.sandboxes.power_on(&caller.account, &id).await?;
    Ok(ok(app.sandboxes.machine(&caller.account, &id)?))
}

/// Its guest powers off in order, with its disks flushed; its disk is kept.
#[utoipa::path(post, path = "/v1/machines/{id}/stop", tag = "machines", params(("id" = String, Path,)),
    responses((status = 200, body = Machine)))]
pub(super) async fn stop(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Machine>, Error> {
    app.sandboxes.power_off(&caller.account, &id).await?;
    Ok(ok(app.sandboxes.machine(&caller.account, &id)?))
}

/// As POST /v1/volumes/{id}/attach.
#[utoipa::path(post, path = "/v1/machines/{id}/volume/attach", tag = "machines", params(("id" = String, Path,)),
    request_body = MachineVolumeRequest, responses((status = 200, body = Volume)))]
pub(super) async fn attach(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<MachineVolumeRequest>,
) -> Result<Output<Volume>, Error> {
    Ok(ok(app.sandboxes.attach_volume(&caller.account, &request.volume_id, &id).await?))
}

/// As POST /v1/volumes/{id}/detach.
#[utoipa::path(post, path = "/v1/machines/{id}/volume/detach", tag = "machines", params(("id" = String, Path,)),
    request_body = MachineVolumeRequest, responses((status = 200, body = Volume)))]
pub(super) async fn detach(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(request): Input<MachineVolumeRequest>,
) -> Result<Output<Volume>, Error> {
    let machine = Some(&id);
    Ok(ok(app.sandboxes.detach_volume(&caller.account, &request.volume_id, machine).await?))
}
