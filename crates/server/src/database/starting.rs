//! From whatever a database is to PostgreSQL that takes connections, with passwords of its own.

use std::{io, pin::pin, sync::Arc, time::Duration};

use futures::poll;
use tokio::time::{Instant, sleep, timeout};

use super::{
    DatabaseState, Databases, Entry,
    admin::{Admin, Refused},
};
use crate::{Error, db::DatabaseRow, sandbox::State};

/// From a running machine to PostgreSQL that takes connections. A recovery that takes longer goes on meanwhile.
const UP_DEADLINE: Duration = Duration::from_secs(300);
/// What is late is ended with all that it has started, and a recovery would begin anew: longer than any of them.
const START_DEADLINE: Duration = Duration::from_secs(3600);
/// From a first failure to reach one that runs.
const UP_AGAIN: Duration = Duration::from_secs(10);
const UP_PAUSE: Duration = Duration::from_millis(100);
/// Of what a command says: the guest is its tenant's.
const MOST_SAID: usize = 64 << 10;
const LEVELS: [&str; 2] = ["PANIC: ", "FATAL: "];
/// What else may say why the script failed.
const TOOLS: [&str; 5] = ["pg_", "cat: ", "install: ", "mount: ", "mv: "];
/// Said of one that starts or recovers.
const NOT_YET: &str = "PostgreSQL does not take connections yet";
/// Characters of a reason, and of what is logged with it.
const MOST_TOLD: usize = 300;
const MOST_LOGGED: usize = 2000;
/// What is done to PostgreSQL from outside of it; see `templates/postgres.toml`.
const SCRIPT: &str = "atoll-postgres ";

/// PostgreSQL's lines begin with a time, and may be followed by statements, which are nobody's affair.
fn reason(line: &str) -> Option<&str> {
    let of_postgres = LEVELS.iter().find_map(|level| Some(&line[line.find(level)?..]));
    of_postgres.or_else(|| TOOLS.iter().any(|tool| line.starts_with(tool)).then_some(line))
}

/// To be shown to whoever has the database: its guest is theirs.
fn failed(command: &str, said: &str) -> Error {
    let Some(verb) = command.strip_prefix(SCRIPT) else {
        return Error::internal(format!("`{command}` failed in a database: {said}"));
    };
    let verb = verb.split(' ').next().unwrap_or_default();
    let why = said.lines().rev().find_map(reason).unwrap_or("its log does not say why");
    let why: String = why.chars().take(MOST_TOLD).collect();
    let tail: String = said.chars().rev().take(MOST_LOGGED).collect();
    Error::busy(format!("PostgreSQL did not {verb}: {why}"), 5)
        .because(tail.chars().rev().collect::<String>())
}

impl Databases {
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
        self.find_up(entry).await
    }

    /// Another look at one whose machine runs, which it neither starts nor keeps from hibernating afterwards.
    pub(super) async fn look_again(&self, entry: &Entry) -> Result<(), Error> {
        let _turn = entry.turn.lock().await;
        let (account, sandbox) = entry.sandbox();
        let _in_use = self.sandboxes.unnoticed_use_of(&account, &sandbox)?;
        let outcome = self.find_up(entry).await;
        if outcome.as_ref().is_err_and(|error| error.message == NOT_YET) {
            // It recovers: that comes to its end before anything hibernates.
            drop(self.sandboxes.use_of(&account, &sandbox)?);
        }
        if let Err(error) = outcome.as_ref()
            && self.runs(entry)
        {
            entry.change(|row| row.error = Some(error.message.clone()));
        }
        outcome
    }

    /// Waits until PostgreSQL takes connections, for as long as its machine runs.
    async fn find_up(&self, entry: &Entry) -> Result<(), Error> {
        let (account, sandbox) = entry.sandbox();
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
                return Err(Error::busy(NOT_YET, 5));
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
            Err(_) => Err(Error::busy(NOT_YET, 5)),
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
        match inside.run_to_end(command, deadline, MOST_SAID).await? {
            (Some(0), said) => Ok(said),
            (_, said) => Err(failed(command, &said)),
        }
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_postgresql_does_not_start_is_told_in_a_sentence() {
        let log = "HINT:  elsewhere\n2026-11-30 12:00:00 UTC [7] FATAL:  no such thing\n\
                   2026-11-30 12:00:00 UTC [7] STATEMENT:  CREATE ROLE x PASSWORD 'secret'\n\n";
        let told = failed("atoll-postgres start", log);
        assert_eq!(told.message, "PostgreSQL did not start: FATAL:  no such thing");
        let told =
            failed("atoll-postgres recover 'then'", "x\npg_verifybackup: error: it differs\ny");
        assert_eq!(told.message, "PostgreSQL did not recover: pg_verifybackup: error: it differs");
        let long = format!("PANIC: {}", "x".repeat(2 * MOST_LOGGED));
        let told = failed("atoll-postgres recover 'then' 'secret'", &long).message;
        assert!(told.starts_with("PostgreSQL did not recover: PANIC: xxx"), "{told}");
        assert!(told.len() < MOST_TOLD + 50, "{told}");
        assert!(failed("atoll-postgres start", "").message.contains("does not say why"));
        assert!(!failed("stat -f /", "its own affair").message.contains("own affair"));
    }
}
