//! From one state of rest to another: a request sets the target, and waits until its driver has met it.

use std::{sync::Arc, time::Duration};

use api::{AccountId, Sandbox, SandboxId};

use tokio::time::Instant;

use super::{
    Sandboxes,
    registry::Entry,
    state::{Refusal, Target, Wish, rest},
    usage::InUse,
};
use crate::Error;

/// The longest step, which is saving a large machine to a slow disk.
pub(super) const STEP: Duration = Duration::from_secs(120);
/// For the step of someone else's.
const QUEUE: Duration = Duration::from_secs(25);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum When {
    Asked,
    /// Given up when someone uses the sandbox after all.
    Unused,
}

impl Sandboxes {
    /// Its virtual CPUs stand still when this returns. Idempotent.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 in states that cannot be paused.
    pub async fn pause(&self, account: &AccountId, id: &SandboxId) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        self.reach(&entry, Wish::Pause, Target::Paused, When::Asked).await
    }

    /// It runs when this returns, whether it was paused or hibernated. Idempotent.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 in states from which it cannot go on.
    pub async fn run(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> {
        let entry = self.registry.find(account, id)?;
        self.reach(&entry, Wish::Run, Target::Running, When::Asked).await?;
        self.get(account, id)
    }

    /// No process of it is left when this returns. Idempotent.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 in states without memory to save; 507 without room.
    pub async fn hibernate(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> {
        let entry = self.registry.find(account, id)?;
        self.reach(&entry, Wish::Hibernate, Target::Hibernated, When::Asked).await?;
        self.get(account, id)
    }

    pub(super) async fn reach(
        &self,
        entry: &Entry,
        wish: Wish,
        target: Target,
        when: When,
    ) -> Result<(), Error> {
        self.reach_within(entry, wish, target, when, QUEUE).await
    }

    /// `queue`: how long others' steps are waited for, before its own.
    pub(super) async fn reach_within(
        &self,
        entry: &Entry,
        wish: Wish,
        target: Target,
        when: When,
        queue: Duration,
    ) -> Result<(), Error> {
        let busy = || {
            Error::busy("something else is just being done to the sandbox; try again shortly", 2)
        };
        let _first =
            tokio::time::timeout(queue, entry.requests.lock()).await.map_err(|_| busy())?;
        let until = Instant::now() + STEP;
        // More than once where a step of someone who has gone was still under way, or several lead there.
        loop {
            // Before the look, so that a step which ends in between is not waited for.
            let step = entry.watch_step();
            entry.accept(wish, self.clock.steady_ms())?;
            if entry.look(|row| row.target == target && rest(row.state) == target) {
                return Ok(());
            }
            let before = entry.look(|row| row.target);
            entry.change(|row| {
                if row.target != Target::Deleted {
                    row.target = target;
                }
            });
            // Whoever uses a sandbox says so before looking at its target, so one of the two notices the other.
            if when == When::Unused && entry.usage.unused_for().is_none() {
                entry.change(|row| {
                    if row.target == target {
                        row.target = before;
                    }
                });
                return Ok(());
            }
            // The driver writes the row when the step is done; until then a server that dies leaves the sandbox as it was.
            entry.target_changed.notify_one();
            match tokio::time::timeout_at(until, step).await {
                // Of what had begun before. A step of ours that fails leaves the sandbox another target.
                Ok(Ok(Err(_))) if entry.look(|row| row.target == target) => {}
                Ok(Ok(outcome)) => outcome?,
                Ok(Err(_)) | Err(_) => return Err(busy()),
            }
        }
    }

    /// A hibernated one is woken. In use, so that it does not hibernate again, until the answer is dropped.
    ///
    /// # Errors
    /// As [`Sandboxes::running`].
    pub(super) async fn awake(&self, entry: &Arc<Entry>) -> Result<InUse, Error> {
        let in_use = entry.usage.begin();
        let now = self.clock.steady_ms();
        match entry.check(Wish::Inside, now) {
            Ok(()) => Ok(in_use),
            Err(Refusal::Hibernated) => {
                self.reach(entry, Wish::Run, Target::Running, When::Asked).await?;
                entry.accept(Wish::Inside, self.clock.steady_ms())?;
                Ok(in_use)
            }
            Err(_) => entry.accept(Wish::Inside, now).map(|()| in_use),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::{
        config::Capacity,
        db::SandboxRow,
        sandbox::{State, testing::Alone},
    };

    #[tokio::test]
    async fn what_had_begun_before_is_not_taken_for_what_was_asked_for() {
        let alone = Alone::new(Capacity::default()).await;
        let sandboxes = &alone.sandboxes;
        let (account, id) = (AccountId::default_account(), SandboxId::random());
        let row = sandboxes.running_row(&account, id, BTreeMap::new());
        let row = SandboxRow { state: State::Failed, target: rest(State::Failed), ..row };
        let entry = Arc::new(sandboxes.entry(row));
        let asked =
            async { sandboxes.reach(&entry, Wish::PowerOn, Target::Running, When::Asked).await };
        let driver = async {
            while entry.look(|row| row.target) != Target::Running {
                tokio::task::yield_now().await;
            }
            entry.announce(Err(Error::conflict("its machine has ended")));
            tokio::task::yield_now().await;
            entry.change(|row| row.state = State::Running);
            entry.announce(Ok(()));
        };
        let (asked, ()) = tokio::join!(asked, driver);
        asked.unwrap();
    }
}
