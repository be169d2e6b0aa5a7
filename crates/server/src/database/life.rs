//! A database's keeper: makes it, starts it again when its machine has died, and removes it. Every step may be repeated,
//! so a server that dies at any of them leaves nothing that the next one does not finish.

use std::{io, pin::pin, sync::Arc, time::Duration};

use api::{CreateNetwork, CreateSandbox, DatabaseId, ErrorCode, ExecRequest};
use futures::poll;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout},
};

use super::{
    DatabaseState, Databases, Entry,
    admin::{Admin, Refused},
};
use crate::{
    Error,
    db::{DatabaseRow, NO_PORT},
    keys::Caller,
    sandbox::{DatabaseBeginning, ExecEvent, State, Target},
};

pub(crate) const TEMPLATE: &str = "postgres";
/// The bake of a size that was never used, beside others under emulation, several times over.
const PROVISION_DEADLINE: Duration = Duration::from_secs(1200);
const PROVISION_PAUSE: Duration = Duration::from_millis(500);
/// Whatever whoever has no room names.
const LONGEST_PROVISION_PAUSE: Duration = Duration::from_secs(10);
/// From a running machine to PostgreSQL that takes connections. A recovery that takes longer goes on meanwhile.
const UP_DEADLINE: Duration = Duration::from_secs(300);
/// What is late is ended with all that it has started, and a recovery would begin anew: longer than any of them.
const START_DEADLINE: Duration = Duration::from_secs(3600);
/// From a first failure to reach one that runs.
const UP_AGAIN: Duration = Duration::from_secs(10);
const UP_PAUSE: Duration = Duration::from_millis(100);
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Of a source's memory, for a clone. The source stands still while it is compared: for each GiB a fifth of a second.
const MOST_COPIED_BYTES: u64 = 4 << 30;
/// Between tries to start one again whose machine does not.
const RECOVERY_PAUSE: Duration = Duration::from_secs(10);
/// Of what a command says: the guest is its tenant's.
const MOST_SAID: usize = 64 << 10;
/// Characters of a reason.
const MOST_TOLD: usize = 300;
/// What is done to PostgreSQL from outside of it; see `templates/postgres.toml`.
const SCRIPT: &str = "atoll-postgres ";

/// Whether the machine of an attempt before will do.
fn is_made(machine: Option<(State, Target)>) -> bool {
    matches!(machine, Some((state, target)) if state != State::Creating && target != Target::Deleted)
}

fn keep_some(said: &mut Vec<u8>, bytes: &[u8]) {
    let room = MOST_SAID.saturating_sub(said.len());
    said.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

/// To be shown to whoever has the database: its guest is theirs.
fn failed(command: &str, said: &str) -> Error {
    let Some(verb) = command.strip_prefix(SCRIPT) else {
        return Error::internal(format!("`{command}` failed in a database: {said}"));
    };
    let verb = verb.split(' ').next().unwrap_or_default();
    let last =
        said.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("no reason told");
    let why: String = last.chars().take(MOST_TOLD).collect();
    Error::busy(format!("PostgreSQL did not {verb}: {why}"), 5).because(said.to_owned())
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
        loop {
            let needs_help = match self.sandboxes.state_of(&account, &sandbox) {
                // It was not brought up, and may recover meanwhile.
                Some((State::Running, Target::Running)) => entry.look(|row| row.error.is_some()),
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
            let (account, sandbox) = entry.sandbox();
            let state = self.sandboxes.state_of(&account, &sandbox);
            if !matches!(state, Some((State::Running, Target::Running))) {
                // Whoever wakes it brings it up.
                sleep(LOOK_EVERY).await;
                continue;
            }
            if let Err(error) = self.bring_up(entry).await {
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

    /// Its machine runs and PostgreSQL takes connections when this returns, whatever was before. Idempotent.
    pub(super) async fn bring_up(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let asked = Instant::now();
        let mut last = entry.brought_up.lock().await;
        // Many may have waited here, and each look costs a login.
        if let Some((_, failed)) = last.as_ref().filter(|(began, _)| *began >= asked) {
            return failed.as_ref().map_or(Ok(()), |message| Err(Error::busy(message.clone(), 2)));
        }
        let began = Instant::now();
        let outcome = self.bring_up_now(entry).await;
        let failed = outcome.as_ref().err().map(|error| error.message.clone());
        if failed.is_some() {
            entry.change(|row| row.error.clone_from(&failed));
        }
        *last = Some((began, failed));
        outcome
    }

    async fn bring_up_now(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let (account, sandbox) = entry.sandbox();
        let state = || self.sandboxes.state_of(&account, &sandbox).map(|(state, _)| state);
        let mut until = None;
        loop {
            let before = state();
            let mut ended = pin!(self.sandboxes.machine_end(&account, &sandbox));
            let Err(error) = self.try_to_bring_up(entry).await else { return Ok(()) };
            // What ran has ended: it is known to be off in a moment, and is started then.
            let has_ended = match before {
                Some(State::Running | State::Paused) => poll!(ended.as_mut()).is_ready(),
                Some(State::Creating | State::Hibernated) => {
                    matches!(state(), Some(State::Stopped | State::Failed))
                }
                Some(State::Stopped | State::Failed) | None => false,
            };
            if !has_ended || Instant::now() > *until.get_or_insert(Instant::now() + UP_AGAIN) {
                return Err(error);
            }
            sleep(UP_PAUSE).await;
        }
    }

    async fn try_to_bring_up(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        let _turn = entry.turn.lock().await;
        let (account, sandbox) = entry.sandbox();
        let _in_use = self.sandboxes.keep_running(&account, &sandbox).await?;
        tokio::select! {
            admin = self.admin(entry) => drop(admin?),
            () = self.sandboxes.machine_end(&account, &sandbox) => {
                return Err(Error::busy("the database's machine has just ended", 2));
            }
        }
        entry.change(|row| {
            row.error = None;
            row.settle();
        });
        Ok(())
    }

    /// A session of the server's own, in a database that has its own credentials then.
    pub(super) async fn admin(&self, entry: &Entry) -> Result<Admin, Error> {
        let (own, origin) = entry.look(|row| (row.credentials.clone(), row.origin.clone()));
        let mut either = [&own, &origin];
        // Each login costs much in a guest that has just been restored.
        if entry.look(|row| row.state) == DatabaseState::Provisioning {
            either.reverse();
        }
        let until = Instant::now() + UP_DEADLINE;
        loop {
            let mut wrong = 0;
            for credentials in either {
                match self.login(entry, &credentials.admin_password).await {
                    Ok(admin) => {
                        if credentials.admin_password != own.admin_password {
                            admin.make_own(&origin, &own).await?;
                        }
                        // Also after a change whose end nobody has seen.
                        if entry.look(|row| row.state) == DatabaseState::Ready {
                            self.tell_sandboxes(entry);
                        }
                        return Ok(admin);
                    }
                    Err(Refused::WrongPassword) => wrong += 1,
                    Err(Refused::Other(error)) => return Err(error),
                    Err(Refused::NotYet) => break,
                }
            }
            if wrong == either.len() {
                return Err(Error::internal(
                    "PostgreSQL knows neither the database's password nor that of its origin",
                ));
            }
            if Instant::now() > until {
                return Err(Error::busy("PostgreSQL does not take connections yet", 5));
            }
            sleep(UP_PAUSE).await;
        }
    }

    async fn login(&self, entry: &Entry, password: &str) -> Result<Admin, Refused> {
        match self.try_to_dial(entry).await {
            Some(Ok(stream)) => Admin::login(stream, "postgres", password).await,
            // After a boot, or a crash of PostgreSQL alone.
            Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                self.start_postgres(entry).await.map_err(Refused::Other)?;
                Err(Refused::NotYet)
            }
            Some(Err(_)) => Err(Refused::NotYet),
            None => Err(Refused::Other(Error::busy("the database's machine does not run", 2))),
        }
    }

    /// Returns once it takes connections, or recovers.
    async fn start_postgres(&self, entry: &Entry) -> Result<(), Error> {
        tracing::info!(database = %entry.id(), "starting PostgreSQL");
        let started = self.run_inside_within(entry, "atoll-postgres start", START_DEADLINE);
        match timeout(UP_DEADLINE, started).await {
            Ok(started) => started.map(drop),
            // It goes on by itself.
            Err(_) => Err(Error::busy("PostgreSQL does not take connections yet", 5)),
        }
    }

    /// What a command that succeeds in its machine has said.
    pub(super) async fn run_inside(&self, entry: &Entry, command: &str) -> Result<String, Error> {
        self.run_inside_within(entry, command, UP_DEADLINE).await
    }

    pub(super) async fn run_inside_within(
        &self,
        entry: &Entry,
        command: &str,
        deadline: Duration,
    ) -> Result<String, Error> {
        let (account, sandbox) = entry.sandbox();
        let inside = self.sandboxes.inside_now(&account, &sandbox)?;
        let request = ExecRequest {
            cmd: command.to_owned(),
            timeout_seconds: Some(deadline.as_secs_f64()),
            ..ExecRequest::default()
        };
        let mut watch = inside.start_exec(request).await?;
        let mut said = Vec::new();
        while let Some(event) = watch.next().await {
            match event? {
                ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => keep_some(&mut said, &bytes),
                ExecEvent::Ended(status) => {
                    let said = String::from_utf8_lossy(&said).into_owned();
                    if status.exit_code == Some(0) {
                        return Ok(said);
                    }
                    return Err(failed(command, &said));
                }
            }
        }
        Err(Error::internal(format!("`{command}` was not seen to end in a database")))
    }

    pub(super) async fn renew(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Error> {
        self.bring_up(entry).await?;
        let _turn = entry.turn.lock().await;
        let (account, sandbox) = entry.sandbox();
        let _in_use = self.sandboxes.use_of(&account, &sandbox)?;
        let before = entry.look(|row| row.credentials.clone());
        let after = before.renewed();
        let admin = self.admin(entry).await?;
        // Both are known to the row until PostgreSQL has the new ones: whatever dies in between, the next login finds out
        // which it is, and makes them the new ones.
        entry.change(|row| {
            row.origin = before.clone();
            row.credentials = after.clone();
        });
        if let Err(error) = self.save(entry).await {
            entry.change(|row| row.credentials = before);
            return Err(error);
        }
        fault::point!("renew.row_written", Error::internal);
        let renewed = admin.renew(&after).await;
        // Whether it has them or gets them in a moment: nobody stays who came with the old ones.
        entry.end_sessions();
        self.tell_sandboxes(entry);
        renewed?;
        fault::point!("renew.renewed");
        entry.change(DatabaseRow::settle);
        if let Err(error) = self.save(entry).await {
            // The next server looks once more.
            tracing::warn!(database = %entry.id(), cause = error.causes(), "failed to write down that passwords have changed");
        }
        tracing::info!(database = %entry.id(), "changed its credentials");
        Ok(())
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

    #[test]
    fn why_postgresql_does_not_start_is_told_in_a_sentence() {
        let told = failed("atoll-postgres start", "LOG: starting\nFATAL: no such thing\n\n");
        assert_eq!(told.message, "PostgreSQL did not start: FATAL: no such thing");
        let told = failed("atoll-postgres recover 'then' 'secret'", &"x".repeat(2 * MOST_TOLD));
        assert_eq!(told.message, format!("PostgreSQL did not recover: {}", "x".repeat(MOST_TOLD)));
        assert!(!failed("stat -f /", "its own affair").message.contains("own affair"));
    }

    #[test]
    fn of_what_a_command_says_only_so_much_is_kept() {
        let mut said = Vec::new();
        keep_some(&mut said, b"first");
        for _ in 0..3 {
            keep_some(&mut said, &[0; MOST_SAID / 2]);
        }
        assert_eq!(said.len(), MOST_SAID);
        assert!(said.starts_with(b"first"));
    }
}
