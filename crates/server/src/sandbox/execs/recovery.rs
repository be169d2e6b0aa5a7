//! Execs of before: their server has died, their sandbox has hibernated, or their connection was lost.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use api::{ExecId, ExecState, ExecStream, SandboxId};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use machine::guest::{ExecState as GuestState, ExecStatus, Guest, Reply, Request, Stream};

use super::{Exec, Execs, Origin, id_of_own, is_own};
use crate::{
    Error,
    blocking::blocking,
    db::{Db, ExecPlace, ExecRow},
    sandbox::{
        Logs, Sandboxes,
        exec::Watched,
        logs::{LONGEST_LOG, LogWriter, Seen},
        registry::{Entry, locked},
        state::{State, Target},
        usage::Usage,
    },
};

const LIST_DEADLINE: Duration = Duration::from_secs(30);
/// How soon an exec that nobody watches is looked for again.
const LOOK_EVERY: Duration = Duration::from_secs(2);
/// Of the rows from which a log is made again.
const LOGGED: usize = 200;

/// What of a guest's commands is new to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// All that the log has not seen: of a sandbox that was left for a while, by its server or to hibernate.
    Seen,
    /// What comes from now on: of a sandbox that was made from a snapshot, whose past is another's.
    Now,
}

/// Where what a sandbox's commands print goes.
#[derive(Clone)]
pub(crate) struct Takers {
    pub(crate) logs: Arc<Logs>,
    pub(crate) usage: Arc<Usage>,
    /// `None`: only to the log.
    pub(crate) execs: Option<(Db, Arc<Execs>)>,
}

impl Sandboxes {
    fn takers(&self, entry: &Entry) -> Takers {
        Takers {
            logs: Arc::clone(&entry.logs),
            usage: Arc::clone(&entry.usage),
            execs: Some((self.db.clone(), Arc::clone(&entry.execs))),
        }
    }

    /// Those that run already, wherever they were started: their output is kept and logged, and given free at their end.
    pub(in crate::sandbox) async fn watch_commands(&self, entry: &Entry) {
        let Some(guest) = entry.guest() else { return };
        if let Err(error) = watch_again(&guest, &self.takers(entry), Since::Seen).await {
            tracing::warn!(%error, cause = error.causes(), "commands of before are not watched yet");
        }
    }

    /// What ran when the snapshot was taken runs here as well. Behind the answer: nobody waits for it.
    pub(in crate::sandbox) fn watch_inherited(&self, entry: &Entry) {
        let is_inherited = entry.look(|row| row.from_snapshot.is_some());
        let Some(guest) = entry.guest().filter(|_| is_inherited) else { return };
        let takers = Takers { execs: None, ..self.takers(entry) };
        self.tasks.spawn(async move {
            if let Err(error) = watch_again(&guest, &takers, Since::Now).await {
                tracing::warn!(%error, cause = error.causes(), "commands of a snapshot are not in the log");
            }
        });
    }

    /// Whatever made that nobody listens to an exec any longer: someone does again. What was printed lately is written down.
    pub(in crate::sandbox) async fn look_after_execs(self: Arc<Self>) {
        loop {
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = self.closed.cancelled() => return,
            }
            for entry in self.registry.all() {
                entry.execs.write_out().await;
                let runs =
                    entry.look(|row| (row.state, row.target) == (State::Running, Target::Running));
                let is_heard = entry.guest().is_some_and(|guest| !guest.is_lost());
                if runs && is_heard && entry.execs.has_unwatched() {
                    self.watch_commands(&entry).await;
                }
            }
        }
    }

    /// Before any machine is found again.
    pub(in crate::sandbox) async fn recover_execs(
        &self,
        entries: &[Arc<Entry>],
    ) -> Result<(), Error> {
        self.db.delete_stray_execs().await?;
        let sums = self.db.exec_sums().await?;
        let mut running: BTreeMap<SandboxId, Vec<ExecRow>> = BTreeMap::new();
        for row in self.db.running_execs().await? {
            running.entry(row.sandbox).or_default().push(row);
        }
        for entry in entries {
            let (id, execs) = (entry.look(|row| row.id), &entry.execs);
            execs.remember(sums.get(&id).copied().unwrap_or_default());
            let (files, mut kept) = (execs.files.clone(), self.db.execs_with_files(&id).await?);
            fault::point!("sweep.exec_output_removing", Error::internal);
            kept.sort_unstable();
            blocking(move || files.remove_all_but(&kept)).await?;
            for row in running.remove(&id).into_iter().flatten() {
                execs.take_up(row, Origin::Client, &entry.logs).await?;
            }
        }
        Ok(())
    }

    /// What a sandbox's log had before this server goes in front of it, once someone asks.
    pub(in crate::sandbox) async fn restore_log(&self, entry: &Entry) -> Result<(), Error> {
        let mut restored = entry.execs.log_restored.lock().await;
        if !*restored {
            let id = entry.look(|row| row.id);
            let began = entry.execs.shared.began;
            let mut writer = LogWriter::apart();
            let mut rows = self.db.execs(&id, i64::MAX, LOGGED).await?;
            rows.retain(|row| row.ended_steady.is_some_and(|ended| ended < began));
            // Newest first, until the log is full.
            let mut length = 0;
            rows.retain(|row| {
                length += row.kept_bytes;
                length <= LONGEST_LOG as u64
            });
            for row in rows.iter().rev() {
                for stream in ExecStream::ALL {
                    writer.write(stream, &self.kept_output(entry, row, stream).await?);
                    writer.end_line(stream);
                }
            }
            entry.logs.put_before(writer);
            *restored = true;
        }
        Ok(())
    }

    async fn kept_output(
        &self,
        entry: &Entry,
        row: &ExecRow,
        stream: ExecStream,
    ) -> Result<Vec<u8>, Error> {
        match row.output {
            ExecPlace::None | ExecPlace::Aged => Ok(Vec::new()),
            ExecPlace::Row => {
                let short = self.db.short_output(&row.sandbox, &row.id).await?;
                let text = match stream {
                    ExecStream::Stdout => short.stdout,
                    ExecStream::Stderr => short.stderr,
                };
                BASE64.decode(text).map_err(Error::internal)
            }
            ExecPlace::Files => {
                let (files, id) = (entry.execs.files.clone(), row.id.clone());
                blocking(move || files.read(&id, stream, 0, LONGEST_LOG)).await
            }
        }
    }
}

/// What commands that run already have printed and will print goes to those who take it, and each is forgotten at its
/// end. Of its own execs, those that the guest does not know are lost.
pub(crate) async fn watch_again(guest: &Guest, takers: &Takers, since: Since) -> Result<(), Error> {
    // Before the guest is asked: one that is started meanwhile is none of these.
    let unwatched = takers.execs.as_ref().map(|(_, execs)| execs.unwatched()).unwrap_or_default();
    let Reply::Execs(listed) = guest.call(Request::ExecList, LIST_DEADLINE).await? else {
        return Err(machine::Error::Misbehaved("a list of execs was something else").into());
    };
    let all: BTreeSet<_> = listed.iter().map(|(id, _)| id.as_str()).collect();
    takers.logs.keep_seen(&all);
    if let Some((_, execs)) = &takers.execs {
        for exec in unwatched.iter().filter(|exec| !all.contains(exec.guest_id().as_str())) {
            tracing::warn!(sandbox = %execs.sandbox, exec = %exec.id, "its guest does not know this exec");
            if exec.lose() {
                execs.note_end(Arc::clone(exec), None);
            }
        }
    }
    let mut over = Vec::new();
    for (id, status) in listed {
        let watched = match &takers.execs {
            Some((db, execs)) if is_own(&execs.sandbox, &id) => {
                own(guest, takers, db, execs, id, &status).await?
            }
            Some(_) | None => Some(foreign(guest, takers, id, &status, since)?),
        };
        match watched {
            Some(watched) if status.state == GuestState::Running => {
                tokio::spawn(watched.take_in());
            }
            Some(watched) => over.push(watched),
            None => {}
        }
    }
    // One after the other, as they were started: so the log has them in their order.
    tokio::spawn(async move {
        for watched in over {
            watched.take_in().await;
        }
    });
    Ok(())
}

/// One that this sandbox has started.
async fn own(
    guest: &Guest,
    takers: &Takers,
    db: &Db,
    execs: &Arc<Execs>,
    id: String,
    status: &ExecStatus,
) -> Result<Option<Watched>, Error> {
    let live = execs.all_live().into_iter().find(|exec| exec.guest_id() == id);
    let exec = match live {
        // Its end is about to be written down, and then the guest is told.
        Some(exec) if exec.has_ended() => return Ok(None),
        Some(exec) => exec,
        None => {
            let Some(exec_id) = id_of_own(&execs.sandbox, &id) else { return Ok(None) };
            if db.exec(&execs.sandbox, &exec_id).await?.is_some() {
                // The guest was not told, or was saved before it was.
                guest.forget_exec(id);
                return Ok(None);
            }
            match execs.adopt(exec_id, status, &takers.logs).await? {
                Some(exec) => exec,
                None => return Ok(None),
            }
        }
    };
    if !exec.begin_watching() {
        return Ok(None);
    }
    let (stdout_offset, stderr_offset) = exec.received();
    let request = Request::ExecWatch { id: id.clone(), stdout_offset, stderr_offset };
    match guest.open(request) {
        Ok(stream) => {
            let log = exec.take_log();
            let mut watched = watched(guest, takers, id, stream, log);
            watched.exec = Some(exec);
            Ok(Some(watched))
        }
        Err(error) => {
            exec.end_watching();
            Err(error.into())
        }
    }
}

/// Of another sandbox that this one was made from: only its output is of interest.
fn foreign(
    guest: &Guest,
    takers: &Takers,
    id: String,
    status: &ExecStatus,
    since: Since,
) -> Result<Watched, Error> {
    let logs = &takers.logs;
    if since == Since::Now {
        logs.set_seen(&id, Seen { stdout: status.stdout_bytes, stderr: status.stderr_bytes });
    }
    let Seen { stdout, stderr } = logs.seen(&id);
    let request =
        Request::ExecWatch { id: id.clone(), stdout_offset: stdout, stderr_offset: stderr };
    let stream = guest.open(request)?;
    Ok(watched(guest, takers, id, stream, None))
}

fn watched(
    guest: &Guest,
    takers: &Takers,
    id: String,
    stream: Stream,
    log: Option<LogWriter>,
) -> Watched {
    Watched {
        id,
        guest: guest.clone(),
        stream: Arc::new(stream),
        logs: Arc::clone(&takers.logs),
        log: log.unwrap_or_else(|| takers.logs.writer()),
        exec: None,
        writing: None,
        deadline: None,
        _in_use: Some(Arc::new(takers.usage.begin())),
    }
}

impl Execs {
    /// Running ones that nobody listens to.
    fn unwatched(&self) -> Vec<Arc<Exec>> {
        let live = self.all_live().into_iter();
        live.filter(|exec| !exec.has_ended() && !exec.is_watched()).collect()
    }

    fn has_unwatched(&self) -> bool {
        locked(&self.live).by_id.values().any(|exec| !exec.has_ended() && !exec.is_watched())
    }

    /// Its guest runs it, and no row tells of it: an earlier server was to write one at its end.
    async fn adopt(
        self: &Arc<Self>,
        id: ExecId,
        status: &ExecStatus,
        logs: &Arc<Logs>,
    ) -> Result<Option<Arc<Exec>>, Error> {
        let ago = i64::try_from(status.duration_ms).unwrap_or(i64::MAX);
        let row = ExecRow {
            sandbox: self.sandbox,
            id,
            place: self.shared.place.fetch_add(1, Ordering::Relaxed),
            state: ExecState::Running,
            exit_code: None,
            killed_for_memory: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            truncated: false,
            started_at: self.shared.clock.now_ms().saturating_sub(ago),
            finished_at: None,
            ended_steady: None,
            output: ExecPlace::None,
            kept_bytes: 0,
        };
        self.take_up(row, Origin::Server, logs).await
    }

    /// One that an earlier server began: its files have the beginning of its output. `None`: the sandbox is gone.
    async fn take_up(
        self: &Arc<Self>,
        row: ExecRow,
        origin: Origin,
        logs: &Arc<Logs>,
    ) -> Result<Option<Arc<Exec>>, Error> {
        let (files, id, mut log) = (self.files.clone(), row.id.clone(), logs.writer());
        let (lengths, log) = blocking(move || {
            let mut lengths = [0; 2];
            for (length, stream) in lengths.iter_mut().zip(ExecStream::ALL) {
                *length = files.length(&id, stream)?;
                let logged = length.saturating_sub(LONGEST_LOG as u64);
                log.write(stream, &files.read(&id, stream, logged, LONGEST_LOG)?);
            }
            Ok((lengths, log))
        })
        .await?;
        let began = (row.place, row.started_at);
        let exec = Arc::new(Exec::new(Arc::clone(self), row.id.clone(), origin, began, lengths));
        exec.begin_log(log);
        let mut live = locked(&self.live);
        if live.closed {
            return Ok(None);
        }
        self.kept_bytes.fetch_add(lengths.iter().sum(), Ordering::Relaxed);
        Ok(Some(Arc::clone(live.by_id.entry(row.id).or_insert(exec))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::execs::guest_id;

    #[test]
    fn an_id_of_the_guest_leads_back_to_its_exec() {
        let sandbox = SandboxId::random();
        let id: ExecId = "mount-1".parse().unwrap();
        assert_eq!(id_of_own(&sandbox, &guest_id(&sandbox, &id)), Some(id));
        assert_eq!(id_of_own(&sandbox, "mount-1"), None);
    }
}
