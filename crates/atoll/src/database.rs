//! `atoll db`: PostgreSQL in machines of its own.

use std::{os::unix::process::CommandExt, process::Command, time::Duration};

use api::{
    CloneDatabase, CreateDatabase, Database, DatabaseConnection, DatabaseId, DatabaseSize,
    DatabaseStatus,
};
use clap::{Args, Subcommand};
use client::Client;

use crate::{
    Connection,
    failure::Failure,
    output::{instant, mebibytes, properties, table},
};

/// A size that was never used on this host is prepared first.
const READY: Duration = Duration::from_secs(900);

/// Create, list, reach, clone and delete databases: PostgreSQL in machines of its own
#[derive(Subcommand)]
pub(crate) enum DatabaseCommand {
    Create(Create),
    /// List the databases
    List,
    /// Show one database, without its password
    Get {
        database: DatabaseId,
    },
    /// Print the URL by which a database is reached, with its password
    Connection {
        database: DatabaseId,
    },
    /// Open a session with `psql`, which has to be installed
    Psql {
        database: DatabaseId,
        /// For psql
        #[arg(last = true)]
        arguments: Vec<String>,
    },
    Clone(CloneArguments),
    /// Delete databases with all that is in them, for ever; clones stay
    Delete {
        #[arg(required = true, value_name = "DATABASE")]
        databases: Vec<DatabaseId>,
    },
}

/// Create a database and print its id, once it can be reached
#[derive(Args)]
pub(crate) struct Create {
    /// For people
    #[arg(long)]
    label: Option<String>,
    /// Its memory, to which PostgreSQL is tuned: 1g, 4g or 16g [default: 1g]
    #[arg(long)]
    size: Option<DatabaseSize>,
    /// It does not hibernate while nobody is connected
    #[arg(long)]
    always_on: bool,
    /// Without connections for so long, it hibernates [default: the server's setting]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    idle: Option<u64>,
}

/// Make a database with what is in another, and print its id, once it can be reached
#[derive(Args)]
pub(crate) struct CloneArguments {
    from: DatabaseId,
    #[arg(long)]
    label: Option<String>,
    /// [default: the source's]
    #[arg(long)]
    size: Option<DatabaseSize>,
    /// As it was then, from its backups: 2026-11-30T12:00:00Z [default: as it is now]
    #[arg(long, value_name = "TIME")]
    target_time: Option<String>,
}

impl DatabaseCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Create(Create { label, size, always_on, idle }) => {
                let request = CreateDatabase {
                    label,
                    size,
                    always_on: always_on.then_some(true),
                    idle_seconds: idle,
                    ..CreateDatabase::default()
                };
                let made = client.create_database(&request).await?;
                output.show(&ready(&client, &made).await?, id_of)?;
            }
            Self::List => output.show(&client.databases().await?, |databases| listed(databases))?,
            Self::Get { database } => {
                let mut shown = client.database(&database).await?;
                shown.connection = None;
                output.show(&shown, described)?;
            }
            Self::Connection { database } => {
                let reached = client.database_connection(&database).await?;
                output.show(&reached, |reached: &DatabaseConnection| {
                    reached.connection_url.clone()
                })?;
            }
            Self::Psql { database, arguments } => {
                let reached = client.database_connection(&database).await?;
                return Err(psql(&reached, &arguments).into());
            }
            Self::Clone(CloneArguments { from, label, size, target_time }) => {
                let request = CloneDatabase { label, target_time, size };
                let made = client.clone_database(&from, &request).await?;
                output.show(&ready(&client, &made).await?, id_of)?;
            }
            Self::Delete { databases } => {
                for database in databases {
                    client.delete_database(&database).await?;
                }
            }
        }
        Ok(())
    }
}

async fn ready(client: &Client, made: &Database) -> anyhow::Result<Database> {
    let mut database = client.database_ready(&made.id, READY).await?;
    match database.status {
        DatabaseStatus::Failed => Err(Failure::new(format!(
            "the database could not be made: {}",
            database.error.unwrap_or_default()
        ))
        .hint(format!("`atoll db delete {}` removes what is left", database.id))
        .into()),
        DatabaseStatus::Provisioning => {
            Err(Failure::new(format!("database {} is not ready yet", database.id))
                .hint(format!("`atoll db get {}` tells when it is", database.id))
                .into())
        }
        DatabaseStatus::Running
        | DatabaseStatus::Paused
        | DatabaseStatus::Hibernated
        | DatabaseStatus::Stopped
        | DatabaseStatus::Recovering
        | DatabaseStatus::Deleting => {
            database.connection = None;
            Ok(database)
        }
    }
}

/// In place of this process; the password goes by its environment, which other users of the host do not see.
fn psql(reached: &DatabaseConnection, arguments: &[String]) -> Failure {
    let error = Command::new("psql")
        .env("PGHOST", &reached.host)
        .env("PGPORT", reached.port.to_string())
        .env("PGUSER", &reached.username)
        .env("PGPASSWORD", &reached.password)
        .env("PGDATABASE", &reached.database)
        .args(arguments)
        .exec();
    Failure::new(format!("cannot run psql: {error}"))
        .hint("Debian's package is called postgresql-client")
}

fn id_of(database: &Database) -> String {
    database.id.to_string()
}

fn listed(databases: &[Database]) -> String {
    let row = |database: &Database| {
        [
            database.id.to_string(),
            database.label.clone(),
            database.status.to_string(),
            database.size.to_string(),
            mebibytes(database.disk_bytes >> 20),
            database.connections.to_string(),
            instant(database.created_at),
        ]
    };
    table(
        ["id", "label", "status", "size", ">disk", ">connections", "created"],
        databases.iter().map(row),
    )
}

fn described(database: &Database) -> String {
    let idle = if database.always_on {
        "never".to_owned()
    } else {
        format!("{} s without connections", database.idle_seconds)
    };
    properties(&[
        ("id", database.id.to_string()),
        ("label", database.label.clone()),
        ("status", database.status.to_string()),
        ("error", database.error.clone().unwrap_or_default()),
        ("size", database.size.to_string()),
        ("memory", mebibytes(database.memory_mb)),
        ("cpu", database.cpu.to_string()),
        ("disk", mebibytes(database.disk_bytes >> 20)),
        ("connections", database.connections.to_string()),
        ("hibernates after", idle),
        ("last backup", database.last_backup_at.map(instant).unwrap_or_default()),
        ("restorable from", database.restorable_from.map(instant).unwrap_or_default()),
        ("restorable until", database.restorable_until.map(instant).unwrap_or_default()),
        ("backup error", database.backup_error.clone().unwrap_or_default()),
        ("cloned from", database.cloned_from.map(|id| id.to_string()).unwrap_or_default()),
        ("created", instant(database.created_at)),
    ])
}
