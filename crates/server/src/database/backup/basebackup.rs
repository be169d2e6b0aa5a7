//! A base backup as PostgreSQL itself makes it: `BASE_BACKUP` over the replication protocol, which no library speaks. See
//! "Streaming Replication Protocol" in PostgreSQL's documentation.
#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "of all that PostgreSQL may say, little is waited for"
)]

use std::{io, time::Duration};

use bytes::{Buf, Bytes, BytesMut};
use postgres_protocol::{
    authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    message::{
        backend::{DataRowBody, ErrorResponseBody, Header, Message},
        frontend,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_postgres::fallible_iterator::FallibleIterator;

use super::wal::Lsn;
use crate::{Error, database::credentials::ADMIN};

/// For the next bytes. It begins with a checkpoint, which may take a while.
const DEADLINE: Duration = Duration::from_secs(300);
const BUFFER: usize = 256 << 10;
/// PostgreSQL sends files in pieces of 32 KiB. The guest may be anything.
const LONGEST_MESSAGE: i32 = 1 << 20;
/// In the order of what it answers: where it begins, the tablespaces, the copy, where it ends. There is one tablespace:
/// only a superuser could make more.
const COMMAND: &str = "BASE_BACKUP (LABEL 'atoll', CHECKPOINT 'fast', WAIT false, MANIFEST 'yes')";

pub(super) struct BaseBackup {
    stream: TcpStream,
    buffer: BytesMut,
    pub(super) start: Lsn,
    pub(super) timeline: u32,
    /// What is being copied.
    copied: Copied,
}

#[derive(Debug, Clone, Copy)]
enum Copied {
    Archive,
    Manifest,
}

#[derive(Debug)]
pub(super) enum Piece {
    /// Of the data directory as a tar archive.
    Archive(Bytes),
    /// Of the list of its files with their checksums. After the archive.
    Manifest(Bytes),
    /// The log until there belongs to it.
    End(Lsn),
}

impl BaseBackup {
    /// # Errors
    /// PostgreSQL refuses, or goes.
    pub(super) async fn begin(stream: TcpStream, password: &str) -> Result<Self, Error> {
        let buffer = BytesMut::with_capacity(BUFFER);
        let mut backup =
            Self { stream, buffer, start: Lsn(0), timeline: 0, copied: Copied::Archive };
        backup.log_in(password).await?;
        let mut query = BytesMut::new();
        frontend::query(COMMAND, &mut query).map_err(Error::internal)?;
        backup.send(&query).await?;
        let row = backup.row().await?;
        let [start, timeline] = &row[..] else { return Err(unexpected("the beginning")) };
        backup.start = Lsn::parse(start).ok_or_else(|| unexpected("a position"))?;
        backup.timeline = timeline.parse().map_err(Error::internal)?;
        loop {
            if let Message::CopyOutResponse(_) = backup.next_message().await? {
                return Ok(backup);
            }
        }
    }

    async fn log_in(&mut self, password: &str) -> Result<(), Error> {
        let mut message = BytesMut::new();
        let parameters = [("user", ADMIN), ("replication", "true"), ("application_name", "atoll")];
        frontend::startup_message(parameters, &mut message).map_err(Error::internal)?;
        self.send(&message).await?;
        let mut scram = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        loop {
            message.clear();
            match self.next_message().await? {
                Message::AuthenticationSasl(_) => {
                    frontend::sasl_initial_response(SCRAM_SHA_256, scram.message(), &mut message)
                        .map_err(Error::internal)?;
                    self.send(&message).await?;
                }
                Message::AuthenticationSaslContinue(body) => {
                    scram.update(body.data()).map_err(Error::internal)?;
                    frontend::sasl_response(scram.message(), &mut message)
                        .map_err(Error::internal)?;
                    self.send(&message).await?;
                }
                Message::AuthenticationSaslFinal(body) => {
                    scram.finish(body.data()).map_err(Error::internal)?;
                }
                Message::ReadyForQuery(_) => return Ok(()),
                _ => {}
            }
        }
    }

    /// # Errors
    /// PostgreSQL gives up, or goes: nothing of the backup is of use.
    pub(super) async fn next(&mut self) -> Result<Piece, Error> {
        loop {
            match self.next_message().await? {
                Message::CopyData(body) => {
                    let mut bytes = body.into_bytes();
                    if bytes.is_empty() {
                        return Err(unexpected("an empty piece"));
                    }
                    match (bytes.get_u8(), self.copied) {
                        (b'd', Copied::Archive) => return Ok(Piece::Archive(bytes)),
                        (b'd', Copied::Manifest) => return Ok(Piece::Manifest(bytes)),
                        (b'm', _) => self.copied = Copied::Manifest,
                        // A name, or how far it is.
                        _ => {}
                    }
                }
                Message::DataRow(row) => {
                    let row = texts(&row)?;
                    let end = row.first().and_then(|text| Lsn::parse(text));
                    return end.map(Piece::End).ok_or_else(|| unexpected("the end"));
                }
                _ => {}
            }
        }
    }

    async fn row(&mut self) -> Result<Vec<String>, Error> {
        loop {
            if let Message::DataRow(row) = self.next_message().await? {
                return texts(&row);
            }
        }
    }

    async fn send(&mut self, message: &[u8]) -> Result<(), Error> {
        let sent = timeout(DEADLINE, self.stream.write_all(message)).await;
        sent.map_err(|_| silent())?.map_err(Error::internal)
    }

    async fn next_message(&mut self) -> Result<Message, Error> {
        loop {
            check_length(&self.buffer)?;
            if let Some(message) = Message::parse(&mut self.buffer).map_err(Error::internal)? {
                return match message {
                    Message::ErrorResponse(body) => Err(refused(&body)),
                    message => Ok(message),
                };
            }
            let read = timeout(DEADLINE, self.stream.read_buf(&mut self.buffer)).await;
            if read.map_err(|_| silent())?.map_err(Error::internal)? == 0 {
                return Err(Error::internal(io::Error::from(io::ErrorKind::UnexpectedEof)));
            }
        }
    }
}

/// Before room is made for a message that has begun.
fn check_length(buffer: &[u8]) -> Result<(), Error> {
    match Header::parse(buffer).map_err(Error::internal)? {
        Some(header) if header.len() > LONGEST_MESSAGE => Err(unexpected("a message")),
        Some(_) | None => Ok(()),
    }
}

fn texts(row: &DataRowBody) -> Result<Vec<String>, Error> {
    let buffer = row.buffer();
    let text = |range: Option<std::ops::Range<usize>>| {
        let bytes = range.and_then(|range| buffer.get(range)).unwrap_or_default();
        Ok(String::from_utf8_lossy(bytes).into_owned())
    };
    row.ranges().map(text).collect().map_err(Error::internal)
}

fn refused(body: &ErrorResponseBody) -> Error {
    let mut said = Vec::new();
    let mut fields = body.fields();
    while let Ok(Some(field)) = fields.next() {
        if matches!(field.type_(), b'C' | b'M') {
            said.push(String::from_utf8_lossy(field.value_bytes()).into_owned());
        }
    }
    Error::internal(format!("PostgreSQL refuses a base backup: {}", said.join(" ")))
}

fn unexpected(what: &str) -> Error {
    Error::internal(format!("a base backup has {what} that cannot be read"))
}

fn silent() -> Error {
    Error::internal("a base backup stopped coming")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_room_is_made_for_a_message_that_is_too_long() {
        let begun = |length: u32| check_length(&[&b"d"[..], &length.to_be_bytes()].concat());
        for good in [4, 32 << 10, 1 << 20] {
            begun(good).unwrap();
        }
        for bad in [0, 3, (1 << 20) + 1, i32::MAX as u32, u32::MAX] {
            assert!(begun(bad).is_err(), "{bad}");
        }
        check_length(b"d\xff\xff").unwrap();
    }
}
