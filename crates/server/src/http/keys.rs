//! `/v1/me`: who the key belongs to, and its account's keys.

use std::sync::Arc;

use api::{CreateKey, Key, Me, NewKey};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::StatusCode;

use super::{
    body::{Input, Named, Output, ok},
    idempotency::ShownOnce,
};
use crate::{App, Error, keys::Caller};

/// Whose key this is.
#[utoipa::path(get, path = "/v1/me", tag = "keys", responses((status = 200, body = Me)))]
pub(super) async fn me(caller: Caller) -> impl IntoResponse {
    ok(Me { account: caller.account, scope: caller.scope })
}

/// All keys, oldest first, without the secret.
#[utoipa::path(get, path = "/v1/me/tokens", tag = "keys", responses((status = 200, body = Vec<Key>)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<Vec<Key>>, Error> {
    Ok(ok(app.keys.list(&caller.account).await?))
}

/// A new key, shown this once.
#[utoipa::path(post, path = "/v1/me/tokens", tag = "keys", request_body = CreateKey, responses((status = 201, body = NewKey)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(request): Input<CreateKey>,
) -> Result<Response, Error> {
    let new = app.keys.create_for(&caller, request).await?;
    let mut response = Output(StatusCode::CREATED, new).into_response();
    response.extensions_mut().insert(ShownOnce);
    Ok(response)
}

/// From now on the key is refused.
#[utoipa::path(delete, path = "/v1/me/tokens/{token}", tag = "keys", params(("token" = String, Path, description = "Id or prefix")),
    responses((status = 204)))]
pub(super) async fn revoke(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(token): Named,
) -> Result<StatusCode, Error> {
    app.keys.revoke(&caller.account, &token).await?;
    Ok(StatusCode::NO_CONTENT)
}
