//! What a sandbox reaches, and what it does not.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use api::CreateSandbox;
use client::SandboxFilter;
use tests::{Host, Options, Sandbox, Server, command, small, suite, until};
use tokio::{io::AsyncWriteExt, net::TcpListener};

suite! {
    an_allowed_address_of_the_host_is_reached_and_no_other,
    two_sandboxes_do_not_reach_each_other,
    private_and_metadata_addresses_are_not_reached,
    names_are_resolved_by_the_gateway,
    the_guest_has_the_address_that_all_have;
    soak:
}

/// Whether a connection to there can be opened from inside.
async fn reaches(sandbox: &Sandbox, host: impl std::fmt::Display, port: u16) -> bool {
    let cmd =
        format!("timeout 5 bash -c 'exec 3<>/dev/tcp/{host}/{port} && head -c 5 <&3' 2>/dev/null");
    sandbox.exec(command(cmd)).await.stdout == "hello"
}

/// Those of `HOST/PORT` to which a connection can be opened; all are tried at once.
async fn reached(sandbox: &Sandbox, targets: &[String]) -> String {
    let tries: String = targets
        .iter()
        .map(|target| {
            format!(
                "(timeout 5 bash -c 'exec 3<>/dev/tcp/{target}' 2>/dev/null && echo {target}) & "
            )
        })
        .collect();
    sandbox.run(&format!("{tries} wait")).await
}

/// Says hello to whoever connects, for as long as the runtime lives.
async fn greeter(address: IpAddr) -> SocketAddr {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let bound = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            // Whoever has gone again did connect.
            let _ = connection.write_all(b"hello").await;
        }
    });
    bound
}

/// One by which other machines know this host.
fn address_of_the_host() -> Ipv4Addr {
    // Nothing is sent: the kernel only picks the address that it would send from.
    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    socket.connect("203.0.113.1:9").unwrap();
    match socket.local_addr().unwrap().ip() {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => panic!("{address}"),
    }
}

async fn an_allowed_address_of_the_host_is_reached_and_no_other(host: Host) {
    let address = address_of_the_host();
    let (allowed, other) = (greeter(address.into()).await, greeter(address.into()).await);
    let everywhere = greeter(Ipv4Addr::UNSPECIFIED.into()).await;
    let options = Options {
        // Reachable from other machines, thus from sandboxes, were it not forbidden.
        listen: "0.0.0.0:0".to_owned(),
        arguments: vec!["--egress-allow".to_owned(), format!("{address}/32:{}", allowed.port())],
        ..Options::default()
    };
    let server = Server::start_with(options).await;
    let sandbox = host.sandbox_on(&server, &small()).await;
    assert!(reaches(&sandbox, address, allowed.port()).await, "what is allowed");
    assert!(!reaches(&sandbox, address, other.port()).await, "another port");
    assert!(!reaches(&sandbox, address, everywhere.port()).await, "another service");
    let api: u16 = server.url().rsplit_once(':').unwrap().1.parse().unwrap();
    let ends: Vec<String> = sandbox
        .run("ip -4 route | awk '/default/ { print $3 }'; echo 127.0.0.1")
        .await
        .lines()
        .map(str::to_owned)
        .collect();
    // The host's end of the link to the namespace: one below what the host calls the guest.
    let guest: Ipv4Addr = sandbox.created.guest_ip.parse().unwrap();
    let link = Ipv4Addr::from_bits(guest.to_bits() - 1);
    let targets = ends.into_iter().chain([address, link, guest].map(|end| end.to_string()));
    let ports = [api, everywhere.port(), 22];
    let targets: Vec<_> =
        targets.flat_map(|end| ports.map(|port| format!("{end}/{port}"))).collect();
    assert_eq!(reached(&sandbox, &targets).await, "");
    drop(sandbox);
    until("the sandbox is gone", Duration::from_secs(20), async || {
        server.client().sandboxes(&SandboxFilter::default()).await.unwrap().is_empty().then_some(())
    })
    .await;
    host.end(server).await;
}

async fn two_sandboxes_do_not_reach_each_other(host: Host) {
    let [one, other] = host.two_sandboxes(&small()).await;
    assert_ne!(one.created.guest_ip, other.created.guest_ip);
    let serve = "cd /srv && nohup python3 -c \"import socketserver; socketserver.TCPServer(('0.0.0.0', 8000), type('H', (socketserver.BaseRequestHandler,), {'handle': lambda self: self.request.sendall(b'hello')})).serve_forever()\" >/dev/null 2>&1 &";
    other.run(serve).await;
    until("it listens", Duration::from_secs(60), async || {
        reaches(&other, "127.0.0.1", 8000).await.then_some(())
    })
    .await;
    assert!(!reaches(&one, &other.created.guest_ip, 8000).await);
    // Its own service under its own address is its own affair.
    let own = other.run("hostname -I 2>/dev/null || ip -4 -o addr show scope global | awk '{ print $4 }' | cut -d/ -f1").await;
    assert!(reaches(&other, own.trim(), 8000).await, "{own}");
    assert_eq!(one.exec(command("test -e /root/only-there")).await.exit_code, 1);
}

async fn private_and_metadata_addresses_are_not_reached(host: Host) {
    let sandbox = host.sandbox().await;
    let targets = [
        "169.254.169.254/80",
        "10.0.0.1/80",
        "172.16.0.1/443",
        "192.168.0.1/80",
        "100.64.0.1/22",
        "100.100.100.200/80",
        "127.0.0.2/80",
        "224.0.0.1/80",
    ];
    assert_eq!(reached(&sandbox, &targets.map(str::to_owned)).await, "");
    // By UDP and ICMP neither.
    assert_ne!(
        sandbox.exec(command("ping -c 1 -W 2 169.254.169.254 >/dev/null 2>&1")).await.exit_code,
        0
    );
}

async fn names_are_resolved_by_the_gateway(host: Host) {
    let sandbox = host.sandbox().await;
    let resolver = sandbox.run("awk '/^nameserver/ { print $2 }' /etc/resolv.conf; ip -4 route | awk '/default/ { print $3 }'").await;
    let lines: Vec<_> = resolver.lines().collect();
    assert!(lines.len() == 2 && lines[0] == lines[1], "{resolver}");
    // As far as the host itself can: a guest knows no more.
    let mirror = debian_mirror_of_the_host();
    for name in [mirror.as_str(), "no-such-name.invalid"] {
        let on_the_host = tokio::net::lookup_host((name, 80))
            .await
            .is_ok_and(|mut found| found.any(|address| address.is_ipv4()));
        let inside =
            sandbox.exec(command(format!("timeout 25 getent ahostsv4 {name} >/dev/null"))).await;
        assert_eq!(inside.exit_code == 0, on_the_host, "{name}");
    }
    assert_eq!(sandbox.run("getent hosts localhost >/dev/null && getent hosts $(hostname) >/dev/null && echo both").await, "both\n");
}

/// A name that is not the host's own, and that the host can most likely resolve.
fn debian_mirror_of_the_host() -> String {
    let more = std::fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    let files = more.map(|entry| entry.path()).chain(["/etc/apt/sources.list".into()]);
    let text: String = files.filter_map(|path| std::fs::read_to_string(path).ok()).collect();
    let (_, rest) = text.split_once("://").expect("a Debian host has sources");
    rest.split(['/', ' ', '\n']).next().unwrap_or_default().to_owned()
}

async fn the_guest_has_the_address_that_all_have(host: Host) {
    let [one, other] =
        host.two_sandboxes(&CreateSandbox { ttl_seconds: Some(600), ..small() }).await;
    let shown = "ip -4 -o addr show scope global | awk '{ print $4 }'; cat /sys/class/net/*/address; ip -4 route";
    assert_eq!(one.run(shown).await, other.run(shown).await, "a snapshot must carry no identity");
    let sixth = one.run("ip -6 -o addr show scope global; cat /proc/sys/net/ipv6/conf/all/disable_ipv6 2>/dev/null || true").await;
    assert!(!sixth.contains("inet6"), "{sixth}");
}
