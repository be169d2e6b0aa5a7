//! The way of a create to its turn: in the order of arrival, past the rules of [`capacity`](super::capacity).
//!
//! Whoever waits here has made nothing yet. The wait is short, for the clients give up after 30 s: what is short then is
//! told, and the same request may be sent again.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use api::SandboxId;
use tokio::{
    sync::{MutexGuard, Notify, OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{
    Sandboxes,
    capacity::{Limits, Need, Shortage, Usage},
    host_memory::{HostMemory, private_bytes},
    registry::locked,
    state::State,
};
use crate::{Error, metrics::Figure};

/// Restores at once: each keeps a core busy.
const MOST_STARTS: usize = 16;
/// Creates that wait at once.
const MOST_WAITING: usize = 256;
/// For room on the host, the turns of those before included.
const ROOM_PATIENCE: Duration = Duration::from_secs(5);
/// What is not told of, such as other programs' memory, is looked at so often.
const LOOK_AGAIN: Duration = Duration::from_millis(500);
/// A write that found no room is tried again when there is so much.
const ROOM_TO_GO_ON: u64 = 16 << 20;
/// A measurement is good for so long; what was started since is counted on top.
const FRESH: Duration = Duration::from_millis(100);

pub(crate) struct Admission {
    limits: Limits,
    /// Of the first in the queue. Tokio's is fair.
    turn: tokio::sync::Mutex<()>,
    waiting: AtomicUsize,
    starts: Arc<Semaphore>,
    ledger: Mutex<Ledger>,
    /// Something may have been given back.
    changed: Notify,
}

/// What was admitted and does not show in a measurement yet.
#[derive(Default)]
struct Ledger {
    starting: Vec<(u64, Need)>,
    /// Started since the time that is told here.
    settling: Vec<(Instant, Need)>,
    next: u64,
    measured: Option<(Instant, Measured)>,
    /// For the metrics, by what was short.
    refused: BTreeMap<&'static str, u64>,
}

/// What there is of a host apart from what this server remembers.
#[derive(Debug, Clone, Copy)]
struct Measured {
    private: u64,
    memory: HostMemory,
    disk_free: u64,
}

/// The right to start one machine. What it is going to need counts as used until it is dropped.
#[derive(Debug)]
pub(crate) struct Admitted {
    admission: Arc<Admission>,
    number: u64,
    start: Option<OwnedSemaphorePermit>,
}

impl std::fmt::Debug for Admission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Admission").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// One that waits; counted.
struct Waiting<'a>(&'a Admission);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        let mut ledger = locked(&self.admission.ledger);
        if let Some(place) = ledger.starting.iter().position(|(number, _)| *number == self.number) {
            let (_, need) = ledger.starting.swap_remove(place);
            // It may have failed: then this is forgotten with the next measurement.
            ledger.settling.push((Instant::now(), need));
        }
        drop(ledger);
        self.start.take();
        self.admission.changed.notify_waiters();
    }
}

impl Admission {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            turn: tokio::sync::Mutex::default(),
            waiting: AtomicUsize::new(0),
            starts: Arc::new(Semaphore::new(MOST_STARTS)),
            ledger: Mutex::default(),
            changed: Notify::new(),
        })
    }

    /// Something was given back: whoever waits looks again.
    pub(crate) fn look_again(&self) {
        self.changed.notify_waiters();
    }

    fn join_queue(&self) -> Result<Waiting<'_>, Error> {
        let waiting = Waiting(self);
        if self.waiting.fetch_add(1, Ordering::SeqCst) >= MOST_WAITING {
            return Err(Error::busy("too many creates wait already; try again shortly", 5));
        }
        Ok(waiting)
    }

    async fn turn(&self, until: Instant) -> Result<MutexGuard<'_, ()>, Error> {
        tokio::time::timeout_at(until, self.turn.lock()).await.map_err(|_| {
            Error::busy("other creates wait for room on the host; try again shortly", 5)
        })
    }

    /// Enters it into the books if it fits.
    fn try_admit(self: &Arc<Self>, mut usage: Usage, need: &Need) -> Result<Admitted, Shortage> {
        let mut ledger = locked(&self.ledger);
        ledger.add_to(&mut usage);
        self.limits.admit(&usage, need)?;
        let number = ledger.next;
        ledger.next += 1;
        ledger.starting.push((number, *need));
        Ok(Admitted { admission: Arc::clone(self), number, start: None })
    }

    async fn turn_to_start(&self, patience: Duration) -> Result<OwnedSemaphorePermit, Error> {
        let turn = tokio::time::timeout(patience, Arc::clone(&self.starts).acquire_owned()).await;
        let busy = || Error::busy("the host is busy with other creates; try again shortly", 5);
        turn.map_err(|_| busy())?.map_err(|_| busy())
    }

    fn refuse(&self, shortage: Shortage) -> Error {
        tracing::warn!(short = shortage.name(), "refused a create");
        *locked(&self.ledger).refused.entry(shortage.name()).or_default() += 1;
        shortage.into()
    }

    fn forget_measured(&self) {
        locked(&self.ledger).measured = None;
    }

    fn measured(
        &self,
        measure: impl FnOnce() -> Result<Measured, Error>,
    ) -> Result<Measured, Error> {
        let last = locked(&self.ledger).measured;
        if let Some((at, measured)) = last
            && at.elapsed() < FRESH
        {
            return Ok(measured);
        }
        // Before it is measured: what is started meanwhile may not be in it.
        let now = Instant::now();
        let measured = measure()?;
        let mut ledger = locked(&self.ledger);
        ledger.settling.retain(|(since, _)| *since >= now);
        ledger.measured = Some((now, measured));
        Ok(measured)
    }
}

impl Ledger {
    fn add_to(&self, usage: &mut Usage) {
        for (_, need) in &self.starting {
            usage.machines += 1;
            usage.promised += need.promised;
        }
        let unseen = self.starting.iter().map(|(_, need)| need);
        for need in unseen.chain(self.settling.iter().map(|(_, need)| need)) {
            usage.memory_expected += need.memory;
            usage.disk_expected += need.disk;
        }
    }
}

impl Sandboxes {
    /// Room for one more machine, and a turn to start it.
    ///
    /// # Errors
    /// 503 with a time to try again, or 507. Nothing was made.
    pub(crate) async fn admit(&self, need: Need, patience: Duration) -> Result<Admitted, Error> {
        let mut admitted = self.wait_for_room(&need, patience).await?;
        admitted.start = Some(self.admission.turn_to_start(patience).await?);
        Ok(admitted)
    }

    /// # Errors
    /// 507 for what does not pass by waiting.
    pub(crate) fn could_ever_fit(&self, need: &Need) -> Result<(), Error> {
        let admission = &self.admission;
        match admission.limits.admit(&self.usage()?, need) {
            Err(shortage @ (Shortage::TooLarge | Shortage::Disk)) => {
                Err(admission.refuse(shortage))
            }
            Err(Shortage::Machines | Shortage::Promised | Shortage::Memory) | Ok(()) => Ok(()),
        }
    }

    /// More memory than could be given to one on an empty host.
    pub(crate) fn is_too_large(&self, memory_mb: u64) -> bool {
        let need = Need::of_clone(memory_mb << 20);
        let fits = |usage: Usage| self.admission.limits.admit(&usage, &need);
        self.usage().is_ok_and(|usage| fits(usage) == Err(Shortage::TooLarge))
    }

    pub(super) async fn wait_for_room(
        &self,
        need: &Need,
        patience: Duration,
    ) -> Result<Admitted, Error> {
        let admission = &self.admission;
        let until = Instant::now() + patience.min(ROOM_PATIENCE);
        let _waiting = admission.join_queue()?;
        let _turn = admission.turn(until).await?;
        loop {
            let changed = admission.changed.notified();
            let shortage = match admission.try_admit(self.usage()?, need) {
                Ok(admitted) => return Ok(admitted),
                Err(shortage) => shortage,
            };
            if shortage == Shortage::Memory && self.pool.give_way().await > 0 {
                admission.forget_measured();
                continue;
            }
            if shortage == Shortage::Memory
                && Instant::now() < until
                && self.hibernate_for_room().await
            {
                admission.forget_measured();
                continue;
            }
            if !shortage.may_pass() || Instant::now() >= until {
                return Err(admission.refuse(shortage));
            }
            let look_again = (Instant::now() + LOOK_AGAIN).min(until);
            // Either way it is looked at again.
            let _ = tokio::time::timeout_at(look_again, changed).await;
        }
    }

    /// Bytes of the pool that stay free of new things.
    pub(super) fn disk_reserve(&self) -> u64 {
        self.admission.limits.disk_reserve
    }

    /// Room on the pool for what is to be kept there, such as a snapshot of so many bytes.
    ///
    /// # Errors
    /// 507: only what sandboxes that run will write is left.
    pub(super) fn admit_bytes(&self, bytes: u64) -> Result<(), Error> {
        let room = store::pool::room(self.sites.layout.data()).map_err(Error::internal)?;
        let mut usage = Usage { disk_free: room.free_bytes, ..Usage::default() };
        locked(&self.admission.ledger).add_to(&mut usage);
        Ok(self.admission.limits.admit_bytes(&usage, bytes)?)
    }

    /// What is in use, without what the books of [`Admission`] hold.
    fn usage(&self) -> Result<Usage, Error> {
        let (mut machines, mut promised) = (0, 0);
        let mut pids = self.pool.pids();
        for entry in self.registry.all() {
            let Some(inside) = entry.inside() else { continue };
            machines += 1;
            promised += entry.look(|row| row.memory_mb) << 20;
            pids.push(inside.machine.pid());
        }
        let measured = self.admission.measured(|| {
            let room = store::pool::room(self.sites.layout.data()).map_err(Error::internal)?;
            Ok(Measured {
                private: pids.into_iter().filter_map(private_bytes).sum(),
                memory: HostMemory::measure().map_err(Error::internal)?,
                disk_free: room.free_bytes,
            })
        })?;
        Ok(Usage {
            machines,
            promised,
            private: measured.private,
            memory_total: measured.memory.total,
            memory_available: measured.memory.available,
            disk_free: measured.disk_free,
            ..Usage::default()
        })
    }

    /// What is in use, and what was admitted already.
    fn whole_usage(&self) -> Result<Usage, Error> {
        let mut usage = self.usage()?;
        locked(&self.admission.ledger).add_to(&mut usage);
        Ok(usage)
    }

    /// What is in use of the host and what may be, for the metrics. Empty when it cannot be measured.
    pub(crate) fn capacity_figures(&self) -> Vec<Figure> {
        let admission = &self.admission;
        let Ok(usage) = self.whole_usage() else { return Vec::new() };
        let limits = &admission.limits;
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let figure = |name, help, value| Figure { name, help, value };
        vec![
            figure("machines", "Machines that run or are being started.", count(usage.machines)),
            figure("machines_limit", "Machines that may run.", count(limits.machines)),
            figure("memory_promised_bytes", "The sizes of those machines' memory.", usage.promised),
            figure(
                "memory_promised_limit_bytes",
                "What may be promised to all of them.",
                limits.promises(usage.memory_total),
            ),
            figure(
                "memory_private_bytes",
                "Memory that machines do not share with others.",
                usage.private,
            ),
            figure(
                "memory_expected_bytes",
                "What machines that are being started will need.",
                usage.memory_expected,
            ),
            figure(
                "memory_total_bytes",
                "Memory of the host, or allowed on it.",
                usage.memory_total,
            ),
            figure(
                "memory_available_bytes",
                "Memory of the host that is available.",
                usage.memory_available,
            ),
            figure(
                "memory_reserve_bytes",
                "Memory into which nothing is created.",
                limits.memory_reserve,
            ),
            figure("disk_free_bytes", "Free room on the pool.", usage.disk_free),
            figure(
                "disk_reserve_bytes",
                "Room on the pool into which nothing is created.",
                limits.disk_reserve,
            ),
            figure(
                "creates_waiting",
                "Creates that wait for room.",
                count(admission.waiting.load(Ordering::SeqCst)),
            ),
        ]
    }

    /// How many creates were refused, by what was short.
    pub(crate) fn refused_creates(&self) -> BTreeMap<&'static str, u64> {
        locked(&self.admission.ledger).refused.clone()
    }

    /// Until the server closes: machines stand ready only while there is room for others beside them, and those that a
    /// full disk has stopped go on when there is room again.
    pub(crate) async fn watch_room(self: Arc<Self>) {
        let mut out_of_room = BTreeSet::new();
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_AGAIN * 2) => {}
                () = self.closed.cancelled() => return,
            }
            match self.whole_usage() {
                Ok(usage) => {
                    self.pool.set_room(self.admission.limits.may_stand_ready(&usage));
                    self.let_go_on(&mut out_of_room, usage.disk_free).await;
                }
                Err(error) => tracing::warn!(cause = error.causes(), "failed to measure the host"),
            }
        }
    }
}

impl Sandboxes {
    /// `known`: those that were told of already.
    async fn let_go_on(&self, known: &mut BTreeSet<SandboxId>, disk_free: u64) {
        for entry in self.registry.all() {
            let id = entry.look(|row| row.id);
            let Some(inside) = entry.inside() else {
                known.remove(&id);
                continue;
            };
            if !inside.machine.is_out_of_room() {
                if known.remove(&id) {
                    tracing::info!(sandbox = %id, "goes on: there is room on the pool again");
                }
                continue;
            }
            if known.insert(id) {
                tracing::error!(sandbox = %id, disk_free, "stands still: its write found no room on the pool");
            }
            if disk_free >= ROOM_TO_GO_ON
                && entry.look(|row| row.state) == State::Running
                && let Err(error) = inside.machine.try_writes_again().await
            {
                tracing::warn!(sandbox = %id, %error, "failed to let a sandbox go on");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use api::ErrorCode;

    use super::*;
    use crate::{config::Capacity, sandbox::testing::Alone};

    const NEED: Need = Need { promised: 0, memory: 0, disk: 0 };
    const PATIENT: Duration = Duration::from_secs(20);

    async fn host(capacity: Capacity) -> Alone {
        let alone = Alone::new(capacity).await;
        tokio::time::pause();
        alone
    }

    fn one_machine() -> Capacity {
        Capacity {
            most_machines: 1,
            memory_reserve: Some(0),
            disk_reserve: Some(0),
            ..Capacity::default()
        }
    }

    #[tokio::test]
    async fn those_who_wait_come_in_the_order_of_their_arrival() {
        let host = host(one_machine()).await;
        let mut admitted = host.sandboxes.admit(NEED, PATIENT).await.unwrap();
        let (done, mut order) = tokio::sync::mpsc::unbounded_channel();
        for number in 0..4 {
            let (sandboxes, done) = (Arc::clone(&host.sandboxes), done.clone());
            tokio::spawn(async move {
                let next = sandboxes.admit(NEED, PATIENT).await.unwrap();
                done.send((number, next)).unwrap();
            });
            tokio::task::yield_now().await;
        }
        for expected in 0..4 {
            assert!(order.try_recv().is_err(), "only one may start at a time");
            drop(admitted);
            let (number, next) = order.recv().await.unwrap();
            assert_eq!(number, expected);
            admitted = next;
        }
    }

    #[tokio::test]
    async fn a_create_without_room_is_refused_before_its_client_gives_up() {
        let host = host(one_machine()).await;
        let _admitted = host.sandboxes.admit(NEED, PATIENT).await.unwrap();
        let began = Instant::now();
        let refused = host.sandboxes.admit(NEED, PATIENT).await.unwrap_err();
        assert_eq!((refused.code, refused.retry_after.is_some()), (ErrorCode::Unavailable, true));
        assert!(began.elapsed() <= ROOM_PATIENCE + LOOK_AGAIN, "{:?}", began.elapsed());
        assert_eq!(host.sandboxes.refused_creates()["machines"], 1);
    }

    #[tokio::test]
    async fn nothing_is_created_into_the_reserves() {
        let memory = Capacity { memory_reserve: Some(1 << 50), ..one_machine() };
        let refused = host(memory).await.sandboxes.admit(NEED, PATIENT).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::Unavailable);
        tokio::time::resume();
        let disk = Capacity { disk_reserve: Some(1 << 60), ..one_machine() };
        let refused = host(disk).await.sandboxes.admit(NEED, PATIENT).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::CapacityExceeded);
        tokio::time::resume();
        let huge = Need { promised: 1 << 50, ..NEED };
        let host = host(one_machine()).await;
        let refused = host.sandboxes.admit(huge, PATIENT).await.unwrap_err();
        assert_eq!(refused.code, ErrorCode::CapacityExceeded);
        assert!(host.sandboxes.is_too_large(1 << 30) && !host.sandboxes.is_too_large(256));
    }

    #[tokio::test]
    async fn the_queue_has_an_end() {
        let host = host(one_machine()).await;
        let _admitted = host.sandboxes.admit(NEED, PATIENT).await.unwrap();
        let all = (0..MOST_WAITING + 10).map(|_| async {
            let began = Instant::now();
            assert!(host.sandboxes.admit(NEED, PATIENT).await.is_err());
            began.elapsed()
        });
        let waited = futures::future::join_all(all).await;
        assert_eq!(waited.iter().filter(|waited| waited.is_zero()).count(), 10);
        assert!(waited.iter().all(|waited| *waited <= ROOM_PATIENCE + LOOK_AGAIN));
    }
}
