//! What the server itself does in a database, as a superuser: over TCP, from the gateway of its machine's network.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    task::JoinHandle,
};
use tokio_postgres::{Client, Config, NoTls, SimpleQueryMessage, SimpleQueryRow, error::SqlState};

use super::credentials::{ADMIN, Credentials, verifier};
use crate::Error;

/// One statement, or a login. A guest that has just been restored translates its code anew.
const ANSWER: Duration = Duration::from_secs(30);
/// Of the same, in bytes. Several times the largest that is asked for, a piece of the log.
const LONGEST_ANSWER: u64 = 16 << 20;

/// A session that ends when it is dropped.
pub(super) struct Admin {
    client: Client,
    left: Arc<AtomicU64>,
    connection: JoinHandle<()>,
}

impl Drop for Admin {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

#[derive(Debug)]
pub(super) enum Refused {
    WrongPassword,
    /// It starts or recovers.
    NotYet,
    Other(Error),
}

impl Admin {
    pub(super) async fn login(
        stream: TcpStream,
        database: &str,
        password: &str,
    ) -> Result<Self, Refused> {
        let mut config = Config::new();
        config.user(ADMIN).password(password).dbname(database).application_name("atoll");
        // Also where everybody else is refused for want of room.
        config.options("-c default_transaction_read_only=off");
        let left = Arc::new(AtomicU64::new(LONGEST_ANSWER));
        let stream = Bounded { stream, left: Arc::clone(&left) };
        let connecting = config.connect_raw(stream, NoTls);
        match tokio::time::timeout(ANSWER, connecting).await {
            Ok(Ok((client, connection))) => {
                let connection = tokio::spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!(%error, "a session of the server's own ended");
                    }
                });
                Ok(Self { client, left, connection })
            }
            Ok(Err(error)) => Err(match error.code() {
                Some(code) if *code == SqlState::INVALID_PASSWORD => Refused::WrongPassword,
                Some(code) if *code == SqlState::CANNOT_CONNECT_NOW => Refused::NotYet,
                Some(_) => Refused::Other(Error::internal(error)),
                // The connection broke off: it may just be starting anew.
                None => Refused::NotYet,
            }),
            Err(_) => Err(Refused::NotYet),
        }
    }

    /// For one statement.
    fn client(&self) -> &Client {
        self.left.store(LONGEST_ANSWER, Ordering::Relaxed);
        &self.client
    }

    /// One transaction, or what goes by itself.
    pub(super) async fn run(&self, statements: &str) -> Result<(), Error> {
        let run = tokio::time::timeout(ANSWER, self.client().batch_execute(statements));
        run.await.map_err(|_| silent())?.map_err(Error::internal)
    }

    /// The one row that a query answers, as text.
    pub(super) async fn row(&self, query: &str) -> Result<Vec<Option<String>>, Error> {
        let row = self.rows(query).await?.into_iter().next();
        let row = row.ok_or_else(|| Error::internal("a query answered no row"))?;
        Ok((0..row.len()).map(|column| row.get(column).map(str::to_owned)).collect())
    }

    async fn rows(&self, query: &str) -> Result<Vec<SimpleQueryRow>, Error> {
        let asked = tokio::time::timeout(ANSWER, self.client().simple_query(query)).await;
        let answer = asked.map_err(|_| silent())?.map_err(Error::internal)?;
        let rows = answer.into_iter().filter_map(|message| {
            if let SimpleQueryMessage::Row(row) = message { Some(row) } else { None }
        });
        Ok(rows.collect())
    }

    /// A part of a file below its data directory.
    pub(super) async fn read_file(
        &self,
        path: &str,
        offset: i64,
        length: i64,
    ) -> Result<Vec<u8>, Error> {
        let query = "SELECT pg_read_binary_file($1, $2, $3)";
        let row = tokio::time::timeout(
            ANSWER,
            self.client().query_one(query, &[&path, &offset, &length]),
        )
        .await;
        row.map_err(|_| silent())?.and_then(|row| row.try_get(0)).map_err(Error::internal)
    }

    /// From the names and passwords of `origin` to its own, at once. Sessions that a clone has from its source end. Where the
    /// owner has dropped the database, or given it another name, there is an empty one for the URL to lead to.
    pub(super) async fn make_own(
        &self,
        origin: &Credentials,
        own: &Credentials,
    ) -> Result<(), Error> {
        let has_database = self.has_database(&origin.database).await?;
        // Ahead of the names by which this is known to be done.
        if !has_database && !self.has_database(&own.database).await? {
            let (database, role) = (&own.database, &origin.role);
            // It copies one that nobody may be in meanwhile.
            self.run(END_OTHERS).await?;
            self.run(&format!("CREATE DATABASE {database} OWNER {role}")).await?;
        }
        self.run(&own_credentials(origin, own, has_database)).await
    }

    async fn has_database(&self, name: &str) -> Result<bool, Error> {
        let asked = format!("SELECT 1 FROM pg_database WHERE datname = '{name}'");
        Ok(!self.rows(&asked).await?.is_empty())
    }

    pub(super) async fn refuses_writes(&self) -> Result<bool, Error> {
        let asked =
            "SELECT setting FROM pg_file_settings WHERE name = 'default_transaction_read_only'";
        Ok(self.rows(asked).await?.iter().any(|row| row.get(0) == Some("on")))
    }

    /// By default: who has to make room may say otherwise for a transaction of theirs.
    pub(super) async fn refuse_writes(&self, refuse: bool) -> Result<(), Error> {
        // Neither goes with others into one transaction.
        self.run(if refuse {
            "ALTER SYSTEM SET default_transaction_read_only = on"
        } else {
            "ALTER SYSTEM RESET default_transaction_read_only"
        })
        .await?;
        self.run("SELECT pg_reload_conf()").await
    }

    /// Whoever is writing now is told that it failed.
    pub(super) async fn end_writers(&self) -> Result<(), Error> {
        self.run(
            "SELECT CASE state WHEN 'active' THEN pg_cancel_backend(pid) ELSE pg_terminate_backend(pid) END \
             FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() \
             AND backend_type = 'client backend'",
        )
        .await
    }

    /// Other passwords for the same names; whoever came with the old one is ended.
    pub(super) async fn renew(&self, own: &Credentials) -> Result<(), Error> {
        self.run(&format!("BEGIN; {} COMMIT;", passwords(own))).await?;
        self.run(END_OTHERS).await
    }
}

/// Of which only so much is read: PostgreSQL is its tenant's, and what it answers is kept in memory.
struct Bounded<S> {
    stream: S,
    left: Arc<AtomicU64>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Bounded<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.left.load(Ordering::Relaxed) == 0 {
            return Poll::Ready(Err(io::Error::other(
                "PostgreSQL answers more than was asked for",
            )));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(context, buffer);
        let bytes = (buffer.filled().len() - before) as u64;
        let spend = |left: u64| Some(left.saturating_sub(bytes));
        let _ = this.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend);
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Bounded<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

fn silent() -> Error {
    Error::busy("PostgreSQL does not answer", 5)
}

/// All are told first, and then waited for.
const END_OTHERS: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
     WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'; \
     SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
     WHERE pid <> pg_backend_pid() AND backend_type = 'client backend';";

fn passwords(own: &Credentials) -> String {
    format!(
        "ALTER ROLE {} LOGIN PASSWORD '{}'; ALTER ROLE {ADMIN} PASSWORD '{}';",
        own.role,
        verifier(&own.password),
        verifier(&own.admin_password)
    )
}

/// A database in use cannot be renamed, hence the end of its sessions first.
fn own_credentials(origin: &Credentials, own: &Credentials, has_database: bool) -> String {
    let rename = |what: &str, from: &str, to: &str| {
        // The same, where only passwords were being changed.
        if from == to { String::new() } else { format!("ALTER {what} {from} RENAME TO {to};") }
    };
    format!(
        "{END_OTHERS} BEGIN; {} {} {} COMMIT;",
        rename("ROLE", &origin.role, &own.role),
        passwords(own),
        if has_database {
            rename("DATABASE", &origin.database, &own.database)
        } else {
            String::new()
        },
    )
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt;

    use super::*;

    #[tokio::test]
    async fn a_stream_that_says_more_than_it_may_breaks_off() {
        let left = Arc::new(AtomicU64::new(10));
        let mut stream = Bounded { stream: tokio::io::repeat(1), left: Arc::clone(&left) };
        let mut bytes = [0; 8];
        stream.read_exact(&mut bytes).await.unwrap();
        left.store(10, Ordering::Relaxed);
        // The last read may be longer than what was left.
        for _ in 0..2 {
            stream.read_exact(&mut bytes).await.unwrap();
        }
        assert!(stream.read_exact(&mut bytes).await.is_err());
    }

    #[test]
    fn only_what_has_another_name_is_renamed() {
        let (origin, own) = (Credentials::of_template(), Credentials::random());
        let text = own_credentials(&origin, &own, true);
        assert!(text.contains(&format!("ALTER ROLE blank RENAME TO {}", own.role)));
        assert!(text.contains(&format!("ALTER DATABASE blank RENAME TO {}", own.database)));
        assert!(!text.contains(&own.password) && !text.contains(&own.admin_password));
        assert!(!own_credentials(&own, &own.renewed(), true).contains("RENAME"));
        // Its owner has dropped it, or given it another name.
        assert!(!own_credentials(&origin, &own, false).contains("DATABASE"));
    }
}
