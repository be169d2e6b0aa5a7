//! Kernels of the interpreter: sessions live in the guest, and go with it into snapshots and forks. What is known of them
//! is asked there.

use std::{sync::Arc, time::Duration};

use api::{CodeSession, CodeSessionStatus, CreateCodeSession, ErrorCode, RunCode};
use machine::guest::{
    self, CellEnd, Event, Guest, KernelEvent, KernelRun, KernelStart, KernelState, Reply, Request,
    Stream,
    kernel::{Events, KernelEnd},
};
use serde_bytes::ByteBuf;
use uuid::Uuid;

use super::{Running, check_environment, usage::InUse};
use crate::Error;

/// A kernel that has to import itself, under emulation.
const START_DEADLINE: Duration = Duration::from_secs(240);
const CALL_DEADLINE: Duration = Duration::from_secs(30);
/// After its time is up, a cell is interrupted and at last given up. A guest that does not even say so is lost.
const PATIENCE: Duration = Duration::from_secs(60);
/// Of each of standard output, standard error, and results.
pub(crate) const MOST_OUTPUT: u64 = 16 << 20;
/// The code is one message of at most 4 MiB; the rest of it is small.
const LONGEST_CODE: usize = 3 << 20;
const LONGEST_LANGUAGE: usize = 64;
const LONGEST_PATH: usize = 4096;
const LONGEST_TIMEOUT_MS: u64 = 86_400_000;
/// From the end of a session's process to what the guest knows of it.
const KNOWN_AFTER: Duration = Duration::from_secs(10);
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The kernel's own words, when it could not begin.
const ENDED: &str = "the kernel of this session ended before it had answered; restart it with POST …/repl/sessions/{id}/restart";

/// Follows a cell. Dropping it ends the watching, not the cell.
pub struct CellWatch {
    watched: Option<Watched>,
    guest: Guest,
    session: String,
    began: tokio::time::Instant,
}

struct Watched {
    stream: Stream,
    events: Events,
    deadline: Option<tokio::time::Instant>,
    /// A cell that runs is use of its sandbox, whether someone watches it or not.
    _in_use: Option<Arc<InUse>>,
}

impl Running {
    /// # Errors
    /// 400 where the sandbox has no kernel for the language, with a way to get one.
    pub async fn create_session(&self, request: CreateCodeSession) -> Result<CodeSession, Error> {
        let language = request.language.map_or_else(|| "python".to_owned(), |given| plain(&given));
        if language.is_empty()
            || language.len() > LONGEST_LANGUAGE
            || language.contains(['\0', '/'])
        {
            return Err(Error::invalid("`language` must name a language, as in \"python\""));
        }
        if let Some(directory) = &request.cwd
            && (!directory.starts_with('/')
                || directory.contains('\0')
                || directory.len() > LONGEST_PATH)
        {
            return Err(Error::invalid("`cwd` must be an absolute path"));
        }
        request.env.as_ref().map_or(Ok(()), check_environment)?;
        let mut environment = (*self.environment).clone();
        environment.extend(request.env.into_iter().flatten());
        let id = Uuid::new_v4().to_string();
        self.start_session(Request::KernelStart(KernelStart {
            id: id.clone(),
            language: language.clone(),
            environment: environment.into_iter().collect(),
            working_directory: request.cwd.map(ByteBuf::from),
        }))
        .await?;
        Ok(CodeSession { id, language, status: CodeSessionStatus::Idle })
    }

    /// # Errors
    /// 404 when there is no such session.
    pub async fn restart_session(&self, id: &str) -> Result<CodeSession, Error> {
        self.start_session(Request::KernelRestart { id: id.to_owned() }).await?;
        let sessions = self.sessions().await?;
        sessions.into_iter().find(|session| session.id == id).ok_or_else(no_session)
    }

    async fn start_session(&self, request: Request) -> Result<(), Error> {
        started(&self.guest, request).await
    }

    /// # Errors
    /// The guest does not answer.
    pub async fn sessions(&self) -> Result<Vec<CodeSession>, Error> {
        Ok(kernels(&self.guest).await?.into_iter().map(shown).collect())
    }

    /// All that it has begun ends with it.
    ///
    /// # Errors
    /// 404 when there is no such session.
    pub async fn end_session(&self, id: &str) -> Result<(), Error> {
        let request = Request::KernelEnd { id: id.to_owned() };
        self.guest.call(request, CALL_DEADLINE).await?;
        Ok(())
    }

    /// # Errors
    /// 400 names the bad field. Whether the session is there and runs the cell is told by the watch.
    pub fn run_code(&self, session: &str, request: RunCode) -> Result<CellWatch, Error> {
        if request.code.len() > LONGEST_CODE {
            let message = "`code` may have at most 3 MiB; write larger things to a file with PUT …/fs and read that";
            return Err(Error::new(ErrorCode::TooLarge, message));
        }
        if request.timeout_ms.is_some_and(|limit| limit == 0 || limit > LONGEST_TIMEOUT_MS) {
            return Err(Error::invalid(
                "`timeout_ms` must be above 0 and at most 86400000; leave it out for no limit",
            ));
        }
        let stream = self.guest.open(Request::KernelRun(KernelRun {
            id: session.to_owned(),
            code: request.code,
            timeout_ms: request.timeout_ms.unwrap_or(0),
            output_limit: MOST_OUTPUT,
        }))?;
        let deadline = request
            .timeout_ms
            .map(|limit| tokio::time::Instant::now() + Duration::from_millis(limit) + PATIENCE);
        let in_use = self.in_use.clone();
        let events = Events::default();
        Ok(CellWatch {
            watched: Some(Watched { stream, events, deadline, _in_use: in_use }),
            guest: self.guest.clone(),
            session: session.to_owned(),
            began: tokio::time::Instant::now(),
        })
    }
}

/// Before a bake: true when a kernel stands ready in it.
///
/// # Errors
/// The guest is lost. That it has no kernel is none.
pub(super) async fn prepare(guest: &Guest) -> Result<bool, Error> {
    match started(guest, Request::KernelPrepare).await {
        Ok(()) => Ok(true),
        Err(error) if error.code == ErrorCode::Unavailable => Err(error),
        Err(error) => {
            tracing::debug!(%error, cause = error.causes(), "a template without a kernel");
            Ok(false)
        }
    }
}

async fn started(guest: &Guest, request: Request) -> Result<(), Error> {
    let mut watch = Watched {
        stream: guest.open(request)?,
        events: Events::default(),
        deadline: Some(tokio::time::Instant::now() + START_DEADLINE),
        _in_use: None,
    };
    match watch.next().await? {
        None => Err(Error::conflict(ENDED)),
        Some(KernelEvent::Ready) => Ok(()),
        Some(KernelEvent::Failed(failure)) => Err(failure.into()),
        Some(
            KernelEvent::Stdout(_)
            | KernelEvent::Stderr(_)
            | KernelEvent::Result(_)
            | KernelEvent::Error { .. }
            | KernelEvent::TimedOut
            | KernelEvent::Ended(_),
        ) => Err(misbehaved("a session did not begin with its start")),
    }
}

async fn kernels(guest: &Guest) -> Result<Vec<guest::kernel::KernelStatus>, Error> {
    let Reply::Kernels(kernels) = guest.call(Request::KernelList, CALL_DEADLINE).await? else {
        return Err(misbehaved("a list of sessions was something else"));
    };
    Ok(kernels)
}

fn shown(kernel: guest::kernel::KernelStatus) -> CodeSession {
    let status = match kernel.state {
        KernelState::Starting => CodeSessionStatus::Starting,
        KernelState::Idle => CodeSessionStatus::Idle,
        KernelState::Busy => CodeSessionStatus::Busy,
        KernelState::Dead | KernelState::OutOfMemory => CodeSessionStatus::Dead,
    };
    CodeSession { id: kernel.id, language: kernel.language, status }
}

/// The name under which the guest has it, too.
fn plain(language: &str) -> String {
    match language.to_lowercase() {
        python if matches!(python.as_str(), "python3" | "py") => "python".to_owned(),
        other => other,
    }
}

fn no_session() -> Error {
    Error::not_found("there is no such session; list them with GET …/repl/sessions")
}

fn misbehaved(what: &'static str) -> Error {
    machine::Error::Misbehaved(what).into()
}

impl CellWatch {
    /// `None` after the last event. May be dropped and called again without losing an event.
    pub async fn next(&mut self) -> Option<Result<KernelEvent, Error>> {
        let watched = self.watched.as_mut()?;
        let outcome = match watched.next().await {
            Ok(Some(event)) => Ok(event),
            Ok(None) => self.why_ended().await.map(KernelEvent::Ended),
            Err(error) => Err(error),
        };
        let is_last = match &outcome {
            Ok(KernelEvent::Ended(_) | KernelEvent::Failed(_) | KernelEvent::Ready) | Err(_) => {
                true
            }
            Ok(
                KernelEvent::Stdout(_)
                | KernelEvent::Stderr(_)
                | KernelEvent::Result(_)
                | KernelEvent::Error { .. }
                | KernelEvent::TimedOut,
            ) => false,
        };
        if is_last {
            self.watched = None;
        }
        Some(match outcome {
            Ok(KernelEvent::Failed(failure)) => Err(failure.into()),
            outcome => outcome,
        })
    }

    /// Of a cell whose session ended with all its processes, before any of them could say a word.
    async fn why_ended(&self) -> Result<KernelEnd, Error> {
        let until = tokio::time::Instant::now() + KNOWN_AFTER;
        let end = loop {
            let all = kernels(&self.guest).await?;
            let session = all.into_iter().find(|kernel| kernel.id == self.session);
            match session.map(|kernel| kernel.state) {
                None => return Err(Error::conflict("the session was deleted while the cell ran")),
                Some(KernelState::OutOfMemory) => {
                    break CellEnd::Died { how: "as the sandbox was out of memory".to_owned() };
                }
                Some(KernelState::Dead) => {
                    break CellEnd::Died { how: "with everything in its session".to_owned() };
                }
                Some(KernelState::Starting) => break CellEnd::Restarted,
                // Not noticed yet, or it has begun anew already.
                Some(KernelState::Idle | KernelState::Busy) => {
                    if tokio::time::Instant::now() > until {
                        break CellEnd::Restarted;
                    }
                }
            }
            tokio::time::sleep(LOOK_EVERY).await;
        };
        let duration_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        Ok(KernelEnd { end, timed_out: false, truncated: false, duration_ms })
    }
}

impl Drop for CellWatch {
    /// The cell goes on, and until its end its sandbox is in use.
    fn drop(&mut self) {
        if let Some(mut watched) = self.watched.take()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            watched.deadline = None;
            runtime.spawn(async move {
                while let Ok(Some(
                    KernelEvent::Stdout(_)
                    | KernelEvent::Stderr(_)
                    | KernelEvent::Result(_)
                    | KernelEvent::Error { .. }
                    | KernelEvent::TimedOut,
                )) = watched.next().await
                {}
            });
        }
    }
}

impl Watched {
    /// `None`: the session has ended, without a word.
    async fn next(&mut self) -> Result<Option<KernelEvent>, Error> {
        loop {
            let odd = |_| misbehaved("a session said what is no event");
            if let Some(event) = self.events.take().map_err(odd)? {
                return Ok(Some(event));
            }
            let next = self.stream.next();
            let event = match self.deadline {
                Some(deadline) => tokio::time::timeout_at(deadline, next)
                    .await
                    .map_err(|_| machine::Error::Silent)?,
                None => next.await,
            };
            match event.transpose()? {
                Some(Event::Data(_, bytes)) => self.events.push(&bytes),
                Some(Event::Finished) => return Ok(None),
                Some(Event::Reply(_)) => return Err(misbehaved("a session said something else")),
                None => return Err(machine::Error::Lost.into()),
            }
        }
    }
}
