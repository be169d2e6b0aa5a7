//! Ports of a sandbox: what listens, and connections to it as byte streams.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use api::{AccountId, ErrorCode, SandboxId};
use bytes::BytesMut;
use machine::guest::{self, Event, Guest, Listener, Reply, Request};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, DuplexStream, ReadBuf},
    sync::Semaphore,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{Sandboxes, registry, state::Wish, usage::InUse};
use crate::Error;

/// For what listens to take a connection; the kernel does it for a server that is slow.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
const LIST_DEADLINE: Duration = Duration::from_secs(20);
/// Connections to the ports of one sandbox: less than its channel has streams, so that commands and files find some.
pub(crate) const MOST_CONNECTIONS: usize = 512;
/// Of each direction, between the channel and whoever reads or writes.
const BUFFER: usize = 64 << 10;

/// The ports of a running sandbox.
pub(crate) struct Ports {
    guest: Guest,
    in_use: Arc<InUse>,
    places: Arc<Semaphore>,
}

/// A connection to a port. Each side ends for itself; dropped, it is closed in the guest at once.
pub(crate) struct Connection {
    io: DuplexStream,
    /// Its end is not one that the guest has made.
    broken: Arc<AtomicBool>,
    _closed: DropGuard,
}

impl Sandboxes {
    /// A hibernated one is woken first.
    ///
    /// # Errors
    /// 404 when it is not theirs, gone, or expired; 409 or 503 when it is not running, with the way out.
    pub(crate) async fn ports(&self, account: &AccountId, id: &SandboxId) -> Result<Ports, Error> {
        let running = self.running(account, id).await?;
        let entry = self.registry.find(account, id)?;
        let in_use = running.in_use.ok_or_else(registry::not_found)?;
        Ok(Ports { guest: running.guest, in_use, places: Arc::clone(&entry.connections) })
    }

    /// What listens; nothing in one that does not run, which is not woken.
    ///
    /// # Errors
    /// 404 when it is not theirs, gone, or expired.
    pub(crate) async fn listeners(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<Vec<Listener>, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        let running = match self.running_already(account, id) {
            Ok(running) => running,
            Err(error) if error.code == ErrorCode::NotFound => return Err(error),
            Err(_) => return Ok(Vec::new()),
        };
        match running.guest.call(Request::Listeners, LIST_DEADLINE).await {
            Ok(Reply::Listeners(listeners)) => Ok(listeners),
            Ok(_) => Err(machine::Error::Misbehaved("a list of ports was something else").into()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whose it is, for those who come without a key.
    pub(crate) fn account_of(&self, id: &SandboxId) -> Option<AccountId> {
        self.registry.account_of(id)
    }
}

impl Ports {
    /// # Errors
    /// 502 when nothing listens, 504 when it does not take the connection, 503 when there are too many.
    pub(crate) async fn connect(&self, port: u16) -> Result<Connection, Error> {
        let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
            Error::busy(
                "too many connections to ports of this sandbox are open; close some, or try again shortly",
                1,
            )
        })?;
        let stream = self.guest.open(Request::Dial { port })?;
        let first = tokio::time::timeout(CONNECT_DEADLINE, stream.next()).await;
        match first.map_err(|_| not_taken(port))?.transpose() {
            Ok(Some(Event::Reply(Reply::Connected))) => {}
            Ok(_) => {
                let how = "a connection began with something else";
                return Err(machine::Error::Misbehaved(how).into());
            }
            Err(machine::Error::Refused(failure)) if failure.code == guest::ErrorCode::NotFound => {
                return Err(Error::new(ErrorCode::BadGateway, failure.message));
            }
            Err(error) => return Err(error.into()),
        }
        let (io, inner) = tokio::io::duplex(BUFFER);
        let (closed, broken) = (CancellationToken::new(), Arc::new(AtomicBool::new(false)));
        tokio::spawn({
            let (closed, broken) = (closed.clone(), Arc::clone(&broken));
            let held = (Arc::clone(&self.in_use), place);
            async move {
                let carried = carry(&stream, inner, &broken);
                closed.run_until_cancelled(carried).await;
                drop((stream, held));
            }
        });
        Ok(Connection { io, broken, _closed: closed.drop_guard() })
    }
}

fn not_taken(port: u16) -> Error {
    let message = format!("what listens on port {port} in this sandbox takes no more connections");
    Error::new(ErrorCode::TimedOut, message)
}

/// Both ways until both have ended, or the channel has.
async fn carry(stream: &guest::Stream, io: DuplexStream, broken: &AtomicBool) {
    let (mut reader, mut writer) = tokio::io::split(io);
    let out = async {
        let mut buffer = BytesMut::new();
        loop {
            buffer.reserve(BUFFER / 2);
            match reader.read_buf(&mut buffer).await {
                Ok(0) | Err(_) => break,
                Ok(_) => stream.send(buffer.split().freeze()).await?,
            }
        }
        stream.finish().await
    };
    let back = async {
        while let Some(event) = stream.next().await {
            match event? {
                Event::Data(_, bytes) => {
                    if writer.write_all(&bytes).await.is_err() {
                        return Err(machine::Error::Reset);
                    }
                }
                Event::Finished => break,
                Event::Reply(_) => {
                    return Err(machine::Error::Misbehaved("a reply came on a connection"));
                }
            }
        }
        // Fails where nobody reads any more.
        let _ = writer.shutdown().await;
        Ok(())
    };
    // What the guest takes no more does not end what it says.
    let out = async { Ok::<_, machine::Error>(out.await.is_ok()) };
    if tokio::try_join!(out, back).is_err() {
        broken.store(true, Ordering::SeqCst);
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = (buffer.filled().len(), buffer.remaining());
        let read = Pin::new(&mut self.io).poll_read(context, buffer);
        let is_end = matches!(read, Poll::Ready(Ok(())))
            && before.1 > 0
            && buffer.filled().len() == before.0;
        if is_end && self.broken.load(Ordering::SeqCst) {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(context)
    }
}
