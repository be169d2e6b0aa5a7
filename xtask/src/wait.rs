//! Waits that end: with what they wait for, at a deadline, or when the user interrupts.

use std::{
    process::{Child, ExitStatus},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail};

static INTERRUPTED: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// From here on an interrupt does not kill us: the next wait fails, so that guards put away what was started.
pub(crate) fn listen_for_interrupts() -> anyhow::Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&INTERRUPTED))
            .context("listen for interrupts")?;
    }
    Ok(())
}

pub(crate) fn check_interrupt() -> anyhow::Result<()> {
    if INTERRUPTED.load(Ordering::Relaxed) {
        bail!("go on: interrupted");
    }
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "there is no executor here")]
pub(crate) fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Asks `condition` until it gives something. `what` completes "wait for …".
pub(crate) fn until<T>(
    what: &str,
    limit: Duration,
    step: Duration,
    mut condition: impl FnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = condition()? {
            return Ok(found);
        }
        check_interrupt()?;
        if start.elapsed() > limit {
            bail!("wait for {what}: {} s were not enough", limit.as_secs());
        }
        pause(step);
    }
}

/// The end of a child, or an error at an interrupt, after which the child is dead.
pub(crate) fn end_of(child: &mut Child) -> anyhow::Result<ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if let Err(interrupt) = check_interrupt() {
            let _ = child.kill();
            let _ = child.wait();
            return Err(interrupt);
        }
        pause(Duration::from_millis(20));
    }
}
