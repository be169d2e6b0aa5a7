//! Terminals: begun or attached to in the guest, typed into and read from, each direction at its own pace.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{AccountId, SandboxId, TerminalId, TerminalSignal};
use bytes::Bytes;
use machine::guest::{
    self, Channel, Command, Event, Guest, Reply, Request, Stream, TerminalOpen, WindowSize,
};
use serde_bytes::ByteBuf;
use time::OffsetDateTime;

use super::{Running, Sandboxes, check_environment, exec::check_place, state::Wish, usage::InUse};
use crate::Error;

/// The guest has been asked to begin one; a busy one may be slow to.
const START_DEADLINE: Duration = Duration::from_secs(60);
const DEADLINE: Duration = Duration::from_secs(30);
/// From the drop of the line to the kill.
const GRACE_MS: u32 = 5000;
/// Of the command: it arrives in a URL, which is shorter.
const LONGEST_COMMAND: usize = 128 << 10;

/// What is wanted of a new terminal.
#[derive(Debug, Default)]
pub struct NewTerminal {
    /// `None`: the user's login shell.
    pub cmd: Option<String>,
    pub cwd: Option<String>,
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub rows: u16,
    pub columns: u16,
    /// How long it goes on with nobody attached.
    pub linger: Duration,
}

/// Attached to. Dropping it detaches: the terminal goes on for its time.
pub struct Terminal {
    pub id: TerminalId,
    /// The first byte of output that comes, counted from the terminal's beginning.
    pub offset: u64,
    guest: Guest,
    stream: Stream,
    /// One that somebody is attached to is use of its sandbox.
    _in_use: Option<Arc<InUse>>,
}

/// What comes out of a terminal.
#[derive(Debug)]
pub enum Screen {
    Output(Bytes),
    /// After the last byte.
    Ended {
        exit_code: i32,
    },
    /// Another client has attached.
    TakenOver,
}

impl Running {
    /// # Errors
    /// 400 names the bad field.
    pub async fn open_terminal(&self, new: NewTerminal) -> Result<Terminal, Error> {
        let id = TerminalId::random();
        let request = Request::TerminalOpen(self.terminal_open(id, new)?);
        self.attached(id, request).await
    }

    fn terminal_open(&self, id: TerminalId, new: NewTerminal) -> Result<TerminalOpen, Error> {
        if let Some(cmd) = &new.cmd
            && (cmd.trim().is_empty() || cmd.contains('\0') || cmd.len() > LONGEST_COMMAND)
        {
            return Err(Error::invalid(
                "`cmd` must be a command of at most 128 KiB without NUL; leave it out for a shell",
            ));
        }
        check_place(new.cwd.as_deref(), new.user.as_deref())?;
        check_environment(&new.env)?;
        let mut environment = (*self.environment).clone();
        environment.extend(new.env);
        Ok(TerminalOpen {
            id: id.to_string(),
            command: new.cmd.map(|cmd| Command::Script(ByteBuf::from(cmd))),
            working_directory: new.cwd.map(ByteBuf::from),
            environment: environment.into_iter().collect(),
            user: new.user,
            size: WindowSize { rows: new.rows, columns: new.columns },
            linger_ms: u64::try_from(new.linger.as_millis()).unwrap_or(u64::MAX),
        })
    }

    /// Goes on from `offset`, or with all that is remembered of its output. Whoever was attached is not any longer.
    ///
    /// # Errors
    /// 404 when it has ended, or never was.
    pub async fn attach_terminal(
        &self,
        id: TerminalId,
        offset: Option<u64>,
        size: Option<(u16, u16)>,
    ) -> Result<Terminal, Error> {
        let size = size.map(|(rows, columns)| WindowSize { rows, columns });
        let request = Request::TerminalAttach { id: id.to_string(), offset, size };
        self.attached(id, request).await
    }

    async fn attached(&self, id: TerminalId, request: Request) -> Result<Terminal, Error> {
        let stream = self.guest.open(request)?;
        let first = tokio::time::timeout(START_DEADLINE, stream.next());
        match first.await.map_err(|_| machine::Error::Silent)?.transpose()? {
            Some(Event::Reply(Reply::TerminalAttached { offset })) => Ok(Terminal {
                id,
                offset,
                guest: self.guest.clone(),
                stream,
                _in_use: self.in_use.clone(),
            }),
            Some(_) => {
                Err(machine::Error::Misbehaved("a terminal began with something else").into())
            }
            None => Err(machine::Error::Lost.into()),
        }
    }

    /// The oldest first. One that has ended stays for a minute.
    pub async fn terminals(&self) -> Result<Vec<api::Terminal>, Error> {
        let reply = match self.guest.call(Request::TerminalList, DEADLINE).await {
            // From before there were terminals.
            Err(machine::Error::OldAgent { .. }) => return Ok(Vec::new()),
            reply => reply?,
        };
        let Reply::Terminals(all) = reply else {
            return Err(machine::Error::Misbehaved("a list of terminals was something else").into());
        };
        let now = OffsetDateTime::now_utc();
        Ok(all.into_iter().filter_map(|status| shown(status, now)).collect())
    }

    /// Hangs up: the shell and what is in the foreground are told, and killed if they stay.
    ///
    /// # Errors
    /// 404 when it has ended, or never was.
    pub async fn end_terminal(&self, id: TerminalId) -> Result<(), Error> {
        let end = Request::TerminalEnd { id: id.to_string(), grace_ms: GRACE_MS };
        self.guest.call(end, DEADLINE).await?;
        Ok(())
    }
}

/// `None`: not an id of ours. What a guest says of itself is bounded, but not believed.
fn shown(status: guest::TerminalStatus, now: OffsetDateTime) -> Option<api::Terminal> {
    let age = i64::try_from(status.age_ms).ok().map(time::Duration::milliseconds)?;
    Some(api::Terminal {
        id: status.id.parse().ok()?,
        user: status.user,
        rows: status.size.rows,
        cols: status.size.columns,
        attached: status.attached,
        exit_code: status.exit_code,
        output_bytes: status.output_bytes,
        started_at: now.checked_sub(age)?,
    })
}

impl Terminal {
    /// May be dropped and called again without losing anything. `None` after [`Screen::Ended`] and [`Screen::TakenOver`].
    pub async fn next(&self) -> Option<Result<Screen, Error>> {
        match self.stream.next().await? {
            Ok(Event::Data(Channel::Content, bytes)) => Some(Ok(Screen::Output(bytes))),
            Ok(Event::Reply(Reply::TerminalEnded { exit_code })) => {
                Some(Ok(Screen::Ended { exit_code }))
            }
            Ok(Event::Finished) => None,
            Ok(Event::Reply(_) | Event::Data(..)) => {
                Some(Err(machine::Error::Misbehaved("a terminal sent something else").into()))
            }
            Err(machine::Error::Refused(failure)) if failure.code == guest::ErrorCode::Conflict => {
                Some(Ok(Screen::TakenOver))
            }
            Err(error) => Some(Err(error.into())),
        }
    }

    /// As fast as the guest takes it.
    ///
    /// # Errors
    /// It has ended, or the guest is gone.
    pub async fn type_in(&self, bytes: Bytes) -> Result<(), Error> {
        Ok(self.stream.send(bytes).await?)
    }

    /// # Errors
    /// 400 when no window is so large or so small.
    pub async fn resize(&self, rows: u16, columns: u16) -> Result<(), Error> {
        let size = WindowSize { rows, columns };
        self.steer(Request::TerminalResize { id: self.id.to_string(), size }).await
    }

    /// To what is in the foreground.
    ///
    /// # Errors
    /// The guest is gone.
    pub async fn signal(&self, signal: TerminalSignal) -> Result<(), Error> {
        let signal = signal.number();
        self.steer(Request::TerminalSignal { id: self.id.to_string(), signal }).await
    }

    /// Its client has left for good.
    ///
    /// # Errors
    /// The guest is gone.
    pub async fn end(&self) -> Result<(), Error> {
        self.steer(Request::TerminalEnd { id: self.id.to_string(), grace_ms: GRACE_MS }).await
    }

    async fn steer(&self, request: Request) -> Result<(), Error> {
        self.guest.call(request, DEADLINE).await?;
        Ok(())
    }
}

impl Sandboxes {
    /// # Errors
    /// 404 when it is not theirs, gone, or expired.
    pub fn check_there(&self, account: &AccountId, id: &SandboxId) -> Result<(), Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())
    }

    /// Returns when it is to go.
    pub async fn deleted(&self, account: &AccountId, id: &SandboxId) {
        if let Ok(entry) = self.registry.find(account, id) {
            entry.deleted().await;
        }
    }
}
