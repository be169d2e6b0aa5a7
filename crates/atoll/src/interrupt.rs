//! The requests to end: an interrupt from the keyboard, or SIGTERM.

use std::future::Future;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::failure::Failure;

/// Comes with the first request after this call, which then no longer ends the program by itself.
pub(crate) fn requested() -> anyhow::Result<impl Future<Output = ()> + Send + 'static> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for interrupts")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    })
}

/// For work that has something to clean up after it.
pub(crate) async fn unless<T, E: Into<anyhow::Error>>(
    stop: impl Future<Output = ()>,
    work: impl Future<Output = Result<T, E>>,
) -> anyhow::Result<T> {
    tokio::select! {
        outcome = work => outcome.map_err(Into::into),
        () = stop => Err(Failure::new("interrupted").into()),
    }
}
