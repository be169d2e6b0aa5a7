//! The listener and its connections, and the routes about the server itself.

use std::{
    convert::Infallible,
    future::Future,
    pin::pin,
    sync::{Arc, OnceLock},
    time::Duration,
};

use api::ErrorCode;
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
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Semaphore,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower::Service;
use utoipa::ToSchema;

use super::{
    body::ok,
    held::with,
    proxy::{self, Named, Over},
    stopping::Stopping,
    upgrades::Upgrades,
};
use crate::{
    App,
    metrics::{Figure, Figures},
};

/// For the head of a request, and between two on one connection.
const HEAD_DEADLINE: Duration = Duration::from_secs(30);
/// For answers under way when the server is asked to stop; those without an end of their own break off at once.
const DRAIN_DEADLINE: Duration = Duration::from_secs(1);
/// Connections beyond the limit that are told so at once.
const REFUSALS: usize = 64;
const REFUSE_DEADLINE: Duration = Duration::from_secs(1);
/// Bytes of a request that is refused unread.
const MOST_REFUSED: u64 = 64 << 10;
/// When no more descriptors can be had, one may be free again after so long.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Answers requests until `shutdown` resolves, then ends those under way.
pub async fn serve(app: Arc<App>, listener: TcpListener, shutdown: impl Future<Output = ()>) {
    let routers =
        Routers { api: super::router(&app), ports: proxy::hosts(&app), app: Arc::clone(&app) };
    let (connections, stop) = (TaskTracker::new(), CancellationToken::new());
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    let mut shutdown = pin!(shutdown);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut shutdown => break,
        };
        match accepted {
            Ok((stream, peer)) => match app.connections.enter(peer.ip().to_canonical()) {
                Some(place) => {
                    let place = Arc::new(place);
                    let over = Over { place, peer: peer.ip().to_canonical() };
                    let upgrades = Upgrades::new(&over.place, stop.clone(), connections.clone());
                    let connection = serve_connection(routers.clone(), stream, over, upgrades);
                    connections.spawn(connection);
                }
                // Beyond those that are being told so, the connection is simply closed.
                None => {
                    if let Ok(turn) = Arc::clone(&refusals).try_acquire_owned() {
                        connections.spawn(async move {
                            refuse(stream).await;
                            drop(turn);
                        });
                    }
                }
            },
            Err(error) => {
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

/// Every place is taken by a request that is being answered. Nothing of this one counts.
async fn refuse(mut stream: TcpStream) {
    let error = "the server answers as many requests as it can; try again shortly";
    let body = serde_json::json!({
        "error": error, "code": ErrorCode::Unavailable, "detail": error, "request_id": "",
    })
    .to_string();
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n\
         content-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    );
    let told = async {
        // Clients take an answer that comes before their request for none.
        if stream.read(&mut [0; 4096]).await? == 0 {
            return Ok(0);
        }
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await?;
        // Closed with its request unread, the connection would break before the client has read the answer.
        tokio::io::copy(&mut stream.take(MOST_REFUSED), &mut tokio::io::sink()).await
    };
    // Fails where the client has gone.
    let _ = tokio::time::timeout(REFUSE_DEADLINE, told).await;
}

/// By the host that a request names, it is for the API or for a port of a sandbox: neither is reached at the other's.
#[derive(Clone)]
struct Routers {
    app: Arc<App>,
    api: Router,
    ports: Router,
}

impl Routers {
    fn of<B>(&self, request: &Request<B>) -> Router {
        match proxy::named(&self.app.config.previews, request.uri(), request.headers()) {
            Named::Api => self.api.clone(),
            Named::Port(..) | Named::Nothing => self.ports.clone(),
        }
    }
}

async fn serve_connection(routers: Routers, stream: TcpStream, over: Over, upgrades: Upgrades) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "a connection is already gone");
    }
    let (place, stop) = (Arc::clone(&over.place), upgrades.stop().clone());
    let service = {
        let stopping = stop.clone();
        service_fn(move |mut request: Request<Incoming>| {
            let (mut router, busy) = (routers.of(&request), over.place.busy());
            request.extensions_mut().insert(over.clone());
            request.extensions_mut().insert(Stopping(stopping.clone()));
            request.extensions_mut().insert(upgrades.clone());
            async move {
                let response = router.call(request.map(Body::new)).await;
                let response = response.unwrap_or_else(|never| match never {});
                Ok::<Response, Infallible>(response.map(|body| with(body, busy)))
            }
        })
    };
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let outcome = tokio::select! {
        outcome = &mut connection => outcome,
        // The head of a request may have come at this very moment.
        () = place.closed.cancelled() => if place.is_busy() {
            connection.as_mut().graceful_shutdown();
            connection.await
        } else {
            Ok(())
        },
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
        capacity: app.sandboxes.capacity_figures().into_iter().chain(own_figures(&app)).collect(),
        traffic: app.sandboxes.traffic(),
        databases: app.databases.count_by_status(),
    });
    ([(CONTENT_TYPE, HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8"))], text)
}

/// What the server itself has in use, and may have.
fn own_figures(app: &App) -> Vec<Figure> {
    let figure = |name, help, value| Figure { name, help, value };
    let (connections, backups) = (&app.connections, app.databases.backup_figures());
    // Without any, there is no such time.
    let oldest = backups.oldest_last.map(|seconds| {
        let help = "When the database was last backed up that has waited longest since, in seconds since 1970.";
        figure("database_oldest_backup_timestamp_seconds", help, seconds)
    });
    let figures = [
        figure(
            "database_backup_failures",
            "Failures to back up a database since the start.",
            backups.failures,
        ),
        figure(
            "databases_failing_backup",
            "Databases of which nothing reaches the store of the backups at present.",
            backups.failing as u64,
        ),
        figure(
            "databases_without_backup",
            "Databases of which there is no base backup yet.",
            backups.without as u64,
        ),
        figure("database_connections", "Connections to databases.", app.databases.connections()),
        figure(
            "database_disk_bytes",
            "What the disks of databases take of the pool.",
            app.databases.disk_bytes(),
        ),
        figure("connections", "Connections of clients.", connections.count() as u64),
        figure("connections_limit", "Connections that there may be.", connections.most() as u64),
        figure(
            "buffer_bytes",
            "Memory of requests and answers that are held whole.",
            app.buffers.used(),
        ),
        figure("buffer_limit_bytes", "What those may have together.", app.buffers.total()),
    ];
    figures.into_iter().chain(oldest).collect()
}
