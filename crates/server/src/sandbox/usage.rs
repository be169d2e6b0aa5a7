//! Who uses a sandbox, and since when nobody does.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::time::Instant;

use super::registry::locked;

#[derive(Debug)]
pub(crate) struct Usage {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    users: usize,
    /// When the last of them went.
    since: Instant,
}

impl Default for Usage {
    fn default() -> Self {
        Self { state: Mutex::new(State { users: 0, since: Instant::now() }) }
    }
}

impl Usage {
    /// Until the answer is dropped the sandbox is in use.
    pub(crate) fn begin(self: &Arc<Self>) -> InUse {
        locked(&self.state).users += 1;
        InUse { usage: Arc::clone(self), counts: true }
    }

    /// The same for the server's own affairs: afterwards it counts as unused since its last other user went.
    pub(crate) fn begin_unnoticed(self: &Arc<Self>) -> InUse {
        let mut in_use = self.begin();
        in_use.counts = false;
        in_use
    }

    /// `None` while someone uses it.
    pub(crate) fn unused_for(&self) -> Option<Duration> {
        let state = locked(&self.state);
        (state.users == 0).then(|| state.since.elapsed())
    }
}

/// One use: a request, a command that runs, a stream.
#[derive(Debug)]
pub(crate) struct InUse {
    usage: Arc<Usage>,
    counts: bool,
}

impl Drop for InUse {
    fn drop(&mut self) {
        let mut state = locked(&self.usage.state);
        state.users -= 1;
        if self.counts {
            state.since = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_the_server_does_by_itself_is_no_use_afterwards() {
        let usage = Arc::new(Usage::default());
        tokio::time::advance(Duration::from_secs(5)).await;
        let own = usage.begin_unnoticed();
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(usage.unused_for(), None);
        drop(own);
        assert_eq!(usage.unused_for(), Some(Duration::from_secs(12)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_sandbox_is_unused_since_its_last_user_went() {
        let usage = Arc::new(Usage::default());
        let (one, two) = (usage.begin(), usage.begin());
        tokio::time::advance(Duration::from_secs(5)).await;
        drop(one);
        assert_eq!(usage.unused_for(), None);
        drop(two);
        tokio::time::advance(Duration::from_secs(7)).await;
        assert_eq!(usage.unused_for(), Some(Duration::from_secs(7)));
    }
}
