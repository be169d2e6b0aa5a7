//! From a request to a sandbox: what is checked before anything is made.

use std::{collections::BTreeMap, sync::Arc};

use api::{
    AccountId, CreateSandbox, DatabaseId, NetworkPolicy, Sandbox, SandboxId, SnapshotId,
    TemplateName, UpdateNetwork, VolumeId, VolumeKind,
};
use machine::{Shape, network::Traffic};
use tokio::time::Instant;

use super::{
    Sandboxes,
    bake::{BAKE_PATIENCE, Size},
    capacity::Need,
    driver::StartOrder,
    fields::{
        DISK_MIB, Fields, MACHINE_FIELDS, MEMORY_MIB, MOST_CPUS, SANDBOX_FIELDS, check_environment,
        check_fits, check_metadata, pick, pick_memory, ttl_of,
    },
    network,
    registry::locked,
    saved::SavedMachine,
    state::{State, Target},
};
use crate::{
    Error,
    account::Amounts,
    db::{AttachmentRow, ROOT_SLOT, SandboxRow, SnapshotRow, VolumeRow},
    keys::Caller,
};

pub(crate) const DEFAULT_TEMPLATE: &str = "base";

/// In which dialect one is asked for.
pub(super) enum Made {
    Sandbox,
    /// `root`: the disk that it boots from; else it gets one of its own.
    Machine {
        name: String,
        root: Option<VolumeRow>,
    },
    Database {
        id: DatabaseId,
        beginning: DatabaseBeginning,
    },
}

/// What a database's machine starts from.
pub(crate) enum DatabaseBeginning {
    Template,
    /// It goes on where another's was.
    Instant(SnapshotRow, Arc<SavedMachine>),
    /// It boots from this disk.
    Root(VolumeRow),
}

/// Of a sandbox that is still to be made.
pub(super) enum RootWish {
    /// Goes with it.
    Own,
    Volume,
    /// That one, from which it boots.
    Kept(VolumeRow),
}

/// A sandbox that is still to be made: everything has been checked.
pub(super) struct Draft {
    pub(super) id: SandboxId,
    pub(super) caller: Caller,
    pub(super) template: TemplateName,
    /// `None`: it boots from its disk.
    pub(super) saved: Option<Arc<SavedMachine>>,
    pub(super) cpu: u32,
    pub(super) memory_mb: u64,
    pub(super) disk_mb: u64,
    pub(super) metadata: BTreeMap<String, String>,
    pub(super) environment: BTreeMap<String, String>,
    pub(super) network: NetworkPolicy,
    /// `None`: it lives until it is deleted.
    pub(super) ttl_seconds: Option<u64>,
    pub(super) from_snapshot: Option<SnapshotId>,
    /// Not claimed yet.
    pub(super) attachments: Vec<AttachmentRow>,
    pub(super) name: Option<String>,
    pub(super) managed: bool,
    pub(super) databases: Vec<DatabaseId>,
    pub(super) root: RootWish,
    /// When it was asked for.
    pub(super) began: Instant,
}

impl Sandboxes {
    /// # Errors
    /// 400 names the bad field, 404 an unknown template, snapshot or volume; 409 when another has a volume; 503 with a
    /// time to try again: nothing was created.
    pub async fn create(
        self: &Arc<Self>,
        caller: &Caller,
        request: CreateSandbox,
    ) -> Result<Sandbox, Error> {
        self.create_as(caller, request, Made::Sandbox).await
    }

    pub(super) async fn create_as(
        self: &Arc<Self>,
        caller: &Caller,
        request: CreateSandbox,
        made: Made,
    ) -> Result<Sandbox, Error> {
        let (began, account) = (Instant::now(), &caller.account);
        let id = match &made {
            Made::Sandbox | Made::Machine { .. } => caller.new_id(0),
            Made::Database { id, .. } => id.sandbox(),
        };
        if (caller.asks_again() || matches!(made, Made::Database { .. }))
            && let Some(made) = self.made_before(account, &id).await?
        {
            return Ok(made);
        }
        let asked: Option<UpdateNetwork> = request.network.clone().map(Into::into);
        let policy_of = |before, update: Option<UpdateNetwork>| {
            let host = self.sites.networks.host_policy();
            network::updated(before, update.unwrap_or_default(), host, "network.")
        };
        let network = policy_of(NetworkPolicy::default(), asked.clone())?;
        let ttl = ttl_of(request.ttl_seconds, request.persistent)?;
        let metadata = request.metadata.clone().unwrap_or_default();
        check_metadata(&metadata)?;
        let environment = request.env.clone().unwrap_or_default();
        check_environment(&environment)?;
        let databases = self.database_urls.check(account, request.databases.as_deref())?;
        // Before anything is waited for.
        let volumes = request.volumes.as_deref().unwrap_or_default();
        let attachments = self.attachments(account, id, volumes).await?;
        let _under_way = self.pool.create_under_way();
        let managed = matches!(made, Made::Database { .. });
        let fields = match &made {
            Made::Sandbox | Made::Database { .. } => &SANDBOX_FIELDS,
            Made::Machine { .. } => &MACHINE_FIELDS,
        };
        let (name, root, instant) = match made {
            Made::Sandbox => (None, RootWish::Own, None),
            Made::Machine { name, root: None } => (Some(name), RootWish::Volume, None),
            Made::Machine { name, root: Some(root) } => (Some(name), RootWish::Kept(root), None),
            Made::Database { id: _, beginning } => match beginning {
                DatabaseBeginning::Template => (None, RootWish::Volume, None),
                DatabaseBeginning::Instant(row, saved) => {
                    (None, RootWish::Volume, Some((row, saved)))
                }
                DatabaseBeginning::Root(root) => (None, RootWish::Kept(root), None),
            },
        };
        let origin = match (&root, instant, request.from_snapshot.as_deref()) {
            (RootWish::Kept(volume), ..) => {
                let origin = disk_origin(volume, &request)?;
                // Its disk is counted already.
                let one = one_of(origin.cpu, origin.memory_mb, 0);
                self.check_quota(caller, &one, Some(&id)).await?;
                origin
            }
            (RootWish::Own | RootWish::Volume, Some((row, saved)), _) => {
                self.instant_origin(caller, &id, row, saved).await?
            }
            (RootWish::Own | RootWish::Volume, None, Some(snapshot)) => {
                self.snapshot_origin(caller, &id, snapshot).await?
            }
            (RootWish::Own | RootWish::Volume, None, None) => {
                self.template_origin(caller, &id, &request, fields, began).await?
            }
        };
        // What the source was shut off from, a sandbox of its snapshot is not let at because nobody thought of it.
        let network = match (asked, origin.network) {
            (None, Some(of_source)) => policy_of(of_source, None)?,
            (Some(_), _) | (None, None) => network,
        };
        let draft = Draft {
            id,
            caller: caller.clone(),
            template: origin.template,
            saved: origin.saved,
            cpu: origin.cpu,
            memory_mb: origin.memory_mb,
            disk_mb: origin.disk_mb,
            metadata,
            environment,
            network,
            ttl_seconds: ttl.unwrap_or(Some(self.default_ttl.as_secs())),
            from_snapshot: origin.from_snapshot,
            attachments,
            name,
            managed,
            databases,
            root,
            began,
        };
        match self.create_draft(draft).await {
            // It may have been deleted since, and its files with it.
            Err(error) if error.code == api::ErrorCode::Internal => {
                if let (Some(_), Some(id)) = (&request.from_snapshot, origin.from_snapshot) {
                    self.saved_snapshot(account, &id).await?;
                }
                Err(error)
            }
            outcome => outcome,
        }
    }

    /// The snapshot decides on template and sizes: the published clients name a template all the same.
    async fn snapshot_origin(
        &self,
        caller: &Caller,
        new: &SandboxId,
        id: &str,
    ) -> Result<Origin, Error> {
        let id = id
            .parse()
            .map_err(|_| Error::not_found("`from_snapshot`: there is no snapshot with this id"))?;
        let (row, saved) = self.saved_snapshot(&caller.account, &id).await?;
        self.instant_origin(caller, new, row, saved).await
    }

    async fn instant_origin(
        &self,
        caller: &Caller,
        new: &SandboxId,
        row: SnapshotRow,
        saved: Arc<SavedMachine>,
    ) -> Result<Origin, Error> {
        let one = one_of(row.cpu, row.memory_mb, row.disk_mb);
        self.check_quota(caller, &one, Some(new)).await?;
        Ok(Origin {
            template: row.template,
            saved: Some(saved),
            cpu: row.cpu,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            network: row.network,
            from_snapshot: Some(row.id),
        })
    }

    async fn template_origin(
        &self,
        caller: &Caller,
        new: &SandboxId,
        request: &CreateSandbox,
        fields: &Fields,
        began: Instant,
    ) -> Result<Origin, Error> {
        let account = &caller.account;
        let name: TemplateName = request
            .template
            .as_deref()
            .filter(|name| !name.is_empty())
            .unwrap_or(DEFAULT_TEMPLATE)
            .parse()
            .map_err(|error| Error::invalid(format!("`{}`: {error}", fields.template)))?;
        let defaults = self.templates.defaults(account, &name)?;
        let cpu = pick("cpu", "", request.cpu, defaults.cpu, &(1..=MOST_CPUS))?;
        let memory_mb = pick_memory(request.memory_mb, defaults.memory_mb)?;
        let disk_mb = pick("disk_mb", " (MiB)", request.disk_mb, defaults.disk_mb, &DISK_MIB)?;
        // What is refused in the end need not be baked.
        self.check_quota(caller, &one_of(cpu, memory_mb, disk_mb), Some(new)).await?;
        self.could_ever_fit(&Need::of_clone(memory_mb << 20))?;
        let template = self.templates.built(account, &name, BAKE_PATIENCE).await?;
        if disk_mb < template.disk_mb {
            check_fits(&template, disk_mb, fields).await?;
        }
        let shape =
            Shape { cpus: cpu, memory_mib: u32::try_from(memory_mb).map_err(Error::internal)? };
        let size = Size { shape, disk_mib: disk_mb.min(template.disk_mb) };
        let patience = BAKE_PATIENCE.saturating_sub(began.elapsed());
        let saved = self.bakes.get(&template, &size, patience).await?;
        let saved = Some(saved);
        Ok(Origin {
            template: name,
            saved,
            cpu,
            memory_mb,
            disk_mb,
            network: None,
            from_snapshot: None,
        })
    }

    /// Before anything is waited for. What is admitted counts when its row is written, where this is checked again.
    /// `sandbox`: that is to be made, if it is one.
    ///
    /// # Errors
    /// The plan does not allow so much more.
    pub(super) async fn check_quota(
        &self,
        caller: &Caller,
        more: &Amounts,
        sandbox: Option<&SandboxId>,
    ) -> Result<(), Error> {
        self.db.check_quota(&caller.account, &caller.plan, more, sandbox).await
    }

    /// Goes on to its end when whoever asked has gone: a volume is not left claimed for nobody.
    pub(super) async fn create_draft(self: &Arc<Self>, draft: Draft) -> Result<Sandbox, Error> {
        let sandboxes = Arc::clone(self);
        self.tasks
            .spawn(async move { sandboxes.make(draft).await })
            .await
            .map_err(Error::internal)?
    }

    async fn make(self: &Arc<Self>, draft: Draft) -> Result<Sandbox, Error> {
        let Draft { saved, mut attachments, began, root, .. } = draft;
        let key = saved.as_ref().map_or_else(String::new, |saved| saved.key.clone());
        let plan = draft.caller.plan;
        let need = Need::of_clone(draft.memory_mb << 20);
        let admitted = self.admit(need, BAKE_PATIENCE.saturating_sub(began.elapsed())).await?;
        let row = SandboxRow {
            id: draft.id,
            account: draft.caller.account,
            template: draft.template,
            bake: key,
            from_snapshot: draft.from_snapshot,
            cpu: draft.cpu,
            memory_mb: draft.memory_mb,
            disk_mb: draft.disk_mb,
            state: State::Creating,
            target: Target::Running,
            metadata: draft.metadata,
            environment: draft.environment,
            created_at: self.clock.now_ms(),
            ttl_seconds: draft.ttl_seconds,
            expires_at: None,
            ttl_left_ms: None,
            idle_seconds: None,
            slot: None,
            boot_ms: 0,
            error: None,
            network: draft.network,
            past_traffic: Traffic::default(),
            name: draft.name,
            durable: !matches!(root, RootWish::Own),
            // Until it runs: what was there before outlives a create that fails.
            keeps_root: matches!(root, RootWish::Kept(_)),
            cold_boot: false,
            managed: draft.managed,
            databases: draft.databases,
        };
        let fresh_root = match root {
            RootWish::Own => None,
            RootWish::Volume => {
                let (account, template) = (row.account.clone(), row.template.clone());
                Some(self.root_row(VolumeId::random(), account, template, row.disk_mb)?)
            }
            RootWish::Kept(volume) => {
                attachments.push(AttachmentRow {
                    volume: volume.id,
                    sandbox: row.id,
                    slot: ROOT_SLOT,
                    read_only: false,
                    mount_path: String::new(),
                    name: volume.name,
                });
                None
            }
        };
        if !attachments.is_empty() {
            self.volumes.claim(&attachments).await?;
        }
        let inserted = async {
            fault::point!("create.row_inserting", Error::internal);
            self.db.insert_sandbox(&row, fresh_root.as_ref(), &plan).await
        };
        if let Err(error) = inserted.await {
            for held in &attachments {
                self.volumes.release(&held.volume, &row.id).await?;
            }
            return Err(error);
        }
        fault::point!("create.row_inserted");
        let entry = Arc::new(self.entry(row));
        entry.set_volumes(attachments);
        if let Some(root) = fresh_root {
            *locked(&entry.root_volume) = Some(root.id);
        }
        self.registry.insert(&entry);
        let started = entry.watch_step();
        let order = StartOrder { saved, began, admitted };
        self.tasks.spawn(Arc::clone(self).drive(Arc::clone(&entry), Some(order)));
        started.await.map_err(|_| Error::internal("the sandbox's driver ended"))??;
        if entry.look(|row| row.target) == Target::Deleted {
            return Err(Error::conflict("the sandbox was deleted while it was being created"));
        }
        fault::point!("create.answering");
        Ok(entry.shown(&self.accelerator_name(), &self.clock))
    }

    pub(super) fn root_row(
        &self,
        id: VolumeId,
        account: AccountId,
        template: TemplateName,
        disk_mb: u64,
    ) -> Result<VolumeRow, Error> {
        Ok(VolumeRow {
            id,
            account,
            name: format!("root-{id}").parse().map_err(Error::internal)?,
            kind: VolumeKind::Root,
            size_bytes: disk_mb << 20,
            created_at: self.clock.now_ms(),
            template: Some(template),
        })
    }
}

/// Size and template are the disk's.
fn disk_origin(volume: &VolumeRow, request: &CreateSandbox) -> Result<Origin, Error> {
    let template = match (&volume.template, request.template.as_deref()) {
        (Some(template), _) => template.clone(),
        (None, name) => name
            .filter(|name| !name.is_empty())
            .unwrap_or(DEFAULT_TEMPLATE)
            .parse()
            .map_err(|error| Error::invalid(format!("`stack`: {error}")))?,
    };
    Ok(Origin {
        template,
        saved: None,
        cpu: request.cpu.unwrap_or(1),
        memory_mb: request.memory_mb.unwrap_or(*MEMORY_MIB.start()),
        disk_mb: volume.size_bytes >> 20,
        network: None,
        from_snapshot: None,
    })
}

/// What one sandbox takes of its account's.
fn one_of(cpu: u32, memory_mb: u64, disk_mb: u64) -> Amounts {
    let disk_bytes = disk_mb << 20;
    Amounts { sandboxes: 1, vcpus: cpu.into(), memory_mb, disk_bytes, ..Amounts::default() }
}

/// What a create starts from.
struct Origin {
    template: TemplateName,
    saved: Option<Arc<SavedMachine>>,
    cpu: u32,
    memory_mb: u64,
    disk_mb: u64,
    /// Of what the snapshot was taken of.
    network: Option<NetworkPolicy>,
    from_snapshot: Option<SnapshotId>,
}
