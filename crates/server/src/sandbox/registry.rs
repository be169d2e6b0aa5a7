//! The sandboxes of this server in memory: what `get` and `list` answer from, and how requests reach a driver.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, atomic::AtomicU64},
};

use api::{AccountId, BootMode, Sandbox, SandboxId, VolumeId};
use machine::guest::Guest;
use tokio::sync::{Notify, oneshot, watch};

use super::{
    Execs, Logs,
    driver::Inside,
    ports::MOST_CONNECTIONS,
    state::{Refusal, RootDisk, State, Target, Wish, accept, shown},
    usage::Usage,
};
use crate::{
    Error,
    clock::{self, Clock},
    db::{AttachmentRow, SandboxRow},
};

pub(crate) const OUT_OF_ROOM: &str =
    "the host's disk is full: the sandbox stands still, and goes on by itself when there is room";

/// One sandbox. Its driver is the only one that changes `state`; anyone may set the target.
pub(crate) struct Entry {
    row: watch::Sender<SandboxRow>,
    /// Rings when the target changed.
    pub(crate) target_changed: Notify,
    pub(crate) inside: Mutex<Option<Arc<Inside>>>,
    /// Held while a policy is put in place.
    pub(crate) network_changes: tokio::sync::Mutex<()>,
    /// A guest without a machine.
    #[cfg(test)]
    pub(crate) stand_in: Mutex<Option<Guest>>,
    pub(crate) logs: Arc<Logs>,
    pub(crate) execs: Arc<Execs>,
    /// Its volumes, as their rows say.
    pub(crate) attachments: Mutex<Vec<AttachmentRow>>,
    /// Its root disk, where that is a volume.
    pub(crate) root_volume: Mutex<Option<VolumeId>>,
    /// Slots whose volumes have grown while it stood still: their file systems follow when it goes on.
    pub(crate) grown: Mutex<BTreeSet<u8>>,
    pub(crate) usage: Arc<Usage>,
    /// For connections to its ports.
    pub(crate) connections: Arc<tokio::sync::Semaphore>,
    /// Held by whoever does something to the machine: the driver in each step, a snapshot.
    pub(crate) turn: tokio::sync::Mutex<()>,
    /// Held while the row is written, so that the newest is written last.
    pub(crate) writing: tokio::sync::Mutex<()>,
    /// Held by the request whose target the driver works on, so that each hears of its own step.
    pub(crate) requests: tokio::sync::Mutex<()>,
    /// Whoever waits for the next step to end, and how it did.
    waiting: Mutex<Option<oneshot::Sender<Result<(), Error>>>>,
    pub(crate) removed: watch::Sender<bool>,
    /// What of the bytes it has sent this server has counted.
    pub(crate) metered_bytes: AtomicU64,
}

impl Entry {
    pub(crate) fn new(row: SandboxRow, execs: Arc<Execs>) -> Self {
        Self {
            row: watch::Sender::new(row),
            target_changed: Notify::new(),
            inside: Mutex::new(None),
            network_changes: tokio::sync::Mutex::new(()),
            #[cfg(test)]
            stand_in: Mutex::new(None),
            logs: Arc::default(),
            execs,
            attachments: Mutex::default(),
            root_volume: Mutex::default(),
            grown: Mutex::default(),
            usage: Arc::default(),
            connections: Arc::new(tokio::sync::Semaphore::new(MOST_CONNECTIONS)),
            turn: tokio::sync::Mutex::new(()),
            writing: tokio::sync::Mutex::new(()),
            requests: tokio::sync::Mutex::new(()),
            waiting: Mutex::new(None),
            removed: watch::Sender::new(false),
            metered_bytes: AtomicU64::new(0),
        }
    }

    /// Once it was connected to.
    pub(crate) fn guest(&self) -> Option<Guest> {
        #[cfg(test)]
        if let Some(guest) = locked(&self.stand_in).clone() {
            return Some(guest);
        }
        self.inside().and_then(|inside| inside.machine.guest())
    }

    /// Its machine, when there is one.
    pub(crate) fn inside(&self) -> Option<Arc<Inside>> {
        locked(&self.inside).clone()
    }

    pub(crate) fn row(&self) -> SandboxRow {
        self.row.borrow().clone()
    }

    pub(crate) fn look<T>(&self, at: impl FnOnce(&SandboxRow) -> T) -> T {
        at(&self.row.borrow())
    }

    pub(crate) fn change(&self, with: impl FnOnce(&mut SandboxRow)) {
        self.row.send_modify(with);
    }

    /// Set before the target is, so that no end of a step is missed.
    pub(crate) fn watch_step(&self) -> oneshot::Receiver<Result<(), Error>> {
        let (sender, receiver) = oneshot::channel();
        *locked(&self.waiting) = Some(sender);
        receiver
    }

    pub(crate) fn announce(&self, outcome: Result<(), Error>) {
        if let Some(waiting) = locked(&self.waiting).take() {
            // Nobody waits any longer when the client has gone.
            let _ = waiting.send(outcome);
        }
    }

    /// Whether it stands still because there is no room on the pool for what its guest writes.
    pub(crate) fn is_out_of_room(&self) -> bool {
        locked(&self.inside).as_ref().is_some_and(|inside| inside.machine.is_out_of_room())
    }

    /// Whether its time is up at `now`, a steady time.
    pub(crate) fn is_expired(&self, now: i64) -> bool {
        self.look(|row| row.expires_at.is_some_and(|end| end <= now))
    }

    /// Whether a request may go on, by what it is and whether its time is up.
    pub(crate) fn check(&self, wish: Wish, now: i64) -> Result<(), Refusal> {
        let (state, target) = self.look(|row| (row.state, row.target));
        accept(state, if self.is_expired(now) { Target::Deleted } else { target }, wish)
    }

    /// Waits until it is to go.
    pub(crate) async fn deleted(&self) {
        let mut row = self.row.subscribe();
        // It lives as long as we do.
        let _ = row.wait_for(|row| row.target == Target::Deleted).await;
    }

    pub(crate) fn accept(&self, wish: Wish, now: i64) -> Result<(), Error> {
        self.check(wish, now).map_err(|refusal| self.refused(refusal))
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> Error {
        match refusal {
            Refusal::Gone => not_found(),
            // The client repeats on these words: nothing has been started yet.
            Refusal::NotYetRunning => Error::new(
                api::ErrorCode::Unavailable,
                "the sandbox is still being created; connect: connection refused",
            ),
            Refusal::Paused => {
                Error::conflict("the sandbox is paused; POST /v1/sandboxes/{id}/resume first")
            }
            Refusal::Hibernated => {
                Error::conflict("the sandbox is hibernated; POST /v1/sandboxes/{id}/wake first")
            }
            Refusal::Stopped => {
                Error::conflict("the sandbox is stopped; POST /v1/machines/{id}/start first")
            }
            Refusal::Failed => Error::conflict(format!(
                "the sandbox has failed ({}); {}",
                self.look(|row| row.error.clone())
                    .unwrap_or_else(|| "its virtual machine ended".to_owned()),
                match self.root_disk() {
                    RootDisk::Volume => "POST /v1/machines/{id}/start boots it again from its disk",
                    RootDisk::Own | RootDisk::None => "delete it and create another",
                }
            )),
            Refusal::NotStopped => Error::conflict(
                "volumes come and go while a machine is stopped; stop it first: POST /v1/machines/{id}/stop",
            ),
            Refusal::NoRootDisk => Error::conflict(
                "the machine has no root disk; attach a volume of kind `root` first: POST /v1/machines/{id}/volume/attach",
            ),
        }
    }

    pub(crate) fn shown(&self, accelerator: &str, clock: &Clock) -> Sandbox {
        let expired = self.is_expired(clock.steady_ms());
        // Not below, where its lock is held.
        let out_of_room = self.is_out_of_room();
        self.look(|row| Sandbox {
            id: row.id,
            template: row.template.clone(),
            cpu: row.cpu,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            status: shown(row.state, if expired { Target::Deleted } else { row.target }),
            guest_ip: locked(&self.inside)
                .as_ref()
                .map(|inside| inside.address.to_string())
                .unwrap_or_default(),
            created_at: clock::from_ms(row.created_at),
            expires_at: row.expires_at.map(|end| clock.time_of_day(end)),
            ttl_seconds: row.ttl_seconds,
            metadata: row.metadata.clone(),
            from_snapshot: row.from_snapshot,
            boot_ms: row.boot_ms,
            boot_mode: if row.cold_boot { BootMode::Cold } else { BootMode::Snapshot },
            persistent: row.ttl_seconds.is_none(),
            volumes: self.shown_volumes(),
            accelerator: accelerator.to_owned(),
            error: row.error.clone().or_else(|| out_of_room.then(|| OUT_OF_ROOM.to_owned())),
        })
    }
}

/// All of them, by id.
#[derive(Default)]
pub(crate) struct Registry {
    entries: RwLock<HashMap<SandboxId, Arc<Entry>>>,
}

impl Registry {
    pub(crate) fn insert(&self, entry: &Arc<Entry>) {
        let id = entry.look(|row| row.id);
        self.entries.write().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::clone(entry));
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// A foreign one is as unknown as one that never was.
    pub(crate) fn find(&self, account: &AccountId, id: &SandboxId) -> Result<Arc<Entry>, Error> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries
            .get(id)
            .filter(|entry| entry.look(|row| row.account == *account))
            .cloned()
            .ok_or_else(not_found)
    }

    /// Whose it is, for those who come without a key.
    pub(crate) fn account_of(&self, id: &SandboxId) -> Option<AccountId> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.get(id).map(|entry| entry.look(|row| row.account.clone()))
    }

    pub(crate) fn all(&self) -> Vec<Arc<Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect()
    }
}

/// The published clients' watchers know by the words "not found" that a sandbox has gone.
pub(crate) fn not_found() -> Error {
    Error::not_found("sandbox not found; list those there are with GET /v1/sandboxes")
}

/// A poisoned lock's value is still whole here: no holder leaves it half-changed.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (id, state, target) = self.look(|row| (row.id, row.state, row.target));
        f.debug_struct("Entry")
            .field("id", &id)
            .field("state", &State::name(state))
            .field("target", &target.name())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_watches_a_sandbox_is_told_that_it_has_gone_in_words_that_it_knows() {
        let refused = Registry::default().find(&AccountId::default_account(), &SandboxId::random());
        let refused = refused.unwrap_err();
        assert_eq!(refused.code, api::ErrorCode::NotFound);
        assert!(refused.message.contains("not found"), "{refused}");
    }
}
