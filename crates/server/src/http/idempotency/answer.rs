//! Answers that are kept, and those that cannot be.

use api::ErrorCode;
use axum::{
    body::{Body, HttpBody},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderName, HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::{super::edge::Refusal, Turn};
use crate::{Error, ticket::Ticket};

/// Bytes of one that is kept.
pub(super) const LONGEST: usize = 1 << 20;
const JSON: &str = "application/json";
const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// Pieces of an answer that its client has not taken yet.
const AHEAD: usize = 4;

/// In the extensions of an answer that is shown once.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct ShownOnce;

/// What decides whether an answer is kept.
#[derive(Debug, Clone, Copy)]
pub(super) struct Kind {
    /// A command may have begun.
    pub(super) runs: bool,
    /// Whatever it says.
    pub(super) forget: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Answer {
    Whole {
        status: u16,
        /// `None`: without content.
        json: Option<String>,
    },
    Refused {
        status: u16,
        code: ErrorCode,
        message: String,
        more: Map<String, Value>,
    },
    NotKept(Why),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Why {
    Stream,
    Secret,
    Long,
    Lost,
}

impl Answer {
    /// Of what may have been done by a server that ended before it could tell.
    pub(super) fn lost() -> Self {
        Self::NotKept(Why::Lost)
    }

    pub(super) fn text(&self) -> String {
        serde_json::to_string(self).expect("numbers, strings and maps of them are JSON")
    }

    /// # Errors
    /// The row is damaged.
    pub(super) fn replay(text: &str) -> Result<Response, Error> {
        let answer: Self = serde_json::from_str(text).map_err(Error::internal)?;
        let mut response = answer.into_response();
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        Ok(response)
    }

    fn of_refusal(status: StatusCode, refusal: &Refusal) -> Self {
        let (error, more) = refusal.parts();
        Self::Refused {
            status: status.as_u16(),
            code: error.code,
            message: error.message.clone(),
            more: more.clone(),
        }
    }
}

impl IntoResponse for Answer {
    fn into_response(self) -> Response {
        let status = |number| StatusCode::from_u16(number).unwrap_or(StatusCode::OK);
        match self {
            Self::Whole { status: number, json: None } => status(number).into_response(),
            Self::Whole { status: number, json: Some(json) } => {
                (status(number), [(CONTENT_TYPE, HeaderValue::from_static(JSON))], json)
                    .into_response()
            }
            Self::Refused { status: number, code, message, more } => {
                let mut response = Refusal::with(Error::new(code, message), more);
                *response.status_mut() = status(number);
                response
            }
            Self::NotKept(why) => Error::conflict(why.told()).into_response(),
        }
    }
}

impl Why {
    fn told(self) -> &'static str {
        match self {
            Self::Stream => {
                "this was done for the first request with this `Idempotency-Key`, and its stream is not kept; what commands printed is in GET /v1/sandboxes/{id}/logs"
            }
            Self::Secret => {
                "a key was made for the first request with this `Idempotency-Key`, and shown that once; list the keys, revoke that one and create another"
            }
            Self::Long => {
                "this was done for the first request with this `Idempotency-Key`, and its answer is too long to be kept"
            }
            Self::Lost => {
                "the first request with this `Idempotency-Key` was not seen to its end; what it asked for may or may not have been done, and is not done again"
            }
        }
    }
}

/// Whether a refusal means that nothing happened, so that the next request with the key is the first.
fn is_forgotten(error: &Error, kind: Kind) -> bool {
    match error.code {
        ErrorCode::RateLimited | ErrorCode::QuotaExceeded | ErrorCode::CapacityExceeded => true,
        // These words are said only while nothing can have begun.
        ErrorCode::Unavailable => {
            !kind.runs
                || error.retry_after.is_some()
                || error.message.contains("connection refused")
        }
        ErrorCode::Internal | ErrorCode::TimedOut => !kind.runs,
        ErrorCode::InvalidRequest
        | ErrorCode::Unauthenticated
        | ErrorCode::Forbidden
        | ErrorCode::NotFound
        | ErrorCode::MethodNotAllowed
        | ErrorCode::Conflict
        | ErrorCode::Gone
        | ErrorCode::PreconditionFailed
        | ErrorCode::TooLarge
        | ErrorCode::BadGateway
        | ErrorCode::RangeNotSatisfiable => false,
    }
}

/// The answer as it goes to the client. It is kept before that, or together with its last piece.
pub(super) async fn remember(
    turn: Turn,
    ticket: Ticket,
    response: Response,
    kind: Kind,
) -> Response {
    fault::point!("keyed.answer_keeping");
    let status = response.status();
    let refused = response.extensions().get::<Refusal>();
    let forget =
        kind.forget || refused.is_some_and(|refusal| is_forgotten(refusal.parts().0, kind));
    let answer = if forget {
        None
    } else if let Some(refusal) = refused {
        Some(Answer::of_refusal(status, refusal))
    } else if response.extensions().get::<ShownOnce>().is_some() {
        Some(Answer::NotKept(Why::Secret))
    } else if response.headers().get(CONTENT_TYPE).is_some_and(|kind| kind != JSON)
        && response.body().size_hint().exact() != Some(0)
    {
        Some(Answer::NotKept(Why::Stream))
    } else {
        return with_body(turn, ticket, response, kind).await;
    };
    keep(&turn, ticket, answer).await;
    response
}

/// Of JSON or without content. One that is still being written goes to its client as it comes.
async fn with_body(turn: Turn, ticket: Ticket, response: Response, kind: Kind) -> Response {
    let (head, body) = response.into_parts();
    let status = head.status.as_u16();
    let Some(length) = body.size_hint().exact() else {
        let (sender, pieces) = mpsc::channel(AHEAD);
        tokio::spawn(async move {
            if let Some(answer) = pass_on(body, status, &sender, kind).await {
                keep(&turn, ticket, Some(answer)).await;
            }
        });
        return Response::from_parts(head, Body::from_stream(ReceiverStream::new(pieces)));
    };
    if length > LONGEST as u64 {
        keep(&turn, ticket, Some(Answer::NotKept(Why::Long))).await;
        return Response::from_parts(head, body);
    }
    let bytes = match axum::body::to_bytes(body, LONGEST).await {
        Ok(bytes) => bytes,
        Err(error) => return Error::internal(error).into_response(),
    };
    keep(&turn, ticket, Some(whole(status, &bytes))).await;
    fault::point!("keyed.answer_kept");
    Response::from_parts(head, Body::from(bytes))
}

/// `None` where it breaks off and nothing can have run: the next with the key looks for what was made, as after a crash.
async fn pass_on(
    body: Body,
    status: u16,
    to: &mpsc::Sender<Result<Bytes, axum::Error>>,
    kind: Kind,
) -> Option<Answer> {
    let (mut pieces, mut all) = (body.into_data_stream(), Vec::new());
    let mut is_long = false;
    while let Some(piece) = pieces.next().await {
        let Ok(bytes) = &piece else {
            // Whoever has gone needs no end.
            let _ = to.send(piece).await;
            return kind.runs.then(Answer::lost);
        };
        is_long |= all.len() + bytes.len() > LONGEST;
        if !is_long {
            all.extend_from_slice(bytes);
        }
        let _ = to.send(piece).await;
    }
    Some(if is_long { Answer::NotKept(Why::Long) } else { whole(status, &all) })
}

/// Without the white space that kept its client waiting.
fn whole(status: u16, bytes: &[u8]) -> Answer {
    match std::str::from_utf8(bytes.trim_ascii()) {
        Ok("") => Answer::Whole { status, json: None },
        Ok(json) => Answer::Whole { status, json: Some(json.to_owned()) },
        Err(_) => Answer::NotKept(Why::Stream),
    }
}

/// `None`: as if it had never been asked. Where this cannot be written, the next request with the key looks for what
/// this one has made.
async fn keep(turn: &Turn, ticket: Ticket, answer: Option<Answer>) {
    let db = &turn.app.db;
    let kept = match answer.map(|answer| answer.text()) {
        None => db.forget_keyed(&ticket.row()).await,
        Some(text) if text.len() > 2 * LONGEST => {
            db.answer_keyed(&ticket.row(), &Answer::NotKept(Why::Long).text()).await
        }
        Some(text) => db.answer_keyed(&ticket.row(), &text).await,
    };
    if let Err(error) = kept {
        tracing::warn!(cause = error.causes(), "an answer cannot be kept");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAKES: Kind = Kind { runs: false, forget: false };
    const RUNS: Kind = Kind { runs: true, forget: false };

    #[test]
    fn what_did_nothing_is_forgotten_and_what_may_have_run_is_not() {
        for (code, retry, message, makes, runs) in [
            (ErrorCode::RateLimited, true, "", true, true),
            (ErrorCode::QuotaExceeded, false, "", true, true),
            (ErrorCode::CapacityExceeded, false, "", true, true),
            (ErrorCode::Unavailable, true, "", true, true),
            (ErrorCode::Unavailable, false, "connect: connection refused", true, true),
            (ErrorCode::Unavailable, false, "lost", true, false),
            (ErrorCode::Internal, false, "", true, false),
            (ErrorCode::TimedOut, false, "", true, false),
            (ErrorCode::NotFound, false, "", false, false),
            (ErrorCode::Conflict, false, "", false, false),
            (ErrorCode::InvalidRequest, false, "", false, false),
        ] {
            let mut error = Error::new(code, message);
            error.retry_after = retry.then(|| std::time::Duration::from_secs(1));
            assert_eq!(is_forgotten(&error, MAKES), makes, "{code:?} {message}");
            assert_eq!(is_forgotten(&error, RUNS), runs, "{code:?} {message}");
        }
    }

    #[tokio::test]
    async fn what_breaks_off_may_have_run_or_is_asked_for_anew() {
        for (kind, is_kept) in [(RUNS, true), (MAKES, false)] {
            let pieces = [Ok(Bytes::from_static(b" ")), Err(std::io::Error::other("lost"))];
            let body = Body::from_stream(futures::stream::iter(pieces));
            let (sender, mut received) = mpsc::channel(AHEAD);
            let answer = pass_on(body, 200, &sender, kind).await;
            assert_eq!(answer.is_some(), is_kept);
            assert!(received.recv().await.unwrap().is_ok());
            assert!(received.recv().await.unwrap().is_err());
        }
    }

    #[tokio::test]
    async fn an_answer_comes_back_as_it_went() {
        let text = whole(201, b"  {\"a\": \"\xc3\xa9\"} ").text();
        let response = Answer::replay(&text).unwrap();
        assert_eq!(
            (response.status(), response.headers()[REPLAYED].as_bytes()),
            (StatusCode::CREATED, &b"true"[..])
        );
        assert_eq!(
            axum::body::to_bytes(response.into_body(), 100).await.unwrap(),
            "{\"a\": \"é\"}"
        );
        let response = Answer::replay(&whole(204, b"").text()).unwrap();
        assert_eq!(
            (response.status(), response.headers().get(CONTENT_TYPE)),
            (StatusCode::NO_CONTENT, None)
        );
        let refused = Error::not_found("gone").into_response();
        let refused =
            Answer::of_refusal(StatusCode::NOT_FOUND, refused.extensions().get().unwrap());
        let response = Answer::replay(&refused.text()).unwrap();
        let refusal: &Refusal = response.extensions().get().unwrap();
        assert_eq!(
            (response.status(), refusal.parts().0.message.as_str()),
            (StatusCode::NOT_FOUND, "gone")
        );
    }
}
