//! Quiet moments: the way there, what waits meanwhile, and the way back. The work is done by [`crate::state`] on its own
//! thread; the loop goes on answering and never touches a disk while everything stands still.

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use protocol::files::FilesRequest;
use protocol::message::{ErrorCode, Failure, FileRequest, Repair};
use protocol::{Reply, Request};

use super::stream::{Deferred, Role};
use super::{Done, Server};
use crate::failure::refuse;
use crate::state::State;
use crate::state::attempt::Attempt;

/// Both together stay below [`protocol::QUIESCE_LIMIT`].
const WRITE_OUT: Duration = Duration::from_secs(60);
const FREEZE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Running,
    /// Processes and file systems are about to stand still.
    Freezing,
    Quiet {
        heard: Instant,
    },
    /// A repair or a thaw is on its way.
    Moving,
    /// A repair has failed: without another nothing goes on.
    Broken,
}

impl Phase {
    pub(crate) fn is_running(self) -> bool {
        self == Self::Running
    }

    pub(crate) fn has_heard(&mut self) {
        match self {
            Self::Quiet { heard } => *heard = Instant::now(),
            Self::Running | Self::Freezing | Self::Moving | Self::Broken => {}
        }
    }
}

/// Who waits for it to be quiet, and until when.
#[derive(Debug)]
pub(crate) struct Quiescing {
    stream: u32,
    epoch: u64,
    attempt: Arc<Attempt>,
}

/// What became of a change of the state.
pub(crate) enum Change {
    WrittenOut(Arc<Attempt>, Result<(), Failure>),
    Frozen(Arc<Attempt>, Result<(), Failure>),
    Thawed(Option<Asker>, Result<(), Failure>),
    Repaired(Asker, Result<(), Failure>),
    Volumes(Asker, Result<(), Failure>),
    Flushed(Asker, Result<(), Failure>),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker {
    stream: u32,
    epoch: u64,
}

impl Server {
    fn asker(&self, stream: u32) -> Asker {
        Asker { stream, epoch: self.epoch }
    }

    fn tell(&mut self, asker: Asker, result: Result<(), Failure>) {
        if asker.epoch == self.epoch && self.streams.contains_key(&asker.stream) {
            self.end_with(asker.stream, result.map(|()| Reply::Done));
        }
    }

    fn change(&self, change: impl FnOnce(&mut State) -> Change + Send + 'static) {
        let state = Arc::clone(&self.state);
        self.keeper.submit(move || {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            Done::Changed(change(&mut state))
        });
    }

    /// True: it is already.
    pub(crate) fn quiesce(&mut self, stream: u32) -> bool {
        if let Phase::Quiet { .. } = self.phase {
            return true;
        }
        let epoch = self.epoch;
        if let Some(quiescing) = &mut self.quiescing {
            // Asked again, perhaps over a new connection: the answer goes to whoever asked last.
            (quiescing.stream, quiescing.epoch) = (stream, epoch);
            return false;
        }
        self.prepare_groups();
        self.rest_spare_kernel();
        // Whoever is restored from here finds a worker.
        self.workers.submit(|| Done::Dropped);
        let attempt = Arc::new(Attempt::until(Instant::now() + WRITE_OUT));
        self.quiescing = Some(Quiescing { stream, epoch, attempt: Arc::clone(&attempt) });
        self.change(|state| Change::WrittenOut(attempt, state.write_out()));
        false
    }

    fn is_awaited(&self, attempt: &Arc<Attempt>) -> bool {
        self.quiescing.as_ref().is_some_and(|quiescing| Arc::ptr_eq(&quiescing.attempt, attempt))
    }

    pub(crate) fn changed(&mut self, change: Change) {
        match change {
            Change::WrittenOut(attempt, result) => {
                if self.is_awaited(&attempt) {
                    match result {
                        Ok(()) => self.freeze(),
                        Err(failure) => self.end_quiescing(Err(failure)),
                    }
                }
            }
            Change::Frozen(attempt, result) => {
                if self.is_awaited(&attempt) {
                    self.end_quiescing(result);
                }
            }
            Change::Thawed(asker, result) => {
                self.set_phase(Phase::Running);
                match (asker, result) {
                    (Some(asker), result) => self.tell(asker, result),
                    (None, result) => crate::boot::report("go on", result),
                }
            }
            Change::Repaired(asker, result) => {
                self.set_phase(if result.is_ok() { Phase::Running } else { Phase::Broken });
                self.tell(asker, result);
            }
            Change::Volumes(asker, result) | Change::Flushed(asker, result) => {
                self.tell(asker, result);
            }
        }
    }

    fn freeze(&mut self) {
        let Some(quiescing) = &mut self.quiescing else { return };
        let attempt = Arc::new(Attempt::until(Instant::now() + FREEZE));
        quiescing.attempt = Arc::clone(&attempt);
        self.set_phase(Phase::Freezing);
        self.change(|state| {
            let result = state.freeze(&attempt);
            Change::Frozen(attempt, result)
        });
    }

    fn end_quiescing(&mut self, result: Result<(), Failure>) {
        let Some(Quiescing { stream, epoch, .. }) = self.quiescing.take() else { return };
        if self.phase == Phase::Freezing {
            self.set_phase(match result {
                Ok(()) => Phase::Quiet { heard: Instant::now() },
                Err(_) => Phase::Running,
            });
        }
        self.tell(Asker { stream, epoch }, result);
    }

    fn give_up_quiescing(&mut self, reason: &str) {
        let Some(quiescing) = &self.quiescing else { return };
        // If it has succeeded just now, its result is on the way.
        if quiescing.attempt.give_up() {
            self.end_quiescing(Err(refuse(ErrorCode::Busy, reason)));
        }
    }

    /// Without anybody who has asked, because the host is silent.
    pub(crate) fn thaw(&mut self, stream: Option<u32>, unix_time_ns: Option<u64>) {
        self.give_up_quiescing("the host has asked for something else meanwhile");
        self.set_phase(Phase::Moving);
        let asker = stream.map(|stream| self.asker(stream));
        self.change(move |state| Change::Thawed(asker, state.thaw(unix_time_ns)));
    }

    pub(crate) fn repair(&mut self, stream: u32, repair: Repair) {
        self.give_up_quiescing("the host has asked for something else meanwhile");
        self.set_phase(Phase::Moving);
        let asker = self.asker(stream);
        let kernels = self.kernel_groups();
        self.change(move |state| Change::Repaired(asker, state.repair(&repair, &kernels)));
    }

    pub(crate) fn change_volumes(
        &self,
        stream: u32,
        change: impl FnOnce(&mut State) -> Result<(), Failure> + Send + 'static,
    ) {
        let asker = self.asker(stream);
        self.change(move |state| Change::Volumes(asker, change(state)));
    }

    pub(crate) fn flush_disks(&self, stream: u32) {
        let asker = self.asker(stream);
        self.change(move |state| Change::Flushed(asker, state.flush()));
    }

    pub(crate) fn quiet_deadline(&self) -> Option<Instant> {
        match (&self.quiescing, self.phase) {
            (Some(quiescing), _) => Some(quiescing.attempt.deadline()),
            (None, Phase::Quiet { heard }) => Some(heard + self.quiet_limit),
            (None, Phase::Running | Phase::Freezing | Phase::Moving | Phase::Broken) => None,
        }
    }

    /// Called whenever something has happened.
    pub(crate) fn act_on_quiet(&mut self) {
        if self.quiet_deadline().is_none_or(|deadline| deadline > Instant::now()) {
            return;
        }
        if self.quiescing.is_some() {
            let reason = "the disks of this sandbox are too slow, or there is too much to write; try again later";
            self.give_up_quiescing(reason);
        } else {
            self.thaw(None, None);
        }
    }

    fn set_phase(&mut self, phase: Phase) {
        self.phase = phase;
        self.execs.keeps_files = !phase.is_running();
        if phase.is_running() {
            self.go_on();
        }
    }

    /// Everything that has waited.
    fn go_on(&mut self) {
        let discarded = std::mem::take(&mut self.discarded);
        if !discarded.is_empty() {
            self.workers.submit(|| {
                drop(discarded);
                Done::Dropped
            });
        }
        self.execs.bound_ended();
        let writing =
            self.streams.iter().filter(|(_, stream)| matches!(stream.role, Role::Writing(_)));
        let writing: Vec<u32> = writing.map(|(&number, _)| number).collect();
        for stream in writing {
            self.drive_write(stream);
        }
        for stream in std::mem::take(&mut self.deferred) {
            self.take_up(stream);
        }
    }

    /// What writes, or begins a process, has to wait.
    pub(crate) fn must_wait(&mut self, request: &Request) -> bool {
        if self.phase.is_running() {
            return false;
        }
        match request {
            Request::ExecStart(_)
            | Request::TerminalOpen(_)
            | Request::ExecsForget { .. }
            | Request::FileDelete { .. }
            | Request::KernelPrepare
            | Request::KernelStart(_)
            | Request::KernelRun(_)
            | Request::KernelRestart { .. }
            | Request::KernelEnd { .. }
            | Request::Sync
            | Request::VolumeGrow { .. } => true,
            Request::Quiesce => matches!(self.phase, Phase::Moving | Phase::Broken),
            Request::Shutdown { .. } | Request::Release { .. } => {
                if self.phase != Phase::Moving {
                    self.thaw(None, None);
                }
                true
            }
            // It may be waiting itself.
            Request::ExecWatch { id, .. }
            | Request::ExecStatus { id }
            | Request::ExecCancel { id, .. } => self.execs.by_id(id).is_err(),
            Request::TerminalAttach { id, .. }
            | Request::TerminalResize { id, .. }
            | Request::TerminalSignal { id, .. }
            | Request::TerminalEnd { id, .. } => self.terminals.by_id(id).is_err(),
            Request::Files { request, .. } => match request {
                FilesRequest::UploadBegin(_)
                | FilesRequest::UploadComplete { .. }
                | FilesRequest::UploadAbort { .. }
                | FilesRequest::Move { .. }
                | FilesRequest::MakeDirectory(_)
                | FilesRequest::Change(_) => true,
                // As a write.
                FilesRequest::Unpack(_)
                | FilesRequest::UploadPart { .. }
                | FilesRequest::Pack { .. }
                | FilesRequest::UploadStatus { .. }
                | FilesRequest::UploadList
                | FilesRequest::Watch { .. } => false,
            },
            // A write waits by itself, once its content has come.
            Request::FileWrite(_)
            | Request::Ping
            | Request::Repair(_)
            | Request::Thaw { .. }
            | Request::VolumesMount { .. }
            | Request::VolumesUnmount { .. }
            | Request::ExecList
            | Request::TerminalList
            | Request::FileRead(_)
            | Request::DirList { .. }
            | Request::Dial { .. }
            | Request::Listeners
            | Request::FileStat { .. }
            | Request::KernelList => false,
            Request::FileAs { request, .. } => match request {
                FileRequest::Delete { .. } => true,
                FileRequest::Read(_)
                | FileRequest::Write(_)
                | FileRequest::List { .. }
                | FileRequest::Stat { .. } => false,
            },
        }
    }

    pub(crate) fn defer(&mut self, stream: u32, request: Request) {
        if let Some(found) = self.streams.get_mut(&stream) {
            let request = Box::new(request);
            found.role = Role::Deferred(Deferred { request, data: Vec::new(), finished: false });
            self.deferred.push(stream);
        }
    }

    fn take_up(&mut self, stream: u32) {
        let Some(found) = self.streams.get_mut(&stream) else { return };
        if !matches!(found.role, Role::Deferred(_)) {
            return;
        }
        let Role::Deferred(deferred) = std::mem::replace(&mut found.role, Role::Answering) else {
            return;
        };
        self.act(stream, Ok(*deferred.request));
        for piece in deferred.data {
            self.take_data(stream, &piece);
        }
        if deferred.finished {
            self.take_finish(stream);
        }
    }

    /// Drops it, once that may write.
    pub(crate) fn discard(&mut self, thing: impl Send + 'static) {
        if !self.phase.is_running() {
            self.discarded.push(Box::new(thing));
        }
    }
}
