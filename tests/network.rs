//! What a sandbox reaches, and what it does not.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    time::Duration,
};

use api::{CreateNetwork, CreateSandbox, Egress, ErrorCode, UpdateNetwork};
use client::SandboxFilter;
use tests::{
    Answer, End, Host, Options, Sandbox, Server, address_of_the_host, command, small, suite, until,
};
use tokio::{io::AsyncWriteExt, net::TcpListener};

suite! {
    an_allowed_address_of_the_host_is_reached_and_no_other,
    two_sandboxes_do_not_reach_each_other,
    private_and_metadata_addresses_are_not_reached,
    names_are_resolved_by_the_gateway,
    the_guest_has_the_address_that_all_have,
    a_sandbox_without_egress_reaches_nothing_and_learns_no_address,
    a_policy_changes_while_it_runs_and_outlives_the_server,
    a_private_range_is_named_only_where_the_operator_permits_it,
    what_is_wrong_with_a_policy_is_named_and_nothing_is_created;
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

fn with(network: CreateNetwork) -> CreateSandbox {
    CreateSandbox { network: Some(network), ..small() }
}

/// Whether the gateway tells addresses. `localhost` needs nobody.
async fn resolves(sandbox: &Sandbox, name: &str) -> bool {
    let cmd = format!("timeout 25 getent ahostsv4 {name} >/dev/null");
    sandbox.exec(command(cmd)).await.exit_code == 0
}

async fn a_sandbox_without_egress_reaches_nothing_and_learns_no_address(host: Host) {
    let address = address_of_the_host();
    let service = greeter(address.into()).await;
    let options = Options {
        arguments: vec!["--egress-allow".to_owned(), format!("{address}/32")],
        ..Options::default()
    };
    let server = Server::start_with(options).await;
    let sandbox = host.sandbox_on(&server, &with(CreateNetwork::Internet(false))).await;
    assert!(!reaches(&sandbox, address, service.port()).await);
    assert!(!resolves(&sandbox, &debian_mirror_of_the_host()).await);
    assert!(resolves(&sandbox, "localhost").await);
    let network = server.client().network(&sandbox.id).await.unwrap();
    assert_eq!(network.policy.egress, Egress::None);
    // Named, it is open.
    let update = UpdateNetwork {
        allow: Some(vec![format!("{address}:{}", service.port())]),
        ..UpdateNetwork::default()
    };
    let network = server.client().update_network(&sandbox.id, &update).await.unwrap();
    assert_eq!(network.policy.allow, [format!("{address}/32:{}", service.port())]);
    assert!(reaches(&sandbox, address, service.port()).await);
    drop(sandbox);
    host.end(server).await;
}

/// Writes over one connection to there, again and again, and says in a file what becomes of it.
async fn hold_open(sandbox: &Sandbox, to: SocketAddr) {
    let cmd = format!(
        "nohup bash -c 'exec 3<>/dev/tcp/{}/{}; echo open >/tmp/held; while echo here >&3; do sleep 0.2; done 2>/dev/null; echo ended >/tmp/held' >/dev/null 2>&1 &",
        to.ip(),
        to.port()
    );
    sandbox.run(&cmd).await;
    until_held(sandbox, "open").await;
}

async fn until_held(sandbox: &Sandbox, word: &str) {
    until(word, Duration::from_secs(60), async || {
        (sandbox.run("cat /tmp/held 2>/dev/null || true").await.trim() == word).then_some(())
    })
    .await;
}

/// Speaks a word again and again for as long as it is listened to.
async fn chatterer(address: IpAddr) -> SocketAddr {
    let listener = TcpListener::bind((address, 0)).await.unwrap();
    let bound = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut connection, _)) = listener.accept().await {
            tokio::spawn(async move {
                while connection.write_all(b"hello").await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            });
        }
    });
    bound
}

async fn a_policy_changes_while_it_runs_and_outlives_the_server(host: Host) {
    let address = address_of_the_host();
    let (service, kept) = (chatterer(address.into()).await, greeter(address.into()).await);
    let options = Options {
        arguments: vec!["--egress-allow".to_owned(), format!("{address}/32")],
        ..Options::default()
    };
    let mut server = Server::start_with(options).await;
    let sandbox = host.sandbox_on(&server, &small()).await;
    hold_open(&sandbox, service).await;
    let counted = server.client().network(&sandbox.id).await.unwrap();
    assert!(counted.sent_bytes > 0 && counted.received_bytes > 0, "{counted:?}");

    let deny = UpdateNetwork {
        deny: Some(vec![service.to_string()]),
        rate_limit_mbit: Some(50),
        ..UpdateNetwork::default()
    };
    let changed = server.client().update_network(&sandbox.id, &deny).await.unwrap();
    assert!(changed.sent_bytes >= counted.sent_bytes, "{changed:?}");
    until_held(&sandbox, "ended").await;
    assert!(!reaches(&sandbox, address, service.port()).await);
    assert!(reaches(&sandbox, address, kept.port()).await);
    let figures = server.get("/metrics").await.text();
    assert!(figures.contains("atoll_network_bytes_sent_total "), "{figures}");

    server.restart(End::Killed).await;
    let sandbox = sandbox.on(&server);
    let found = server.client().network(&sandbox.id).await.unwrap();
    assert_eq!(found.policy, changed.policy);
    assert!(found.sent_bytes >= changed.sent_bytes, "{found:?}");
    assert!(!reaches(&sandbox, address, service.port()).await);
    assert!(reaches(&sandbox, address, kept.port()).await);
    drop(sandbox);
    host.end(server).await;
}

async fn a_private_range_is_named_only_where_the_operator_permits_it(host: Host) {
    let address = address_of_the_host();
    let service = greeter(address.into()).await;
    let options = Options {
        arguments: vec![
            "--egress-permit".to_owned(),
            format!("{address}/32:{}", service.port()),
            "--egress-permit".to_owned(),
            "10.77.0.0/24".to_owned(),
        ],
        ..Options::default()
    };
    let server = Server::start_with(options).await;
    let allow = |text: &str| {
        CreateNetwork::Policy(UpdateNetwork {
            allow: Some(vec![text.to_owned()]),
            ..UpdateNetwork::default()
        })
    };
    for refused in ["10.0.0.0/8", "10.77.0.0/16", "169.254.169.254", "127.0.0.1:22"] {
        let error = server.client().create_sandbox(&with(allow(refused))).await.unwrap_err();
        assert_eq!(error.code(), Some(ErrorCode::InvalidRequest), "{refused}");
        assert!(error.to_string().contains("network.allow[0]"), "{error}");
    }
    let sandbox = host.sandbox_on(&server, &small()).await;
    assert!(!reaches(&sandbox, address, service.port()).await);
    let named = host.sandbox_on(&server, &with(allow(&service.to_string()))).await;
    assert!(reaches(&named, address, service.port()).await);
    drop((sandbox, named));
    host.end(server).await;
}

async fn what_is_wrong_with_a_policy_is_named_and_nothing_is_created(host: Host) {
    let server = host.server().await;
    let before = server.client().sandboxes(&SandboxFilter::default()).await.unwrap().len();
    let many = vec!["192.0.2.1"; 65];
    for (network, field) in [
        (serde_json::json!("internet"), "network"),
        (serde_json::json!({"egress": "everything"}), "network.egress"),
        (serde_json::json!({"allow": ["192.0.2.1", "example.com"]}), "network.allow[1]"),
        (serde_json::json!({"allow": [1]}), "network.allow[0]"),
        (serde_json::json!({"deny": ["192.0.2.1/33"]}), "network.deny[0]"),
        (serde_json::json!({"deny": ["2001:db8::/32"]}), "network.deny[0]"),
        (serde_json::json!({"deny": many}), "network.deny"),
        (serde_json::json!({"alow": []}), "alow"),
        (serde_json::json!({"rate_limit_mbit": -1}), "network.rate_limit_mbit"),
        (serde_json::json!({"rate_limit_mbit": 1_000_000}), "network.rate_limit_mbit"),
    ] {
        let request = server
            .client()
            .request(client::Method::POST, "/v1/sandboxes")
            .json(&serde_json::json!({"cpu": 1, "memory_mb": 1024, "network": network}));
        let answer = Answer::to(request).await;
        assert_eq!(answer.refusal(), (400, "invalid_request".to_owned()), "{network}");
        assert!(answer.text().contains(field), "{}", answer.text());
    }
    let after = server.client().sandboxes(&SandboxFilter::default()).await.unwrap().len();
    assert_eq!(after, before);
}
