//! `Idempotency-Key`: a POST that is sent again is done once, and answered as it was.

mod answer;
mod request;

use std::{
    collections::{HashMap, hash_map},
    sync::{Arc, Mutex},
    time::Duration,
};

use api::{AccountId, ErrorCode};
use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::Method;
use tokio::{sync::watch, time::Instant};
use uuid::Uuid;

pub(super) use self::answer::ShownOnce;
use self::{answer::Answer, request::Begun};
use crate::{
    App, Error, clock::Clock, db::Db, db::KeyedRow, keys::Caller, sandbox::locked, ticket::Ticket,
};

/// Milliseconds for which an answer is remembered.
const REMEMBERED: i64 = 86_400_000;
/// Between two looks at what is older.
const PRUNE: Duration = Duration::from_secs(300);
/// For the same request that is under way already; the published clients wait 30 s.
const PATIENCE: Duration = Duration::from_secs(25);
/// Answers that an account may have remembered, of at most [`answer::LONGEST`] bytes each.
const MOST_REMEMBERED: u64 = 100_000;

/// Routes on which a command may have begun, or a file may have been moved, when no answer comes: what they were asked for is
/// never done again. On all others a request that comes again finds what it has made, or changes nothing by being carried out twice.
pub(super) const UNREPEATABLE: [&str; 9] = [
    "/v1/sandboxes/{id}/exec",
    "/v1/sandboxes/{id}/exec/stream",
    "/v1/sandboxes/{id}/fs/export",
    "/v1/sandboxes/{id}/fs/move",
    "/v1/sandboxes/{id}/fs/uploads",
    "/v1/sandboxes/{id}/fs/uploads/{upload}/complete",
    "/v1/sandboxes/{id}/repl/sessions",
    "/v1/sandboxes/{id}/repl/sessions/{session_id}/run",
    "/v1/sandboxes/{id}/repl/sessions/{session_id}/run/stream",
];

/// Routes on which a command that has begun is found again by its id.
const FOUND: [&str; 1] = ["/v1/machines/{id}/execs"];

type Place = (AccountId, String);

/// Requests with a key that this server answers right now.
#[derive(Default)]
pub struct Idempotency {
    under_way: Mutex<HashMap<Place, UnderWay>>,
}

struct UnderWay {
    fingerprint: String,
    /// Closed at its end.
    over: watch::Receiver<()>,
}

/// Until it is dropped the same key waits.
struct Turn {
    app: Arc<App>,
    place: Place,
    _over: watch::Sender<()>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        locked(&self.app.idempotency.under_way).remove(&self.place);
    }
}

/// Goes between the look at a request's API key and its handler.
pub(super) async fn once(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    match request::key_in(request.headers()) {
        Ok(None) => next.run(request).await,
        Ok(Some(key)) => {
            answer_once(app, key, request, next).await.unwrap_or_else(IntoResponse::into_response)
        }
        Err(error) => error.into_response(),
    }
}

async fn answer_once(
    app: Arc<App>,
    key: String,
    request: Request,
    next: Next,
) -> Result<Response, Error> {
    let begun = Begun::read(request, &app.buffers).await?;
    // Goes on when the client has gone: it may ask again.
    tokio::spawn(answer_begun(app, key, begun, next)).await.map_err(Error::internal)?
}

async fn answer_begun(
    app: Arc<App>,
    key: String,
    Begun { mut request, fingerprint, is_whole, held }: Begun,
    next: Next,
) -> Result<Response, Error> {
    let mut caller =
        request.extensions().get::<Caller>().cloned().ok_or_else(crate::keys::unauthenticated)?;
    let path = request.extensions().get::<MatchedPath>();
    let path = path.map_or("", MatchedPath::as_str);
    let (is_lost, runs) =
        (UNREPEATABLE.contains(&path), UNREPEATABLE.contains(&path) || FOUND.contains(&path));
    let turn = Turn::take(&app, (caller.account.clone(), key), &fingerprint).await?;
    let now = app.clock.steady_ms();
    let (account, key) = &turn.place;
    let known = match app.db.keyed(account, key).await? {
        Some(row) if is_old(&row, now) => {
            app.db.forget_keyed(&row.id).await?;
            None
        }
        known => known,
    };
    let ticket = match known {
        Some(row) if row.fingerprint != fingerprint => return Err(other_request()),
        Some(KeyedRow { answer: Some(answer), .. }) => return Answer::replay(&answer),
        // Of a server that is gone.
        Some(row) if is_lost => {
            let answer = Answer::lost();
            app.db.answer_keyed(&row.id, &answer.text()).await?;
            return Ok(answer.into_response());
        }
        Some(row) => Ticket::new(row.id, true),
        None => {
            if app.db.count_keyed(account).await? >= MOST_REMEMBERED {
                return Err(too_many());
            }
            let row = KeyedRow { id: Uuid::new_v4(), fingerprint, begun_at: now, answer: None };
            fault::point!("keyed.row_inserting", Error::internal);
            app.db.insert_keyed(account, key, &row).await?;
            fault::point!("keyed.row_inserted");
            Ticket::new(row.id, false)
        }
    };
    caller.ticket = Some(ticket);
    request.extensions_mut().insert(caller);
    let response = next.run(request).await;
    drop(held);
    let forget = !is_whole && !response.status().is_success();
    Ok(answer::remember(turn, ticket, response, answer::Kind { runs, forget }).await)
}

impl Turn {
    /// # Errors
    /// 409 for another request, 503 when the first one takes long.
    async fn take(app: &Arc<App>, place: Place, fingerprint: &str) -> Result<Self, Error> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut first = match locked(&app.idempotency.under_way).entry(place.clone()) {
                hash_map::Entry::Vacant(vacant) => {
                    let (sender, over) = watch::channel(());
                    vacant.insert(UnderWay { fingerprint: fingerprint.to_owned(), over });
                    return Ok(Self { app: Arc::clone(app), place, _over: sender });
                }
                hash_map::Entry::Occupied(first) if first.get().fingerprint != fingerprint => {
                    return Err(other_request());
                }
                hash_map::Entry::Occupied(first) => first.get().over.clone(),
            };
            // Nothing is ever sent: it ends with its sender.
            let over = tokio::time::timeout_at(deadline, first.changed()).await;
            if over.is_err() {
                return Err(Error::busy(
                    "the first request with this `Idempotency-Key` is still under way; send it again to hear how it ends",
                    2,
                ));
            }
        }
    }
}

fn is_old(row: &KeyedRow, now: i64) -> bool {
    row.begun_at < now - REMEMBERED || row.begun_at > now + REMEMBERED
}

fn other_request() -> Error {
    Error::conflict(
        "this `Idempotency-Key` was sent with another request (route or body) within the last 24 hours; use a new one for each",
    )
}

fn too_many() -> Error {
    Error {
        retry_after: Some(PRUNE),
        ..Error::new(
            ErrorCode::RateLimited,
            "more requests with an `Idempotency-Key` than are remembered for a day; leave it out where it is not needed",
        )
    }
}

/// Forgets what is older than a day, until it is dropped. A time of the future is one of a clock that was wrong.
pub(crate) async fn prune(db: Db, clock: Clock) {
    loop {
        let now = clock.steady_ms();
        match db.forget_keyed_outside(now - REMEMBERED, now + REMEMBERED).await {
            Ok(0) => {}
            Ok(count) => tracing::debug!(count, "forgot answers of requests with a key"),
            Err(error) => tracing::warn!(cause = error.causes(), "old answers cannot be forgotten"),
        }
        tokio::time::sleep(PRUNE).await;
    }
}
