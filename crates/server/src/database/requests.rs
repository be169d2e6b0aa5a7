//! What is asked of databases by their users.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use api::{
    AccountId, CloneDatabase, CreateDatabase, Database, DatabaseConnection, DatabaseList,
    DatabaseSize, DatabaseStatus, UpdateDatabase,
};

use super::{Credentials, DatabaseState, Databases, Entry, backup::parse_target};
use crate::{
    Error, clock,
    db::{DatabaseRow, NO_PORT},
    keys::Caller,
    sandbox::{GONE_DEADLINE, State, Target},
};

/// A client that asks for one which is being made is answered when it is there, or after so long.
const PATIENCE: Duration = Duration::from_secs(5);
const LONGEST_LABEL: usize = 256;
const LONGEST_IDLE: u64 = 30 * 86_400;
const MOST_CPUS: u32 = 32;
/// Of ports that somebody else on the host has.
const PORT_TRIES: usize = 64;

impl Databases {
    /// Answers before it can be reached.
    ///
    /// # Errors
    /// 400 names the bad field; the account's plan does not allow one more.
    pub async fn create(
        self: &Arc<Self>,
        caller: &Caller,
        request: CreateDatabase,
    ) -> Result<Database, Error> {
        let size = size_of(request.size, request.memory_mb)?;
        let cpu = request.cpu.unwrap_or_else(|| size.cpu());
        if !(1..=MOST_CPUS).contains(&cpu) {
            return Err(Error::invalid(format!("`cpu` must be between 1 and {MOST_CPUS}")));
        }
        let idle_seconds = request.idle_seconds.unwrap_or(self.settings.idle.as_secs());
        let row = DatabaseRow {
            id: caller.new_id(0),
            account: caller.account.clone(),
            label: label_of(request.label)?.unwrap_or_default(),
            size,
            cpu,
            always_on: request.always_on.unwrap_or_default(),
            idle_seconds: check_idle(idle_seconds)?,
            port: NO_PORT,
            state: DatabaseState::Provisioning,
            error: None,
            credentials: Credentials::random(),
            origin: Credentials::of_template(),
            cloned_from: None,
            target_time: None,
            created_at: self.clock.now_ms(),
        };
        self.begin(caller, row).await
    }

    /// Its keeper does the rest.
    async fn begin(self: &Arc<Self>, caller: &Caller, row: DatabaseRow) -> Result<Database, Error> {
        // Of a request that came again after its server had died.
        if let Ok(there) = self.find(&caller.account, &row.id.to_string()) {
            return Ok(self.shown(&there, Secrets::Withheld));
        }
        // Before a port is looked for; it counts when its row is written.
        self.db.check_quota(&caller.account, &caller.plan, &row.amounts(), None).await?;
        let (databases, caller) = (Arc::clone(self), Caller { ticket: None, ..caller.clone() });
        // Goes on to its end when whoever asked has gone: a row without a keeper would be seen by nobody.
        let task = self.tasks.spawn(async move { databases.place(caller, row).await });
        let entry = task.await.map_err(Error::internal)??;
        Ok(self.shown(&entry, Secrets::Withheld))
    }

    /// Gives it a port, a row and a keeper.
    async fn place(
        self: Arc<Self>,
        caller: Caller,
        mut row: DatabaseRow,
    ) -> Result<Arc<Entry>, Error> {
        let _choosing = self.choosing.lock().await;
        for port in self.free_ports() {
            // Somebody else of the host may have it.
            let Ok(listeners) = self.listen(port).await else { continue };
            row.port = port;
            if !self.db.insert_database(&row, &caller.plan).await? {
                continue;
            }
            let entry = Arc::new(Entry::new(row));
            self.insert(&entry);
            self.tasks.spawn(Arc::clone(&self).keep(Arc::clone(&entry), caller, listeners));
            return Ok(entry);
        }
        Err(Error::new(
            api::ErrorCode::CapacityExceeded,
            "there is no port left for a database; delete one, or give the server more with --databases-ports",
        ))
    }

    fn free_ports(&self) -> Vec<u16> {
        let taken: Vec<u16> = self.all().iter().map(|entry| entry.look(|row| row.port)).collect();
        let ports = self.settings.ports.clone();
        let is_free = |port: &u16| !taken.contains(port) && self.routed_port() != Some(*port);
        ports.filter(is_free).take(PORT_TRIES).collect()
    }

    /// One that is being made is waited for a while.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn get(&self, caller: &Caller, id: &str) -> Result<Database, Error> {
        let entry = self.find(&caller.account, id)?;
        let mut row = entry.row.subscribe();
        let done = row.wait_for(|row| row.state != DatabaseState::Provisioning);
        // Whoever is too early is told so.
        let _ = tokio::time::timeout(PATIENCE, done).await;
        let entry = self.find(&caller.account, id)?;
        let secrets = match caller.scope {
            api::Scope::Full => Secrets::Shown,
            api::Scope::Read => Secrets::Withheld,
        };
        Ok(self.shown(&entry, secrets))
    }

    /// Newest first.
    pub fn list(&self, account: &AccountId) -> DatabaseList {
        let mut entries: Vec<_> = self
            .all()
            .into_iter()
            .filter(|entry| entry.look(|row| row.account == *account))
            .collect();
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.look(|row| (row.created_at, row.id))));
        let items: Vec<_> =
            entries.iter().map(|entry| self.shown(entry, Secrets::Withheld)).collect();
        DatabaseList { count: items.len(), items }
    }

    /// # Errors
    /// 404 when it is not theirs or gone; 409 or 503 when it cannot be reached, with the reason.
    pub fn connection(&self, account: &AccountId, id: &str) -> Result<DatabaseConnection, Error> {
        let entry = self.find(account, id)?;
        match entry.look(|row| row.state) {
            DatabaseState::Ready => Ok(self.connection_to(&entry)),
            DatabaseState::Provisioning => {
                Err(Error::busy("the database is still being made; ask again shortly", 1))
            }
            DatabaseState::Failed => Err(Error::conflict(format!(
                "the database could not be made ({}); delete it and create another",
                entry.look(|row| row.error.clone()).unwrap_or_default()
            ))),
            DatabaseState::Deleting => Err(Error::conflict("the database is being deleted")),
        }
    }

    pub(super) fn connection_to(&self, entry: &Entry) -> DatabaseConnection {
        let (host, port) = self.way_to(entry);
        // Without TLS nobody can say which one is meant.
        let options = if self.routed_port().is_some() { "?sslmode=require" } else { "" };
        entry.look(|row| {
            let Credentials { role, password, database, .. } = &row.credentials;
            DatabaseConnection {
                connection_url: format!(
                    "postgresql://{role}:{password}@{host}:{port}/{database}{options}"
                ),
                host,
                port,
                username: role.clone(),
                password: password.clone(),
                database: database.clone(),
                ca_certificate: self.tls.own_certificate.clone(),
            }
        })
    }

    /// # Errors
    /// 400 names the bad field; 404 when it is not theirs or gone.
    pub async fn update(
        &self,
        caller: &Caller,
        id: &str,
        update: UpdateDatabase,
    ) -> Result<Database, Error> {
        let entry = self.find(&caller.account, id)?;
        let label = label_of(update.label)?;
        let idle = update.idle_seconds.map(check_idle).transpose()?;
        entry.change(|row| {
            row.label = label.unwrap_or_else(|| row.label.clone());
            row.idle_seconds = idle.unwrap_or(row.idle_seconds);
            row.always_on = update.always_on.unwrap_or(row.always_on);
        });
        self.save(&entry).await?;
        if entry.look(|row| row.state) == DatabaseState::Ready {
            self.apply_idle(&entry).await?;
        }
        Ok(self.shown(&entry, Secrets::Shown))
    }

    /// Goes on behind the answer.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 when there is nothing to wake.
    pub fn wake(self: &Arc<Self>, account: &AccountId, id: &str) -> Result<Database, Error> {
        let entry = self.find(account, id)?;
        // What it says when there is none.
        self.connection(account, id)?;
        // Whoever is bringing it up does so for this one, too.
        if entry.brought_up.try_lock().is_ok() {
            let (databases, woken) = (Arc::clone(self), Arc::clone(&entry));
            self.tasks.spawn(async move {
                if let Err(error) = databases.bring_up(&woken).await {
                    tracing::warn!(database = %woken.id(), %error, cause = error.causes(), "a database does not wake");
                }
            });
        }
        Ok(self.shown(&entry, Secrets::Withheld))
    }

    /// Other passwords; whoever came with the old one is disconnected.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 and 503 when it cannot be reached: the old ones hold then.
    pub async fn reset_credentials(
        self: &Arc<Self>,
        account: &AccountId,
        id: &str,
    ) -> Result<Database, Error> {
        let entry = self.find(account, id)?;
        self.connection(account, id)?;
        let (databases, changed) = (Arc::clone(self), Arc::clone(&entry));
        // Goes on to its end when whoever asked has gone: PostgreSQL and row say the same.
        let task = self.tasks.spawn(async move { databases.renew(&changed).await });
        task.await.map_err(Error::internal)??;
        Ok(self.shown(&entry, Secrets::Shown))
    }

    /// # Errors
    /// 404 when it is not theirs or gone; else 409.
    pub fn failover(&self, account: &AccountId, id: &str) -> Result<Database, Error> {
        self.find(account, id)?;
        Err(Error::conflict(
            "there is no other host to fail over to; after a crash the database starts again from its own disk by itself",
        ))
    }

    /// # Errors
    /// 400 names the bad field; 404 when it is not theirs or gone; 409 when it has no state to clone.
    pub async fn clone_of(
        self: &Arc<Self>,
        caller: &Caller,
        id: &str,
        request: CloneDatabase,
    ) -> Result<Database, Error> {
        let source = self.find(&caller.account, id)?;
        self.connection(&caller.account, id)?;
        let target_time = request.target_time.as_deref().map(parse_target).transpose()?;
        if let Some(target) = target_time {
            self.check_target(&source, target)?;
        }
        let source = source.row();
        let size = request.size.unwrap_or(source.size);
        let label = label_of(request.label)?;
        let row = DatabaseRow {
            id: caller.new_id(0),
            label: label.unwrap_or_else(|| shortened(format!("{} (clone)", source.label))),
            size,
            cpu: if size == source.size { source.cpu } else { size.cpu() },
            port: NO_PORT,
            state: DatabaseState::Provisioning,
            error: None,
            credentials: Credentials::random(),
            // Of a base backup they are found out later.
            origin: match target_time {
                Some(_) => Credentials::of_template(),
                None => source.credentials,
            },
            cloned_from: Some(source.id),
            target_time,
            created_at: self.clock.now_ms(),
            account: source.account,
            always_on: source.always_on,
            idle_seconds: source.idle_seconds,
        };
        self.begin(caller, row).await
    }

    /// For ever, with all that is in it. Idempotent while it goes on.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn delete(&self, account: &AccountId, id: &str) -> Result<(), Error> {
        let entry = self.find(account, id)?;
        // Written before it is done, so that a server that dies now goes on with it.
        if entry.look(|row| row.state) != DatabaseState::Deleting {
            entry.change(|row| row.state = DatabaseState::Deleting);
            match self.save(&entry).await {
                // The way out of a full disk must not need room on it.
                Err(error) if error.code == api::ErrorCode::CapacityExceeded => {
                    tracing::warn!(cause = error.causes(), "a delete is not written down");
                }
                outcome => outcome?,
            }
        }
        let mut removed = entry.removed.subscribe();
        match tokio::time::timeout(GONE_DEADLINE, removed.wait_for(|gone| *gone)).await {
            Ok(_) => Ok(()),
            Err(_) => Err(Error::busy("the database is being deleted and will be gone shortly", 5)),
        }
    }

    fn shown(&self, entry: &Entry, secrets: Secrets) -> Database {
        let row = entry.row();
        let (account, sandbox) = entry.sandbox();
        let state = self.sandboxes.state_of(&account, &sandbox);
        let short_of = entry.short_of.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let backups = entry.archive.told();
        let connection = (row.state == DatabaseState::Ready && secrets == Secrets::Shown)
            .then(|| self.connection_to(entry));
        Database {
            id: row.id,
            label: row.label,
            status: status_of(row.state, state, row.error.is_some()),
            error: row.error.or(short_of),
            size: row.size,
            cpu: row.cpu,
            memory_mb: row.size.memory_mb(),
            disk_bytes: self.sandboxes.disk_use_of(&account, &sandbox),
            always_on: row.always_on,
            idle_seconds: row.idle_seconds,
            connections: entry.sessions() as u64,
            created_at: clock::from_ms(row.created_at),
            cloned_from: row.cloned_from,
            last_backup_at: backups.last_backup_at.map(clock::from_ms),
            restorable_from: backups.reach.map(|(from, _)| clock::from_ms(from)),
            restorable_until: backups.reach.map(|(_, until)| clock::from_ms(until)),
            backup_error: backups.error,
            failover_available: false,
            connection,
        }
    }

    /// For the metrics.
    pub(crate) fn count_by_status(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.all() {
            let (account, sandbox) = entry.sandbox();
            let state = self.sandboxes.state_of(&account, &sandbox);
            let (own, has_failed) = entry.look(|row| (row.state, row.error.is_some()));
            let status = status_of(own, state, has_failed);
            *counts.entry(status.name()).or_default() += 1;
        }
        counts
    }

    /// For the metrics.
    pub(crate) fn backup_figures(&self) -> BackupFigures {
        let told: Vec<_> = (self.all().iter())
            .filter(|entry| entry.look(|row| row.state) == DatabaseState::Ready)
            .map(|entry| entry.archive.told())
            .collect();
        let seconds = |ms: i64| u64::try_from(ms / 1000).unwrap_or_default();
        BackupFigures {
            failures: self.backups.failures(),
            failing: told.iter().filter(|told| told.error.is_some()).count(),
            without: told.iter().filter(|told| told.last_backup_at.is_none()).count(),
            oldest_last: told.iter().filter_map(|told| told.last_backup_at).min().map(seconds),
        }
    }

    /// What their disks take of the pool.
    pub(crate) fn disk_bytes(&self) -> u64 {
        let of = |entry: &Arc<Entry>| {
            let (account, sandbox) = entry.sandbox();
            self.sandboxes.disk_use_of(&account, &sandbox)
        };
        self.all().iter().map(of).sum()
    }

    pub(crate) fn connections(&self) -> u64 {
        self.all().iter().map(|entry| entry.sessions() as u64).sum()
    }
}

/// Of all databases together.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct BackupFigures {
    pub(crate) failures: u64,
    pub(crate) failing: usize,
    pub(crate) without: usize,
    /// When the last backup of the database was made that has waited longest for another; seconds since 1970.
    pub(crate) oldest_last: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Secrets {
    Shown,
    Withheld,
}

/// `has_failed`: it could not be brought up, which is tried again.
fn status_of(
    state: DatabaseState,
    sandbox: Option<(State, Target)>,
    has_failed: bool,
) -> DatabaseStatus {
    match (state, sandbox.map(|(state, _)| state)) {
        (DatabaseState::Provisioning, _) => DatabaseStatus::Provisioning,
        (DatabaseState::Failed, _) => DatabaseStatus::Failed,
        (DatabaseState::Deleting, _) => DatabaseStatus::Deleting,
        (DatabaseState::Ready, Some(State::Running)) if has_failed => DatabaseStatus::Recovering,
        (DatabaseState::Ready, Some(State::Running)) => DatabaseStatus::Running,
        (DatabaseState::Ready, Some(State::Paused)) => DatabaseStatus::Paused,
        (DatabaseState::Ready, Some(State::Hibernated)) => DatabaseStatus::Hibernated,
        (DatabaseState::Ready, Some(State::Stopped)) => DatabaseStatus::Stopped,
        (DatabaseState::Ready, Some(State::Creating | State::Failed) | None) => {
            DatabaseStatus::Recovering
        }
    }
}

fn size_of(size: Option<DatabaseSize>, memory_mb: Option<u64>) -> Result<DatabaseSize, Error> {
    match (size, memory_mb) {
        (Some(size), _) => Ok(size),
        (None, None) => Ok(DatabaseSize::default()),
        (None, Some(memory_mb)) => {
            let fits = |size: &DatabaseSize| memory_mb > 0 && size.memory_mb() >= memory_mb;
            DatabaseSize::ALL.into_iter().find(fits).ok_or_else(|| {
                Error::invalid("`memory_mb` must be between 1 and 16384, which is the size 16g")
            })
        }
    }
}

/// Of a label that became too long.
fn shortened(mut label: String) -> String {
    while label.len() > LONGEST_LABEL {
        label.pop();
    }
    label
}

fn label_of(label: Option<String>) -> Result<Option<String>, Error> {
    match label {
        Some(label) if label.len() > LONGEST_LABEL || label.contains('\0') => Err(Error::invalid(
            format!("`label` must have at most {LONGEST_LABEL} bytes, without NUL"),
        )),
        label => Ok(label),
    }
}

fn check_idle(seconds: u64) -> Result<u64, Error> {
    if (1..=LONGEST_IDLE).contains(&seconds) {
        return Ok(seconds);
    }
    Err(Error::invalid(format!(
        "`idle_seconds` must be between 1 and {LONGEST_IDLE}; `always_on: true` keeps a database running"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_rounded_up_to_a_size() {
        let size = |memory| size_of(None, Some(memory)).map(DatabaseSize::name).ok();
        let sizes = [1, 1024, 1025, 4096, 16_384, 16_385].map(size);
        assert_eq!(sizes, [Some("1g"), Some("1g"), Some("4g"), Some("4g"), Some("16g"), None]);
        assert_eq!(size_of(Some(DatabaseSize::FourG), Some(1)).unwrap(), DatabaseSize::FourG);
        assert_eq!(size_of(None, None).unwrap(), DatabaseSize::OneG);
    }

    #[test]
    fn a_label_that_became_too_long_is_cut_between_characters() {
        assert_eq!(shortened("é".repeat(200)).len(), LONGEST_LABEL);
        assert_eq!(shortened("short".to_owned()), "short");
    }
}
