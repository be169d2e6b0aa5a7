//! One driver for each sandbox: takes steps until the state meets the target, and writes down each change.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};

use api::{EventKind, SandboxId};
use machine::{
    Ended, Load, Machine, Prepared, RootDisk,
    guest::{Mount, Network, Repair, Request},
    network::Gate,
};
use store::sandbox_files::{self, SandboxFiles};
use tokio::time::Instant;

use super::{
    Sandboxes,
    admission::Admitted,
    ahead::Ahead,
    network,
    pool::Ready,
    registry::{self, Entry, locked},
    saved::SavedMachine,
    site::Site,
    state::{State, Step, Target, Wish, next_step, rest},
    volumes::{Attached, Volumes},
};
use crate::{Error, blocking::blocking, clock::Clock};

/// From the virtual CPU's start to the end of the repair.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(15);
const REMOVAL_TRIES: usize = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(500);

/// Every guest has the same address; the host tells them apart by the namespace.
const GUEST_NETWORK: Network =
    Network { address: [10, 200, 0, 2], prefix: 30, gateway: [10, 200, 0, 1] };

/// A sandbox's machine, running or paused.
pub(crate) struct Inside {
    pub(crate) machine: Machine,
    pub(crate) address: Ipv4Addr,
    pub(crate) gate: Gate,
    site: Mutex<Option<Site>>,
}

impl Inside {
    pub(crate) fn new(machine: Machine, site: Site) -> Self {
        let (address, gate) = (site.address(), site.gate().clone());
        Self { machine, address, gate, site: Mutex::new(Some(site)) }
    }

    /// For whoever comes first.
    pub(super) fn take_site(&self) -> Option<Site> {
        locked(&self.site).take()
    }
}

/// What a start needs beside its row.
pub(crate) struct StartOrder {
    /// `None`: it boots from the disk that it has.
    pub(crate) saved: Option<Arc<SavedMachine>>,
    pub(crate) began: Instant,
    /// Held until the machine runs, or is given back.
    pub(crate) admitted: Admitted,
}

/// A machine before its first step.
pub(super) struct Loaded {
    pub(super) machine: Machine,
    /// Volumes that it does not know yet.
    pub(super) later: Vec<Attached>,
    pub(super) mounts: Vec<Mount>,
    pub(super) grow_root: bool,
}

/// Waits for a sandbox's machine to end by itself.
async fn machine_end(entry: &Entry) -> Ended {
    match entry.inside() {
        Some(inside) => inside.machine.exited().await,
        None => std::future::pending().await,
    }
}

/// Whatever ended it: what ran there and has not been told to end never will be.
fn lose_execs_without_machine(entry: &Entry) {
    match entry.look(|row| row.state) {
        State::Stopped | State::Failed => entry.execs.lose_all(),
        State::Creating | State::Running | State::Paused | State::Hibernated => {}
    }
}

impl Sandboxes {
    /// Runs until the sandbox is removed, or the server closes.
    pub(crate) async fn drive(self: Arc<Self>, entry: Arc<Entry>, mut order: Option<StartOrder>) {
        loop {
            let (state, target) = entry.look(|row| (row.state, row.target));
            match next_step(state, target) {
                Some(step) => {
                    let turn = entry.turn.lock().await;
                    self.take(&entry, step, &mut order).await;
                    drop(turn);
                    lose_execs_without_machine(&entry);
                    if step == Step::Remove {
                        return;
                    }
                }
                None => {
                    let ended = tokio::select! {
                        () = entry.target_changed.notified() => None,
                        ended = machine_end(&entry) => Some(ended),
                        () = self.closed.cancelled() => return,
                    };
                    // Not among the above: giving back what the machine had must not be cut short.
                    if let Some(ended) = ended {
                        self.note_the_end(&entry, ended).await;
                        lose_execs_without_machine(&entry);
                    }
                }
            }
        }
    }

    async fn take(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        step: Step,
        order: &mut Option<StartOrder>,
    ) {
        let outcome = match step {
            Step::Start => match order.take() {
                Some(order) => self.start(entry, order).await,
                // Half-made by a server that is gone: nobody was told of it.
                None => Err(Error::conflict("half-made by a server that is gone")),
            },
            Step::Pause => self.pause_machine(entry).await,
            Step::Resume => self.resume_machine(entry).await,
            Step::Hibernate => self.hibernate_machine(entry).await,
            Step::Wake => self.wake_machine(entry).await,
            Step::PowerOff => self.power_off_machine(entry).await,
            Step::PowerOn => self.power_on_machine(entry).await,
            Step::Remove => {
                self.remove(entry).await;
                Err(registry::not_found())
            }
        };
        if let Err(error) = &outcome {
            match step {
                Step::Start => self.give_up(entry, error),
                Step::Remove => {}
                Step::Pause
                | Step::Resume
                | Step::Hibernate
                | Step::Wake
                | Step::PowerOff
                | Step::PowerOn => self.stay(entry, step, error).await,
            }
        }
        entry.announce(outcome);
    }

    /// A create that failed leaves nothing behind, so that it can be sent again.
    fn give_up(&self, entry: &Entry, error: &Error) {
        let id = entry.look(|row| row.id);
        tracing::warn!(sandbox = %id, %error, cause = error.causes(), "failed to start");
        entry.change(|row| {
            row.state = State::Failed;
            row.target = Target::Deleted;
        });
    }

    /// A step that failed left the sandbox as it was: that is its target now, unless it was told to go meanwhile.
    async fn stay(&self, entry: &Entry, step: Step, error: &Error) {
        let id = entry.look(|row| row.id);
        tracing::warn!(sandbox = %id, ?step, %error, cause = error.causes(), "a step failed");
        entry.change(|row| {
            if row.target != Target::Deleted {
                row.target = rest(row.state);
            }
        });
        self.write_down(entry).await;
    }

    async fn start(&self, entry: &Entry, order: StartOrder) -> Result<(), Error> {
        let StartOrder { saved, began, admitted } = order;
        let id = entry.look(|row| row.id);
        let started = match saved {
            Some(saved) => {
                // Counted until it runs, or is given back.
                let _admitted = admitted;
                self.restore(entry, &saved).await
            }
            None => {
                // A boot takes more.
                drop(admitted);
                self.boot_anew(entry).await
            }
        };
        match started {
            Ok((machine, site)) => {
                let slot = site.number();
                entry.put_inside(Inside::new(machine, site));
                self.watch_inherited(entry);
                let now = self.clock.steady_ms();
                self.tell(entry, EventKind::Running, None);
                entry.change(|row| {
                    row.state = State::Running;
                    row.slot = Some(slot);
                    // From now on it goes with its machine, also where it was there before.
                    row.keeps_root = false;
                    row.boot_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    row.expires_at = row
                        .ttl_seconds
                        .map(|ttl| now.saturating_add_unsigned(ttl.saturating_mul(1000)));
                });
                fault::point!("create.running_writing", Error::internal);
                self.save_row(entry).await?;
                fault::point!("create.running_written");
                tracing::info!(sandbox = %id, boot_ms = entry.look(|row| row.boot_ms), "running");
                Ok(())
            }
            Err(error) => {
                // Whoever asked may ask again at once.
                self.release_volumes(entry).await;
                self.remove_files(entry).await;
                Err(error)
            }
        }
    }

    /// Nothing of the machine is left when this fails.
    async fn restore(
        &self,
        entry: &Entry,
        saved: &Arc<SavedMachine>,
    ) -> Result<(Machine, Site), Error> {
        fault::point!("create.process_taking", Error::internal);
        let Ready { site, ahead } = self.pool.take(saved, entry.kind_ahead(saved)).await?;
        fault::point!("create.process_taken");
        let (layout, id) = (self.sites.layout.clone(), entry.look(|row| row.id));
        let _no_other_change = entry.network_changes.lock().await;
        let started = async {
            blocking(move || SandboxFiles::create(&layout, &id)).await?;
            let loaded = match ahead {
                Ahead::Process(prepared) => {
                    self.load_up(entry, saved, prepared, &site, Volumes::Mounted).await?
                }
                Ahead::Machine(machine) => self.take_over(entry, saved, machine, &site).await?,
            };
            self.set_going(entry, loaded).await
        };
        match started.await {
            Ok(machine) => Ok((machine, site)),
            Err(error) => {
                site.remove().await;
                Err(error)
            }
        }
    }

    /// The first boot of a machine that has its disk from another.
    async fn boot_anew(&self, entry: &Entry) -> Result<(Machine, Site), Error> {
        let (layout, id) = (self.sites.layout.clone(), entry.look(|row| row.id));
        blocking(move || SandboxFiles::create(&layout, &id)).await?;
        let booted = self.boot(entry).await?;
        entry.change(|row| row.cold_boot = true);
        Ok(booted)
    }

    /// A machine of its own out of a saved one. The caller gives back the site when this fails, or what follows.
    pub(super) async fn load_up(
        &self,
        entry: &Entry,
        saved: &SavedMachine,
        prepared: Prepared,
        site: &Site,
        volumes: Volumes,
    ) -> Result<Loaded, Error> {
        let disk_bytes = entry.look(|row| row.disk_mb) << 20;
        let root = self.root(entry)?;
        let mut attached = self.open_volumes(entry).await?;
        let mounts = attached.iter().map(|volume| volume.mount(volumes)).collect();
        // What is mounted already has to be there from the guest's first step. Anything else comes while it takes them.
        let later = match volumes {
            Volumes::Mounted => std::mem::take(&mut attached),
            Volumes::AsTheyWere => Vec::new(),
        };
        let load = async {
            let disk = root.put(saved.rootfs(), disk_bytes).await?;
            let root_disk = RootDisk {
                file: disk,
                bytes: disk_bytes,
                base_bytes: saved.disk_bytes,
                durability: root.durability(),
            };
            let volumes = attached.into_iter().map(Attached::into_disk).collect();
            let load = Load { state: saved.state()?, root_disk, volumes };
            prepared.load(load).await.map_err(not_started)
        };
        let begun = Instant::now();
        // Both before the guest's first step.
        let (machine, ()) = tokio::try_join!(load, network::put_in_place(site.gate(), entry))?;
        tracing::debug!(sandbox = %entry.look(|row| row.id), took = ?begun.elapsed(), "loaded");
        Ok(Loaded { machine, later, mounts, grow_root: disk_bytes > saved.disk_bytes })
    }

    /// Running and repaired, with its volumes.
    pub(super) async fn set_going(&self, entry: &Entry, loaded: Loaded) -> Result<Machine, Error> {
        let Loaded { machine, later, mounts, grow_root } = loaded;
        let begun = Instant::now();
        fault::point!("create.resuming", Error::internal);
        machine.resume().await.map_err(not_started)?;
        fault::point!("create.guest_connecting", Error::internal);
        let attach = async {
            for volume in later {
                let (slot, disk) = volume.into_disk();
                machine.attach_volume(slot, disk).await?;
            }
            Ok(())
        };
        let connect = async {
            match machine.guest().filter(|guest| !guest.is_lost()) {
                Some(guest) => Ok(guest),
                None => machine.connect_guest(ANSWER_DEADLINE).await,
            }
        };
        let (guest, ()) = tokio::try_join!(connect, attach).map_err(not_started)?;
        let repair = self.repair(entry, grow_root, mounts);
        let connected = begun.elapsed();
        fault::point!("create.repairing", Error::internal);
        guest.call(Request::Repair(repair), ANSWER_DEADLINE).await.map_err(not_started)?;
        fault::point!("create.repaired");
        let repaired = begun.elapsed() - connected;
        tracing::debug!(sandbox = %entry.look(|row| row.id), ?connected, ?repaired, "set going");
        Ok(machine)
    }

    pub(super) fn repair(&self, entry: &Entry, grow_root: bool, volumes: Vec<Mount>) -> Repair {
        let id = entry.look(|row| row.id);
        Repair { grow_root, volumes, ..repair_of(&id, &self.clock) }
    }

    /// The machine has ended by itself.
    async fn note_the_end(&self, entry: &Entry, ended: Ended) {
        let (state, error) = match ended {
            Ended::PoweredOff => (State::Stopped, None),
            Ended::Died { reason } => {
                tracing::error!(sandbox = %entry.look(|row| row.id), %reason, "a virtual machine ended unexpectedly");
                (State::Failed, Some("its virtual machine ended unexpectedly".to_owned()))
            }
        };
        // The disk is kept; nothing else is needed any longer.
        let gone = self.past_traffic.take_inside(entry);
        let kind = if state == State::Stopped { EventKind::Stopped } else { EventKind::Failed };
        self.tell(entry, kind, error.clone());
        entry.change(|row| {
            row.state = state;
            if row.target != Target::Deleted {
                row.target = rest(state);
            }
            row.slot = None;
            row.error = error;
        });
        self.write_down(entry).await;
        entry.announce(entry.accept(Wish::Inside, self.clock.steady_ms()));
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            site.remove().await;
        }
        if state == State::Failed {
            // Nobody attaches or detaches meanwhile.
            let _turn = entry.turn.lock().await;
            self.release_volumes(entry).await;
        }
        self.admission.look_again();
    }

    /// A change that is true already has to reach its row, however long the database is away.
    pub(super) async fn write_down(&self, entry: &Entry) {
        while let Err(error) = self.save_row(entry).await {
            tracing::error!(sandbox = %entry.look(|row| row.id), cause = error.causes(), "failed to write a sandbox's row");
            if !self.pause_for_database().await {
                return;
            }
        }
    }

    /// Of the sandbox, not of its machine: the root disk. What cannot be removed is left to the next start.
    async fn remove_files(&self, entry: &Entry) {
        let (layout, id) = (self.sites.layout.clone(), entry.look(|row| row.id));
        for tries_left in (0..REMOVAL_TRIES).rev() {
            let layout = layout.clone();
            let removal = move || sandbox_files::remove(&layout, &id);
            let error = match tokio::task::spawn_blocking(removal).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => Error::from_store(error),
                Err(error) => Error::internal(error),
            };
            tracing::error!(sandbox = %id, cause = error.causes(), tries_left, "failed to remove a sandbox's files");
            if tries_left > 0 {
                tokio::time::sleep(REMOVAL_PAUSE).await;
            }
        }
    }

    async fn remove(self: &Arc<Self>, entry: &Arc<Entry>) {
        let id = entry.look(|row| row.id);
        if let Some(inside) = entry.inside() {
            if entry.look(|row| row.keeps_root && row.state == State::Running) {
                self.power_down(entry, &inside).await;
            } else {
                self.flush_volumes(entry, &inside).await;
            }
        }
        let gone = self.past_traffic.take_inside(entry);
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            fault::point!("delete.machine_ending");
            site.end_machine().await;
            fault::point!("delete.machine_ended");
            self.tasks.spawn(site.remove_network());
        }
        self.release_volumes(entry).await;
        let goes_too = self.settle_root(entry).await;
        self.remove_files(entry).await;
        fault::point!("delete.disk_removed");
        self.admission.look_again();
        self.meter_last(entry).await;
        while let Err(error) = self.db.delete_sandbox(&id, goes_too.as_ref()).await {
            tracing::error!(sandbox = %id, cause = error.causes(), "failed to delete a sandbox's row");
            if !self.pause_for_database().await {
                return;
            }
        }
        fault::point!("delete.row_deleted");
        entry.execs.close();
        if let Err(error) = self.db.delete_execs(&id).await {
            tracing::warn!(sandbox = %id, cause = error.causes(), "failed to delete the rows of a sandbox's execs");
        }
        if let Err(error) = self.db.delete_events(&id).await {
            tracing::warn!(sandbox = %id, cause = error.causes(), "failed to delete what happened to a sandbox");
        }
        self.registry.remove(&id);
        self.leave_tree(entry).await;
        entry.logs.close();
        entry.removed.send_replace(true);
        tracing::info!(sandbox = %id, "deleted");
    }
}

impl Sandboxes {
    /// Its machine is dead. The root volume that goes with it.
    async fn settle_root(&self, entry: &Entry) -> Option<api::VolumeId> {
        let id = entry.root_volume()?;
        let root = self.root(entry).ok()?;
        if entry.look(|row| row.keeps_root) {
            if let Err(error) = root.recover().await {
                tracing::error!(volume = %id, cause = error.causes(), "failed to recover a root disk");
            }
            return None;
        }
        for tries_left in (0..REMOVAL_TRIES).rev() {
            let Err(error) = root.remove().await else { break };
            tracing::error!(volume = %id, cause = error.causes(), tries_left, "failed to remove a root disk");
            if tries_left > 0 {
                tokio::time::sleep(REMOVAL_PAUSE).await;
            }
        }
        Some(id)
    }
}

/// What makes a clone this machine and no other.
pub(super) fn repair_of(id: &SandboxId, clock: &Clock) -> Repair {
    let id = id.to_string();
    Repair {
        entropy: rand::random(),
        unix_time_ns: clock.now_ns(),
        // Short enough for a prompt, long enough to tell sandboxes apart.
        host_name: format!("sandbox-{}", id.get(..8).unwrap_or(&id)),
        // For life: a wake does not change it.
        machine_id: id.replace('-', ""),
        network: GUEST_NETWORK,
        grow_root: false,
        volumes: Vec::new(),
    }
}

/// Nothing was created then. A host that is too busy to start a machine in time may be asked again.
pub(super) fn not_started(error: machine::Error) -> Error {
    use machine::Error::{Busy, Lost, Reset, Silent};
    if matches!(error, Silent | Lost | Reset | Busy) {
        Error::busy("the host is too busy to start a sandbox; try again shortly", 5).because(error)
    } else {
        error.into()
    }
}
