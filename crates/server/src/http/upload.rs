//! A request's body on its way into a sandbox, and what is done with the rest of one that was refused.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, BodyDataStream};
use bytes::Bytes;
use futures::{Stream, StreamExt};

/// A client that still sends when the answer comes may see a broken connection instead of it. So much is read and
/// thrown away first.
const MOST_DRAINED: u64 = 64 << 20;
const DRAIN_DEADLINE: Duration = Duration::from_secs(60);
/// A client that sends nothing for so long is not in the middle of sending.
const DRAIN_PAUSE: Duration = Duration::from_secs(3);

pub(super) struct Upload {
    body: BodyDataStream,
    bytes: u64,
}

impl Upload {
    pub(super) fn new(body: Body) -> Self {
        Self { body: body.into_data_stream(), bytes: 0 }
    }

    /// Takes the rest, within limits: before a refusal is sent.
    pub(super) async fn drain(&mut self) {
        let rest = async {
            while self.bytes < MOST_DRAINED
                && let Ok(Some(Ok(_))) = tokio::time::timeout(DRAIN_PAUSE, self.next()).await
            {
            }
        };
        // Beyond the limits the connection is closed on the client.
        let _ = tokio::time::timeout(DRAIN_DEADLINE, rest).await;
    }
}

impl Stream for Upload {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.body.poll_next_unpin(context);
        if let Poll::Ready(Some(Ok(piece))) = &next {
            self.bytes += piece.len() as u64;
        }
        next
    }
}
