//! `atoll usage`: what an account has used.

use api::{AccountId, Usage};
use clap::Args;
use server::Local;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    Connection,
    output::{instant, properties},
    settings::{Settings, require_root},
};

/// Show what the key's account has used: machines, volumes, snapshots and traffic, and what that costs
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll usage
  atoll usage --from 2026-11-01T00:00:00Z --to 2026-12-01T00:00:00Z --json
  sudo atoll usage --local --account ada      # on the server's host")]
pub(crate) struct ShowUsage {
    /// From when on [default: the beginning of this month in UTC]
    #[arg(long, value_name = "TIME", value_parser = time_of)]
    from: Option<OffsetDateTime>,
    /// Until when [default: now]
    #[arg(long, value_name = "TIME", value_parser = time_of)]
    to: Option<OffsetDateTime>,
    /// Read the database on this host, as root; needs no key. The last minute's traffic may be missing
    #[arg(long)]
    local: bool,
    /// Of another account than `default`, with --local
    #[arg(long, value_name = "ACCOUNT", requires = "local")]
    account: Option<AccountId>,
    #[command(flatten, next_help_heading = "Options with --local")]
    settings: Settings,
}

impl ShowUsage {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let usage = if self.local {
            require_root("usage --local")?;
            let local = Local::open(self.settings.config_on_any_port()?).await?;
            let account = self.account.unwrap_or_else(AccountId::default_account);
            let usage = local.usage(&account, self.from, self.to).await;
            local.close().await;
            usage?
        } else {
            connection.client()?.usage(self.from, self.to).await?
        };
        Ok(connection.output().show(&usage, described)?)
    }
}

fn time_of(text: &str) -> Result<OffsetDateTime, String> {
    OffsetDateTime::parse(text, &Rfc3339)
        .map_err(|_| "a time is written like 2026-11-01T00:00:00Z".to_owned())
}

fn described(usage: &Usage) -> String {
    let used = &usage.used;
    let price = |of: &dyn Fn(&api::Price) -> f64| {
        usage
            .price
            .as_ref()
            .map_or_else(String::new, |price| format!("  {:.2} {}", of(price), price.currency))
    };
    let line = |amount: String, of: &dyn Fn(&api::Price) -> f64| format!("{amount}{}", price(of));
    properties(&[
        ("account", usage.account.to_string()),
        ("from", instant(usage.from)),
        ("to", instant(usage.to)),
        ("vCPUs", line(format!("{:.3} h", used.vcpu_seconds / 3600.0), &|price| price.vcpus)),
        (
            "memory",
            line(format!("{:.3} GB h", used.memory_gb_seconds / 3600.0), &|price| price.memory),
        ),
        (
            "volumes",
            line(format!("{:.4} GB months", used.volume_gb_months), &|price| price.volumes),
        ),
        (
            "snapshots",
            line(format!("{:.4} GB months", used.snapshot_gb_months), &|price| price.snapshots),
        ),
        ("egress", line(format!("{} bytes", used.egress_bytes), &|price| price.egress)),
        ("total", price(&|price| price.total).trim().to_owned()),
    ])
}
