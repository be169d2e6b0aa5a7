//! The volumes of a sandbox: claimed at its create, behind its machine's slots, given back when the machine is dead.

use std::{fs::File, time::Duration};

use api::{AccountId, CreateVolume, SandboxId, UpdateVolume, Volume, VolumeMount};
use machine::{
    READ_ONLY_SLOTS, VolumeDisk, WRITABLE_SLOTS,
    guest::{Mount, Request},
};
use serde_bytes::ByteBuf;
use store::volume::Access;

use super::{
    Sandboxes,
    driver::Inside,
    registry::{self, Entry, locked},
    state::{Refusal, State, Wish},
};
use crate::{
    Error,
    blocking::blocking,
    db::{AttachmentRow, ROOT_SLOT},
    keys::Caller,
    volume::Growth,
};

/// Processes that hold a volume are asked to end, then ended.
const RELEASE_GRACE_MS: u32 = 500;
/// Everything that was written has to reach the host's disk.
const RELEASE_DEADLINE: Duration = Duration::from_secs(30);
const GROW_DEADLINE: Duration = Duration::from_secs(60);
const LONGEST_PATH: usize = 1024;

/// What a start does with mount points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Volumes {
    Mounted,
    /// The saved machine has them mounted, and nobody else had them since.
    AsTheyWere,
}

/// One volume, open for its machine.
pub(super) struct Attached {
    row: AttachmentRow,
    file: File,
    bytes: u64,
}

impl Attached {
    pub(super) fn mount(&self, volumes: Volumes) -> Mount {
        match volumes {
            Volumes::Mounted => mount(&self.row),
            Volumes::AsTheyWere => Mount { path: ByteBuf::new(), ..mount(&self.row) },
        }
    }

    pub(super) fn into_disk(self) -> (u8, VolumeDisk) {
        let disk = VolumeDisk { file: self.file, read_only: self.row.read_only, bytes: self.bytes };
        (self.row.slot, disk)
    }
}

pub(super) fn mount(row: &AttachmentRow) -> Mount {
    Mount {
        slot: row.slot,
        path: ByteBuf::from(row.mount_path.as_bytes()),
        read_only: row.read_only,
    }
}

/// Where each goes: its slot and its path. Nothing is claimed yet.
pub(super) fn places(wanted: &[VolumeMount]) -> Result<Vec<(u8, String)>, Error> {
    let (mut writable, mut read_only) = (0, WRITABLE_SLOTS);
    let mut places: Vec<(u8, String)> = Vec::new();
    for (index, volume) in wanted.iter().enumerate() {
        let path = match volume.mount_path.as_deref().filter(|path| !path.is_empty()) {
            Some(path) => checked_path(index, path)?,
            None => format!("/mnt/{}", volume.name),
        };
        let meets = |(_, other): &&(u8, String)| is_within(&path, other) || is_within(other, &path);
        if let Some((_, other)) = places.iter().find(meets) {
            return Err(Error::invalid(format!(
                "`volumes[{index}]`: another one is mounted at {other}, and none can lie in another; give it a `mount_path` of its own"
            )));
        }
        let (next, end) = if volume.read_only {
            (&mut read_only, WRITABLE_SLOTS + READ_ONLY_SLOTS)
        } else {
            (&mut writable, WRITABLE_SLOTS)
        };
        if *next == end {
            return Err(too_many());
        }
        places.push((u8::try_from(*next).map_err(Error::internal)?, path));
        *next += 1;
    }
    Ok(places)
}

fn too_many() -> Error {
    Error::invalid(format!(
        "`volumes`: a sandbox can have {WRITABLE_SLOTS} that it writes and {READ_ONLY_SLOTS} that it reads"
    ))
}

fn is_within(path: &str, directory: &str) -> bool {
    path.strip_prefix(directory).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Without `.`, `..` and double slashes, so that one place has one name.
fn checked_path(index: usize, path: &str) -> Result<String, Error> {
    let refuse = |why: &str| Error::invalid(format!("`volumes[{index}].mount_path` {why}"));
    if !path.starts_with('/') || path.len() > LONGEST_PATH || path.contains('\0') {
        return Err(refuse("must be an absolute path without NUL, of at most 1024 bytes"));
    }
    let parts: Vec<_> = path.split('/').filter(|part| !part.is_empty()).collect();
    if parts.iter().any(|part| matches!(*part, "." | "..")) {
        return Err(refuse("must not hold `.` or `..`"));
    }
    match parts.first() {
        None | Some(&("proc" | "sys" | "dev")) => {
            Err(refuse("must not be `/`, nor lie below `/proc`, `/sys` or `/dev`"))
        }
        Some(_) => Ok(format!("/{}", parts.join("/"))),
    }
}

/// Its file system grows where nobody runs from it, or by its database's keeper.
fn refuse_root(held: &AttachmentRow, managed: bool) -> Result<(), Error> {
    let id = held.sandbox;
    match (held.slot, managed) {
        (ROOT_SLOT, true) => Err(Error::conflict(format!(
            "this volume is the disk of database {id}, which grows it by itself; see /v1/databases/{id}"
        ))),
        (ROOT_SLOT, false) => Err(Error::conflict(format!(
            "the volume is the root disk of machine {id}; stop that first and detach the disk, which can grow then and be attached again"
        ))),
        (_, _) => Ok(()),
    }
}

impl Entry {
    pub(super) fn shown_volumes(&self) -> Vec<VolumeMount> {
        locked(&self.attachments)
            .iter()
            .map(|held| VolumeMount {
                name: held.name.to_string(),
                read_only: held.read_only,
                mount_path: Some(held.mount_path.clone()).filter(|path| !path.is_empty()),
            })
            .collect()
    }
}

impl Sandboxes {
    /// Whom to ask, in the order of `wanted`.
    pub(super) async fn attachments(
        &self,
        account: &AccountId,
        sandbox: SandboxId,
        wanted: &[VolumeMount],
    ) -> Result<Vec<AttachmentRow>, Error> {
        if wanted.len() > WRITABLE_SLOTS + READ_ONLY_SLOTS {
            return Err(too_many());
        }
        let names = wanted.iter().map(|volume| volume.name.as_str());
        let rows = self.volumes.resolve(account, names).await?;
        // Where it is named by its id, its place goes by its name all the same.
        let named: Vec<_> = (wanted.iter().zip(&rows))
            .map(|(wish, row)| VolumeMount { name: row.name.to_string(), ..wish.clone() })
            .collect();
        let places = places(&named)?;
        let mut attachments: Vec<AttachmentRow> = Vec::new();
        for (index, ((row, (slot, mount_path)), wish)) in
            rows.iter().zip(places).zip(wanted).enumerate()
        {
            if attachments.iter().any(|other| other.volume == row.id) {
                return Err(Error::invalid(format!(
                    "`volumes[{index}]`: the volume is named twice"
                )));
            }
            attachments.push(AttachmentRow {
                volume: row.id,
                sandbox,
                slot,
                read_only: wish.read_only,
                mount_path,
                name: row.name.clone(),
            });
        }
        Ok(attachments)
    }

    /// For a machine that is about to be loaded.
    pub(super) async fn open_volumes(&self, entry: &Entry) -> Result<Vec<Attached>, Error> {
        let rows = locked(&entry.attachments).clone();
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let layout = self.sites.layout.clone();
        blocking(move || {
            rows.into_iter()
                .map(|row| {
                    let access = if row.read_only { Access::ReadOnly } else { Access::Writable };
                    let file = store::volume::open(&layout, &row.volume, access)?;
                    let bytes = store::volume::bytes(&layout, &row.volume)?;
                    Ok(Attached { row, file, bytes })
                })
                .collect()
        })
        .await
    }

    /// Before the machine ends: what its processes have written is on the disk then.
    pub(super) async fn flush_volumes(&self, entry: &Entry, inside: &Inside) {
        // A paused one was flushed when it was paused.
        let running = entry.look(|row| row.state) == State::Running;
        let writes = locked(&entry.attachments).iter().any(|held| !held.read_only);
        let Some(guest) = inside.machine.guest().filter(|_| running && writes) else { return };
        let release = Request::Release { grace_ms: RELEASE_GRACE_MS };
        if let Err(error) = guest.call(release, RELEASE_DEADLINE).await {
            // Its journal is replayed instead.
            tracing::warn!(sandbox = %entry.look(|row| row.id), %error, "a guest did not let go of its volumes");
        }
    }

    /// Its machine is dead.
    pub(super) async fn release_volumes(&self, entry: &Entry) {
        let held = locked(&entry.attachments).clone();
        if held.is_empty() {
            return;
        }
        let id = entry.look(|row| row.id);
        while let Err(error) = self.volumes.free(&id, &held).await {
            tracing::error!(sandbox = %id, cause = error.causes(), "failed to free the volumes of a sandbox");
            if !self.pause_for_database().await {
                return;
            }
        }
        locked(&entry.attachments).clear();
    }

    /// # Errors
    /// 400 names the bad field; 409 when the name is taken, or the source is being written; 429 over a limit; 507 without
    /// room.
    pub async fn create_volume(
        &self,
        caller: &Caller,
        request: CreateVolume,
    ) -> Result<Volume, Error> {
        self.admit_bytes(0)?;
        self.volumes.create(caller, request).await
    }

    /// # Errors
    /// 400 for less than it has; 409 where its file system cannot be told, and for the root disk that a machine has.
    pub async fn grow_volume(
        &self,
        caller: &Caller,
        id_or_name: &str,
        request: UpdateVolume,
    ) -> Result<Volume, Error> {
        let account = &caller.account;
        let (held, bytes) = match self.volumes.grow(caller, id_or_name, &request).await? {
            Growth::Done(volume) => return Ok(volume),
            Growth::Attached { held, bytes } => (held, bytes),
        };
        let entry = self.registry.find(account, &held.sandbox)?;
        refuse_root(&held, entry.look(|row| row.managed))?;
        let _in_use = match entry.check(Wish::Inside, self.clock.steady_ms()) {
            Err(Refusal::Paused) => entry.usage.begin(),
            Ok(()) | Err(_) => self.awake(&entry).await?,
        };
        let _turn = entry.turn.lock().await;
        let is_paused = entry.look(|row| row.state) == State::Paused;
        let wish = if is_paused { Wish::Change } else { Wish::Inside };
        entry.accept(wish, self.clock.steady_ms())?;
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        let grown = self.volumes.lengthen(caller, &held, bytes).await?;
        inside.machine.resize_volume(held.slot, bytes).await?;
        if is_paused {
            locked(&entry.grown).insert(held.slot);
            return Ok(grown);
        }
        let guest = entry.guest().ok_or_else(registry::not_found)?;
        guest.call(Request::VolumeGrow { slot: held.slot }, GROW_DEADLINE).await?;
        Ok(grown)
    }

    /// It goes on: file systems take the sizes that their volumes were given meanwhile. One that cannot stays smaller, and
    /// whoever asks for the same size again is told why.
    pub(super) async fn grow_what_waits(&self, entry: &Entry) {
        let slots = std::mem::take(&mut *locked(&entry.grown));
        for slot in slots {
            let Some(guest) = entry.guest() else { return };
            if let Err(error) = guest.call(Request::VolumeGrow { slot }, GROW_DEADLINE).await {
                tracing::warn!(sandbox = %entry.look(|row| row.id), slot, %error, "a volume's file system has not grown");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(name: &str, read_only: bool, mount_path: Option<&str>) -> VolumeMount {
        VolumeMount { name: name.to_owned(), read_only, mount_path: mount_path.map(str::to_owned) }
    }

    #[test]
    fn a_root_disk_that_a_machine_has_is_not_made_longer_behind_it() {
        let held = |slot| AttachmentRow {
            volume: api::VolumeId::random(),
            sandbox: SandboxId::random(),
            slot,
            read_only: false,
            mount_path: String::new(),
            name: "v".parse().unwrap(),
        };
        for managed in [false, true] {
            let refused = refuse_root(&held(ROOT_SLOT), managed).unwrap_err();
            assert_eq!(refused.code, api::ErrorCode::Conflict);
            assert!(refuse_root(&held(0), managed).is_ok());
        }
    }

    #[test]
    fn each_kind_of_slot_is_filled_from_its_first() {
        let wanted =
            [wish("a", false, None), wish("b", true, Some("/data//b/")), wish("c", false, None)];
        let expected = [(0, "/mnt/a"), (8, "/data/b"), (1, "/mnt/c")];
        assert_eq!(places(&wanted).unwrap(), expected.map(|(slot, path)| (slot, path.to_owned())));
    }

    #[test]
    fn there_are_no_more_volumes_than_slots() {
        for read_only in [false, true] {
            let mut wanted: Vec<_> =
                (0..8).map(|n| wish(&format!("v{n}"), read_only, None)).collect();
            assert_eq!(places(&wanted).unwrap().len(), 8);
            wanted.push(wish("one-more", read_only, None));
            assert!(places(&wanted).is_err());
        }
    }

    #[test]
    fn a_volume_is_not_mounted_where_it_would_break_the_guest_or_another() {
        for bad in
            ["relative", "/", "//", "/proc/x", "/sys", "/dev/shm", "/a/../etc", "/./a", "/a\0b"]
        {
            assert!(places(&[wish("a", false, Some(bad))]).is_err(), "{bad:?}");
        }
        assert!(
            places(&[wish("a", false, Some("/data")), wish("b", true, Some("/data/"))]).is_err()
        );
        for inside in ["/data/b", "/"] {
            let nested = [wish("b", true, Some(inside)), wish("a", false, Some("/data"))];
            assert!(places(&nested).is_err(), "{inside}");
        }
        assert!(
            places(&[wish("a", false, Some("/data")), wish("b", true, Some("/data2"))]).is_ok()
        );
        assert!(places(&[wish("a", false, Some("/process"))]).is_ok());
    }
}
