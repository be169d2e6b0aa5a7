//! Ports of a sandbox over HTTP: below the API's own origin, and on hosts of their own. What a server in the guest says is
//! passed on as it comes, both ways.

mod credentials;
mod forward;
mod headers;
mod host;
mod tunnel;

use std::{net::IpAddr, sync::Arc};

use api::{AccountId, ErrorCode, SandboxId, Scope};
use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    middleware,
    response::{IntoResponse, Response},
    routing::any,
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri,
    header::{CACHE_CONTROL, LOCATION, REFERRER_POLICY, SET_COOKIE},
};

use self::credentials::{COOKIE, Place, offered, withdraw};
pub(super) use self::host::{Named, named};
use super::{connections::Place as Connected, edge};
use crate::{App, Error, config::PreviewAccess, keys, previews, sandbox::no_sandbox};

const FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");
const FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// In the extensions of each request: the connection over which it came.
#[derive(Clone)]
pub(super) struct Over {
    pub(super) place: Arc<Connected>,
    pub(super) peer: IpAddr,
}

/// A request that may go to a port.
#[derive(Debug, Clone)]
struct Visit {
    account: AccountId,
    sandbox: SandboxId,
    port: u16,
    way: Way,
    /// It came with a token in its query, which later requests have in this cookie.
    new_cookie: Option<HeaderValue>,
}

/// How a port is reached.
#[derive(Debug, Clone)]
enum Way {
    /// Below the API's own origin.
    Path { prefix: String },
    /// On a host of its own.
    Host,
}

/// Whatever is sent to a port of the sandbox, WebSockets too, unbuffered both ways. The key comes as ever, or a preview
/// token as `access_token` in the query or from then on as a cookie. Any method goes.
#[utoipa::path(method(get, post, put, patch, delete), path = "/v1/sandboxes/{id}/proxy/{port}/{path}", tag = "ports",
    params(("id" = String, Path,), ("port" = u16, Path,), ("path" = String, Path, description = "Any, also none")),
    responses((status = 200, description = "The guest's own answer"), (status = 502, description = "Nothing listens"), (status = 504)))]
pub(super) async fn documented() {}

/// The routes that [`documented`] stands for.
pub(super) const ROUTES: [&str; 3] = [
    "/v1/sandboxes/{id}/proxy/{port}",
    "/v1/sandboxes/{id}/proxy/{port}/",
    "/v1/sandboxes/{id}/proxy/{port}/{*path}",
];

/// For requests whose host is a port's.
pub(super) fn hosts(app: &Arc<App>) -> Router {
    Router::new()
        .route("/", any(by_host))
        .route("/{*path}", any(by_host))
        .fallback(by_host)
        .layer(middleware::from_fn_with_state(Arc::clone(app), edge::edge))
        .with_state(Arc::clone(app))
}

pub(super) async fn by_path(State(app): State<Arc<App>>, request: Request) -> Response {
    let outcome = async {
        let (visit, request) = admit_to_path(&app, request).await?;
        enter(&app, visit, request).await
    };
    outcome.await.unwrap_or_else(IntoResponse::into_response)
}

async fn by_host(State(app): State<Arc<App>>, request: Request) -> Response {
    let outcome = async {
        let (visit, request) = admit_to_host(&app, request).await?;
        enter(&app, visit, request).await
    };
    outcome.await.unwrap_or_else(IntoResponse::into_response)
}

async fn enter(app: &Arc<App>, visit: Visit, request: Request) -> Result<Response, Error> {
    if let Some(cookie) = visit.new_cookie.clone() {
        if is_navigation(request.method(), request.headers()) {
            return Ok(without_token(request.uri(), cookie));
        }
        let mut response = forward::forward(app, visit, request).await?;
        response.headers_mut().append(SET_COOKIE, cookie);
        return Ok(response);
    }
    forward::forward(app, visit, request).await
}

/// A key of full scope, or a token for this very port.
async fn admit_to_path(app: &App, request: Request) -> Result<(Visit, Request), Error> {
    let (mut parts, body) = request.into_parts();
    // Not by the router's parameters: the rest of the path is the guest's, and need not be UTF-8.
    let (prefix, rest) = split_path(&parts.uri).ok_or_else(no_sandbox)?;
    let prefix = prefix.to_owned();
    let mut names = prefix.split('/').skip(3).step_by(2);
    let (id, port) = (names.next().unwrap_or_default(), names.next().unwrap_or_default());
    let place = id.parse::<SandboxId>().ok().zip(port_of(port));
    let found = credentials_in(app, &parts.headers, &parts.uri, place).await;
    let admitted =
        found.admitted.ok_or_else(|| found.refusal.unwrap_or_else(keys::unauthenticated))?;
    let sandbox = id.parse().map_err(|_| no_sandbox())?;
    let (account, token) = match admitted {
        Admitted::Key(account) => (account, None),
        Admitted::Token(place, token) => {
            let account = app.sandboxes.account_of(&sandbox).ok_or_else(no_sandbox)?;
            (account, token_in_query(place, &token))
        }
    };
    app.sandboxes.get(&account, &sandbox)?;
    let port = port_of(port)
        .ok_or_else(|| Error::invalid("a port is a whole number between 1 and 65535"))?;
    let new_cookie = token.map(|token| cookie(&token, &format!("{prefix}/"), &parts.headers));
    withdraw(&mut parts.headers, &mut parts.uri, &found.ours);
    let rest = below(&parts.uri, &rest);
    let new_cookie = new_cookie.transpose()?;
    // A redirect leads to where the client is, and a guest sees what is below.
    let visit = Visit { account, sandbox, port, way: Way::Path { prefix }, new_cookie };
    if visit.new_cookie.is_none() || !is_navigation(&parts.method, &parts.headers) {
        parts.uri = rest;
    }
    Ok((visit, Request::from_parts(parts, body)))
}

/// Whoever knows the sandbox's id, or by setting a token for this very port.
async fn admit_to_host(app: &App, request: Request) -> Result<(Visit, Request), Error> {
    let (mut parts, body) = request.into_parts();
    let Named::Port(port, sandbox) = named(&app.config.previews, &parts.uri, &parts.headers) else {
        return Err(no_sandbox());
    };
    let found = credentials_in(app, &parts.headers, &parts.uri, Some((sandbox, port))).await;
    let token = match (app.config.previews.access, found.admitted) {
        (PreviewAccess::Open, _) => None,
        (PreviewAccess::Token, Some(Admitted::Token(place, token))) => {
            token_in_query(place, &token)
        }
        (PreviewAccess::Token | PreviewAccess::Off, _) => {
            return Err(Error::new(
                ErrorCode::Unauthenticated,
                "this port is shown to those with a preview token: open its address with `?access_token=TOKEN`",
            ));
        }
    };
    let account = app.sandboxes.account_of(&sandbox).ok_or_else(no_sandbox)?;
    let new_cookie = token.map(|token| cookie(&token, "/", &parts.headers)).transpose()?;
    withdraw(&mut parts.headers, &mut parts.uri, &found.ours);
    Ok((
        Visit { account, sandbox, port, way: Way::Host, new_cookie },
        Request::from_parts(parts, body),
    ))
}

enum Admitted {
    Key(AccountId),
    Token(Place, String),
}

struct Found {
    admitted: Option<Admitted>,
    /// Where something of ours is, whether it admits or not.
    ours: Vec<Place>,
    refusal: Option<Error>,
}

/// Looks at all that is offered: what is ours must not go on, also where it was not needed.
async fn credentials_in(
    app: &App,
    headers: &HeaderMap,
    uri: &Uri,
    place: Option<(SandboxId, u16)>,
) -> Found {
    let mut found = Found { admitted: None, ours: Vec::new(), refusal: None };
    for (at, value) in offered(headers, uri.query().unwrap_or_default()) {
        let admitted = if value.starts_with(previews::MARK) {
            found.ours.push(at);
            match place {
                Some((sandbox, port)) => match app.previews.verify(&value, &sandbox, port).await {
                    Ok(()) => Ok(Admitted::Token(at, value)),
                    Err(error) => Err(error),
                },
                None => Err(keys::unauthenticated()),
            }
        } else {
            let caller = app.keys.verify(&value).await;
            if caller.is_ok() || value.starts_with(keys::MARK) {
                found.ours.push(at);
            }
            match caller {
                Ok(caller) if caller.scope == Scope::Full => {
                    app.rate.check(&value, &caller).map(|()| Admitted::Key(caller.account))
                }
                Ok(_) => Err(Error::new(
                    ErrorCode::Forbidden,
                    "this key may only read; use one of scope `full`",
                )),
                Err(error) => Err(error),
            }
        };
        match admitted {
            Ok(admitted) => {
                found.admitted.get_or_insert(admitted);
            }
            Err(error) => {
                let says_more = error.code != ErrorCode::Unauthenticated;
                if found.refusal.is_none() || says_more {
                    found.refusal = Some(error);
                }
            }
        }
    }
    found
}

fn token_in_query(place: Place, token: &str) -> Option<String> {
    (place == Place::Query).then(|| token.to_owned())
}

fn port_of(text: &str) -> Option<u16> {
    let is_plain = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|port| is_plain && *port > 0)
}

/// `/v1/sandboxes/{id}/proxy/{port}` as it was written, and the path behind it.
fn split_path(uri: &Uri) -> Option<(&str, String)> {
    let path = uri.path();
    let slashes: Vec<_> = path.match_indices('/').map(|(at, _)| at).take(6).collect();
    let end = slashes.get(5).copied().unwrap_or(path.len());
    let (prefix, rest) = path.split_at_checked(end)?;
    Some((prefix, if rest.is_empty() { "/".to_owned() } else { rest.to_owned() }))
}

/// In origin form.
fn below(uri: &Uri, path: &str) -> Uri {
    let all = uri.query().map_or_else(|| path.to_owned(), |query| format!("{path}?{query}"));
    all.parse().unwrap_or_else(|_| Uri::from_static("/"))
}

fn is_navigation(method: &Method, headers: &HeaderMap) -> bool {
    method == Method::GET && headers.get(FETCH_MODE).is_some_and(|mode| mode == "navigate")
}

/// Host-only, and out of reach of scripts and of other sites' forms.
fn cookie(token: &str, path: &str, headers: &HeaderMap) -> Result<HeaderValue, Error> {
    let is_secure = headers.get(FORWARDED_PROTO).is_some_and(|proto| proto == "https");
    let secure = if is_secure { "; Secure" } else { "" };
    let text = format!("{COOKIE}={token}; Path={path}; HttpOnly; SameSite=Lax{secure}");
    HeaderValue::from_str(&text).map_err(Error::internal)
}

/// So that the token is neither in the address bar nor told to whom the page links to.
fn without_token(uri: &Uri, cookie: HeaderValue) -> Response {
    let path = uri.path_and_query().map_or("/", http::uri::PathAndQuery::as_str);
    // A path with two slashes at its start would name another host.
    let location = HeaderValue::from_str(&format!("/{}", path.trim_start_matches('/')));
    let headers = [
        (LOCATION, location.unwrap_or(HeaderValue::from_static("/"))),
        (SET_COOKIE, cookie),
        (CACHE_CONTROL, HeaderValue::from_static("no-store")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ];
    (StatusCode::SEE_OTHER, headers, Body::empty()).into_response()
}

/// The connection over which a request came; none in a test without one.
fn over(request: &Request) -> Option<Over> {
    request.extensions().get::<Over>().cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_go_on_as_they_were_written() {
        for (path, prefix, rest) in [
            ("/v1/sandboxes/x/proxy/80", "/v1/sandboxes/x/proxy/80", "/"),
            ("/v1/sandboxes/x/proxy/80/", "/v1/sandboxes/x/proxy/80", "/"),
            (
                "/v1/sandboxes/x/proxy/80/a%2Fb/../c//d?e=%20",
                "/v1/sandboxes/x/proxy/80",
                "/a%2Fb/../c//d",
            ),
        ] {
            let uri: Uri = path.parse().unwrap();
            assert_eq!(split_path(&uri), Some((prefix, rest.to_owned())));
        }
        let uri: Uri = "/v1/sandboxes/x/proxy/80/a?b=%20&c".parse().unwrap();
        assert_eq!(below(&uri, "/a"), "/a?b=%20&c");
    }

    #[test]
    fn a_port_is_a_number() {
        assert_eq!(port_of("65535"), Some(65_535));
        for none in ["", "0", "65536", "+80", "-1", "8o", " 80"] {
            assert_eq!(port_of(none), None, "{none}");
        }
    }
}
