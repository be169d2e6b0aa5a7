//! Commands: a request becomes an exec object in the guest, and is watched to its end.
//! The object lives on without its watcher; what it prints goes into the sandbox's log either way.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use api::{ErrorCode, ExecId, ExecRequest};
use bytes::Bytes;
use machine::guest::{
    Channel, Command, Event, ExecStart, ExecStatus, Guest, Reply, Request, Stream,
};
use serde_bytes::ByteBuf;
use tokio::time::Instant;

use super::{
    Logs, Running, check_environment,
    logs::{LogWriter, Output, Seen},
    usage::{InUse, Usage},
};
use crate::Error;

/// What a guest keeps of each stream of one exec.
const KEPT_OUTPUT: u64 = 64 << 20;
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
const LIST_DEADLINE: Duration = Duration::from_secs(30);
const STDIN_PIECE: usize = 32 << 10;

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

struct Watched {
    id: String,
    guest: Guest,
    stream: Arc<Stream>,
    logs: Arc<Logs>,
    log: LogWriter,
    /// When the command must have ended, if it has a timeout.
    deadline: Option<Instant>,
    /// A command that runs is use of its sandbox, whether someone watches it or not.
    _in_use: Option<Arc<InUse>>,
}

impl Running {
    /// Returns once the command runs.
    ///
    /// # Errors
    /// 400 names the bad field. After any other error the command may have started.
    pub async fn start_exec(&self, request: ExecRequest) -> Result<ExecWatch, Error> {
        let timeout = timeout_of(&request)?;
        let start = exec_start(&request, timeout, &self.environment)?;
        let id = start.id.clone();
        fault::point!("exec.starting", Error::internal);
        let stream = Arc::new(self.guest.open(Request::ExecStart(start))?);
        fault::point!("exec.sent");
        if let Some(stdin) = request.stdin {
            tokio::spawn(feed(Arc::clone(&stream), Bytes::from(stdin)));
        }
        let deadline = timeout.map(|timeout| Instant::now() + timeout + PATIENCE);
        let watched = Watched {
            id,
            guest: self.guest.clone(),
            stream,
            logs: Arc::clone(&self.logs),
            log: self.logs.writer(),
            deadline,
            _in_use: self.in_use.clone(),
        };
        let mut watch = ExecWatch { watched: Some(watched) };
        match tokio::time::timeout(START_DEADLINE, watch.started()).await {
            Ok(outcome) => outcome.map(|()| watch),
            Err(_) => Err(machine::Error::Silent.into()),
        }
    }
}

/// What of a guest's commands is new to the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// All that the log has not seen: of a sandbox that was left for a while, by its server or to hibernate.
    Seen,
    /// What comes from now on: of a sandbox that was made from a snapshot, whose past is another's.
    Now,
}

/// What commands that run already have printed and will print goes into the log, and each is forgotten at its end.
pub(crate) async fn watch_again(
    guest: &Guest,
    logs: &Arc<Logs>,
    usage: &Arc<Usage>,
    since: Since,
) -> Result<(), Error> {
    let Reply::Execs(execs) = guest.call(Request::ExecList, LIST_DEADLINE).await? else {
        return Err(machine::Error::Misbehaved("a list of execs was something else").into());
    };
    let all: BTreeSet<_> = execs.iter().map(|(id, _)| id.as_str()).collect();
    logs.keep_seen(&all);
    for (id, status) in execs {
        if since == Since::Now {
            let all = Seen { stdout: status.stdout_bytes, stderr: status.stderr_bytes };
            logs.set_seen(&id, all);
        }
        let Seen { stdout, stderr } = logs.seen(&id);
        let request =
            Request::ExecWatch { id: id.clone(), stdout_offset: stdout, stderr_offset: stderr };
        let stream = Arc::new(guest.open(request)?);
        let log = logs.writer();
        let in_use = Some(Arc::new(usage.begin()));
        let watched = Watched {
            id,
            guest: guest.clone(),
            stream,
            logs: Arc::clone(logs),
            log,
            deadline: None,
            _in_use: in_use,
        };
        // Watched by nobody but the log.
        drop(ExecWatch { watched: Some(watched) });
    }
    Ok(())
}

impl ExecWatch {
    async fn started(&mut self) -> Result<(), Error> {
        let Some(watched) = &mut self.watched else { return Err(machine::Error::Lost.into()) };
        match watched.stream.next().await.transpose() {
            Ok(Some(Event::Reply(Reply::ExecStarted { .. }))) => {
                fault::point!("exec.started", Error::internal);
                Ok(())
            }
            Ok(Some(_)) => {
                Err(machine::Error::Misbehaved("a command did not begin with its start").into())
            }
            Ok(None) => Err(machine::Error::Lost.into()),
            Err(error) => {
                // Refused: there is nothing to watch.
                self.watched = None;
                Err(error.into())
            }
        }
    }

    /// `None` after [`ExecEvent::Ended`]. May be dropped and called again without losing an event.
    pub async fn next(&mut self) -> Option<Result<ExecEvent, Error>> {
        let watched = self.watched.as_mut()?;
        let outcome = watched.next().await;
        if !matches!(outcome, Ok(ExecEvent::Stdout(_) | ExecEvent::Stderr(_))) {
            let watched = self.watched.take();
            if let Some(watched) = watched.filter(|_| outcome.is_ok()) {
                watched.forget();
            }
        }
        Some(outcome)
    }
}

impl Drop for ExecWatch {
    fn drop(&mut self) {
        // The log still wants the rest. The task ends with the command or with the sandbox.
        if let Some(mut watched) = self.watched.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            runtime.spawn(async move {
                while let Ok(event) = watched.next().await {
                    if matches!(event, ExecEvent::Ended(_)) {
                        return watched.forget();
                    }
                }
            });
        }
    }
}

impl Watched {
    async fn next(&mut self) -> Result<ExecEvent, Error> {
        match self.event().await? {
            Some(Event::Data(Channel::Stdout, bytes)) => {
                self.log.write(Output::Stdout, &bytes);
                self.logs.saw(&self.id, Output::Stdout, bytes.len());
                Ok(ExecEvent::Stdout(bytes))
            }
            Some(Event::Data(Channel::Stderr, bytes)) => {
                self.log.write(Output::Stderr, &bytes);
                self.logs.saw(&self.id, Output::Stderr, bytes.len());
                Ok(ExecEvent::Stderr(bytes))
            }
            Some(Event::Reply(Reply::ExecEnded(status))) => {
                fault::point!("exec.ended");
                Ok(ExecEvent::Ended(status))
            }
            Some(Event::Data(Channel::Content, _) | Event::Reply(_)) => {
                Err(machine::Error::Misbehaved("a command's stream held something else").into())
            }
            Some(Event::Finished) | None => Err(machine::Error::Lost.into()),
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

    /// Everything was delivered: the guest need not keep it.
    fn forget(self) {
        fault::point!("exec.forgetting");
        self.logs.ended(&self.id);
        self.guest.forget_exec(self.id);
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
fn timeout_of(request: &ExecRequest) -> Result<Option<Duration>, Error> {
    match request.timeout_seconds {
        None => Ok(None),
        Some(seconds) if seconds > 0.0 && seconds <= LONGEST_TIMEOUT => {
            Ok(Some(Duration::from_secs_f64(seconds)))
        }
        Some(_) => Err(Error::invalid(
            "`timeout_seconds` must be above 0 and at most 86400; leave it out for no limit",
        )),
    }
}

fn exec_start(
    request: &ExecRequest,
    timeout: Option<Duration>,
    environment: &BTreeMap<String, String>,
) -> Result<ExecStart, Error> {
    if request.cmd.trim().is_empty() {
        return Err(Error::invalid("`cmd` must not be empty"));
    }
    if request.cmd.contains('\0') {
        return Err(Error::invalid("`cmd` must not hold NUL"));
    }
    if request.cmd.len() > LONGEST_COMMAND {
        let message = "`cmd` may have at most 3 MiB; write a longer script to a file with PUT …/fs and run that";
        return Err(Error::new(ErrorCode::TooLarge, message));
    }
    if let Some(directory) = &request.cwd
        && (!directory.starts_with('/')
            || directory.contains('\0')
            || directory.len() > LONGEST_PATH)
    {
        return Err(Error::invalid("`cwd` must be an absolute path"));
    }
    if let Some(user) = &request.user
        && (user.is_empty() || user.contains('\0') || user.len() > LONGEST_USER)
    {
        return Err(Error::invalid("`user` must be a name or a number, also `user:group`"));
    }
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
        output_limit: KEPT_OUTPUT,
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
    fn a_timeout_is_a_positive_number_of_seconds_of_at_most_a_day() {
        let timeout = |seconds: f64| {
            timeout_of(&ExecRequest { timeout_seconds: Some(seconds), ..request("true") })
        };
        assert_eq!(timeout_of(&request("true")).unwrap(), None);
        assert_eq!(timeout(1.5).unwrap(), Some(Duration::from_millis(1500)));
        assert_eq!(timeout(86_400.0).unwrap(), Some(Duration::from_secs(86_400)));
        for bad in [0.0, -1.0, 86_400.1, f64::NAN, f64::INFINITY] {
            assert_eq!(timeout(bad).unwrap_err().code, ErrorCode::InvalidRequest, "{bad}");
        }
    }

    #[test]
    fn the_shortest_timeout_is_still_one() {
        let start =
            exec_start(&request("true"), Some(Duration::from_nanos(1)), &BTreeMap::new()).unwrap();
        assert_eq!(start.timeout_ms, 1);
    }

    #[test]
    fn the_environment_of_the_command_goes_over_that_of_the_sandbox() {
        let command =
            ExecRequest { env: Some(map(&[("B", "2"), ("C", "\"$x\"\n")])), ..request("env") };
        let start = exec_start(&command, None, &map(&[("A", "1"), ("B", "1")])).unwrap();
        assert_eq!(
            start.environment,
            map(&[("A", "1"), ("B", "2"), ("C", "\"$x\"\n")]).into_iter().collect::<Vec<_>>()
        );
    }

    #[test]
    fn a_command_that_no_process_could_have_is_refused() {
        let bad = [
            request(""),
            request(" \n"),
            request("a\0b"),
            ExecRequest { cwd: Some("relative".to_owned()), ..request("true") },
            ExecRequest { user: Some(String::new()), ..request("true") },
            ExecRequest { env: Some(map(&[("A=B", "")])), ..request("true") },
        ];
        for request in bad {
            let refused = exec_start(&request, None, &BTreeMap::new()).unwrap_err();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
        }
        let long = exec_start(&request(&"x".repeat(LONGEST_COMMAND + 1)), None, &BTreeMap::new())
            .unwrap_err();
        assert_eq!(long.code, ErrorCode::TooLarge);
        assert!(exec_start(&request(&"x".repeat(LONGEST_COMMAND)), None, &BTreeMap::new()).is_ok());
    }
}
