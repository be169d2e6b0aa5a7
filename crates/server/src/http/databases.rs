//! `/v1/databases`: PostgreSQL in a machine of its own.

use std::sync::Arc;

use api::{
    CloneDatabase, CreateDatabase, Database, DatabaseConnection, DatabaseList, UpdateDatabase,
};
use axum::extract::State;
use http::StatusCode;

use super::body::{Input, Named, Output, ok};
use crate::{App, Error, keys::Caller};

/// Begins to make one. GET it until it is `running`: that takes a second or two.
#[utoipa::path(post, path = "/v1/databases", tag = "databases", request_body = CreateDatabase,
    responses((status = 202, body = Database)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(request): Input<CreateDatabase>,
) -> Result<Output<Database>, Error> {
    Ok(Output(StatusCode::ACCEPTED, app.databases.create(&caller, request).await?))
}

/// Newest first; without passwords.
#[utoipa::path(get, path = "/v1/databases", tag = "databases", responses((status = 200, body = DatabaseList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<DatabaseList>, Error> {
    Ok(ok(app.databases.list(&caller.account)))
}

/// One that is being made is waited for up to 5 s. To a key of scope `full` it says how it is reached.
#[utoipa::path(get, path = "/v1/databases/{id}", tag = "databases", params(("id" = String, Path,)),
    responses((status = 200, body = Database)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Database>, Error> {
    Ok(ok(app.databases.get(&caller, &id).await?))
}

/// How it is reached: with its password.
#[utoipa::path(get, path = "/v1/databases/{id}/connection", tag = "databases", params(("id" = String, Path,)),
    responses((status = 200, body = DatabaseConnection)))]
pub(super) async fn connection(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<DatabaseConnection>, Error> {
    Ok(ok(app.databases.connection(&caller.account, &id)?))
}

#[utoipa::path(patch, path = "/v1/databases/{id}", tag = "databases", params(("id" = String, Path,)),
    request_body = UpdateDatabase, responses((status = 200, body = Database)))]
pub(super) async fn update(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    Input(request): Input<UpdateDatabase>,
) -> Result<Output<Database>, Error> {
    Ok(ok(app.databases.update(&caller, &id, request).await?))
}

/// For ever, with all that is in it. Its clones stay.
#[utoipa::path(delete, path = "/v1/databases/{id}", tag = "databases", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<StatusCode, Error> {
    app.databases.delete(&caller.account, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ahead of a connection, which would wake it as well. Goes on behind the answer.
#[utoipa::path(post, path = "/v1/databases/{id}/wake", tag = "databases", params(("id" = String, Path,)),
    responses((status = 202, body = Database)))]
pub(super) async fn wake(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Database>, Error> {
    Ok(Output(StatusCode::ACCEPTED, app.databases.wake(&caller.account, &id)?))
}

/// A database of its own with what is in this one, which goes on meanwhile.
#[utoipa::path(post, path = "/v1/databases/{id}/clone", tag = "databases", params(("id" = String, Path,)),
    request_body = CloneDatabase, responses((status = 202, body = Database)))]
pub(super) async fn clone(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    Input(request): Input<CloneDatabase>,
) -> Result<Output<Database>, Error> {
    let database = app.databases.clone_of(&caller, &id, request).await?;
    Ok(Output(StatusCode::ACCEPTED, database))
}

/// Another password; whoever is connected with the old one is disconnected.
#[utoipa::path(post, path = "/v1/databases/{id}/reset-credentials", tag = "databases", params(("id" = String, Path,)),
    responses((status = 200, body = Database)))]
pub(super) async fn reset_credentials(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Database>, Error> {
    Ok(ok(app.databases.reset_credentials(&caller.account, &id).await?))
}

/// Always refused: there is one host.
#[utoipa::path(post, path = "/v1/databases/{id}/failover", tag = "databases", params(("id" = String, Path,)),
    responses((status = 200, body = Database)))]
pub(super) async fn failover(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Database>, Error> {
    Ok(ok(app.databases.failover(&caller.account, &id)?))
}
