//! One request to a server in the guest, over a connection of its own.

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use api::ErrorCode;
use axum::{
    body::Body,
    extract::Request,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::{StatusCode, Version};
use hyper::{
    body::{Body as HttpBody, Frame, Incoming, SizeHint},
    client::conn::http1,
    upgrade::OnUpgrade,
};
use hyper_util::rt::TokioIo;
use tokio::{task::AbortHandle, time::Instant};

use super::{Visit, headers, over, tunnel};
use crate::{
    App, Error,
    http::{
        held::with,
        stopping::{Lasting, Stopping},
    },
    sandbox::{Connection, locked},
};

/// Ends the connection to the guest, unless it has ended.
struct Connected(AbortHandle);

impl Drop for Connected {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub(super) async fn forward(
    app: &Arc<App>,
    visit: Visit,
    mut request: Request,
) -> Result<Response, Error> {
    let ports = app.sandboxes.ports(&visit.account, &visit.sandbox).await?;
    let explain = |error| app.sandboxes.explain(&visit.account, &visit.sandbox, error);
    let connection = ports.connect(visit.port).await.map_err(explain)?;
    let over = over(&request);
    let stopping = request.extensions().get::<Stopping>().cloned();
    let websocket = headers::wants_websocket(request.headers());
    let client = websocket.then(|| request.extensions_mut().remove::<OnUpgrade>()).flatten();

    let limit = app.config.previews.answer_deadline;
    let mut answered = send(&visit, request, connection, limit, over.as_ref()).await?;
    let switches = answered.head.status() == StatusCode::SWITCHING_PROTOCOLS;
    let mut response = match (switches, client) {
        (false, _) => {
            let (head, body) = answered.head.into_parts();
            let body = with(Body::new(body), answered.connected);
            let mut response = Response::from_parts(head, body);
            response.extensions_mut().clear();
            response.extensions_mut().insert(Lasting::BreakOff);
            response
        }
        (true, Some(client)) => {
            let guest = hyper::upgrade::on(&mut answered.head);
            tokio::spawn(tunnel::run(client, guest, stopping, over, answered.connected));
            let mut response = (StatusCode::SWITCHING_PROTOCOLS, Body::empty()).into_response();
            *response.headers_mut() = answered.head.headers().clone();
            response
        }
        (true, None) => {
            return Err(bad_answer(&visit, "it changed to another protocol unasked"));
        }
    };
    headers::outward(response.headers_mut(), &visit, switches);
    *response.version_mut() = Version::HTTP_11;
    Ok(response)
}

struct Answered {
    head: http::Response<Incoming>,
    connected: Connected,
}

async fn send(
    visit: &Visit,
    request: Request,
    connection: Connection,
    limit: Duration,
    over: Option<&super::Over>,
) -> Result<Answered, Error> {
    let broken = |error: hyper::Error| {
        let how = if error.is_parse() { "it was not HTTP" } else { "the connection broke off" };
        bad_answer(visit, how).because(error)
    };
    let (mut sender, carrying) =
        http1::handshake(TokioIo::new(connection)).await.map_err(broken)?;
    let carrying = tokio::spawn(async move {
        if let Err(error) = carrying.with_upgrades().await {
            tracing::debug!(%error, "a connection to a port broke off");
        }
    });
    let connected = Connected(carrying.abort_handle());

    let (mut head, body) = request.into_parts();
    headers::inward(&mut head.headers, visit, &head.uri, over.map(|over| over.peer));
    head.version = Version::HTTP_11;
    head.extensions.clear();
    head.uri = head
        .uri
        .path_and_query()
        .map_or_else(|| http::Uri::from_static("/"), |path| http::Uri::from(path.clone()));
    let progress = Arc::new(Mutex::new(Instant::now()));
    let body = Watched { body, progress: Arc::clone(&progress) };
    let answer = sender.send_request(http::Request::from_parts(head, body));
    tokio::pin!(answer);
    loop {
        // What is still being sent is not waited for.
        let due = *locked(&progress) + limit;
        tokio::select! {
            answer = &mut answer => {
                return Ok(Answered { head: answer.map_err(broken)?, connected });
            }
            () = tokio::time::sleep_until(due) => {
                if *locked(&progress) + limit <= Instant::now() {
                    let message = format!(
                        "what listens on port {} in this sandbox did not answer within {} seconds",
                        visit.port,
                        limit.as_secs()
                    );
                    return Err(Error::new(ErrorCode::TimedOut, message));
                }
            }
        }
    }
}

/// The request may have been carried out, so the words are none on which clients send it again.
fn bad_answer(visit: &Visit, how: &str) -> Error {
    let message =
        format!("what listens on port {} in this sandbox gave no answer: {how}", visit.port);
    Error::new(ErrorCode::BadGateway, message)
}

/// A request's body, and when something of it was last taken.
struct Watched {
    body: Body,
    progress: Arc<Mutex<Instant>>,
}

impl HttpBody for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let next = Pin::new(&mut self.body).poll_frame(context);
        *locked(&self.progress) = Instant::now();
        next
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
