//! `atoll snapshot`: the memory and disk of a sandbox at one instant.

use api::{CreateSnapshot, SandboxId, Snapshot, SnapshotId};
use clap::{Args, Subcommand};

use crate::{
    Connection,
    output::{instant, mebibytes, properties, remark, table},
};

/// Take, list and delete snapshots: memory and disk of a sandbox at one instant
#[derive(Subcommand)]
pub(crate) enum SnapshotCommand {
    Create(Create),
    List(List),
    /// Show one snapshot
    Get {
        id: SnapshotId,
    },
    /// Delete snapshots; sandboxes made from them go on
    Delete {
        #[arg(required = true, value_name = "ID")]
        ids: Vec<SnapshotId>,
    },
}

/// Take a snapshot of a sandbox, which goes on, and print its id
///
/// It may be running, paused or hibernated. `atoll sandbox create --from-snapshot ID` makes sandboxes from it.
#[derive(Args)]
pub(crate) struct Create {
    #[arg(value_name = "SANDBOX")]
    sandbox: SandboxId,
    /// To find it by
    #[arg(long)]
    name: Option<String>,
}

/// List the snapshots, newest first
#[derive(Args)]
pub(crate) struct List {
    /// Only those of this sandbox
    #[arg(long, value_name = "ID")]
    sandbox: Option<SandboxId>,
}

impl SnapshotCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Create(Create { sandbox, name }) => {
                let snapshot = client.create_snapshot(&sandbox, &CreateSnapshot { name }).await?;
                output.show(&snapshot, |snapshot| snapshot.id.to_string())?;
                if !output.json {
                    remark(format_args!("{} of its own", size(snapshot.size_bytes)));
                }
            }
            Self::List(List { sandbox }) => {
                let snapshots = client.snapshots(sandbox.as_ref()).await?;
                output.show(&snapshots, |snapshots| listed(snapshots))?;
            }
            Self::Get { id } => output.show(&client.snapshot(&id).await?, described)?,
            Self::Delete { ids } => {
                for id in ids {
                    client.delete_snapshot(&id).await?;
                }
            }
        }
        Ok(())
    }
}

fn listed(snapshots: &[Snapshot]) -> String {
    let row = |snapshot: &Snapshot| {
        [
            snapshot.id.to_string(),
            snapshot.name.clone(),
            snapshot.sandbox_id.to_string(),
            snapshot.template.to_string(),
            size(snapshot.size_bytes),
            instant(snapshot.created_at),
        ]
    };
    table(["id", "name", "sandbox", "template", ">size", "created"], snapshots.iter().map(row))
}

fn described(snapshot: &Snapshot) -> String {
    properties(&[
        ("id", snapshot.id.to_string()),
        ("name", snapshot.name.clone()),
        ("sandbox", snapshot.sandbox_id.to_string()),
        ("template", snapshot.template.to_string()),
        ("cpu", snapshot.cpu.to_string()),
        ("memory", mebibytes(snapshot.memory_mb)),
        ("disk", mebibytes(snapshot.disk_mb)),
        ("size", format!("{} of its own", size(snapshot.size_bytes))),
        ("total", format!("{} with what it shares", size(snapshot.total_bytes))),
        ("created", instant(snapshot.created_at)),
    ])
}

fn size(bytes: u64) -> String {
    mebibytes(bytes.div_ceil(1 << 20))
}
