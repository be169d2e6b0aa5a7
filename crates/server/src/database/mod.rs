//! Databases: PostgreSQL in a sandbox of its own, whose root disk is flushed when PostgreSQL flushes. Restored from a bake
//! in which it runs already, reached through [`proxy`], looked after by one keeper each ([`life`]).

mod admin;
mod backup;
mod credentials;
mod greeting;
mod life;
mod proxy;
mod requests;
mod room;
mod routing;
mod settings;
mod starting;
mod tls;

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock},
    time::Duration,
};

use api::{AccountId, DatabaseId, SandboxId};
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use self::{
    backup::{Archive, Backups},
    greeting::Strangers,
    tls::Tls,
};
pub(crate) use self::{credentials::Credentials, life::TEMPLATE};
pub use self::{
    settings::{BackupPlace, BackupSettings, DatabaseSettings},
    tls::CertificateFiles,
};
use crate::{
    Error,
    account::Plans,
    clock::Clock,
    db::{DatabaseRow, Db},
    keys::Caller,
    sandbox::{Sandboxes, State, Target},
};

/// Of PostgreSQL in its guest.
const PORT: u16 = 5432;
const CLOSE_DEADLINE: Duration = Duration::from_secs(10);

/// What a database is. Written to its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DatabaseState {
    Provisioning,
    /// It has its own names and passwords.
    Ready,
    /// It could not be made.
    Failed,
    Deleting,
}

impl DatabaseState {
    const ALL: [Self; 4] = [Self::Provisioning, Self::Ready, Self::Failed, Self::Deleting];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Provisioning => "provisioning",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Deleting => "deleting",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

pub struct Databases {
    db: Db,
    clock: Clock,
    sandboxes: Arc<Sandboxes>,
    settings: DatabaseSettings,
    plans: Arc<Plans>,
    /// In URLs, where databases have no names of their own.
    host: String,
    /// Where sandboxes come to.
    door: IpAddr,
    tls: Tls,
    backups: Backups,
    entries: RwLock<HashMap<DatabaseId, Arc<Entry>>>,
    strangers: Strangers,
    /// Held while a port is chosen.
    choosing: AsyncMutex<()>,
    tasks: TaskTracker,
    closed: CancellationToken,
}

/// One database.
pub(crate) struct Entry {
    row: watch::Sender<DatabaseRow>,
    /// Held by whoever starts PostgreSQL or changes how it is reached.
    turn: AsyncMutex<()>,
    /// Held by whoever brings it up: when they began last, and why that failed if it did.
    brought_up: AsyncMutex<Option<(Instant, Option<String>)>>,
    /// Held while the row is written.
    writing: AsyncMutex<()>,
    /// Where the clients of its sessions are, each once for each session.
    visitors: Mutex<Vec<IpAddr>>,
    /// Why it refuses writes.
    short_of: Mutex<Option<String>>,
    archive: Archive,
    /// Ends all sessions there are.
    sessions_end: Mutex<CancellationToken>,
    /// It is deleted: nobody comes in any longer.
    closed: CancellationToken,
    removed: watch::Sender<bool>,
}

/// One client's connection, for as long as this lives.
struct Session {
    entry: Arc<Entry>,
    from: IpAddr,
    end: CancellationToken,
}

impl Session {
    async fn ended(&self) {
        self.end.cancelled().await;
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let mut visitors = self.entry.visitors();
        if let Some(at) = visitors.iter().position(|visitor| *visitor == self.from) {
            visitors.swap_remove(at);
        }
    }
}

impl Entry {
    fn new(row: DatabaseRow) -> Self {
        Self {
            row: watch::Sender::new(row),
            turn: AsyncMutex::new(()),
            brought_up: AsyncMutex::default(),
            writing: AsyncMutex::new(()),
            visitors: Mutex::default(),
            short_of: Mutex::default(),
            archive: Archive::default(),
            sessions_end: Mutex::default(),
            closed: CancellationToken::new(),
            removed: watch::Sender::new(false),
        }
    }

    fn look<T>(&self, at: impl FnOnce(&DatabaseRow) -> T) -> T {
        at(&self.row.borrow())
    }

    fn change(&self, with: impl FnOnce(&mut DatabaseRow)) {
        self.row.send_modify(with);
    }

    fn row(&self) -> DatabaseRow {
        self.row.borrow().clone()
    }

    /// Waits until it is to go.
    async fn deleted(&self) {
        let mut row = self.row.subscribe();
        // It lives as long as we do.
        let _ = row.wait_for(|row| row.state == DatabaseState::Deleting).await;
    }

    fn set_unless_deleted(&self, state: DatabaseState, error: Option<String>) {
        self.change(|row| {
            if row.state != DatabaseState::Deleting {
                row.state = state;
                row.error = error;
            }
        });
    }

    fn id(&self) -> DatabaseId {
        self.look(|row| row.id)
    }

    fn sandbox(&self) -> (AccountId, SandboxId) {
        self.look(|row| (row.account.clone(), row.id.sandbox()))
    }

    /// `None` when there are `most` already.
    fn begin_session(self: &Arc<Self>, from: IpAddr, most: usize) -> Option<Session> {
        let before = {
            let mut visitors = self.visitors();
            visitors.push(from);
            visitors.len() - 1
        };
        let end = self.sessions_end.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.archive.visited.notify_one();
        let session = Session { entry: Arc::clone(self), from, end };
        (before < most).then_some(session)
    }

    fn visitors(&self) -> MutexGuard<'_, Vec<IpAddr>> {
        self.visitors.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sessions(&self) -> usize {
        self.visitors().len()
    }

    fn is_visited_from(&self, from: IpAddr) -> bool {
        self.visitors().contains(&from)
    }

    fn end_sessions(&self) {
        let mut end = self.sessions_end.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *end).cancel();
    }
}

impl Databases {
    /// # Errors
    /// The certificate of the settings cannot be used.
    pub(crate) async fn open(
        db: Db,
        clock: Clock,
        sandboxes: Arc<Sandboxes>,
        config: &crate::Config,
    ) -> Result<Arc<Self>, Error> {
        let settings = config.databases.clone();
        let door = IpAddr::V4(sandboxes.door());
        let host = settings.host.clone().unwrap_or_else(|| door.to_string());
        let named = settings.suffix.as_ref().map(|suffix| format!("*.{suffix}"));
        let directory = config.data_dir.join("database-tls");
        let tls = Tls::open(
            settings.certificate.as_ref(),
            &directory,
            named.as_ref().unwrap_or(&host),
            door,
        )
        .await?;
        let backups = Backups::open(&settings.backups, &config.data_dir)?;
        Ok(Arc::new(Self {
            db,
            clock,
            sandboxes,
            settings,
            plans: Arc::clone(&config.plans),
            host,
            door,
            tls,
            backups,
            entries: RwLock::default(),
            strangers: Strangers::default(),
            choosing: AsyncMutex::new(()),
            tasks: TaskTracker::new(),
            closed: CancellationToken::new(),
        }))
    }

    /// The rows are the truth: each gets its keeper again. After the sandboxes were found again.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub(crate) async fn recover(self: &Arc<Self>) -> Result<(), Error> {
        let rows = self.db.all_databases().await?;
        let known: Vec<_> = rows.iter().map(|row| row.id.sandbox()).collect();
        for row in rows {
            let caller = Caller::of_server(&row.account);
            let entry = Arc::new(Entry::new(row));
            entry.archive.load(&self.db, &entry.id()).await?;
            self.insert(&entry);
            if entry.look(|row| row.state) == DatabaseState::Ready {
                self.tell_sandboxes(&entry);
            }
            self.tasks.spawn(Arc::clone(self).keep(entry, caller, Vec::new()));
        }
        self.tasks.spawn(Arc::clone(self).route());
        self.tasks.spawn(Arc::clone(self).remove_backups());
        for (account, sandbox) in self.sandboxes.managed() {
            if !known.contains(&sandbox) {
                tracing::warn!(%sandbox, "removing the machine of a database that is gone");
                self.sandboxes.delete_managed(&account, &sandbox).await?;
            }
        }
        Ok(())
    }

    /// Sessions end; databases go on.
    pub(crate) async fn close(&self) {
        self.closed.cancel();
        self.tasks.close();
        if tokio::time::timeout(CLOSE_DEADLINE, self.tasks.wait()).await.is_err() {
            tracing::warn!("some databases are still being made or deleted");
        }
    }

    fn insert(&self, entry: &Arc<Entry>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        entries.insert(entry.id(), Arc::clone(entry));
    }

    /// Its machine, and shall go on.
    fn runs(&self, entry: &Entry) -> bool {
        let (account, sandbox) = entry.sandbox();
        self.sandboxes.state_of(&account, &sandbox) == Some((State::Running, Target::Running))
    }

    fn all(&self) -> Vec<Arc<Entry>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries.values().cloned().collect()
    }

    /// A foreign one is as unknown as one that never was.
    fn find(&self, account: &AccountId, id: &str) -> Result<Arc<Entry>, Error> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let found = id.parse().ok().and_then(|id: DatabaseId| entries.get(&id));
        found.filter(|entry| entry.look(|row| row.account == *account)).cloned().ok_or_else(|| {
            Error::not_found("there is no database with this id; list them with GET /v1/databases")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_keeps_states() {
        for state in DatabaseState::ALL {
            assert_eq!(DatabaseState::from_name(state.name()), Some(state));
        }
    }
}
