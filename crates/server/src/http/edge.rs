//! The outermost layer: a request id, a refusal's body and log line, panics, metrics.

use std::{any::Any, panic::AssertUnwindSafe, sync::Arc, time::Instant};

use api::{ErrorBody, ErrorCode};
use axum::{
    body::Body,
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures::FutureExt;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, RETRY_AFTER},
};
use serde_json::{Map, Value};

use super::{held::with, stopping::Stopping, unread::Unread};
use crate::{App, Error, buffers::Held};

/// In metrics and logs.
const UNKNOWN_ROUTE: &str = "unknown";
/// Characters.
const LONGEST_SENTENCE: usize = 600;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const LONGEST_REQUEST_ID: usize = 128;

/// What a handler refused with. [`edge`] writes it into the body, since only there the request id is known.
#[derive(Clone)]
pub(super) struct Refusal {
    error: Arc<Error>,
    /// Fields of the body beside those of [`ErrorBody`].
    more: Map<String, Value>,
}

impl Refusal {
    pub(super) fn parts(&self) -> (&Error, &Map<String, Value>) {
        (&self.error, &self.more)
    }

    /// With fields beside the error's own.
    pub(super) fn with(error: Error, more: Map<String, Value>) -> Response {
        let mut response = StatusCode::from_u16(error.code.status())
            .unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
            .into_response();
        if let Some(after) = error.retry_after {
            response.headers_mut().insert(RETRY_AFTER, after.as_secs().max(1).into());
        }
        response.extensions_mut().insert(Self { error: Arc::new(error), more });
        response
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        Refusal::with(self, Map::new())
    }
}

/// The client of that dialect takes a 429 for a reason to try again.
pub(super) fn in_machines_dialect(error: Error) -> Response {
    let is_over_quota = error.code == ErrorCode::QuotaExceeded;
    let mut response = error.into_response();
    if is_over_quota {
        *response.status_mut() = StatusCode::FORBIDDEN;
    }
    response
}

pub(super) async fn edge(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let id = request_id(request.headers());
    let method = method_label(request.method());
    let route = request.extensions().get::<MatchedPath>().cloned();
    let route = route.as_ref().map_or(UNKNOWN_ROUTE, MatchedPath::as_str);
    let under_way = UnderWay::begin(&app);
    let stopping = request.extensions().get::<Stopping>().cloned();
    let waits = request.headers().contains_key(EXPECT);
    let (head, body) = request.into_parts();
    let (unread, body) = Unread::of(body, waits);
    let request = Request::from_parts(head, body);
    let answer = async {
        match &stopping {
            Some(stopping) => {
                let answered = stopping.answer(next.run(request)).await;
                answered.unwrap_or_else(IntoResponse::into_response)
            }
            None => next.run(request).await,
        }
    };
    let mut response = match AssertUnwindSafe(answer).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => {
            Error::internal(format!("a handler panicked: {}", panic_text(&*panic))).into_response()
        }
    };
    drop(under_way);
    if let Some(refusal) = response.extensions_mut().remove::<Refusal>() {
        let code = refusal.error.code;
        let is_stranger = route == UNKNOWN_ROUTE
            || matches!(code, ErrorCode::Unauthenticated | ErrorCode::RateLimited);
        match &stopping {
            Some(stopping) => drop(stopping.in_time(unread.drain(is_stranger)).await),
            None => unread.drain(is_stranger).await,
        }
        let id = id.to_str().unwrap_or_default();
        log(&refusal.error, id, method, route);
        let body = body_of(&refusal, id);
        response.headers_mut().remove(CONTENT_LENGTH);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        *response.body_mut() = Body::from(body);
    }
    if let Some(stopping) = stopping {
        response = stopping.bound(response);
    }
    if let Some(held) = response.extensions_mut().remove::<Arc<Held>>() {
        response = response.map(|body| with(body, held));
    }
    response.headers_mut().insert(REQUEST_ID, id);
    app.metrics.answered(method, route, response.status().as_u16(), began.elapsed());
    response
}

/// Counts a request until it is answered, or given up by its client.
struct UnderWay<'a>(&'a App);

impl<'a> UnderWay<'a> {
    fn begin(app: &'a App) -> Self {
        app.metrics.requests_under_way.inc();
        Self(app)
    }
}

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.metrics.requests_under_way.dec();
    }
}

/// The client's own, if it is one that can be logged as it is.
fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers.get(REQUEST_ID).filter(|value| {
        let bytes = value.as_bytes();
        (1..=LONGEST_REQUEST_ID).contains(&bytes.len())
            && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:/+=".contains(byte))
    });
    given.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&uuid::Uuid::new_v4().simple().to_string())
            .expect("hexadecimal digits fit into a header")
    })
}

/// Anyone can invent methods; metrics must not grow with them.
fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        _ => "OTHER",
    }
}

fn body_of(refusal: &Refusal, request_id: &str) -> Vec<u8> {
    let error = &refusal.error;
    let sentence = shortened(&error.message);
    let body = ErrorBody {
        error: sentence.clone(),
        code: error.code,
        detail: sentence,
        request_id: request_id.to_owned(),
    };
    let mut value = serde_json::to_value(body).unwrap_or_default();
    if let Value::Object(fields) = &mut value {
        fields.extend(refusal.more.clone());
    }
    value.to_string().into_bytes()
}

/// What a client sent may be a part of the sentence, and need not come back whole.
fn shortened(message: &str) -> String {
    match message.char_indices().nth(LONGEST_SENTENCE) {
        Some((end, _)) => format!("{}…", &message[..end]),
        None => message.to_owned(),
    }
}

fn log(error: &Error, request_id: &str, method: &str, route: &str) {
    let cause = error.causes();
    match error.code {
        ErrorCode::Internal => {
            tracing::error!(request_id, method, route, cause, "a request failed")
        }
        ErrorCode::Unavailable | ErrorCode::CapacityExceeded if !cause.is_empty() => {
            tracing::warn!(request_id, method, route, cause, "a request failed")
        }
        ErrorCode::InvalidRequest
        | ErrorCode::Unauthenticated
        | ErrorCode::Forbidden
        | ErrorCode::QuotaExceeded
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::Conflict
        | ErrorCode::Gone
        | ErrorCode::PreconditionFailed
        | ErrorCode::TooLarge
        | ErrorCode::RangeNotSatisfiable
        | ErrorCode::RateLimited
        | ErrorCode::BadGateway
        | ErrorCode::Unavailable
        | ErrorCode::TimedOut
        | ErrorCode::CapacityExceeded => {
            tracing::debug!(request_id, method, route, code = ?error.code, cause, "refused a request")
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<String>()
        .map(String::as_str)
        .or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_is_echoed_only_if_it_is_harmless() {
        let id = |value: &'static [u8]| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
            request_id(&headers)
        };
        assert_eq!(id(b"abc-1.2"), "abc-1.2");
        for bad in [&b""[..], b"with space", b"quote\"", b"\xff", &[b'x'; 129]] {
            assert_ne!(id(bad).as_bytes(), bad);
        }
    }
}
