//! Runs `ip` and `nft`: input given, output bounded in time, a refusal told in their own words.

use std::{borrow::Cow, io, process::Stdio, time::Duration};

use tokio::{io::AsyncWriteExt, process::Child};

use super::{Error, address::Instance};

/// They take milliseconds; a host under load may need its time.
const DEADLINE: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy)]
pub(super) enum Program {
    /// Reads commands of `ip` from its input and ends at the first that fails.
    Ip,
    /// The same, but goes on after one that fails; it then ends with a failure.
    IpRegardless,
    /// Applies its input as one transaction.
    Nft,
    /// Prints all chains of all tables.
    NftListChains,
    /// Prints the names of all tables.
    NftListTables,
    /// Prints the host's table of an instance.
    NftListTable(Instance),
}

impl Program {
    fn name(self) -> &'static str {
        match self {
            Self::Ip | Self::IpRegardless => "ip",
            Self::Nft | Self::NftListChains | Self::NftListTables | Self::NftListTable(_) => "nft",
        }
    }

    fn arguments(self) -> Vec<Cow<'static, str>> {
        let fixed: &[&str] = match self {
            Self::Ip => &["-batch", "-"],
            Self::IpRegardless => &["-force", "-batch", "-"],
            Self::Nft => &["-f", "-"],
            Self::NftListChains => &["list", "chains"],
            Self::NftListTables => &["list", "tables"],
            Self::NftListTable(_) => &["list", "table", "inet"],
        };
        let mut arguments: Vec<_> = fixed.iter().map(|word| Cow::Borrowed(*word)).collect();
        if let Self::NftListTable(instance) = self {
            arguments.push(instance.table().into());
        }
        arguments
    }
}

/// A program that waits for its input. Dropping it ends it.
pub(super) struct Running {
    child: Child,
    name: &'static str,
}

/// Starts `program` in the network namespace of the calling thread, which must be in a runtime's context.
pub(super) fn start(program: Program) -> Result<Running, Error> {
    let name = program.name();
    let child = tokio::process::Command::new(name)
        .args(program.arguments().iter().map(|word| &**word))
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| Error::Start { program: name, source })?;
    Ok(Running { child, name })
}

impl Running {
    /// Gives it `input` and waits for its end; what it printed.
    pub(super) async fn finish(mut self, input: &str) -> Result<String, Error> {
        let failed = |source| Error::Start { program: self.name, source };
        let exchange = async {
            if let Some(mut stdin) = self.child.stdin.take() {
                match stdin.write_all(input.as_bytes()).await {
                    // It ended early; its exit status says why.
                    Err(error) if error.kind() == io::ErrorKind::BrokenPipe => {}
                    other => other?,
                }
            }
            self.child.wait_with_output().await
        };
        let output = tokio::time::timeout(DEADLINE, exchange)
            .await
            .map_err(|_| Error::Stuck { what: self.name, deadline: DEADLINE })?
            .map_err(failed)?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(Error::Refused { program: self.name, reason })
    }
}

/// Starts `program` on the host and waits for its end.
pub(super) async fn run(program: Program, input: &str) -> Result<String, Error> {
    start(program)?.finish(input).await
}
