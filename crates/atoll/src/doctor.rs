//! `atoll doctor`: what this host can do.

use std::{net::SocketAddr, process::ExitCode};

use clap::Args;
use server::doctor::{Finding, Verdict};

use crate::{
    output::{Output, remark, table},
    settings::Settings,
};

/// Tell what this host can do, and what to do about each lack
///
/// Works beside a server and without one, and changes nothing. As root it tries more. Ends with 1 when something is
/// missing without which no sandbox runs.
#[derive(Args)]
#[command(after_help = "\
Examples:
  sudo atoll doctor
  sudo atoll doctor --pool /srv/atoll --json")]
pub(crate) struct Doctor {
    /// Where the server is to listen
    #[arg(long, env = "ATOLL_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: SocketAddr,
    #[command(flatten)]
    settings: Settings,
}

impl Doctor {
    pub(crate) async fn run(self, output: Output) -> anyhow::Result<ExitCode> {
        let config = self.settings.config(self.listen)?;
        let mut progress = |line: &str| remark(line);
        let findings = server::doctor::examine(&config, &mut progress).await;
        output.show(&findings, |findings| listed(findings))?;
        let has_failed = findings.iter().any(|finding| finding.verdict == Verdict::Fail);
        Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}

fn listed(findings: &[Finding]) -> String {
    let rows = findings.iter().map(|finding| {
        [finding.verdict.name().to_owned(), finding.check.to_owned(), finding.found.clone()]
    });
    let mut text = table(["", "check", "found"], rows);
    for finding in findings {
        if let Some(advice) = &finding.advice {
            text.push_str(&format!("\n{}: {advice}", finding.check));
        }
    }
    text
}
