//! Sandboxes in the words of the second dialect: machines, whose root disk is a volume.

use std::sync::Arc;

use api::{
    AccountId, CreateMachine, CreateSandbox, Machine, MachineVolume, SandboxId, Volume, VolumeKind,
};
use machine::WRITABLE_SLOTS;

use super::{
    Sandboxes,
    create::Made,
    fields::pick_size,
    registry::{Entry, locked},
    state::Target,
};
use crate::{
    Error, clock,
    db::{AttachmentRow, VolumeRow},
    keys::Caller,
};

const DEFAULT_VCPUS: u32 = 1;
const DEFAULT_MEMORY_MB: u64 = 1024;
const DEFAULT_ROOTFS_GB: u64 = 10;
const LONGEST_NAME: usize = 256;

impl Sandboxes {
    /// Answers when it has booted.
    ///
    /// # Errors
    /// As for a sandbox; 404 for an unknown root disk, 409 when another machine has it.
    pub async fn create_machine(
        self: &Arc<Self>,
        caller: &Caller,
        request: CreateMachine,
    ) -> Result<Machine, Error> {
        let account = &caller.account;
        let name = request.name.unwrap_or_default();
        if name.len() > LONGEST_NAME || name.contains('\0') {
            return Err(Error::invalid(format!(
                "`name` must have at most {LONGEST_NAME} bytes, without NUL"
            )));
        }
        let root = match request.root_volume_id.as_deref().filter(|id| !id.is_empty()) {
            Some(id) => Some(self.root_volume(account, id).await?),
            None => None,
        };
        let size = pick_size(
            request.vcpus.unwrap_or(DEFAULT_VCPUS),
            request.memory_mb.unwrap_or(DEFAULT_MEMORY_MB),
            request.rootfs_size_gb.unwrap_or(DEFAULT_ROOTFS_GB),
        )?;
        let sandbox = CreateSandbox {
            template: request.stack,
            cpu: Some(size.vcpus),
            memory_mb: Some(size.memory_mb),
            disk_mb: Some(size.disk_mb),
            persistent: Some(true),
            metadata: request.metadata,
            ..CreateSandbox::default()
        };
        let made = self.create_as(caller, sandbox, Made::Machine { name, root }).await?;
        self.machine(account, &made.id)
    }

    async fn root_volume(&self, account: &AccountId, id: &str) -> Result<VolumeRow, Error> {
        let row = self.volumes.find(account, id).await.map_err(|error| {
            if error.code == api::ErrorCode::NotFound {
                return Error::not_found(
                    "`root_volume_id`: there is no volume with this name or id",
                );
            }
            error
        })?;
        match row.kind {
            VolumeKind::Root => Ok(row),
            VolumeKind::Data => Err(Error::invalid(
                "`root_volume_id` must be a volume of kind `root`; a data volume is attached to a stopped machine",
            )),
        }
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub fn machine(&self, account: &AccountId, id: &SandboxId) -> Result<Machine, Error> {
        Ok(self.shown_machine(&*self.registry.find(account, id)?))
    }

    /// Newest first.
    pub fn list_machines(&self, account: &AccountId) -> Vec<Machine> {
        let mut all: Vec<_> = self
            .registry
            .all()
            .into_iter()
            .filter(|entry| entry.look(|row| row.account == *account && !row.managed))
            .map(|entry| (entry.look(|row| (row.created_at, row.id)), self.shown_machine(&entry)))
            .collect();
        all.sort_unstable_by(|(left, _), (right, _)| right.cmp(left));
        all.into_iter().map(|(_, machine)| machine).collect()
    }

    fn shown_machine(&self, entry: &Entry) -> Machine {
        let sandbox = entry.shown(&self.accelerator_name(), &self.clock);
        let (_, rootfs_size_gb) = Volume::sizes(sandbox.disk_mb << 20);
        Machine {
            id: sandbox.id,
            name: entry.look(|row| row.name.clone()).unwrap_or_default(),
            state: sandbox.status,
            vcpus: sandbox.cpu,
            memory_mb: sandbox.memory_mb,
            rootfs_size_gb,
            stack: sandbox.template,
            metadata: sandbox.metadata,
            created_at: clock::from_ms(entry.look(|row| row.created_at)),
            volumes: locked(&entry.attachments).iter().map(shown_volume).collect(),
            root_volume_id: entry.root_volume(),
            error: sandbox.error,
        }
    }

    /// Its data volumes are free then; its root disk, where it is kept, is a volume of its own.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 503 when it lasts and its root disk is kept, which is not free yet.
    pub async fn delete_machine(
        &self,
        account: &AccountId,
        id: &SandboxId,
        keep_root: bool,
    ) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        super::managed::refuse(&entry)?;
        entry.change(|row| {
            // What goes already goes as it was told.
            if row.target != Target::Deleted {
                row.keeps_root = keep_root && row.durable;
            }
        });
        if keep_root {
            return self.delete_first(account, id).await;
        }
        self.delete(account, id).await
    }
}

fn shown_volume(held: &AttachmentRow) -> MachineVolume {
    // Those that can only be read come behind all slots that can be written.
    let letter = usize::from(held.slot) < WRITABLE_SLOTS;
    MachineVolume {
        id: held.volume,
        name: held.name.clone(),
        device: letter.then(|| format!("/dev/vd{}", char::from(b'b' + held.slot))),
        read_only: held.read_only,
        mount_path: Some(held.mount_path.clone()).filter(|path| !path.is_empty()),
    }
}
