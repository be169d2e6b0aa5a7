//! `atoll machine`: create, list, get, start, stop, delete.

use api::{CreateMachine, Machine, MachineVolume, SandboxId};
use clap::{Args, Subcommand};
use client::RootDisk;

use crate::{
    Connection,
    output::{instant, mebibytes, properties, table},
    pair::Pair,
    sandbox::status,
};

/// Create, list, start, stop and delete machines: sandboxes that live until they are deleted
///
/// A machine's root disk is a volume, so it can be stopped, started and kept. `atoll sandbox` works on machines, too.
#[derive(Subcommand)]
pub(crate) enum MachineCommand {
    Create(Create),
    /// List the machines, newest first; every sandbox is one of them
    List,
    /// Show one machine
    Get {
        id: SandboxId,
    },
    /// Boot machines from their disks
    Start(Ids),
    /// Have machines power off in order; their disks are kept, memory and processor are free
    Stop(Ids),
    Delete(Delete),
}

/// Create a machine and print its id
#[derive(Args)]
pub(crate) struct Create {
    /// For people
    #[arg(long)]
    name: Option<String>,
    /// The template [default: base]
    #[arg(long, value_name = "TEMPLATE")]
    stack: Option<String>,
    /// Virtual CPUs [default: 1]
    #[arg(long, value_name = "COUNT")]
    vcpus: Option<u32>,
    /// Memory in MiB [default: 1024]
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u64>,
    /// Root disk in GiB [default: 10]
    #[arg(long, value_name = "GIB")]
    rootfs_size_gb: Option<u64>,
    /// May be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    metadata: Vec<Pair>,
    /// Boot from this root disk, which was preserved or detached
    #[arg(long, value_name = "VOLUME", conflicts_with_all = ["stack", "rootfs_size_gb"])]
    root_volume: Option<String>,
}

#[derive(Args)]
pub(crate) struct Ids {
    #[arg(required = true, value_name = "ID")]
    ids: Vec<SandboxId>,
}

/// Delete machines for ever; their other volumes stay
#[derive(Args)]
pub(crate) struct Delete {
    #[arg(required = true, value_name = "ID")]
    ids: Vec<SandboxId>,
    /// Their root disks stay, too: as volumes, from which other machines can boot
    #[arg(long)]
    preserve_storage: bool,
}

impl MachineCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Create(create) => {
                let machine = client.create_machine(&create.request()).await?;
                output.show(&machine, |machine| machine.id.to_string())?;
            }
            Self::List => output.show(&client.machines().await?, |machines| listed(machines))?,
            Self::Get { id } => output.show(&client.machine(&id).await?, described)?,
            Self::Start(Ids { ids }) => {
                for id in ids {
                    client.start_machine(&id).await?;
                }
            }
            Self::Stop(Ids { ids }) => {
                for id in ids {
                    client.stop_machine(&id).await?;
                }
            }
            Self::Delete(Delete { ids, preserve_storage }) => {
                let root_disk = if preserve_storage { RootDisk::Stays } else { RootDisk::Goes };
                for id in ids {
                    client.delete_machine(&id, root_disk).await?;
                }
            }
        }
        Ok(())
    }
}

impl Create {
    fn request(self) -> CreateMachine {
        let metadata: std::collections::BTreeMap<_, _> =
            self.metadata.into_iter().map(|pair| (pair.name, pair.value)).collect();
        CreateMachine {
            name: self.name,
            vcpus: self.vcpus,
            memory_mb: self.memory_mb,
            rootfs_size_gb: self.rootfs_size_gb,
            stack: self.stack,
            metadata: Some(metadata).filter(|metadata| !metadata.is_empty()),
            root_volume_id: self.root_volume,
        }
    }
}

fn listed(machines: &[Machine]) -> String {
    let row = |machine: &Machine| {
        [
            machine.id.to_string(),
            machine.name.clone(),
            machine.stack.to_string(),
            status(machine.state).to_owned(),
            machine.vcpus.to_string(),
            mebibytes(machine.memory_mb),
            instant(machine.created_at),
        ]
    };
    table(
        ["id", "name", "stack", "state", ">vcpus", ">memory", "created"],
        machines.iter().map(row),
    )
}

fn described(machine: &Machine) -> String {
    let metadata: Vec<_> =
        machine.metadata.iter().map(|(name, value)| format!("{name}={value}")).collect();
    properties(&[
        ("id", machine.id.to_string()),
        ("name", machine.name.clone()),
        ("stack", machine.stack.to_string()),
        ("state", status(machine.state).to_owned()),
        ("error", machine.error.clone().unwrap_or_default()),
        ("vcpus", machine.vcpus.to_string()),
        ("memory", mebibytes(machine.memory_mb)),
        ("root disk", format!("{} GiB", machine.rootfs_size_gb)),
        ("root volume", machine.root_volume_id.map(|id| id.to_string()).unwrap_or_default()),
        ("volumes", machine.volumes.iter().map(attached).collect::<Vec<_>>().join(" ")),
        ("created", instant(machine.created_at)),
        ("metadata", metadata.join(" ")),
    ])
}

fn attached(volume: &MachineVolume) -> String {
    let place = volume.mount_path.as_ref().or(volume.device.as_ref());
    let place = place.map(|place| format!(":{place}")).unwrap_or_default();
    format!("{}{place}{}", volume.name, if volume.read_only { ":ro" } else { "" })
}
