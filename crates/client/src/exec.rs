//! Commands: run to the end, watched as they run, and what they printed.

use std::{collections::VecDeque, fmt};

use api::{ExecRequest, ExecResult, SandboxId};
use bytes::Bytes;
use reqwest::{Method, Response};
use serde::{Deserialize, de::DeserializeOwned};

use crate::{Client, Error, next_chunk, sse};

impl Client {
    /// Answers when the command has ended, whatever its exit code.
    pub async fn exec(&self, id: &SandboxId, request: &ExecRequest) -> Result<ExecResult, Error> {
        self.json(self.request(Method::POST, &format!("/v1/sandboxes/{id}/exec")).json(request))
            .await
    }

    /// Watches the command. Dropping the events ends the watching, not the command.
    pub async fn exec_stream(
        &self,
        id: &SandboxId,
        request: &ExecRequest,
    ) -> Result<ExecEvents, Error> {
        let request =
            self.request(Method::POST, &format!("/v1/sandboxes/{id}/exec/stream")).json(request);
        Ok(ExecEvents { events: self.events(request).await? })
    }

    /// What commands of this sandbox have printed so far, oldest first.
    pub async fn logs(&self, id: &SandboxId, stream: LogStream) -> Result<Bytes, Error> {
        let response = self
            .send(self.request(Method::GET, &format!("/v1/sandboxes/{id}/logs?stream={stream}")))
            .await?;
        self.whole(response).await
    }

    /// What has been printed, then what will be, until the sandbox goes.
    pub async fn follow_logs(&self, id: &SandboxId, stream: LogStream) -> Result<LogLines, Error> {
        let path = format!("/v1/sandboxes/{id}/logs?stream={stream}&follow=true");
        Ok(LogLines { events: self.events(self.request(Method::GET, &path)).await? })
    }

    pub(crate) async fn events(&self, request: reqwest::RequestBuilder) -> Result<Events, Error> {
        let response = self.send(request.header(http::header::ACCEPT, "text/event-stream")).await?;
        Ok(Events {
            response,
            url: self.url().to_owned(),
            parser: sse::Parser::default(),
            waiting: VecDeque::new(),
        })
    }
}

/// Which of the two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogStream {
    #[default]
    Both,
    Stdout,
    Stderr,
}

impl fmt::Display for LogStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    Stdout(String),
    Stderr(String),
    /// After all output.
    Exited {
        exit_code: i32,
    },
    /// Instead of an exit code: what became of the command.
    Failed {
        message: String,
    },
}

pub struct ExecEvents {
    events: Events,
}

impl ExecEvents {
    /// `None` after the end of the command.
    pub async fn next(&mut self) -> Result<Option<ExecEvent>, Error> {
        #[derive(Deserialize)]
        struct Chunk {
            chunk: String,
        }
        #[derive(Deserialize)]
        struct Exit {
            exit_code: i32,
        }
        #[derive(Deserialize)]
        struct Failure {
            error: String,
        }
        while let Some(event) = self.events.next().await? {
            return Ok(Some(match event.name.as_str() {
                "stdout" => ExecEvent::Stdout(data::<Chunk>(&event)?.chunk),
                "stderr" => ExecEvent::Stderr(data::<Chunk>(&event)?.chunk),
                "exit" => ExecEvent::Exited { exit_code: data::<Exit>(&event)?.exit_code },
                "error" => ExecEvent::Failed { message: data::<Failure>(&event)?.error },
                // A later server may tell more.
                _ => continue,
            }));
        }
        Ok(None)
    }
}

pub struct LogLines {
    events: Events,
}

impl LogLines {
    pub async fn next(&mut self) -> Result<Option<String>, Error> {
        #[derive(Deserialize)]
        struct Line {
            line: String,
        }
        while let Some(event) = self.events.next().await? {
            if event.name == "line" {
                return Ok(Some(data::<Line>(&event)?.line));
            }
        }
        Ok(None)
    }
}

fn data<T: DeserializeOwned>(event: &sse::Event) -> Result<T, Error> {
    serde_json::from_str(&event.data)
        .map_err(|source| Error::Unexpected { source: Box::new(source) })
}

/// The events of one answer.
pub(crate) struct Events {
    response: Response,
    url: String,
    parser: sse::Parser,
    waiting: VecDeque<sse::Event>,
}

impl Events {
    pub(crate) async fn next(&mut self) -> Result<Option<sse::Event>, Error> {
        loop {
            if let Some(event) = self.waiting.pop_front() {
                return Ok(Some(event));
            }
            let Some(chunk) = next_chunk(&mut self.response, &self.url).await? else {
                return Ok(None);
            };
            let events = self
                .parser
                .push(&chunk)
                .map_err(|source| Error::Unexpected { source: Box::new(source) })?;
            self.waiting.extend(events);
        }
    }
}
