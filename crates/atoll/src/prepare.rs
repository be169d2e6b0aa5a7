//! `atoll prepare`: everything that a first create would otherwise wait for.

use std::time::Instant;

use anyhow::Context;
use clap::Args;

use crate::{
    interrupt,
    logging::{self, LogFormat},
    output::remark,
    settings::{Settings, require_root},
};

/// Build the guest kernel and the built-in templates and bake their default sizes (as root)
///
/// The set-up step of a host, after the packages that scripts/setup.sh installs. It fetches Debian packages and takes
/// some minutes the first time; what is there already is left alone.
#[derive(Args)]
pub(crate) struct Prepare {
    #[command(flatten)]
    settings: Settings,
}

impl Prepare {
    pub(crate) async fn run(self) -> anyhow::Result<()> {
        require_root("prepare")?;
        logging::start(LogFormat::Text, "error");
        let (config, data_dir) = self.settings.scratch_config()?;
        server::prepare(&config, &mut progress(), interrupt::requested()?).await?;
        data_dir.close().context("remove the data directory")
    }
}

/// Lines that begin with the seconds since now.
pub(crate) fn progress() -> impl FnMut(&str) + Send {
    let start = Instant::now();
    move |step| remark(format_args!("[{:4}s] {step}", start.elapsed().as_secs()))
}
