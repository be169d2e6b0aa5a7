//! Exec objects: commands that outlive the request that started them, and their output by offset.
//!
//! An exec is in memory from its start until its end is written down: short output in its row, the rest in files. Its
//! guest keeps all of it until then, so a server that dies loses nothing: the next one goes on where the files end.
//! Whoever chose an id finds its row written before the guest was asked, and the guest refuses an id that it knows, so
//! nothing runs twice.

mod ageing;
mod kept;
mod object;
mod recovery;
mod requests;
mod write;

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use api::{ErrorCode, ExecId, SandboxId};
use machine::guest::Guest;
use store::{Layout, exec_output::ExecFiles};
use tokio::sync::mpsc;
use uuid::Uuid;

#[cfg(test)]
pub(crate) use self::recovery::{Since, Takers, watch_again};
pub(super) use self::write::{Ended, write};
pub(crate) use self::{
    object::{Exec, Origin},
    requests::{Page, Started},
};
use super::registry::locked;
use crate::{Error, clock::Clock, db::ExecSum};

const SETTLE_DEADLINE: Duration = Duration::from_secs(2);
const SETTLE_EVERY: Duration = Duration::from_millis(20);
/// As a guest may call an exec.
const LONGEST_GUEST_ID: usize = 128;

/// How much is kept of execs, and how many there may be.
#[derive(Debug, Clone)]
pub struct ExecLimits {
    /// Kept of each stream of one exec.
    pub output_bytes: u64,
    /// Kept of all execs of a sandbox.
    pub total_output_bytes: u64,
    /// At once in a sandbox.
    pub running: usize,
    /// Ended ones that a sandbox keeps; the oldest go.
    pub kept: usize,
    /// How long an ended one is kept.
    pub kept_for: Duration,
}

impl Default for ExecLimits {
    fn default() -> Self {
        Self {
            output_bytes: 64 << 20,
            total_output_bytes: 1 << 30,
            running: 512,
            kept: 1000,
            kept_for: Duration::from_secs(7 * 86_400),
        }
    }
}

/// What the execs of all sandboxes share.
#[derive(Debug)]
pub(super) struct Shared {
    limits: ExecLimits,
    clock: Clock,
    /// Rises, also over restarts.
    place: AtomicI64,
    /// A steady time, at which this server began.
    began: i64,
    /// Output that waits in memory, in bytes.
    in_memory: AtomicUsize,
    ended: mpsc::UnboundedSender<Ended>,
    /// In that queue.
    waiting: AtomicUsize,
}

impl Shared {
    pub(super) fn new(
        limits: ExecLimits,
        clock: Clock,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Ended>) {
        let (ended, receiver) = mpsc::unbounded_channel();
        let shared = Self {
            place: clock.now_ms().saturating_mul(1000).into(),
            began: clock.steady_ms(),
            limits,
            clock,
            in_memory: AtomicUsize::new(0),
            ended,
            waiting: AtomicUsize::new(0),
        };
        (Arc::new(shared), receiver)
    }
}

/// The execs of one sandbox.
#[derive(Debug)]
pub(crate) struct Execs {
    sandbox: SandboxId,
    files: ExecFiles,
    shared: Arc<Shared>,
    live: Mutex<Live>,
    /// Ended ones that are written down.
    count: AtomicUsize,
    /// Of all of them.
    kept_bytes: AtomicU64,
    /// What its log had before this server is in it.
    log_restored: tokio::sync::Mutex<bool>,
}

#[derive(Debug, Default)]
struct Live {
    by_id: HashMap<ExecId, Arc<Exec>>,
    /// The sandbox is gone.
    closed: bool,
}

impl Execs {
    pub(super) fn new(shared: &Arc<Shared>, layout: &Layout, sandbox: SandboxId) -> Arc<Self> {
        Arc::new(Self {
            sandbox,
            files: ExecFiles::of(layout, &sandbox),
            shared: Arc::clone(shared),
            live: Mutex::default(),
            count: AtomicUsize::new(0),
            kept_bytes: AtomicU64::new(0),
            log_restored: tokio::sync::Mutex::new(true),
        })
    }

    /// What the rows have of a sandbox of before this server.
    fn remember(&self, sum: ExecSum) {
        self.count.store(sum.count, Ordering::Relaxed);
        self.kept_bytes.store(sum.kept_bytes, Ordering::Relaxed);
        if let Ok(mut restored) = self.log_restored.try_lock() {
            *restored = sum.count == 0;
        }
    }

    pub(super) fn output_limit(&self) -> u64 {
        self.shared.limits.output_bytes
    }

    /// A new exec that is watched from here on.
    ///
    /// # Errors
    /// 409 when there is one with this id, 503 when too many run, 404 when the sandbox is gone.
    pub(super) fn begin(self: &Arc<Self>, id: ExecId, origin: Origin) -> Result<Arc<Exec>, Error> {
        let mut live = locked(&self.live);
        if live.closed {
            return Err(super::registry::not_found());
        }
        if live.by_id.contains_key(&id) {
            return Err(taken(&id));
        }
        let running = live.by_id.values().filter(|exec| !exec.has_ended()).count();
        if running >= self.shared.limits.running {
            return Err(Error::busy(
                format!(
                    "{running} execs are running in this sandbox; wait for some to end, or cancel them"
                ),
                1,
            ));
        }
        let place = self.shared.place.fetch_add(1, Ordering::Relaxed);
        let began = (place, self.shared.clock.now_ms());
        let exec = Arc::new(Exec::new(Arc::clone(self), id.clone(), origin, began, [0, 0]));
        exec.begin_watching();
        live.by_id.insert(id, Arc::clone(&exec));
        Ok(exec)
    }

    /// It never ran.
    pub(super) fn withdraw(&self, exec: &Exec) {
        exec.lose();
        self.forget(exec);
    }

    /// Its row has all that is known of it.
    fn forget(&self, exec: &Exec) {
        if locked(&self.live).by_id.remove(&exec.id).is_some() {
            exec.forget();
        }
    }

    fn live(&self, id: &ExecId) -> Option<Arc<Exec>> {
        locked(&self.live).by_id.get(id).cloned()
    }

    fn all_live(&self) -> Vec<Arc<Exec>> {
        locked(&self.live).by_id.values().cloned().collect()
    }

    /// Its end is to be written down; then its guest may forget it.
    pub(super) fn note_end(&self, exec: Arc<Exec>, guest: Option<Guest>) {
        let waiting = self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        // Nobody writes any longer: the server closes, and the next one learns of it from the guest.
        let _ = self.shared.ended.send(Ended { exec, guest, waiting });
    }

    /// What waits in memory goes to files: a server that ends now has it no longer, and perhaps no guest either.
    pub(super) async fn write_out(&self) {
        for exec in self.all_live().iter().filter(|exec| !exec.has_ended()) {
            if let Some(written) = exec.write_all_out() {
                // Whatever came of it, the object knows.
                let _ = written.await;
            }
        }
    }

    /// Until the ends that are known are written down and their guest was told, but not for long.
    pub(super) async fn settle(&self) {
        let settled = async {
            while self.all_live().iter().any(|exec| exec.has_ended()) {
                tokio::time::sleep(SETTLE_EVERY).await;
            }
        };
        if tokio::time::timeout(SETTLE_DEADLINE, settled).await.is_err() {
            tracing::debug!(sandbox = %self.sandbox, "the database is slow: ended execs stay in their guest");
        }
    }

    /// Their machine has ended: nobody will ever know more.
    pub(super) fn lose_all(&self) {
        for exec in self.all_live() {
            if exec.lose() {
                self.note_end(exec, None);
            }
        }
    }

    /// The sandbox is gone, and with it everything here.
    pub(super) fn close(&self) {
        let all = {
            let mut live = locked(&self.live);
            live.closed = true;
            std::mem::take(&mut live.by_id)
        };
        for exec in all.into_values() {
            exec.lose();
            exec.forget();
        }
    }

    fn is_closed(&self) -> bool {
        locked(&self.live).closed
    }

    /// How many of so many bytes may be kept beside all that is.
    fn take_room(&self, wanted: usize) -> usize {
        let most = self.shared.limits.total_output_bytes;
        let mut taken = 0;
        // The closure always answers.
        let _ = self.kept_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kept| {
            taken = wanted.min(usize::try_from(most.saturating_sub(kept)).unwrap_or(usize::MAX));
            Some(kept + taken as u64)
        });
        taken
    }

    fn give_back_room(&self, bytes: u64) {
        let _ = self.kept_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |kept| {
            Some(kept.saturating_sub(bytes))
        });
    }
}

fn taken(id: &ExecId) -> Error {
    Error::new(
        ErrorCode::Conflict,
        format!(
            "there is an exec `{id}` in this machine already, and it does not run again; look at that one, or choose another id"
        ),
    )
}

/// What the guest of `sandbox` calls this exec: a clone of that guest has other ones.
fn guest_id(sandbox: &SandboxId, id: &ExecId) -> String {
    let prefix = sandbox.to_string().replace('-', "");
    let plain = format!("{prefix}.{id}");
    if plain.len() <= LONGEST_GUEST_ID {
        return plain;
    }
    let name = Uuid::new_v5(&Uuid::NAMESPACE_OID, id.as_str().as_bytes());
    format!("{prefix}-{}", name.simple())
}

/// The id of one that this sandbox started, if it can be told.
fn id_of_own(sandbox: &SandboxId, guest_id: &str) -> Option<ExecId> {
    let prefix = sandbox.to_string().replace('-', "");
    guest_id.strip_prefix(&prefix)?.strip_prefix('.')?.parse().ok()
}

fn is_own(sandbox: &SandboxId, guest_id: &str) -> bool {
    guest_id.starts_with(&sandbox.to_string().replace('-', ""))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_guest_can_tell_all_execs_apart(first in "[A-Za-z0-9._-]{1,128}", second in "[A-Za-z0-9._-]{1,128}") {
            let (Ok(first), Ok(second)) = (first.parse::<ExecId>(), second.parse::<ExecId>()) else { return Ok(()) };
            let (one, other) = (SandboxId::random(), SandboxId::random());
            let name = guest_id(&one, &first);
            prop_assert!(name.len() <= LONGEST_GUEST_ID && is_own(&one, &name) && !is_own(&other, &name));
            prop_assert_eq!(guest_id(&one, &second) == name, first == second);
            prop_assert_ne!(guest_id(&other, &first), name.clone());
            if let Some(id) = id_of_own(&one, &name) {
                prop_assert_eq!(id, first);
            }
        }
    }
}
