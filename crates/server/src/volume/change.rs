//! What changes volumes: made, copied, grown, deleted.

use api::{AccountId, CreateVolume, UpdateVolume, Volume, VolumeId, VolumeKind};

use super::{LEAST_MB, Volumes, check_size, not_found, shown, taken};
use crate::{
    Error,
    account::Plan,
    blocking::blocking,
    db::{AttachmentRow, VolumeRow},
    keys::Caller,
};

/// What a growth still needs.
pub(crate) enum Growth {
    Done(Volume),
    /// Its disk is to be made longer while its machine looks on: see [`Volumes::lengthen`].
    Attached {
        held: AttachmentRow,
        bytes: u64,
    },
}

impl Volumes {
    /// # Errors
    /// 400 names the bad field; 409 when the name is taken, or the source is being written; 429 or 403 over a limit; 507
    /// without room.
    pub(crate) async fn create(
        &self,
        caller: &Caller,
        request: CreateVolume,
    ) -> Result<Volume, Error> {
        let (account, id) = (&caller.account, caller.new_id::<VolumeId>(0));
        if caller.asks_again()
            && let Some(made) = self.db.volume(account, &id.to_string()).await?
        {
            return Ok(shown(&made, &[]));
        }
        let source = match request.from_volume.as_deref() {
            Some(name) => Some(self.db.volume(account, name).await?.ok_or_else(|| {
                Error::not_found("`from_volume`: there is no volume with this name or id")
            })?),
            None => None,
        };
        let allowed = LEAST_MB..=self.limits.largest_mb;
        let named = request.size_mb.is_some() || request.size_gb.is_some();
        let bytes = match &source {
            Some(source) if !named => source.size_bytes,
            Some(_) | None => check_size(
                request.size_mb,
                request.size_gb,
                &allowed,
                caller.plan.limits.volume_min_gb,
            )?,
        };
        caller.plan.check_volume(bytes)?;
        if source.as_ref().is_some_and(|source| bytes < source.size_bytes) {
            return Err(Error::invalid("`size_mb` must be at least the size of `from_volume`"));
        }
        let row = VolumeRow {
            id,
            account: account.clone(),
            name: request.name,
            kind: VolumeKind::Data,
            size_bytes: bytes,
            created_at: self.clock.now_ms(),
            template: None,
        };
        // The copy is only whole while nobody writes.
        let _unchanged = match &source {
            Some(source) => Some(self.begin_copy(source.id).await?),
            None => None,
        };
        self.make(&row, source.map(|source| source.id), &caller.plan).await?;
        Ok(shown(&row, &[]))
    }

    /// Room under the limits, bytes, row.
    async fn make(
        &self,
        row: &VolumeRow,
        source: Option<VolumeId>,
        plan: &Plan,
    ) -> Result<(), Error> {
        let _turn = self.sizes.lock().await;
        let theirs = self.db.volumes(&row.account).await?;
        if theirs.iter().any(|other| other.name == row.name) {
            return Err(name_taken(row));
        }
        let data: Vec<_> = theirs.iter().filter(|other| other.kind == VolumeKind::Data).collect();
        let provisioned: u64 = data.iter().map(|other| other.size_bytes).sum();
        self.check_limits(data.len() + 1, provisioned + row.size_bytes)?;
        // Before the bytes are written; it counts when its row is.
        self.db.check_quota(&row.account, plan, &row.amounts(), None).await?;
        let (layout, id, bytes) = (self.layout.clone(), row.id, row.size_bytes);
        blocking(move || match source {
            Some(source) => {
                store::volume::clone(&layout, &source, &id)?;
                store::volume::grow_offline(&layout, &id, bytes)
            }
            None => store::volume::create(&layout, &id, bytes),
        })
        .await?;
        let inserted = self.db.insert_volume(row, plan).await;
        if matches!(inserted, Ok(true)) {
            return Ok(());
        }
        let (layout, id) = (self.layout.clone(), row.id);
        blocking(move || store::volume::remove(&layout, &id)).await?;
        inserted.and(Err(name_taken(row)))
    }

    fn check_limits(&self, count: usize, bytes: u64) -> Result<(), Error> {
        if count > self.limits.most {
            return Err(Error::quota_exceeded(format!(
                "an account may have {} volumes; delete some first",
                self.limits.most
            )));
        }
        match self.limits.total_mb {
            Some(total) if bytes > total << 20 => Err(Error::quota_exceeded(format!(
                "an account's volumes may have {total} MiB in all; delete some first, or make this one smaller"
            ))),
            Some(_) | None => Ok(()),
        }
    }

    /// # Errors
    /// 404 when it is not theirs or gone; 409 while it is attached.
    pub async fn delete(&self, account: &AccountId, id_or_name: &str) -> Result<(), Error> {
        let row = self.find(account, id_or_name).await?;
        let _changing = match self.begin_change(row.id).await? {
            Ok(changing) => changing,
            Err(holders) => {
                return Err(holders.first().map_or_else(not_found, |held| taken(&held.sandbox)));
            }
        };
        if let Some(holder) = self.db.delete_volume(&row.id).await? {
            return Err(taken(&holder));
        }
        let (layout, id) = (self.layout.clone(), row.id);
        blocking(move || store::volume::remove(&layout, &id)).await
    }

    /// Makes it larger, with its file system. One that a sandbox writes needs [`Growth::Attached`] seen to.
    ///
    /// # Errors
    /// 400 for less than it has; 409 while it is read, for its file system would change behind its readers.
    pub(crate) async fn grow(
        &self,
        caller: &Caller,
        id_or_name: &str,
        request: &UpdateVolume,
    ) -> Result<Growth, Error> {
        if request.size_mb.is_none() && request.size_gb.is_none() {
            return Err(Error::invalid("`size_mb` is missing: what the volume shall grow to"));
        }
        let bytes = check_size(
            request.size_mb,
            request.size_gb,
            &(LEAST_MB..=self.limits.largest_mb),
            None,
        )?;
        let _turn = self.sizes.lock().await;
        let mut row = self.find(&caller.account, id_or_name).await?;
        self.check_growth(&row, bytes).await?;
        if bytes > row.size_bytes {
            caller.plan.check_volume(bytes)?;
        }
        let _changing = match self.begin_change(row.id).await? {
            Ok(changing) => changing,
            Err(holders) => {
                let Some(held) = holders.into_iter().find(|held| !held.read_only) else {
                    return Err(Error::conflict(
                        "the volume is attached for reading; delete those sandboxes before it can grow",
                    ));
                };
                return Ok(Growth::Attached { held, bytes });
            }
        };
        let (layout, id) = (self.layout.clone(), row.id);
        let grow = blocking(move || store::volume::grow_offline(&layout, &id, bytes));
        self.grow_with(&mut row, bytes, &caller.plan, grow).await?;
        Ok(Growth::Done(shown(&row, &[])))
    }

    /// Room under the plan first, then the bytes. Where those cannot be had, it is as before; a server that dies between
    /// the two leaves a volume whose growth is done by asking for the same size again.
    async fn grow_with(
        &self,
        row: &mut VolumeRow,
        bytes: u64,
        plan: &Plan,
        grow: impl Future<Output = Result<(), Error>>,
    ) -> Result<(), Error> {
        self.db.set_volume_size(row, bytes, plan).await?;
        if let Err(error) = grow.await {
            self.db.set_volume_size(row, row.size_bytes, &Plan::unlimited()).await?;
            return Err(error);
        }
        row.size_bytes = bytes;
        Ok(())
    }

    /// The disk of a sandbox that runs from it: as [`Volumes::lengthen`]. How many bytes it has then: one that is longer
    /// already has grown before, and its row did not hear of that.
    pub(crate) async fn lengthen_root(
        &self,
        account: &AccountId,
        id: VolumeId,
        bytes: u64,
        plan: &Plan,
    ) -> Result<u64, Error> {
        let _turn = self.sizes.lock().await;
        let mut row = self.find(account, &id.to_string()).await?;
        let layout = self.layout.clone();
        let has = blocking(move || store::volume::bytes(&layout, &id)).await?;
        if has > row.size_bytes {
            self.db.set_volume_size(&row, has, &Plan::unlimited()).await?;
            row.size_bytes = has;
        }
        if has >= bytes {
            return Ok(has);
        }
        let layout = self.layout.clone();
        let grow = blocking(move || store::volume::grow(&layout, &id, bytes));
        self.grow_with(&mut row, bytes, plan, grow).await?;
        Ok(bytes)
    }

    async fn check_growth(&self, row: &VolumeRow, bytes: u64) -> Result<(), Error> {
        if bytes < row.size_bytes {
            return Err(Error::invalid(format!(
                "`size_mb` must be at least {}: a volume never shrinks",
                row.size_bytes >> 20
            )));
        }
        let all = self.db.volumes(&row.account).await?;
        let is_other = |other: &&VolumeRow| other.kind == VolumeKind::Data && other.id != row.id;
        let others: Vec<_> = all.iter().filter(is_other).collect();
        let provisioned: u64 = others.iter().map(|other| other.size_bytes).sum();
        self.check_limits(others.len() + 1, provisioned + bytes)
    }

    /// The disk of one that a sandbox writes has so many bytes from now on. Its machine and its guest are to be told next;
    /// when that fails, it is done by asking for the same size again.
    pub(crate) async fn lengthen(
        &self,
        caller: &Caller,
        held: &AttachmentRow,
        bytes: u64,
    ) -> Result<Volume, Error> {
        let _turn = self.sizes.lock().await;
        let mut row = self.find(&caller.account, &held.volume.to_string()).await?;
        self.check_growth(&row, bytes).await?;
        let (layout, id) = (self.layout.clone(), row.id);
        let grow = blocking(move || store::volume::grow(&layout, &id, bytes));
        self.grow_with(&mut row, bytes, &caller.plan, grow).await?;
        Ok(shown(&row, std::slice::from_ref(held)))
    }

    /// At a server's start: holds of sandboxes that are no more, and bytes that no row names.
    pub(crate) async fn recover(&self, sandboxes: &[api::SandboxId]) -> Result<(), Error> {
        for held in self.db.all_attachments().await? {
            if !sandboxes.contains(&held.sandbox) {
                tracing::info!(volume = %held.volume, sandbox = %held.sandbox, "freeing a volume of a sandbox that is gone");
                self.free(&held.sandbox, std::slice::from_ref(&held)).await?;
            }
        }
        let (known, layout) = (self.db.all_volumes().await?, self.layout.clone());
        blocking(move || store::volume::orphans(&layout, &known)).await?;
        Ok(())
    }

    /// Only once the holder's machine is dead: what it left half-written is put in order, then others may have them.
    pub(crate) async fn free(
        &self,
        sandbox: &api::SandboxId,
        held: &[AttachmentRow],
    ) -> Result<(), Error> {
        for held in held.iter().filter(|held| !held.read_only) {
            self.put_in_order(&held.volume).await;
        }
        self.db.release_volumes(sandbox).await
    }

    /// What a dead machine left half-written.
    pub(crate) async fn put_in_order(&self, volume: &VolumeId) {
        let (layout, id) = (self.layout.clone(), *volume);
        match blocking(move || store::volume::recover(&layout, &id)).await {
            Ok(recovery) => tracing::debug!(%volume, ?recovery, "recovered"),
            // It stays as it is; whoever mounts it is told.
            Err(error) => {
                tracing::error!(%volume, %error, cause = error.causes(), "failed to recover a volume")
            }
        }
    }

    /// One of a machine that is off and has left it in order. What that machine has then.
    pub(crate) async fn release(
        &self,
        volume: &VolumeId,
        sandbox: &api::SandboxId,
    ) -> Result<Vec<AttachmentRow>, Error> {
        self.db.release_volume(volume, sandbox).await
    }
}

fn name_taken(row: &VolumeRow) -> Error {
    Error::conflict(format!("there is a volume named `{}` already; choose another name", row.name))
}

#[cfg(test)]
mod tests {
    use store::Layout;

    use super::*;
    use crate::{
        clock::Clock,
        config::Config,
        db::{Db, testing},
    };

    const MIB: u64 = 1 << 20;

    #[tokio::test]
    async fn a_root_disk_that_is_longer_than_its_row_says_has_grown_and_goes_on_growing() {
        let (database, directory) = (testing::sqlite(), tempfile::tempdir().unwrap());
        let db = Db::connect(database.url()).await.unwrap();
        let layout = Layout::create(directory.path().join("data"), directory.path().join("cache"));
        let layout = layout.unwrap();
        let limits = Config::testing().volumes;
        let volumes = Volumes::new(db.clone(), Clock::default(), layout.clone(), limits);
        let (account, id) = (AccountId::default_account(), VolumeId::random());
        let row = VolumeRow {
            id,
            account: account.clone(),
            name: "root".parse().unwrap(),
            kind: VolumeKind::Root,
            size_bytes: 32 * MIB,
            created_at: 1,
            template: None,
        };
        store::volume::create(&layout, &id, 32 * MIB).unwrap();
        assert!(db.insert_volume(&row, &Plan::unlimited()).await.unwrap());
        store::volume::grow(&layout, &id, 64 * MIB).unwrap();
        let sizes = async || {
            let row = volumes.find(&account, &id.to_string()).await.unwrap();
            (row.size_bytes, store::volume::bytes(&layout, &id).unwrap())
        };
        for (asked, has) in [(48, 64), (64, 64), (96, 96), (96, 96)] {
            let plan = Plan::unlimited();
            let grown = volumes.lengthen_root(&account, id, asked * MIB, &plan).await.unwrap();
            assert_eq!((grown, sizes().await), (has * MIB, (has * MIB, has * MIB)), "{asked}");
        }
        // A server has died between row and disk.
        db.set_volume_size(&row, 128 * MIB, &Plan::unlimited()).await.unwrap();
        let plan = Plan::unlimited();
        let grown = volumes.lengthen_root(&account, id, 128 * MIB, &plan).await.unwrap();
        assert_eq!((grown, sizes().await), (128 * MIB, (128 * MIB, 128 * MIB)));
        db.close().await;
    }
}
