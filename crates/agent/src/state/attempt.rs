//! A bounded attempt to become quiet: the thread that makes it and the loop that waits for it agree on how it ends.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::groups::Frozen;

const GOING_ON: u8 = 0;
const SUCCEEDED: u8 = 1;
const GIVEN_UP: u8 = 2;

#[derive(Debug)]
pub(crate) struct Attempt {
    outcome: AtomicU8,
    deadline: Instant,
    /// Groups of processes frozen so far: whoever gives up lets them go at once.
    groups: Mutex<Vec<Frozen>>,
}

impl Attempt {
    pub(crate) fn until(deadline: Instant) -> Self {
        Self { outcome: AtomicU8::new(GOING_ON), deadline, groups: Mutex::default() }
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.outcome.load(Ordering::SeqCst) == GIVEN_UP
    }

    /// False: it was given up before, so all must be undone.
    pub(crate) fn succeed(&self) -> bool {
        self.end(SUCCEEDED)
    }

    /// False: it has succeeded just now.
    pub(crate) fn give_up(&self) -> bool {
        let given_up = self.end(GIVEN_UP);
        if given_up {
            for group in self.take_groups() {
                group.thaw();
            }
        }
        given_up
    }

    fn end(&self, outcome: u8) -> bool {
        self.outcome.compare_exchange(GOING_ON, outcome, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    pub(crate) fn freezes(&self, group: Frozen) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).push(group);
    }

    pub(crate) fn take_groups(&self) -> Vec<Frozen> {
        std::mem::take(&mut self.groups.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
