//! The way to databases: a port for each at the server's own address, or their names ([`super::routing`]). Who comes from a
//! sandbox is known by its address and let in by its account; everybody else by the password alone. Nothing is looked at
//! after the greeting.

use std::{
    io,
    net::{IpAddr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use rustix::net::sockopt;
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::timeout,
};

use super::{
    Databases, Entry,
    greeting::{Client, Greeting, gone, greeted, refuse},
};
use crate::{
    Error,
    sandbox::{InUse, NOTICED, Visitor},
};

/// From the connection to the greeting.
const GREETING: Duration = Duration::from_secs(30);
/// Of a machine that runs.
const DIAL: Duration = Duration::from_secs(15);
/// Of a session's first message.
const FIRST_ANSWER: Duration = Duration::from_secs(10);
/// Of reaching one that has to be brought up, or whose machine ends meanwhile.
const MOST_TRIES: u32 = 6;
const CANCEL: Duration = Duration::from_secs(10);
/// Of each direction of a session.
const BUFFER: usize = 64 << 10;
/// Of one database; PostgreSQL itself takes fewer.
const MOST_SESSIONS: usize = 2000;
/// After a failure to accept: nothing can be done but wait.
pub(super) const PAUSE: Duration = Duration::from_millis(200);
/// A client that is gone without a word keeps a database from hibernating until then.
const KEEPALIVE: Duration = Duration::from_secs(60);

/// Invalid authorization specification.
pub(super) const NOT_ALLOWED: &str = "28000";
const TOO_MANY: &str = "53300";
pub(super) const CANNOT_CONNECT_NOW: &str = "57P03";

impl Databases {
    /// At the server's address, and at the operator's if there is one. Where databases have names, that one shows no other
    /// port than theirs.
    pub(super) async fn listen(&self, port: u16) -> io::Result<Vec<TcpListener>> {
        let is_hidden = self.routed_port().is_some_and(|routed| routed != port);
        let mut listeners = Vec::new();
        for address in addresses(self.door, self.settings.listen.filter(|_| !is_hidden)) {
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
        let (mut client, greeting) = self.greeted(stream, from.ip()).await?;
        if !self.admits(entry, from.ip()) {
            return refuse(client, NOT_ALLOWED, "this sandbox's account has no such database")
                .await;
        }
        match greeting {
            Greeting::Cancel(message) => {
                self.cancel(entry, &message).await?;
                client.shutdown().await
            }
            Greeting::Start(message) => self.run(entry, client, from.ip(), &message).await,
        }
    }

    pub(super) async fn greeted(
        &self,
        stream: TcpStream,
        from: IpAddr,
    ) -> io::Result<(Client, Greeting)> {
        let Some(_stranger) = self.strangers.admit(from) else {
            return Err(io::Error::other("too many from its address are there without a greeting"));
        };
        keep_alive(&stream)?;
        timeout(GREETING, greeted(stream, &self.tls.acceptor)).await?
    }

    pub(super) fn admits(&self, entry: &Entry, from: IpAddr) -> bool {
        let IpAddr::V4(address) = from.to_canonical() else { return true };
        match self.sandboxes.visitor(address) {
            Visitor::Other => true,
            Visitor::Sandbox { account, only } => entry.look(|row| {
                row.account == account && only.is_none_or(|only| only.contains(&row.id))
            }),
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
        client: Client,
        from: IpAddr,
        message: &[u8],
    ) -> io::Result<()> {
        // Before anything is looked at, so that it does not go to sleep meanwhile.
        let Some(session) = entry.begin_session(from, MOST_SESSIONS) else {
            return refuse(client, TOO_MANY, "too many connections to this database").await;
        };
        let begun = tokio::select! {
            begun = self.start_in(entry, message) => begun,
            () = session.ended() => return Ok(()),
            () = gone(&client) => return Ok(()),
        };
        let (_in_use, guest) = match begun {
            Ok(begun) => begun,
            Err(error) => {
                tracing::warn!(database = %entry.id(), %error, cause = error.causes(), "a database cannot be reached");
                // Why is for those alone who have a key.
                let message = "the database cannot be reached now; its `error` in GET /v1/databases/{id} says why";
                return refuse(client, CANNOT_CONNECT_NOW, message).await;
            }
        };
        let (account, sandbox) = entry.sandbox();
        let ended = self.sandboxes.machine_end(&account, &sandbox);
        tokio::select! {
            ended = exchange(client, guest) => ended,
            () = session.ended() => Ok(()),
            // Of which the other end of the connection would not tell: its machine is just not there any longer.
            () = ended => Ok(()),
        }
    }

    /// PostgreSQL that has heard a session's first message, whatever has to be done first. Where its machine ends before it
    /// has answered, nothing has begun, and it is sent again.
    async fn start_in(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        message: &[u8],
    ) -> Result<(InUse, TcpStream), Error> {
        let (account, sandbox) = entry.sandbox();
        let in_use = self.sandboxes.use_of(&account, &sandbox)?;
        for _ in 0..MOST_TRIES {
            let Some(mut guest) = self.dial(entry).await else {
                self.bring_up(entry).await?;
                continue;
            };
            guest.set_nodelay(true).map_err(Error::internal)?;
            if self.hears(entry, &mut guest, message).await {
                return Ok((in_use, guest));
            }
        }
        Err(Error::busy("it does not answer", 1))
    }

    /// False when the machine ends before PostgreSQL has answered.
    async fn hears(&self, entry: &Entry, guest: &mut TcpStream, message: &[u8]) -> bool {
        let (account, sandbox) = entry.sandbox();
        let mut ended = pin!(self.sandboxes.machine_end(&account, &sandbox));
        let answered = async {
            guest.write_all(message).await?;
            guest.peek(&mut [0]).await
        };
        tokio::select! {
            answered = timeout(FIRST_ANSWER, answered) => match answered {
                // Cut off: by PostgreSQL, or with its machine, whose end is noticed in a moment.
                Ok(Ok(0) | Err(_)) => timeout(NOTICED, ended).await.is_err(),
                // One that takes long is waited for while the client is looked at, too.
                Ok(Ok(_)) | Err(_) => true,
            },
            () = &mut ended => false,
        }
    }

    /// `None`: it does not run, or nobody listens there.
    pub(super) async fn dial(&self, entry: &Entry) -> Option<TcpStream> {
        let dialled = self.try_to_dial(entry).await?;
        let told = |error: &io::Error| tracing::debug!(database = %entry.id(), %error, "PostgreSQL is not reached");
        dialled.inspect_err(told).ok()
    }

    /// `None`: it does not run, or ends meanwhile.
    pub(super) async fn try_to_dial(&self, entry: &Entry) -> Option<io::Result<TcpStream>> {
        let (account, sandbox) = entry.sandbox();
        let ended = self.sandboxes.machine_end(&account, &sandbox);
        tokio::select! {
            dialled = timeout(DIAL, self.sandboxes.dial(&account, &sandbox, super::PORT)) => {
                dialled.unwrap_or_else(|late| Some(Err(late.into())))
            }
            () = ended => None,
        }
    }
}

/// One alone where it is the server's own as well.
fn addresses(door: IpAddr, more: Option<IpAddr>) -> Vec<IpAddr> {
    match more {
        Some(all) if all.is_unspecified() || all == door => vec![all],
        Some(other) => vec![door, other],
        None => vec![door],
    }
}

/// Until PostgreSQL has said all that it says. A client that does not look at its connection would not tell of that end.
async fn exchange<C, G>(client: C, guest: G) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite,
    G: AsyncRead + AsyncWrite,
{
    let (from_client, to_client) = tokio::io::split(client);
    let (from_guest, to_guest) = tokio::io::split(guest);
    let asking = async {
        pass(from_client, to_guest).await?;
        // The answer to what came last is still due.
        std::future::pending().await
    };
    tokio::select! {
        failed = asking => failed,
        ended = pass(from_guest, to_client) => ended,
    }
}

/// All there is, and the end.
async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin) -> io::Result<()> {
    let mut buffer = vec![0; BUFFER];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return to.shutdown().await;
        }
        to.write_all(&buffer[..read]).await?;
        // TLS keeps what its socket did not take at once.
        to.flush().await?;
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

#[cfg(test)]
mod tests {
    use tokio::io::duplex;

    use super::*;

    #[test]
    fn an_address_that_is_the_servers_too_is_listened_at_once() {
        let ip = |text: &str| text.parse::<IpAddr>().unwrap();
        let door = ip("100.64.8.0");
        for same in ["0.0.0.0", "::", "100.64.8.0"].map(ip) {
            assert_eq!(addresses(door, Some(same)), [same]);
        }
        assert_eq!(addresses(door, Some(ip("10.0.0.1"))), [door, ip("10.0.0.1")]);
        assert_eq!(addresses(door, None), [door]);
    }

    #[tokio::test]
    async fn all_that_postgresql_said_arrives_and_its_end_is_the_end() {
        let (client, clients) = duplex(1000);
        let (guest, guests) = duplex(1000);
        let session = tokio::spawn(exchange(clients, guests));
        let (mut from_client, _stays_open) = tokio::io::split(client);
        let said = vec![7; 300_000];
        let saying = async {
            let mut guest = guest;
            guest.write_all(&said).await.unwrap();
        };
        let mut heard = Vec::new();
        let (_, read) = tokio::join!(saying, from_client.read_to_end(&mut heard));
        read.unwrap();
        assert_eq!(heard, said);
        session.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn what_is_answered_after_the_end_of_a_client_is_passed_on() {
        let (mut client, clients) = duplex(1000);
        let (mut guest, guests) = duplex(1000);
        let session = tokio::spawn(exchange(clients, guests));
        client.write_all(b"ask").await.unwrap();
        client.shutdown().await.unwrap();
        let mut asked = Vec::new();
        guest.read_to_end(&mut asked).await.unwrap();
        guest.write_all(b"answer").await.unwrap();
        drop(guest);
        let mut answer = Vec::new();
        client.read_to_end(&mut answer).await.unwrap();
        assert_eq!((asked.as_slice(), answer.as_slice()), (&b"ask"[..], &b"answer"[..]));
        session.await.unwrap().unwrap();
    }
}
