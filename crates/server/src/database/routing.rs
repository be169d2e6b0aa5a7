//! Databases by their names: one port for all, at which `ID.SUFFIX` is read from a client's greeting of TLS.

use std::{
    io,
    net::SocketAddr,
    sync::{Arc, PoisonError},
    time::Duration,
};

use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::sleep,
};

use super::{
    DatabaseState, Databases, Entry,
    greeting::{Client, Greeting, refuse, wanted_host},
    proxy::{CANNOT_CONNECT_NOW, NOT_ALLOWED, PAUSE},
};

/// Between tries to have a port that somebody else has.
const AGAIN_EVERY: Duration = Duration::from_secs(1);

impl Databases {
    /// `None`: they have no names.
    pub(super) fn routed_port(&self) -> Option<u16> {
        self.settings.suffix.is_some().then_some(*self.settings.ports.start())
    }

    /// The host and port in the URLs of a database.
    pub(super) fn way_to(&self, entry: &Entry) -> (String, u16) {
        match (&self.settings.suffix, self.routed_port()) {
            (Some(suffix), Some(port)) => (format!("{}.{suffix}", entry.id()), port),
            (_, _) => (self.host.clone(), entry.look(|row| row.port)),
        }
    }

    /// Runs as long as the server.
    pub(super) async fn route(self: Arc<Self>) {
        let Some(port) = self.routed_port() else { return };
        let routing = async {
            let listeners = loop {
                match self.listen(port).await {
                    Ok(listeners) => break listeners,
                    Err(error) => {
                        tracing::error!(port, %error, "the port of all databases is taken");
                        sleep(AGAIN_EVERY).await;
                    }
                }
            };
            let mut accepting = JoinSet::new();
            for listener in listeners {
                accepting.spawn(Arc::clone(&self).accept_any(listener));
            }
            while accepting.join_next().await.is_some() {}
        };
        tokio::select! {
            () = routing => {}
            () = self.closed.cancelled() => {}
        }
    }

    async fn accept_any(self: Arc<Self>, listener: TcpListener) {
        loop {
            match listener.accept().await {
                Ok((stream, from)) => {
                    let databases = Arc::clone(&self);
                    self.tasks.spawn(async move {
                        let ended = tokio::select! {
                            ended = databases.routed(stream, from) => ended,
                            () = databases.closed.cancelled() => return,
                        };
                        if let Err(error) = ended {
                            tracing::debug!(%error, "a session by name ended");
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a client cannot be accepted");
                    sleep(PAUSE).await;
                }
            }
        }
    }

    async fn routed(self: &Arc<Self>, stream: TcpStream, from: SocketAddr) -> io::Result<()> {
        let (mut client, greeting) = self.greeted(stream, from.ip()).await?;
        // To a sandbox of another account it is as unknown as one that never was.
        let named = self.named(&client).filter(|entry| self.admits(entry, from.ip()));
        // Until then its names and passwords are those of what it is made of.
        if named.as_ref().is_some_and(|named| named.look(|row| row.state) != DatabaseState::Ready) {
            return refuse(client, CANNOT_CONNECT_NOW, "the database is not ready").await;
        }
        match (named, greeting) {
            (Some(entry), Greeting::Start(message)) => tokio::select! {
                ended = self.run(&entry, client, from.ip(), &message) => ended,
                () = entry.closed.cancelled() => Ok(()),
            },
            (Some(entry), Greeting::Cancel(message)) => {
                self.cancel(&entry, &message).await?;
                client.shutdown().await
            }
            // Clients of before version 17 cancel without TLS, so without a name: it is meant for one that they are
            // connected to, and all others know nothing of its key.
            (None, Greeting::Cancel(message)) => {
                for entry in self.visited_from(from) {
                    self.cancel(&entry, &message).await?;
                }
                client.shutdown().await
            }
            (None, Greeting::Start(_)) => {
                let message = match wanted_host(&client) {
                    Some(host) => format!("there is no database {host}"),
                    None => "databases are told apart by the host that a client names in its greeting of TLS: \
                             connect with sslmode=require and the host of the connection URL"
                        .to_owned(),
                };
                refuse(client, NOT_ALLOWED, &message).await
            }
        }
    }

    fn named(&self, client: &Client) -> Option<Arc<Entry>> {
        let suffix = self.settings.suffix.as_deref()?;
        let host = wanted_host(client)?.to_ascii_lowercase();
        let id = host.strip_suffix(suffix)?.strip_suffix('.')?.parse().ok()?;
        self.entries.read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    fn visited_from(&self, from: SocketAddr) -> Vec<Arc<Entry>> {
        let mut entries = self.all();
        entries.retain(|entry| entry.is_visited_from(from.ip()));
        entries
    }
}
