//! `/v1/sandboxes/{id}/network`: what a sandbox may reach, and how much went over its network.

use std::sync::Arc;

use api::{Network, UpdateNetwork};
use axum::extract::State;

use super::body::{Id, Input, Output, ok};
use crate::{App, Error, keys::Caller};

#[utoipa::path(get, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", params(("id" = String, Path,)),
    responses((status = 200, body = Network)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Network>, Error> {
    Ok(ok(app.sandboxes.network(&caller.account, &id)?))
}

/// Fields that are left out stay as they are. Holds from the answer on, also for connections that were open before.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/network", tag = "sandboxes", params(("id" = String, Path,)),
    request_body = UpdateNetwork, responses((status = 200, body = Network)))]
pub(super) async fn update(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(update): Input<UpdateNetwork>,
) -> Result<Output<Network>, Error> {
    Ok(ok(app.sandboxes.update_network(&caller.account, &id, update).await?))
}
