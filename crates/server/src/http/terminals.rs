//! Terminals over WebSockets: `/ssh` and `/exec/pty`, and what is known of those that are open.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use api::{ErrorCode, TerminalControl, TerminalId, TerminalList};
use axum::{
    extract::{
        State, WebSocketUpgrade,
        ws::{CloseFrame, Message, WebSocket, close_code, rejection::WebSocketUpgradeRejection},
    },
    response::Response,
};
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use http::{HeaderName, HeaderValue, StatusCode};
use serde_json::json;
use tokio::{
    sync::mpsc,
    time::{Instant, MissedTickBehavior},
};
use tokio_tungstenite::tungstenite;
use utoipa::IntoParams;

use super::{
    body::{Id, InMachine, Output, ok},
    place::Place,
    query::Query,
    upgrades::{Upgraded, Upgrades},
};
use crate::{
    App, Error,
    keys::Caller,
    sandbox::{NewTerminal, Screen, Terminal},
};

/// Of one message from the client.
const LONGEST_MESSAGE: usize = 1 << 20;
/// Between two questions whether the client is there…
const PING: Duration = Duration::from_secs(20);
/// …and from its last word until it counts as gone.
const SILENCE: Duration = Duration::from_secs(65);
/// For a client that is there to take what it is sent.
const SLOWEST: Duration = Duration::from_secs(300);
/// For the client's answer to our goodbye.
const GOODBYE: Duration = Duration::from_secs(3);
const LONGEST_REASON: usize = 120;
/// Of the numbers that applications choose for themselves.
const TAKEN_OVER: u16 = 4001;
const SERVER_RESTARTS: u16 = 1012;
const TERMINAL_ID: HeaderName = HeaderName::from_static("x-terminal-id");
const TERMINAL_OFFSET: HeaderName = HeaderName::from_static("x-terminal-offset");

/// What `/ssh` and `/exec/pty` differ in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// Its published client shows everything that it is sent.
    Ssh,
    /// Tells the exit code before it closes.
    Pty,
}

/// What a query of either route may have.
#[derive(IntoParams)]
#[into_params(parameter_in = Query)]
#[expect(dead_code, reason = "described, not read: variables have names of their own")]
struct TerminalParameters {
    /// Default: 24
    rows: Option<u16>,
    /// Default: 80
    cols: Option<u16>,
    /// For `bash -c`. Default: the user's login shell
    cmd: Option<String>,
    /// `user` or `user:group`, by name or number. Default: root
    user: Option<String>,
    /// Default: the user's home
    cwd: Option<String>,
    /// A variable; as many as there are. `TERM` is xterm-256color by default
    #[param(rename = "env.NAME")]
    env: Option<String>,
    /// Attach to this one instead of beginning another
    terminal: Option<String>,
    /// With `terminal`: the first byte of output that is wanted. Default: all that is remembered, the last 256 KiB
    offset: Option<u64>,
    /// The key, where no header can be sent
    access_token: Option<String>,
}

/// A terminal. Binary messages are what is typed and what is shown; a text message `{"resize": {"rows", "cols"}}` changes its
/// window, `{"signal": "INT"}` signals what is in the foreground, and `{"error": "…"}` comes where it ends otherwise than by
/// itself. It goes on for a while when the connection is lost; a client that closes it (code 1000 or none) ends it.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/ssh", tag = "terminals", params(
    ("id" = String, Path,),
    TerminalParameters,
), responses((status = 101, description = "A WebSocket", headers(
    ("x-terminal-id" = String, description = "To attach to it again, as `terminal`"),
    ("x-terminal-offset" = u64, description = "The number of the first byte that comes"),
))))]
pub(super) async fn ssh(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    upgrades: Upgrades,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Error> {
    connect(Place::new(app, caller, id), &query, upgrades, upgrade, Route::Ssh).await
}

/// As `/ssh`, and a text message `{"exit": CODE}` comes before the end.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/exec/pty", tag = "terminals", params(
    ("id" = String, Path,),
    TerminalParameters,
), responses((status = 101, description = "A WebSocket", headers(
    ("x-terminal-id" = String, description = "To attach to it again, as `terminal`"),
    ("x-terminal-offset" = u64, description = "The number of the first byte that comes"),
))))]
pub(super) async fn pty(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    upgrades: Upgrades,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, Error> {
    connect(Place::new(app, caller, id), &query, upgrades, upgrade, Route::Pty).await
}

/// Those that are open, the oldest first, and for a minute those that have ended.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/terminals", tag = "terminals", params(("id" = String, Path,)),
    responses((status = 200, body = TerminalList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<TerminalList>, Error> {
    let running = app.sandboxes.running_already(&caller.account, &id)?;
    let place = Place::new(app, caller, id);
    let terminals = running.terminals().await.map_err(|error| place.explain(error))?;
    Ok(ok(TerminalList { terminals }))
}

/// Hangs up: the shell and what is in the foreground are told, and killed if they stay.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/terminals/{terminal_id}", tag = "terminals",
    params(("id" = String, Path,), ("terminal_id" = String, Path,)), responses((status = 204)))]
pub(super) async fn end(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, terminal): InMachine,
) -> Result<StatusCode, Error> {
    let terminal = terminal_id(&terminal)?;
    let place = Place::new(app, caller, id);
    let ended = place.running().await?.end_terminal(terminal).await;
    ended.map_err(|error| place.explain(error))?;
    Ok(StatusCode::NO_CONTENT)
}

/// Whatever can be refused is refused before the connection becomes a WebSocket.
async fn connect(
    place: Place,
    query: &Query,
    upgrades: Upgrades,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
    route: Route,
) -> Result<Response, Error> {
    place.app.sandboxes.check_there(&place.account, &place.sandbox)?;
    let upgrade = upgrade.map_err(|rejection| {
        Error::invalid("this route is a WebSocket; connect to it with a client for those")
            .because(rejection)
    })?;
    let (rows, columns) = (query.number("rows")?, query.number("cols")?);
    let attach = query.text("terminal")?.map(terminal_id).transpose()?;
    let running = place.running().await?;
    let terminal = match attach {
        Some(terminal) => {
            let size = rows.zip(columns);
            running.attach_terminal(terminal, query.number("offset")?, size).await
        }
        None => {
            let mut env = query.map("env.")?;
            env.entry("TERM".to_owned()).or_insert_with(|| "xterm-256color".to_owned());
            let given = |name| query.text(name).map(|text| text.map(str::to_owned));
            let new = NewTerminal {
                cmd: given("cmd")?,
                cwd: given("cwd")?,
                env,
                user: given("user")?,
                rows: rows.unwrap_or(24),
                columns: columns.unwrap_or(80),
                linger: place.app.config.terminal_linger,
            };
            running.open_terminal(new).await
        }
    };
    let terminal = terminal.map_err(|error| place.explain(error))?;
    let (id, offset) = (terminal.id.to_string(), terminal.offset);
    let upgraded = upgrades.begin();
    let upgrade = upgrade.max_message_size(LONGEST_MESSAGE).max_frame_size(LONGEST_MESSAGE);
    let mut response =
        upgrade.on_upgrade(move |socket| converse(place, terminal, socket, upgraded, route));
    let id = HeaderValue::from_str(&id).map_err(Error::internal)?;
    response.headers_mut().insert(TERMINAL_ID, id);
    response.headers_mut().insert(TERMINAL_OFFSET, offset.into());
    Ok(response)
}

fn terminal_id(text: &str) -> Result<TerminalId, Error> {
    text.parse().map_err(|_| Error::not_found("there is no such terminal; it may have ended"))
}

/// How a conversation ends.
#[derive(Debug)]
enum End {
    /// By itself.
    Exited(i32),
    TakenOver,
    /// With the sandbox, or because of the client's own fault.
    Failed(u16, String),
    Restart,
    /// The client has closed it, and wants nothing more of it.
    Closed,
    /// The terminal goes on without a client.
    Left,
}

/// When the client was heard of last.
struct Pulse {
    began: Instant,
    /// Milliseconds since then.
    heard: AtomicU64,
    /// It has sent more than the terminal takes, so nothing more is read from it.
    waits: AtomicBool,
}

impl Pulse {
    fn now(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn beat(&self) {
        self.heard.store(self.now(), Ordering::Relaxed);
    }

    fn is_gone(&self) -> bool {
        let silent = self.now().saturating_sub(self.heard.load(Ordering::Relaxed));
        !self.waits.load(Ordering::Relaxed) && Duration::from_millis(silent) > SILENCE
    }
}

type Sink = SplitSink<WebSocket, Message>;
type Source = SplitStream<WebSocket>;

async fn converse(
    place: Place,
    terminal: Terminal,
    socket: WebSocket,
    upgraded: Upgraded,
    route: Route,
) {
    let (mut sink, mut source) = socket.split();
    let end = {
        let (say, mut said) = mpsc::channel(4);
        let pulse = Pulse {
            began: Instant::now(),
            heard: AtomicU64::new(0),
            waits: AtomicBool::new(false),
        };
        tokio::select! {
            biased;
            () = place.app.sandboxes.deleted(&place.account, &place.sandbox) => {
                End::Failed(close_code::AWAY, "the sandbox was deleted".to_owned())
            }
            () = upgraded.stop.cancelled() => End::Restart,
            end = show(&place, &terminal, &mut sink, &mut said, &pulse) => end,
            end = listen(&terminal, &mut source, &say, &pulse) => end,
        }
    };
    tracing::debug!(sandbox = %place.sandbox, terminal = %terminal.id, ?end, "a terminal's connection ends");
    if matches!(end, End::Closed)
        && let Err(error) = terminal.end().await
    {
        tracing::debug!(%error, "a terminal that was closed goes on for its time");
    }
    // Whoever is gone cannot be told.
    let _ = tokio::time::timeout(GOODBYE, say_goodbye(&mut sink, &mut source, end, route)).await;
}

/// From the sandbox to the client.
async fn show(
    place: &Place,
    terminal: &Terminal,
    sink: &mut Sink,
    said: &mut mpsc::Receiver<Message>,
    pulse: &Pulse,
) -> End {
    let mut ping = tokio::time::interval_at(Instant::now() + PING, PING);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            biased;
            _ = ping.tick() => {
                if pulse.is_gone() {
                    return End::Left;
                }
                Message::Ping(bytes::Bytes::new())
            }
            Some(message) = said.recv() => message,
            screen = terminal.next() => match screen {
                Some(Ok(Screen::Output(bytes))) => Message::Binary(bytes),
                Some(Ok(Screen::Ended { exit_code })) => return End::Exited(exit_code),
                Some(Ok(Screen::TakenOver)) => return End::TakenOver,
                Some(Err(error)) => return lost(place, error),
                None => return lost(place, machine::Error::Lost.into()),
            },
        };
        // It may be slow, and then the terminal waits.
        match tokio::time::timeout(SLOWEST, sink.send(message)).await {
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => return End::Left,
        }
    }
}

fn lost(place: &Place, error: Error) -> End {
    let error = place.explain(error);
    tracing::debug!(%error, cause = error.causes(), "a terminal was lost");
    let is_away = matches!(error.code, ErrorCode::Conflict | ErrorCode::NotFound);
    let code = if is_away { close_code::AWAY } else { close_code::ERROR };
    End::Failed(code, error.message)
}

/// From the client to the sandbox.
async fn listen(
    terminal: &Terminal,
    source: &mut Source,
    say: &mpsc::Sender<Message>,
    pulse: &Pulse,
) -> End {
    loop {
        let Some(message) = source.next().await else { return End::Left };
        pulse.beat();
        match message {
            Ok(Message::Binary(bytes)) => {
                pulse.waits.store(true, Ordering::Relaxed);
                // Fails where it has ended, or is lost; the other direction tells that.
                let _ = terminal.type_in(bytes).await;
                pulse.waits.store(false, Ordering::Relaxed);
                pulse.beat();
            }
            Ok(Message::Text(text)) => {
                if let Err(error) = steer(terminal, text.as_str()).await {
                    let text = json!({ "error": error.message }).to_string();
                    // A client that asks more than it reads is not answered.
                    let _ = say.try_send(Message::text(text));
                }
            }
            Ok(Message::Ping(_) | Message::Pong(_)) => {}
            Ok(Message::Close(frame)) => {
                let code = frame.map_or(close_code::NORMAL, |frame| frame.code);
                return if code == close_code::NORMAL { End::Closed } else { End::Left };
            }
            Err(error) => return misunderstood(error),
        }
    }
}

async fn steer(terminal: &Terminal, text: &str) -> Result<(), Error> {
    let control = serde_json::from_str(text).map_err(|error| {
        let message = r#"a text message is `{"resize": {"rows": 24, "cols": 80}}` or `{"signal": "INT"}`; what is typed is binary"#;
        Error::invalid(message).because(error)
    })?;
    match control {
        TerminalControl::Resize { rows, cols } => terminal.resize(rows, cols).await,
        TerminalControl::Signal(signal) => terminal.signal(signal).await,
    }
}

/// What cannot be read may be too long, or none of the protocol's; else the connection is lost.
fn misunderstood(error: axum::Error) -> End {
    use tungstenite::{Error as Cause, error::ProtocolError};
    let cause = error.into_inner();
    match cause.downcast_ref::<Cause>() {
        Some(Cause::Capacity(_)) => {
            let message = format!("a message may have at most {LONGEST_MESSAGE} bytes");
            End::Failed(close_code::SIZE, message)
        }
        Some(Cause::Protocol(ProtocolError::ResetWithoutClosingHandshake)) | None => End::Left,
        Some(Cause::Protocol(error)) => End::Failed(close_code::PROTOCOL, error.to_string()),
        Some(Cause::Utf8(_)) => {
            End::Failed(close_code::INVALID, "a text message must be UTF-8".to_owned())
        }
        Some(_) => End::Left,
    }
}

async fn say_goodbye(sink: &mut Sink, source: &mut Source, end: End, route: Route) {
    let text = match &end {
        End::Exited(exit_code) if route == Route::Pty => Some(json!({ "exit": exit_code })),
        End::TakenOver => Some(json!({ "error": "another client has attached to this terminal" })),
        End::Failed(_, message) => Some(json!({ "error": message })),
        End::Exited(_) | End::Restart | End::Closed | End::Left => None,
    };
    let (code, reason) = match end {
        End::Exited(_) | End::Closed => (close_code::NORMAL, String::new()),
        End::TakenOver => (TAKEN_OVER, "attached elsewhere".to_owned()),
        End::Failed(code, message) => (code, message),
        End::Restart => (SERVER_RESTARTS, "the server is being stopped; attach again".to_owned()),
        End::Left => (close_code::AWAY, String::new()),
    };
    // Fails where the client was first to say goodbye.
    if let Some(text) = text {
        let _ = sink.send(Message::text(text.to_string())).await;
    }
    let reason = cut(&reason).into();
    let _ = sink.send(Message::Close(Some(CloseFrame { code, reason }))).await;
    // The answer to the client's goodbye goes out by this, and ours is waited for: closed with something unread, the
    // connection would break and take along what the client has not yet read.
    while let Some(Ok(_)) = source.next().await {}
}

/// The protocol has little room for a reason.
fn cut(reason: &str) -> &str {
    let mut end = reason.len().min(LONGEST_REASON);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    &reason[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_fits_and_splits_no_character() {
        assert_eq!(cut("short"), "short");
        let long = format!("{}é", "x".repeat(LONGEST_REASON - 1));
        assert_eq!(cut(&long), "x".repeat(LONGEST_REASON - 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_is_gone_when_it_is_silent_but_not_while_it_has_to_wait() {
        let pulse = Pulse {
            began: Instant::now(),
            heard: AtomicU64::new(0),
            waits: AtomicBool::new(false),
        };
        tokio::time::advance(SILENCE).await;
        assert!(!pulse.is_gone());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(pulse.is_gone());
        pulse.waits.store(true, Ordering::Relaxed);
        assert!(!pulse.is_gone());
        pulse.waits.store(false, Ordering::Relaxed);
        pulse.beat();
        assert!(!pulse.is_gone());
    }
}
