//! Sandboxes that are databases: made, started and removed by [`crate::database`] alone, and what others are told of them.

use std::{
    collections::{BTreeMap, HashMap},
    io,
    net::Ipv4Addr,
    sync::{Arc, PoisonError, RwLock},
};

use api::{
    AccountId, CreateSandbox, DatabaseId, Egress, ErrorCode, SandboxId, SnapshotId, VolumeId,
};
use tokio::net::TcpStream;

use super::{
    GONE_DEADLINE, Running, Sandboxes,
    bake::BAKE_PATIENCE,
    capacity::Need,
    create::{DatabaseBeginning, Made},
    passing::PassingInstant,
    registry::{self, Entry, locked},
    state::{State, Target, Wish},
    transition::{STEP, When},
    usage::InUse,
};
use crate::{Error, account::Plan, blocking::blocking, keys::Caller};

const MOST_DATABASES: usize = 16;

/// Who comes to a port of the server's own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Visitor {
    /// No sandbox of this server: the host, or somebody from its network.
    Other,
    Sandbox {
        account: AccountId,
        /// Where it has no more of the network than these.
        only: Option<Vec<DatabaseId>>,
    },
    /// From a sandbox's address, at which there is none any longer.
    Gone,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct PoolRoom {
    pub(crate) free_bytes: u64,
    pub(crate) reserve_bytes: u64,
}

/// The database keeps its sandbox.
///
/// # Errors
/// 409.
pub(super) fn refuse(entry: &Entry) -> Result<(), Error> {
    if entry.look(|row| row.managed) {
        let id = entry.look(|row| row.id);
        return Err(Error::conflict(format!(
            "this sandbox is database {id}; change or delete it with /v1/databases/{id}"
        )));
    }
    Ok(())
}

impl Sandboxes {
    /// Runs when this returns. It has the database's id; one that is there already will do.
    ///
    /// # Errors
    /// As [`Sandboxes::create`].
    pub(crate) async fn create_managed(
        self: &Arc<Self>,
        caller: &Caller,
        id: DatabaseId,
        request: CreateSandbox,
        beginning: DatabaseBeginning,
    ) -> Result<(), Error> {
        self.create_as(caller, request, Made::Database { id, beginning }).await.map(drop)
    }

    /// All of them, whosever.
    pub(crate) fn managed(&self) -> Vec<(AccountId, SandboxId)> {
        let all = self.registry.all().into_iter().filter(|entry| entry.look(|row| row.managed));
        all.map(|entry| entry.look(|row| (row.account.clone(), row.id))).collect()
    }

    /// For ever; also when it is gone.
    pub(crate) async fn delete_managed(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<(), Error> {
        match self.registry.find(account, id) {
            Ok(entry) => self.delete_entry(&entry, GONE_DEADLINE).await,
            Err(_) => Ok(()),
        }
    }

    /// `None`: there is none.
    pub(crate) fn state_of(&self, account: &AccountId, id: &SandboxId) -> Option<(State, Target)> {
        let entry = self.registry.find(account, id).ok()?;
        Some(entry.look(|row| (row.state, row.target)))
    }

    /// What its root disk takes of the pool.
    pub(crate) fn disk_use_of(&self, account: &AccountId, id: &SandboxId) -> u64 {
        let path = (self.registry.find(account, id).ok())
            .and_then(|entry| Some(self.root(&entry).ok()?.path()));
        path.and_then(|path| store::sandbox_files::allocated(&path).ok()).unwrap_or(0)
    }

    /// What its root disk may take, in bytes.
    ///
    /// # Errors
    /// 404 when it is gone.
    pub(crate) fn disk_of(&self, account: &AccountId, id: &SandboxId) -> Result<u64, Error> {
        Ok(self.registry.find(account, id)?.look(|row| row.disk_mb) << 20)
    }

    /// Its root disk has at least so many bytes then; its file system does not know yet. Idempotent.
    ///
    /// # Errors
    /// 404 when it is gone, 409 when it does not run, 507 without room; or the plan does not allow it.
    pub(crate) async fn grow_root(
        &self,
        account: &AccountId,
        id: &SandboxId,
        bytes: u64,
        plan: &Plan,
    ) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        let _turn = entry.turn.lock().await;
        entry.accept(Wish::Inside, self.clock.steady_ms())?;
        let gone = registry::not_found;
        let (inside, volume) =
            (entry.inside().ok_or_else(gone)?, entry.root_volume().ok_or_else(gone)?);
        self.admit_bytes(0)?;
        let bytes = self.volumes.lengthen_root(account, volume, bytes, plan).await?;
        // Also when its machine does not hear of it: the disk is that long, and the next attempt goes on from there.
        entry.change(|row| row.disk_mb = bytes >> 20);
        inside.machine.resize_root(bytes).await?;
        self.save_row(&entry).await
    }

    /// What the pool has, and what is to stay free there.
    ///
    /// # Errors
    /// It cannot be measured.
    pub(crate) fn pool_room(&self) -> Result<PoolRoom, Error> {
        let room = store::pool::room(self.sites.layout.data()).map_err(Error::internal)?;
        Ok(PoolRoom { free_bytes: room.free_bytes, reserve_bytes: self.disk_reserve() })
    }

    /// Its memory and disk as they are now, for a clone: it goes on.
    ///
    /// # Errors
    /// As [`Sandboxes::snapshot`].
    pub(crate) async fn passing_instant_of(
        self: &Arc<Self>,
        account: &AccountId,
        id: &SandboxId,
        snapshot: SnapshotId,
    ) -> Result<PassingInstant, Error> {
        self.catch_passing(&self.registry.find(account, id)?, snapshot).await
    }

    /// How many bytes of its memory would have to be copied for an instant of it.
    pub(crate) fn changed_memory_of(&self, account: &AccountId, id: &SandboxId) -> u64 {
        let inside = self.registry.find(account, id).ok().and_then(|entry| entry.inside());
        inside.and_then(|inside| inside.machine.private_memory_bytes().ok()).unwrap_or(0)
    }

    /// Of an attempt that was given up. Also when there is none.
    pub(crate) async fn forget_root(
        &self,
        account: &AccountId,
        volume: VolumeId,
    ) -> Result<(), Error> {
        match self.volumes.delete(account, &volume.to_string()).await {
            // It may have its files and no row.
            Err(error) if error.code == ErrorCode::NotFound => {
                let layout = self.sites.layout.clone();
                blocking(move || store::volume::remove(&layout, &volume)).await
            }
            deleted => deleted,
        }
    }

    /// It runs, whatever it was, and stays so until the answer is dropped.
    ///
    /// # Errors
    /// 404 when it is gone; 409 when its disk is damaged; 503 without room or time.
    pub(crate) async fn keep_running(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<InUse, Error> {
        let entry = self.registry.find(account, id)?;
        let in_use = entry.usage.begin();
        let wish = match entry.look(|row| row.state) {
            State::Stopped | State::Failed => Wish::PowerOn,
            State::Creating | State::Running | State::Paused | State::Hibernated => Wish::Run,
        };
        // Behind a hibernation that has begun: large memory takes longer to be saved than others wait.
        self.reach_within(&entry, wish, Target::Running, When::Asked, STEP).await?;
        Ok(in_use)
    }

    /// What is caught of another for its sake is caught in vain without.
    ///
    /// # Errors
    /// 503 with a time to try again, or 507.
    pub(crate) async fn room_for(&self, memory_mb: u64) -> Result<(), Error> {
        self.wait_for_room(&Need::of_clone(memory_mb << 20), BAKE_PATIENCE).await.map(drop)
    }

    /// As a use that keeps it from hibernating. It may be in any state.
    pub(crate) fn use_of(&self, account: &AccountId, id: &SandboxId) -> Result<InUse, Error> {
        Ok(self.registry.find(account, id)?.usage.begin())
    }

    /// The same, after which it counts as unused for as long as it would without.
    pub(crate) fn unnoticed_use_of(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<InUse, Error> {
        Ok(self.registry.find(account, id)?.usage.begin_unnoticed())
    }

    /// Its inside, for what the server does there on its own behalf: no use of it, and in no list. It has to run.
    pub(crate) fn inside_now(&self, account: &AccountId, id: &SandboxId) -> Result<Running, Error> {
        let entry = self.registry.find(account, id)?;
        let in_use = entry.usage.begin_unnoticed();
        entry.accept(Wish::Inside, self.clock.steady_ms())?;
        Ok(self.inside_of(&entry, in_use)?.unrecorded())
    }

    /// A port of its guest. `None` while it does not run.
    pub(crate) async fn dial(
        &self,
        account: &AccountId,
        id: &SandboxId,
        port: u16,
    ) -> Option<io::Result<TcpStream>> {
        let entry = self.registry.find(account, id).ok()?;
        let runs = entry.look(|row| (row.state, row.target) == (State::Running, Target::Running));
        let inside = entry.inside().filter(|_| runs)?;
        Some(inside.gate.connect(port).await)
    }

    /// Waits for the end of the machine that it has now, whatever ends it.
    pub(crate) fn machine_end(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> impl Future<Output = ()> + use<> {
        let inside = self.registry.find(account, id).ok().and_then(|entry| entry.inside());
        async move {
            if let Some(inside) = inside {
                inside.machine.exited().await;
            }
        }
    }

    /// Unused for so long, it hibernates. `None`: never.
    pub(crate) async fn set_idle(
        &self,
        account: &AccountId,
        id: &SandboxId,
        idle_seconds: Option<u64>,
    ) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        entry.change(|row| row.idle_seconds = idle_seconds);
        self.save_row(&entry).await
    }

    /// By the address that the host sees: the walls let no sandbox have another's.
    pub(crate) fn visitor(&self, address: Ipv4Addr) -> Visitor {
        let Some(slot) = self.sites.networks.slot_of(address) else { return Visitor::Other };
        let found = self.registry.all().into_iter().find(|entry| {
            entry.look(|row| row.slot == Some(slot))
                || locked(&entry.inside).as_ref().is_some_and(|inside| inside.address == address)
        });
        found.map_or(Visitor::Gone, |entry| {
            entry.look(|row| Visitor::Sandbox {
                account: row.account.clone(),
                only: (row.network.egress == Egress::None).then(|| row.databases.clone()),
            })
        })
    }

    /// Where sandboxes reach the server.
    pub(crate) fn door(&self) -> Ipv4Addr {
        self.sites.networks.door()
    }
}

/// The URLs of all databases that can be reached, by their ids.
#[derive(Debug, Default)]
pub(crate) struct DatabaseUrls(RwLock<HashMap<DatabaseId, (AccountId, String)>>);

impl DatabaseUrls {
    pub(crate) fn set(&self, id: DatabaseId, account: &AccountId, url: String) {
        let mut known = self.0.write().unwrap_or_else(PoisonError::into_inner);
        known.insert(id, (account.clone(), url));
    }

    pub(crate) fn forget(&self, id: &DatabaseId) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    /// # Errors
    /// 404 for one that is not theirs, or cannot be reached yet.
    pub(super) fn check(
        &self,
        account: &AccountId,
        asked: Option<&[String]>,
    ) -> Result<Vec<DatabaseId>, Error> {
        let asked = asked.unwrap_or_default();
        if asked.len() > MOST_DATABASES {
            return Err(Error::invalid(format!(
                "`databases` may have at most {MOST_DATABASES} entries"
            )));
        }
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let mut ids = Vec::new();
        for (index, text) in asked.iter().enumerate() {
            let id = text
                .parse()
                .ok()
                .filter(|id| known.get(id).is_some_and(|(owner, _)| owner == account));
            ids.push(id.ok_or_else(|| {
                Error::not_found(format!(
                    "`databases[{index}]`: there is no database with this id that can be reached; list them with GET /v1/databases"
                ))
            })?);
        }
        Ok(ids)
    }

    /// As it is now: credentials may have been changed since the sandbox was made. What its user has set stays.
    pub(super) fn add_to(
        &self,
        environment: &mut BTreeMap<String, String>,
        databases: &[DatabaseId],
    ) {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner);
        for (index, id) in databases.iter().enumerate() {
            let Some((_, url)) = known.get(id) else { continue };
            let name = match index {
                0 => "DATABASE_URL".to_owned(),
                index => format!("DATABASE_URL_{}", index + 1),
            };
            environment.entry(name).or_insert_with(|| url.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_given_the_urls_of_their_own_databases() {
        let urls = DatabaseUrls::default();
        let (mine, second, foreign) =
            (DatabaseId::random(), DatabaseId::random(), DatabaseId::random());
        let account = AccountId::default_account();
        urls.set(mine, &account, "one".to_owned());
        urls.set(second, &account, "two".to_owned());
        urls.set(foreign, &"other".parse().unwrap(), "three".to_owned());
        let ids = [mine, second].map(|id| id.to_string());
        assert_eq!(urls.check(&account, Some(&ids)).unwrap(), [mine, second]);
        for bad in [foreign.to_string(), DatabaseId::random().to_string(), "x".to_owned()] {
            let code = urls.check(&account, Some(&[bad])).unwrap_err().code;
            assert_eq!(code, api::ErrorCode::NotFound);
        }
        let mut environment = BTreeMap::from([("DATABASE_URL_2".to_owned(), "own".to_owned())]);
        urls.add_to(&mut environment, &[mine, second]);
        assert_eq!(environment["DATABASE_URL"], "one");
        assert_eq!(environment["DATABASE_URL_2"], "own");
        urls.set(mine, &account, "new".to_owned());
        let mut environment = BTreeMap::new();
        urls.add_to(&mut environment, &[mine]);
        assert_eq!(environment["DATABASE_URL"], "new");
    }
}
