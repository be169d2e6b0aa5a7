//! Terminals, over a WebSocket.

use std::collections::BTreeMap;

use api::{SandboxId, Terminal, TerminalControl, TerminalId, TerminalList, TerminalSignal};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{
    SinkExt, StreamExt,
    stream::{SplitSink, SplitStream},
};
use http::{
    HeaderMap, StatusCode,
    header::{CONNECTION, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE},
};
use reqwest::{Method, Upgraded};
use serde::Deserialize;
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        protocol::{CloseFrame, Role, frame::coding::CloseCode},
    },
};

use crate::{Client, Error, escaped, unless_silent};

/// What a new terminal runs, as whom, and the size of its window.
#[derive(Debug, Clone, Default)]
pub struct TerminalOptions {
    /// For `bash -c`. Default: the user's login shell.
    pub cmd: Option<String>,
    pub user: Option<String>,
    pub cwd: Option<String>,
    pub env: BTreeMap<String, String>,
    /// Rows and columns.
    pub size: Option<(u16, u16)>,
}

/// A terminal that this client is connected to.
pub struct TerminalConnection {
    pub id: TerminalId,
    /// The number of the first byte that comes.
    pub offset: u64,
    pub keyboard: Keyboard,
    pub screen: Screen,
}

type Socket = WebSocketStream<Upgraded>;

/// What is typed and done to the terminal.
pub struct Keyboard(SplitSink<Socket, Message>);

/// What the terminal shows.
pub struct Screen {
    socket: SplitStream<Socket>,
    url: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScreenEvent {
    Output(Bytes),
    /// The last, but for [`ScreenEvent::Closed`].
    Exited {
        exit_code: i32,
    },
    /// The server says why it ends, or what it did not understand.
    Failed {
        message: String,
    },
    /// The server has closed the connection. 1012: to the terminal one can attach again.
    Closed {
        code: u16,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Said {
    Exit(i32),
    Error(String),
}

impl Client {
    pub async fn open_terminal(
        &self,
        sandbox: &SandboxId,
        options: &TerminalOptions,
    ) -> Result<TerminalConnection, Error> {
        let mut query = Vec::new();
        for (name, value) in [("cmd", &options.cmd), ("user", &options.user), ("cwd", &options.cwd)]
        {
            query.extend(value.as_ref().map(|value| (name.to_owned(), value.clone())));
        }
        query
            .extend(options.env.iter().map(|(name, value)| (format!("env.{name}"), value.clone())));
        self.connect_terminal(sandbox, query, options.size).await
    }

    /// Goes on with the byte `offset` of its output, or with all that is remembered.
    pub async fn attach_terminal(
        &self,
        sandbox: &SandboxId,
        terminal: &TerminalId,
        offset: Option<u64>,
        size: Option<(u16, u16)>,
    ) -> Result<TerminalConnection, Error> {
        let mut query = vec![("terminal".to_owned(), terminal.to_string())];
        query.extend(offset.map(|offset| ("offset".to_owned(), offset.to_string())));
        self.connect_terminal(sandbox, query, size).await
    }

    async fn connect_terminal(
        &self,
        sandbox: &SandboxId,
        mut query: Vec<(String, String)>,
        size: Option<(u16, u16)>,
    ) -> Result<TerminalConnection, Error> {
        if let Some((rows, cols)) = size {
            query.push(("rows".to_owned(), rows.to_string()));
            query.push(("cols".to_owned(), cols.to_string()));
        }
        let query: Vec<_> = query
            .iter()
            .map(|(name, value)| format!("{}={}", escaped(name), escaped(value)))
            .collect();
        let path = format!("/v1/sandboxes/{sandbox}/exec/pty?{}", query.join("&"));
        let (socket, headers) = self.web_socket(&path).await?;
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let id = header("x-terminal-id").and_then(|id| id.parse().ok());
        let offset = header("x-terminal-offset").and_then(|offset| offset.parse().ok());
        let (Some(id), Some(offset)) = (id, offset) else {
            return Err(Error::Unexpected { source: "the answer names no terminal".into() });
        };
        let (keyboard, screen) = socket.split();
        let screen = Screen { socket: screen, url: self.url.clone() };
        Ok(TerminalConnection { id, offset, keyboard: Keyboard(keyboard), screen })
    }

    /// A WebSocket, and the headers of the answer.
    pub async fn web_socket(&self, path_and_query: &str) -> Result<(Socket, HeaderMap), Error> {
        let key: [u8; 16] = *uuid::Uuid::new_v4().as_bytes();
        let request = self
            .request(Method::GET, path_and_query)
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, BASE64_STANDARD.encode(key));
        let response = self.unless_silent(request.send()).await?;
        let response = response.map_err(|source| self.unreachable(source))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            self.refuse_failures(response).await?;
            return Err(Error::Unexpected { source: "the answer is no WebSocket".into() });
        }
        let headers = response.headers().clone();
        let upgraded = response.upgrade().await.map_err(|source| Error::Interrupted { source })?;
        Ok((WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await, headers))
    }

    /// The oldest first.
    pub async fn terminals(&self, sandbox: &SandboxId) -> Result<Vec<Terminal>, Error> {
        let request = self.request(Method::GET, &format!("/v1/sandboxes/{sandbox}/terminals"));
        Ok(self.json::<TerminalList>(request).await?.terminals)
    }

    /// Hangs up.
    pub async fn end_terminal(
        &self,
        sandbox: &SandboxId,
        terminal: &TerminalId,
    ) -> Result<(), Error> {
        let path = format!("/v1/sandboxes/{sandbox}/terminals/{terminal}");
        self.send(self.request(Method::DELETE, &path)).await?;
        Ok(())
    }
}

impl Keyboard {
    pub async fn type_in(&mut self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        self.send(Message::Binary(bytes.into())).await
    }

    pub async fn resize(&mut self, rows: u16, cols: u16) -> Result<(), Error> {
        self.steer(&TerminalControl::Resize { rows, cols }).await
    }

    pub async fn signal(&mut self, signal: TerminalSignal) -> Result<(), Error> {
        self.steer(&TerminalControl::Signal(signal)).await
    }

    /// Ends the terminal.
    pub async fn close(&mut self) -> Result<(), Error> {
        self.close_with(CloseCode::Normal).await
    }

    /// Leaves the terminal, which goes on for its time.
    pub async fn leave(&mut self) -> Result<(), Error> {
        self.close_with(CloseCode::Away).await
    }

    async fn close_with(&mut self, code: CloseCode) -> Result<(), Error> {
        self.send(Message::Close(Some(CloseFrame { code, reason: "".into() }))).await
    }

    async fn steer(&mut self, control: &TerminalControl) -> Result<(), Error> {
        let text = serde_json::to_string(control)
            .map_err(|source| Error::Unexpected { source: Box::new(source) })?;
        self.send(Message::text(text)).await
    }

    async fn send(&mut self, message: Message) -> Result<(), Error> {
        self.0.send(message).await.map_err(|source| Error::Lost { source: Box::new(source) })
    }
}

impl Screen {
    /// `None` after [`ScreenEvent::Closed`]. An error: the connection is lost, and the terminal goes on for its time.
    pub async fn next(&mut self) -> Option<Result<ScreenEvent, Error>> {
        loop {
            // The server asks now and then whether we are there.
            let message = match unless_silent(self.socket.next(), &self.url).await {
                Ok(message) => message?,
                Err(error) => return Some(Err(error)),
            };
            return Some(match message {
                Ok(Message::Binary(bytes)) => Ok(ScreenEvent::Output(bytes)),
                Ok(Message::Text(text)) => match serde_json::from_str(&text) {
                    Ok(Said::Exit(exit_code)) => Ok(ScreenEvent::Exited { exit_code }),
                    Ok(Said::Error(message)) => Ok(ScreenEvent::Failed { message }),
                    Err(source) => Err(Error::Unexpected { source: Box::new(source) }),
                },
                Ok(Message::Close(frame)) => {
                    Ok(ScreenEvent::Closed { code: frame.map_or(1005, |frame| frame.code.into()) })
                }
                Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_)) => continue,
                Err(source) => Err(Error::Lost { source: Box::new(source) }),
            });
        }
    }
}
