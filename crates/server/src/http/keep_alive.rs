//! Answers that take long. The published clients wait 30 s for a byte, and are given one in time.

use std::time::Duration;

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{FutureExt, StreamExt};
use http::{HeaderValue, StatusCode, header::CONTENT_TYPE};
use serde::Serialize;

use super::{body::Output, stopping::Lasting};
use crate::Error;

/// After so long there is a byte, and then one in each interval.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(15);
const KEEP_ALIVE: Duration = Duration::from_secs(5);
/// As late as it may be: what has no room, or waits 25 s for its turn, is refused by then, with a status on which clients send
/// it again.
const RESOURCE_KEEP_ALIVE_AFTER: Duration = Duration::from_secs(28);

/// What `answer` makes of the result where that comes soon. Once the answer has begun it has its status, so `late` makes of
/// the outcome what there is to tell in the body, with something that is held until it was taken.
pub(super) async fn answered<Outcome, Told, Held>(
    result: impl Future<Output = Result<Outcome, Error>> + Send + 'static,
    answer: impl FnOnce(Outcome) -> Response,
    late: impl FnOnce(Result<Outcome, Error>) -> Result<(Told, Held), Error> + Send + 'static,
) -> Result<Response, Error>
where
    Outcome: 'static,
    Told: Serialize + 'static,
    Held: Send + 'static,
{
    answered_after(KEEP_ALIVE_AFTER, result, answer, late).await
}

/// With this status where it comes soon; what is refused later breaks off. It goes on to its end when its client has gone.
pub(super) async fn resource<T: Serialize + 'static>(
    status: StatusCode,
    result: impl Future<Output = Result<T, Error>> + Send + 'static,
) -> Result<Response, Error> {
    let answer = |told| Output(status, told).into_response();
    let late = |outcome: Result<T, Error>| outcome.map(|told| (told, ()));
    answered_after(RESOURCE_KEEP_ALIVE_AFTER, result, answer, late).await
}

async fn answered_after<Outcome, Told, Held>(
    after: Duration,
    result: impl Future<Output = Result<Outcome, Error>> + Send + 'static,
    answer: impl FnOnce(Outcome) -> Response,
    late: impl FnOnce(Result<Outcome, Error>) -> Result<(Told, Held), Error> + Send + 'static,
) -> Result<Response, Error>
where
    Outcome: 'static,
    Told: Serialize + 'static,
    Held: Send + 'static,
{
    let mut result = Box::pin(result);
    match tokio::time::timeout(after, &mut result).await {
        Ok(result) => result.map(answer),
        Err(_) => Ok(kept_alive(result.map(late))),
    }
}

/// 200 and white space now, the rest when it is there. Where there will be no result the answer breaks off: the client must
/// not take anything else for one.
fn kept_alive<Told, Held>(
    result: impl Future<Output = Result<(Told, Held), Error>> + Send + Unpin + 'static,
) -> Response
where
    Told: Serialize + 'static,
    Held: Send + 'static,
{
    /// What remains to be done.
    enum Rest<Waiting, Held> {
        Wait(Waiting),
        /// Until the result was taken.
        Hold(Held),
        Nothing,
    }
    let pieces = futures::stream::unfold(Rest::Wait(result), |rest| async move {
        let Rest::Wait(mut result) = rest else { return None };
        Some(match tokio::time::timeout(KEEP_ALIVE, &mut result).await {
            Err(_) => (Ok(Bytes::from_static(b" ")), Rest::Wait(result)),
            Ok(Ok((told, held))) => {
                let json = serde_json::to_vec(&told).map(Bytes::from).map_err(Error::internal);
                (json, Rest::Hold(held))
            }
            Ok(Err(error)) => {
                tracing::warn!(%error, cause = error.causes(), "a result was lost after its answer had begun");
                (Err(error), Rest::Nothing)
            }
        })
    });
    let first = futures::stream::iter([Ok(Bytes::from_static(b" "))]);
    let headers = [(CONTENT_TYPE, HeaderValue::from_static("application/json"))];
    let lasting = axum::Extension(Lasting::BreakOff);
    (headers, lasting, Body::from_stream(first.chain(pieces))).into_response()
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use super::*;

    async fn told_after(seconds: u64, outcome: Result<u8, Error>) -> Response {
        let result = async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            outcome
        };
        let answer = |number| format!("soon {number}").into_response();
        answered(result, answer, |outcome| Ok((outcome?, ()))).await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn what_comes_soon_is_answered_as_it_is() {
        let body = told_after(14, Ok(7)).await.into_body();
        assert_eq!(axum::body::to_bytes(body, usize::MAX).await.unwrap(), "soon 7");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_takes_long_is_kept_alive_by_white_space() {
        let response = told_after(15 + 22, Ok(7)).await;
        assert_eq!(response.status(), 200);
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!(body, format!("{}7", " ".repeat(1 + 22 / 5)));
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_without_a_result_breaks_off() {
        let lost = Err(machine::Error::Lost.into());
        let body = told_after(15 + 7, lost).await.into_body();
        assert!(axum::body::to_bytes(body, usize::MAX).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_resource_has_its_status_or_is_kept_alive_before_a_client_gives_up() {
        let made_after = async |seconds| {
            let made = async move {
                tokio::time::sleep(Duration::from_secs(seconds)).await;
                Ok(7)
            };
            let response = resource(StatusCode::CREATED, made).await.unwrap();
            let status = response.status().as_u16();
            let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
            (status, String::from_utf8(body.to_vec()).unwrap())
        };
        assert_eq!(made_after(27).await, (201, "7".to_owned()));
        assert_eq!(made_after(29).await, (200, " 7".to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_lost_soon_is_refused() {
        let lost = async { Err::<u8, _>(machine::Error::Lost.into()) };
        let late = |outcome: Result<u8, Error>| outcome.map(|number| (number, ()));
        let refused = answered(lost, |_| ().into_response(), late).await;
        assert!(refused.is_err());
        let endless = answered(pending(), |_| ().into_response(), late).await;
        assert_eq!(endless.unwrap().status(), 200);
    }
}
