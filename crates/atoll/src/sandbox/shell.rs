//! `atoll sandbox shell`: a terminal in a sandbox, as if it were here.

use std::{
    io::{self, IsTerminal as _, Read as _},
    process::ExitCode,
    time::Duration,
};

use anyhow::Context;
use api::{ErrorCode, SandboxId, Terminal, TerminalId};
use clap::Args;
use client::{Client, Error, ScreenEvent, TerminalConnection, TerminalOptions};
use tokio::{
    io::AsyncWriteExt,
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::Instant,
};

use super::raw_mode::{RawMode, window_size};
use crate::{
    command::{NOT_RUN, exit_code_of, script},
    failure::{self, Failure},
    output::{instant, remark, table},
    pair::{self, Variable},
};

/// The server may be started anew meanwhile.
const RECONNECT_FOR: Duration = Duration::from_secs(60);
const RECONNECT_EVERY: Duration = Duration::from_secs(1);
/// Of what is typed meanwhile.
const MOST_KEPT: usize = 64 << 10;
/// What a terminal takes for the end of its input.
const END_OF_INPUT: u8 = 4;
const INTERRUPT: u8 = 3;
/// The server's word for a restart, and for another client that has attached.
const RESTARTS: u16 = 1012;
const TAKEN_OVER: u16 = 4001;

/// Open a terminal in a sandbox
///
/// Without a command it is a login shell; its exit code becomes the one of `atoll`, 125 when there is no terminal or it is
/// lost. When the connection breaks off it is made again, and nothing is missing. At the beginning of a line, `~.` leaves
/// the terminal, which then goes on for some minutes.
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll sandbox shell $id
  atoll sandbox shell $id --user panda -- top
  atoll sandbox shell $id --terminal $terminal       # go on where another connection was lost")]
pub(crate) struct Shell {
    /// The sandbox
    id: SandboxId,
    /// Who it runs as: a name or a number, also USER:GROUP [default: root]
    #[arg(long)]
    user: Option<String>,
    /// Where it begins [default: the user's home]
    #[arg(long, value_name = "DIR")]
    cwd: Option<String>,
    /// A variable, as NAME=VALUE, or NAME to take the value from here; may be repeated
    #[arg(long, value_name = "NAME[=VALUE]")]
    env: Vec<Variable>,
    /// Attach to this terminal instead of opening another; `atoll sandbox terminals` lists them
    #[arg(long, value_name = "ID", conflicts_with_all = ["user", "cwd", "env", "command"])]
    terminal: Option<TerminalId>,
    /// A script, or a program and its arguments [default: the user's shell]
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl Shell {
    pub(crate) async fn run(self, client: &Client) -> anyhow::Result<ExitCode> {
        let sandbox = self.id;
        let connection = match self.terminal {
            Some(terminal) => {
                client.attach_terminal(&sandbox, &terminal, None, window_size()).await
            }
            None => client.open_terminal(&sandbox, &self.options()?).await,
        };
        let ended = match connection {
            Ok(connection) => Session::begin(client, sandbox, connection)?.run().await,
            Err(error) => Err(error.into()),
        };
        ended.or_else(|error| {
            failure::report(&error);
            Ok(ExitCode::from(NOT_RUN))
        })
    }

    fn options(self) -> anyhow::Result<TerminalOptions> {
        let mut env = pair::environment(self.env)?.unwrap_or_default();
        if let Ok(term) = std::env::var("TERM")
            && !term.is_empty()
        {
            env.entry("TERM".to_owned()).or_insert(term);
        }
        Ok(TerminalOptions {
            cmd: (!self.command.is_empty()).then(|| script(self.command)),
            user: self.user,
            cwd: self.cwd,
            env,
            size: window_size(),
        })
    }
}

pub(crate) fn listed(terminals: &[Terminal]) -> String {
    let row = |terminal: &Terminal| {
        let state = match (terminal.exit_code, terminal.attached) {
            (Some(code), _) => format!("ended ({code})"),
            (None, true) => "attached".to_owned(),
            (None, false) => "detached".to_owned(),
        };
        let size = format!("{}x{}", terminal.cols, terminal.rows);
        [terminal.id.to_string(), terminal.user.clone(), state, size, instant(terminal.started_at)]
    };
    table(["id", "user", "state", "size", "started"], terminals.iter().map(row))
}

/// From its first connection to the end of the terminal.
struct Session<'a> {
    client: &'a Client,
    sandbox: SandboxId,
    connection: TerminalConnection,
    /// Bytes of the terminal's output that were shown, counted from its beginning.
    shown: u64,
    typed: mpsc::Receiver<Vec<u8>>,
    resized: Signal,
    ends: [Signal; 3],
    escape: Escape,
    /// Given back when the session is dropped, whichever way it ends.
    raw_mode: Option<RawMode>,
}

/// Why a connection is at its end.
enum Ended {
    Exited(i32),
    Lost,
    Left,
    Failed(String),
}

impl<'a> Session<'a> {
    fn begin(
        client: &'a Client,
        sandbox: SandboxId,
        connection: TerminalConnection,
    ) -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listen for signals");
        let resized = listen(SignalKind::window_change())?;
        let ends = [
            listen(SignalKind::terminate())?,
            listen(SignalKind::hangup())?,
            listen(SignalKind::interrupt())?,
        ];
        let is_terminal = io::stdin().is_terminal();
        let raw_mode = is_terminal.then(RawMode::enter).transpose().context("set the terminal")?;
        let escape = if is_terminal { Escape::default() } else { Escape::Never };
        let (shown, typed) = (connection.offset, keyboard(is_terminal));
        Ok(Self { client, sandbox, connection, shown, typed, resized, ends, escape, raw_mode })
    }

    async fn run(mut self) -> anyhow::Result<ExitCode> {
        let ended = loop {
            match self.converse().await? {
                Ended::Lost => match self.reconnect().await? {
                    Some(ended) => break ended,
                    None => continue,
                },
                ended @ (Ended::Exited(_) | Ended::Left | Ended::Failed(_)) => break ended,
            }
        };
        // Whatever is written from here on is for the terminal as it was.
        self.raw_mode = None;
        match ended {
            Ended::Exited(code) => Ok(exit_code_of(code)),
            Ended::Left | Ended::Lost => {
                let (sandbox, terminal) = (self.sandbox, self.connection.id);
                remark(format_args!(
                    "left the terminal; go on with: atoll sandbox shell {sandbox} --terminal {terminal}"
                ));
                Ok(ExitCode::from(NOT_RUN))
            }
            Ended::Failed(message) => Err(Failure::new(message).into()),
        }
    }

    async fn converse(&mut self) -> anyhow::Result<Ended> {
        let TerminalConnection { keyboard, screen, .. } = &mut self.connection;
        let (mut stdout, mut message) = (tokio::io::stdout(), None);
        loop {
            tokio::select! {
                event = screen.next() => match event {
                    Some(Ok(ScreenEvent::Output(bytes))) => {
                        stdout.write_all(&bytes).await?;
                        stdout.flush().await?;
                        self.shown += bytes.len() as u64;
                    }
                    Some(Ok(ScreenEvent::Exited { exit_code })) => {
                        return Ok(Ended::Exited(exit_code));
                    }
                    Some(Ok(ScreenEvent::Failed { message: text })) => message = Some(text),
                    Some(Ok(ScreenEvent::Closed { code: TAKEN_OVER })) => {
                        let text = "another client has attached to this terminal".to_owned();
                        return Ok(Ended::Failed(message.unwrap_or(text)));
                    }
                    Some(Ok(ScreenEvent::Closed { code: RESTARTS })) => return Ok(Ended::Lost),
                    Some(Ok(ScreenEvent::Closed { .. }) | Err(_)) | None => {
                        return Ok(message.map_or(Ended::Lost, Ended::Failed));
                    }
                },
                Some(mut bytes) = self.typed.recv() => {
                    let leaves = self.escape.filter(&mut bytes);
                    // Where it fails, the other direction tells why.
                    let _ = keyboard.type_in(bytes).await;
                    if leaves {
                        let _ = keyboard.leave().await;
                        return Ok(Ended::Left);
                    }
                }
                _ = self.resized.recv() => {
                    if let Some((rows, columns)) = window_size() {
                        let _ = keyboard.resize(rows, columns).await;
                    }
                }
                () = asked_to_end(&mut self.ends) => return Ok(Ended::Left),
            }
        }
    }

    /// `None`: it goes on.
    async fn reconnect(&mut self) -> anyhow::Result<Option<Ended>> {
        let give_up = Instant::now() + RECONNECT_FOR;
        self.tell("the connection is lost; trying again, Ctrl-C gives up");
        let mut typed = Vec::new();
        loop {
            let (size, offset) = (window_size(), Some(self.shown));
            let attached =
                self.client.attach_terminal(&self.sandbox, &self.connection.id, offset, size);
            match attached.await {
                Ok(connection) => {
                    self.connection = connection;
                    self.shown = self.connection.offset;
                    if !typed.is_empty() {
                        // Where it fails, the other direction tells why.
                        let _ = self.connection.keyboard.type_in(typed).await;
                    }
                    return Ok(None);
                }
                Err(error) if is_final(&error) => return Err(error.into()),
                Err(error) if Instant::now() > give_up => return Err(error.into()),
                Err(_) => {}
            }
            let pause = tokio::time::sleep(RECONNECT_EVERY);
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    // A pipe waits until there is room again.
                    Some(mut bytes) = self.typed.recv(),
                        if self.raw_mode.is_some() || typed.len() < MOST_KEPT =>
                    {
                        let gives_up = self.raw_mode.is_some() && bytes.contains(&INTERRUPT);
                        if self.escape.filter(&mut bytes) || gives_up {
                            return Ok(Some(Ended::Left));
                        }
                        if typed.len() < MOST_KEPT {
                            typed.append(&mut bytes);
                        }
                    }
                    () = asked_to_end(&mut self.ends) => return Ok(Some(Ended::Left)),
                }
            }
        }
    }

    /// On a line of its own also while the terminal is raw.
    fn tell(&self, text: &str) {
        match &self.raw_mode {
            Some(_) => remark(format_args!("\r\n{text}\r")),
            None => remark(format_args!("{text}")),
        }
    }
}

async fn asked_to_end([terminate, hang_up, interrupt]: &mut [Signal; 3]) {
    tokio::select! {
        _ = terminate.recv() => {}
        _ = hang_up.recv() => {}
        _ = interrupt.recv() => {}
    }
}

/// Asking again would not help.
fn is_final(error: &Error) -> bool {
    matches!(
        error.code(),
        Some(
            ErrorCode::NotFound
                | ErrorCode::Conflict
                | ErrorCode::Gone
                | ErrorCode::InvalidRequest
                | ErrorCode::Unauthenticated
                | ErrorCode::Forbidden
        )
    )
}

/// What is typed. A thread of its own, which is not waited for: a read of standard input cannot be cancelled.
fn keyboard(is_terminal: bool) -> mpsc::Receiver<Vec<u8>> {
    let (sender, receiver) = mpsc::channel(16);
    std::thread::spawn(move || {
        let (mut stdin, mut buffer) = (io::stdin().lock(), [0; 4096]);
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if sender.blocking_send(buffer[..count].to_vec()).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        // What comes from a file or a pipe ends the session as a person would.
        if !is_terminal {
            let _ = sender.blocking_send(vec![END_OF_INPUT]);
        }
    });
    receiver
}

/// Finds `~.` at the beginning of a line.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Escape {
    #[default]
    LineBegins,
    Within,
    Tilde,
    Never,
}

impl Escape {
    /// True when it is there: then what is left in `bytes` came before it.
    fn filter(&mut self, bytes: &mut Vec<u8>) -> bool {
        let mut kept = Vec::with_capacity(bytes.len() + 1);
        for &byte in bytes.iter() {
            let next = match (*self, byte) {
                (Self::Never, _) => Self::Never,
                (Self::LineBegins, b'~') => {
                    *self = Self::Tilde;
                    continue;
                }
                (Self::Tilde, b'.') => {
                    *bytes = kept;
                    return true;
                }
                (Self::Tilde, b'~') => Self::Within,
                (_, b'\r' | b'\n') => Self::LineBegins,
                (Self::LineBegins | Self::Within | Self::Tilde, _) => Self::Within,
            };
            if *self == Self::Tilde && byte != b'~' {
                kept.push(b'~');
            }
            kept.push(byte);
            *self = next;
        }
        *bytes = kept;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tilde_and_a_dot_leave_at_the_beginning_of_a_line_alone() {
        let filtered = |pieces: &[&str]| {
            let (mut escape, mut all) = (Escape::default(), String::new());
            for piece in pieces {
                let mut bytes = piece.as_bytes().to_vec();
                let leaves = escape.filter(&mut bytes);
                all.push_str(&String::from_utf8(bytes).unwrap());
                if leaves {
                    return (all, true);
                }
            }
            (all, false)
        };
        let typed = |text: &str| (text.to_owned(), false);
        assert_eq!(filtered(&["~."]), (String::new(), true));
        assert_eq!(filtered(&["ls\r~", ".rest"]), ("ls\r".to_owned(), true));
        assert_eq!(filtered(&["cd ~.", "\r"]), typed("cd ~.\r"));
        assert_eq!(filtered(&["~", "/x\r"]), typed("~/x\r"));
        assert_eq!(filtered(&["~~."]), typed("~."));
        assert_eq!(filtered(&["\r\n~\r~."]), ("\r\n~\r".to_owned(), true));
        let mut never = Escape::Never;
        let mut bytes = b"~.".to_vec();
        assert!(!never.filter(&mut bytes) && bytes == b"~.");
    }
}
