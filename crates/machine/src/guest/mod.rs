//! The host end of the guest channel: requests go in, replies and data come out, each stream at its own pace.
//!
//! The agent is in the hands of whoever uses the sandbox, so nothing it sends is trusted: every frame is checked, what
//! waits here for each stream is bounded, and an agent that breaks the rules loses the stream or the connection.

mod connection;
mod forgetting;
mod handshake;
mod stream;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixStream;

pub use protocol::QUIESCE_LIMIT;
pub use protocol::files::*;
pub use protocol::frame::Channel;
pub use protocol::kernel::{self, CellEnd, KernelEvent, KernelRun, KernelStart, KernelState};
pub use protocol::message::*;
pub use protocol::transfer;

pub use self::stream::{Event, Stream};
use crate::error::{Error, Result};
use connection::Connection;
use forgetting::Forgetting;

/// A connection to the agent. It lasts as long as one clone of it, or one stream.
#[derive(Debug, Clone)]
pub struct Guest {
    connection: Arc<Connection>,
    forgetting: Arc<Forgetting>,
}

impl Guest {
    /// Greets the agent until it answers; everything that was in flight before is thrown away.
    ///
    /// # Errors
    /// [`Error::Silent`] after the deadline, [`Error::Lost`] when the other end is closed.
    pub async fn connect(stream: UnixStream, deadline: Duration) -> Result<Self> {
        let greeted = tokio::time::timeout(deadline, handshake::greet(&stream))
            .await
            .map_err(|_| Error::Silent)??;
        let connection = Arc::new(Connection::start(stream, greeted));
        Ok(Self { connection, forgetting: Arc::default() })
    }

    /// Of the protocol that the agent speaks; it may be older than ours.
    pub fn version(&self) -> u32 {
        self.connection.version()
    }

    /// True once the connection has ended; connect anew then.
    pub fn is_lost(&self) -> bool {
        self.connection.is_lost()
    }

    /// Asks what is answered with one reply.
    ///
    /// # Errors
    /// [`Error::Refused`] is the agent's answer. After [`Error::Silent`] and [`Error::Lost`] it is unknown whether the
    /// request was carried out.
    pub async fn call(&self, request: Request, deadline: Duration) -> Result<Reply> {
        let answer = async {
            let stream = self.open(request)?;
            match stream.next().await {
                Some(Ok(Event::Reply(reply))) => Ok(reply),
                Some(Ok(Event::Data(..))) => {
                    Err(Error::Misbehaved("data came where a reply was due"))
                }
                Some(Ok(Event::Finished)) | None => Err(Error::Misbehaved("no reply came")),
                Some(Err(error)) => Err(error),
            }
        };
        tokio::time::timeout(deadline, answer).await.map_err(|_| Error::Silent)?
    }

    /// Opens a stream. It waits for nothing.
    ///
    /// # Errors
    /// [`Error::Busy`] when too many are open, [`Error::OldAgent`], [`Error::Lost`].
    #[expect(clippy::needless_pass_by_value, reason = "callers make it for this one use")]
    pub fn open(&self, request: Request) -> Result<Stream> {
        Stream::open(&self.connection, &request)
    }
}
