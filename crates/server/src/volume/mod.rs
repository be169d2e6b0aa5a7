//! Volumes: directories that outlive sandboxes. Who has one is written in its row's attachments, and QEMU's lock on the
//! file stands behind that.

mod change;

use std::{
    collections::HashSet,
    ops::RangeInclusive,
    sync::{Arc, Mutex},
};

use api::{AccountId, SandboxId, Volume, VolumeId, VolumeName, VolumeState};
use store::Layout;

pub(crate) use self::change::Growth;
use crate::{
    Error,
    clock::{self, Clock},
    db::{AttachmentRow, Claim, Db, VolumeRow},
    sandbox::locked,
};

/// MiB; of a volume whose size is not named.
const DEFAULT_MB: u64 = 256;
/// What an ext4 with a journal needs.
const LEAST_MB: u64 = store::volume::MINIMUM_BYTES >> 20;

/// How much there may be.
#[derive(Debug, Clone)]
pub struct VolumeLimits {
    /// Of one account.
    pub most: usize,
    /// MiB, of one volume.
    pub largest_mb: u64,
    /// MiB, of all volumes of one account, used or not.
    pub total_mb: Option<u64>,
}

pub struct Volumes {
    db: Db,
    clock: Clock,
    layout: Layout,
    limits: VolumeLimits,
    /// Held while it is settled who may have a volume.
    gate: tokio::sync::Mutex<()>,
    /// Held from a look at the limits to the row: creates and growths at once cannot pass a limit together.
    sizes: tokio::sync::Mutex<()>,
    /// Nobody has them attached, and nobody may meanwhile: we change their bytes.
    changing: Mutex<HashSet<VolumeId>>,
}

/// Until it is dropped nobody attaches, changes or deletes this volume.
struct Changing<'a> {
    volumes: &'a Volumes,
    id: VolumeId,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        locked(&self.volumes.changing).remove(&self.id);
    }
}

impl Volumes {
    pub(crate) fn new(db: Db, clock: Clock, layout: Layout, limits: VolumeLimits) -> Arc<Self> {
        Arc::new(Self {
            db,
            clock,
            layout,
            limits,
            gate: tokio::sync::Mutex::default(),
            sizes: tokio::sync::Mutex::default(),
            changing: Mutex::default(),
        })
    }

    /// With who has it, if someone does; else it is ours to change.
    async fn begin_change(
        &self,
        id: VolumeId,
    ) -> Result<Result<Changing<'_>, Vec<AttachmentRow>>, Error> {
        let _gate = self.gate.lock().await;
        self.check_unchanged(&id)?;
        let holders = self.db.holders_of_volume(&id).await?;
        if !holders.is_empty() {
            return Ok(Err(holders));
        }
        locked(&self.changing).insert(id);
        Ok(Ok(Changing { volumes: self, id }))
    }

    /// Others may be reading it already; nobody comes to write until this is over.
    async fn begin_copy(&self, id: VolumeId) -> Result<Changing<'_>, Error> {
        let _gate = self.gate.lock().await;
        self.check_unchanged(&id)?;
        if let Some(writer) =
            self.db.holders_of_volume(&id).await?.iter().find(|held| !held.read_only)
        {
            return Err(taken(&writer.sandbox));
        }
        locked(&self.changing).insert(id);
        Ok(Changing { volumes: self, id })
    }

    fn check_unchanged(&self, id: &VolumeId) -> Result<(), Error> {
        if locked(&self.changing).contains(id) {
            return Err(Error::conflict("the volume is just being changed; try again shortly"));
        }
        Ok(())
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub(crate) async fn find(
        &self,
        account: &AccountId,
        id_or_name: &str,
    ) -> Result<VolumeRow, Error> {
        self.db.volume(account, id_or_name).await?.ok_or_else(not_found)
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn get(&self, account: &AccountId, id_or_name: &str) -> Result<Volume, Error> {
        let row = self.find(account, id_or_name).await?;
        let holders = self.db.holders_of_volume(&row.id).await?;
        Ok(shown(&row, &holders))
    }

    /// Oldest first, without the disks of databases.
    ///
    /// # Errors
    /// The database is away.
    pub async fn list(&self, account: &AccountId) -> Result<Vec<Volume>, Error> {
        let rows = self.db.shown_volumes(account).await?;
        let holders = self.db.all_attachments().await?;
        Ok(rows
            .iter()
            .map(|row| {
                let of_this: Vec<_> =
                    holders.iter().filter(|held| held.volume == row.id).cloned().collect();
                shown(row, &of_this)
            })
            .collect())
    }

    /// What `names` stand for, in their order.
    ///
    /// # Errors
    /// 404 names the one that is unknown.
    pub(crate) async fn resolve(
        &self,
        account: &AccountId,
        names: impl Iterator<Item = &str>,
    ) -> Result<Vec<VolumeRow>, Error> {
        let mut rows = Vec::new();
        for (index, name) in names.enumerate() {
            let name: VolumeName = name
                .parse()
                .map_err(|error| Error::invalid(format!("`volumes[{index}].name`: {error}")))?;
            let row = self.db.volume(account, name.as_str()).await?;
            rows.push(row.ok_or_else(|| {
                Error::not_found(format!(
                    "`volumes[{index}].name`: there is no volume with this name or id; list them with GET /v1/volumes"
                ))
            })?);
        }
        Ok(rows)
    }

    /// Who has it; several may read it.
    pub(crate) async fn holders(&self, id: &VolumeId) -> Result<Vec<SandboxId>, Error> {
        let holders = self.db.holders_of_volume(id).await?;
        Ok(holders.into_iter().map(|held| held.sandbox).collect())
    }

    /// All of them or none.
    ///
    /// # Errors
    /// 409 names who has one of them; 404 when one is gone meanwhile.
    pub(crate) async fn claim(&self, wanted: &[AttachmentRow]) -> Result<(), Error> {
        let _gate = self.gate.lock().await;
        wanted.iter().try_for_each(|row| self.check_unchanged(&row.volume))?;
        match self.db.claim_volumes(wanted).await? {
            Claim::Held => Ok(()),
            Claim::Taken { holder, .. } => Err(taken(&holder)),
            Claim::Gone { .. } => Err(not_found()),
        }
    }
}

pub(crate) fn taken(holder: &SandboxId) -> Error {
    Error::conflict(format!(
        "the volume is attached to {holder}; detach it there while that is stopped, delete that one, or attach with `read_only` where nobody writes"
    ))
}

fn not_found() -> Error {
    Error::not_found("there is no volume with this name or id; list them with GET /v1/volumes")
}

fn shown(row: &VolumeRow, holders: &[AttachmentRow]) -> Volume {
    let (size_mb, size_gb) = Volume::sizes(row.size_bytes);
    Volume {
        id: row.id,
        name: row.name.clone(),
        kind: row.kind,
        size_mb,
        size_gb,
        size_bytes: row.size_bytes,
        state: if holders.is_empty() { VolumeState::Available } else { VolumeState::Attached },
        attached_to: holders.first().map(|held| held.sandbox),
        created_at: clock::from_ms(row.created_at),
    }
}

/// In bytes. `least_gb`: of the plan, for a size that is not named.
fn check_size(
    size_mb: Option<u64>,
    size_gb: Option<u64>,
    allowed: &RangeInclusive<u64>,
    least_gb: Option<u64>,
) -> Result<u64, Error> {
    let (field, mb) = match (size_mb, size_gb) {
        (Some(_), Some(_)) => {
            return Err(Error::invalid(
                "`size_mb` and `size_gb` exclude each other; leave one of them out",
            ));
        }
        (Some(mb), None) => ("size_mb", Some(mb)),
        (None, Some(gb)) => ("size_gb", gb.checked_mul(1024)),
        (None, None) => {
            let least = least_gb.unwrap_or_default().saturating_mul(1024);
            ("size_mb", Some(DEFAULT_MB.max(least)))
        }
    };
    match mb.filter(|mb| allowed.contains(mb)) {
        Some(mb) => Ok(mb << 20),
        None => Err(Error::invalid(format!(
            "`{field}` must be between {} and {} MiB",
            allowed.start(),
            allowed.end()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_is_named_once_and_within_bounds() {
        let allowed = LEAST_MB..=65_536;
        assert_eq!(check_size(None, None, &allowed, None).unwrap(), DEFAULT_MB << 20);
        assert_eq!(check_size(Some(1024), None, &allowed, None).unwrap(), 1 << 30);
        assert_eq!(check_size(None, Some(2), &allowed, None).unwrap(), 2 << 30);
        assert_eq!(check_size(None, Some(64), &allowed, None).unwrap(), 64 << 30);
        for (mb, gb) in [
            (Some(15), None),
            (Some(65_537), None),
            (None, Some(65)),
            (None, Some(u64::MAX)),
            (Some(9), Some(1)),
        ] {
            assert!(check_size(mb, gb, &allowed, None).is_err(), "{mb:?} {gb:?}");
        }
    }
}
