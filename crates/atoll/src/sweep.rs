//! `atoll sweep`: what servers that are gone left on the host.

use std::net::{Ipv4Addr, SocketAddr};

use clap::Args;
use server::sweep::{Mode, Outcome, Swept};

use crate::{
    failure::Failure,
    logging::{self, LogFormat},
    output::{Output, remark, table},
    settings::{Settings, require_root},
};

/// Remove what servers that are gone left on this host (as root)
///
/// Processes, networks, packet filter rules and directories that no data directory has any longer; of the data directory
/// of the settings, if no server runs there, what its rows do not name; and of the shared cache what nobody used for
/// long. What a running server holds is left alone, and so is every sandbox. Servers do the same at every start.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll sweep --dry-run
  atoll sweep --data-dir /srv/atoll/server --database postgres://atoll@db/atoll")]
pub(crate) struct Sweep {
    #[command(flatten)]
    settings: Settings,
    /// Only tell what would go
    #[arg(long)]
    dry_run: bool,
}

impl Sweep {
    pub(crate) async fn run(self, output: Output) -> anyhow::Result<()> {
        require_root("sweep")?;
        logging::start(LogFormat::Text, "error");
        let config = self.settings.config(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let mode = if self.dry_run { Mode::Look } else { Mode::Remove };
        let swept = server::sweep::sweep(&config, mode).await?;
        for said in &swept.remarks {
            remark(said);
        }
        output.show(&swept, listed)?;
        let failed = swept
            .leftovers
            .iter()
            .filter(|leftover| matches!(leftover.outcome, Outcome::Failed(_)))
            .count();
        if failed > 0 {
            return Err(Failure::new(format!("{failed} of them could not be removed"))
                .hint("the last column says why; `atoll sweep` may be run again")
                .into());
        }
        Ok(())
    }
}

fn listed(swept: &Swept) -> String {
    if swept.leftovers.is_empty() {
        return "nothing is left over".to_owned();
    }
    let rows = swept.leftovers.iter().map(|leftover| {
        let outcome = match &leftover.outcome {
            Outcome::WouldGo => "would go".to_owned(),
            Outcome::Removed => "removed".to_owned(),
            Outcome::Failed(reason) => format!("failed: {reason}"),
        };
        [leftover.kind.to_string(), leftover.name.clone(), leftover.why.clone(), outcome]
    });
    table(["kind", "name", "why", "outcome"], rows)
}
