//! One driver for each sandbox: takes steps until the state meets the target, and writes down each change.

use std::{
    net::Ipv4Addr,
    sync::{Arc, Mutex},
    time::Duration,
};

use machine::{
    Durability, Ended, Load, Machine, Prepared, RootDisk,
    guest::{Guest, Network, Repair, Request},
    network::Gate,
};
use store::sandbox_files::{self, SandboxFiles};
use tokio::time::Instant;

use super::{
    Sandboxes,
    admission::Admitted,
    bake::Baked,
    network,
    pool::Ready,
    registry::{Entry, locked},
    site::Site,
    state::{State, Step, Target, next_step},
};
use crate::Error;

/// From the virtual CPU's start to the end of the repair.
pub(crate) const ANSWER_DEADLINE: Duration = Duration::from_secs(15);
/// Before a change that the database refused is tried again.
const DATABASE_PAUSE: Duration = Duration::from_secs(1);
const REMOVAL_TRIES: usize = 5;
const REMOVAL_PAUSE: Duration = Duration::from_millis(500);

/// Every guest has the same address; the host tells them apart by the namespace.
const GUEST_NETWORK: Network =
    Network { address: [10, 200, 0, 2], prefix: 30, gateway: [10, 200, 0, 1] };

/// A running sandbox's machine.
pub(crate) struct Inside {
    pub(crate) machine: Machine,
    pub(crate) guest: Guest,
    pub(crate) address: Ipv4Addr,
    pub(crate) gate: Gate,
    site: Mutex<Option<Site>>,
}

impl Inside {
    pub(crate) fn new(machine: Machine, guest: Guest, site: Site) -> Self {
        let (address, gate) = (site.address(), site.gate().clone());
        Self { machine, guest, address, gate, site: Mutex::new(Some(site)) }
    }

    /// For whoever comes first.
    fn take_site(&self) -> Option<Site> {
        locked(&self.site).take()
    }
}

/// What a start needs beside its row.
pub(crate) struct StartOrder {
    pub(crate) baked: Arc<Baked>,
    pub(crate) began: Instant,
    /// Held until the machine runs, or is given back.
    pub(crate) admitted: Admitted,
}

/// Waits for a running sandbox's machine to end by itself.
async fn machine_end(entry: &Entry) -> Ended {
    let inside = locked(&entry.inside).clone();
    match inside {
        Some(inside) if entry.look(|row| row.state) == State::Running => {
            inside.machine.exited().await
        }
        Some(_) | None => std::future::pending().await,
    }
}

impl Sandboxes {
    /// Runs until the sandbox is removed, or the server closes.
    pub(crate) async fn drive(self: Arc<Self>, entry: Arc<Entry>, mut order: Option<StartOrder>) {
        loop {
            let (id, state, target) = entry.look(|row| (row.id, row.state, row.target));
            match next_step(state, target) {
                Some(Step::Start) => {
                    let Some(order) = order.take() else {
                        // Half-made by a server that is gone: nobody was told of it.
                        self.give_up(&entry, Error::conflict("half-made by a server that is gone"))
                            .await;
                        continue;
                    };
                    let started = self.start(&entry, &order).await;
                    drop(order.admitted);
                    match started {
                        Ok(()) => {
                            tracing::info!(sandbox = %id, boot_ms = entry.look(|row| row.boot_ms), "running");
                            entry.announce_start(Ok(()));
                        }
                        Err(error) => self.give_up(&entry, error).await,
                    }
                }
                Some(Step::Remove) => {
                    self.remove(&entry).await;
                    return;
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
                    }
                }
            }
        }
    }

    /// A create that failed leaves nothing behind, so that it can be sent again.
    async fn give_up(&self, entry: &Entry, error: Error) {
        let id = entry.look(|row| row.id);
        tracing::warn!(sandbox = %id, %error, cause = error.causes(), "failed to start");
        entry.change(|row| {
            row.state = State::Failed;
            row.target = Target::Deleted;
        });
        entry.announce_start(Err(error));
    }

    async fn start(&self, entry: &Entry, order: &StartOrder) -> Result<(), Error> {
        fault::point!("create.process_taking", Error::internal);
        let ready = self.pool.take(&order.baked).await?;
        fault::point!("create.process_taken");
        let Ready { site, prepared } = ready;
        let disk_bytes = entry.look(|row| row.disk_mb) << 20;
        let _no_other_change = entry.network_changes.lock().await;
        let policy = entry.look(|row| row.network.clone());
        let walls = network::put_in_place(site.gate(), &policy);
        match self.bring_up(entry, &order.baked, prepared, disk_bytes, walls).await {
            Ok((machine, guest)) => {
                let slot = site.number();
                *locked(&entry.inside) = Some(Arc::new(Inside::new(machine, guest, site)));
                let now = self.clock.steady_ms();
                entry.change(|row| {
                    row.state = State::Running;
                    row.slot = Some(slot);
                    row.boot_ms =
                        u64::try_from(order.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    row.expires_at = row
                        .ttl_seconds
                        .map(|ttl| now.saturating_add_unsigned(ttl.saturating_mul(1000)));
                });
                fault::point!("create.running_writing", Error::internal);
                self.db.update_sandbox(&entry.row()).await?;
                fault::point!("create.running_written");
                Ok(())
            }
            Err(error) => {
                site.remove().await;
                self.remove_files(entry).await;
                Err(error)
            }
        }
    }

    async fn bring_up(
        &self,
        entry: &Entry,
        baked: &Baked,
        prepared: Prepared,
        disk_bytes: u64,
        walls: impl Future<Output = Result<(), Error>>,
    ) -> Result<(Machine, Guest), Error> {
        let (layout, id, source) =
            (self.sites.layout.clone(), entry.look(|row| row.id), baked.rootfs());
        let load = async {
            let disk = tokio::task::spawn_blocking(move || {
                SandboxFiles::create(&layout, &id)?.clone_rootfs(&source, disk_bytes)
            })
            .await
            .map_err(Error::internal)?
            .map_err(Error::from_store)?;
            let root_disk = RootDisk {
                file: disk,
                bytes: disk_bytes,
                base_bytes: baked.disk_bytes,
                durability: Durability::Throwaway,
            };
            let load = Load { state: baked.state()?, root_disk, volumes: Vec::new() };
            prepared.load(load).await.map_err(Error::internal)
        };
        // Both before the guest's first step.
        let (machine, ()) = tokio::try_join!(load, walls)?;
        fault::point!("create.resuming", Error::internal);
        machine.resume().await.map_err(Error::internal)?;
        fault::point!("create.guest_connecting", Error::internal);
        let guest = machine.connect_guest(ANSWER_DEADLINE).await.map_err(Error::internal)?;
        let repair = self.repair(entry, disk_bytes > baked.disk_bytes);
        fault::point!("create.repairing", Error::internal);
        guest.call(Request::Repair(repair), ANSWER_DEADLINE).await.map_err(Error::internal)?;
        fault::point!("create.repaired");
        Ok((machine, guest))
    }

    fn repair(&self, entry: &Entry, grow_root: bool) -> Repair {
        let id = entry.look(|row| row.id).to_string();
        Repair {
            entropy: rand::random(),
            unix_time_ns: u64::try_from(self.clock.now_ms()).unwrap_or(0).saturating_mul(1_000_000),
            // Short enough for a prompt, long enough to tell sandboxes apart.
            host_name: format!("sandbox-{}", id.get(..8).unwrap_or(&id)),
            machine_id: uuid::Uuid::new_v4().simple().to_string(),
            network: GUEST_NETWORK,
            grow_root,
            volumes: Vec::new(),
        }
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
        entry.change(|row| {
            row.state = state;
            row.slot = None;
            row.error = error;
        });
        self.write_down(entry).await;
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            site.remove().await;
        }
        self.admission.look_again();
    }

    /// A change that is true already has to reach its row, however long the database is away.
    async fn write_down(&self, entry: &Entry) {
        while let Err(error) = self.db.update_sandbox(&entry.row()).await {
            tracing::error!(sandbox = %entry.look(|row| row.id), cause = error.causes(), "failed to write a sandbox's row");
            tokio::select! {
                () = tokio::time::sleep(DATABASE_PAUSE) => {}
                () = self.closed.cancelled() => return,
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
        let gone = self.past_traffic.take_inside(entry);
        if let Some(site) = gone.and_then(|inside| inside.take_site()) {
            fault::point!("delete.machine_ending");
            site.end_machine().await;
            fault::point!("delete.machine_ended");
            self.tasks.spawn(site.remove_network());
        }
        self.remove_files(entry).await;
        fault::point!("delete.disk_removed");
        self.admission.look_again();
        while let Err(error) = self.db.delete_sandbox(&id).await {
            tracing::error!(sandbox = %id, cause = error.causes(), "failed to delete a sandbox's row");
            tokio::select! {
                () = tokio::time::sleep(DATABASE_PAUSE) => {}
                () = self.closed.cancelled() => return,
            }
        }
        fault::point!("delete.row_deleted");
        self.registry.remove(&id);
        entry.logs.close();
        entry.removed.send_replace(true);
        tracing::info!(sandbox = %id, "deleted");
    }
}
