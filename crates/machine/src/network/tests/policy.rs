//! Policies of single sandboxes.

use std::{net::SocketAddr, time::Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{
    super::*,
    harness::{Guest, Internet, destinations, echoes, echoes_datagram, instance, must},
};

fn policy(egress: Egress, allow: &[&str], deny: &[&str]) -> Policy {
    let (allow, deny) = (destinations(allow), destinations(deny));
    Policy { egress, allow, deny, ..Policy::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hosts_owner_comes_first_then_deny_then_allow_then_egress() {
    let Some(instance) = instance().await else { return };
    let [one, two, denied]: [Ipv4Addr; 3] = instance.addresses();
    let [allowed, permitted, private]: [Ipv4Addr; 3] = instance.addresses_in([10, 250, 0]);
    let all = [one, two, denied, allowed, permitted, private];
    let internet = Internet::with(&instance, &all).await;
    let (port, other) = (internet.port, internet.other_port);
    let host = HostPolicy {
        deny: destinations(&[&denied.to_string()]),
        allow: destinations(&[&allowed.to_string()]),
        permit: destinations(&[&format!("{permitted}:{port}")]),
        door: None,
    };
    let networks = instance.networks_within(host, vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let targets: Vec<SocketAddr> =
        all.iter().flat_map(|address| [port, other].map(|port| (*address, port).into())).collect();
    let reached = async |policy: &Policy| {
        namespace.gate().set_policy(policy).await.unwrap();
        guest.reached_of(&targets).await
    };
    let at = |address: Ipv4Addr, ports: &[u16]| -> Vec<SocketAddr> {
        ports.iter().map(|port| (address, *port).into()).collect()
    };
    let both = [port, other];

    let by_default = [at(one, &both), at(two, &both), at(allowed, &both)].concat();
    assert_eq!(reached(&Policy::default()).await, by_default);
    assert_eq!(reached(&policy(Egress::None, &[], &[])).await, []);
    // What is named is open, as far as the host's owner lets it.
    let everything = policy(Egress::None, &["0.0.0.0/0"], &[]);
    assert_eq!(reached(&everything).await, [by_default.clone(), at(permitted, &[port])].concat());
    let named = policy(Egress::Internet, &["10.250.0.0/24"], &[]);
    assert_eq!(reached(&named).await, [by_default.clone(), at(permitted, &[port])].concat());
    let one_port = policy(Egress::None, &[&format!("192.0.2.0/24:{port}")], &[]);
    assert_eq!(reached(&one_port).await, [at(one, &[port]), at(two, &[port])].concat());
    // A refusal beats what is named.
    let but =
        policy(Egress::None, &["192.0.2.0/24"], &[&one.to_string(), &format!("{two}:{other}")]);
    assert_eq!(reached(&but).await, at(two, &[port]));
    let less = policy(Egress::Internet, &[], &["192.0.2.0/24", "10.0.0.0/8"]);
    assert_eq!(reached(&less).await, []);
    assert_eq!(reached(&Policy::default()).await, by_default);

    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_holds_for_open_connections_and_leaves_the_others() {
    let Some(instance) = instance().await else { return };
    let [one, other] = instance.addresses();
    let internet = Internet::with(&instance, &[one, other]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let to_one = SocketAddr::from((one, internet.port));
    let mut closed = guest.connect(to_one).await.unwrap();
    let mut kept = guest.connect((other, internet.port).into()).await.unwrap();
    let datagrams = guest.udp().await;
    assert!(echoes(&mut closed).await && echoes(&mut kept).await);
    assert!(echoes_datagram(&datagrams, to_one, 5).await);

    let deny = policy(Egress::Internet, &[], &[&one.to_string()]);
    namespace.gate().set_policy(&deny).await.unwrap();
    internet.watch(one).await;
    assert!(!echoes(&mut closed).await);
    assert!(!echoes_datagram(&datagrams, to_one, 5).await);
    assert!(echoes(&mut kept).await);
    assert_eq!(internet.seen().await, 0);

    // Nor does what the other side sends on its own still come in: first it does.
    namespace.gate().set_policy(&Policy::default()).await.unwrap();
    assert!(echoes_datagram(&datagrams, to_one, 5).await);
    let flood = format!(
        "python3 -c \"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_UDP); \
         s.bind(('{one}', 0)); [s.sendto(({port}).to_bytes(2, 'big') + to.to_bytes(2, 'big') + b'\\0\\x0c\\0\\0late', \
         ('198.51.100.{last}', 0)) for to in range(1024, 65536)]\"",
        port = internet.port,
        last = instance.number % 250
    );
    let comes_in = async || {
        let mut buffer = [0; 64];
        while datagrams.try_recv(&mut buffer).is_ok() {}
        let (done, text) = internet.run(&flood).await;
        assert!(done, "{text}");
        let received = tokio::time::timeout(Duration::from_millis(500), async {
            while datagrams.recv(&mut buffer).await.is_ok_and(|length| buffer[..length] != *b"late")
            {
            }
        });
        received.await.is_ok()
    };
    assert!(comes_in().await);
    namespace.gate().set_policy(&deny).await.unwrap();
    assert!(!comes_in().await);

    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_adopted_network_gets_its_policy_and_its_rules_again() {
    let Some(instance) = instance().await else { return };
    let [one, other] = instance.addresses();
    let internet = Internet::with(&instance, &[one, other]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(3).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let only_one = policy(Egress::None, &[&one.to_string()], &[]);
    namespace.gate().set_policy(&only_one).await.unwrap();
    let name = namespace.slot.namespace();
    drop((namespace, networks));
    must(&format!("ip netns exec {name} nft flush ruleset")).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.adopt(3, &only_one).await.unwrap();
    assert!(guest.reaches((one, internet.port)).await);
    assert!(!guest.reaches((other, internet.port)).await);
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_are_counted_through_every_change_and_a_limit_holds() {
    let Some(instance) = instance().await else { return };
    let [one] = instance.addresses();
    let internet = Internet::with(&instance, &[one]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let gate = namespace.gate();
    const BYTES: usize = 3 << 20;
    let transfer = async || {
        let start = Instant::now();
        let stream = guest.connect((one, internet.port).into()).await.unwrap();
        let (mut from, mut to) = stream.into_split();
        let sending = tokio::spawn(async move {
            to.write_all(&vec![1; BYTES]).await.unwrap();
            to
        });
        let mut back = vec![0; BYTES];
        from.read_exact(&mut back).await.unwrap();
        drop(sending.await.unwrap());
        start.elapsed()
    };
    let before = gate.traffic().unwrap();
    transfer().await;
    let after = gate.traffic().unwrap();
    let bytes = u64::try_from(BYTES).unwrap();
    for (before, after) in
        [(before.sent_bytes, after.sent_bytes), (before.received_bytes, after.received_bytes)]
    {
        assert!((bytes..bytes * 3 / 2).contains(&(after - before)), "{before} to {after}");
    }
    let limited = Policy { rate_limit_mbit: Some(8), ..Policy::default() };
    gate.set_policy(&limited).await.unwrap();
    assert!(gate.traffic().unwrap().sent_bytes >= after.sent_bytes);
    // A megabyte in a second, less what may come at once.
    let took = tokio::time::timeout(Duration::from_secs(60), transfer()).await.unwrap();
    assert!(took > Duration::from_secs(2), "{took:?}");
    gate.set_policy(&Policy::default()).await.unwrap();
    assert!(transfer().await < took);
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}
