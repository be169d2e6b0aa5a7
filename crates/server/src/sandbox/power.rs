//! Off and on: a guest powers itself off in order, its disk is kept, and boots from it again.

use std::time::Duration;

use api::{AccountId, EventKind, Sandbox, SandboxId};
use machine::{
    Machine, RootDisk,
    guest::{Mount, Request},
};
use store::volume::Recovery;
use tokio::time::Instant;

use super::{
    Sandboxes,
    bake::Switch,
    capacity::Need,
    driver::{ANSWER_DEADLINE, Inside, not_started},
    network,
    pausing::reach_guest,
    registry::{Entry, locked},
    site::Site,
    state::{State, Target, Wish, can_boot},
    transition::When,
    volumes::{Attached, Volumes},
};
use crate::{Error, blocking::blocking};

/// For the guest's processes to end when they are asked to, before they are killed.
const GRACE_MS: u32 = 5000;
/// From the word to the guest to the end of its machine: all that it has not written yet is written in between. Then it is
/// ended all the same.
const OFF_DEADLINE: Duration = Duration::from_secs(60);
/// Of a boot, which takes seconds under emulation, and several times that beside others.
const BOOT_DEADLINE: Duration = Duration::from_secs(100);
/// For room on the host.
const ROOM_PATIENCE: Duration = Duration::from_secs(20);

impl Sandboxes {
    /// Its guest has powered off when this returns, and no process of it is left. Idempotent.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 when it has failed.
    pub async fn power_off(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> {
        let entry = self.registry.find(account, id)?;
        self.reach(&entry, Wish::PowerOff, Target::Stopped, When::Asked).await?;
        self.get(account, id)
    }

    /// It runs when this returns: booted from its disk where it was off. Idempotent.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 without a root disk that can be booted; 503 and 507 without room.
    pub async fn power_on(&self, account: &AccountId, id: &SandboxId) -> Result<Sandbox, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::PowerOn, self.clock.steady_ms())?;
        self.check_bootable(&entry)?;
        self.reach(&entry, Wish::PowerOn, Target::Running, When::Asked).await?;
        self.get(account, id)
    }

    fn check_bootable(&self, entry: &Entry) -> Result<(), Error> {
        let state = entry.look(|row| row.state);
        can_boot(state, entry.root_disk()).map_err(|refusal| entry.refused(refusal))
    }

    pub(super) async fn power_off_machine(&self, entry: &Entry) -> Result<(), Error> {
        // Whatever dies from here on, the next server goes on with it: what powers off does not come back as running.
        fault::point!("stop.target_writing");
        self.save_row(entry).await?;
        fault::point!("stop.target_written");
        let inside = entry.inside().ok_or_else(super::registry::not_found)?;
        let ended = tokio::select! {
            ended = self.power_down(entry, &inside) => ended,
            () = entry.deleted() => {
                return Err(Error::conflict("the sandbox was deleted while it was being stopped"));
            }
        };
        let detail = (!ended).then(|| {
            format!(
                "its guest did not power off within {} s and was ended; what it had not written is lost",
                OFF_DEADLINE.as_secs()
            )
        });
        if let Some(detail) = &detail {
            tracing::warn!(sandbox = %entry.look(|row| row.id), detail, "a guest did not power off");
        }
        drop(inside);
        fault::point!("stop.machine_ending");
        let gone = self.past_traffic.take_inside(entry);
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            site.end_machine().await;
            self.tasks.spawn(site.remove_network());
        }
        self.put_disks_in_order(entry).await;
        fault::point!("stop.row_writing");
        self.tell(entry, EventKind::Stopped, detail);
        entry.change(|row| {
            row.state = State::Stopped;
            row.slot = None;
            row.error = None;
        });
        self.write_down(entry).await;
        tracing::info!(sandbox = %entry.look(|row| row.id), "stopped");
        self.admission.look_again();
        Ok(())
    }

    /// False when its machine has to be ended.
    pub(super) async fn power_down(&self, entry: &Entry, inside: &Inside) -> bool {
        let asked = async {
            let (guest, _) = reach_guest(entry, inside, ANSWER_DEADLINE).await?;
            guest.call(Request::Shutdown { grace_ms: GRACE_MS }, OFF_DEADLINE).await?;
            Ok::<_, Error>(())
        };
        let off = async {
            tokio::select! {
                biased;
                _ = inside.machine.exited() => return true,
                asked = asked => if let Err(error) = asked {
                    tracing::warn!(sandbox = %entry.look(|row| row.id), %error, cause = error.causes(), "a guest was not asked to power off");
                    // The answer may have been lost with the guest.
                    let soon = tokio::time::timeout(ANSWER_DEADLINE, inside.machine.exited());
                    return soon.await.is_ok();
                },
            }
            inside.machine.exited().await;
            true
        };
        tokio::time::timeout(OFF_DEADLINE, off).await.unwrap_or(false)
    }

    /// Its machine is dead. What cannot be put in order is told when it is used.
    async fn put_disks_in_order(&self, entry: &Entry) {
        let id = entry.look(|row| row.id);
        let root = match self.root(entry) {
            Ok(root) => root.recover().await,
            Err(error) => Err(error),
        };
        match root {
            Ok(recovery) => tracing::debug!(sandbox = %id, ?recovery, "its root disk is in order"),
            Err(error) => {
                tracing::error!(sandbox = %id, cause = error.causes(), "failed to recover a root disk");
            }
        }
        self.put_volumes_in_order(entry).await;
    }

    async fn put_volumes_in_order(&self, entry: &Entry) {
        let held = locked(&entry.attachments).clone();
        for held in held.iter().filter(|held| !held.read_only) {
            self.volumes.put_in_order(&held.volume).await;
        }
    }

    pub(super) async fn power_on_machine(&self, entry: &Entry) -> Result<(), Error> {
        let began = Instant::now();
        self.check_bootable(entry)?;
        let (machine, site) = self.boot(entry).await?;
        let slot = site.number();
        entry.put_inside(Inside::new(machine, site));
        fault::point!("start.row_writing");
        self.tell(entry, EventKind::Running, None);
        entry.change(|row| {
            row.state = State::Running;
            row.slot = Some(slot);
            row.error = None;
            row.boot_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
            row.cold_boot = true;
        });
        self.write_down(entry).await;
        // Of before it was off: nothing of it is true any longer.
        self.forget_hibernation(entry).await;
        let (id, boot_ms) = entry.look(|row| (row.id, row.boot_ms));
        tracing::info!(sandbox = %id, boot_ms, "booted");
        Ok(())
    }

    /// A machine that has booted from its root disk, and answers. Nothing of it is left when this fails.
    pub(super) async fn boot(&self, entry: &Entry) -> Result<(Machine, Site), Error> {
        let root = self.root(entry)?;
        if let Recovery::Damaged { report } = root.recover().await? {
            tracing::warn!(sandbox = %entry.look(|row| row.id), report, "a root disk cannot be repaired without a decision");
            return Err(Error::conflict(
                "the file system of its root disk is damaged beyond what can be repaired without a decision; attach the disk to another machine and repair it there",
            ));
        }
        self.put_volumes_in_order(entry).await;
        let need = Need::of_boot(entry.look(|row| row.memory_mb) << 20);
        let _admitted = self.admit(need, ROOM_PATIENCE).await?;
        let site = self.sites.prepare().await?;
        let _no_other_change = entry.network_changes.lock().await;
        let booted = tokio::select! {
            booted = self.boot_in(entry, &site, root) => booted,
            () = entry.deleted() => {
                Err(Error::conflict("the sandbox was deleted while it was being started"))
            }
        };
        match booted {
            Ok(machine) => Ok((machine, site)),
            Err(error) => {
                site.remove().await;
                Err(error)
            }
        }
    }

    async fn boot_in(
        &self,
        entry: &Entry,
        site: &Site,
        root: super::root::Root,
    ) -> Result<Machine, Error> {
        let spec = self.spec(entry);
        let memory = {
            let (files, bytes) = (self.files(entry), spec.shape.memory_bytes());
            blocking(move || files.blank_memory(bytes)).await?
        };
        let file = root.open().await?;
        let bytes = file.metadata().map_err(Error::internal)?.len();
        entry.change(|row| row.disk_mb = bytes >> 20);
        let root_disk = RootDisk { file, bytes, base_bytes: bytes, durability: root.durability() };
        let attached = self.open_volumes(entry).await?;
        let mounts: Vec<Mount> =
            attached.iter().map(|volume| volume.mount(Volumes::Mounted)).collect();
        let volumes = attached.into_iter().map(Attached::into_disk).collect();
        let switch = Switch { spec, memory, root_disk, volumes, place: site.place()? };
        fault::point!("start.machine_starting", Error::internal);
        // Both before the guest's first step.
        let machine = async { self.bakes.power_on(switch).await.map_err(not_started) };
        let (machine, ()) = tokio::try_join!(machine, network::put_in_place(site.gate(), entry))?;
        machine.resume().await.map_err(not_started)?;
        let guest = match machine.connect_guest(BOOT_DEADLINE).await {
            Ok(guest) => guest,
            Err(error) => {
                let console = machine.console().await.unwrap_or_default();
                tracing::warn!(sandbox = %entry.look(|row| row.id), console, "a guest did not boot");
                return Err(not_booted(error));
            }
        };
        fault::point!("start.booted");
        let repair = self.repair(entry, false, mounts);
        guest.call(Request::Repair(repair), ANSWER_DEADLINE).await.map_err(not_started)?;
        Ok(machine)
    }
}

/// A kernel that panics ends its machine.
fn not_booted(error: machine::Error) -> Error {
    if matches!(error, machine::Error::Exited { .. }) {
        return Error::conflict(
            "its guest did not boot from its root disk; attach the disk to another machine and look at it there",
        )
        .because(error);
    }
    not_started(error)
}
