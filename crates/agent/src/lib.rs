//! `atoll-agent`: PID 1 of the guest, the guest's end of crate `protocol`. A library, so that tests can run the server on
//! a host over a socket pair.

use std::os::fd::OwnedFd;

/// Where and how an agent serves.
#[derive(Debug)]
pub struct Options {
    /// Holds the anonymous files in which long output of execs is kept.
    pub spill_directory: std::path::PathBuf,
}

impl Options {
    /// For tests on a host: nothing of the machine is changed by a repair or a shutdown, the end of the port ends it.
    pub fn hosted() -> Self {
        Self { spill_directory: std::env::temp_dir() }
    }
}

/// Serves the host on `port` until the port ends (hosted) or a shutdown is asked for.
///
/// # Errors
/// The loop itself cannot go on; failures of requests are answered.
pub fn serve(port: OwnedFd, options: Options) -> anyhow::Result<()> {
    drop((port, options));
    Ok(())
}
