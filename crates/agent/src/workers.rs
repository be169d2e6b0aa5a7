//! Threads for whatever may wait for a disk, so that a slow one stops neither commands nor answers.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

type Work<T> = Box<dyn FnOnce() -> T + Send>;

/// A pool whose jobs each give a `T`. Queues are bounded by their users: a stream has one job at a time.
pub(crate) struct Workers<T> {
    shared: Arc<Shared<T>>,
}

struct Shared<T> {
    state: Mutex<State<T>>,
    work_came: Condvar,
    result_came: OwnedFd,
}

struct State<T> {
    waiting: VecDeque<Work<T>>,
    results: Vec<T>,
    threads: usize,
    most: usize,
    idle: usize,
    over: bool,
}

impl<T: Send + 'static> Workers<T> {
    /// `most` threads; of one, the jobs are done in their order.
    pub(crate) fn new(most: usize) -> Result<Self, Errno> {
        let state = State {
            waiting: VecDeque::new(),
            results: Vec::new(),
            threads: 0,
            most,
            idle: 0,
            over: false,
        };
        let result_came = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?;
        Ok(Self {
            shared: Arc::new(Shared {
                state: Mutex::new(state),
                work_came: Condvar::new(),
                result_came,
            }),
        })
    }

    /// Readable when there are results.
    pub(crate) fn results_came(&self) -> BorrowedFd<'_> {
        self.shared.result_came.as_fd()
    }

    pub(crate) fn submit(&self, work: impl FnOnce() -> T + Send + 'static) {
        let mut state = self.shared.lock();
        state.waiting.push_back(Box::new(work));
        if state.idle >= state.waiting.len() {
            self.shared.work_came.notify_one();
        } else if state.threads < state.most {
            let shared = Arc::clone(&self.shared);
            let builder =
                std::thread::Builder::new().name("worker".to_owned()).stack_size(256 << 10);
            // Without memory for another thread the present ones do it, and without any the next submission tries again.
            if builder.spawn(move || shared.run()).is_ok() {
                state.threads += 1;
            }
        }
    }

    pub(crate) fn take_results(&self) -> Vec<T> {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.shared.result_came, &mut counter);
        std::mem::take(&mut self.shared.lock().results)
    }
}

impl<T> Shared<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut state = self.lock();
        loop {
            if let Some(work) = state.waiting.pop_front() {
                drop(state);
                let result = work();
                state = self.lock();
                state.results.push(result);
                if state.results.len() == 1 {
                    let _ = rustix::io::write(&self.result_came, &1_u64.to_ne_bytes());
                }
            } else if state.over {
                return;
            } else {
                state.idle += 1;
                state = self.work_came.wait(state).unwrap_or_else(PoisonError::into_inner);
                state.idle -= 1;
            }
        }
    }
}

impl<T> Drop for Workers<T> {
    /// Threads end after the work they have; one that hangs is not waited for.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.waiting.clear();
        state.over = true;
        self.shared.work_came.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_result_arrives_once() {
        let workers = Workers::new(8).unwrap();
        for number in 0..100 {
            workers.submit(move || number);
        }
        let mut results = Vec::new();
        while results.len() < 100 {
            let mut ready = [rustix::event::PollFd::from_borrowed_fd(
                workers.results_came(),
                rustix::event::PollFlags::IN,
            )];
            rustix::event::poll(&mut ready, None).unwrap();
            results.extend(workers.take_results());
        }
        results.sort_unstable();
        assert_eq!(results, (0..100).collect::<Vec<_>>());
    }
}
