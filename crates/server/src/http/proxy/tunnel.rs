//! What follows a change of protocol: bytes both ways, for as long as both sides and the server like.

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;

use super::Over;
use crate::http::stopping::Stopping;

/// `held` is given back at the end.
pub(super) async fn run<T: Send + 'static>(
    client: OnUpgrade,
    guest: OnUpgrade,
    stopping: Option<Stopping>,
    over: Option<Over>,
    held: T,
) {
    let carry = async {
        let (client, guest) = tokio::try_join!(client, guest)?;
        // The connection is not idle, although its request has been answered.
        let _busy = over.map(|over| over.place.busy());
        let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
        // Either side may break off: that is how most end.
        let _ = tokio::io::copy_bidirectional(&mut client, &mut guest).await;
        Ok::<_, hyper::Error>(())
    };
    let outcome = match stopping {
        Some(Stopping(stop)) => stop.run_until_cancelled(carry).await.unwrap_or(Ok(())),
        None => carry.await,
    };
    if let Err(error) = outcome {
        tracing::debug!(%error, "a connection did not change its protocol");
    }
    drop(held);
}
