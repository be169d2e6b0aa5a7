//! Runs the claims of a suite side by side, ends its server, and then claims that nothing is left on the host.
//!
//! A claim that fails runs once more, with the host to itself. One that holds then is told as unsteady: it is a fault to be
//! found, of the claim or of what it is about, but not of the change that happens to be tested.

use std::{
    collections::BTreeSet,
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use futures::future::LocalBoxFuture;
use libtest_mimic::{Arguments, Failed, Trial};

use crate::{Footprint, Host, interrupt::clean_up_when_interrupted};

/// Most claims wait for their guest or for a deadline, so there may be more of them than cores.
const THREADS: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Length {
    Short,
    /// Left out unless asked for, as a test that is marked as ignored.
    Soak,
}

impl Length {
    fn deadline(self) -> Duration {
        match self {
            Self::Short => Duration::from_secs(300),
            Self::Soak => Duration::from_secs(3600),
        }
    }
}

/// One test.
#[derive(Clone, Copy)]
pub struct Claim {
    name: &'static str,
    length: Length,
    body: fn(Host) -> LocalBoxFuture<'static, ()>,
}

impl Claim {
    pub fn new(
        name: &'static str,
        length: Length,
        body: fn(Host) -> LocalBoxFuture<'static, ()>,
    ) -> Self {
        Self { name, length, body }
    }
}

/// The program of a suite. A claim that is missing from its lists is dead code to the compiler.
#[macro_export]
macro_rules! suite {
    ($($claim:ident),* $(,)? ; soak: $($long:ident),* $(,)?) => {
        fn main() -> std::process::ExitCode {
            $crate::run(vec![
                $($crate::Claim::new(stringify!($claim), $crate::Length::Short, |host| Box::pin($claim(host))),)*
                $($crate::Claim::new(stringify!($long), $crate::Length::Soak, |host| Box::pin($long(host))),)*
            ])
        }
    };
}

/// # Panics
/// There is no runtime to be had.
pub fn run(claims: Vec<Claim>) -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = arguments.test_threads.or(Some(THREADS));
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.spawn(clean_up_when_interrupted());
    let host = Host::new();
    let failed = Failures::default();
    let trials: Vec<_> = claims
        .iter()
        .map(|claim| trial(*claim, runtime.handle().clone(), host.clone(), failed.clone()))
        .collect();
    let mut told = libtest_mimic::run(&arguments, trials).exit_code();
    let again: Vec<_> = {
        let failed = failed.take();
        claims.into_iter().filter(|claim| failed.contains(claim.name)).collect()
    };
    if !again.is_empty() {
        let alone =
            Arguments { test_threads: Some(1), include_ignored: true, ..Arguments::default() };
        let trials = again
            .iter()
            .map(|claim| trial(*claim, runtime.handle().clone(), host.clone(), failed.clone()))
            .collect();
        told = libtest_mimic::run(&alone, trials).exit_code();
        tell_unsteady(&again, &failed.take());
    }
    let Some(left) = runtime.block_on(host.close()) else { return told };
    let nothing_left = Trial::test("nothing_is_left_on_the_host", move || is_nothing(&left));
    let last = libtest_mimic::run(&Arguments::default(), vec![nothing_left]);
    if last.has_failed() { last.exit_code() } else { told }
}

/// One line each, by which the whole run counts them.
#[expect(clippy::print_stdout, reason = "beside the test results")]
fn tell_unsteady(again: &[Claim], failed: &BTreeSet<&'static str>) {
    for claim in again.iter().filter(|claim| !failed.contains(claim.name)) {
        println!("unsteady: {}", claim.name);
    }
}

fn trial(claim: Claim, runtime: tokio::runtime::Handle, host: Host, failed: Failures) -> Trial {
    let Claim { name, length, body } = claim;
    let trial = Trial::test(name, move || {
        let deadline = length.deadline();
        let mut watched = Watched { name, host: host.clone(), failed, holds: false };
        let outcome = runtime.block_on(async { tokio::time::timeout(deadline, body(host)).await });
        watched.holds = outcome.is_ok();
        outcome.map_err(|_| Failed::from(format!("not within {deadline:?}")))
    });
    trial.with_ignored_flag(length == Length::Soak)
}

/// Names of claims.
#[derive(Clone, Default)]
struct Failures(Arc<Mutex<BTreeSet<&'static str>>>);

impl Failures {
    fn note(&self, name: &'static str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name);
    }

    fn take(&self) -> BTreeSet<&'static str> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A claim under way. One that does not hold tells what the suite's server complained of; servers of its own do so by
/// themselves.
struct Watched {
    name: &'static str,
    host: Host,
    failed: Failures,
    holds: bool,
}

impl Drop for Watched {
    fn drop(&mut self) {
        if !self.holds {
            self.failed.note(self.name);
            self.host.tell_complaints();
        }
    }
}

fn is_nothing(left: &[Footprint]) -> Result<(), Failed> {
    let left: Vec<_> = left.iter().filter(|footprint| !footprint.is_empty()).collect();
    if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:#?}").into()) }
}
