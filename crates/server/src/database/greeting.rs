//! The first bytes of a PostgreSQL session, before which nobody knows who comes: a wish for TLS, a cancellation, or the
//! start itself. See "Message Flow" in PostgreSQL's documentation of its protocol.

use std::{
    collections::{HashMap, hash_map::Entry},
    io,
    net::IpAddr,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, Interest},
    net::TcpStream,
};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::either::Either;

const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;
const CANCEL_REQUEST: u32 = 80_877_102;
/// PostgreSQL's own limit.
const LONGEST_START: usize = 10_000;
/// Of `CancelRequest`: with keys of the newest protocol.
const LONGEST_CANCEL: usize = 512;
/// Before the start a client asks for TLS and for GSSAPI once each.
const MOST_REQUESTS: usize = 4;
/// From one address at once.
const MOST_STRANGERS: usize = 1024;
/// Between two looks at a client that waits and has sent something meanwhile.
const GONE_EVERY: Duration = Duration::from_secs(1);
/// First byte of a TLS record with a client's hello.
const TLS_HANDSHAKE: u8 = 0x16;

/// What a session begins with. The bytes are to be passed on as they are.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Start(Vec<u8>),
    /// A session of its own, which only asks to end another's query.
    Cancel(Vec<u8>),
}

/// Connections before their greeting. Each costs a task and a descriptor, so an address has but so many; others do not wait
/// for it.
#[derive(Debug, Default)]
pub(super) struct Strangers(Mutex<HashMap<IpAddr, usize>>);

impl Strangers {
    /// `None`: too many are there from this address.
    pub(super) fn admit(&self, from: IpAddr) -> Option<Stranger<'_>> {
        let mut strangers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let there = strangers.entry(from).or_default();
        if *there == MOST_STRANGERS {
            return None;
        }
        *there += 1;
        Some(Stranger { all: self, from })
    }
}

/// One of them, for as long as this lives.
#[derive(Debug)]
pub(super) struct Stranger<'a> {
    all: &'a Strangers,
    from: IpAddr,
}

impl Drop for Stranger<'_> {
    fn drop(&mut self) {
        let mut strangers = self.all.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Entry::Occupied(mut there) = strangers.entry(self.from) {
            *there.get_mut() -= 1;
            if *there.get() == 0 {
                there.remove();
            }
        }
    }
}

/// A client, without or with TLS.
pub(super) type Client = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// Reads up to the greeting, and turns to TLS if the client asks for it.
///
/// # Errors
/// The client went, or does not speak PostgreSQL's protocol.
pub(super) async fn greeted(
    stream: TcpStream,
    tls: &TlsAcceptor,
) -> io::Result<(Client, Greeting)> {
    let mut first = [0];
    let speaks_tls = stream.peek(&mut first).await? == 1 && first[0] == TLS_HANDSHAKE;
    let mut client = if speaks_tls {
        Either::Right(Box::new(tls.accept(stream).await?))
    } else {
        Either::Left(stream)
    };
    for _ in 0..MOST_REQUESTS {
        let (code, message) = read(&mut client).await?;
        match code {
            SSL_REQUEST => {
                client = match client {
                    Either::Left(mut stream) => {
                        stream.write_all(b"S").await?;
                        Either::Right(Box::new(tls.accept(stream).await?))
                    }
                    Either::Right(_) => return Err(malformed("TLS within TLS")),
                };
            }
            GSS_REQUEST => {
                client.write_all(b"N").await?;
                client.flush().await?;
            }
            CANCEL_REQUEST if message.len() <= LONGEST_CANCEL => {
                return Ok((client, Greeting::Cancel(message)));
            }
            code if code >> 16 == 3 => return Ok((client, Greeting::Start(message))),
            _ => return Err(malformed("an unknown version of the protocol")),
        }
    }
    Err(malformed("requests without a start"))
}

/// The host that the client wants to reach, where its greeting of TLS says so (RFC 6066).
pub(super) fn wanted_host(client: &Client) -> Option<&str> {
    match client {
        Either::Left(_) => None,
        Either::Right(stream) => stream.get_ref().1.server_name(),
    }
}

/// Waits until the client has closed its side, without reading what it sends.
pub(super) async fn gone(client: &Client) {
    let stream = match client {
        Either::Left(stream) => stream,
        Either::Right(stream) => stream.get_ref().0,
    };
    while let Ok(ready) = stream.ready(Interest::READABLE).await {
        if ready.is_read_closed() {
            return;
        }
        // It has said more: what it does next is not seen before that is read.
        tokio::time::sleep(GONE_EVERY).await;
    }
}

/// As PostgreSQL itself would refuse it, and the end.
pub(super) async fn refuse(mut client: Client, code: &str, message: &str) -> io::Result<()> {
    client.write_all(&refusal(code, message)).await?;
    client.shutdown().await
}

/// Length, code and the rest of a message without a type.
async fn read(client: &mut Client) -> io::Result<(u32, Vec<u8>)> {
    let mut head = [0; 8];
    client.read_exact(&mut head).await?;
    let [a, b, c, d, e, f, g, h] = head;
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).map_err(io::Error::other)?;
    if !(8..=LONGEST_START).contains(&length) {
        return Err(malformed("a start of impossible length"));
    }
    let mut message = head.to_vec();
    message.resize(length, 0);
    client.read_exact(&mut message[8..]).await?;
    Ok((u32::from_be_bytes([e, f, g, h]), message))
}

fn refusal(code: &str, message: &str) -> Vec<u8> {
    let mut fields = Vec::new();
    for (kind, text) in [(b'S', "FATAL"), (b'V', "FATAL"), (b'C', code), (b'M', message)] {
        fields.push(kind);
        fields.extend_from_slice(text.as_bytes());
        fields.push(0);
    }
    fields.push(0);
    let length = u32::try_from(fields.len() + 4).unwrap_or(u32::MAX);
    [&b"E"[..], &length.to_be_bytes(), &fields].concat()
}

fn malformed(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_owned())
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use tokio::net::TcpListener;

    use super::{super::tls::Tls, *};

    fn message(code: u32, rest: &[u8]) -> Vec<u8> {
        let length = u32::try_from(rest.len() + 8).unwrap();
        [&length.to_be_bytes()[..], &code.to_be_bytes(), rest].concat()
    }

    async fn greeted(sent: Vec<u8>) -> (io::Result<Greeting>, Vec<u8>) {
        let directory = tempfile::tempdir().unwrap();
        let address = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let tls = Tls::open(None, directory.path(), "localhost", address).await.unwrap();
        let listener = TcpListener::bind((address, 0)).await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        client.write_all(&sent).await.unwrap();
        client.shutdown().await.unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        let greeting = super::greeted(stream, &tls.acceptor).await.map(|(_, greeting)| greeting);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer).await;
        (greeting, answer)
    }

    #[tokio::test]
    async fn a_start_and_a_cancellation_are_passed_on_as_they_came() {
        let start = message(3 << 16, b"user\0me\0\0");
        assert_eq!(greeted(start.clone()).await.0.unwrap(), Greeting::Start(start.clone()));
        let cancel = message(CANCEL_REQUEST, &[1; 8]);
        assert_eq!(greeted(cancel.clone()).await.0.unwrap(), Greeting::Cancel(cancel));
        let after_a_wish = [message(GSS_REQUEST, b""), start.clone()].concat();
        let (greeting, answer) = greeted(after_a_wish).await;
        assert_eq!((greeting.unwrap(), answer), (Greeting::Start(start), b"N".to_vec()));
    }

    #[tokio::test]
    async fn what_is_no_greeting_is_refused_without_waiting_for_more() {
        let too_long = u32::MAX.to_be_bytes().repeat(2);
        let endless = message(GSS_REQUEST, b"").repeat(9);
        let http = b"GET / HTTP/1.1\r\n\r\n".to_vec();
        for bytes in
            [Vec::new(), vec![0; 7], vec![0; 8], too_long, endless, http, message(2 << 16, b"")]
        {
            assert!(greeted(bytes.clone()).await.0.is_err(), "{bytes:?}");
        }
    }

    #[tokio::test]
    async fn a_client_that_waits_is_seen_to_go_whatever_it_has_sent() {
        for sent in [&b""[..], b"more"] {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
            let mut there = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
            let client = Either::Left(listener.accept().await.unwrap().0);
            there.write_all(sent).await.unwrap();
            let mut gone = std::pin::pin!(super::gone(&client));
            let still_there = tokio::time::timeout(Duration::from_millis(100), gone.as_mut()).await;
            assert!(still_there.is_err(), "{sent:?}");
            drop(there);
            gone.await;
        }
    }

    #[test]
    fn an_address_has_but_so_many_strangers_at_once() {
        let strangers = Strangers::default();
        let [one, other] = [1, 2].map(|last| IpAddr::from([10, 0, 0, last]));
        let mut there: Vec<_> = (0..MOST_STRANGERS).map(|_| strangers.admit(one)).collect();
        assert!(there.iter().all(Option::is_some));
        assert!(strangers.admit(one).is_none() && strangers.admit(other).is_some());
        there.pop();
        assert!(strangers.admit(one).is_some());
        drop(there);
        assert!(strangers.0.lock().unwrap().is_empty());
    }

    #[test]
    fn a_refusal_is_one_that_clients_can_read() {
        let bytes = refusal("28000", "why");
        let length = u32::from_be_bytes(bytes[1..5].try_into().unwrap());
        assert_eq!((bytes[0], usize::try_from(length).unwrap()), (b'E', bytes.len() - 1));
        let header = postgres_protocol::message::backend::Message::parse(&mut bytes[..].into());
        assert!(header.unwrap().is_some());
    }
}
