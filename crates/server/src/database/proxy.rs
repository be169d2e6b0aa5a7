//! The way to databases: a port for each at the server's own address, or their names ([`super::routing`]). Who comes from a sandbox is known by its address
//! and let in by its account; everybody else by the password alone. Nothing is looked at after the greeting.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use rustix::net::sockopt;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional_with_sizes},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

use super::{
    Databases, Entry,
    greeting::{Client, Greeting},
};
use crate::{Error, sandbox::Visitor};

/// From the connection to the greeting.
const GREETING: Duration = Duration::from_secs(30);
/// Of a machine that runs.
const DIAL: Duration = Duration::from_secs(15);
const CANCEL: Duration = Duration::from_secs(10);
/// Of each direction of a session.
const BUFFER: usize = 64 << 10;
/// Of one database; PostgreSQL itself takes fewer.
const MOST_SESSIONS: u64 = 2000;
/// After a failure to accept: nothing can be done but wait.
pub(super) const PAUSE: Duration = Duration::from_millis(200);
/// A client that is gone without a word keeps a database from hibernating until then.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Invalid authorization specification.
pub(super) const NOT_ALLOWED: &str = "28000";
const TOO_MANY: &str = "53300";
const CANNOT_CONNECT_NOW: &str = "57P03";

impl Databases {
    /// At the server's address, and at the operator's if there is one. Where databases have names, that one shows no other
    /// port than theirs.
    pub(super) async fn listen(&self, port: u16) -> io::Result<Vec<TcpListener>> {
        let is_hidden = self.routed_port().is_some_and(|routed| routed != port);
        let mut listeners = Vec::new();
        for address in std::iter::once(self.door).chain(self.settings.listen.filter(|_| !is_hidden))
        {
            listeners.push(TcpListener::bind((address, port)).await?);
        }
        Ok(listeners)
    }

    /// Lets clients in until the entry is closed.
    pub(super) async fn serve(self: Arc<Self>, entry: Arc<Entry>, listeners: Vec<TcpListener>) {
        let mut accepting = JoinSet::new();
        for listener in listeners {
            let (databases, entry) = (Arc::clone(&self), Arc::clone(&entry));
            accepting.spawn(async move { databases.accept(&entry, &listener).await });
        }
        entry.closed.cancelled().await;
        accepting.shutdown().await;
    }

    async fn accept(self: &Arc<Self>, entry: &Arc<Entry>, listener: &TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let (databases, entry) = (Arc::clone(self), Arc::clone(entry));
                    self.tasks.spawn(async move {
                        let id = entry.id();
                        let session = databases.session(&entry, stream, from);
                        let ended = tokio::select! {
                            ended = session => ended,
                            () = entry.closed.cancelled() => return,
                            () = databases.closed.cancelled() => return,
                        };
                        if let Err(error) = ended {
                            tracing::debug!(database = %id, %error, "a session ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(database = %entry.id(), %error, "a client cannot be accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
    }

    async fn session(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        stream: TcpStream,
        from: SocketAddr,
    ) -> io::Result<()> {
        let (mut client, greeting) = self.greeted(stream).await?;
        if !self.admits(entry, from.ip()) {
            return client.refuse(NOT_ALLOWED, "this sandbox's account has no such database").await;
        }
        match greeting {
            Greeting::Cancel(message) => {
                self.cancel(entry, &message).await?;
                client.shutdown().await
            }
            Greeting::Start(message) => self.run(entry, client, from.ip(), &message).await,
        }
    }

    pub(super) async fn greeted(&self, stream: TcpStream) -> io::Result<(Client, Greeting)> {
        keep_alive(&stream)?;
        timeout(GREETING, Client::greeted(stream, &self.tls.acceptor)).await?
    }

    pub(super) fn admits(&self, entry: &Entry, from: IpAddr) -> bool {
        let IpAddr::V4(address) = from.to_canonical() else { return true };
        match self.sandboxes.visitor(address) {
            Visitor::Other => true,
            Visitor::Sandbox(account) => entry.look(|row| row.account == account),
            Visitor::Gone => false,
        }
    }

    /// One that does not run has nothing to cancel. No answer is due.
    pub(super) async fn cancel(&self, entry: &Entry, message: &[u8]) -> io::Result<()> {
        if let Some(mut guest) = self.dial(entry).await {
            guest.write_all(message).await?;
            // PostgreSQL closes once it is done.
            let _ = timeout(CANCEL, guest.read(&mut [0])).await;
        }
        Ok(())
    }

    pub(super) async fn run(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        mut client: Client,
        from: IpAddr,
        message: &[u8],
    ) -> io::Result<()> {
        // Before anything is looked at, so that it does not go to sleep meanwhile.
        let Some(session) = entry.begin_session(from, MOST_SESSIONS) else {
            return client.refuse(TOO_MANY, "too many connections to this database").await;
        };
        let (_in_use, mut guest) = match self.reach(entry).await {
            Ok(reached) => reached,
            Err(error) => {
                tracing::warn!(database = %entry.id(), %error, cause = error.causes(), "a database cannot be reached");
                let message = format!("the database cannot be reached now: {}", error.message);
                return client.refuse(CANNOT_CONNECT_NOW, &message).await;
            }
        };
        guest.set_nodelay(true)?;
        let (account, sandbox) = entry.sandbox();
        let ended = self.sandboxes.machine_end(&account, &sandbox);
        guest.write_all(message).await?;
        let copying = copy_bidirectional_with_sizes(&mut client, &mut guest, BUFFER, BUFFER);
        tokio::select! {
            copied = copying => copied.map(drop),
            () = session.ended() => Ok(()),
            // Of which the other end of the connection would not tell: its machine is just not there any longer.
            () = ended => Ok(()),
        }
    }

    /// PostgreSQL in the guest, whatever has to be done first.
    async fn reach(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
    ) -> Result<(crate::sandbox::InUse, TcpStream), Error> {
        let (account, sandbox) = entry.sandbox();
        let in_use = self.sandboxes.use_of(&account, &sandbox)?;
        if let Some(stream) = self.dial(entry).await {
            return Ok((in_use, stream));
        }
        self.bring_up(entry).await?;
        let stream = self.dial(entry).await.ok_or_else(|| Error::busy("it does not answer", 1))?;
        Ok((in_use, stream))
    }

    /// `None`: it does not run, or nobody listens there.
    pub(super) async fn dial(&self, entry: &Entry) -> Option<TcpStream> {
        let (account, sandbox) = entry.sandbox();
        let dialled = self.sandboxes.dial(&account, &sandbox, super::PORT);
        match timeout(DIAL, dialled).await {
            Ok(Some(Ok(stream))) => Some(stream),
            Ok(Some(Err(error))) => {
                tracing::debug!(database = %entry.id(), %error, "PostgreSQL is not reached");
                None
            }
            Ok(None) | Err(_) => None,
        }
    }
}

fn keep_alive(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEPALIVE)?;
    sockopt::set_tcp_keepintvl(stream, KEEPALIVE / 6)?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(())
}
