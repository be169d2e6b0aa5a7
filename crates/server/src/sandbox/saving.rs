//! Saving a machine: most of it while the machine goes on, and then one window in which it stands still, for device state,
//! memory and disk are of one instant.

use machine::{
    Ahead, MachineSpec, Save, WriteBack,
    guest::{Guest, Request},
};
use store::{
    Digest,
    saved_machine::{Manifest, SavedMachineDraft},
};
use tokio::time::Instant;

use super::{
    Sandboxes,
    pausing::QUIESCE_DEADLINE,
    registry::{self, Entry},
    state::State,
};
use crate::{Error, blocking::blocking};

/// What was written to its draft while the machine went on.
pub(super) struct Begun {
    draft: SavedMachineDraft,
    memory: Ahead,
}

/// Less is left to be written when its processes stand still. If it fails, so will that.
pub(super) async fn sync_ahead(entry: &Entry, guest: &Guest) {
    if let Err(error) = guest.call(Request::Sync, QUIESCE_DEADLINE).await {
        let id = entry.look(|row| row.id);
        tracing::debug!(sandbox = %id, %error, "a guest has not flushed its disks");
    }
}

impl Sandboxes {
    /// Nothing stands still for it. To be called before the guest is made quiet: what it does takes longer than that should.
    pub(super) async fn begin_to_save(
        &self,
        entry: &Entry,
        draft: SavedMachineDraft,
        write_back: WriteBack,
    ) -> Result<Begun, Error> {
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        let began = Instant::now();
        // No more than that has changed; what cannot be measured is found to be too much when it is written.
        self.admit_bytes(inside.machine.private_memory_bytes().unwrap_or(0))?;
        let id = entry.look(|row| row.id);
        if entry.look(|row| row.state) == State::Running {
            let guest = entry.guest().ok_or_else(registry::not_found)?;
            entry.execs.settle().await;
            // What ended commands printed shall not lie in what is saved. It is no harm where it does.
            if let Err(error) = guest.forget_now().await {
                tracing::debug!(sandbox = %id, %error, "ended execs stay in their guest");
            }
            sync_ahead(entry, &guest).await;
        }
        let base = inside.machine.base_memory()?;
        let (memory, draft) = blocking(move || Ok((draft.clone_memory_of(&base)?, draft))).await?;
        let (memory, flushed) = tokio::join!(
            inside.machine.copy_ahead(memory, write_back),
            inside.machine.flush_disks()
        );
        flushed?;
        tracing::debug!(sandbox = %id, took = ?began.elapsed(), "saved ahead");
        Ok(Begun { draft, memory: memory? })
    }

    /// Fills the draft. Whatever happens the machine may be quiet and stand still afterwards: see [`Sandboxes::go_on`].
    pub(super) async fn save_machine(
        &self,
        entry: &Entry,
        begun: Begun,
    ) -> Result<(SavedMachineDraft, Manifest), Error> {
        let Begun { draft, memory } = begun;
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        let (id, disk_mb) = entry.look(|row| (row.id, row.disk_mb));
        let state = draft.state_file().map_err(Error::from_store)?;
        let rootfs = self.root(entry)?.path();
        let while_stopped = draft.clone_rootfs_later(rootfs);
        let begun = Instant::now();
        if entry.look(|row| row.state) == State::Running {
            let guest = entry.guest().ok_or_else(registry::not_found)?;
            guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
            fault::point!("snapshot.quiet", Error::internal);
        }
        let quiesce = begun.elapsed();
        let saved = inside.machine.save(Save { state, memory, while_stopped }).await?;
        tracing::debug!(
            sandbox = %id,
            ?quiesce,
            stood = ?saved.stood,
            steps = ?saved.steps,
            changed_pages = saved.changed_pages,
            written_bytes = saved.written_bytes,
            "saved"
        );
        let spec = self.spec(entry);
        let description = spec.description();
        let manifest = Manifest {
            key: Digest::of(description.as_bytes()),
            description,
            cpus: spec.shape.cpus,
            memory_mib: spec.shape.memory_mib,
            disk_bytes: disk_mb << 20,
            agent_protocol: entry.guest().map_or(0, |guest| guest.version()),
            machine_type: machine::MACHINE_TYPE.to_owned(),
            created_ms: self.clock.now_ms(),
            read_pages: saved.read_pages,
        };
        Ok((draft, manifest))
    }

    pub(super) fn spec(&self, entry: &Entry) -> MachineSpec {
        let (cpus, memory_mb) = entry.look(|row| (row.cpu, row.memory_mb));
        let memory_mib = u32::try_from(memory_mb).unwrap_or(u32::MAX);
        self.bakes.spec(machine::Shape { cpus, memory_mib })
    }

    /// Of a saved machine, if this host can run it: a state that does not fit is hardly checked by QEMU itself.
    pub(super) fn spec_of(&self, manifest: &Manifest) -> Result<MachineSpec, Error> {
        let shape = machine::Shape { cpus: manifest.cpus, memory_mib: manifest.memory_mib };
        let spec = self.bakes.spec(shape);
        if Digest::of(spec.description().as_bytes()) == manifest.key {
            return Ok(spec);
        }
        tracing::warn!(
            was = manifest.description,
            is = spec.description(),
            "a saved machine does not fit"
        );
        Err(Error::conflict(
            "it was saved by a machine that this host cannot continue: its accelerator, processor or this program's machine is another; start it where it was made",
        ))
    }
}
