//! Snapshots: memory and disk of one instant, kept apart from the sandbox they were taken of.

use std::{sync::Arc, time::Duration};

use api::{AccountId, ErrorCode, EventKind, SandboxId, Snapshot, SnapshotId};
use machine::{WriteBack, guest::Request};
use store::saved_machine::{Manifest, SavedMachineDraft};
use tokio::sync::MutexGuard;

use super::{
    Sandboxes,
    driver::ANSWER_DEADLINE,
    pausing::{QUIESCE_DEADLINE, reach_guest},
    registry::{self, Entry, locked},
    saved::{SavedMachine, snapshot_key},
    state::{State, Target, Wish},
    transition::When,
};
use crate::{
    Error,
    account::{Amounts, Plan},
    blocking::blocking,
    clock,
    db::SnapshotRow,
    keys::Caller,
};

/// Whoever else does something to the machine ends within its own deadlines.
const TURN: Duration = Duration::from_secs(25);
/// From the end of a machine to its notice.
pub(crate) const NOTICED: Duration = Duration::from_secs(1);
const LONGEST_NAME: usize = 256;

/// What a snapshot is for.
pub(super) enum Purpose {
    /// One of the account's own.
    Kept(Arc<Plan>),
    /// Where the children of this fork tree begin.
    Tree(String),
}

/// A sandbox at one instant, which nobody else knows of yet.
pub(super) struct Caught {
    /// Without a name, and of no tree.
    pub(super) row: SnapshotRow,
    pub(super) draft: SavedMachineDraft,
    pub(super) manifest: Manifest,
}

impl Sandboxes {
    /// The sandbox goes on, whether this works or not.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 in states without memory to save, or while a process holds a volume; 507
    /// without room.
    pub async fn snapshot(
        self: &Arc<Self>,
        caller: &Caller,
        id: &SandboxId,
        name: Option<String>,
    ) -> Result<Snapshot, Error> {
        let name = name.unwrap_or_default();
        if name.len() > LONGEST_NAME || name.contains('\0') {
            return Err(Error::invalid(format!(
                "`name` must have at most {LONGEST_NAME} bytes, without NUL"
            )));
        }
        let new = caller.new_id(0);
        if caller.asks_again()
            && let Some(row) = self.db.snapshot(&caller.account, &new).await?
        {
            return self.shown_snapshot(row).await;
        }
        let entry = self.registry.find(&caller.account, id)?;
        let one = Amounts { snapshots: 1, ..Amounts::default() };
        self.check_quota(caller, &one, None).await?;
        let of = Purpose::Kept(Arc::clone(&caller.plan));
        let row = self.take_snapshot(&entry, new, name, of).await?;
        self.tell(&entry, EventKind::Snapshotted, Some(row.id.to_string()));
        self.shown_snapshot(row).await
    }

    /// Goes on to its end when whoever asked has gone: a machine is not left standing still.
    pub(super) async fn take_snapshot(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: SnapshotId,
        name: String,
        purpose: Purpose,
    ) -> Result<SnapshotRow, Error> {
        let (sandboxes, entry) = (Arc::clone(self), Arc::clone(entry));
        let task = self.tasks.spawn(async move {
            let caught = sandboxes.catch(&entry, id, WriteBack::Now).await?;
            sandboxes.publish(caught, name, purpose).await
        });
        task.await.map_err(Error::internal)?
    }

    /// The sandbox goes on when this returns, whether it works or not. Not to be given up half-way.
    pub(super) async fn catch(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        id: SnapshotId,
        write_back: WriteBack,
    ) -> Result<Caught, Error> {
        let in_use = entry.usage.begin();
        entry.accept(Wish::Snapshot, self.clock.steady_ms())?;
        let hibernates = entry.look(|row| row.state) == State::Hibernated;
        // Its volumes are mounted in what was saved; a snapshot never holds one.
        let is_woken = hibernates && !locked(&entry.attachments).is_empty();
        if is_woken {
            self.awake(entry).await?;
        }
        let turn = self.turn_for_snapshot(entry).await?;
        let caught = self.catch_in_turn(entry, id, write_back, &turn).await;
        let caught = or_its_end(entry, caught).await;
        drop((turn, in_use));
        if is_woken {
            self.put_to_rest_again(entry).await;
        }
        caught
    }

    pub(super) async fn turn_for_snapshot<'e>(
        &self,
        entry: &'e Entry,
    ) -> Result<MutexGuard<'e, ()>, Error> {
        let turn = tokio::time::timeout(TURN, entry.turn.lock()).await.map_err(|_| {
            Error::busy("something else is just being done to the sandbox; try again shortly", 2)
        })?;
        entry.accept(Wish::Snapshot, self.clock.steady_ms())?;
        Ok(turn)
    }

    /// Unless somebody uses it by now.
    async fn put_to_rest_again(&self, entry: &Entry) {
        let target = Target::Hibernated;
        if let Err(error) = self.reach(entry, Wish::Hibernate, target, When::Unused).await {
            tracing::warn!(sandbox = %entry.look(|row| row.id), %error, cause = error.causes(), "a sandbox woken for a snapshot stays awake");
        }
    }

    async fn catch_in_turn(
        &self,
        entry: &Entry,
        id: SnapshotId,
        write_back: WriteBack,
        _turn: &MutexGuard<'_, ()>,
    ) -> Result<Caught, Error> {
        // Before anything is unmounted for it.
        self.admit_bytes(0)?;
        let row = entry.look(|row| SnapshotRow {
            id,
            account: row.account.clone(),
            sandbox: row.id,
            template: row.template.clone(),
            name: String::new(),
            cpu: row.cpu,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            tree: None,
            created_at: self.clock.now_ms(),
            network: Some(row.network.clone()),
        });
        let layout = self.sites.layout.clone();
        let draft = blocking(move || store::snapshot::draft(&layout, &id)).await?;
        let (draft, manifest) = match entry.look(|row| row.state) {
            State::Hibernated => {
                let files = self.files(entry);
                blocking(move || {
                    let saved = files.hibernation()?.ok_or(store::Error::NotFound {
                        what: "hibernated machine",
                        id: id.to_string(),
                    })?;
                    let manifest = saved.manifest.clone();
                    draft.clone_all_of(&saved)?;
                    Ok((draft, manifest))
                })
                .await?
            }
            State::Creating | State::Running | State::Paused | State::Stopped | State::Failed => {
                let begun = self.begin_to_save(entry, draft, write_back).await?;
                let saved = async {
                    fault::point!("snapshot.saving", Error::internal);
                    self.unmount_volumes(entry).await?;
                    let saved = self.save_machine(entry, begun).await?;
                    fault::point!("snapshot.saved", Error::internal);
                    Ok::<_, Error>(saved)
                };
                let saved = saved.await;
                let after = self.after_the_window(entry).await;
                // The first that went wrong is the reason.
                let saved = saved?;
                after?;
                saved
            }
        };
        Ok(Caught { row, draft, manifest })
    }

    async fn publish(
        &self,
        caught: Caught,
        name: String,
        purpose: Purpose,
    ) -> Result<SnapshotRow, Error> {
        let Caught { row, draft, manifest } = caught;
        let (plan, tree) = match purpose {
            Purpose::Kept(plan) => (Some(plan), None),
            Purpose::Tree(tree) => (None, Some(tree)),
        };
        let row = SnapshotRow { name, tree, ..row };
        fault::point!("snapshot.publishing", Error::internal);
        blocking(move || draft.publish(manifest)).await?;
        self.snapshot_sizes.forget_all();
        fault::point!("snapshot.published");
        let sizes = {
            let (layout, id) = (self.sites.layout.clone(), row.id);
            blocking(move || store::snapshot::sizes(&layout, &id)).await?
        };
        self.snapshot_sizes.put(row.id, sizes);
        // The files come first: without a row they are swept, a row without files would be a lie.
        if let Err(error) = self.db.insert_snapshot(&row, sizes.own_bytes, plan.as_deref()).await {
            let (layout, id) = (self.sites.layout.clone(), row.id);
            blocking(move || store::snapshot::remove(&layout, &id)).await?;
            return Err(error);
        }
        fault::point!("snapshot.row_inserted");
        tracing::info!(snapshot = %row.id, sandbox = %row.sandbox, "snapshot taken");
        Ok(row)
    }

    /// A restored sandbox shall hold nothing of a volume that it no longer has.
    async fn unmount_volumes(&self, entry: &Entry) -> Result<(), Error> {
        let slots: Vec<u8> = locked(&entry.attachments).iter().map(|held| held.slot).collect();
        if slots.is_empty() {
            return Ok(());
        }
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        let is_paused = entry.look(|row| row.state) == State::Paused;
        if is_paused {
            // Still quiet: none of the user's processes goes on.
            inside.machine.resume().await?;
        }
        let (guest, is_new) = reach_guest(entry, &inside, ANSWER_DEADLINE).await?;
        if is_new {
            self.watch_commands(entry).await;
        }
        if !is_paused {
            guest.call(Request::Quiesce, QUIESCE_DEADLINE).await?;
        }
        guest.call(Request::VolumesUnmount { slots }, QUIESCE_DEADLINE).await?;
        Ok(())
    }

    /// However the save went, the sandbox is as it was before. Volumes of a paused one are mounted again when it goes on.
    async fn after_the_window(&self, entry: &Entry) -> Result<(), Error> {
        if entry.look(|row| row.state) != State::Paused {
            return self.go_on(entry).await;
        }
        let inside = entry.inside().ok_or_else(registry::not_found)?;
        if inside.machine.is_running().await? {
            inside.machine.stop().await?;
        }
        Ok(())
    }

    async fn shown_snapshot(&self, row: SnapshotRow) -> Result<Snapshot, Error> {
        let sizes = match self.snapshot_sizes.get(&row.id) {
            Some(sizes) => sizes,
            None => {
                let (layout, id) = (self.sites.layout.clone(), row.id);
                let sizes = blocking(move || store::snapshot::sizes(&layout, &id)).await?;
                self.snapshot_sizes.put(row.id, sizes);
                sizes
            }
        };
        Ok(Snapshot {
            id: row.id,
            sandbox_id: row.sandbox,
            template: row.template,
            name: row.name,
            cpu: row.cpu,
            memory_mb: row.memory_mb,
            disk_mb: row.disk_mb,
            size_bytes: sizes.own_bytes,
            total_bytes: sizes.total_bytes,
            created_at: clock::from_ms(row.created_at),
        })
    }

    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn get_snapshot(
        &self,
        account: &AccountId,
        id: &SnapshotId,
    ) -> Result<Snapshot, Error> {
        let row = self.db.snapshot(account, id).await?.ok_or_else(snapshot_not_found)?;
        self.shown_snapshot(row).await
    }

    /// Newest first.
    ///
    /// # Errors
    /// The database is away.
    pub async fn list_snapshots(
        &self,
        account: &AccountId,
        sandbox: Option<&SandboxId>,
    ) -> Result<Vec<Snapshot>, Error> {
        let mut shown = Vec::new();
        for row in self.db.snapshots(account).await? {
            if sandbox.is_none_or(|wanted| *wanted == row.sandbox) {
                match self.shown_snapshot(row).await {
                    Ok(snapshot) => shown.push(snapshot),
                    // Deleted meanwhile.
                    Err(error) if error.code == api::ErrorCode::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(shown)
    }

    /// Sandboxes that run from it go on.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn delete_snapshot(&self, account: &AccountId, id: &SnapshotId) -> Result<(), Error> {
        self.db.snapshot(account, id).await?.ok_or_else(snapshot_not_found)?;
        self.remove_snapshot(id).await
    }

    pub(super) async fn remove_snapshot(&self, id: &SnapshotId) -> Result<(), Error> {
        self.db.delete_snapshot(id).await?;
        self.pool.forget(&snapshot_key(id)).await;
        let (layout, id) = (self.sites.layout.clone(), *id);
        let removed = blocking(move || store::snapshot::remove(&layout, &id)).await;
        self.snapshot_sizes.forget_all();
        removed
    }

    /// To start sandboxes from.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 409 when this host cannot continue it.
    pub(super) async fn saved_snapshot(
        &self,
        account: &AccountId,
        id: &SnapshotId,
    ) -> Result<(SnapshotRow, Arc<SavedMachine>), Error> {
        let unknown = || Error::not_found("`from_snapshot`: there is no snapshot with this id");
        let row = self.db.snapshot(account, id).await?.ok_or_else(unknown)?;
        let (layout, id) = (self.sites.layout.clone(), row.id);
        let stored =
            blocking(move || store::snapshot::get(&layout, &id)).await?.ok_or_else(unknown)?;
        let saved = self.to_start_from(&id, &stored)?;
        Ok((row, saved))
    }

    pub(super) fn to_start_from(
        &self,
        id: &SnapshotId,
        stored: &store::saved_machine::SavedMachine,
    ) -> Result<Arc<SavedMachine>, Error> {
        let spec = self.spec_of(&stored.manifest)?;
        Ok(Arc::new(SavedMachine::of_store(snapshot_key(id), spec, stored)?))
    }
}

/// Whatever step has met the end of its machine, that end is the reason. To be tried again, and known by then.
pub(super) async fn or_its_end<T>(entry: &Entry, caught: Result<T, Error>) -> Result<T, Error> {
    let (state, target) = entry.look(|row| (row.state, row.target));
    match caught {
        Err(error)
            if matches!(error.code, ErrorCode::Internal | ErrorCode::NotFound)
                && (state, target) != (State::Hibernated, Target::Hibernated)
                && target != Target::Deleted
                && has_ended(entry).await =>
        {
            Err(Error::busy("its virtual machine has just ended", 1).because(error))
        }
        caught => caught,
    }
}

/// Its memory may be gone before its end is noticed.
async fn has_ended(entry: &Entry) -> bool {
    match entry.inside() {
        Some(inside) => tokio::time::timeout(NOTICED, inside.machine.exited()).await.is_ok(),
        None => true,
    }
}

fn snapshot_not_found() -> Error {
    Error::not_found("there is no snapshot with this id; list them with GET /v1/snapshots")
}
