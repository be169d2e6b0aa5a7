//! The end of the sandbox: everything ends, and what it has written is on its disks.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use protocol::Reply;
use protocol::message::Failure;
use rustix::process::Signal;

use super::{Done, Server};
use crate::Place;
use crate::exec::after;
use crate::terminal::Terminal;

/// How far a shutdown is.
#[derive(Debug)]
pub(crate) struct Shutdown {
    purpose: Purpose,
    stream: u32,
    epoch: u64,
    step: Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    PowerOff,
    /// The host ends the machine itself, and only volumes are worth flushing.
    Release,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// Everything was asked to end.
    Asked {
        kill_at: Instant,
    },
    /// Everything was killed; what cannot be killed is not waited for beyond this.
    Killed {
        give_up_at: Instant,
    },
    Flushing,
    Complete,
}

/// For processes that wait for a disk when they are killed.
const AFTER_KILL_MS: u64 = 2000;

impl Shutdown {
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.step {
            Step::Asked { kill_at } => Some(kill_at),
            Step::Killed { give_up_at } => Some(give_up_at),
            Step::Flushing | Step::Complete => None,
        }
    }
}

impl Server {
    pub(crate) fn shut_down(&mut self, stream: u32, grace_ms: u32, purpose: Purpose) {
        if let Some(shutdown) = &mut self.shutdown
            && shutdown.step != Step::Complete
        {
            if purpose == Purpose::PowerOff {
                shutdown.purpose = purpose;
            }
            // Asked again, perhaps over a new connection: the answer goes to whoever asked last.
            (shutdown.stream, shutdown.epoch) = (stream, self.epoch);
            return;
        }
        self.end_spare_kernel();
        self.signal_everything(Signal::TERM);
        let kill_at = after(Instant::now(), grace_ms.into());
        let (epoch, step) = (self.epoch, Step::Asked { kill_at });
        self.shutdown = Some(Shutdown { purpose, stream, epoch, step });
        // Where nothing runs, nothing more will happen.
        self.go_on_shutting_down();
    }

    fn signal_everything(&mut self, signal: Signal) {
        // A shell at its prompt cares for nothing else.
        self.drop_lines();
        if let Some(groups) = &self.execs.groups {
            groups.signal_all(signal);
        }
        for (_, exec) in self.execs.all().filter(|(_, exec)| exec.group.is_none()) {
            exec.signal(signal);
        }
        if signal == Signal::KILL {
            self.terminals.all().for_each(Terminal::kill);
        }
        if self.place == Place::Guest {
            // Whatever root has moved out of its group.
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(-1),
                nix::sys::signal::Signal::try_from(signal.as_raw()).ok(),
            );
        }
    }

    /// Called whenever something has happened.
    pub(crate) fn go_on_shutting_down(&mut self) {
        let Some(shutdown) = &self.shutdown else { return };
        let now = Instant::now();
        let all_ended = self.execs.running() == 0
            && self.terminals.running() == 0
            && !self.execs.groups.as_ref().is_some_and(|all| all.are_populated());
        match shutdown.step {
            Step::Asked { .. } | Step::Killed { .. } if all_ended => self.flush_finally(),
            Step::Asked { kill_at } if kill_at <= now => {
                self.signal_everything(Signal::KILL);
                self.set_step(Step::Killed { give_up_at: after(now, AFTER_KILL_MS) });
            }
            Step::Killed { give_up_at } if give_up_at <= now => self.flush_finally(),
            Step::Asked { .. } | Step::Killed { .. } | Step::Flushing | Step::Complete => {}
        }
    }

    fn flush_finally(&mut self) {
        let Some(Shutdown { purpose, .. }) = self.shutdown else { return };
        self.set_step(Step::Flushing);
        let (state, place) = (Arc::clone(&self.state), self.place);
        let uploads = Arc::clone(&self.uploads);
        self.keeper.submit(move || {
            // Nobody will know of them, and they lie on the disks.
            uploads.abort_all();
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            let released = state.release();
            match (purpose, place) {
                (Purpose::Release, _) => return Done::Stopped(released),
                (Purpose::PowerOff, Place::Guest) => crate::boot::mounts::settle(),
                (Purpose::PowerOff, Place::Host) => {}
            }
            crate::boot::report("unmount a volume", released);
            Done::Stopped(Ok(()))
        });
    }

    pub(crate) fn stopped(&mut self, result: Result<(), Failure>) {
        self.set_step(Step::Complete);
        if let Some(Shutdown { stream, epoch, .. }) = self.shutdown
            && epoch == self.epoch
        {
            self.end_with(stream, result.map(|()| Reply::Done));
        }
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.shutdown.is_some()
    }

    fn set_step(&mut self, step: Step) {
        if let Some(shutdown) = &mut self.shutdown {
            shutdown.step = step;
        }
    }

    /// The answer has gone, too.
    pub(crate) fn is_shut_down(&self) -> bool {
        self.shutdown.as_ref().is_some_and(|shutdown| {
            shutdown.purpose == Purpose::PowerOff && shutdown.step == Step::Complete
        }) && self.port.output.is_empty()
    }
}
