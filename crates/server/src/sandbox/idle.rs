//! Sandboxes that nobody uses hibernate, if they were told to.

use std::{sync::Arc, time::Duration};

use machine::guest::{ExecState, KernelState, Reply, Request};

use super::{
    Sandboxes,
    registry::Entry,
    state::{State, Target, Wish},
    transition::When,
};

const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Someone between two requests is not done with it.
const UNUSED_AT_LEAST: Duration = Duration::from_secs(5);
const ANSWER: Duration = Duration::from_secs(5);

impl Sandboxes {
    pub(crate) async fn hibernate_idle(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.closed.cancelled() => return,
            }
            for entry in self.registry.all() {
                if self.is_idle(&entry) && !runs_commands(&entry).await {
                    tracing::info!(sandbox = %entry.look(|row| row.id), "unused: it hibernates");
                    // One after the other: each takes a core and the disk.
                    if let Err(error) = self.hibernate_if_unused(&entry).await {
                        tracing::warn!(%error, cause = error.causes(), "an unused sandbox does not hibernate");
                    }
                }
            }
        }
    }

    /// Before its time, when memory is short: of those that would hibernate anyway, the one that was unused longest.
    /// False when there is none.
    pub(super) async fn hibernate_for_room(&self) -> bool {
        let unused = |entry: &Arc<Entry>| {
            let (_, unused) = limit_and_unused(entry)?;
            (unused >= UNUSED_AT_LEAST).then(|| (unused, Arc::clone(entry)))
        };
        let mut candidates: Vec<_> = self.registry.all().iter().filter_map(unused).collect();
        candidates.sort_by_key(|(unused, _)| std::cmp::Reverse(*unused));
        for (_, entry) in candidates {
            if runs_commands(&entry).await || entry.usage.unused_for().is_none() {
                continue;
            }
            tracing::info!(sandbox = %entry.look(|row| row.id), "memory is short: an unused sandbox hibernates");
            match self.reach(&entry, Wish::Hibernate, Target::Hibernated, When::Unused).await {
                Ok(()) => return true,
                Err(error) => {
                    tracing::warn!(%error, cause = error.causes(), "an unused sandbox does not hibernate");
                }
            }
        }
        false
    }

    fn is_idle(&self, entry: &Entry) -> bool {
        limit_and_unused(entry).is_some_and(|(limit, unused)| unused >= limit)
    }

    async fn hibernate_if_unused(&self, entry: &Arc<Entry>) -> Result<(), crate::Error> {
        if self.is_idle(entry) {
            self.reach(entry, Wish::Hibernate, Target::Hibernated, When::Unused).await?;
        }
        Ok(())
    }
}

/// Of one that runs, that nobody uses, and that may hibernate.
fn limit_and_unused(entry: &Entry) -> Option<(Duration, Duration)> {
    let limit = entry.look(|row| {
        let rests = row.state == State::Running && row.target == Target::Running;
        row.idle_seconds.filter(|_| rests)
    });
    limit.map(Duration::from_secs).zip(entry.usage.unused_for())
}

/// Also those that nobody watches, cells, and terminals that somebody may come back to. A guest that does not say is left
/// alone.
async fn runs_commands(entry: &Entry) -> bool {
    let Some(guest) = entry.guest() else { return true };
    match guest.call(Request::KernelList, ANSWER).await {
        Ok(Reply::Kernels(all)) if !all.iter().any(|one| one.state == KernelState::Busy) => {}
        // From before there were kernels.
        Err(machine::Error::OldAgent { .. }) => {}
        Ok(_) | Err(_) => return true,
    }
    match guest.call(Request::TerminalList, ANSWER).await {
        Ok(Reply::Terminals(all)) if all.iter().all(|one| one.exit_code.is_some()) => {}
        // From before there were terminals.
        Err(machine::Error::OldAgent { .. }) => {}
        Ok(_) | Err(_) => return true,
    }
    match guest.call(Request::ExecList, ANSWER).await {
        Ok(Reply::Execs(execs)) => {
            execs.iter().any(|(_, status)| status.state == ExecState::Running)
        }
        Ok(_) | Err(_) => true,
    }
}
