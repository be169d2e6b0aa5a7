//! Machines that have run ahead of their sandboxes: out of a bake, repaired, warm, and at rest again.
//!
//! Under emulation a guest's code is translated anew after each load; under KVM its pages are missed for the first time.
//! Either is over in a machine that has run before, and stays in its memory. So creates with volumes alone take one: a mount
//! is more code than all the rest of a create.
//!
//! Nobody's programs are in it but the template's own. It is made quiet before it stops, as for a bake, and goes on as from
//! a bake: with a repair, before anything else.

use std::{fs::File, time::Duration};

use api::SandboxId;
use machine::{
    Durability, Error as MachineError, Load, Machine, Prepared, RootDisk, VolumeDisk,
    guest::{Guest, Mount, Request},
};
use serde_bytes::ByteBuf;
use store::machine_files;

use super::{
    Sandboxes,
    bake::warm_up,
    driver::{ANSWER_DEADLINE, Loaded, not_started, repair_of},
    network,
    pausing::QUIESCE_DEADLINE,
    pool::{Pool, Started},
    registry::{Entry, locked},
    root::Root,
    saved::SavedMachine,
    site::Site,
    state::RootDisk as RootIs,
    volumes::Volumes,
};
use crate::{Error, blocking::blocking};

/// What is done once in such a machine: a volume is mounted, a command run.
const REHEARSAL: Duration = Duration::from_secs(30);
/// The last that can be written. The first has a driver already, which it would lose.
const SCRATCH_SLOT: u8 = 7;
/// A process of its own in one of the shell's.
const COMMAND: &str = "(:)";

/// How far something is made before anybody asks for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// For any state and any disk.
    Process,
    /// Only of a bake, with a root disk of its own that goes with the sandbox, for one with volumes.
    Machine,
}

pub(crate) enum Ahead {
    Process(Prepared),
    /// Stands still, quiet, with its guest connected and its network shut.
    Machine(Machine),
}

impl Ahead {
    pub(super) fn pid(&self) -> u32 {
        match self {
            Self::Process(prepared) => prepared.pid(),
            Self::Machine(machine) => machine.pid(),
        }
    }

    pub(super) fn has_exited(&self) -> bool {
        match self {
            Self::Process(prepared) => prepared.has_exited(),
            Self::Machine(machine) => machine.has_exited(),
        }
    }
}

/// Why there is none.
pub(super) enum NotMade {
    /// The server ends, or what it takes is needed elsewhere.
    GivenUp,
    Failed(Error),
}

impl From<Error> for NotMade {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl From<MachineError> for NotMade {
    fn from(error: MachineError) -> Self {
        Self::Failed(Error::internal(error))
    }
}

/// Of a machine that is nobody's yet.
struct Disks {
    root: File,
    scratch: File,
}

impl Pool {
    /// Lets each create go first that comes meanwhile.
    pub(super) async fn run_ahead(&self, saved: &SavedMachine) -> Result<(Site, Machine), NotMade> {
        let Started { site, prepared } = self.start(saved).await?;
        let made = async {
            let disks = self.disks_of(&site, saved).await?;
            tokio::select! {
                machine = self.run(saved, prepared, disks, &site) => machine,
                () = self.closed.cancelled() => Err(NotMade::GivenUp),
            }
        };
        match made.await {
            Ok(machine) => Ok((site, machine)),
            Err(why) => {
                site.remove().await;
                Err(why)
            }
        }
    }

    async fn disks_of(&self, site: &Site, saved: &SavedMachine) -> Result<Disks, Error> {
        let (layout, slot, source) = (self.sites.layout.clone(), site.number(), saved.rootfs());
        blocking(move || {
            let root = machine_files::clone_rootfs(&layout, slot, &source)?;
            Ok(Disks { root, scratch: machine_files::scratch_volume(&layout, slot)? })
        })
        .await
    }

    async fn run(
        &self,
        saved: &SavedMachine,
        prepared: Prepared,
        disks: Disks,
        site: &Site,
    ) -> Result<Machine, NotMade> {
        self.turn().await?;
        let machine = load(saved, prepared, disks, site).await?;
        let begun = tokio::time::Instant::now();
        machine.resume().await?;
        let guest = machine.connect_guest(ANSWER_DEADLINE).await?;
        // Its numbers and names are nobody's.
        let repair = repair_of(&SandboxId::random(), &self.clock);
        guest.call(Request::Repair(repair), ANSWER_DEADLINE).await?;
        let repaired = begun.elapsed();
        self.turn().await?;
        within(mount_once(&machine, &guest)).await?;
        let mounted = begun.elapsed() - repaired;
        self.turn().await?;
        within(run_once(&guest)).await?;
        let ran = begun.elapsed() - mounted - repaired;
        self.turn().await?;
        guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
        machine.stop().await?;
        let rested = begun.elapsed() - ran - mounted - repaired;
        tracing::debug!(
            slot = site.number(),
            ?repaired,
            ?mounted,
            ?ran,
            ?rested,
            "a machine has run ahead"
        );
        Ok(machine)
    }
}

async fn within(rehearsal: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    let late = || Error::internal("the rehearsal of a machine has not ended in time");
    tokio::time::timeout(REHEARSAL, rehearsal).await.map_err(|_| late())?
}

async fn load(
    saved: &SavedMachine,
    prepared: Prepared,
    disks: Disks,
    site: &Site,
) -> Result<Machine, Error> {
    let Disks { root, scratch } = disks;
    let bytes = scratch.metadata().map_err(Error::internal)?.len();
    let root_disk = RootDisk {
        file: root,
        bytes: saved.disk_bytes,
        base_bytes: saved.disk_bytes,
        durability: Durability::Throwaway,
    };
    let scratch = VolumeDisk { file: scratch, read_only: false, bytes };
    let volumes = vec![(SCRATCH_SLOT, scratch)];
    let load = Load { state: saved.state()?, root_disk, volumes };
    let load = async { prepared.load(load).await.map_err(Error::internal) };
    // Both before the guest's first step.
    let shut = async { site.gate().shut().await.map_err(Error::internal) };
    let (machine, ()) = tokio::try_join!(load, shut)?;
    Ok(machine)
}

/// What a volume at a create needs. Where a template has no place for it, it is done without.
async fn mount_once(machine: &Machine, guest: &Guest) -> Result<(), Error> {
    let path = ByteBuf::from(format!("/tmp/.{}", SandboxId::random()).into_bytes());
    let mount = Mount { slot: SCRATCH_SLOT, path: path.clone(), read_only: false };
    match guest.call(Request::VolumesMount { volumes: vec![mount] }, REHEARSAL).await {
        Ok(_) => {
            let unmount = Request::VolumesUnmount { slots: vec![SCRATCH_SLOT] };
            guest.call(unmount, REHEARSAL).await.map_err(Error::internal)?;
        }
        Err(error @ MachineError::Refused(_)) => {
            tracing::debug!(%error, "a machine has not mounted a volume ahead");
        }
        Err(error) => return Err(Error::internal(error)),
    }
    // There need be none.
    guest.call(Request::FileDelete { path }, REHEARSAL).await.map_err(Error::internal)?;
    machine.detach_volume(SCRATCH_SLOT).await.map_err(Error::internal)
}

async fn run_once(guest: &Guest) -> Result<(), Error> {
    warm_up(guest, COMMAND).await?;
    guest.forget_now().await.map_err(Error::internal)
}

impl Sandboxes {
    /// What has run ahead becomes this sandbox's machine. The caller gives back the site when this fails, or what follows.
    pub(super) async fn take_over(
        &self,
        entry: &Entry,
        saved: &SavedMachine,
        machine: Machine,
        site: &Site,
    ) -> Result<Loaded, Error> {
        let disk_bytes = entry.look(|row| row.disk_mb << 20);
        let Root::Own(files) = self.root(entry)? else {
            return Err(Error::internal("a machine that has run ahead has a disk already"));
        };
        let disk = machine_files::rootfs(&self.sites.layout, site.number());
        let volumes = self.open_volumes(entry).await?;
        let mounts = volumes.iter().map(|volume| volume.mount(Volumes::Mounted)).collect();
        let moved = blocking(move || files.take_rootfs(&disk, disk_bytes));
        let attached = async {
            for volume in volumes {
                let (slot, disk) = volume.into_disk();
                machine.attach_volume(slot, disk).await.map_err(not_started)?;
            }
            Ok(())
        };
        // All before the guest goes on.
        tokio::try_join!(moved, network::open(site.gate(), entry), attached)?;
        let grow_root = disk_bytes > saved.disk_bytes;
        if grow_root {
            machine.lengthen_root(disk_bytes);
        }
        tracing::debug!(sandbox = %entry.look(|row| row.id), slot = site.number(), "took a machine over");
        Ok(Loaded { machine, later: Vec::new(), mounts, grow_root })
    }
}

impl Entry {
    /// What a start from `saved` is to take.
    pub(super) fn kind_ahead(&self, saved: &SavedMachine) -> Kind {
        let has_volumes = !locked(&self.attachments).is_empty();
        match self.root_disk() {
            RootIs::Own if saved.is_bake() && has_volumes => Kind::Machine,
            RootIs::Own | RootIs::Volume | RootIs::None => Kind::Process,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures::poll;

    use super::*;
    use crate::{config::Capacity, sandbox::testing::Alone};

    async fn host() -> Alone {
        Alone::new(Capacity::default()).await
    }

    #[tokio::test]
    async fn what_is_made_ahead_waits_for_every_create() {
        let host = host().await;
        assert!(host.sandboxes.pool.turn().await.is_ok());
        let (one, other) =
            (host.sandboxes.pool.create_under_way(), host.sandboxes.pool.create_under_way());
        let mut turn = pin!(host.sandboxes.pool.turn());
        assert!(poll!(turn.as_mut()).is_pending());
        drop(one);
        assert!(poll!(turn.as_mut()).is_pending());
        drop(other);
        assert!(turn.await.is_ok());
    }

    #[tokio::test]
    async fn what_is_made_ahead_is_given_up_when_its_room_or_its_server_goes() {
        type Change = fn(&Pool);
        let changes: [Change; 2] = [|pool| pool.set_room(false), Pool::close];
        for change in changes {
            let host = host().await;
            let _create = host.sandboxes.pool.create_under_way();
            let mut turn = pin!(host.sandboxes.pool.turn());
            assert!(poll!(turn.as_mut()).is_pending());
            change(&host.sandboxes.pool);
            assert!(matches!(turn.await, Err(NotMade::GivenUp)));
        }
        let host = host().await;
        let _create = host.sandboxes.pool.create_under_way();
        assert_eq!(host.sandboxes.pool.give_way().await, 0);
        assert!(matches!(host.sandboxes.pool.turn().await, Err(NotMade::GivenUp)));
    }
}
