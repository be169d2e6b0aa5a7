//! Runs the claims of a suite side by side, ends its server, and then claims that nothing is left on the host.

use std::{process::ExitCode, time::Duration};

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
    let trials = claims
        .into_iter()
        .map(|claim| trial(claim, runtime.handle().clone(), host.clone()))
        .collect();
    let told = libtest_mimic::run(&arguments, trials);
    let Some(left) = runtime.block_on(host.close()) else { return told.exit_code() };
    arguments.filter = None;
    arguments.skip.clear();
    arguments.ignored = false;
    let nothing_left = Trial::test("nothing_is_left_on_the_host", move || is_nothing(&left));
    let last = libtest_mimic::run(&arguments, vec![nothing_left]);
    if told.has_failed() { told.exit_code() } else { last.exit_code() }
}

fn trial(claim: Claim, runtime: tokio::runtime::Handle, host: Host) -> Trial {
    let Claim { name, length, body } = claim;
    let trial = Trial::test(name, move || {
        let deadline = length.deadline();
        let shared = Complaints(host.clone());
        runtime.block_on(async { tokio::time::timeout(deadline, body(host)).await }).map_err(|_| {
            shared.0.tell_complaints();
            Failed::from(format!("not within {deadline:?}"))
        })
    });
    trial.with_ignored_flag(length == Length::Soak)
}

/// A claim that panics tells what the suite's server complained of. Its own servers do so by themselves.
struct Complaints(Host);

impl Drop for Complaints {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.tell_complaints();
        }
    }
}

fn is_nothing(left: &[Footprint]) -> Result<(), Failed> {
    let left: Vec<_> = left.iter().filter(|footprint| !footprint.is_empty()).collect();
    if left.is_empty() { Ok(()) } else { Err(format!("left over: {left:#?}").into()) }
}
