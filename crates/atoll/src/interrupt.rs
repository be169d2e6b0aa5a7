//! The requests to end: an interrupt from the keyboard, or SIGTERM.

use std::future::Future;

use anyhow::Context;
use tokio::{
    signal::unix::{SignalKind, signal},
    sync::watch,
};

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

/// Two futures: the first request to end, and the second, of someone who does not want to wait for what the first began.
pub(crate) fn requested_twice() -> anyhow::Result<(
    impl Future<Output = ()> + Send + 'static,
    impl Future<Output = ()> + Send + 'static,
)> {
    let mut interrupt = signal(SignalKind::interrupt()).context("listen for interrupts")?;
    let mut terminate = signal(SignalKind::terminate()).context("listen for SIGTERM")?;
    let (count, counted) = watch::channel(0);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            count.send_modify(|count| *count += 1);
        }
    });
    let reached = |least: u32| {
        let mut counted = counted.clone();
        async move {
            // The sender lives as long as the runtime.
            let _ = counted.wait_for(|count| *count >= least).await;
        }
    };
    Ok((reached(1), reached(2)))
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
