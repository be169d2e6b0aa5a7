//! The listener and its connections, and the routes about the server itself.

use std::{
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use http::{HeaderValue, header::CONTENT_TYPE};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use serde::Serialize;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service;
use utoipa::ToSchema;

use super::body::ok;
use crate::{App, metrics::Figures};

const MOST_CONNECTIONS: usize = 4096;
/// For the head of a request, and between two on one connection.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// For requests under way when the server is asked to stop.
const DRAIN_DEADLINE: Duration = Duration::from_secs(3);
/// When no more descriptors can be had, one may be free again after so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until `shutdown` resolves, then ends those under way.
pub async fn serve(app: Arc<App>, listener: TcpListener, shutdown: impl Future<Output = ()>) {
    let router = super::router(&app);
    let (connections, stop) = (TaskTracker::new(), CancellationToken::new());
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut shutdown = pin!(shutdown);
    loop {
        let next = async {
            let place = Arc::clone(&places).acquire_owned().await;
            (place, listener.accept().await)
        };
        let accepted = tokio::select! {
            accepted = next => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            (place, Ok((stream, _))) => {
                let connection = serve_connection(router.clone(), stream, stop.clone());
                connections.spawn(async move {
                    connection.await;
                    drop(place);
                });
            }
            (_, Err(error)) => {
                tracing::warn!(%error, "a connection cannot be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    stop.cancel();
    connections.close();
    connections.wait().await;
}

async fn serve_connection(router: Router, stream: TcpStream, stop: CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection is already gone");
    }
    let service = service_fn(move |request: Request<Incoming>| {
        let mut router = router.clone();
        async move {
            Ok::<Response, Infallible>(
                router.call(request.map(Body::new)).await.unwrap_or_else(|never| match never {}),
            )
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = &mut connection => outcome,
        () = stop.cancelled() => {
            connection.as_mut().graceful_shutdown();
            tokio::time::timeout(DRAIN_DEADLINE, connection).await.unwrap_or(Ok(()))
        }
    };
    if let Err(error) = outcome {
        // Mostly clients that went away.
        tracing::debug!(%error, "a connection broke off");
    }
}

#[derive(Serialize, ToSchema)]
pub(super) struct Health {
    /// `ok`.
    status: &'static str,
}

/// That the server answers.
#[utoipa::path(get, path = "/healthz", tag = "server", responses((status = 200, body = Health)))]
pub(super) async fn healthz() -> impl IntoResponse {
    ok(Health { status: "ok" })
}

#[derive(Serialize, ToSchema)]
pub(super) struct Version {
    name: &'static str,
    version: &'static str,
}

/// Which server it is.
#[utoipa::path(get, path = "/version", tag = "server", responses((status = 200, body = Version)))]
pub(super) async fn version() -> impl IntoResponse {
    ok(Version { name: "atoll", version: env!("CARGO_PKG_VERSION") })
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", tag = "server", responses((status = 200, description = "OpenAPI 3.1")))]
pub(super) async fn openapi_json() -> impl IntoResponse {
    static DOCUMENT: OnceLock<Vec<u8>> = OnceLock::new();
    let document =
        DOCUMENT.get_or_init(|| serde_json::to_vec(&super::openapi()).unwrap_or_default());
    ([(CONTENT_TYPE, HeaderValue::from_static("application/json"))], document.as_slice())
}

/// Figures for Prometheus.
#[utoipa::path(get, path = "/metrics", tag = "server", responses((status = 200, body = String, content_type = "text/plain")))]
pub(super) async fn metrics(State(app): State<Arc<App>>) -> impl IntoResponse {
    let text = app.metrics.text(&Figures {
        sandboxes: app.sandboxes.count_by_status(),
        machines_ready: app.sandboxes.ready_machines(),
        refused_creates: app.sandboxes.refused_creates(),
        capacity: app.sandboxes.capacity_figures(),
        traffic: app.sandboxes.traffic(),
    });
    ([(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"))], text)
}
