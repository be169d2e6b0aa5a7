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
    failure::{self, Failure},
    output::{Output, line, remark},
    pair::{self, Variable},
};

/// As `timeout` of coreutils has it.
const TIMED_OUT: u8 = 124;
/// Atoll failed, not the command; as docker has it.
const NOT_RUN: u8 = 125;

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

fn exit_code_of(code: i32) -> ExitCode {
    u8::try_from(code).map_or(ExitCode::FAILURE, ExitCode::from)
}

fn positive(text: &str) -> Result<f64, &'static str> {
    match text.parse::<f64>() {
        Ok(seconds) if seconds.is_finite() && seconds > 0.0 => Ok(seconds),
        Ok(_) | Err(_) => Err("a timeout is a number of seconds above 0"),
    }
}

/// For a shell. Several arguments reach their program as they are, whatever is in them.
fn script(mut command: Vec<String>) -> String {
    if command.len() == 1 {
        return command.remove(0);
    }
    command.iter().map(|argument| quoted(argument)).collect::<Vec<_>>().join(" ")
}

fn quoted(argument: &str) -> String {
    let is_plain = !argument.is_empty()
        && argument.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_./:,+@%".contains(&b));
    if is_plain { argument.to_owned() } else { format!("'{}'", argument.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn arguments_pass_a_shell_unchanged(arguments in prop::collection::vec("[^\0]{0,12}", 1..5)) {
            let command = ["printf".to_owned(), "%s\\0".to_owned()].into_iter().chain(arguments.clone()).collect();
            let printed = Command::new("sh").arg("-c").arg(script(command)).output().unwrap().stdout;
            let expected: Vec<u8> = arguments.iter().flat_map(|argument| [argument.as_bytes(), b"\0"].concat()).collect();
            prop_assert_eq!(printed, expected);
        }
    }

    #[test]
    fn a_single_argument_is_a_script() {
        assert_eq!(script(vec!["ls | wc -l".to_owned()]), "ls | wc -l");
    }

    #[test]
    fn a_timeout_that_no_command_can_meet_is_refused() {
        for bad in ["0", "-1", "nan", "inf", "soon"] {
            assert!(positive(bad).is_err(), "{bad}");
        }
        assert_eq!(positive("0.5"), Ok(0.5));
    }
}
