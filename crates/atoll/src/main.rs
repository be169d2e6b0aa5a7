//! The `atoll` program: `serve` is the server, every other command is a client of its API.

mod account;
mod command;
mod copy;
mod database;
mod databases;
mod demo;
mod doctor;
mod exec;
mod failure;
mod interrupt;
mod key;
mod limits;
mod logging;
mod logs;
mod machine;
mod output;
mod pair;
mod prepare;
mod previews;
mod sandbox;
mod serve;
mod settings;
mod snapshot;
mod sweep;
mod template;
mod usage;
mod version;
mod volume;

use std::{process::ExitCode, time::Duration};

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use client::Client;

use crate::output::Output;

/// Machines of their own for programs and AI agents, on a host of yours
#[derive(Parser)]
#[command(name = "atoll", version, max_term_width = 100, after_help = EXAMPLES, subcommand_required = true)]
struct Atoll {
    #[command(flatten)]
    connection: Connection,
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  atoll serve                                      # as root; prints a URL and a first key
  id=$(atoll sandbox create --template code-interpreter)
  atoll cp sales.csv $id:/home/panda/sales.csv
  atoll sandbox exec $id -- python3 -c 'print(6 * 7)'
  atoll sandbox delete $id

Results go to standard output, everything else to standard error.
`atoll help COMMAND` says more about each.";

/// Which server, and how results are shown.
#[derive(Args)]
#[command(next_help_heading = "Global options")]
struct Connection {
    /// Where the server is
    #[arg(
        long,
        global = true,
        env = "ATOLL_URL",
        default_value = "http://127.0.0.1:8080",
        value_name = "URL"
    )]
    url: String,
    /// The key to use; better given in the environment, where other users of the host do not see it
    #[arg(long, global = true, env = "ATOLL_KEY", value_name = "KEY", hide_env_values = true)]
    key: Option<String>,
    /// Print JSON, for programs
    #[arg(long, global = true)]
    json: bool,
}

impl Connection {
    fn client(&self) -> Result<Client, client::Error> {
        Client::new(&self.url, self.key.as_deref())
    }

    fn output(&self) -> Output {
        Output { json: self.json }
    }
}

#[derive(Subcommand)]
enum Command {
    Serve(serve::Serve),
    Prepare(prepare::Prepare),
    Demo(demo::Demo),
    Doctor(doctor::Doctor),
    Sweep(sweep::Sweep),
    #[command(subcommand)]
    Sandbox(sandbox::SandboxCommand),
    #[command(subcommand)]
    Exec(exec::ExecCommand),
    Cp(copy::Copy),
    Logs(logs::Logs),
    #[command(subcommand)]
    Machine(machine::MachineCommand),
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    #[command(subcommand)]
    Volume(volume::VolumeCommand),
    #[command(subcommand)]
    Db(database::DatabaseCommand),
    #[command(subcommand)]
    Template(template::TemplateCommand),
    #[command(subcommand)]
    Key(key::KeyCommand),
    #[command(subcommand)]
    Account(account::AccountCommand),
    Usage(usage::ShowUsage),
    Version(version::Version),
}

fn main() -> ExitCode {
    let atoll = Atoll::from_arg_matches(&Atoll::command().get_matches())
        .unwrap_or_else(|error| error.exit());
    // Before there are threads, which would keep what they had.
    if let Err(error) = server::give_up_privileges() {
        return failure::report(&anyhow::Error::new(error).context("give up privileges"));
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            return failure::report(&anyhow::Error::new(error).context("start the runtime"));
        }
    };
    let ended = runtime.block_on(run(atoll));
    // Dropping its tasks ends what they own, like a machine that is being baked. Bounded, because a read of standard
    // input cannot be cancelled.
    runtime.shutdown_timeout(Duration::from_secs(1));
    ended.unwrap_or_else(|error| failure::report(&error))
}

async fn run(Atoll { connection, command }: Atoll) -> anyhow::Result<ExitCode> {
    match command {
        Command::Serve(serve) => serve.run(connection.output()).await?,
        Command::Prepare(prepare) => prepare.run().await?,
        Command::Demo(demo) => demo.run(&connection).await?,
        Command::Doctor(doctor) => return doctor.run(connection.output()).await,
        Command::Sweep(sweep) => sweep.run(connection.output()).await?,
        Command::Sandbox(command) => return command.run(&connection).await,
        Command::Exec(command) => return command.run(&connection).await,
        Command::Cp(copy) => copy.run(&connection.client()?).await?,
        Command::Logs(logs) => logs.run(&connection.client()?).await?,
        Command::Machine(command) => command.run(&connection).await?,
        Command::Snapshot(command) => command.run(&connection).await?,
        Command::Volume(command) => command.run(&connection).await?,
        Command::Db(command) => command.run(&connection).await?,
        Command::Template(command) => command.run(&connection).await?,
        Command::Key(command) => command.run(&connection).await?,
        Command::Account(command) => command.run(connection.output()).await?,
        Command::Usage(usage) => usage.run(&connection).await?,
        Command::Version(version) => version.run(connection.output())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests;
