//! `atoll sandbox exec`: a command in a sandbox, as if it ran here.

use std::{
    io::{self, Read as _},
    process::ExitCode,
};

use anyhow::Context;
use api::{ErrorCode, ExecRequest, SandboxId};
use clap::Args;
use client::{Client, Error, ExecEvent};

use crate::{
    command::{NOT_RUN, TIMED_OUT, exit_code_of, positive, script},
    failure::{self, Failure},
    output::{Output, line, remark},
    pair::{self, Variable},
};

/// Run a command in a sandbox
///
/// Its output appears here as it comes, and its exit code becomes the one of `atoll`; 124 when the timeout ran out, 125
/// when the command could not be run or watched. An interrupt ends the watching, not the command.
///
/// One argument is a script for the sandbox's shell; several are a program and its arguments, handed over as they are.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll sandbox exec $id -- 'ls | wc -l'
  atoll sandbox exec $id --user panda --cwd /home/panda -- grep -r 'two words' .
  atoll sandbox exec $id -i --timeout 60 -- python3 - < script.py")]
pub(crate) struct Exec {
    /// The sandbox
    id: SandboxId,
    /// Seconds until the command and all that it started are killed [default: none]
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
    /// Hand it the standard input, which is read to its end first
    #[arg(long, short)]
    interactive: bool,
    /// A script, or a program and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Exec {
    pub(crate) async fn run(self, client: &Client, output: Output) -> anyhow::Result<ExitCode> {
        let id = self.id;
        let request = self.request().await?;
        let ended = if output.json {
            run_to_the_end(client, &id, &request, output).await
        } else {
            watch(client, &id, &request).await
        };
        match ended {
            Ok(code) => Ok(code),
            Err(error) if error.is::<io::Error>() => Err(error),
            Err(error) => {
                failure::report(&error);
                Ok(ExitCode::from(NOT_RUN))
            }
        }
    }

    async fn request(self) -> anyhow::Result<ExecRequest> {
        let stdin = if self.interactive {
            Some(tokio::task::spawn_blocking(read_stdin).await??)
        } else {
            None
        };
        Ok(ExecRequest {
            cmd: script(self.command),
            timeout_seconds: self.timeout,
            cwd: self.cwd,
            env: pair::environment(self.env)?,
            user: self.user,
            stdin,
        })
    }
}

async fn watch(client: &Client, id: &SandboxId, request: &ExecRequest) -> anyhow::Result<ExitCode> {
    let mut events = client.exec_stream(id, request).await?;
    while let Some(event) = events.next().await? {
        match event {
            ExecEvent::Stdout(text) => print(&mut io::stdout().lock(), &text)?,
            ExecEvent::Stderr(text) => print(&mut io::stderr().lock(), &text)?,
            ExecEvent::Exited { exit_code } => return Ok(exit_code_of(exit_code)),
            ExecEvent::Failed { message } if message.contains("timed out") => {
                remark(format_args!("error: {message}"));
                return Ok(ExitCode::from(TIMED_OUT));
            }
            ExecEvent::Failed { message } => return Err(Failure::new(message).into()),
        }
    }
    Err(Failure::new("the server stopped telling about the command before its end")
        .hint(format!("the command may still run; what it prints is in: atoll logs {id}"))
        .into())
}

async fn run_to_the_end(
    client: &Client,
    id: &SandboxId,
    request: &ExecRequest,
    output: Output,
) -> anyhow::Result<ExitCode> {
    match client.exec(id, request).await {
        Ok(result) => {
            output.show(&result, |_| String::new())?;
            Ok(if result.timed_out {
                ExitCode::from(TIMED_OUT)
            } else {
                exit_code_of(result.exit_code)
            })
        }
        // What the command printed until then is in the refusal's body.
        Err(Error::Refused(refusal)) if refusal.code == Some(ErrorCode::TimedOut) => {
            line(&serde_json::to_string_pretty(&refusal.body)?)?;
            Ok(ExitCode::from(TIMED_OUT))
        }
        Err(error) => Err(error.into()),
    }
}

fn print(to: &mut impl io::Write, text: &str) -> io::Result<()> {
    to.write_all(text.as_bytes())?;
    to.flush()
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).context("read the standard input")?;
    String::from_utf8(bytes).map_err(|_| {
        Failure::new("the standard input is not text in UTF-8")
            .hint("copy it into the sandbox first: atoll cp - ID:/tmp/input")
            .into()
    })
}
