//! Bodies of answers with something that lives as long as they do.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::{Body as HttpBody, Frame, SizeHint};

/// `held` is dropped once the body was sent, or will never be.
pub(super) fn with<T: Send + Unpin + 'static>(body: Body, held: T) -> Body {
    Body::new(UnsyncBoxBody::new(With { body, _held: held }))
}

struct With<T> {
    body: Body,
    _held: T,
}

impl<T: Unpin> HttpBody for With<T> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
