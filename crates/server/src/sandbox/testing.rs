//! Sandboxes without machines, for tests of what lies above them.

use std::{collections::BTreeMap, sync::Arc};

use api::{AccountId, SandboxId};
use machine::{
    Accelerator, Hypervisor,
    guest::Guest,
    network::{HostPolicy, NetworkConfig, Networks, Traffic},
};
use store::{
    digest::Digest, initramfs::Initramfs, kernel::Kernel, layout::Layout,
    sandbox_files::SandboxFiles,
};

use super::{Bakes, Parts, Pool, Sandboxes, Sites, Slots, State, Target, registry::locked};
use crate::{
    Config,
    clock::Clock,
    config::Capacity,
    db::{Db, SandboxRow, testing},
    template::Templates,
    volume::Volumes,
};

/// A server's, in a folder and with a database of their own.
pub(crate) struct Alone {
    pub(crate) sandboxes: Arc<Sandboxes>,
    _directory: tempfile::TempDir,
    _database: testing::Database,
}

impl Alone {
    pub(crate) async fn new(capacity: Capacity) -> Self {
        let (database, directory) = (testing::sqlite(), tempfile::tempdir().unwrap());
        let db = Db::connect(database.url()).await.unwrap();
        let config = Config {
            data_dir: directory.path().join("data"),
            cache_dir: directory.path().join("cache"),
            capacity,
            ..Config::testing()
        };
        let sandboxes = Sandboxes::testing(db, Clock::default(), &config).await;
        Self { sandboxes, _directory: directory, _database: database }
    }
}

impl Sandboxes {
    /// None can be created: there is no kernel.
    pub(crate) async fn testing(db: Db, clock: Clock, config: &Config) -> Arc<Self> {
        let layout = Layout::create(&config.data_dir, &config.cache_dir).unwrap();
        let networks =
            NetworkConfig { instance: 0, policy: HostPolicy::default(), resolvers: Vec::new() };
        let sites = Sites {
            layout: layout.clone(),
            networks: Arc::new(Networks::without_rules(networks).unwrap()),
            slots: Slots::default(),
            instance: 0,
        };
        let nothing = Digest::of(b"");
        let kernel = Kernel {
            vmlinuz: layout.data().join("none"),
            modules: Vec::new(),
            release: String::new(),
            digest: nothing.clone(),
        };
        let initramfs = Initramfs { path: layout.data().join("none"), digest: nothing };
        let hypervisor = Hypervisor::find().unwrap();
        let volumes =
            Volumes::new(db.clone(), clock.clone(), layout.clone(), config.volumes.clone());
        let bakes =
            Bakes::new(hypervisor.clone(), Accelerator::Tcg, kernel, initramfs, sites.clone());
        let templates = Templates::open(layout, db.clone(), clock.clone(), Arc::clone(&bakes));
        let parts = Parts {
            volumes,
            templates: templates.await.unwrap(),
            db,
            bakes,
            pool: Pool::new(hypervisor, sites.clone(), clock.clone(), 0),
            clock,
            sites,
        };
        Self::new(parts, config).unwrap()
    }

    pub(crate) fn templates(&self) -> Arc<Templates> {
        Arc::clone(&self.templates)
    }

    /// One that runs already, with this guest.
    pub(crate) fn insert_running(
        &self,
        account: &AccountId,
        id: SandboxId,
        guest: Guest,
        environment: BTreeMap<String, String>,
    ) {
        let files = SandboxFiles::create(&self.sites.layout, &id);
        files.expect("the sandbox is new");
        let entry = self.entry(self.running_row(account, id, environment));
        *locked(&entry.stand_in) = Some(guest);
        self.registry.insert(&Arc::new(entry));
    }

    pub(super) fn running_row(
        &self,
        account: &AccountId,
        id: SandboxId,
        environment: BTreeMap<String, String>,
    ) -> SandboxRow {
        SandboxRow {
            id,
            account: account.clone(),
            template: "base".parse().unwrap(),
            bake: String::new(),
            from_snapshot: None,
            cpu: 1,
            memory_mb: 1024,
            disk_mb: 1024,
            state: State::Running,
            target: Target::Running,
            metadata: BTreeMap::new(),
            environment,
            created_at: self.clock.now_ms(),
            ttl_seconds: None,
            expires_at: None,
            ttl_left_ms: None,
            idle_seconds: None,
            slot: None,
            boot_ms: 1,
            error: None,
            network: api::NetworkPolicy::default(),
            past_traffic: Traffic::default(),
            name: None,
            durable: false,
            keeps_root: false,
            cold_boot: false,
            managed: false,
            databases: Vec::new(),
        }
    }
}
