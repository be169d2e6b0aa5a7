//! The one window in which a machine stands still to be saved: device state, changed memory and disk of one instant.

use std::{path::Path, time::Duration};

use machine::{MachineSpec, Save, guest::Request};
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

/// What is not on the disk by then is written while the machine stands still.
const FLUSHES: usize = 3;
const SHORT_FLUSH: Duration = Duration::from_millis(5);

impl Sandboxes {
    /// Fills the draft. Whatever happens the machine may be quiet and stand still afterwards: see [`Sandboxes::go_on`].
    pub(super) async fn save_machine(
        &self,
        entry: &Entry,
        draft: SavedMachineDraft,
    ) -> Result<(SavedMachineDraft, Manifest), Error> {
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        // No more than that has changed; what cannot be measured is found to be too much when it is written.
        self.admit_bytes(inside.machine.private_memory_bytes().unwrap_or(0))?;
        let (id, disk_mb) = entry.look(|row| (row.id, row.disk_mb));
        let rootfs = self.root(entry)?.path();
        let base = inside.machine.base_memory()?;
        let (memory, state, clone_rootfs, draft) = {
            let rootfs = rootfs.clone();
            let make = move || {
                let memory = draft.clone_memory_of(&base)?;
                let state = draft.state_file()?;
                // Most of what waits to be written is written before anything stands still.
                flush(&rootfs)?;
                let clone_rootfs = draft.clone_rootfs_later(rootfs);
                Ok((memory, state, clone_rootfs, draft))
            };
            blocking(make).await?
        };
        if entry.look(|row| row.state) == State::Running {
            let guest = entry.guest().ok_or_else(registry::not_found)?;
            // What ended commands printed shall not lie in what is saved. It is no harm where it does.
            if let Err(error) = guest.forget_now().await {
                tracing::debug!(sandbox = %id, %error, "ended execs stay in their guest");
            }
            guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
            fault::point!("snapshot.quiet", Error::internal);
            blocking(move || flush(&rootfs)).await?;
        }
        let save = Save { state, memory, while_stopped: clone_rootfs };
        let saved = inside.machine.save(save).await?;
        tracing::debug!(sandbox = %id, steps = ?saved.steps, changed_bytes = saved.changed_bytes, "saved");
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

/// Until little is left to be written.
fn flush(disk: &Path) -> store::Result<()> {
    for _ in 0..FLUSHES {
        let begun = Instant::now();
        store::saved_machine::flush(disk)?;
        if begun.elapsed() < SHORT_FLUSH {
            break;
        }
    }
    Ok(())
}
