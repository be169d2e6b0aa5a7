//! Real namespaces, rules and packets, hence root. A guest is a second namespace whose own tap is joined
//! to the machine's by copying frames. Nothing leaves this host.

use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{IpAddr, SocketAddr, SocketAddrV4},
    os::fd::{AsFd, OwnedFd},
    path::Path,
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread::JoinHandle,
    time::{Duration, Instant},
};

use nix::{
    fcntl::{Flock, FlockArg},
    poll::{PollFd, PollFlags, poll},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, UdpSocket},
    task::JoinSet,
};

use super::*;

/// An instance that nobody else on this host uses while the test runs, from the far end of the numbers.
struct TestInstance {
    number: u16,
    _lock: Flock<File>,
}

/// `None`, and the test is over, where it cannot be run.
async fn instance() -> Option<TestInstance> {
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
    instance.networks(&[], vec![]).await.sweep(&BTreeSet::new()).await.unwrap();
    Some(instance)
}

impl TestInstance {
    async fn networks(&self, egress_allow: &[&str], resolvers: Vec<SocketAddr>) -> Networks {
        let policy = HostPolicy { allow: destinations(egress_allow), ..HostPolicy::default() };
        Networks::new(NetworkConfig { instance: self.number, policy, resolvers }).await.unwrap()
    }

    /// Everything on the host that bears this instance's name.
    async fn traces(&self) -> Vec<String> {
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

fn destinations(texts: &[&str]) -> Vec<Destination> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// Whether a command succeeded, and what it printed.
async fn shell(command: &str) -> (bool, String) {
    let output = tokio::process::Command::new("bash")
        .args(["-c", command])
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(20), output).await.unwrap().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

async fn must(command: &str) {
    let (success, text) = shell(command).await;
    assert!(success, "{command}: {text}");
}

/// A machine without QEMU: a namespace with the guest's address, on the other side of the machine's tap.
struct Guest {
    name: String,
    _wire: Wire,
}

impl Guest {
    async fn start(namespace: &Namespace) -> Self {
        let name = format!("guest-{}", namespace.slot.namespace());
        let (netns, tap) = {
            let _ = shell(&format!("ip netns delete {name}")).await;
            must(&format!("ip netns add {name}")).await;
            let netns: OwnedFd = File::open(Path::new("/run/netns").join(&name)).unwrap().into();
            let tap = namespace::visit(&netns, namespace::make_tap).await.unwrap();
            (netns, tap)
        };
        drop(netns);
        must(&format!(
            "ip -n {name} link set lo up && ip -n {name} link set tap0 address {GUEST_MAC} up && \
             ip -n {name} address add {GUEST}/{GUEST_PREFIX} dev tap0 && ip -n {name} route add default via {GATEWAY}"
        ))
        .await;
        let wire = Wire::between(namespace.tap().unwrap().fd, tap);
        Self { name, _wire: wire }
    }

    async fn run(&self, command: &str) -> (bool, String) {
        shell(&format!("ip netns exec {} {command}", self.name)).await
    }

    /// Whether a TCP connection is accepted, within a second.
    async fn reaches(&self, address: impl Into<SocketAddr>) -> bool {
        let address = address.into();
        let connect = format!("exec 3<>/dev/tcp/{}/{}", address.ip(), address.port());
        self.run(&format!("timeout 1 bash -c '{connect}'")).await.0
    }

    async fn reached_of(&self, addresses: &[SocketAddr]) -> Vec<SocketAddr> {
        let tries =
            addresses.iter().map(async |address| self.reaches(*address).await.then_some(*address));
        futures::future::join_all(tries).await.into_iter().flatten().collect()
    }

    async fn stop(self) {
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

/// Whether the host itself gets a connection.
async fn connects(address: SocketAddr) -> bool {
    let connect = tokio::net::TcpStream::connect(address);
    tokio::time::timeout(Duration::from_secs(1), connect).await.is_ok_and(|result| result.is_ok())
}

/// Accepts and holds connections until it is dropped.
async fn listen(address: impl Into<SocketAddr>) -> (SocketAddr, JoinSet<()>) {
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

/// Answers every query, by UDP and TCP, with one A record: 203.0.113.77.
async fn fake_resolver() -> (SocketAddr, JoinSet<()>) {
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
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut buffer = [0; 512];
        while let Ok((length, from)) = udp.recv_from(&mut buffer).await {
            udp.send_to(&answer(&buffer[..length]), from).await.unwrap();
        }
    });
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = tcp.accept().await {
            let mut query = vec![0; stream.read_u16().await.unwrap().into()];
            stream.read_exact(&mut query).await.unwrap();
            let answer = answer(&query);
            stream.write_u16(answer.len().try_into().unwrap()).await.unwrap();
            stream.write_all(&answer).await.unwrap();
        }
    });
    (address, tasks)
}

/// A program for the guest that prints the address in the answer to a query, by UDP or TCP.
fn look_up(transport: &str) -> String {
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
struct Shop(String);

impl Shop {
    async fn with(instance: &TestInstance, addresses: &[&str]) -> Self {
        let name = format!("shop{}", instance.number);
        let _ = shell(&format!("ip link delete {name}")).await;
        must(&format!("ip link add {name} type veth peer name {name}p && ip link set {name} up && ip link set {name}p up")).await;
        for address in addresses {
            must(&format!("ip address add {address} dev {name}")).await;
        }
        Self(name)
    }

    async fn remove(self) {
        must(&format!("ip link delete {}", self.0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_prepared_is_removed_without_a_trace() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(1023).await.unwrap();
    assert_eq!(instance.traces().await.len(), 3);
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    assert_eq!(instance.traces().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn there_is_no_ipv6_on_the_way() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let (name, link) = (namespace.slot.namespace(), namespace.slot.link());
    assert_eq!(
        shell(&format!("ip -n {name} -6 address; ip -6 address show dev {link}")).await.1,
        ""
    );
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slot_is_prepared_anew_whatever_was_left_in_it() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    // As after a crash: nothing is removed.
    drop(networks.prepare(5).await.unwrap());
    // As after a crash half-way: a name without a namespace.
    fs::write(namespace::path(networks.instance.slot(6).unwrap()), "").unwrap();
    for slot in [5, 6] {
        networks.prepare(slot).await.unwrap().remove().await.unwrap();
    }
    networks.close().await.unwrap();
    assert_eq!(instance.traces().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_takes_all_but_what_is_kept() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    for slot in [1, 2, 11] {
        drop(networks.prepare(slot).await.unwrap());
    }
    must(&format!("ip netns delete atoll-{}-11", instance.number)).await;
    must(&format!("ip link add at{0}.12 type veth peer name at{0}.13", instance.number)).await;
    networks.sweep(&BTreeSet::from([2])).await.unwrap();
    assert_eq!(namespace::named(networks.instance).unwrap(), [networks.instance.slot(2).unwrap()]);
    assert_eq!(namespace::linked(networks.instance).unwrap(), [networks.instance.slot(2).unwrap()]);
    assert_eq!(networks.sweep(&BTreeSet::new()).await.unwrap(), 1);
    networks.close().await.unwrap();
    assert_eq!(instance.traces().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reaches_only_what_it_may() {
    let Some(instance) = instance().await else { return };
    let third = u8::try_from(instance.number % 200).unwrap();
    let (public, private, other) = (
        Ipv4Addr::new(203, 0, 113, third + 1),
        Ipv4Addr::new(10, 213, third, 1),
        Ipv4Addr::new(203, 0, 113, third + 2),
    );
    let shop = Shop::with(
        &instance,
        &[&format!("{public}/32"), &format!("{private}/32"), &format!("{other}/32")],
    )
    .await;
    let (allowed, _one) = listen((public, 0)).await;
    let (refused, _two) = listen((public, 0)).await;
    let (private_allowed, _three) = listen((private, 0)).await;
    let (private_refused, _four) = listen((private, 0)).await;
    let (everywhere, _five) = listen((Ipv4Addr::UNSPECIFIED, 0)).await;
    let (in_range, _six) = listen((other, 0)).await;
    let networks = instance
        .networks(
            &[
                &format!("{public}/32:{}", allowed.port()),
                &format!("{private}:{}", private_allowed.port()),
                &format!("{other}"),
            ],
            vec![],
        )
        .await;
    let one = networks.prepare(1).await.unwrap();
    let two = networks.prepare(2).await.unwrap();
    let guest = Guest::start(&one).await;
    let neighbour = Guest::start(&two).await;
    let (in_neighbour, _seven) = listen_in(&two, (two.host_address(), 0)).await;

    for destination in [allowed, private_allowed, in_range] {
        assert!(guest.reaches(destination).await, "{destination}");
    }
    let port = everywhere.port();
    let mut closed = vec![refused, private_refused, in_neighbour];
    for host in
        [GATEWAY, one.slot.host_end(), two.slot.host_end(), one.host_address(), public, private]
    {
        closed.push((host, port).into());
    }
    closed.extend(
        host_addresses().await.into_iter().map(|address| SocketAddr::from((address, port))),
    );
    let unreachable_for_all = [GATEWAY, one.host_address()];
    for destination in &closed {
        // What is refused must be there at all, or nothing is shown.
        assert!(
            connects(*destination).await
                || unreachable_for_all.map(IpAddr::V4).contains(&destination.ip()),
            "{destination}"
        );
    }
    assert_eq!(guest.reached_of(&closed).await, []);
    assert!(
        guest.run(&format!("ping -c1 -W1 {GATEWAY}")).await.0 || !shell("command -v ping").await.0
    );

    neighbour.stop().await;
    guest.stop().await;
    one.remove().await.unwrap();
    two.remove().await.unwrap();
    networks.close().await.unwrap();
    shop.remove().await;
    assert_eq!(instance.traces().await, [""; 0]);
}

/// A listener in the machine's namespace, where only the host can reach it.
async fn listen_in(namespace: &Namespace, address: (Ipv4Addr, u16)) -> (SocketAddr, JoinSet<()>) {
    // The namespace itself admits nobody; the test's listener is to be reached by whoever can get there.
    let admit = "insert rule inet atoll input iifname up0 accept; insert rule inet atoll output oifname up0 accept";
    must(&format!("ip netns exec {} nft '{admit}'", namespace.slot.namespace())).await;
    let listener = namespace::visit(namespace.gate.netns(), move || {
        let listener = std::net::TcpListener::bind(address)
            .map_err(|source| Error::kernel("listen", "in a namespace", source))?;
        listener
            .set_nonblocking(true)
            .map_err(|source| Error::kernel("listen", "in a namespace", source))?;
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
async fn host_addresses() -> Vec<Ipv4Addr> {
    let list = "ip -4 -o address show scope global | awk '$2 !~ /^(at|int|shop)/ {print $4}' | cut -d/ -f1";
    shell(list).await.1.lines().map(|line| line.parse().unwrap()).collect()
}

/// The internet of this test is a namespace behind another interface of the host.
#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reaches_what_is_behind_the_host_but_no_private_range_there() {
    let Some(instance) = instance().await else { return };
    let number = instance.number;
    let (internet, link) = (format!("internet-{number}"), format!("int{number}"));
    let third = number % 250;
    must(&format!(
        "ip netns add {internet} && ip link add {link} type veth peer name eth0 netns {internet} && \
         ip link set {link} up && ip -n {internet} link set eth0 up && ip -n {internet} link set lo up && \
         ip address add 198.51.100.{third}/32 dev {link} && ip -n {internet} address add 198.18.{third}.1/32 dev eth0 && \
         ip -n {internet} route add 198.51.100.{third}/32 dev eth0"
    ))
    .await;
    let reachable = [
        Ipv4Addr::new(198, 51, 100, 251),
        Ipv4Addr::new(203, 0, 113, 251),
        Ipv4Addr::new(192, 0, 2, 251),
    ];
    let private = [
        Ipv4Addr::new(10, 251, 0, 1),
        Ipv4Addr::new(172, 31, 251, 1),
        Ipv4Addr::new(192, 168, 251, 1),
        Ipv4Addr::new(169, 254, 169, 254),
        Ipv4Addr::new(100, 100, 100, 200),
        Ipv4Addr::new(168, 63, 129, 16),
    ];
    let opened = Ipv4Addr::new(10, 251, 0, 2);
    for address in reachable.iter().chain(&private).chain([&opened]) {
        must(&format!(
            "ip -n {internet} address add {address}/32 dev eth0 && \
             ip route add {address}/32 dev {link} src 198.51.100.{third}"
        ))
        .await;
    }
    let netns: OwnedFd = File::open(Path::new("/run/netns").join(&internet)).unwrap().into();
    let listener = namespace::visit(&netns, || {
        let listener = std::net::TcpListener::bind("0.0.0.0:0")
            .map_err(|source| Error::kernel("listen", "in a namespace", source))?;
        listener
            .set_nonblocking(true)
            .map_err(|source| Error::kernel("listen", "in a namespace", source))?;
        Ok(listener)
    })
    .await
    .unwrap();
    let port = listener.local_addr().unwrap().port();
    let listener = TcpListener::from_std(listener).unwrap();
    let mut server = JoinSet::new();
    server.spawn(async move { while listener.accept().await.is_ok() {} });

    let networks = instance.networks(&[&format!("{opened}:{port}")], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    for address in reachable.iter().chain([&opened]) {
        assert!(guest.reaches((*address, port)).await, "{address}");
    }
    let closed = private.map(|address| SocketAddr::from((address, port)));
    for destination in closed {
        assert!(connects(destination).await, "{destination}");
    }
    assert_eq!(guest.reached_of(&closed).await, []);
    // From outside no way leads to the guest, not even for who knows its address.
    let own = namespace.host_address();
    must(&format!("ip -n {internet} route add {own}/32 via 198.51.100.{third} dev eth0 onlink"))
        .await;
    let (listening, _guest_server) = listen_in(&namespace, (own, 0)).await;
    assert!(connects(listening).await);
    let connect = format!("exec 3<>/dev/tcp/{own}/{}", listening.port());
    assert!(!shell(&format!("ip netns exec {internet} timeout 1 bash -c '{connect}'")).await.0);

    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    must(&format!("ip link delete {link} && ip netns delete {internet}")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_resolves_before_and_after_the_server_restarts() {
    let Some(instance) = instance().await else { return };
    let (resolver, _resolver) = fake_resolver().await;
    let networks = instance.networks(&[], vec![resolver]).await;
    let namespace = networks.prepare(3).await.unwrap();
    let guest = Guest::start(&namespace).await;
    for transport in ["udp", "tcp"] {
        let (_, text) = guest.run(&look_up(transport)).await;
        assert_eq!(text.trim(), "code 0 address 203 0 113 77", "{transport}");
    }

    drop((namespace, networks));
    let networks = instance.networks(&[], vec![resolver]).await;
    let namespace = networks.adopt(3, &Policy::default()).await.unwrap();
    let (_, text) = guest.run(&look_up("udp")).await;
    assert_eq!(text.trim(), "code 0 address 203 0 113 77");
    assert!(matches!(namespace.tap(), Err(Error::NoTap(_))));
    assert!(matches!(networks.adopt(4, &Policy::default()).await, Err(Error::Gone(_))));

    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    assert_eq!(instance.traces().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_any_resolver_is_told_so_at_once() {
    let Some(instance) = instance().await else { return };
    let nobody: SocketAddr = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 1).into();
    let networks = instance.networks(&[], vec![nobody]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let (_, text) = guest.run(&look_up("udp")).await;
    assert!(text.starts_with("code 2"), "{text}");
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
}

/// Not a claim but a measurement: `cargo test -p machine -- --ignored --nocapture how_long`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
#[expect(clippy::print_stderr, reason = "its result is for a person")]
async fn how_long_preparing_and_removing_take() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let (mut prepare, mut remove) = (Vec::new(), Vec::new());
    for slot in 0..40 {
        let start = Instant::now();
        let namespace = networks.prepare(slot).await.unwrap();
        prepare.push(start.elapsed());
        let start = Instant::now();
        namespace.remove().await.unwrap();
        remove.push(start.elapsed());
    }
    for (name, mut times) in [("prepare", prepare), ("remove", remove)] {
        times.sort_unstable();
        eprintln!("{name}: median {:?}, p95 {:?}, max {:?}", times[20], times[37], times[39]);
    }
    networks.close().await.unwrap();
}
