//! The state of the guest that requests change one after the other, each on the same thread: what stands still, which
//! volumes are mounted, how the network is configured.

pub(crate) mod attempt;
mod file_systems;
mod groups;
pub(crate) mod growth;
mod holders;
mod mountinfo;
mod process;
mod slots;
mod volumes;

use std::collections::{BTreeSet, HashSet};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use protocol::message::{ErrorCode, Failure, Mount, Network, Repair};

use crate::failure::refuse;
use crate::{Options, Place, boot, repair};
use attempt::Attempt;
use file_systems::{FileSystem, Reach};
use groups::{Frozen, Groups};
use mountinfo::Device;
use slots::Disk;
pub(crate) use slots::Slots;
use volumes::{Before, Former};

/// For processes that hold a volume although they were killed.
const LAST_WORDS: Duration = Duration::from_secs(2);
const LOOK: Duration = Duration::from_millis(20);
/// For the user's processes, between two times that they stand still.
const BREATH: Duration = Duration::from_millis(10);

#[derive(Debug)]
pub(crate) struct State {
    place: Place,
    reach: Option<Reach>,
    slots: Option<Slots>,
    groups: Option<Groups>,
    network: Network,
    /// Groups of processes that stand still.
    standing: Vec<Frozen>,
    /// In the order in which they were frozen.
    frozen: Vec<FileSystem>,
    /// Opened while everything still moved: later a path may lead through a process that stands still.
    found: Vec<FileSystem>,
    /// Unmounted while everything stood still.
    taken_away: Vec<Former>,
    /// Slots with a volume, or with one until everything stood still.
    used: BTreeSet<u8>,
    /// An empty slot that has a driver all the same.
    ready: Option<(u8, Disk)>,
    /// See [`State::rehearse`].
    has_rehearsed: bool,
}

impl State {
    pub(crate) fn new(options: &Options) -> Self {
        let slots = match options.place {
            Place::Guest => Slots::of_machine(),
            Place::Host => Some(Slots::Given(options.disks.clone())),
        };
        let is_whole = options.place == Place::Guest;
        let groups = options.groups.as_deref();
        Self {
            place: options.place,
            reach: options.file_systems.clone().map(Reach),
            slots,
            groups: groups.and_then(|directory| Groups::of(directory, is_whole).ok()),
            network: boot::NETWORK,
            standing: Vec::new(),
            frozen: Vec::new(),
            found: Vec::new(),
            taken_away: Vec::new(),
            used: BTreeSet::new(),
            ready: None,
            has_rehearsed: false,
        }
    }

    /// At boot: a disk that is there already was attached while the machine was off.
    pub(crate) fn clear_empty_slots(&mut self) {
        if let Some(slots) = &self.slots {
            self.used = slots.clear_empty();
            self.ready = slots.ready();
        }
    }

    /// Writes what is dirty while everything goes on, so that little is left to write when nothing does.
    pub(crate) fn write_out(&mut self) -> Result<(), Failure> {
        let Some(reach) = &self.reach else { return Ok(()) };
        self.found = file_systems::find(reach, &devices(&self.frozen));
        for file_system in &self.found {
            match file_system.flush() {
                Err(failure) if file_system.is_root() => return Err(failure),
                // A broken one that the user has mounted shall not keep the sandbox from being saved.
                flushed => boot::report("flush a file system", flushed),
            }
        }
        Ok(())
    }

    /// Writes what is dirty, once.
    pub(crate) fn flush(&mut self) -> Result<(), Failure> {
        let flushed = self.write_out();
        // Held open, they could not be unmounted.
        self.found.clear();
        flushed
    }

    /// Afterwards no process of the user's runs and nothing is written, or all goes on as before.
    pub(crate) fn freeze(&mut self, attempt: &Attempt) -> Result<(), Failure> {
        let stands = self.try_to_freeze(attempt);
        self.found.clear();
        self.standing.extend(attempt.take_groups());
        let failure = match stands {
            Ok(()) if attempt.succeed() => return Ok(()),
            Ok(()) => refuse(ErrorCode::Busy, "the disks of this sandbox are too slow to freeze"),
            Err(failure) => failure,
        };
        self.thaw_file_systems();
        self.thaw_processes();
        Err(failure)
    }

    fn try_to_freeze(&mut self, attempt: &Attempt) -> Result<(), Failure> {
        if !self.has_rehearsed {
            self.rehearse(attempt)?;
        }
        if let Some(groups) = &mut self.groups {
            groups.freeze(attempt)?;
        }
        let Some(reach) = &self.reach else { return Ok(()) };
        let mut all = std::mem::take(&mut self.found);
        let mut known = devices(&self.frozen);
        known.extend(devices(&all));
        let processes = self.groups.iter().flat_map(Groups::processes);
        all.extend(file_systems::find_everywhere(reach, &known, processes));
        file_systems::freeze(all, &mut self.frozen, attempt)
    }

    /// What a machine does for the first time takes an emulator several times as long. So the steps are taken once apart from
    /// each other, and the user's processes stand still for each alone instead of for all of them. Without any it is not
    /// worth its time.
    fn rehearse(&mut self, attempt: &Attempt) -> Result<(), Failure> {
        let Some(groups) = &mut self.groups else { return Ok(()) };
        let processes = groups.processes();
        if processes.is_empty() {
            return Ok(());
        }
        if let Some(root) = self.found.iter().find(|file_system| file_system.is_root())
            && root.freeze()?
        {
            root.thaw();
        }
        if let Some(reach) = &self.reach {
            let known = devices(&self.found);
            drop(file_systems::find_everywhere(reach, &known, processes.into_iter()));
        }
        groups.freeze(attempt)?;
        attempt.take_groups().iter().for_each(Frozen::thaw);
        boot::mounts::pause(BREATH);
        self.has_rehearsed = true;
        Ok(())
    }

    fn thaw_file_systems(&mut self) {
        // Should the user have frozen the root, the agent would hang with the first file it writes.
        if self.place == Place::Guest && !self.frozen.iter().any(FileSystem::is_root) {
            file_systems::thaw_root();
        }
        while let Some(file_system) = self.frozen.pop() {
            file_system.thaw();
        }
    }

    fn thaw_processes(&mut self) {
        for group in self.standing.drain(..) {
            group.thaw();
        }
    }

    /// With the time, if the host has told it.
    pub(crate) fn thaw(&mut self, unix_time_ns: Option<u64>) -> Result<(), Failure> {
        if let (Some(now), Place::Guest) = (unix_time_ns, self.place) {
            boot::report("set the clock", repair::set_clock(now));
        }
        self.thaw_file_systems();
        let failure = volumes::mount_again(std::mem::take(&mut self.taken_away));
        self.thaw_processes();
        failure.map_or(Ok(()), Err)
    }

    /// On failure the user's processes stand still.
    /// In `kernels` are processes that draw their random numbers anew.
    pub(crate) fn repair(&mut self, wanted: &Repair, kernels: &[OwnedFd]) -> Result<(), Failure> {
        // By another emulator.
        self.has_rehearsed = false;
        match self.place {
            Place::Guest => {
                repair::identify(wanted)?;
                self.thaw_file_systems();
                repair::settle_in(wanted, &mut self.network)?;
            }
            Place::Host => self.thaw_file_systems(),
        }
        // Unmounted for a snapshot of the standing machine, and its own all the same.
        let stays = |former: &Former| {
            wanted.volumes.iter().any(|volume| volume.slot == former.slot && volume.path.is_empty())
        };
        let mut back = std::mem::take(&mut self.taken_away);
        back.retain(stays);
        self.mount(&wanted.volumes)?;
        volumes::mount_again(back).map_or(Ok(()), Err)?;
        let is_wanted = |slot: &u8| wanted.volumes.iter().any(|volume| volume.slot == *slot);
        let gone: Vec<u8> = self.used.iter().copied().filter(|slot| !is_wanted(slot)).collect();
        for slot in gone {
            self.clear(slot);
        }
        // Before anything else that they do.
        kernels.iter().for_each(|group| repair::renew_randomness(group.as_fd()));
        self.thaw_processes();
        Ok(())
    }

    fn clear(&mut self, slot: u8) {
        if let Some(slots) = &self.slots {
            boot::report("empty a slot", slots.clear(slot));
        }
        self.ready.take_if(|(ready, _)| *ready == slot);
        self.used.remove(&slot);
    }

    fn stands_still(&self) -> bool {
        !self.standing.is_empty() || !self.frozen.is_empty()
    }

    fn slots(&self) -> Result<&Slots, Failure> {
        let none = || refuse(ErrorCode::Invalid, "this sandbox has no slots for volumes");
        self.slots.as_ref().ok_or_else(none)
    }

    /// All, or none.
    pub(crate) fn mount(&mut self, wanted: &[Mount]) -> Result<(), Failure> {
        if !self.frozen.is_empty() {
            // To make a directory would have to wait until everything goes on, and everything for us.
            wanted.iter().try_for_each(volumes::must_have_directory)?;
        }
        for (at, volume) in wanted.iter().enumerate() {
            let was_used = !self.used.insert(volume.slot);
            let before = if was_used {
                Before::Used
            } else {
                let ready = self.ready.as_ref().filter(|(slot, _)| *slot == volume.slot);
                Before::Empty(ready.map(|(_, disk)| disk.clone()))
            };
            if let Err(failure) =
                self.slots().and_then(|slots| volumes::mount_volume(slots, volume, before))
            {
                let before: Vec<u8> = wanted[..at].iter().map(|volume| volume.slot).collect();
                boot::report("unmount a volume", self.unmount(&before));
                if !was_used {
                    self.clear(volume.slot);
                }
                return Err(failure);
            }
        }
        self.taken_away.retain(|former| wanted.iter().all(|volume| volume.slot != former.slot));
        Ok(())
    }

    /// All, or none.
    pub(crate) fn unmount(&mut self, wanted: &[u8]) -> Result<(), Failure> {
        let mut gone: Vec<Former> = Vec::new();
        for &slot in wanted {
            match self.unmount_one(slot) {
                Ok(formers) => gone.extend(formers),
                Err(failure) => {
                    if let Some(failure) = volumes::mount_again(gone) {
                        boot::report("mount a volume again", Err::<(), _>(failure));
                    }
                    return Err(failure);
                }
            }
        }
        if self.stands_still() {
            // Nobody can write to it, and it may be back in a moment.
            self.taken_away.extend(gone);
        } else {
            for &slot in wanted {
                self.clear(slot);
            }
        }
        Ok(())
    }

    fn unmount_one(&mut self, slot: u8) -> Result<Vec<Former>, Failure> {
        let Some(disk) = self.slots()?.find(slot) else { return Ok(Vec::new()) };
        // Frozen, it would stay in memory.
        if let Some(at) = self.frozen.iter().position(|frozen| frozen.device == disk.device) {
            self.frozen.remove(at).thaw();
        }
        volumes::unmount_volume(&disk, slot)
    }

    pub(crate) fn grow(&self, slot: u8) -> Result<(), Failure> {
        volumes::grow_volume(self.slots()?, slot)
    }

    /// At the end of the sandbox: what cannot be unmounted is flushed at least, and the reason told.
    pub(crate) fn release(&mut self) -> Result<(), Failure> {
        let end = Instant::now() + LAST_WORDS;
        let used: Vec<u8> = self.used.iter().copied().collect();
        let mut failure = None;
        for slot in used {
            // What was killed may take a moment to let go.
            while let Err(busy) = self.unmount(&[slot]) {
                if Instant::now() > end {
                    failure.get_or_insert(busy);
                    break;
                }
                boot::mounts::pause(LOOK);
            }
        }
        failure.map_or(Ok(()), Err)
    }
}

fn devices(file_systems: &[FileSystem]) -> HashSet<Device> {
    file_systems.iter().map(|file_system| file_system.device).collect()
}
