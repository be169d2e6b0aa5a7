//! Pausing: the virtual CPUs stand still, memory stays, and so does the time to live.

use std::time::Duration;

use api::EventKind;
use machine::guest::{Guest, Request};

use super::{
    Sandboxes,
    driver::{ANSWER_DEADLINE, Inside},
    registry::Entry,
    state::State,
};
use crate::{Error, db::SandboxRow};

/// The guest gives up by itself before.
pub(super) const QUIESCE_DEADLINE: Duration =
    Duration::from_secs(machine::guest::QUIESCE_LIMIT.as_secs() + 10);

impl Sandboxes {
    /// Quiet first, so that what the guest has written is on its disk however long the pause takes.
    pub(super) async fn pause_machine(&self, entry: &Entry) -> Result<(), Error> {
        let inside = entry.inside().ok_or_else(super::registry::not_found)?;
        let guest = entry.guest().ok_or_else(super::registry::not_found)?;
        fault::point!("pause.quiescing", Error::internal);
        let still = async {
            guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
            fault::point!("pause.stopping", Error::internal);
            Ok::<_, Error>(inside.machine.stop().await?)
        };
        if let Err(error) = still.await {
            // Also one that did not say that it is quiet may be.
            self.go_on(entry).await?;
            return Err(error);
        }
        fault::point!("pause.row_writing");
        let now = self.clock.steady_ms();
        self.tell(entry, EventKind::Paused, None);
        entry.change(|row| {
            row.state = State::Paused;
            hold_ttl(row, now);
        });
        self.write_down(entry).await;
        Ok(())
    }

    pub(super) async fn resume_machine(&self, entry: &Entry) -> Result<(), Error> {
        fault::point!("resume.going_on", Error::internal);
        self.go_on(entry).await?;
        self.grow_what_waits(entry).await;
        fault::point!("resume.row_writing");
        let now = self.clock.steady_ms();
        self.tell(entry, EventKind::Resumed, None);
        entry.change(|row| {
            row.state = State::Running;
            release_ttl(row, now);
        });
        self.write_down(entry).await;
        Ok(())
    }

    /// Ends the quiet of a machine that runs or stands still. Idempotent.
    pub(super) async fn go_on(&self, entry: &Entry) -> Result<(), Error> {
        self.go_on_within(entry, ANSWER_DEADLINE).await
    }

    /// `patience`: for each answer of the guest.
    pub(super) async fn go_on_within(
        &self,
        entry: &Entry,
        patience: Duration,
    ) -> Result<(), Error> {
        let inside = entry.inside().ok_or_else(super::registry::not_found)?;
        if !inside.machine.is_running().await? {
            inside.machine.resume().await?;
        }
        let (guest, is_new) = reach_guest(entry, &inside, patience).await?;
        let thaw = Request::Thaw { unix_time_ns: self.clock.now_ns() };
        guest.call(thaw, patience).await?;
        if is_new {
            self.watch_commands(entry).await;
        }
        Ok(())
    }
}

/// With whether it is a new connection: a server that found a paused machine again has not spoken to its guest yet. The
/// machine has to run.
pub(super) async fn reach_guest(
    entry: &Entry,
    inside: &Inside,
    patience: Duration,
) -> Result<(Guest, bool), Error> {
    match entry.guest().filter(|guest| !guest.is_lost()) {
        Some(guest) => Ok((guest, false)),
        None => Ok((inside.machine.connect_guest(patience).await?, true)),
    }
}

/// From `now`, a steady time, on the time to live stands still.
pub(super) fn hold_ttl(row: &mut SandboxRow, now: i64) {
    if let Some(end) = row.expires_at.take() {
        row.ttl_left_ms = Some((end - now).max(0));
    }
}

/// It goes on where it was held.
pub(super) fn release_ttl(row: &mut SandboxRow, now: i64) {
    if let Some(left) = row.ttl_left_ms.take() {
        row.expires_at = Some(now.saturating_add(left));
    }
}
