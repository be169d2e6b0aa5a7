//! `atoll sandbox network`, and the options of a create that say the same.

use api::{CreateNetwork, Network, SandboxId, UpdateNetwork};
use clap::{Args, ValueEnum};
use client::Client;

use crate::output::{Output, properties};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Egress {
    /// Every public address
    Internet,
    /// Only what --allow names; no names are resolved
    None,
}

#[derive(Args)]
pub(crate) struct Policy {
    /// What it reaches [default: internet]
    #[arg(long, value_enum)]
    egress: Option<Egress>,
    /// What it reaches although --egress does not; may be repeated
    #[arg(long, value_name = "CIDR[:PORT]")]
    allow: Vec<String>,
    /// What it does not reach, whatever else is said; may be repeated
    #[arg(long, value_name = "CIDR[:PORT]")]
    deny: Vec<String>,
    /// Megabits in a second, in each direction; 0 is no limit
    #[arg(long, value_name = "MBIT")]
    rate_limit_mbit: Option<u32>,
}

impl Policy {
    fn update(self) -> UpdateNetwork {
        let named = |list: Vec<String>| (!list.is_empty()).then_some(list);
        UpdateNetwork {
            egress: self.egress.map(|egress| match egress {
                Egress::Internet => api::Egress::Internet,
                Egress::None => api::Egress::None,
            }),
            allow: named(self.allow),
            deny: named(self.deny),
            rate_limit_mbit: self.rate_limit_mbit,
        }
    }

    /// Nothing where nothing was said.
    pub(crate) fn of_create(self) -> Option<CreateNetwork> {
        let update = self.update();
        (update != UpdateNetwork::default()).then_some(CreateNetwork::Policy(update))
    }
}

/// Show or change what a sandbox may reach
///
/// Without options it shows the policy and the traffic so far. What an option names takes the place of what was said
/// before; the rest stays. A change holds at once, also for connections that are open.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll sandbox network ID
  atoll sandbox network ID --egress none --allow 203.0.113.5:443
  atoll sandbox network ID --egress internet --no-allow --rate-limit-mbit 20")]
pub(crate) struct ShowOrChange {
    id: SandboxId,
    #[command(flatten)]
    policy: Policy,
    /// Allow nothing by name any longer
    #[arg(long, conflicts_with = "allow")]
    no_allow: bool,
    /// Deny nothing by name any longer
    #[arg(long, conflicts_with = "deny")]
    no_deny: bool,
}

impl ShowOrChange {
    pub(crate) async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let mut update = self.policy.update();
        if self.no_allow {
            update.allow = Some(Vec::new());
        }
        if self.no_deny {
            update.deny = Some(Vec::new());
        }
        let network = if update == UpdateNetwork::default() {
            client.network(&self.id).await?
        } else {
            client.update_network(&self.id, &update).await?
        };
        Ok(output.show(&network, described)?)
    }
}

fn described(network: &Network) -> String {
    let policy = &network.policy;
    properties(&[
        (
            "egress",
            match policy.egress {
                api::Egress::Internet => "internet".to_owned(),
                api::Egress::None => "none".to_owned(),
            },
        ),
        ("allow", policy.allow.join(" ")),
        ("deny", policy.deny.join(" ")),
        (
            "rate limit",
            policy.rate_limit_mbit.map_or_else(String::new, |mbit| format!("{mbit} Mbit/s")),
        ),
        ("sent", format!("{} bytes", network.sent_bytes)),
        ("received", format!("{} bytes", network.received_bytes)),
    ])
}
