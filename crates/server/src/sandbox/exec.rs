//! Commands: a request becomes an exec object in the guest, and is watched to its end.
//! The object lives on without its watcher; what it prints goes into the sandbox's log either way.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{ErrorCode, ExecId, ExecRequest, ExecStream};
use bytes::Bytes;
use machine::guest::{
    Channel, Command, Event, ExecStart, ExecStatus, Guest, Reply, Request, Stream,
};
use serde_bytes::ByteBuf;
use tokio::{task::JoinHandle, time::Instant};

use super::{
    Exec, Logs, Origin, Running, check_environment, execs::ExecLimits, logs::LogWriter,
    usage::InUse,
};
use crate::Error;

/// The longest time that a request can name: a day.
const LONGEST_TIMEOUT: f64 = 86_400.0;
/// A request to the guest is one message of at most 4 MiB; the rest of it is small.
const LONGEST_COMMAND: usize = 3 << 20;
const LONGEST_PATH: usize = 4096;
const LONGEST_USER: usize = 128;
/// The guest has been asked to start a command; a busy one may be slow to.
const START_DEADLINE: Duration = Duration::from_secs(60);
/// The guest ends a command when its time is up. One that does not even say so is lost.
const PATIENCE: Duration = Duration::from_secs(60);
const STDIN_PIECE: usize = 32 << 10;

fn keep_some(said: &mut Vec<u8>, bytes: &[u8], most: usize) {
    let room = most.saturating_sub(said.len());
    said.extend_from_slice(&bytes[..bytes.len().min(room)]);
}

/// One thing that happened to a command.
#[derive(Debug)]
pub enum ExecEvent {
    Stdout(Bytes),
    Stderr(Bytes),
    /// After the last byte of both streams.
    Ended(ExecStatus),
}

/// Follows a command that has started. Dropping it ends the watching, not the command.
pub struct ExecWatch {
    watched: Option<Watched>,
}

/// Takes in what a command prints, for its exec object and for the log.
pub(super) struct Watched {
    /// As its guest calls it.
    pub(super) id: String,
    pub(super) guest: Guest,
    pub(super) stream: Arc<Stream>,
    pub(super) logs: Arc<Logs>,
    pub(super) log: LogWriter,
    /// `None`: of a bake, or another sandbox's that this one was made from.
    pub(super) exec: Option<Arc<Exec>>,
    /// Output on its way to files.
    pub(super) writing: Option<JoinHandle<()>>,
    /// When the command must have ended, if it has a timeout.
    pub(super) deadline: Option<Instant>,
    /// A command that runs is use of its sandbox, whether someone watches it or not.
    pub(super) _in_use: Option<Arc<InUse>>,
}

/// What a command's fields are called where it is asked for.
#[derive(Debug)]
pub(super) struct Fields {
    pub(super) command: &'static str,
    pub(super) timeout: &'static str,
    /// What it is without.
    pub(super) default_timeout: &'static str,
}

const FIELDS: Fields =
    Fields { command: "cmd", timeout: "timeout_seconds", default_timeout: "no limit" };

/// A command that cannot be watched.
#[derive(Debug)]
pub(super) enum NotStarted {
    /// And never ran.
    Refused(Error),
    /// And may have started.
    Uncertain(Error),
}

impl From<NotStarted> for Error {
    fn from(not_started: NotStarted) -> Self {
        match not_started {
            NotStarted::Refused(error) | NotStarted::Uncertain(error) => error,
        }
    }
}

impl Running {
    /// Returns once the command runs.
    ///
    /// # Errors
    /// 400 names the bad field. After any other error the command may have started.
    pub async fn start_exec(&self, request: ExecRequest) -> Result<ExecWatch, Error> {
        let start = self.prepare(&request, &FIELDS)?;
        let exec = self.execs.as_ref().map(|execs| execs.begin(ExecId::random(), Origin::Server));
        let exec = exec.transpose()?;
        let started = self.start(start, request.stdin, exec.clone()).await;
        if let (Err(NotStarted::Refused(_)), Some(execs), Some(exec)) =
            (&started, &self.execs, &exec)
        {
            execs.withdraw(exec);
        }
        Ok(started?)
    }

    /// # Errors
    /// 400 names the bad field.
    pub(super) fn prepare(
        &self,
        request: &ExecRequest,
        fields: &Fields,
    ) -> Result<ExecStart, Error> {
        let default = || ExecLimits::default().output_bytes;
        let kept = self.execs.as_ref().map_or_else(default, |execs| execs.output_limit());
        check_command(&request.cmd, fields)?;
        exec_start(request, timeout_of(request, fields)?, &self.environment, kept)
    }

    /// Returns once the command runs. Where it is uncertain whether it does, it is watched all the same.
    pub(super) async fn start(
        &self,
        mut start: ExecStart,
        stdin: Option<String>,
        exec: Option<Arc<Exec>>,
    ) -> Result<ExecWatch, NotStarted> {
        if let Some(exec) = &exec {
            start.id = exec.guest_id();
        }
        let id = start.id.clone();
        let timeout = Some(start.timeout_ms).filter(|timeout| *timeout > 0);
        fault::point!("exec.starting", |error| NotStarted::Refused(Error::internal(error)));
        let opened = self.guest.open(Request::ExecStart(start));
        let stream = Arc::new(opened.map_err(|error| NotStarted::Refused(error.into()))?);
        fault::point!("exec.sent");
        if let Some(stdin) = stdin {
            tokio::spawn(feed(Arc::clone(&stream), Bytes::from(stdin)));
        }
        let deadline =
            timeout.map(|timeout| Instant::now() + Duration::from_millis(timeout) + PATIENCE);
        let watched = Watched {
            id,
            guest: self.guest.clone(),
            stream,
            logs: Arc::clone(&self.logs),
            log: self.logs.writer(),
            exec,
            writing: None,
            deadline,
            _in_use: self.in_use.clone(),
        };
        let mut watch = ExecWatch { watched: Some(watched) };
        match tokio::time::timeout(START_DEADLINE, watch.started()).await {
            Ok(outcome) => outcome.map(|()| watch),
            Err(_) => Err(NotStarted::Uncertain(machine::Error::Silent.into())),
        }
    }

    /// Runs a command on the server's own behalf: what it exits with, and the first `most` bytes of what it says.
    ///
    /// # Errors
    /// As [`Running::start_exec`]; its end is not seen.
    pub(crate) async fn run_to_end(
        &self,
        cmd: &str,
        deadline: Duration,
        most: usize,
    ) -> Result<(Option<i32>, String), Error> {
        let request = ExecRequest {
            cmd: cmd.to_owned(),
            timeout_seconds: Some(deadline.as_secs_f64()),
            ..ExecRequest::default()
        };
        let mut watch = self.start_exec(request).await?;
        let mut said = Vec::new();
        while let Some(event) = watch.next().await {
            match event? {
                ExecEvent::Stdout(bytes) | ExecEvent::Stderr(bytes) => {
                    keep_some(&mut said, &bytes, most);
                }
                ExecEvent::Ended(status) => {
                    return Ok((status.exit_code, String::from_utf8_lossy(&said).into_owned()));
                }
            }
        }
        Err(Error::internal(format!("`{cmd}` was not seen to end")))
    }
}

impl ExecWatch {
    async fn started(&mut self) -> Result<(), NotStarted> {
        let uncertain = |error: machine::Error| NotStarted::Uncertain(error.into());
        let Some(watched) = &mut self.watched else { return Err(uncertain(machine::Error::Lost)) };
        match watched.stream.next().await.transpose() {
            Ok(Some(Event::Reply(Reply::ExecStarted { .. }))) => {
                fault::point!("exec.started", |error| NotStarted::Uncertain(Error::internal(
                    error
                )));
                Ok(())
            }
            Ok(Some(_)) => {
                Err(uncertain(machine::Error::Misbehaved("a command did not begin with its start")))
            }
            Ok(None) => Err(uncertain(machine::Error::Lost)),
            Err(machine::Error::Refused(failure)) => {
                // There is nothing to watch.
                self.watched = None;
                Err(NotStarted::Refused(failure.into()))
            }
            Err(error) => Err(uncertain(error)),
        }
    }

    /// `None` after [`ExecEvent::Ended`]. May be dropped and called again without losing an event.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, Error>> {
        let watched = self.watched.as_mut()?;
        let outcome = watched.next().await;
        match &outcome {
            Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_)) => {}
            Ok(ExecEvent::Ended(_)) => {
                if let Some(watched) = self.watched.take() {
                    watched.forget();
                }
            }
            // Whatever there still is to take in is taken in behind.
            Err(_) => self.leave(),
        }
        Some(outcome)
    }

    /// Object and log still want the rest. That ends with the command or with the sandbox.
    fn leave(&mut self) {
        if let Some(watched) = self.watched.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(watched.take_in());
        }
    }
}

impl Drop for ExecWatch {
    fn drop(&mut self) {
        self.leave();
    }
}

impl Watched {
    /// To the end.
    pub(super) async fn take_in(mut self) {
        // However late: its guest may have stood still.
        self.deadline = None;
        loop {
            match self.next().await {
                Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_)) => {}
                Ok(ExecEvent::Ended(_)) => return self.forget(),
                Err(error) => {
                    tracing::debug!(
                        exec = self.id,
                        cause = error.causes(),
                        "nothing more is heard of a command for now"
                    );
                    return;
                }
            }
        }
    }

    async fn next(&mut self) -> Result<ExecEvent, Error> {
        if self.writing.is_none() {
            self.writing = self.exec.as_ref().and_then(Exec::write_out);
        }
        if let Some(writing) = &mut self.writing {
            // Whatever came of it, the object knows.
            let _ = writing.await;
            self.writing = None;
        }
        match self.event().await? {
            Some(Event::Data(Channel::Stdout, bytes)) => {
                self.take(ExecStream::Stdout, &bytes);
                Ok(ExecEvent::Stdout(bytes))
            }
            Some(Event::Data(Channel::Stderr, bytes)) => {
                self.take(ExecStream::Stderr, &bytes);
                Ok(ExecEvent::Stderr(bytes))
            }
            Some(Event::Reply(Reply::ExecEnded(status))) => {
                fault::point!("exec.ended");
                if let Some(exec) = &self.exec {
                    exec.end(&status);
                }
                Ok(ExecEvent::Ended(status))
            }
            Some(Event::Data(Channel::Content, _) | Event::Reply(_)) => {
                Err(machine::Error::Misbehaved("a command's stream held something else").into())
            }
            Some(Event::Finished) | None => Err(machine::Error::Lost.into()),
        }
    }

    fn take(&mut self, stream: ExecStream, bytes: &Bytes) {
        self.log.write(stream, bytes);
        match &self.exec {
            Some(exec) => exec.push(stream, bytes),
            None => self.logs.saw(&self.id, stream, bytes.len()),
        }
    }

    async fn event(&self) -> Result<Option<Event>, Error> {
        loop {
            let next = self.stream.next();
            let event = match self.deadline {
                Some(deadline) => tokio::time::timeout_at(deadline, next)
                    .await
                    .map_err(|_| machine::Error::Silent)?,
                None => next.await,
            };
            // Its watcher may have gone before it had begun.
            if !matches!(event, Some(Ok(Event::Reply(Reply::ExecStarted { .. })))) {
                return Ok(event.transpose()?);
            }
        }
    }

    /// Everything was delivered: the guest need not keep it, once it is kept here.
    fn forget(mut self) {
        fault::point!("exec.forgetting");
        match self.exec.take() {
            Some(exec) => exec.of().note_end(Arc::clone(&exec), Some(self.guest.clone())),
            None => {
                self.logs.ended(&self.id);
                self.guest.forget_exec(std::mem::take(&mut self.id));
            }
        }
    }
}

impl Drop for Watched {
    /// Someone else may go on with it.
    fn drop(&mut self) {
        if let Some(exec) = &self.exec {
            exec.end_watching();
        }
    }
}

/// Gives a command its standard input while its output is read. Ends with the stream at the latest.
async fn feed(stream: Arc<Stream>, mut stdin: Bytes) {
    while !stdin.is_empty() {
        let piece = stdin.split_to(stdin.len().min(STDIN_PIECE));
        // The command may end, or close its standard input, before it has read everything.
        if stream.send(piece).await.is_err() {
            return;
        }
    }
    // Fails where the command has ended: nobody waits for the end of its input any longer.
    let _ = stream.finish().await;
}

/// `None`: no limit.
fn timeout_of(request: &ExecRequest, fields: &Fields) -> Result<Option<Duration>, Error> {
    match request.timeout_seconds {
        None => Ok(None),
        Some(seconds) if seconds > 0.0 && seconds <= LONGEST_TIMEOUT => {
            Ok(Some(Duration::from_secs_f64(seconds)))
        }
        Some(_) => Err(Error::invalid(format!(
            "`{}` must be above 0 and at most 86400; leave it out for {}",
            fields.timeout, fields.default_timeout
        ))),
    }
}

fn check_command(command: &str, fields: &Fields) -> Result<(), Error> {
    let name = fields.command;
    if command.trim().is_empty() {
        return Err(Error::invalid(format!("`{name}` must not be empty")));
    }
    if command.contains('\0') {
        return Err(Error::invalid(format!("`{name}` must not hold NUL")));
    }
    if command.len() > LONGEST_COMMAND {
        let message = format!(
            "`{name}` may have at most 3 MiB; write a longer script to a file with PUT …/fs and run that"
        );
        return Err(Error::new(ErrorCode::TooLarge, message));
    }
    Ok(())
}

/// Where something runs, and as whom.
pub(super) fn check_place(cwd: Option<&str>, user: Option<&str>) -> Result<(), Error> {
    if let Some(directory) = cwd
        && (!directory.starts_with('/')
            || directory.contains('\0')
            || directory.len() > LONGEST_PATH)
    {
        return Err(Error::invalid("`cwd` must be an absolute path"));
    }
    user.map_or(Ok(()), check_user)
}

pub(super) fn check_user(user: &str) -> Result<(), Error> {
    if user.is_empty() || user.contains('\0') || user.len() > LONGEST_USER {
        return Err(Error::invalid("`user` must be a name or a number, also `user:group`"));
    }
    Ok(())
}

fn exec_start(
    request: &ExecRequest,
    timeout: Option<Duration>,
    environment: &BTreeMap<String, String>,
    output_limit: u64,
) -> Result<ExecStart, Error> {
    check_place(request.cwd.as_deref(), request.user.as_deref())?;
    let own = request.env.as_ref();
    own.map_or(Ok(()), check_environment)?;
    let mut all = environment.clone();
    all.extend(own.into_iter().flatten().map(|(name, value)| (name.clone(), value.clone())));
    Ok(ExecStart {
        id: ExecId::random().to_string(),
        command: Command::Script(ByteBuf::from(request.cmd.clone())),
        working_directory: request.cwd.clone().map(ByteBuf::from),
        environment: all.into_iter().collect(),
        user: request.user.clone(),
        has_stdin: request.stdin.is_some(),
        // At least 1: 0 would be no limit.
        timeout_ms: timeout
            .map_or(0, |timeout| u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX).max(1)),
        output_limit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(cmd: &str) -> ExecRequest {
        ExecRequest { cmd: cmd.to_owned(), ..ExecRequest::default() }
    }

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn of_what_a_command_says_only_so_much_is_kept() {
        const MOST: usize = 64 << 10;
        let mut said = Vec::new();
        keep_some(&mut said, b"first", MOST);
        for _ in 0..3 {
            keep_some(&mut said, &[0; MOST / 2], MOST);
        }
        assert_eq!(said.len(), MOST);
        assert!(said.starts_with(b"first"));
    }

    #[test]
    fn a_timeout_is_a_positive_number_of_seconds_of_at_most_a_day() {
        let timeout = |seconds: f64| {
            let request = ExecRequest { timeout_seconds: Some(seconds), ..request("true") };
            timeout_of(&request, &FIELDS)
        };
        assert_eq!(timeout_of(&request("true"), &FIELDS).unwrap(), None);
        assert_eq!(timeout(1.5).unwrap(), Some(Duration::from_millis(1500)));
        assert_eq!(timeout(86_400.0).unwrap(), Some(Duration::from_secs(86_400)));
        for bad in [0.0, -1.0, 86_400.1, f64::NAN, f64::INFINITY] {
            assert_eq!(timeout(bad).unwrap_err().code, ErrorCode::InvalidRequest, "{bad}");
        }
    }

    #[test]
    fn the_shortest_timeout_is_still_one() {
        let start =
            exec_start(&request("true"), Some(Duration::from_nanos(1)), &BTreeMap::new(), 1)
                .unwrap();
        assert_eq!(start.timeout_ms, 1);
    }

    #[test]
    fn the_environment_of_the_command_goes_over_that_of_the_sandbox() {
        let command =
            ExecRequest { env: Some(map(&[("B", "2"), ("C", "\"$x\"\n")])), ..request("env") };
        let start = exec_start(&command, None, &map(&[("A", "1"), ("B", "1")]), 1).unwrap();
        assert_eq!(
            start.environment,
            map(&[("A", "1"), ("B", "2"), ("C", "\"$x\"\n")]).into_iter().collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_command_that_no_process_could_have_is_refused() {
        let bad = [
            ExecRequest { cwd: Some("relative".to_owned()), ..request("true") },
            ExecRequest { user: Some(String::new()), ..request("true") },
            ExecRequest { env: Some(map(&[("A=B", "")])), ..request("true") },
        ];
        for request in bad {
            let refused = exec_start(&request, None, &BTreeMap::new(), 1).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
        }
        for bad in ["", " \n", "a\0b"] {
            let refused = check_command(bad, &FIELDS).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
        }
        let of_length = |length| check_command(&"x".repeat(length), &FIELDS);
        assert_eq!(of_length(LONGEST_COMMAND + 1).unwrap_err().code, ErrorCode::TooLarge);
        assert!(of_length(LONGEST_COMMAND).is_ok());
    }
}
