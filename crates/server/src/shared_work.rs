//! Work that is done once however many ask for it: a build, a bake.

use std::{
    collections::HashMap,
    future::Future,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::sync::watch;

use crate::{Error, error::chain};

type Outcome<T> = Option<Result<T, String>>;

/// Keeps what succeeded; what failed is done again for the next who asks.
pub(crate) struct SharedWork<T> {
    known: Mutex<HashMap<String, watch::Receiver<Outcome<T>>>>,
}

impl<T> Default for SharedWork<T> {
    fn default() -> Self {
        Self { known: Mutex::default() }
    }
}

impl<T: Clone + Send + Sync + 'static> SharedWork<T> {
    /// The result for `key`, begun now if need be. The work goes on when the patience of this caller ends.
    ///
    /// # Errors
    /// The work's failure, with its reason for the log; `busy` when it takes longer than `patience`.
    pub(crate) async fn get<F>(
        &self,
        key: &str,
        patience: Duration,
        busy: &str,
        work: impl FnOnce() -> F,
    ) -> Result<T, Error>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let mut outcome = self.begin(key, work);
        let waited = tokio::time::timeout(patience, outcome.wait_for(Option::is_some)).await;
        match waited {
            Ok(Ok(done)) => match &*done {
                Some(Ok(value)) => Ok(value.clone()),
                Some(Err(reason)) => Err(Error::internal(format!("{key}: {reason}"))),
                None => Err(Error::internal(format!("{key}: no outcome"))),
            },
            Ok(Err(_)) => Err(Error::internal(format!("{key}: its task ended"))),
            Err(_) => Err(Error::busy(busy, 5)),
        }
    }

    fn begin<F>(&self, key: &str, work: impl FnOnce() -> F) -> watch::Receiver<Outcome<T>>
    where
        F: Future<Output = Result<T, Error>> + Send + 'static,
    {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(outcome) = known.get(key) {
            let done = outcome.borrow().as_ref().map(Result::is_ok);
            let under_way = done.is_none() && outcome.has_changed().is_ok();
            if under_way || done == Some(true) {
                return outcome.clone();
            }
        }
        let (sender, receiver) = watch::channel(None);
        known.insert(key.to_owned(), receiver.clone());
        let work = work();
        tokio::spawn(async move {
            let result = work
                .await
                .map_err(|error| error.source.map_or(error.message, |source| chain(&*source)));
            sender.send_replace(Some(result));
        });
        receiver
    }
}

impl<T> SharedWork<T> {
    /// The next who asks begins anew.
    pub(crate) fn forget(&self, key: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }

    /// What was asked for so far.
    pub(crate) fn keys(&self) -> Vec<String> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    const PATIENT: Duration = Duration::from_secs(10);

    #[tokio::test]
    async fn ten_who_ask_at_once_get_the_result_of_one_piece_of_work() {
        let (work, runs) = (SharedWork::default(), Arc::new(AtomicUsize::new(0)));
        let ask = || {
            let runs = Arc::clone(&runs);
            work.get("key", PATIENT, "busy", move || async move {
                tokio::task::yield_now().await;
                Ok(runs.fetch_add(1, Ordering::SeqCst))
            })
        };
        let all = futures::future::join_all((0..10).map(|_| ask())).await;
        assert!(all.into_iter().all(|result| result.unwrap() == 0));
        assert_eq!(runs.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn what_failed_is_done_again() {
        let work = SharedWork::default();
        let failed =
            work.get("key", PATIENT, "busy", || async { Err(Error::internal("disk full")) }).await;
        assert!(failed.is_err());
        assert_eq!(work.get("key", PATIENT, "busy", || async { Ok(7) }).await.unwrap(), 7);
    }

    #[tokio::test]
    async fn what_was_forgotten_is_done_again() {
        let work = SharedWork::default();
        assert_eq!(work.get("key", PATIENT, "busy", || async { Ok(1) }).await.unwrap(), 1);
        work.forget("key");
        assert_eq!(work.get("key", PATIENT, "busy", || async { Ok(2) }).await.unwrap(), 2);
        assert_eq!(work.keys(), ["key"]);
    }

    #[tokio::test]
    async fn slow_work_goes_on_after_the_first_caller_gave_up() {
        let work = SharedWork::default();
        let (go, gone) = tokio::sync::oneshot::channel::<()>();
        let slow = work.get("key", Duration::from_millis(1), "busy", || async move {
            let _ = gone.await;
            Ok(1)
        });
        let refused = slow.await.unwrap_err();
        assert_eq!(
            (refused.code, refused.retry_after.is_some()),
            (api::ErrorCode::Unavailable, true)
        );
        go.send(()).unwrap();
        assert_eq!(work.get("key", PATIENT, "busy", || async { Ok(2) }).await.unwrap(), 1);
    }
}
