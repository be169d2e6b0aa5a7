//! A database's keeper: makes it, starts it again when its machine has died, and removes it. Every step may be repeated,
//! so a server that dies at any of them leaves nothing that the next one does not finish.

use std::{sync::Arc, time::Duration};

use api::{CreateNetwork, CreateSandbox, DatabaseId, ErrorCode};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};

use super::{DatabaseState, Databases, Entry};
use crate::{
    Error,
    db::{DatabaseRow, NO_PORT},
    keys::Caller,
    sandbox::{DatabaseBeginning, State, Target},
};

pub(crate) const TEMPLATE: &str = "postgres";
/// The bake of a size that was never used, beside others under emulation, several times over.
const PROVISION_DEADLINE: Duration = Duration::from_secs(1200);
const PROVISION_PAUSE: Duration = Duration::from_millis(500);
/// Whatever whoever has no room names.
const LONGEST_PROVISION_PAUSE: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Of a source's memory, for a clone. The source stands still while it is compared: for each GiB a fifth of a second.
const MOST_COPIED_BYTES: u64 = 4 << 30;
/// Between tries to start one again whose machine does not.
const RECOVERY_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_RECOVERY_PAUSE: Duration = Duration::from_secs(300);
/// Whether the machine of an attempt before will do.
fn is_made(machine: Option<(State, Target)>) -> bool {
    matches!(machine, Some((state, target)) if state != State::Creating && target != Target::Deleted)
}

impl Databases {
    /// Runs until the database is removed, or the server closes.
    pub(super) async fn keep(
        self: Arc<Self>,
        entry: Arc<Entry>,
        caller: Caller,
        mut listeners: Vec<TcpListener>,
    ) {
        let kept = async {
            if entry.look(|row| row.state) == DatabaseState::Provisioning {
                // Of a server that died meanwhile: whoever hears that it is ready finds it there.
                if listeners.is_empty() {
                    listeners = self.listen(entry.look(|row| row.port)).await.unwrap_or_default();
                }
                self.provision(&entry, &caller).await;
            }
            tokio::select! {
                () = self.live(&entry, listeners) => {}
                () = entry.deleted() => {}
            }
            // Not among the above: it must not be cut short.
            self.remove(&entry).await;
        };
        tokio::select! {
            () = kept => {}
            () = self.closed.cancelled() => {}
        }
    }

    async fn live(self: &Arc<Self>, entry: &Arc<Entry>, mut listeners: Vec<TcpListener>) {
        if entry.look(|row| row.state) != DatabaseState::Ready {
            // Others may have its port.
            drop(listeners);
            return std::future::pending().await;
        }
        let id = entry.id();
        while listeners.is_empty() {
            match self.listen(entry.look(|row| row.port)).await {
                Ok(bound) => listeners = bound,
                Err(error) => {
                    tracing::error!(database = %id, port = entry.look(|row| row.port), %error, "the port of a database is taken");
                    sleep(LOOK_EVERY).await;
                }
            }
        }
        self.tasks.spawn(Arc::clone(self).serve(Arc::clone(entry), listeners));
        tokio::join!(
            self.look_after(entry),
            self.settle(entry),
            self.keep_room(entry),
            self.back_up(entry)
        );
    }

    /// Its machine may die, and PostgreSQL with it: what was committed is on the disk.
    async fn look_after(self: &Arc<Self>, entry: &Arc<Entry>) {
        let (account, sandbox) = entry.sandbox();
        let (mut pause, mut next_look) = (RECOVERY_PAUSE, Instant::now());
        loop {
            // It was not brought up, and may recover meanwhile.
            if !self.runs(entry) || entry.look(|row| row.error.is_none()) {
                (pause, next_look) = (RECOVERY_PAUSE, Instant::now());
            } else if next_look <= Instant::now()
                && let Err(error) = self.look_again(entry).await
            {
                tracing::warn!(database = %entry.id(), %error, "a database is not up yet");
                next_look = Instant::now() + pause;
                pause = (pause * 2).min(LONGEST_RECOVERY_PAUSE);
            }
            let needs_help = match self.sandboxes.state_of(&account, &sandbox) {
                Some((State::Failed, target)) => target != Target::Deleted,
                // Of one that shall never sleep, somebody else's doing.
                Some((State::Hibernated | State::Stopped, target)) => {
                    target != Target::Deleted && entry.look(|row| row.always_on)
                }
                Some((State::Creating | State::Running | State::Paused, _)) | None => false,
            };
            if needs_help && let Err(error) = self.bring_up(entry).await {
                tracing::error!(database = %entry.id(), %error, cause = error.causes(), "a database cannot be started again");
                sleep(RECOVERY_PAUSE).await;
            }
            sleep(LOOK_EVERY).await;
        }
    }

    /// A change of passwords that broke off is brought to its end: until then PostgreSQL may refuse what URLs say.
    async fn settle(self: &Arc<Self>, entry: &Arc<Entry>) {
        let mut row = entry.row.subscribe();
        // It lives as long as we do.
        while row.wait_for(DatabaseRow::is_unsettled).await.is_ok() {
            // Whoever is just changing them.
            drop(entry.turn.lock().await);
            if !self.runs(entry) {
                // Whoever wakes it brings it up.
                sleep(LOOK_EVERY).await;
                continue;
            }
            if let Err(error) = self.look_again(entry).await {
                tracing::error!(database = %entry.id(), %error, cause = error.causes(), "a change of passwords has not come to its end");
                sleep(RECOVERY_PAUSE).await;
                continue;
            }
            self.write_down(entry).await;
        }
    }

    async fn provision(self: &Arc<Self>, entry: &Arc<Entry>, caller: &Caller) {
        let began = Instant::now();
        loop {
            let made = self.try_to_make(entry, caller).await;
            if entry.look(|row| row.state) != DatabaseState::Provisioning {
                return;
            }
            let Err(error) = made else { break };
            let may_pass = matches!(
                error.code,
                ErrorCode::Unavailable | ErrorCode::CapacityExceeded | ErrorCode::Internal
            );
            tracing::warn!(database = %entry.id(), %error, cause = error.causes(), "a database is not made yet");
            let never_fits = self.sandboxes.is_too_large(entry.look(|row| row.size.memory_mb()));
            if !may_pass || never_fits || began.elapsed() > PROVISION_DEADLINE {
                self.give_up(entry, error).await;
                return;
            }
            let pause = error.retry_after.unwrap_or_default();
            tokio::select! {
                () = sleep(pause.clamp(PROVISION_PAUSE, LONGEST_PROVISION_PAUSE)) => {}
                () = entry.deleted() => return,
            }
        }
        // Whoever hears that it is ready may name it at once.
        self.tell_sandboxes(entry);
        entry.set_unless_deleted(DatabaseState::Ready, None);
        self.write_down(entry).await;
        tracing::info!(database = %entry.id(), seconds = began.elapsed().as_secs_f64(), "ready");
    }

    async fn give_up(&self, entry: &Entry, error: Error) {
        let (account, sandbox) = entry.sandbox();
        if let Err(error) = self.sandboxes.delete_managed(&account, &sandbox).await {
            tracing::warn!(database = %entry.id(), %error, "the machine of a failed database is left over");
        }
        self.forget_root_of(entry).await;
        entry.set_unless_deleted(DatabaseState::Failed, Some(error.message));
        entry.change(|row| {
            if row.state == DatabaseState::Failed {
                row.port = NO_PORT;
            }
        });
        self.write_down(entry).await;
    }

    /// Of a clone that was given up before its machine had it.
    async fn forget_root_of(&self, entry: &Entry) {
        let (id, account) = entry.look(|row| (row.id, row.account.clone()));
        if let Ok(volume) = id.to_string().parse()
            && let Err(error) = self.sandboxes.forget_root(&account, volume).await
        {
            tracing::warn!(database = %id, %error, "a disk is left over");
        }
    }

    async fn try_to_make(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        caller: &Caller,
    ) -> Result<(), Error> {
        let row = entry.row();
        match (row.cloned_from, row.target_time) {
            (Some(source), Some(target)) => self.rewind(entry, caller, &source, target).await?,
            (Some(source), None) => self.copy(entry, caller, &source).await?,
            (None, _) => self.restore(&row, caller).await?,
        }
        let up = async {
            self.bring_up(entry).await?;
            self.apply_idle(entry).await
        };
        tokio::select! {
            up = up => up,
            () = entry.deleted() => Ok(()),
        }
    }

    /// Out of the template's bake. Not given up half-way: a machine that nobody knows of would be left.
    pub(super) async fn restore(&self, row: &DatabaseRow, caller: &Caller) -> Result<(), Error> {
        let request = CreateSandbox {
            template: Some(TEMPLATE.to_owned()),
            cpu: Some(row.cpu),
            memory_mb: Some(row.size.memory_mb()),
            persistent: Some(true),
            // It answers; it asks nobody.
            network: Some(CreateNetwork::Internet(false)),
            ..CreateSandbox::default()
        };
        self.sandboxes.create_managed(caller, row.id, request, DatabaseBeginning::Template).await
    }

    /// At an instant of its source, which goes on. With the source's memory, PostgreSQL's included, where it has the same
    /// size and there is not too much of it; else it boots from the disk and recovers.
    async fn copy(
        self: &Arc<Self>,
        entry: &Entry,
        caller: &Caller,
        source: &DatabaseId,
    ) -> Result<(), Error> {
        let row = entry.row();
        let own = row.id.sandbox();
        if is_made(self.sandboxes.state_of(&row.account, &own)) {
            return Ok(());
        }
        let text = row.id.to_string();
        let (snapshot, volume) =
            (text.parse().map_err(Error::internal)?, text.parse().map_err(Error::internal)?);
        // Of an attempt before, which may have gone another way.
        self.sandboxes.delete_managed(&row.account, &own).await?;
        self.sandboxes.forget_root(&row.account, volume).await?;
        let deleted = || Error::not_found("its source was deleted before it was cloned");
        let source = self.find(&row.account, &source.to_string()).map_err(|_| deleted())?;
        let (account, sandbox) = source.sandbox();
        let is_off = matches!(
            self.sandboxes.state_of(&account, &sandbox),
            Some((State::Stopped | State::Failed, _))
        );
        if is_off || source.look(DatabaseRow::is_unsettled) {
            self.bring_up(&source).await?;
        }
        let takes_memory = row.size == source.look(|row| row.size)
            && self.sandboxes.changed_memory_of(&account, &sandbox) <= MOST_COPIED_BYTES;
        let request = CreateSandbox {
            cpu: Some(row.cpu),
            memory_mb: Some(row.size.memory_mb()),
            persistent: Some(true),
            network: Some(CreateNetwork::Internet(false)),
            ..CreateSandbox::default()
        };
        let explained = |error: Error| match self.sandboxes.state_of(&account, &sandbox) {
            None | Some((_, Target::Deleted)) => deleted(),
            // It is started before the next attempt.
            Some((State::Stopped | State::Failed, _)) => {
                Error::busy("its source's machine has just ended", 1).because(error)
            }
            Some(_) => error,
        };
        // The source stands still for a clone that will be made.
        self.sandboxes.room_for(row.size.memory_mb()).await?;
        // Its passwords stay the same meanwhile.
        let turn = source.turn.lock().await;
        if source.look(DatabaseRow::is_unsettled) {
            return Err(Error::busy("its source's passwords are being changed", 1));
        }
        entry.change(|row| row.origin = source.look(|row| row.credentials.clone()));
        self.save(entry).await?;
        if !takes_memory {
            let root =
                self.sandboxes.root_of(&account, &sandbox, volume).await.map_err(explained)?;
            drop(turn);
            let beginning = DatabaseBeginning::Root(root);
            return self.sandboxes.create_managed(caller, row.id, request, beginning).await;
        }
        let instant = self.sandboxes.passing_instant_of(&account, &sandbox, snapshot).await;
        let instant = instant.map_err(explained)?;
        drop(turn);
        let beginning = instant.beginning();
        let made = self.sandboxes.create_managed(caller, row.id, request, beginning).await;
        self.sandboxes.end_passing(instant).await;
        made
    }

    /// It hibernates when nobody has used it for as long as its row says.
    pub(super) async fn apply_idle(&self, entry: &Entry) -> Result<(), Error> {
        let (account, sandbox) = entry.sandbox();
        let idle = entry.look(|row| (!row.always_on).then_some(row.idle_seconds));
        self.sandboxes.set_idle(&account, &sandbox, idle).await
    }

    /// How it is reached from now on.
    pub(super) fn tell_sandboxes(&self, entry: &Entry) {
        let (id, account) = entry.look(|row| (row.id, row.account.clone()));
        self.sandboxes.database_urls.set(id, &account, self.connection_to(entry).connection_url);
    }

    async fn remove(&self, entry: &Entry) {
        let id = entry.id();
        self.sandboxes.database_urls.forget(&id);
        entry.closed.cancel();
        let (account, sandbox) = entry.sandbox();
        while let Err(error) = self.sandboxes.delete_managed(&account, &sandbox).await {
            tracing::error!(database = %id, %error, cause = error.causes(), "failed to remove a database's machine");
            sleep(LOOK_EVERY).await;
        }
        self.forget_root_of(entry).await;
        while let Err(error) = self.leave_backups(&id).await {
            tracing::error!(database = %id, cause = error.causes(), "failed to write down whose backups are left");
            sleep(LOOK_EVERY).await;
        }
        while let Err(error) = self.db.delete_database(&id).await {
            tracing::error!(database = %id, cause = error.causes(), "failed to delete a database's row");
            sleep(LOOK_EVERY).await;
        }
        let mut entries = self.entries.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        entries.remove(&id);
        drop(entries);
        self.begin_to_remove_backups();
        entry.removed.send_replace(true);
        tracing::info!(database = %id, "deleted");
    }

    /// A change that is true already has to reach its row, however long the rows are away.
    async fn write_down(&self, entry: &Entry) {
        while let Err(error) = self.save(entry).await {
            tracing::error!(database = %entry.id(), cause = error.causes(), "failed to write a database's row");
            sleep(LOOK_EVERY).await;
        }
    }

    /// As it is when its turn comes: an older copy never overwrites a newer one.
    pub(super) async fn save(&self, entry: &Entry) -> Result<(), Error> {
        let _writing = entry.writing.lock().await;
        self.db.update_database(&entry.row()).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_that_is_not_done_or_is_to_go_is_made_again() {
        assert!(!is_made(None));
        assert!(!is_made(Some((State::Creating, Target::Running))));
        // What becomes of a create when its server dies.
        assert!(!is_made(Some((State::Failed, Target::Deleted))));
        assert!(!is_made(Some((State::Running, Target::Deleted))));
        for state in [State::Running, State::Hibernated, State::Stopped, State::Failed] {
            assert!(is_made(Some((state, Target::Running))), "{state:?}");
        }
    }
}
