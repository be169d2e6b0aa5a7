//! `atoll sandbox create`.

use std::time::{Duration, Instant};

use api::{CreateSandbox, Sandbox};
use clap::Args;
use client::{Client, Error};

use crate::{
    output::{Output, optional_instant, remark},
    pair::{self, Pair, Variable},
};

/// Create a sandbox and print its id
///
/// A size that no sandbox of the template had yet is baked first, which takes up to some minutes; after that it is as
/// fast as the others. While the server has no room, the create is tried again for as long as --wait says.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll sandbox create
  atoll sandbox create --template code-interpreter --ttl 600 --metadata job=7
  atoll sandbox create --cpu 1 --memory-mb 1024 --env TOKEN    # TOKEN as it is here")]
pub(crate) struct Create {
    /// What it starts from; `atoll template list` shows them
    #[arg(long, value_name = "NAME", default_value = "base")]
    template: String,
    /// Virtual CPUs [default: the template's]
    #[arg(long, value_name = "COUNT")]
    cpu: Option<u32>,
    /// Memory in MiB [default: the template's]
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u64>,
    /// Disk in MiB [default: the template's]
    #[arg(long, value_name = "MIB")]
    disk_mb: Option<u64>,
    /// Seconds until it is deleted [default: the server's setting, 1 hour]
    #[arg(long, value_name = "SECONDS", conflicts_with = "persistent")]
    ttl: Option<u32>,
    /// Keep it until it is deleted by hand
    #[arg(long)]
    persistent: bool,
    /// A variable of all its commands, as NAME=VALUE, or NAME to take the value from here; may be repeated
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<Variable>,
    /// What to find it by; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<Pair>,
    /// How long to try while the server is busy, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    wait: u64,
}

impl Create {
    pub(crate) async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let request = CreateSandbox {
            template: Some(self.template),
            cpu: self.cpu,
            memory_mb: self.memory_mb,
            disk_mb: self.disk_mb,
            ttl_seconds: self.ttl.map(Into::into),
            persistent: self.persistent.then_some(true),
            metadata: pair::map(self.metadata),
            env: pair::environment(self.env)?,
            ..CreateSandbox::default()
        };
        let sandbox =
            create_when_there_is_room(client, &request, Duration::from_secs(self.wait)).await?;
        output.show(&sandbox, |sandbox| sandbox.id.to_string())?;
        if !output.json {
            let expires = optional_instant(sandbox.expires_at, "never");
            remark(format_args!(
                "{} after {} ms; expires: {expires}",
                super::status(sandbox.status),
                sandbox.boot_ms
            ));
        }
        Ok(())
    }
}

/// Only refusals that mean that nothing was created invite another try.
async fn create_when_there_is_room(
    client: &Client,
    request: &CreateSandbox,
    patience: Duration,
) -> Result<Sandbox, Error> {
    let start = Instant::now();
    let mut told = false;
    loop {
        let error = match client.create_sandbox(request).await {
            Ok(sandbox) => return Ok(sandbox),
            Err(error) => error,
        };
        let Some(pause) = error.may_retry_after() else { return Err(error) };
        if start.elapsed() + pause > patience {
            return Err(error);
        }
        if !told {
            remark(format_args!("waiting: {error}"));
            told = true;
        }
        tokio::time::sleep(pause).await;
    }
}
