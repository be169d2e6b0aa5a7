//! Sandboxes: who has which, what they are to become, and the way there.
//!
//! A request only sets a row's target; the sandbox's own driver takes the steps. The rules are in [`state`].

mod admission;
mod again;
mod ahead;
mod bake;
mod capacity;
mod create;
mod deleting;
mod disks;
mod driver;
mod events;
mod exec;
mod execs;
mod expiry;
mod fields;
mod figures;
mod files;
mod fork;
mod hibernation;
mod host_memory;
mod idle;
mod kernels;
mod logs;
mod machines;
mod managed;
mod network;
mod passing;
mod pausing;
mod pool;
mod ports;
mod power;
mod recovery;
mod registry;
mod root;
mod saved;
mod saving;
mod site;
mod snapshot_sizes;
mod snapshots;
mod state;
mod terminals;
#[cfg(test)]
mod testing;
mod transfers;
mod transition;
mod trees;
mod usage;
mod volumes;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use api::{AccountId, ErrorCode, Lifecycle, Sandbox, SandboxId, SandboxStatus, UpdateLifecycle};
use machine::guest::Guest;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use self::execs::ExecLimits;
pub(crate) use self::execs::{Exec, Execs, Origin, Page, Started};
#[cfg(test)]
pub(crate) use self::execs::{Since, Takers, watch_again};
use self::{
    admission::Admission, events::Events, fields::ttl_of, host_memory::HostMemory, state::Wish,
};
pub(crate) use self::{
    ahead::Kind,
    bake::{Bakes, Size},
    capacity::Limits,
    create::{DEFAULT_TEMPLATE, DatabaseBeginning},
    deleting::GONE_DEADLINE,
    fields::{DISK_MIB, check_environment},
    pool::Pool,
    ports::Connection,
    registry::{Registry, locked, not_found as no_sandbox},
    site::{Sites, Slots, instance_of, uids},
    snapshots::NOTICED,
    state::{State, Target},
};
pub use self::{
    exec::{ExecEvent, ExecWatch},
    files::{AsUser, DirEntries, FileContent, Read, Written, too_large},
    kernels::CellWatch,
    logs::{Line, LogReader, Logs},
    terminals::{NewTerminal, Screen, Terminal},
    trees::{FileWatch, PackedTree},
};
pub(crate) use self::{
    managed::{DatabaseUrls, Visitor},
    usage::InUse,
};
use crate::{
    Error,
    clock::Clock,
    db::{Db, SandboxRow},
    template::Templates,
    volume::Volumes,
};

/// Of a server that is asked to stop. What is then still under way is found half-made by the next start, as after a crash.
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);
/// Before a change that the database refused is tried again.
const DATABASE_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_IDLE: u64 = 30 * 86_400;
/// A list's page, when the client names no size, is everything; named, it is at most this.
const LONGEST_PAGE: usize = 1000;

pub struct Sandboxes {
    db: Db,
    clock: Clock,
    default_ttl: Duration,
    registry: Registry,
    templates: Arc<Templates>,
    bakes: Arc<Bakes>,
    pool: Arc<Pool>,
    sites: Sites,
    volumes: Arc<Volumes>,
    events: Events,
    execs: Arc<execs::Shared>,
    admission: Arc<Admission>,
    past_traffic: network::PastTraffic,
    snapshot_sizes: snapshot_sizes::SnapshotSizes,
    /// What commands are given as `DATABASE_URL`.
    pub(crate) database_urls: DatabaseUrls,
    tasks: TaskTracker,
    closed: CancellationToken,
}

/// What sandboxes are made from and kept in.
pub(crate) struct Parts {
    pub(crate) db: Db,
    pub(crate) clock: Clock,
    pub(crate) templates: Arc<Templates>,
    pub(crate) bakes: Arc<Bakes>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) sites: Sites,
    pub(crate) volumes: Arc<Volumes>,
}

/// A list's filter.
#[derive(Debug, Default)]
pub struct Filter {
    pub status: Option<SandboxStatus>,
    pub metadata: BTreeMap<String, String>,
    pub limit: Option<usize>,
    pub cursor: Option<String>,
}

/// A running sandbox's inside: what commands and files need.
#[derive(Clone)]
pub struct Running {
    pub guest: Guest,
    /// Of the create; given to every command.
    pub environment: Arc<BTreeMap<String, String>>,
    pub logs: Arc<Logs>,
    /// `None`: of no sandbox yet.
    pub(crate) execs: Option<Arc<Execs>>,
    /// As long as this lives, the sandbox is in use. `None`: no sandbox yet.
    pub(crate) in_use: Option<Arc<InUse>>,
}

impl Running {
    /// For what the server runs there on its own behalf: it is neither among the sandbox's execs nor in its log.
    #[must_use]
    pub(crate) fn unrecorded(self) -> Self {
        Self { logs: Arc::default(), execs: None, ..self }
    }
}

impl Sandboxes {
    /// # Errors
    /// The host cannot be measured.
    pub(crate) fn new(parts: Parts, config: &crate::Config) -> Result<Arc<Self>, Error> {
        let memory = HostMemory::measure().map_err(Error::from_start)?;
        let room = store::pool::room(parts.sites.layout.data()).map_err(Error::from_start)?;
        let limits = config.capacity.limits(memory.total, room.total_bytes);
        tracing::info!(
            ?limits,
            memory = memory.total,
            pool = room.total_bytes,
            "measured the host"
        );
        let (events, waiting) = Events::new(&parts.clock);
        let tasks = TaskTracker::new();
        let closed = CancellationToken::new();
        tasks.spawn(events::write(parts.db.clone(), waiting, closed.clone()));
        let (execs, ended) = execs::Shared::new(config.execs.clone(), parts.clock.clone());
        tasks.spawn(execs::write(parts.db.clone(), ended, closed.clone()));
        Ok(Arc::new(Self {
            db: parts.db,
            clock: parts.clock,
            default_ttl: config.default_ttl,
            registry: Registry::default(),
            templates: parts.templates,
            bakes: parts.bakes,
            pool: parts.pool,
            sites: parts.sites,
            volumes: parts.volumes,
            events,
            execs,
            admission: Admission::new(limits),
            past_traffic: network::PastTraffic::default(),
            snapshot_sizes: snapshot_sizes::SnapshotSizes::default(),
            database_urls: DatabaseUrls::default(),
            tasks,
            closed,
        }))
    }

    fn entry(&self, row: SandboxRow) -> registry::Entry {
        let execs = Execs::new(&self.execs, &self.sites.layout, row.id);
        registry::Entry::new(row, execs)
    }

    pub(crate) fn accelerator_name(&self) -> String {
        self.bakes.accelerator().to_string()
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub fn get(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> {
        let entry = self.registry.find(account, id)?;
        Ok(entry.shown(&self.accelerator_name(), &self.clock))
    }

    /// Newest first, and the next cursor when there is more.
    ///
    /// # Errors
    /// 400 for a cursor that no list gave out.
    pub fn list(
        &self,
        account: &AccountId,
        filter: &Filter,
    ) -> Result<(Vec<Sandbox>, Option<String>), Error> {
        let after = filter.cursor.as_deref().map(parse_cursor).transpose()?;
        let accelerator = self.accelerator_name();
        let mut found: Vec<((i64, SandboxId), Sandbox)> = self
            .registry
            .all()
            .into_iter()
            .filter(|entry| entry.look(|row| row.account == *account && !row.managed))
            .map(|entry| {
                (entry.look(|row| (row.created_at, row.id)), entry.shown(&accelerator, &self.clock))
            })
            .filter(|(place, sandbox)| {
                after.as_ref().is_none_or(|after| place < after)
                    && filter.status.is_none_or(|status| sandbox.status == status)
                    && filter
                        .metadata
                        .iter()
                        .all(|(key, value)| sandbox.metadata.get(key) == Some(value))
            })
            .collect();
        found.sort_unstable_by(|(left, _), (right, _)| right.cmp(left));
        let limit = filter.limit.map_or(usize::MAX, |limit| limit.min(LONGEST_PAGE));
        let next = (found.len() > limit)
            .then(|| found[limit - 1].0)
            .map(|(created, id)| format!("{created}.{id}"));
        found.truncate(limit);
        Ok((found.into_iter().map(|(_, sandbox)| sandbox).collect(), next))
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub fn lifecycle(&self, account: &AccountId, id: &SandboxId) -> Result<Lifecycle, Error> {
        let sandbox = self.get(account, id)?;
        Ok(Lifecycle {
            status: sandbox.status,
            persistent: sandbox.persistent,
            ttl_seconds: sandbox.ttl_seconds,
            expires_at: sandbox.expires_at,
            idle_seconds: self.registry.find(account, id)?.look(|row| row.idle_seconds),
        })
    }

    /// The time to live starts again.
    ///
    /// # Errors
    /// 400 names the bad field; 404 when it is not theirs or gone.
    pub async fn update_lifecycle(
        &self,
        account: &AccountId,
        id: &SandboxId,
        update: UpdateLifecycle,
    ) -> Result<Lifecycle, Error> {
        let entry = self.registry.find(account, id)?;
        managed::refuse(&entry)?;
        let now = self.clock.steady_ms();
        entry.accept(Wish::Change, now)?;
        let idle = update.idle_seconds.map(idle_of).transpose()?;
        let ttl = match ttl_of(update.ttl_seconds, update.persistent)? {
            Some(ttl) => Some(ttl),
            // No longer persistent, with no word on how long.
            None if update.persistent == Some(false)
                && entry.look(|row| row.ttl_seconds.is_none()) =>
            {
                Some(Some(self.default_ttl.as_secs()))
            }
            None => None,
        };
        if ttl.is_none() && idle.is_none() {
            return self.lifecycle(account, id);
        }
        entry.change(|row| {
            if let Some(idle) = idle {
                row.idle_seconds = idle;
            }
            if let Some(ttl) = ttl {
                row.ttl_seconds = ttl;
                let left = ttl.map(|ttl| 0_i64.saturating_add_unsigned(ttl.saturating_mul(1000)));
                row.expires_at = left.map(|left| now.saturating_add(left));
                row.ttl_left_ms = None;
                if matches!(row.state, State::Paused | State::Hibernated) {
                    pausing::hold_ttl(row, now);
                }
            }
        });
        self.save_row(&entry).await?;
        self.lifecycle(account, id)
    }

    /// A hibernated one is woken first.
    ///
    /// # Errors
    /// 404 when it is not theirs, gone, or expired; 409 or 503 when it is not running, with the way out.
    pub async fn running(&self, account: &AccountId, id: &SandboxId) -> Result<Running, Error> {
        let entry = self.registry.find(account, id)?;
        let in_use = self.awake(&entry).await?;
        self.inside_of(&entry, in_use)
    }

    /// A hibernated one is left alone: for whoever may only look.
    ///
    /// # Errors
    /// As [`Sandboxes::running`]; 409 when it is hibernated.
    pub fn running_already(&self, account: &AccountId, id: &SandboxId) -> Result<Running, Error> {
        let entry = self.registry.find(account, id)?;
        let in_use = entry.usage.begin();
        entry.accept(Wish::Inside, self.clock.steady_ms())?;
        self.inside_of(&entry, in_use)
    }

    /// What its commands printed, in any state.
    ///
    /// # Errors
    /// 404 when it is not theirs, gone, or expired.
    pub async fn logs(&self, account: &AccountId, id: &SandboxId) -> Result<Arc<Logs>, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        self.restore_log(&entry).await?;
        Ok(Arc::clone(&entry.logs))
    }

    /// A channel that is lost because the sandbox is gone: that is the better answer.
    pub fn explain(&self, account: &AccountId, id: &SandboxId, error: Error) -> Error {
        self.explain_for(Wish::Inside, account, id, error)
    }

    /// As [`Sandboxes::explain`], of what also is done to one that rests.
    pub fn explain_save(&self, account: &AccountId, id: &SandboxId, error: Error) -> Error {
        self.explain_for(Wish::Snapshot, account, id, error)
    }

    fn explain_for(&self, wish: Wish, account: &AccountId, id: &SandboxId, error: Error) -> Error {
        if error.code != ErrorCode::Unavailable {
            return error;
        }
        let found = self.registry.find(account, id);
        match found.and_then(|entry| entry.accept(wish, self.clock.steady_ms())) {
            Err(reason) if matches!(reason.code, ErrorCode::NotFound | ErrorCode::Conflict) => {
                reason
            }
            Ok(()) | Err(_) => error,
        }
    }

    /// The newest row is the last that is written, whoever writes.
    async fn save_row(&self, entry: &registry::Entry) -> Result<(), Error> {
        let _writing = entry.writing.lock().await;
        self.db.update_sandbox(&entry.row()).await
    }

    /// False when the server closes meanwhile.
    async fn pause_for_database(&self) -> bool {
        tokio::select! {
            () = tokio::time::sleep(DATABASE_PAUSE) => true,
            () = self.closed.cancelled() => false,
        }
    }

    /// How many there are in each state, for the metrics.
    pub fn count_by_status(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.registry.all() {
            *counts.entry(entry.look(|row| row.state.name())).or_default() += 1;
        }
        counts
    }

    /// Of the machines that run.
    pub(crate) fn slots(&self) -> BTreeSet<u16> {
        self.registry.all().iter().filter_map(|entry| entry.look(|row| row.slot)).collect()
    }

    /// How many machines stand ready, for the metrics.
    pub fn ready_machines(&self) -> usize {
        self.pool.len()
    }

    /// Ends what this server does beside its requests. Running sandboxes go on without it.
    pub async fn close(&self) {
        self.closed.cancel();
        self.pool.close();
        self.tasks.close();
        if tokio::time::timeout(CLOSE_DEADLINE, self.tasks.wait()).await.is_err() {
            tracing::warn!(
                "some sandboxes are still being made or deleted; the next start goes on with them"
            );
        }
    }
}

impl Sandboxes {
    fn inside_of(&self, entry: &registry::Entry, in_use: InUse) -> Result<Running, Error> {
        if entry.is_out_of_room() {
            return Err(Error::new(ErrorCode::CapacityExceeded, registry::OUT_OF_ROOM));
        }
        let (mut environment, databases) =
            entry.look(|row| (row.environment.clone(), row.databases.clone()));
        self.database_urls.add_to(&mut environment, &databases);
        Ok(Running {
            guest: entry.guest().ok_or_else(registry::not_found)?,
            environment: Arc::new(environment),
            logs: Arc::clone(&entry.logs),
            execs: Some(Arc::clone(&entry.execs)),
            in_use: Some(Arc::new(in_use)),
        })
    }
}

/// `None`: it stays running however long nobody uses it.
fn idle_of(seconds: i64) -> Result<Option<u64>, Error> {
    match u64::try_from(seconds) {
        Ok(0) => Ok(None),
        Ok(seconds) if seconds <= LONGEST_IDLE => Ok(Some(seconds)),
        Ok(_) | Err(_) => Err(Error::invalid(format!(
            "`idle_seconds` must be between 1 and {LONGEST_IDLE}, or 0 for a sandbox that stays running"
        ))),
    }
}

fn parse_cursor(text: &str) -> Result<(i64, SandboxId), Error> {
    let unknown = || Error::invalid("`cursor` must be one that a list gave in `X-Next-Cursor`");
    let (created, id) = text.split_once('.').ok_or_else(unknown)?;
    Ok((created.parse().map_err(|_| unknown())?, id.parse().map_err(|_| unknown())?))
}
