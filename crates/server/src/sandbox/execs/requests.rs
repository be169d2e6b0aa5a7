//! What clients ask of exec objects.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{AccountId, ErrorCode, ExecId, ExecRequest, ExecState, ExecStream, SandboxId, StartExec};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use machine::guest::{ExecStart, Request};
use tokio::time::Instant;

use super::{Exec, Execs, Origin, kept::Piece, taken};
use crate::{
    Error,
    blocking::blocking,
    clock,
    db::{Db, ExecPlace, ExecRow},
    sandbox::{
        Running, Sandboxes,
        exec::{Fields, NotStarted},
        state::Wish,
    },
};

/// Of a script that names none.
const DEFAULT_TIMEOUT: f64 = 120.0;
const FIELDS: Fields =
    Fields { command: "script", timeout: "timeout_sec", default_timeout: "120 seconds" };
/// A short script comes back finished, so that its client need not ask again.
const WAIT_AT_START: Duration = Duration::from_millis(300);
/// So does the answer to the first question about one.
const YOUNG: Duration = Duration::from_secs(2);
const WAIT_WHILE_YOUNG: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);
/// From TERM to KILL.
const GRACE: Duration = Duration::from_secs(5);
/// For what a killed command takes to be gone, beyond the grace.
const AFTER_GRACE: Duration = Duration::from_secs(5);
const CANCEL_DEADLINE: Duration = Duration::from_secs(15);
const CANCEL_AGAIN: Duration = Duration::from_millis(100);
const DEFAULT_COUNT: usize = 50;
const MOST_LISTED: usize = 1000;
const DEFAULT_PAGE: usize = 64 << 10;
const LONGEST_PAGE: usize = 1 << 20;

/// What became of a start.
#[derive(Debug)]
pub(crate) enum Started {
    Is(api::Exec),
    /// It may run, or not: only asking for this exec tells.
    May(ExecId, Error),
}

/// Which part of the output is asked for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Page {
    pub(crate) stream: ExecStream,
    pub(crate) offset: u64,
    pub(crate) limit: Option<usize>,
    /// How long to wait for more where there is nothing.
    pub(crate) wait: Duration,
}

impl Sandboxes {
    /// Waits a moment for its end.
    ///
    /// # Errors
    /// 400 names the bad field; 404, 409 and 503 as of [`Sandboxes::running`]; 409 also when there is or was an exec with this
    /// id: nothing was started, whatever the error.
    pub(crate) async fn start_exec(
        &self,
        account: &AccountId,
        id: &SandboxId,
        request: StartExec,
        wait: Option<Duration>,
    ) -> Result<Started, Error> {
        let exec_id = request.exec_id.clone().unwrap_or_else(ExecId::random);
        let request = as_command(request);
        let running = self.running(account, id).await?;
        let execs = self.execs_of(account, id)?;
        let start = running.prepare(&request, &FIELDS)?;
        let exec = execs.begin(exec_id.clone(), Origin::Client)?;
        // Whoever asked may go away meanwhile, also before its row is written; what has begun comes to its end.
        let starting = {
            let (exec, db) = (Arc::clone(&exec), self.db.clone());
            self.tasks.spawn(async move { begin(&db, &running, start, request.stdin, &exec).await })
        };
        match starting.await.map_err(Error::internal)? {
            Ok(()) => {
                exec.wait_for_the_end(wait.unwrap_or(WAIT_AT_START).min(LONGEST_WAIT)).await;
                fault::point!("execs.answering");
                Ok(Started::Is(shown(exec.row())))
            }
            Err(NotStarted::Refused(error)) => Err(self.explain(account, id, error)),
            Err(NotStarted::Uncertain(error)) => Ok(Started::May(exec_id, error)),
        }
    }

    /// # Errors
    /// 404 when there never was one, or no such sandbox; 410 when it has aged out.
    pub(crate) async fn exec(
        &self,
        account: &AccountId,
        id: &SandboxId,
        exec_id: &str,
        wait: Option<Duration>,
    ) -> Result<api::Exec, Error> {
        let (execs, exec_id) = (self.execs_of(account, id)?, parse_id(exec_id)?);
        if let Some(exec) = execs.live(&exec_id) {
            let young = if exec.age() < YOUNG { WAIT_WHILE_YOUNG } else { Duration::ZERO };
            exec.wait_for_the_end(wait.unwrap_or(young).min(LONGEST_WAIT)).await;
            // Its sandbox may have gone meanwhile.
            self.execs_of(account, id)?;
            return Ok(shown(exec.row()));
        }
        Ok(shown(self.kept_exec(id, &exec_id).await?))
    }

    async fn kept_exec(&self, id: &SandboxId, exec_id: &ExecId) -> Result<ExecRow, Error> {
        let row = self.db.exec(id, exec_id).await?.ok_or_else(no_exec)?;
        if row.output == ExecPlace::Aged {
            return Err(Error::new(
                ErrorCode::Gone,
                format!("the exec `{exec_id}` ended so long ago that nothing is kept of it"),
            ));
        }
        Ok(row)
    }

    /// Newest first.
    ///
    /// # Errors
    /// 404 when there is no such sandbox.
    pub(crate) async fn execs(
        &self,
        account: &AccountId,
        id: &SandboxId,
        limit: Option<usize>,
    ) -> Result<Vec<api::Exec>, Error> {
        let execs = self.execs_of(account, id)?;
        let limit = limit.unwrap_or(DEFAULT_COUNT).min(MOST_LISTED);
        // Before the rows: what is written down meanwhile is in both.
        let live: Vec<ExecRow> = execs.all_live().iter().map(|exec| exec.row()).collect();
        let kept = self.db.execs(id, i64::MAX, limit).await?;
        let place = |row: ExecRow| ((row.place, row.id.clone()), row);
        let mut rows: BTreeMap<(i64, ExecId), ExecRow> = kept.into_iter().map(place).collect();
        rows.extend(live.into_iter().map(place));
        Ok(rows.into_values().rev().take(limit).map(shown).collect())
    }

    /// TERM, a grace, KILL; answered once it is gone, or a little after it should be. Idempotent.
    ///
    /// # Errors
    /// As of [`Sandboxes::exec`]; 409 and 503 when its sandbox is not running.
    pub(crate) async fn cancel_exec(
        &self,
        account: &AccountId,
        id: &SandboxId,
        exec_id: &str,
        wait: Option<Duration>,
    ) -> Result<api::Exec, Error> {
        let (execs, exec_id) = (self.execs_of(account, id)?, parse_id(exec_id)?);
        let Some(exec) = execs.live(&exec_id) else {
            return Ok(shown(self.kept_exec(id, &exec_id).await?));
        };
        let grace_ms = u32::try_from(GRACE.as_millis()).unwrap_or(u32::MAX);
        let until = Instant::now() + CANCEL_DEADLINE;
        while !exec.has_ended() {
            let running = self.running(account, id).await?;
            fault::point!("execs.cancelling", Error::internal);
            let request = Request::ExecCancel { id: exec.guest_id(), grace_ms };
            match running.guest.call(request, CANCEL_DEADLINE).await.map_err(Error::from) {
                Ok(_) => break,
                // On its way to the guest still, or just ended there.
                Err(error) if error.code == ErrorCode::NotFound && Instant::now() < until => {
                    exec.wait_for_the_end(CANCEL_AGAIN).await;
                }
                Err(error) => return Err(self.explain(account, id, error)),
            }
        }
        fault::point!("execs.cancelled");
        exec.wait_for_the_end(wait.unwrap_or(GRACE + AFTER_GRACE).min(LONGEST_WAIT)).await;
        Ok(shown(exec.row()))
    }

    /// # Errors
    /// As of [`Sandboxes::exec`].
    pub(crate) async fn exec_output(
        &self,
        account: &AccountId,
        id: &SandboxId,
        exec_id: &str,
        page: Page,
    ) -> Result<api::ExecOutput, Error> {
        let (execs, exec_id) = (self.execs_of(account, id)?, parse_id(exec_id)?);
        fault::point!("execs.output_reading", Error::internal);
        let Page { stream, offset, .. } = page;
        let limit = page.limit.unwrap_or(DEFAULT_PAGE).clamp(1, LONGEST_PAGE);
        let (bytes, eof) = match execs.live(&exec_id) {
            Some(exec) => {
                let wait = page.wait.min(LONGEST_WAIT);
                exec.wait_for_output(stream, offset, wait).await;
                match exec.read(stream, offset, limit) {
                    (Piece::Nothing, eof) => (Vec::new(), eof),
                    (Piece::Bytes(bytes), eof) => (bytes.to_vec(), eof),
                    (Piece::InFile { length }, eof) => {
                        (in_files(&execs, &exec_id, stream, offset, length).await?, eof)
                    }
                }
            }
            None => {
                let row = self.kept_exec(id, &exec_id).await?;
                let bytes = match row.output {
                    ExecPlace::None | ExecPlace::Aged => Vec::new(),
                    ExecPlace::Row => self.in_row(id, &exec_id, stream, offset, limit).await?,
                    // One byte more tells whether there is more.
                    ExecPlace::Files => {
                        in_files(&execs, &exec_id, stream, offset, limit + 1).await?
                    }
                };
                let eof = row.state != ExecState::Running && bytes.len() <= limit;
                (bytes.into_iter().take(limit).collect(), eof)
            }
        };
        Ok(api::ExecOutput {
            stream,
            offset,
            next_offset: offset.saturating_add(bytes.len() as u64),
            data: BASE64.encode(bytes),
            eof,
        })
    }

    async fn in_row(
        &self,
        id: &SandboxId,
        exec_id: &ExecId,
        stream: ExecStream,
        offset: u64,
        limit: usize,
    ) -> Result<Vec<u8>, Error> {
        let short = self.db.short_output(id, exec_id).await?;
        let text = match stream {
            ExecStream::Stdout => short.stdout,
            ExecStream::Stderr => short.stderr,
        };
        let bytes = BASE64.decode(text).map_err(Error::internal)?;
        let skipped = usize::try_from(offset).unwrap_or(usize::MAX);
        Ok(bytes.into_iter().skip(skipped).take(limit.saturating_add(1)).collect())
    }

    fn execs_of(&self, account: &AccountId, id: &SandboxId) -> Result<Arc<Execs>, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        Ok(Arc::clone(&entry.execs))
    }
}

/// Its row is written before its guest is asked. What is refused can be asked for again.
async fn begin(
    db: &Db,
    running: &Running,
    start: ExecStart,
    stdin: Option<String>,
    exec: &Arc<Exec>,
) -> Result<(), NotStarted> {
    let outcome = match reserve(db, exec).await {
        Ok(()) => {
            fault::point!("execs.reserved");
            let outcome = running.start(start, stdin, Some(Arc::clone(exec))).await.map(drop);
            if let Err(NotStarted::Refused(_)) = &outcome
                && let Err(error) = db.delete_exec(&exec.of().sandbox, &exec.id).await
            {
                tracing::warn!(sandbox = %exec.of().sandbox, exec = %exec.id, cause = error.causes(), "an exec that never ran stays listed");
            }
            outcome
        }
        Err(error) => Err(NotStarted::Refused(error)),
    };
    if let Err(NotStarted::Refused(_)) = &outcome {
        exec.of().withdraw(exec);
    }
    outcome
}

/// From here on the id is taken for ever.
async fn reserve(db: &Db, exec: &Exec) -> Result<(), Error> {
    fault::point!("execs.reserving", Error::internal);
    if db.insert_exec(&ExecRow { kept_bytes: 0, ..exec.row() }).await? {
        return Ok(());
    }
    Err(taken(&exec.id))
}

async fn in_files(
    execs: &Execs,
    id: &ExecId,
    stream: ExecStream,
    offset: u64,
    limit: usize,
) -> Result<Vec<u8>, Error> {
    let (files, id) = (execs.files.clone(), id.clone());
    blocking(move || files.read(&id, stream, offset, limit)).await
}

fn as_command(request: StartExec) -> ExecRequest {
    ExecRequest {
        cmd: request.script,
        timeout_seconds: Some(request.timeout_sec.unwrap_or(DEFAULT_TIMEOUT)),
        cwd: request.cwd,
        env: request.env,
        user: request.user,
        stdin: request.stdin,
    }
}

/// What is no id belongs to no exec.
fn parse_id(text: &str) -> Result<ExecId, Error> {
    text.parse().map_err(|_| no_exec())
}

fn no_exec() -> Error {
    Error::not_found("there is no exec with this id in this machine; list them with GET …/execs")
}

fn shown(row: ExecRow) -> api::Exec {
    api::Exec {
        exec_id: row.id,
        machine_id: row.sandbox,
        state: row.state,
        exit_code: row.exit_code,
        stdout_bytes: row.stdout_bytes,
        stderr_bytes: row.stderr_bytes,
        truncated: row.truncated,
        started_at: clock::from_ms(row.started_at),
        finished_at: row.finished_at.map(clock::from_ms),
        killed: row.killed_for_memory.then(|| "memory".to_owned()),
    }
}
