//! What becomes of requests under way when the server is asked to stop: it must not wait for those that last.

use std::{future::Future, time::Duration};

use api::ErrorCode;
use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::StreamExt;
use tokio_util::sync::CancellationToken;

use crate::Error;

/// Most requests are answered within this.
const GRACE: Duration = Duration::from_millis(500);

/// In the extensions of each request: cancelled when the server is asked to stop.
#[derive(Clone)]
pub(super) struct Stopping(pub(super) CancellationToken);

/// In the extensions of an answer that may last: how it ends when the server does.
#[derive(Clone)]
pub(super) enum Lasting {
    /// With these last words.
    Say(Bytes),
    /// So that nobody takes what there is for a whole answer.
    BreakOff,
}

#[derive(Debug, thiserror::Error)]
#[error("the server is being stopped")]
struct BrokenOff;

impl Stopping {
    /// The answer, unless the server stops before there is one. The request may have been carried out by then, so it is
    /// refused without the words and headers on which clients send it again.
    pub(super) async fn answer(
        &self,
        answer: impl Future<Output = Response>,
    ) -> Result<Response, Error> {
        self.within(GRACE, answer).await.ok_or_else(|| {
            Error::new(
                ErrorCode::Unavailable,
                "the server is being stopped; what was asked for may or may not have been done",
            )
        })
    }

    /// The outcome of what a handler does, or `None` when the server stops first. Before [`Stopping::answer`] gives up, so
    /// that a handler that knows more than it can say so.
    pub(super) async fn in_time<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        self.within(GRACE / 2, work).await
    }

    async fn within<T>(&self, grace: Duration, work: impl Future<Output = T>) -> Option<T> {
        let over = async {
            self.0.cancelled().await;
            tokio::time::sleep(grace).await;
        };
        tokio::select! {
            biased;
            outcome = work => Some(outcome),
            () = over => None,
        }
    }

    /// Ends a lasting answer with the server.
    pub(super) fn bound(self, response: Response) -> Response {
        let Some(lasting) = response.extensions().get::<Lasting>().cloned() else {
            return response;
        };
        let (head, body) = response.into_parts();
        let last = match lasting {
            Lasting::Say(words) => Ok(words),
            Lasting::BreakOff => Err(axum::Error::new(BrokenOff)),
        };
        let parts = Some((body.into_data_stream(), self.0, last));
        let body = futures::stream::unfold(parts, |parts| async move {
            let (mut body, stop, last) = parts?;
            // A stream that never pauses ends, too.
            let next = tokio::select! {
                biased;
                () = stop.cancelled() => return Some((last, None)),
                next = body.next() => next?,
            };
            Some((next, Some((body, stop, last))))
        });
        Response::from_parts(head, Body::from_stream(body))
    }
}

#[cfg(test)]
mod tests {
    use axum::response::IntoResponse;

    use super::*;

    fn lasting(lasting: Lasting) -> Response {
        let pieces = futures::stream::iter([Ok::<_, std::io::Error>("first ")])
            .chain(futures::stream::pending());
        (axum::Extension(lasting), Body::from_stream(pieces)).into_response()
    }

    async fn stopped(response: Response) -> Result<Bytes, axum::Error> {
        let stop = CancellationToken::new();
        let bound = Stopping(stop.clone()).bound(response);
        let reading = tokio::spawn(axum::body::to_bytes(bound.into_body(), usize::MAX));
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(!reading.is_finished());
        stop.cancel();
        reading.await.unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_of_events_ends_with_its_last_words() {
        let last = Lasting::Say(Bytes::from_static(b"last"));
        assert_eq!(stopped(lasting(last)).await.unwrap(), "first last");
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_without_a_result_breaks_off() {
        assert!(stopped(lasting(Lasting::BreakOff)).await.is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_ends_by_itself_has_no_other_last_words() {
        let last = axum::Extension(Lasting::Say(Bytes::from_static(b"last")));
        let response = (last, "all").into_response();
        let bound = Stopping(CancellationToken::new()).bound(response);
        assert_eq!(axum::body::to_bytes(bound.into_body(), 100).await.unwrap(), "all");
    }

    #[tokio::test(start_paused = true)]
    async fn a_handler_hears_of_the_stop_before_its_request_is_given_up() {
        let stop = CancellationToken::new();
        let stopping = Stopping(stop.clone());
        assert_eq!(stopping.in_time(async { 7 }).await, Some(7));
        stop.cancel();
        let soon = tokio::time::sleep(GRACE / 4);
        assert_eq!(stopping.in_time(soon).await, Some(()));
        let handler = async {
            let outcome = stopping.in_time(std::future::pending::<()>()).await;
            assert_eq!(outcome, None);
            "more".into_response()
        };
        assert!(stopping.answer(handler).await.is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_lasts_is_refused_in_words_that_nobody_repeats_it_for() {
        let stop = CancellationToken::new();
        stop.cancel();
        let stopping = Stopping(stop);
        let soon = async {
            tokio::time::sleep(GRACE / 2).await;
            "done".into_response()
        };
        assert!(stopping.answer(soon).await.is_ok());
        let refused = stopping.answer(std::future::pending()).await.unwrap_err();
        assert_eq!((refused.code, refused.retry_after), (ErrorCode::Unavailable, None));
        for words in ["connection refused", "no route to host", "timeout", "deadline exceeded"] {
            assert!(!refused.message.contains(words));
        }
    }
}
