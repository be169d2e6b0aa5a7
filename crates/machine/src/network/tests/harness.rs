//! What the claims share: an instance, a guest without a machine, an internet on this host.

use std::{
    fs::File,
    io::{Read, Write},
    os::fd::AsFd,
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering},
    thread::JoinHandle,
};

use nix::{
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, poll},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UdpSocket},
    task::JoinSet,
};

use super::*;

/// An instance that nobody else on this host uses while the test runs, from the far end of the numbers.
pub(super) struct TestInstance {
    pub(super) number: u16,
    _lock: Flock<File>,
}

/// `None`, and the test is over, where it cannot be run.
pub(super) async fn instance() -> Option<TestInstance> {
    if !nix::unistd::geteuid().is_root() {
        return None;
    }
    fs::create_dir_all("/run/atoll").unwrap();
    let instance = (0..1024_u16).rev().find_map(|number| {
        let file = File::create(format!("/run/atoll/instance-{number}")).ok()?;
        let lock = Flock::lock(file, FlockArg::LockExclusiveNonblock).ok()?;
        Some(TestInstance { number, _lock: lock })
    })?;
    // A test that failed may have left something.
    let guests = format!("guest-atoll-{}-", instance.number);
    must(&format!(
        "ip netns list | awk '/^{guests}/ {{ print $1 }}' | xargs -r -n1 ip netns delete"
    ))
    .await;
    instance.networks(&[], vec![]).await.sweep(&BTreeSet::new()).await.unwrap();
    Some(instance)
}

impl TestInstance {
    pub(super) async fn networks(
        &self,
        egress_allow: &[&str],
        resolvers: Vec<SocketAddr>,
    ) -> Networks {
        let policy = HostPolicy { allow: destinations(egress_allow), ..HostPolicy::default() };
        self.networks_within(policy, resolvers).await
    }

    pub(super) async fn networks_within(
        &self,
        policy: HostPolicy,
        resolvers: Vec<SocketAddr>,
    ) -> Networks {
        Networks::new(NetworkConfig { instance: self.number, policy, resolvers }).await.unwrap()
    }

    /// Public ones, and no other test's at the same time.
    pub(super) fn addresses<const COUNT: usize>(&self) -> [Ipv4Addr; COUNT] {
        self.addresses_in([192, 0, 2])
    }

    pub(super) fn addresses_in<const COUNT: usize>(&self, range: [u8; 3]) -> [Ipv4Addr; COUNT] {
        let [one, two, three] = range;
        let first = u8::try_from(self.number % 31 * 8).unwrap();
        std::array::from_fn(|place| {
            Ipv4Addr::new(one, two, three, first + u8::try_from(place).unwrap())
        })
    }

    /// Everything on the host that bears this instance's name.
    pub(super) async fn traces(&self) -> Vec<String> {
        let mut traces = Vec::new();
        for list in ["ip netns list", "ip -brief link", "nft list tables"] {
            let output = shell(list).await.1;
            let number = self.number;
            let names =
                [format!("atoll-{number}-"), format!("at{number}."), format!("atoll_{number}")];
            traces.extend(
                output
                    .lines()
                    .filter(|line| names.iter().any(|name| line.contains(name)))
                    .map(ToOwned::to_owned),
            );
        }
        traces
    }
}

pub(super) fn destinations(texts: &[&str]) -> Vec<Destination> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Whether a command succeeded, and what it printed.
pub(super) async fn shell(command: &str) -> (bool, String) {
    let output = tokio::process::Command::new("bash")
        .args(["-c", command])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(20), output).await.unwrap().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

pub(super) async fn must(command: &str) {
    let (success, text) = shell(command).await;
    assert!(success, "{command}: {text}");
}

/// A machine without QEMU: a namespace with the guest's address, on the other side of the machine's tap.
pub(super) struct Guest {
    name: String,
    netns: OwnedFd,
    _wire: Wire,
}

impl Guest {
    pub(super) async fn start(namespace: &Namespace) -> Self {
        let name = format!("guest-{}", namespace.slot.namespace());
        let (netns, tap) = {
            let _ = shell(&format!("ip netns delete {name}")).await;
            must(&format!("ip netns add {name}")).await;
            let netns: OwnedFd = File::open(Path::new("/run/netns").join(&name)).unwrap().into();
            let tap = namespace::visit(&netns, namespace::make_tap).await.unwrap();
            (netns, tap)
        };
        must(&format!(
            "ip -n {name} link set lo up && ip -n {name} link set tap0 address {GUEST_MAC} up && \
             ip -n {name} address add {GUEST}/{GUEST_PREFIX} dev tap0 && ip -n {name} route add default via {GATEWAY}"
        ))
        .await;
        let wire = Wire::between(namespace.tap().unwrap().fd, tap);
        Self { name, netns, _wire: wire }
    }

    /// What is opened there stays there.
    pub(super) async fn inside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        inside(&self.netns, work).await
    }

    /// A connection that is open, or why there is none within a second.
    pub(super) async fn connect(&self, address: SocketAddr) -> io::Result<TcpStream> {
        let connect = move || {
            let stream = std::net::TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
            stream.set_nonblocking(true)?;
            Ok(stream)
        };
        TcpStream::from_std(self.inside(connect).await?)
    }

    pub(super) async fn udp(&self) -> UdpSocket {
        let bind = || {
            let socket = std::net::UdpSocket::bind((GUEST, 0))?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        };
        UdpSocket::from_std(self.inside(bind).await.unwrap()).unwrap()
    }

    /// Sends frames as they are, whatever an honest guest's kernel would do.
    pub(super) async fn send_frames(&self, frames: Vec<Vec<u8>>) {
        // A program is the shortest way to a packet socket.
        let list: Vec<_> = frames
            .iter()
            .map(|frame| frame.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
            .collect();
        let script = "import socket, sys; s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW); s.bind(('tap0', 0)); \
                      [s.send(bytes.fromhex(line.strip())) for line in open(sys.argv[1])]";
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), list.join("\n")).unwrap();
        let (done, text) =
            self.run(&format!("python3 -c \"{script}\" {}", file.path().display())).await;
        assert!(done, "{text}");
    }

    pub(super) async fn run(&self, command: &str) -> (bool, String) {
        shell(&format!("ip netns exec {} {command}", self.name)).await
    }

    /// Whether a TCP connection is accepted, within a second.
    pub(super) async fn reaches(&self, address: impl Into<SocketAddr>) -> bool {
        let address = address.into();
        let connect = format!("exec 3<>/dev/tcp/{}/{}", address.ip(), address.port());
        self.run(&format!("timeout 1 bash -c '{connect}'")).await.0
    }

    pub(super) async fn reached_of(&self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        let tries =
            addresses.iter().map(async |address| self.reaches(*address).await.then_some(*address));
        futures::future::join_all(tries).await.into_iter().flatten().collect()
    }

    pub(super) async fn stop(self) {
        must(&format!("ip netns delete {}", self.name)).await;
    }
}

/// Copies frames between two taps until it is dropped.
struct Wire {
    cut: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Wire {
    fn between(one: OwnedFd, other: OwnedFd) -> Self {
        let cut = Arc::new(AtomicBool::new(false));
        let (watched, ends) = (cut.clone(), [File::from(one), File::from(other)]);
        let thread = std::thread::spawn(move || {
            let mut frame = vec![0; 65_550];
            while !watched.load(Ordering::Relaxed) {
                let mut polled =
                    ends.each_ref().map(|end| PollFd::new(end.as_fd(), PollFlags::POLLIN));
                poll(&mut polled, 20_u8).unwrap();
                let ready = polled.map(|end| end.any().unwrap_or_default());
                for (mut from, mut to, ready) in
                    [(&ends[0], &ends[1], ready[0]), (&ends[1], &ends[0], ready[1])]
                {
                    if ready {
                        let length = from.read(&mut frame).unwrap();
                        // A wire loses what the other side does not take.
                        let _ = to.write(&frame[..length]);
                    }
                }
            }
        });
        Self { cut, thread: Some(thread) }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.cut.store(true, Ordering::Relaxed);
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

async fn inside<T: Send + 'static>(
    netns: &OwnedFd,
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> io::Result<T> {
    namespace::visit(netns, move || Ok(work())).await.unwrap()
}

/// Whether the host itself gets a connection.
pub(super) async fn connects(address: SocketAddr) -> bool {
    let connect = tokio::net::TcpStream::connect(address);
    tokio::time::timeout(Duration::from_secs(1), connect).await.is_ok_and(|result| result.is_ok())
}

/// Accepts and holds connections until it is dropped.
pub(super) async fn listen(address: impl Into<SocketAddr>) -> (SocketAddr, JoinSet<()>) {
    let listener = TcpListener::bind(address.into()).await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut held = Vec::new();
        while let Ok((stream, _)) = listener.accept().await {
            held.push(stream);
        }
    });
    (address, tasks)
}

/// Answers every query, by UDP and TCP, with one A record: 203.0.113.77. Tells how many there were.
pub(super) async fn fake_resolver() -> (SocketAddr, Arc<AtomicUsize>, JoinSet<()>) {
    fn answer(query: &[u8]) -> Vec<u8> {
        // Header and question of a query without further records are repeated.
        let mut answer = query.to_vec();
        answer[2] |= 0x80;
        answer[7] = 1;
        answer.extend(b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\xcb\x00\x71\x4d");
        answer
    }
    let udp = UdpSocket::bind("127.0.0.1:0").await.unwrap();
    let address = udp.local_addr().unwrap();
    let tcp = TcpListener::bind(address).await.unwrap();
    let asked = Arc::new(AtomicUsize::new(0));
    let (by_udp, by_tcp) = (Arc::clone(&asked), Arc::clone(&asked));
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            by_udp.fetch_add(1, Ordering::Relaxed);
            udp.send_to(&answer(&buffer[..length]), from).await.unwrap();
        }
    });
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            by_tcp.fetch_add(1, Ordering::Relaxed);
            let mut query = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut query).await.unwrap();
            let answer = answer(&query);
            stream.write_u16(answer.len().try_into().unwrap()).await.unwrap();
            stream.write_all(&answer).await.unwrap();
        }
    });
    (address, asked, tasks)
}

/// A program for the guest that prints the address in the answer to a query, by UDP or TCP.
pub(super) fn look_up(transport: &str) -> String {
    let query = r"b'\x12\x34\1\0\0\1\0\0\0\0\0\0\1a\7example\0\0\1\0\1'";
    let exchange = match transport {
        "udp" => "s.send(q); a = s.recv(512)",
        _ => "s.send(len(q).to_bytes(2, 'big') + q); a = s.recv(512)[2:]",
    };
    let kind = if transport == "udp" { "SOCK_DGRAM" } else { "SOCK_STREAM" };
    format!(
        "timeout 6 python3 -c \"import socket; q = {query}; s = socket.socket(socket.AF_INET, socket.{kind}); \
         s.connect(('{GATEWAY}', 53)); {exchange}; print('code', a[3] & 15, 'address', *a[-4:])\""
    )
}

/// An interface of the host with addresses for the test to serve at.
pub(super) struct Shop(String);

impl Shop {
    pub(super) async fn with(instance: &TestInstance, addresses: &[&str]) -> Self {
        let name = format!("shop{}", instance.number);
        let _ = shell(&format!("ip link delete {name}")).await;
        must(&format!("ip link add {name} type veth peer name {name}p && ip link set {name} up && ip link set {name}p up")).await;
        for address in addresses {
            must(&format!("ip address add {address} dev {name}")).await;
        }
        Self(name)
    }

    pub(super) async fn remove(self) {
        must(&format!("ip link delete {}", self.0)).await;
    }
}

/// A listener in the machine's namespace, where only the host can reach it.
pub(super) async fn listen_in(
    namespace: &Namespace,
    address: (Ipv4Addr, u16),
) -> (SocketAddr, JoinSet<()>) {
    // The namespace itself admits nobody; the test's listener is to be reached by whoever can get there.
    let admit = "insert rule inet atoll input iifname up0 accept; insert rule inet atoll output oifname up0 accept";
    must(&format!("ip netns exec {} nft '{admit}'", namespace.slot.namespace())).await;
    let listener = inside(namespace.gate.netns(), move || {
        let listener = std::net::TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        Ok(listener)
    })
    .await
    .unwrap();
    let address = listener.local_addr().unwrap();
    let listener = TcpListener::from_std(listener).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move { while listener.accept().await.is_ok() {} });
    (address, tasks)
}

/// The host's own, without those that other tests have given it for a while.
pub(super) async fn host_addresses() -> Vec<Ipv4Addr> {
    let list = "ip -4 -o address show scope global | awk '$2 !~ /^(at|int|shop)/ {print $4}' | cut -d/ -f1";
    shell(list).await.1.lines().map(|line| line.parse().unwrap()).collect()
}

/// Everything that is not this host: a namespace behind another interface of it. Whatever is sent to it by TCP or UDP,
/// it sends back.
pub(super) struct Internet {
    name: String,
    link: String,
    pub(super) port: u16,
    /// Of a second service.
    pub(super) other_port: u16,
    _services: JoinSet<()>,
}

impl Internet {
    pub(super) async fn with(instance: &TestInstance, addresses: &[Ipv4Addr]) -> Self {
        let number = instance.number;
        let (name, link) = (format!("internet-{number}"), format!("int{number}"));
        let third = number % 250;
        let _ = shell(&format!("ip link delete {link}; ip netns delete {name}")).await;
        must(&format!(
            "ip netns add {name} && ip link add {link} type veth peer name eth0 netns {name} && \
             ip link set {link} up && ip -n {name} link set eth0 up && ip -n {name} link set lo up && \
             ip address add 198.51.100.{third}/32 dev {link} && ip -n {name} address add 198.18.{third}.1/32 dev eth0 && \
             ip -n {name} route add 198.51.100.{third}/32 dev eth0"
        ))
        .await;
        for address in addresses {
            must(&format!(
                "ip -n {name} address add {address}/32 dev eth0 && \
                 ip route add {address}/32 dev {link} src 198.51.100.{third}"
            ))
            .await;
        }
        let netns: OwnedFd = File::open(Path::new("/run/netns").join(&name)).unwrap().into();
        let mut services = JoinSet::new();
        let mut ports = Vec::new();
        for _ in 0..2 {
            let addresses = addresses.to_vec();
            let (tcp, datagrams) = inside(&netns, move || {
                let tcp = std::net::TcpListener::bind("0.0.0.0:0")?;
                tcp.set_nonblocking(true)?;
                let port = tcp.local_addr()?.port();
                let udp = addresses.into_iter().map(|address| {
                    let udp = std::net::UdpSocket::bind((address, port))?;
                    udp.set_nonblocking(true).map(|()| udp)
                });
                Ok((tcp, udp.collect::<io::Result<Vec<_>>>()?))
            })
            .await
            .unwrap();
            ports.push(tcp.local_addr().unwrap().port());
            let tcp = TcpListener::from_std(tcp).unwrap();
            services.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((mut stream, _)) = tcp.accept().await {
                    connections.spawn(async move {
                        let (mut from, mut to) = stream.split();
                        tokio::io::copy(&mut from, &mut to).await
                    });
                }
            });
            for udp in datagrams {
                let udp = UdpSocket::from_std(udp).unwrap();
                services.spawn(async move {
                    let mut buffer = vec![0; 65_536];
                    while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
                        // Whoever asked may be gone.
                        let _ = udp.send_to(&buffer[..length], from).await;
                    }
                });
            }
        }
        must(&format!(
            "ip netns exec {name} nft 'table inet seen {{ chain in {{ type filter hook prerouting priority -450; }}; }}'"
        ))
        .await;
        Self { name, link, port: ports[0], other_port: ports[1], _services: services }
    }

    pub(super) async fn run(&self, command: &str) -> (bool, String) {
        shell(&format!("ip netns exec {} {command}", self.name)).await
    }

    async fn count(&self, packets: &str) {
        let rule =
            format!("nft 'flush chain inet seen in; add rule inet seen in {packets} counter'");
        let (done, text) = self.run(&rule).await;
        assert!(done, "{text}");
    }

    /// From now on, all packets to `address` are counted.
    pub(super) async fn watch(&self, address: Ipv4Addr) {
        self.count(&format!("ip daddr {address}")).await;
    }

    /// How many there were so far.
    pub(super) async fn seen(&self) -> u64 {
        let (_, text) = self.run("nft list chain inet seen in").await;
        let (_, count) = text.split_once("packets ").unwrap();
        count.split_whitespace().next().unwrap().parse().unwrap()
    }

    pub(super) async fn remove(self) {
        must(&format!("ip link delete {} && ip netns delete {}", self.link, self.name)).await;
    }
}

/// Whether what is sent over it comes back within a second.
pub(super) async fn echoes(stream: &mut TcpStream) -> bool {
    let exchange = async {
        stream.write_all(b"hello").await?;
        let mut back = [0; 5];
        stream.read_exact(&mut back).await.map(|_| back == *b"hello")
    };
    tokio::time::timeout(Duration::from_secs(1), exchange)
        .await
        .is_ok_and(|echo| echo.unwrap_or(false))
}

/// The same for a datagram; one may get lost.
pub(super) async fn echoes_datagram(socket: &UdpSocket, to: SocketAddr, bytes: usize) -> bool {
    let mut buffer = vec![0; 65_536];
    for _ in 0..3 {
        let _ = socket.send_to(&vec![7; bytes], to).await;
        let answer =
            tokio::time::timeout(Duration::from_millis(300), socket.recv_from(&mut buffer));
        if answer.await.is_ok_and(|answer| answer.is_ok_and(|(length, _)| length == bytes)) {
            return true;
        }
    }
    false
}
