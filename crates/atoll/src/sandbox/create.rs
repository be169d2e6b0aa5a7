//! `atoll sandbox create`.

use std::{
    str::FromStr,
    time::{Duration, Instant},
};

use api::{CreateSandbox, DatabaseId, Sandbox, SnapshotId, VolumeMount, VolumeName};
use clap::Args;
use client::{Client, Error};

use super::network::Policy;
use crate::{
    failure::Failure,
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
  atoll sandbox create --cpu 1 --memory-mb 1024 --env TOKEN    # TOKEN as it is here
  atoll sandbox create --egress none --allow 203.0.113.5:443   # one service and nothing else
  atoll sandbox create --volume data --volume models:/models:ro
  atoll sandbox create --from-snapshot SNAPSHOT")]
pub(crate) struct Create {
    /// What it starts from; `atoll template list` shows them
    #[arg(long, value_name = "NAME", default_value = "base")]
    template: String,
    /// Go on from a snapshot, with its memory, disk and sizes; `atoll snapshot list` shows them
    #[arg(long, value_name = "SNAPSHOT", conflicts_with_all = ["template", "cpu", "memory_mb", "disk_mb"])]
    from_snapshot: Option<SnapshotId>,
    /// A volume to attach, at /mnt/NAME unless PATH says where; `ro` for reading only; may be repeated
    #[arg(long = "volume", value_name = "NAME[:PATH][:ro]")]
    volumes: Vec<Attachment>,
    /// A database whose URL all its commands find in DATABASE_URL; may be repeated
    #[arg(long = "database", value_name = "ID")]
    databases: Vec<DatabaseId>,
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
    #[command(flatten)]
    network: Policy,
    /// How long to try while the server is busy, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    wait: u64,
}

impl Create {
    pub(crate) async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let request = CreateSandbox {
            // The sizes and the template come from a snapshot.
            template: self.from_snapshot.is_none().then_some(self.template),
            from_snapshot: self.from_snapshot.map(|id| id.to_string()),
            volumes: (!self.volumes.is_empty())
                .then(|| self.volumes.into_iter().map(|Attachment(mount)| mount).collect()),
            cpu: self.cpu,
            memory_mb: self.memory_mb,
            disk_mb: self.disk_mb,
            ttl_seconds: self.ttl.map(Into::into),
            persistent: self.persistent.then_some(true),
            metadata: pair::map(self.metadata),
            env: pair::environment(self.env)?,
            network: self.network.of_create(),
            databases: (!self.databases.is_empty())
                .then(|| self.databases.iter().map(ToString::to_string).collect()),
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

/// `NAME[:PATH][:ro]`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Attachment(VolumeMount);

impl FromStr for Attachment {
    type Err = Failure;

    fn from_str(text: &str) -> Result<Self, Failure> {
        let (name, rest) =
            text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let name: VolumeName = name.parse().map_err(|error| Failure::new(format!("{error}")))?;
        let (path, read_only) = match rest {
            None => (None, false),
            Some("ro") => (None, true),
            Some(rest) => match rest.strip_suffix(":ro") {
                Some(path) => (Some(path), true),
                None => (Some(rest), false),
            },
        };
        if path.is_some_and(|path| !path.starts_with('/')) {
            return Err(Failure::new("PATH must be absolute, as in data:/srv/data"));
        }
        let (name, mount_path) = (name.to_string(), path.map(ToOwned::to_owned));
        Ok(Self(VolumeMount { name, read_only, mount_path }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_written_with_its_place_and_its_mode() {
        let parsed = |text: &str| {
            let Attachment(mount) = text.parse().unwrap();
            (mount.name, mount.mount_path, mount.read_only)
        };
        let expected = |path: Option<&str>, read_only| {
            ("a".to_owned(), path.map(ToOwned::to_owned), read_only)
        };
        assert_eq!(parsed("a"), expected(None, false));
        assert_eq!(parsed("a:ro"), expected(None, true));
        assert_eq!(parsed("a:/x"), expected(Some("/x"), false));
        assert_eq!(parsed("a:/x:ro"), expected(Some("/x"), true));
        assert_eq!(parsed("a:/x:y"), expected(Some("/x:y"), false));
        for bad in ["", ":/x", "a:", "a:x", "a:rw", "../a:/x", "a:ro:/x"] {
            assert!(bad.parse::<Attachment>().is_err(), "{bad}");
        }
    }
}
