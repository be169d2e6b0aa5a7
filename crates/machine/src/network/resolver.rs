//! The guest's resolver at its gateway: hands each query to the host's resolvers, which may be where no
//! guest can reach. It keeps nothing, and makes nothing up but the names that are the host's own.
//!
//! A guest costs only itself: its queries in a second and in flight are bounded, each is sent at most once to
//! each resolver, and whatever comes back goes to the guest alone.

mod budget;
mod message;

use std::{
    io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, TcpListener, UdpSocket},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    sync::Semaphore,
    task::JoinSet,
    time::timeout,
};
use tracing::warn;

use self::{
    budget::Budget,
    message::{Code, Verdict},
};
use super::policy::Egress;

const PORT: u16 = 53;

/// Of one guest. More are dropped, as a network would; resolvers ask again.
const QUERIES: usize = 32;
const CONNECTIONS: usize = 8;
const QUERIES_A_SECOND: u32 = 100;
const QUERIES_AT_ONCE: u32 = 200;

/// Of all guests, since each holds a descriptor of the server.
const QUERIES_IN_ALL: usize = 2048;

/// No honest query is longer.
const QUERY_BYTES: usize = 2048;
/// By UDP; a longer answer is cut, and the guest asks again by TCP.
const ANSWER_BYTES: usize = 4096;

/// For one resolver; common clients give up after five seconds.
const RESOLVER_DEADLINE: Duration = Duration::from_secs(2);
/// For all of them.
const QUERY_DEADLINE: Duration = Duration::from_millis(4500);
/// For the next query of a connection.
const IDLE_DEADLINE: Duration = Duration::from_secs(10);
/// After a failure that would otherwise repeat at once, such as no descriptors left.
const RESPITE: Duration = Duration::from_millis(100);

/// The addresses of a `resolv.conf`, in order; without any it means the host itself, as for the C library.
pub(super) fn parse_resolv_conf(text: &str) -> Vec<SocketAddr> {
    let mut found: Vec<SocketAddr> = text
        .lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            (words.next() == Some("nameserver")).then(|| words.next()).flatten()
        })
        .filter_map(parse_address)
        .collect();
    if found.is_empty() {
        found.push((Ipv4Addr::LOCALHOST, PORT).into());
    }
    found
}

/// Link-local addresses name their interface: `fe80::1%eth0`.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let Some((address, interface)) = text.split_once('%') else {
        return Some(SocketAddr::new(text.parse().ok()?, PORT));
    };
    let address: Ipv6Addr = address.parse().ok()?;
    let scope = match interface.parse() {
        Ok(number) => number,
        Err(_) => nix::net::if_::if_nametoindex(interface).ok()?,
    };
    Some(SocketAddrV6::new(address, PORT, 0, scope).into())
}

pub(super) struct Sockets {
    udp: UdpSocket,
    tcp: TcpListener,
}

/// Listens in the network namespace of the calling thread.
pub(super) fn bind(address: Ipv4Addr) -> io::Result<Sockets> {
    let udp = UdpSocket::bind((address, PORT))?;
    udp.set_nonblocking(true)?;
    let tcp = TcpListener::bind((address, PORT))?;
    tcp.set_nonblocking(true)?;
    Ok(Sockets { udp, tcp })
}

/// Where queries go.
#[derive(Debug)]
pub(super) struct Upstream {
    resolvers: Vec<SocketAddr>,
    own_names: Option<OwnNames>,
    places: Semaphore,
}

/// All names below one, and that itself, have one address.
#[derive(Debug)]
pub(super) struct OwnNames {
    pub(super) suffix: String,
    pub(super) address: Ipv4Addr,
}

impl Upstream {
    pub(super) fn new(resolvers: Vec<SocketAddr>, own_names: Option<OwnNames>) -> Self {
        Self { resolvers, own_names, places: Semaphore::new(QUERIES_IN_ALL) }
    }

    fn own_answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let OwnNames { suffix, address } = self.own_names.as_ref()?;
        message::is_within(query, suffix).then(|| message::addressed(query, *address))
    }
}

/// Whether a guest's queries are handed on. Those of a guest without the internet are refused, at once.
#[derive(Debug, Clone)]
pub(super) struct Switch(Arc<AtomicBool>);

impl Switch {
    fn new(egress: Egress) -> Self {
        Self(Arc::new(AtomicBool::new(egress == Egress::Internet)))
    }

    pub(super) fn set(&self, egress: Egress) {
        self.0.store(egress == Egress::Internet, Ordering::SeqCst);
    }

    pub(super) fn close_unless(&self, egress: Egress) {
        self.0.fetch_and(egress == Egress::Internet, Ordering::SeqCst);
    }

    fn is_open(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// The running resolver of one namespace; dropping it ends it.
#[derive(Debug)]
pub(super) struct Forwarder {
    tasks: JoinSet<()>,
    switch: Switch,
}

impl Forwarder {
    pub(super) fn start(
        sockets: Sockets,
        upstream: Arc<Upstream>,
        egress: Egress,
    ) -> io::Result<Self> {
        let udp = tokio::net::UdpSocket::from_std(sockets.udp)?;
        let tcp = tokio::net::TcpListener::from_std(sockets.tcp)?;
        let switch = Switch::new(egress);
        let guest = Arc::new(Guest {
            upstream,
            switch: switch.clone(),
            budget: Mutex::new(Budget::new(QUERIES_A_SECOND, QUERIES_AT_ONCE)),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(serve_udp(udp.into(), Arc::clone(&guest)));
        tasks.spawn(serve_tcp(tcp, guest));
        Ok(Self { tasks, switch })
    }

    pub(super) fn switch(&self) -> Switch {
        self.switch.clone()
    }

    /// Returns once its sockets are closed.
    pub(super) async fn stop(mut self) {
        self.tasks.shutdown().await;
    }
}

/// What belongs to one guest.
struct Guest {
    upstream: Arc<Upstream>,
    switch: Switch,
    budget: Mutex<Budget>,
}

impl Guest {
    /// How long its next query has to wait.
    fn spend(&self) -> Result<(), Duration> {
        self.budget.lock().unwrap_or_else(PoisonError::into_inner).spend()
    }

    /// What it is told; `None` for what deserves no answer.
    async fn answer(&self, query: &[u8], transport: Transport) -> Option<Vec<u8>> {
        match message::judge(query) {
            Verdict::Ignore => None,
            Verdict::Refuse(code) => Some(message::refusal(query, code)),
            Verdict::Forward => {
                // Nobody else hears of it. Whether it leads anywhere is for the walls to say.
                if let Some(answer) = self.upstream.own_answer(query) {
                    return Some(answer);
                }
                if !self.switch.is_open() {
                    return Some(message::refusal(query, Code::Refused));
                }
                let Ok(_place) = self.upstream.places.try_acquire() else {
                    return Some(message::refusal(query, Code::ServerFailure));
                };
                let asked = ask_all(query, transport, &self.upstream.resolvers);
                let answer = timeout(QUERY_DEADLINE, asked).await.ok().flatten();
                Some(answer.unwrap_or_else(|| message::refusal(query, Code::ServerFailure)))
            }
        }
    }
}

async fn serve_udp(socket: Arc<tokio::net::UdpSocket>, guest: Arc<Guest>) {
    let mut queries = JoinSet::new();
    let mut buffer = [0; QUERY_BYTES];
    loop {
        let (length, from) = match socket.recv_from(&mut buffer).await {
            Ok(received) => received,
            Err(error) => {
                warn!(%error, "could not receive a guest's query");
                tokio::time::sleep(RESPITE).await;
                continue;
            }
        };
        while queries.try_join_next().is_some() {}
        if queries.len() == QUERIES || guest.spend().is_err() {
            continue;
        }
        let query = buffer[..length].to_vec();
        let (socket, guest) = (socket.clone(), Arc::clone(&guest));
        queries.spawn(async move {
            if let Some(answer) = guest.answer(&query, Transport::Udp).await {
                // A guest that is gone needs no answer.
                let _ = socket.send_to(&answer, from).await;
            }
        });
    }
}

async fn serve_tcp(listener: tokio::net::TcpListener, guest: Arc<Guest>) {
    let mut connections = JoinSet::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                warn!(%error, "could not accept a guest's query");
                tokio::time::sleep(RESPITE).await;
                continue;
            }
        };
        while connections.try_join_next().is_some() {}
        if connections.len() == CONNECTIONS {
            continue;
        }
        let guest = Arc::clone(&guest);
        connections.spawn(async move {
            // It ends by the guest's wish, by its silence or by its nonsense; none needs a word.
            let _ = serve_connection(stream, &guest).await;
        });
    }
}

async fn serve_connection(mut stream: TcpStream, guest: &Guest) -> io::Result<()> {
    loop {
        let query = timeout(IDLE_DEADLINE, receive(&mut stream, QUERY_BYTES)).await??;
        while let Err(pause) = guest.spend() {
            tokio::time::sleep(pause).await;
        }
        let Some(answer) = guest.answer(&query, Transport::Tcp).await else {
            return Ok(());
        };
        timeout(IDLE_DEADLINE, send(&mut stream, &answer)).await??;
    }
}

#[derive(Debug, Clone, Copy)]
enum Transport {
    Udp,
    Tcp,
}

/// The first useful answer, or else the last useless one.
async fn ask_all(query: &[u8], transport: Transport, resolvers: &[SocketAddr]) -> Option<Vec<u8>> {
    let mut last = None;
    for resolver in resolvers {
        let asked = async {
            match transport {
                Transport::Udp => ask_by_udp(query, *resolver).await,
                Transport::Tcp => ask_by_tcp(query, *resolver).await,
            }
        };
        // A resolver that is silent or unreachable is what the next one is for.
        let Ok(Ok(answer)) = timeout(RESOLVER_DEADLINE, asked).await else { continue };
        if message::is_useful(&answer) {
            return Some(answer);
        }
        last = Some(answer);
    }
    last
}

async fn ask_by_udp(query: &[u8], resolver: SocketAddr) -> io::Result<Vec<u8>> {
    let any: IpAddr = match resolver {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    // A port of its own for each query is hard to guess; only the resolver can send to it.
    let socket = tokio::net::UdpSocket::bind((any, 0)).await?;
    socket.connect(resolver).await?;
    socket.send(query).await?;
    let mut answer = vec![0; ANSWER_BYTES + 1];
    loop {
        let length = socket.recv(&mut answer).await?;
        if !message::answers(query, &answer[..length]) {
            continue;
        }
        if length > ANSWER_BYTES {
            return Ok(message::truncation(query));
        }
        answer.truncate(length);
        return Ok(answer);
    }
}

async fn ask_by_tcp(query: &[u8], resolver: SocketAddr) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(resolver).await?;
    send(&mut stream, query).await?;
    let answer = receive(&mut stream, usize::from(u16::MAX)).await?;
    if message::answers(query, &answer) {
        Ok(answer)
    } else {
        Err(io::ErrorKind::InvalidData.into())
    }
}

/// By TCP each message comes after its length.
async fn receive(stream: &mut TcpStream, limit: usize) -> io::Result<Vec<u8>> {
    let length = usize::from(stream.read_u16().await?);
    if length > limit {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut message = vec![0; length];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

async fn send(stream: &mut TcpStream, message: &[u8]) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(|_| io::ErrorKind::InvalidData)?;
    let mut framed = Vec::with_capacity(message.len() + 2);
    framed.extend(length.to_be_bytes());
    framed.extend(message);
    stream.write_all(&framed).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_resolver_of_the_host_is_asked_in_its_order() {
        let text = "# nameserver 1.1.1.1\nsearch example\nnameserver 127.0.0.53\n  nameserver\t10.0.0.2 # office\n\
                    nameserver fe80::1%1\nnameserver nonsense\nnameserver\noptions edns0\n";
        let expected: [SocketAddr; 3] = [
            "127.0.0.53:53".parse().unwrap(),
            "10.0.0.2:53".parse().unwrap(),
            SocketAddrV6::new("fe80::1".parse().unwrap(), 53, 0, 1).into(),
        ];
        assert_eq!(parse_resolv_conf(text), expected);
    }

    #[test]
    fn a_host_without_resolvers_asks_itself() {
        assert_eq!(parse_resolv_conf("search example\n"), ["127.0.0.1:53".parse().unwrap()]);
    }

    /// A query for the A records of `a.example`.
    fn query() -> Vec<u8> {
        let mut query = vec![0x12, 0x34, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        query.extend(b"\x01a\x07example\x00\x00\x01\x00\x01");
        query
    }

    /// A resolver that answers every query with `code` and no records.
    async fn resolver(code: u8) -> (SocketAddr, JoinSet<()>) {
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        let address = socket.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut buffer = [0; 512];
            while let Ok((length, from)) = socket.recv_from(&mut buffer).await {
                buffer[2] |= 0x80;
                buffer[3] = code;
                socket.send_to(&buffer[..length], from).await.unwrap();
            }
        });
        (address, tasks)
    }

    fn guest(resolvers: Vec<SocketAddr>) -> Guest {
        Guest {
            upstream: Arc::new(Upstream::new(resolvers, None)),
            switch: Switch::new(Egress::Internet),
            budget: Mutex::new(Budget::new(QUERIES_A_SECOND, QUERIES_AT_ONCE)),
        }
    }

    #[tokio::test]
    async fn a_guest_without_the_internet_is_refused_and_nobody_is_asked() {
        let (good, mut resolver) = resolver(0).await;
        let guest = guest(vec![good]);
        guest.switch.set(Egress::None);
        resolver.shutdown().await;
        for transport in [Transport::Udp, Transport::Tcp] {
            let answer = guest.answer(&query(), transport).await.unwrap();
            assert_eq!(answer[3] & 15, 5);
        }
    }

    #[tokio::test]
    async fn a_resolver_that_fails_is_followed_by_the_next() {
        let (failing, _one) = resolver(2).await;
        let (good, _other) = resolver(0).await;
        // Nobody listens at the first.
        let resolvers = vec!["127.0.0.1:1".parse().unwrap(), failing, good];
        let answer = guest(resolvers).answer(&query(), Transport::Udp).await.unwrap();
        assert_eq!((&answer[..2], answer[3] & 15), (&[0x12, 0x34][..], 0));
    }

    #[tokio::test]
    async fn without_a_resolver_the_guest_learns_of_the_failure() {
        for transport in [Transport::Udp, Transport::Tcp] {
            let guest = guest(vec!["127.0.0.1:1".parse().unwrap()]);
            let answer = guest.answer(&query(), transport).await.unwrap();
            assert_eq!(answer[3] & 15, 2);
            assert_eq!(answer.len(), query().len());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_resolver_is_not_waited_for_longer_than_the_guest_waits() {
        let silent: Vec<_> =
            futures::future::join_all((0..3).map(|_| tokio::net::UdpSocket::bind("127.0.0.1:0")))
                .await
                .into_iter()
                .map(Result::unwrap)
                .collect();
        let resolvers: Vec<_> = silent.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let start = tokio::time::Instant::now();
        let answer = guest(resolvers).answer(&query(), Transport::Udp).await.unwrap();
        assert_eq!(answer[3] & 15, 2);
        assert!(start.elapsed() <= Duration::from_secs(5));
    }
}
