//! One exec that runs, or whose end is not written down yet.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use api::{ExecId, ExecState, ExecStream};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use machine::guest::{ExecState as GuestState, ExecStatus};
use tokio::{sync::watch, task::JoinHandle};

use super::{
    Execs,
    kept::{Kept, Piece, Spill},
};
use crate::{
    db::{ExecPlace, ExecRow, ShortOutput},
    sandbox::{logs::LogWriter, registry::locked},
};

/// So much of a stream waits in memory before it goes to a file.
const IN_MEMORY: usize = 64 << 10;
/// The same while all execs of the server have much.
const IN_MEMORY_WHEN_SHORT: usize = 1 << 10;
/// What all of them may have before memory counts as short.
const MUCH: usize = 64 << 20;
/// Output that is no longer goes into the row.
const SHORT: usize = 4 << 10;

/// Who chose its id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Its row was written before its guest was asked.
    Client,
    /// Its row is written once it has ended.
    Server,
}

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) id: ExecId,
    pub(super) place: i64,
    pub(super) origin: Origin,
    started_at: i64,
    of: Arc<Execs>,
    inner: Mutex<Inner>,
    progress: watch::Sender<Progress>,
    /// Someone takes in what it prints.
    watched: AtomicBool,
    /// Has what an earlier server had of it, until someone goes on.
    log: Mutex<Option<LogWriter>>,
}

#[derive(Debug)]
struct Inner {
    stdout: Kept,
    stderr: Kept,
    end: Option<End>,
}

#[derive(Debug, Clone)]
struct End {
    state: ExecState,
    exit_code: Option<i32>,
    killed_for_memory: bool,
    stdout_bytes: u64,
    stderr_bytes: u64,
    truncated: bool,
    finished_at: i64,
    steady: i64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Progress {
    stdout: u64,
    stderr: u64,
    /// Pieces on their way to files.
    writing: usize,
    ended: bool,
}

impl Inner {
    fn kept(&mut self, stream: ExecStream) -> &mut Kept {
        match stream {
            ExecStream::Stdout => &mut self.stdout,
            ExecStream::Stderr => &mut self.stderr,
        }
    }
}

impl Exec {
    /// Its files have so many bytes already.
    pub(super) fn new(
        of: Arc<Execs>,
        id: ExecId,
        origin: Origin,
        (place, started_at): (i64, i64),
        [stdout, stderr]: [u64; 2],
    ) -> Self {
        let limit = of.shared.limits.output_bytes;
        Self {
            id,
            place,
            origin,
            started_at,
            of,
            inner: Mutex::new(Inner {
                stdout: Kept::new(limit, stdout),
                stderr: Kept::new(limit, stderr),
                end: None,
            }),
            progress: watch::Sender::new(Progress { stdout, stderr, ..Progress::default() }),
            watched: AtomicBool::new(false),
            log: Mutex::new(None),
        }
    }

    pub(crate) fn of(&self) -> &Arc<Execs> {
        &self.of
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        locked(&self.inner)
    }

    /// False: someone else does already.
    pub(crate) fn begin_watching(&self) -> bool {
        !self.watched.swap(true, Ordering::AcqRel)
    }

    pub(crate) fn end_watching(&self) {
        self.watched.store(false, Ordering::Release);
    }

    pub(super) fn begin_log(&self, log: LogWriter) {
        *locked(&self.log) = Some(log);
    }

    pub(super) fn take_log(&self) -> Option<LogWriter> {
        locked(&self.log).take()
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.watched.load(Ordering::Acquire)
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.inner().end.is_some()
    }

    /// As it is called in its guest.
    pub(crate) fn guest_id(&self) -> String {
        super::guest_id(&self.of.sandbox, &self.id)
    }

    /// How far its output was taken in.
    pub(crate) fn received(&self) -> (u64, u64) {
        let inner = self.inner();
        (inner.stdout.received(), inner.stderr.received())
    }

    /// Never waits: see [`Exec::write_out`].
    pub(crate) fn push(&self, stream: ExecStream, bytes: &[u8]) {
        let mut inner = self.inner();
        let kept = inner.kept(stream);
        let room = self.of.take_room(kept.room_for(bytes.len()));
        kept.push(bytes, room);
        let (stdout, stderr) = (inner.stdout.kept(), inner.stderr.kept());
        drop(inner);
        self.of.shared.in_memory.fetch_add(room, Ordering::Relaxed);
        self.progress.send_modify(|progress| {
            (progress.stdout, progress.stderr) = (stdout, stderr);
        });
    }

    /// What waits in memory goes to its files, if it is much. Done even when nobody waits for it.
    pub(crate) fn write_out(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        let is_short = self.of.shared.in_memory.load(Ordering::Relaxed) > MUCH;
        self.spill(if is_short { IN_MEMORY_WHEN_SHORT } else { IN_MEMORY })
    }

    /// All of what waits in memory.
    pub(super) fn write_all_out(self: &Arc<Self>) -> Option<JoinHandle<()>> {
        self.spill(0)
    }

    fn spill(self: &Arc<Self>, least: usize) -> Option<JoinHandle<()>> {
        let spills: Vec<_> = {
            let mut inner = self.inner();
            let spill = |stream| Some((stream, inner.kept(stream).spill(least)?));
            ExecStream::ALL.into_iter().filter_map(spill).collect()
        };
        if spills.is_empty() {
            return None;
        }
        self.progress.send_modify(|progress| progress.writing += spills.len());
        let exec = Arc::clone(self);
        Some(tokio::task::spawn_blocking(move || {
            for (stream, spill) in spills {
                let written = exec.write(stream, &spill);
                let written = written.inspect_err(|error| {
                    tracing::warn!(sandbox = %exec.of.sandbox, exec = %exec.id, %error, "output is cut: it cannot be written");
                });
                exec.written(stream, written.ok());
            }
        }))
    }

    fn write(&self, stream: ExecStream, spill: &Spill) -> Result<Arc<File>, store::Error> {
        let failed = |source| store::Error::Io {
            doing: "write the output of an exec to",
            path: stream.as_str().into(),
            source,
        };
        fault::point!("execs.output_writing", failed);
        let file = match &spill.file {
            Some(file) => Arc::clone(file),
            None => Arc::new(self.of.files.open(&self.id, stream)?),
        };
        file.write_all_at(&spill.bytes, spill.at).map_err(failed)?;
        fault::point!("execs.output_written");
        Ok(file)
    }

    fn written(&self, stream: ExecStream, file: Option<Arc<File>>) {
        let mut inner = self.inner();
        let kept = inner.kept(stream);
        let (in_memory, before) = (kept.in_memory(), kept.kept());
        kept.written(file);
        let (gone, lost) = (in_memory - kept.in_memory(), before - kept.kept());
        drop(inner);
        self.of.shared.in_memory.fetch_sub(gone, Ordering::Relaxed);
        self.of.give_back_room(lost);
        self.progress.send_modify(|progress| progress.writing -= 1);
    }

    /// The guest has told its end, after all output. False: an end is known already.
    pub(crate) fn end(&self, status: &ExecStatus) -> bool {
        let state = match (status.state, status.exit_code) {
            (GuestState::Exited, Some(0)) => ExecState::Succeeded,
            (GuestState::Exited, _) => ExecState::Failed,
            (GuestState::TimedOut, _) => ExecState::Expired,
            (GuestState::Cancelled, _) => ExecState::Cancelled,
            // Not an end; a guest that says so is not believed.
            (GuestState::Running, _) => ExecState::Lost,
        };
        self.set_end(|inner| End {
            state,
            exit_code: status.exit_code.filter(|_| state != ExecState::Lost),
            killed_for_memory: status.killed_for_memory,
            stdout_bytes: status.stdout_bytes,
            stderr_bytes: status.stderr_bytes,
            truncated: status.truncated
                || inner.stdout.kept() < status.stdout_bytes
                || inner.stderr.kept() < status.stderr_bytes,
            finished_at: self.of.shared.clock.now_ms(),
            steady: self.of.shared.clock.steady_ms(),
        })
    }

    /// Nobody will ever know more than what was taken in until now.
    pub(crate) fn lose(&self) -> bool {
        self.set_end(|inner| End {
            state: ExecState::Lost,
            exit_code: None,
            killed_for_memory: false,
            stdout_bytes: inner.stdout.received(),
            stderr_bytes: inner.stderr.received(),
            truncated: inner.stdout.is_cut() || inner.stderr.is_cut(),
            finished_at: self.of.shared.clock.now_ms(),
            steady: self.of.shared.clock.steady_ms(),
        })
    }

    fn set_end(&self, end: impl FnOnce(&Inner) -> End) -> bool {
        let mut inner = self.inner();
        if inner.end.is_some() {
            return false;
        }
        inner.end = Some(end(&inner));
        drop(inner);
        self.progress.send_modify(|progress| progress.ended = true);
        true
    }

    /// At most so long for its end.
    pub(crate) async fn wait_for_the_end(&self, patience: Duration) {
        let mut progress = self.progress.subscribe();
        // Its end or the end of the patience: the record tells.
        let _ = tokio::time::timeout(patience, progress.wait_for(|progress| progress.ended)).await;
    }

    /// At most so long for output of this stream beyond `offset`, or its end.
    pub(super) async fn wait_for_output(
        &self,
        stream: ExecStream,
        offset: u64,
        patience: Duration,
    ) {
        let mut progress = self.progress.subscribe();
        let there = progress.wait_for(|progress| {
            let kept = match stream {
                ExecStream::Stdout => progress.stdout,
                ExecStream::Stderr => progress.stderr,
            };
            progress.ended || kept > offset
        });
        let _ = tokio::time::timeout(patience, there).await;
    }

    /// With whether this is the end of it.
    pub(super) fn read(&self, stream: ExecStream, offset: u64, most: usize) -> (Piece, bool) {
        let mut inner = self.inner();
        let ended = inner.end.is_some();
        let kept = inner.kept(stream);
        let piece = kept.read(offset, most);
        let length = match &piece {
            Piece::Nothing => 0,
            Piece::Bytes(bytes) => bytes.len(),
            Piece::InFile { length } => *length,
        };
        (piece, ended && offset + length as u64 >= kept.kept())
    }

    pub(super) fn age(&self) -> Duration {
        let since = self.of.shared.clock.now_ms() - self.started_at;
        Duration::from_millis(u64::try_from(since).unwrap_or(0))
    }

    /// As its row would say it now.
    pub(super) fn row(&self) -> ExecRow {
        let inner = self.inner();
        let kept_bytes = inner.stdout.kept() + inner.stderr.kept();
        let row = ExecRow {
            sandbox: self.of.sandbox,
            id: self.id.clone(),
            place: self.place,
            state: ExecState::Running,
            exit_code: None,
            killed_for_memory: false,
            stdout_bytes: inner.stdout.received(),
            stderr_bytes: inner.stderr.received(),
            truncated: inner.stdout.is_cut() || inner.stderr.is_cut(),
            started_at: self.started_at,
            finished_at: None,
            ended_steady: None,
            output: ExecPlace::None,
            kept_bytes,
        };
        match &inner.end {
            None => row,
            Some(end) => ExecRow {
                state: end.state,
                exit_code: end.exit_code,
                killed_for_memory: end.killed_for_memory,
                stdout_bytes: end.stdout_bytes,
                stderr_bytes: end.stderr_bytes,
                truncated: end.truncated,
                finished_at: Some(end.finished_at),
                ended_steady: Some(end.steady),
                ..row
            },
        }
    }

    /// After its end: its output is where it stays, and on the disk.
    pub(super) async fn settle(self: &Arc<Self>) -> (ExecRow, ShortOutput) {
        let mut progress = self.progress.subscribe();
        loop {
            // The sender lives as long as this.
            let _ = progress.wait_for(|progress| progress.writing == 0).await;
            let is_long = {
                let inner = self.inner();
                let all = [&inner.stdout, &inner.stderr];
                all.iter().any(|kept| kept.has_file() || kept.in_memory() > SHORT)
            };
            if !is_long || self.spill(0).is_none() {
                break;
            }
        }
        self.sync().await;
        let mut row = self.row();
        let inner = self.inner();
        if let Some(end) = &inner.end {
            // What could not be written since.
            let kept = (inner.stdout.kept(), inner.stderr.kept());
            row.truncated |= kept.0 < end.stdout_bytes || kept.1 < end.stderr_bytes;
        }
        if inner.stdout.has_file() || inner.stderr.has_file() {
            row.output = ExecPlace::Files;
            return (row, ShortOutput::default());
        }
        row.output = ExecPlace::Row;
        let text = |kept: &Kept| BASE64.encode(kept.whole());
        (row, ShortOutput { stdout: text(&inner.stdout), stderr: text(&inner.stderr) })
    }

    async fn sync(&self) {
        let files: Vec<_> = {
            let inner = self.inner();
            [&inner.stdout, &inner.stderr].into_iter().filter_map(Kept::file).collect()
        };
        if files.is_empty() {
            return;
        }
        let sync = move || files.iter().try_for_each(|file| file.sync_data());
        if !matches!(tokio::task::spawn_blocking(sync).await, Ok(Ok(()))) {
            tracing::warn!(sandbox = %self.of.sandbox, exec = %self.id, "output may not survive a power failure");
        }
    }

    /// It is no longer read from here.
    pub(super) fn forget(&self) {
        let inner = self.inner();
        let in_memory = inner.stdout.in_memory() + inner.stderr.in_memory();
        drop(inner);
        self.of.shared.in_memory.fetch_sub(in_memory, Ordering::Relaxed);
    }
}
