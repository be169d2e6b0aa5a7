//! `atoll volume`: disks that outlive sandboxes.

use api::{CreateVolume, SandboxId, UpdateVolume, Volume, VolumeName};
use clap::{Args, Subcommand};

use crate::{
    Connection,
    output::{instant, mebibytes, properties, table},
};

/// Create, list, grow, attach and delete volumes: disks that outlive sandboxes
///
/// Where a volume is named, its id will do as well.
#[derive(Subcommand)]
pub(crate) enum VolumeCommand {
    Create(Create),
    /// List the volumes
    List,
    /// Show one volume
    Get {
        volume: VolumeName,
    },
    Grow(Grow),
    /// Make a volume that starts as a copy of another
    Clone {
        /// Nobody may be writing it
        from: VolumeName,
        /// The new one's name
        name: VolumeName,
    },
    /// Attach a volume to a stopped machine, which finds it as a disk: /dev/vdb is the first
    Attach {
        volume: VolumeName,
        machine: SandboxId,
    },
    /// Detach a volume from the stopped machine that has it
    Detach {
        volume: VolumeName,
        /// [default: whichever has it]
        machine: Option<SandboxId>,
    },
    /// Delete volumes with what is on them, for ever; not while they are attached
    Delete {
        #[arg(required = true, value_name = "VOLUME")]
        volumes: Vec<VolumeName>,
    },
}

/// Create an empty volume and print its name
///
/// It takes room on the host only as it fills. Attach it with `atoll sandbox create --volume NAME`.
#[derive(Args)]
pub(crate) struct Create {
    name: VolumeName,
    /// Size in MiB [default: 256]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    size_mb: Option<u64>,
}

/// Make a volume larger, attached or not; it never becomes smaller
#[derive(Args)]
pub(crate) struct Grow {
    volume: VolumeName,
    /// Its new size in MiB
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..))]
    size_mb: u64,
}

impl VolumeCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Create(Create { name, size_mb }) => {
                let request = CreateVolume { name, size_mb, size_gb: None, from_volume: None };
                output.show(&client.create_volume(&request).await?, name_of)?;
            }
            Self::List => output.show(&client.volumes().await?, |volumes| listed(volumes))?,
            Self::Get { volume } => output.show(&client.volume(&volume).await?, described)?,
            Self::Grow(Grow { volume, size_mb }) => {
                let update = UpdateVolume { size_mb: Some(size_mb), size_gb: None };
                output.show(&client.update_volume(&volume, &update).await?, described)?;
            }
            Self::Clone { from, name } => {
                let from_volume = Some(from.to_string());
                let request = CreateVolume { name, size_mb: None, size_gb: None, from_volume };
                output.show(&client.create_volume(&request).await?, name_of)?;
            }
            Self::Attach { volume, machine } => {
                output.show(&client.attach_volume(&volume, &machine).await?, described)?;
            }
            Self::Detach { volume, machine } => {
                let volume = client.detach_volume(&volume, machine.as_ref()).await?;
                output.show(&volume, described)?;
            }
            Self::Delete { volumes } => {
                for volume in volumes {
                    client.delete_volume(&volume).await?;
                }
            }
        }
        Ok(())
    }
}

fn name_of(volume: &Volume) -> String {
    volume.name.to_string()
}

fn listed(volumes: &[Volume]) -> String {
    let row = |volume: &Volume| {
        [
            volume.name.to_string(),
            volume.id.to_string(),
            volume.kind.to_string(),
            mebibytes(volume.size_mb),
            volume.state.to_string(),
            attached_to(volume),
            instant(volume.created_at),
        ]
    };
    table(
        ["name", "id", "kind", ">size", "state", "attached to", "created"],
        volumes.iter().map(row),
    )
}

fn described(volume: &Volume) -> String {
    properties(&[
        ("name", volume.name.to_string()),
        ("id", volume.id.to_string()),
        ("kind", volume.kind.to_string()),
        ("size", mebibytes(volume.size_mb)),
        ("state", volume.state.to_string()),
        ("attached to", attached_to(volume)),
        ("created", instant(volume.created_at)),
    ])
}

fn attached_to(volume: &Volume) -> String {
    volume.attached_to.map(|id| id.to_string()).unwrap_or_default()
}
