//! Waiting for what will be, never for time to pass.

use std::time::Duration;

use tokio::time::Instant;

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// What `look` finds, as soon as it finds it.
///
/// # Panics
/// It was not there before the deadline.
pub async fn until<T>(what: &str, within: Duration, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + within;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "{what}: not within {within:?}");
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Only for what is about time itself: a sender that is slow on purpose.
pub async fn pause(duration: Duration) {
    tokio::time::sleep(duration).await;
}
