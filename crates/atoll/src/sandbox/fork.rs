//! `atoll sandbox fork`.

use api::SandboxId;
use clap::Args;
use client::Client;

use crate::{
    output::Output,
    pair::{self, Pair},
};

/// Make sandboxes that go on from this instant of one, and print their ids
///
/// Memory, disk and processes are those of the parent; volumes are not inherited. The parent goes on.
#[derive(Args)]
pub(crate) struct Fork {
    id: SandboxId,
    /// How many
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=16))]
    count: u32,
    /// Added to the parent's; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<Pair>,
}

impl Fork {
    pub(crate) async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let request = api::Fork { metadata: pair::map(self.metadata), count: Some(self.count) };
        let forked = client.fork(&self.id, &request).await?;
        output.show(&forked, |forked| {
            forked.children.iter().map(|child| format!("{}\n", child.id)).collect()
        })?;
        Ok(())
    }
}
