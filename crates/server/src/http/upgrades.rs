//! Connections that became something else than HTTP: they count as connections still, and end with the server.

use std::{convert::Infallible, sync::Arc};

use axum::extract::FromRequestParts;
use http::request::Parts;
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

use super::connections::{Busy, Place};

/// In the extensions of each request.
#[derive(Clone)]
pub(super) struct Upgrades {
    place: Arc<Place>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

/// Held as long as the connection lasts.
pub(super) struct Upgraded {
    /// Cancelled when the server is asked to stop: it waits a moment for this to be dropped.
    pub(super) stop: CancellationToken,
    _busy: Busy,
    _task: TaskTrackerToken,
}

impl Upgrades {
    pub(super) fn new(place: &Arc<Place>, stop: CancellationToken, tasks: TaskTracker) -> Self {
        Self { place: Arc::clone(place), stop, tasks }
    }

    pub(super) fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    pub(super) fn begin(&self) -> Upgraded {
        let (stop, busy) = (self.stop.clone(), self.place.busy());
        Upgraded { stop, _busy: busy, _task: self.tasks.token() }
    }
}

impl<S: Sync> FromRequestParts<S> for Upgrades {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get::<Self>().cloned().expect("every request comes over a connection"))
    }
}
