//! What is made before anybody asks for it: machines that have run ahead (see [`ahead`](super::ahead)), and processes
//! that have their network and wait for a state, where there may be no such machine.
//!
//! Either takes CPU, so refilling waits until no create is under way, and stops for each that comes.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use machine::{Hypervisor, Prepared};
use tokio::{sync::Notify, time::Instant};

use super::{
    ahead::{Ahead, Kind, NotMade},
    registry::locked,
    saved::SavedMachine,
    site::{Site, Sites},
};
use crate::{Error, clock::Clock};

/// A size that nobody asked for so long is no longer kept ready.
const KEPT_READY: Duration = Duration::from_secs(600);
/// Sizes kept ready at once.
const MOST_SIZES: usize = 4;
/// After the last create, before machines are started ahead.
const QUIET: Duration = Duration::from_millis(150);
/// After a failure to start one ahead.
const PAUSE: Duration = Duration::from_secs(5);
/// After machines gave way to a create: others may follow.
const GIVEN_WAY: Duration = Duration::from_secs(10);

pub(crate) struct Ready {
    pub(crate) site: Site,
    pub(crate) ahead: Ahead,
}

/// A process that waits for a state.
pub(crate) struct Started {
    pub(crate) site: Site,
    pub(crate) prepared: Prepared,
}

/// Of which saved machine, by its identity, and how far.
type Goods = (String, Kind);

pub(crate) struct Pool {
    hypervisor: Hypervisor,
    pub(super) sites: Sites,
    pub(super) clock: Clock,
    /// For each size in use.
    depth: usize,
    shelves: Mutex<HashMap<Goods, Shelf>>,
    /// For starts that are about to come.
    sites_ahead: Mutex<Vec<Site>>,
    creates: AtomicUsize,
    /// Whether the host has room for machines that nobody uses yet.
    has_room: AtomicBool,
    /// No machine is started ahead before then.
    not_before: Mutex<Instant>,
    changed: Notify,
    pub(super) closed: tokio_util::sync::CancellationToken,
}

struct Shelf {
    saved: Arc<SavedMachine>,
    wanted: Instant,
    ready: Vec<Ready>,
}

/// While it lives, nothing is started ahead.
pub(crate) struct CreateUnderWay<'a>(&'a Pool);

impl Drop for CreateUnderWay<'_> {
    fn drop(&mut self) {
        self.0.creates.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

impl From<Started> for Ready {
    fn from(Started { site, prepared }: Started) -> Self {
        Self { site, ahead: Ahead::Process(prepared) }
    }
}

impl Pool {
    pub(crate) fn new(
        hypervisor: Hypervisor,
        sites: Sites,
        clock: Clock,
        depth: usize,
    ) -> Arc<Self> {
        Arc::new(Self {
            hypervisor,
            sites,
            clock,
            depth,
            shelves: Mutex::default(),
            sites_ahead: Mutex::default(),
            creates: AtomicUsize::new(0),
            has_room: AtomicBool::new(true),
            not_before: Mutex::new(Instant::now()),
            changed: Notify::new(),
            closed: tokio_util::sync::CancellationToken::new(),
        })
    }

    pub(crate) fn create_under_way(&self) -> CreateUnderWay<'_> {
        self.creates.fetch_add(1, Ordering::SeqCst);
        CreateUnderWay(self)
    }

    /// Keeps machines of this size ready from now on.
    pub(crate) fn want(&self, saved: &Arc<SavedMachine>, kind: Kind) {
        let mut shelves = locked(&self.shelves);
        let goods = (saved.identity().to_owned(), kind);
        let shelf = shelves.entry(goods).or_insert_with(|| Shelf {
            saved: Arc::clone(saved),
            wanted: Instant::now(),
            ready: Vec::new(),
        });
        shelf.wanted = Instant::now();
        drop(shelves);
        self.changed.notify_one();
    }

    /// One that stands ready, else a process started now.
    pub(crate) async fn take(&self, saved: &Arc<SavedMachine>, kind: Kind) -> Result<Ready, Error> {
        self.want(saved, kind);
        let goods = (saved.identity().to_owned(), kind);
        loop {
            let found =
                { locked(&self.shelves).get_mut(&goods).and_then(|shelf| shelf.ready.pop()) };
            match found {
                Some(ready) if !ready.ahead.has_exited() => return Ok(ready),
                Some(dead) => {
                    tracing::warn!(
                        slot = dead.site.number(),
                        "a machine started ahead has ended by itself"
                    );
                    dead.site.remove().await;
                }
                None => return Ok(self.start(saved).await?.into()),
            }
        }
    }

    /// Not from the shelves.
    pub(crate) async fn start(&self, saved: &SavedMachine) -> Result<Started, Error> {
        let (ready, ()) = tokio::join!(self.start_process(saved), saved.fetch_memory());
        ready
    }

    async fn start_process(&self, saved: &SavedMachine) -> Result<Started, Error> {
        let begun = Instant::now();
        let memory = saved.memory()?;
        let ahead = locked(&self.sites_ahead).pop();
        let site = match ahead {
            Some(site) => site,
            None => self.sites.prepare().await?,
        };
        let site_took = begun.elapsed();
        let place = site.place();
        let prepared = match place {
            Ok(place) => {
                self.hypervisor.prepare(&saved.spec, memory, place).await.map_err(Error::internal)
            }
            Err(error) => Err(error),
        };
        match prepared {
            Ok(prepared) => {
                let process_took = begun.elapsed() - site_took;
                tracing::debug!(
                    slot = site.number(),
                    ?site_took,
                    ?process_took,
                    "started a process"
                );
                Ok(Started { site, prepared })
            }
            Err(error) => {
                site.remove().await;
                Err(error)
            }
        }
    }

    /// While something else is waited for. What cannot be had is tried again by the start itself, which tells why.
    /// Until `enough`, since starts make theirs side by side.
    pub(crate) async fn make_sites_ahead(&self, count: usize, enough: &AtomicBool) {
        for _ in 0..count {
            if enough.load(Ordering::SeqCst) {
                return;
            }
            match self.sites.prepare().await {
                Ok(site) => locked(&self.sites_ahead).push(site),
                Err(error) => {
                    tracing::debug!(%error, cause = error.causes(), "no site ahead");
                    return;
                }
            }
        }
    }

    /// Those that no start came for.
    pub(crate) async fn remove_sites_ahead(&self) {
        let left = std::mem::take(&mut *locked(&self.sites_ahead));
        futures::future::join_all(left.into_iter().map(Site::remove)).await;
    }

    /// Owns the shelves' filling until [`Pool::close`].
    pub(crate) async fn keep_filled(self: Arc<Self>) {
        while !self.closed.is_cancelled() {
            let wake_up = tokio::time::sleep(KEPT_READY);
            tokio::select! {
                () = self.changed.notified() => {}
                () = wake_up => {}
                () = self.closed.cancelled() => break,
            }
            self.fill().await;
        }
        self.empty().await;
    }

    async fn fill(&self) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(QUIET) => {}
                () = self.closed.cancelled() => return,
            }
            if self.creates.load(Ordering::SeqCst) > 0 {
                // The last create's end rings again.
                return;
            }
            for ready in self.take_unwanted() {
                ready.site.remove().await;
            }
            if !self.has_room.load(Ordering::SeqCst) {
                self.empty().await;
                return;
            }
            if Instant::now() < *locked(&self.not_before) {
                return;
            }
            let Some((saved, kind)) = self.next_to_fill() else { return };
            let goods = (saved.identity().to_owned(), kind);
            match self.make(&saved, kind).await {
                Ok(ready) => self.put(&goods, ready).await,
                Err(NotMade::GivenUp) => {}
                Err(NotMade::Failed(error)) => {
                    tracing::warn!(%error, cause = error.causes(), "failed to start a machine ahead");
                    // It may be gone with its template; whoever asks for it again puts it back. Others shall not wait for
                    // one that cannot be had.
                    self.remove_shelves(|of, _| *of == goods).await;
                    tokio::time::sleep(PAUSE).await;
                    return;
                }
            }
        }
    }

    async fn make(&self, saved: &SavedMachine, kind: Kind) -> Result<Ready, NotMade> {
        match kind {
            Kind::Process => Ok(self.start(saved).await?.into()),
            Kind::Machine => {
                let (site, machine) = self.run_ahead(saved).await?;
                Ok(Ready { site, ahead: Ahead::Machine(machine) })
            }
        }
    }

    /// Of what is being made ahead: comes when no create is under way.
    pub(super) async fn turn(&self) -> Result<(), NotMade> {
        loop {
            let is_time = { Instant::now() >= *locked(&self.not_before) };
            if self.closed.is_cancelled() || !self.has_room.load(Ordering::SeqCst) || !is_time {
                return Err(NotMade::GivenUp);
            }
            if self.creates.load(Ordering::SeqCst) == 0 {
                return Ok(());
            }
            // Whoever changes any of it rings.
            self.changed.notified().await;
        }
    }

    async fn put(&self, goods: &Goods, ready: Ready) {
        let homeless = {
            match locked(&self.shelves).get_mut(goods) {
                Some(shelf) => {
                    shelf.ready.push(ready);
                    None
                }
                None => Some(ready),
            }
        };
        if let Some(ready) = homeless {
            ready.site.remove().await;
        }
    }

    /// What no longer exists is not kept ready.
    pub(crate) async fn forget(&self, key: &str) {
        self.remove_shelves(|_, shelf| shelf.saved.key == key).await;
    }

    async fn remove_shelves(&self, is_one: impl Fn(&Goods, &Shelf) -> bool) {
        let ready: Vec<_> = {
            let mut shelves = locked(&self.shelves);
            let gone = shelves.extract_if(|goods, shelf| is_one(goods, shelf));
            gone.flat_map(|(_, shelf)| shelf.ready).collect()
        };
        for ready in ready {
            ready.site.remove().await;
        }
    }

    /// The most recently wanted size that lacks some.
    fn next_to_fill(&self) -> Option<(Arc<SavedMachine>, Kind)> {
        let shelves = locked(&self.shelves);
        let lacking = shelves.iter().filter(|(_, shelf)| shelf.ready.len() < self.depth);
        // The emptiest first, so that every size has one before any has all.
        let emptiest = lacking.min_by_key(|(_, shelf)| shelf.ready.len());
        emptiest.map(|((_, kind), shelf)| (Arc::clone(&shelf.saved), *kind))
    }

    /// Those of sizes out of use, and of the oldest where there are too many sizes.
    fn take_unwanted(&self) -> Vec<Ready> {
        let mut shelves = locked(&self.shelves);
        let mut by_use: Vec<_> =
            shelves.iter().map(|(key, shelf)| (shelf.wanted, key.clone())).collect();
        by_use.sort_unstable();
        let too_many = by_use.len().saturating_sub(MOST_SIZES);
        let mut unwanted = Vec::new();
        for (place, (wanted, key)) in by_use.into_iter().enumerate() {
            if (place < too_many || wanted.elapsed() > KEPT_READY)
                && let Some(shelf) = shelves.remove(&key)
            {
                unwanted.extend(shelf.ready);
            }
        }
        unwanted
    }

    /// The sizes stay wanted. How many machines there were.
    async fn empty(&self) -> usize {
        self.remove_sites_ahead().await;
        let all: Vec<_> = {
            let mut shelves = locked(&self.shelves);
            shelves.values_mut().flat_map(|shelf| std::mem::take(&mut shelf.ready)).collect()
        };
        let count = all.len();
        futures::future::join_all(all.into_iter().map(|ready| ready.site.remove())).await;
        count
    }

    /// Ends what stands ready, for a create that needs the memory. How many machines that were.
    pub(crate) async fn give_way(&self) -> usize {
        *locked(&self.not_before) = Instant::now() + GIVEN_WAY;
        self.changed.notify_one();
        self.empty().await
    }

    /// Whether machines may stand ready from now on; those that do are ended otherwise.
    pub(crate) fn set_room(&self, has_room: bool) {
        let had_room = self.has_room.swap(has_room, Ordering::SeqCst);
        let is_time = { Instant::now() >= *locked(&self.not_before) };
        if had_room != has_room {
            tracing::info!(has_room, "whether machines stand ready has changed");
        }
        if had_room != has_room || (has_room && is_time && self.next_to_fill().is_some()) {
            self.changed.notify_one();
        }
    }

    /// Ends the filling; what stood ready is ended by the task that filled.
    pub(crate) fn close(&self) {
        self.closed.cancel();
        self.changed.notify_one();
    }

    /// Of those that stand ready.
    pub(crate) fn pids(&self) -> Vec<u32> {
        let shelves = locked(&self.shelves);
        let ready = shelves.values().flat_map(|shelf| &shelf.ready);
        ready.map(|ready| ready.ahead.pid()).collect()
    }

    /// How many stand ready.
    pub(crate) fn len(&self) -> usize {
        locked(&self.shelves).values().map(|shelf| shelf.ready.len()).sum()
    }
}
