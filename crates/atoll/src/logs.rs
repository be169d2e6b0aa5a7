//! `atoll logs`: what the commands of a sandbox printed.

use std::io::{self, Write as _};

use api::SandboxId;
use clap::{Args, ValueEnum};
use client::{Client, LogStream};

use crate::output;

/// Print what the commands of a sandbox printed, oldest first
#[derive(Args)]
pub(crate) struct Logs {
    /// The sandbox
    id: SandboxId,
    /// Go on with what is printed from now on, until the sandbox is gone
    #[arg(long, short)]
    follow: bool,
    #[arg(long, value_enum, default_value_t = Stream::Both)]
    stream: Stream,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stream {
    Both,
    Stdout,
    Stderr,
}

impl Logs {
    pub(crate) async fn run(self, client: &Client) -> anyhow::Result<()> {
        let stream = match self.stream {
            Stream::Both => LogStream::Both,
            Stream::Stdout => LogStream::Stdout,
            Stream::Stderr => LogStream::Stderr,
        };
        if self.follow {
            let mut lines = client.follow_logs(&self.id, stream).await?;
            while let Some(line) = lines.next().await? {
                output::line(&line)?;
            }
        } else {
            let text = client.logs(&self.id, stream).await?;
            let mut stdout = io::stdout().lock();
            stdout.write_all(&text)?;
            stdout.flush()?;
        }
        Ok(())
    }
}
