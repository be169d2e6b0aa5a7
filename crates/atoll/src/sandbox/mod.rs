//! `atoll sandbox`: create, list, get, exec, ports, pause, hibernate, fork, delete.

mod create;
mod exec;
mod fork;
mod network;
mod ports;
mod raw_mode;
mod shell;

use std::process::ExitCode;

use api::{BootMode, Sandbox, SandboxId, SandboxStatus, VolumeMount};
use clap::{Args, Subcommand, ValueEnum};
use client::SandboxFilter;

use crate::{
    Connection,
    output::{instant, mebibytes, optional_instant, properties, table},
    pair::Pair,
};

/// Create, list, use and delete sandboxes
#[derive(Subcommand)]
pub(crate) enum SandboxCommand {
    Create(create::Create),
    List(List),
    /// Show one sandbox
    Get {
        id: SandboxId,
    },
    Exec(exec::Exec),
    Shell(shell::Shell),
    /// List the terminals of a sandbox, the oldest first
    Terminals {
        id: SandboxId,
    },
    /// List what listens in a sandbox, also on its loopback, and what was exposed
    Ports {
        id: SandboxId,
    },
    /// Let sandboxes stand still: their memory stays, they use no processor and their time to live stops
    Pause(Ids),
    /// Let paused sandboxes go on
    Resume(Ids),
    /// Put sandboxes to rest on the host's disk: they use neither memory nor processor; work on one wakes it
    Hibernate(Ids),
    /// Bring hibernated sandboxes back
    Wake(Ids),
    Fork(fork::Fork),
    Network(network::ShowOrChange),
    /// Delete sandboxes with their disks, for ever
    Delete(Ids),
}

#[derive(Args)]
pub(crate) struct Ids {
    #[arg(required = true, value_name = "ID")]
    ids: Vec<SandboxId>,
}

/// List the sandboxes, newest first
#[derive(Args)]
pub(crate) struct List {
    /// Only those in this state
    #[arg(long, value_enum)]
    status: Option<Status>,
    /// Only those with this metadata; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<Pair>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Status {
    Creating,
    Running,
    Paused,
    Hibernated,
    Stopped,
    Deleting,
    Failed,
}

impl From<Status> for SandboxStatus {
    fn from(status: Status) -> Self {
        match status {
            Status::Creating => Self::Creating,
            Status::Running => Self::Running,
            Status::Paused => Self::Paused,
            Status::Hibernated => Self::Hibernated,
            Status::Stopped => Self::Stopped,
            Status::Deleting => Self::Deleting,
            Status::Failed => Self::Failed,
        }
    }
}

impl SandboxCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<ExitCode> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Create(create) => create.run(&client, output).await?,
            Self::List(List { status, metadata }) => {
                let metadata = metadata.into_iter().map(|pair| (pair.name, pair.value)).collect();
                let filter = SandboxFilter { status: status.map(Into::into), metadata };
                output.show(&client.sandboxes(&filter).await?, |sandboxes| listed(sandboxes))?;
            }
            Self::Get { id } => output.show(&client.sandbox(&id).await?, described)?,
            Self::Exec(exec) => return exec.run(&client, output).await,
            Self::Shell(shell) => return shell.run(&client).await,
            Self::Terminals { id } => {
                output.show(&client.terminals(&id).await?, |terminals| shell::listed(terminals))?;
            }
            Self::Ports { id } => {
                output.show(&client.ports(&id).await?, |ports| ports::listed(ports))?;
            }
            Self::Network(network) => network.run(&client, output).await?,
            Self::Pause(Ids { ids }) => {
                for id in ids {
                    client.pause(&id).await?;
                }
            }
            Self::Resume(Ids { ids }) => {
                for id in ids {
                    client.resume(&id).await?;
                }
            }
            Self::Hibernate(Ids { ids }) => {
                for id in ids {
                    client.hibernate(&id).await?;
                }
            }
            Self::Wake(Ids { ids }) => {
                for id in ids {
                    client.wake(&id).await?;
                }
            }
            Self::Fork(fork) => fork.run(&client, output).await?,
            Self::Delete(Ids { ids }) => {
                for id in ids {
                    client.delete_sandbox(&id).await?;
                }
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn listed(sandboxes: &[Sandbox]) -> String {
    let row = |sandbox: &Sandbox| {
        [
            sandbox.id.to_string(),
            sandbox.template.to_string(),
            status(sandbox.status).to_owned(),
            sandbox.cpu.to_string(),
            mebibytes(sandbox.memory_mb),
            mebibytes(sandbox.disk_mb),
            instant(sandbox.created_at),
            expires(sandbox),
        ]
    };
    table(
        ["id", "template", "status", ">cpu", ">memory", ">disk", "created", "expires"],
        sandboxes.iter().map(row),
    )
}

fn described(sandbox: &Sandbox) -> String {
    let metadata: Vec<_> =
        sandbox.metadata.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let boot = match sandbox.boot_mode {
        BootMode::Snapshot => "restored",
        BootMode::Cold => "booted",
    };
    properties(&[
        ("id", sandbox.id.to_string()),
        ("template", sandbox.template.to_string()),
        ("status", status(sandbox.status).to_owned()),
        ("error", sandbox.error.clone().unwrap_or_default()),
        ("cpu", sandbox.cpu.to_string()),
        ("memory", mebibytes(sandbox.memory_mb)),
        ("disk", mebibytes(sandbox.disk_mb)),
        ("address", sandbox.guest_ip.clone()),
        ("created", instant(sandbox.created_at)),
        ("expires", expires(sandbox)),
        ("metadata", metadata.join(" ")),
        ("snapshot", sandbox.from_snapshot.map(|id| id.to_string()).unwrap_or_default()),
        ("volumes", sandbox.volumes.iter().map(attached).collect::<Vec<_>>().join(" ")),
        ("start", format!("{boot} in {} ms under {}", sandbox.boot_ms, sandbox.accelerator)),
    ])
}

/// As `--volume` has it.
fn attached(mount: &VolumeMount) -> String {
    let path = mount.mount_path.as_ref().map(|path| format!(":{path}")).unwrap_or_default();
    format!("{}{path}{}", mount.name, if mount.read_only { ":ro" } else { "" })
}

fn expires(sandbox: &Sandbox) -> String {
    optional_instant(sandbox.expires_at, if sandbox.persistent { "never" } else { "-" })
}

pub(crate) fn status(status: SandboxStatus) -> &'static str {
    match status {
        SandboxStatus::Creating => "creating",
        SandboxStatus::Running => "running",
        SandboxStatus::Paused => "paused",
        SandboxStatus::Hibernated => "hibernated",
        SandboxStatus::Stopped => "stopped",
        SandboxStatus::Deleting => "deleting",
        SandboxStatus::Failed => "failed",
    }
}
