//! `atoll exec`: commands that go on without whoever started them.

use std::{
    io::{self, Write as _},
    process::ExitCode,
    time::Duration,
};

use api::{Exec, ExecId, ExecState, ExecStream, SandboxId, StartExec};
use clap::{Args, Subcommand, ValueEnum};
use client::Client;

use crate::{
    Connection,
    command::{NOT_RUN, TIMED_OUT, exit_code_of, positive, script},
    output::{Output, instant, optional_instant, properties, remark, table},
    pair::{self, Variable},
};

const PATIENCE: Duration = Duration::from_secs(30);

/// Start commands that go on without you, look at them, cancel them
///
/// `atoll sandbox exec` watches a command to its end instead; what it runs is listed here as well.
#[derive(Subcommand)]
#[command(after_help = "\
Examples:
  atoll exec start $id --id nightly --timeout 3600 -- './build.sh --all'
  atoll exec logs $id nightly --follow
  atoll exec wait $id nightly")]
pub(crate) enum ExecCommand {
    Start(Start),
    /// List the commands of a machine, newest first
    List {
        /// The machine, or sandbox
        machine: SandboxId,
        /// At most so many
        #[arg(long, default_value_t = 50)]
        limit: usize,
    },
    Logs(Logs),
    /// End a command with all its processes: TERM, and after five seconds KILL
    Cancel {
        /// The machine, or sandbox
        machine: SandboxId,
        exec: ExecId,
    },
    /// Wait for the end of a command, and end with its exit code
    ///
    /// 124 when its timeout ran out; 125 when it was cancelled, or when nobody can say what became of it.
    Wait {
        /// The machine, or sandbox
        machine: SandboxId,
        exec: ExecId,
    },
}

/// Start a command and print its id
///
/// The same id never runs twice in a machine: where it is not certain that a start arrived, start it again under the same
/// id, and a conflict says that it did.
#[derive(Args)]
pub(crate) struct Start {
    /// The machine, or sandbox
    machine: SandboxId,
    /// Its id, unique in the machine: letters, digits, `.`, `_` and `-` [default: one is made]
    #[arg(long, value_name = "ID")]
    id: Option<ExecId>,
    /// Seconds until it and all that it started are killed, at most a day [default: 120]
    #[arg(long, value_name = "SECONDS", value_parser = positive)]
    timeout: Option<f64>,
    /// Where it runs [default: the user's home]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// A variable, as NAME=VALUE, or NAME to take the value from here; may be repeated
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<Variable>,
    /// Who runs it: a name or a number, also USER:GROUP [default: root]
    #[arg(long)]
    user: Option<String>,
    /// A script, or a program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Print what a command printed, byte for byte
#[derive(Args)]
pub(crate) struct Logs {
    /// The machine, or sandbox
    machine: SandboxId,
    exec: ExecId,
    #[arg(long, value_enum, default_value_t = Stream::Stdout)]
    stream: Stream,
    /// Go on until it ends
    #[arg(long, short)]
    follow: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stream {
    Stdout,
    Stderr,
}

impl From<Stream> for ExecStream {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::Stdout => Self::Stdout,
            Stream::Stderr => Self::Stderr,
        }
    }
}

impl ExecCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<ExitCode> {
        let (client, output) = (connection.client()?, connection.output());
        match self {
            Self::Start(start) => start.run(&client, output).await?,
            Self::List { machine, limit } => {
                output.show(&client.execs(&machine, limit).await?, |execs| listed(execs))?;
            }
            Self::Logs(logs) => logs.run(&client).await?,
            Self::Cancel { machine, exec } => {
                output.show(&client.cancel_exec(&machine, &exec).await?, described)?;
            }
            Self::Wait { machine, exec } => {
                let ended = client.exec_end(&machine, &exec).await?;
                if output.json {
                    output.show(&ended, described)?;
                }
                return Ok(exit_code(&ended));
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}

impl Start {
    async fn run(self, client: &Client, output: Output) -> anyhow::Result<()> {
        let request = StartExec {
            exec_id: self.id,
            script: script(self.command),
            timeout_sec: self.timeout,
            cwd: self.cwd,
            env: pair::environment(self.env)?,
            user: self.user,
            stdin: None,
        };
        let exec = client.start_exec(&self.machine, &request).await?;
        output.show(&exec, |exec| exec.exec_id.to_string())?;
        Ok(())
    }
}

impl Logs {
    async fn run(self, client: &Client) -> anyhow::Result<()> {
        let Self { machine, exec, stream, follow } = self;
        let wait = if follow { PATIENCE } else { Duration::ZERO };
        let mut offset = 0;
        loop {
            let page = client.exec_output(&machine, &exec, stream.into(), offset, wait).await?;
            let mut stdout = io::stdout().lock();
            stdout.write_all(&page.bytes)?;
            stdout.flush()?;
            offset = page.next_offset;
            if page.eof || (page.bytes.is_empty() && !follow) {
                return Ok(());
            }
        }
    }
}

fn exit_code(exec: &Exec) -> ExitCode {
    match (exec.state, exec.exit_code) {
        (ExecState::Succeeded | ExecState::Failed, Some(code)) => exit_code_of(code),
        (ExecState::Expired, _) => {
            remark("error: the timeout of the command ran out");
            ExitCode::from(TIMED_OUT)
        }
        (state, _) => {
            remark(format_args!("error: the command is {state}"));
            ExitCode::from(NOT_RUN)
        }
    }
}

fn listed(execs: &[Exec]) -> String {
    let row = |exec: &Exec| {
        [
            exec.exec_id.to_string(),
            exec.state.to_string(),
            code(exec),
            exec.stdout_bytes.to_string(),
            exec.stderr_bytes.to_string(),
            instant(exec.started_at),
            optional_instant(exec.finished_at, "-"),
        ]
    };
    table(
        ["id", "state", ">exit code", ">stdout", ">stderr", "started", "finished"],
        execs.iter().map(row),
    )
}

fn described(exec: &Exec) -> String {
    properties(&[
        ("id", exec.exec_id.to_string()),
        ("state", exec.state.to_string()),
        ("exit code", code(exec)),
        ("killed for", exec.killed.clone().unwrap_or_default()),
        ("stdout", format!("{} bytes", exec.stdout_bytes)),
        ("stderr", format!("{} bytes", exec.stderr_bytes)),
        ("truncated", if exec.truncated { "yes" } else { "no" }.to_owned()),
        ("started", instant(exec.started_at)),
        ("finished", optional_instant(exec.finished_at, "-")),
    ])
}

fn code(exec: &Exec) -> String {
    exec.exit_code.map_or_else(|| "-".to_owned(), |code| code.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_success_ends_with_zero() {
        for state in ExecState::ALL {
            let exec = Exec {
                exec_id: "e".parse().unwrap(),
                machine_id: SandboxId::random(),
                state,
                exit_code: if state == ExecState::Failed { Some(3) } else { Some(0) },
                stdout_bytes: 0,
                stderr_bytes: 0,
                truncated: false,
                started_at: time::OffsetDateTime::UNIX_EPOCH,
                finished_at: None,
                killed: None,
            };
            let is_success =
                format!("{:?}", exit_code(&exec)) == format!("{:?}", ExitCode::SUCCESS);
            assert_eq!(is_success, state == ExecState::Succeeded, "{state}");
        }
    }
}
