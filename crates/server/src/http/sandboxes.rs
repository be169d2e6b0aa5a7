//! `/v1/sandboxes`: made, listed, deleted, and how long they live.

use std::sync::Arc;

use api::{CreateSandbox, Lifecycle, Sandbox, SandboxStatus, UpdateLifecycle};
use axum::{
    extract::State,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, StatusCode};
use serde::Deserialize;

use super::{
    body::{Id, Input, Output, ok},
    query::Query,
};
use crate::{App, Error, keys::Caller, sandbox::Filter};

const NEXT_CURSOR: HeaderName = HeaderName::from_static("x-next-cursor");

/// Makes a sandbox; answers when a command can run in it.
#[utoipa::path(post, path = "/v1/sandboxes", tag = "sandboxes", request_body = CreateSandbox, responses((status = 201, body = Sandbox)))]
pub(super) async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    Input(request): Input<CreateSandbox>,
) -> Result<Output<Sandbox>, Error> {
    let timer = app.metrics.creates.start_timer();
    let sandbox = app.sandboxes.create(&caller, request).await;
    match sandbox {
        Ok(sandbox) => {
            timer.observe_duration();
            Ok(Output(StatusCode::CREATED, sandbox))
        }
        Err(error) => {
            timer.stop_and_discard();
            Err(error)
        }
    }
}

/// Newest first. The header `X-Next-Cursor` says where the next page begins, if there is one.
#[utoipa::path(get, path = "/v1/sandboxes", tag = "sandboxes", responses((status = 200, body = Vec<Sandbox>)), params(
    ("status" = Option<SandboxStatus>, Query,),
    ("metadata.KEY" = Option<String>, Query, description = "Only those whose metadata has this value; several must all match"),
    ("limit" = Option<usize>, Query, description = "Default: all"),
    ("cursor" = Option<String>, Query,),
))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: Query,
) -> Result<Response, Error> {
    let (sandboxes, next) = app.sandboxes.list(&caller.account, &filter(&query)?)?;
    let mut response = ok(sandboxes).into_response();
    if let Some(next) = next {
        response
            .headers_mut()
            .insert(NEXT_CURSOR, HeaderValue::from_str(&next).map_err(Error::internal)?);
    }
    Ok(response)
}

fn filter(query: &Query) -> Result<Filter, Error> {
    let some_text = |name| Ok::<_, Error>(query.text(name)?.filter(|text| !text.is_empty()));
    let status = some_text("status")?.map(|text| {
        SandboxStatus::deserialize(
            serde::de::value::StrDeserializer::<serde::de::value::Error>::new(text),
        )
        .map_err(|_| Error::invalid(format!("`status`: there is no status `{text}`")))
    });
    let limit = query.number("limit")?;
    if limit == Some(0) {
        return Err(Error::invalid("`limit` must be at least 1"));
    }
    Ok(Filter {
        status: status.transpose()?,
        metadata: query.map("metadata.")?,
        limit,
        cursor: some_text("cursor")?.map(str::to_owned),
    })
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path,)), responses((status = 200, body = Sandbox)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Sandbox>, Error> {
    Ok(ok(app.sandboxes.get(&caller.account, &id)?))
}

/// In any state. Answers when it is gone, or after 25 seconds: then it goes on by itself.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}", tag = "sandboxes", params(("id" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<StatusCode, Error> {
    app.sandboxes.delete(&caller.account, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[utoipa::path(get, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", params(("id" = String, Path,)),
    responses((status = 200, body = Lifecycle)))]
pub(super) async fn lifecycle(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<Lifecycle>, Error> {
    Ok(ok(app.sandboxes.lifecycle(&caller.account, &id)?))
}

/// The time to live starts again.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/lifecycle", tag = "sandboxes", params(("id" = String, Path,)),
    request_body = UpdateLifecycle, responses((status = 200, body = Lifecycle)))]
pub(super) async fn update_lifecycle(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(update): Input<UpdateLifecycle>,
) -> Result<Output<Lifecycle>, Error> {
    Ok(ok(app.sandboxes.update_lifecycle(&caller.account, &id, update).await?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_filtered_by_status_metadata_and_page() {
        let found =
            filter(&Query::parse(b"status=running&metadata.job=a&limit=5&cursor=c")).unwrap();
        assert_eq!(found.status, Some(SandboxStatus::Running));
        assert_eq!(
            (found.metadata["job"].as_str(), found.limit, found.cursor.as_deref()),
            ("a", Some(5), Some("c"))
        );
        let all = filter(&Query::parse(b"status=&limit=&cursor=")).unwrap();
        assert_eq!((all.status, all.limit, all.cursor), (None, None, None));
        for bad in ["status=happy", "limit=0", "limit=-1", "limit=x"] {
            assert!(filter(&Query::parse(bad.as_bytes())).is_err(), "{bad}");
        }
    }
}
