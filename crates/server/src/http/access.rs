//! Who asks, and whether they may.

use std::sync::Arc;

use api::Scope;
use axum::{
    extract::{FromRequestParts, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Uri, header::AUTHORIZATION, request::Parts};

use super::query::Query;
use crate::{
    App, Error,
    keys::{Caller, unauthenticated},
};

/// Who may use a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    /// Anyone, without a key.
    Open,
    /// By setting: anyone, or who may read.
    Metrics,
    /// Keys of both scopes: the route changes nothing and leads nowhere.
    Read,
    /// Keys of full scope.
    Full,
    /// Keys of full scope, and tokens for the one port that the route leads to: see [`super::proxy`].
    Port,
    /// Keys of full scope, also in the query: a browser sends no headers of ours with a WebSocket.
    Socket,
}

/// Goes before every handler.
pub(super) async fn admit(
    State((app, access)): State<(Arc<App>, Access)>,
    mut request: Request,
    next: Next,
) -> Response {
    match caller_of(&app, access, request.headers(), request.uri()).await {
        Ok(caller) => {
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            next.run(request).await
        }
        Err(error) => error.into_response(),
    }
}

async fn caller_of(
    app: &App,
    access: Access,
    headers: &HeaderMap,
    uri: &Uri,
) -> Result<Option<Caller>, Error> {
    let required = match access {
        Access::Open => return Ok(None),
        Access::Metrics if app.config.open_metrics => return Ok(None),
        Access::Metrics | Access::Read => Scope::Read,
        Access::Full | Access::Port | Access::Socket => Scope::Full,
    };
    let query = Query::parse(uri.query().unwrap_or_default().as_bytes());
    let in_query = if access == Access::Socket { query.text("access_token")? } else { None };
    let key = key_in(headers).or(in_query).ok_or_else(unauthenticated)?;
    let caller = app.keys.verify(key).await?;
    app.rate.check(key, &caller)?;
    match (required, caller.scope) {
        (Scope::Read, Scope::Read | Scope::Full) | (Scope::Full, Scope::Full) => Ok(Some(caller)),
        (Scope::Full, Scope::Read) => {
            let message = "this key may only read; use one of scope `full`";
            Err(Error::new(api::ErrorCode::Forbidden, message))
        }
    }
}

fn key_in(headers: &HeaderMap) -> Option<&str> {
    let bearer =
        headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
            let (scheme, key) = value.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
        });
    bearer.or_else(|| headers.get("x-api-key")?.to_str().ok().map(str::trim))
}

impl<S: Sync> FromRequestParts<S> for Caller {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Error> {
        // There is none on a route that is open to all.
        parts.extensions.get::<Self>().cloned().ok_or_else(unauthenticated)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_comes_in_either_header() {
        let key = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value.parse().unwrap());
            key_in(&headers).map(str::to_owned)
        };
        assert_eq!(key("authorization", "Bearer k"), Some("k".to_owned()));
        assert_eq!(key("authorization", "bearer  k"), Some("k".to_owned()));
        assert_eq!(key("x-api-key", "k"), Some("k".to_owned()));
        assert_eq!(key("authorization", "Basic k"), None);
        assert_eq!(key("authorization", "k"), None);
    }
}
