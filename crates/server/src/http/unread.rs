//! What is left of the body of a request that is refused. A client that still sends when the answer comes may see a broken
//! connection instead of it, so the rest is read and thrown away first.

use std::{
    mem::take,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use futures::StreamExt;
use hyper::body::{Body as HttpBody, Frame, SizeHint};

/// Beyond that the connection is closed on the client.
const MOST_DRAINED: usize = 64 << 20;
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);
/// Of somebody whom nobody knows: it takes a connection's place meanwhile.
const STRANGERS_DEADLINE: Duration = Duration::from_secs(10);
/// A client that sends nothing for so long is not in the middle of sending.
const DRAIN_PAUSE: Duration = Duration::from_secs(3);

/// Whatever is dropped of a body before its end.
pub(super) struct Unread(Arc<Mutex<Option<Body>>>);

impl Unread {
    /// Of a body, and the same body for who handles the request. `waits`: the client expects to be told to go on (RFC 9110,
    /// 10.1.1).
    pub(super) fn of(body: Body, waits: bool) -> (Self, Body) {
        let rest = Arc::new(Mutex::new(None));
        let lent = Lent { body, is_begun: !waits, rest: Arc::clone(&rest) };
        (Self(rest), Body::new(lent))
    }

    /// Takes the rest, within limits: before a refusal is sent.
    pub(super) async fn drain(self, of_stranger: bool) {
        let deadline = if of_stranger { STRANGERS_DEADLINE } else { DRAIN_DEADLINE };
        let rest = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(rest) = rest else { return };
        let mut pieces = rest.into_data_stream();
        let mut bytes = 0;
        let draining = async {
            while bytes < MOST_DRAINED
                && let Ok(Some(Ok(piece))) = tokio::time::timeout(DRAIN_PAUSE, pieces.next()).await
            {
                bytes += piece.len();
            }
        };
        // Whoever sends slowly has seen that nobody reads.
        let _ = tokio::time::timeout(deadline, draining).await;
    }
}

/// A body that is given back where it is not read to its end.
struct Lent {
    body: Body,
    /// The client sends it.
    is_begun: bool,
    rest: Arc<Mutex<Option<Body>>>,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if self.is_begun && !self.body.is_end_stream() {
            let mut rest = self.rest.lock().unwrap_or_else(PoisonError::into_inner);
            *rest = Some(take(&mut self.body));
        }
    }
}

impl HttpBody for Lent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        self.is_begun = true;
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const PIECE: usize = 1 << 20;

    /// How many pieces are taken of a body when so many were read before it was refused.
    async fn taken(read: usize, waits: bool) -> usize {
        let count = Arc::new(AtomicUsize::new(0));
        let counting = Arc::clone(&count);
        let pieces = futures::stream::repeat_with(move || {
            counting.fetch_add(1, Ordering::Relaxed);
            Ok::<_, std::io::Error>(Bytes::from(vec![0; PIECE]))
        });
        let (unread, body) = Unread::of(Body::from_stream(pieces), waits);
        let mut body = body.into_data_stream();
        for _ in 0..read {
            body.next().await.unwrap().unwrap();
        }
        drop(body);
        unread.drain(false).await;
        count.load(Ordering::Relaxed)
    }

    #[tokio::test]
    async fn the_rest_of_a_body_is_read_up_to_a_limit() {
        for read in [0, 3] {
            assert_eq!(taken(read, false).await, read + MOST_DRAINED / PIECE);
        }
    }

    #[tokio::test]
    async fn a_client_that_waits_to_be_told_to_go_on_sends_nothing_for_nothing() {
        assert_eq!(taken(0, true).await, 0);
        assert_eq!(taken(1, true).await, 1 + MOST_DRAINED / PIECE);
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_waits_long_for_a_client_that_sends_no_more() {
        let (unread, body) = Unread::of(Body::from_stream(stalled()), false);
        drop(body);
        tokio::time::timeout(2 * DRAIN_PAUSE, unread.drain(false)).await.unwrap();
    }

    fn stalled() -> impl futures::Stream<Item = std::io::Result<Bytes>> {
        futures::stream::iter([Ok(Bytes::from_static(b"x"))]).chain(futures::stream::pending())
    }
}
