//! Where a guest gets by default, and where not.

use std::net::{IpAddr, SocketAddr};

use super::{
    super::*,
    harness::{
        Guest, Internet, Shop, connects, host_addresses, instance, listen, listen_in, must, shell,
    },
};

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
    // An address that the host gets later is no way in either.
    let later = Ipv4Addr::new(203, 0, 113, third + 3);
    must(&format!("ip address add {later}/32 dev shop{}", instance.number)).await;
    let later = SocketAddr::from((later, port));
    assert!(connects(later).await);
    assert!(!guest.reaches(later).await);
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

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_reaches_what_is_behind_the_host_but_no_private_range_there() {
    let Some(instance) = instance().await else { return };
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
    let all: Vec<_> = reachable.iter().chain(&private).chain([&opened]).copied().collect();
    let internet = Internet::with(&instance, &all).await;
    let port = internet.port;
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
    let via = format!("198.51.100.{}", instance.number % 250);
    let (done, text) =
        internet.run(&format!("ip route add {own}/32 via {via} dev eth0 onlink")).await;
    assert!(done, "{text}");
    let (listening, _guest_server) = listen_in(&namespace, (own, 0)).await;
    assert!(connects(listening).await);
    let connect = format!("exec 3<>/dev/tcp/{own}/{}", listening.port());
    assert!(!internet.run(&format!("timeout 1 bash -c '{connect}'")).await.0);

    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_door_a_guest_with_the_internet_reaches_the_ports_that_were_named() {
    let Some(instance) = instance().await else { return };
    // Any two that are free: the address is this instance's alone.
    let first = instance.networks_within(with_door(1, 65_535), vec![]).await;
    let (open, _one) = listen((first.door(), 0)).await;
    let (shut, _two) = listen((first.door(), 0)).await;
    drop(first);
    let networks = instance.networks_within(with_door(open.port(), open.port()), vec![]).await;
    let one = networks.prepare(1).await.unwrap();
    let guest = Guest::start(&one).await;
    assert!(guest.reaches(open).await);
    assert!(!guest.reaches(shut).await);
    assert_eq!(networks.slot_of(one.host_address()), Some(1));
    assert_eq!(networks.slot_of(networks.door()), None);
    let none = Policy { egress: Egress::None, ..Policy::default() };
    one.gate().set_policy(&none).await.unwrap();
    assert!(!guest.reaches(open).await);
    drop(guest);
    one.remove().await.unwrap();
    networks.close().await.unwrap();
    let (_, links) = shell("ip -brief link").await;
    assert!(!links.contains(&format!("atdoor{}@", instance.number)), "{links}");
}

fn with_door(first: u16, last: u16) -> HostPolicy {
    HostPolicy { door: Some(Door { ports: first..=last, suffix: None }), ..HostPolicy::default() }
}
