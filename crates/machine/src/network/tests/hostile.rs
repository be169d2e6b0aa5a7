//! What no honest guest would send.

use std::net::SocketAddr;

use super::{
    super::*,
    harness::{Guest, Internet, destinations, echoes_datagram, instance, shell},
};

const GUEST_MAC_BYTES: [u8; 6] = [0x52, 0x54, 0, 0xa7, 0, 2];
const GATEWAY_MAC_BYTES: [u8; 6] = [0x52, 0x54, 0, 0xa7, 0, 1];
const UDP: u8 = 17;

fn ethernet(from: [u8; 6], kind: u16, payload: &[u8]) -> Vec<u8> {
    [&GATEWAY_MAC_BYTES[..], &from, &kind.to_be_bytes(), payload].concat()
}

fn ipv4(from: Ipv4Addr, to: Ipv4Addr, protocol: u8, fragment: u16, payload: &[u8]) -> Vec<u8> {
    let length = u16::try_from(20 + payload.len()).unwrap();
    let mut header = vec![0x45, 0];
    header.extend(length.to_be_bytes());
    header.extend([0x12, 0x34]);
    header.extend(fragment.to_be_bytes());
    header.extend([64, protocol, 0, 0]);
    header.extend(from.octets());
    header.extend(to.octets());
    let sum: u32 =
        header.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    let folded = u16::try_from((folded & 0xffff) + (folded >> 16)).unwrap();
    header[10..12].copy_from_slice(&(!folded).to_be_bytes());
    [header, payload.to_vec()].concat()
}

/// To port 4444, without a checksum.
fn udp() -> Vec<u8> {
    let mut datagram = Vec::new();
    for number in [5555_u16, 4444, 12, 0] {
        datagram.extend(number.to_be_bytes());
    }
    datagram.extend(b"late");
    datagram
}

async fn seen_after(guest: &Guest, internet: &Internet, frames: Vec<Vec<u8>>) -> u64 {
    guest.send_frames(frames).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    internet.seen().await
}

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_a_guest_makes_up_do_not_leave() {
    let Some(instance) = instance().await else { return };
    let [target] = instance.addresses();
    let internet = Internet::with(&instance, &[target]).await;
    let networks = instance.networks(&[], vec![]).await;
    let (one, two) = (networks.prepare(0).await.unwrap(), networks.prepare(1).await.unwrap());
    let guest = Guest::start(&one).await;
    internet.watch(target).await;

    let packet = ipv4(GUEST, target, UDP, 0, &udp());
    let honest = ethernet(GUEST_MAC_BYTES, 0x0800, &packet);
    assert_eq!(
        seen_after(&guest, &internet, vec![honest]).await,
        1,
        "what is made up rightly leaves"
    );

    let mut frames = Vec::new();
    let others = [
        Ipv4Addr::new(10, 200, 0, 3),
        GATEWAY,
        Ipv4Addr::LOCALHOST,
        Ipv4Addr::UNSPECIFIED,
        one.host_address(),
        two.host_address(),
        one.slot.host_end(),
        Ipv4Addr::new(198, 51, 100, 1),
    ];
    for from in others {
        frames.push(ethernet(GUEST_MAC_BYTES, 0x0800, &ipv4(from, target, UDP, 0, &udp())));
    }
    // Another card, a tag of a virtual network, other kinds of frame.
    frames.push(ethernet([0x52, 0x54, 0, 0xa7, 0, 9], 0x0800, &packet));
    frames.push(ethernet(GUEST_MAC_BYTES, 0x8100, &[&[0, 5, 8, 0][..], &packet].concat()));
    frames.push(ethernet(GUEST_MAC_BYTES, 0x88cc, &packet));
    // Protocols without ports: a tunnel of IPv4, of IPv6, GRE, ESP, SCTP, and one that nobody has.
    for protocol in [4, 41, 47, 50, 132, 253] {
        let inner = if protocol == 4 { packet.clone() } else { udp() };
        frames.push(ethernet(GUEST_MAC_BYTES, 0x0800, &ipv4(GUEST, target, protocol, 0, &inner)));
    }
    // The rest of a packet whose beginning never comes.
    frames.push(ethernet(GUEST_MAC_BYTES, 0x0800, &ipv4(GUEST, target, UDP, 100, &udp())));
    // A source route that leads past the gateway.
    let mut routed = packet.clone();
    routed[0] = 0x46;
    routed.splice(20..20, [131, 4, 4, 0]);
    frames.push(ethernet(GUEST_MAC_BYTES, 0x0800, &routed));
    frames.push(ethernet(GUEST_MAC_BYTES, 0x0800, &packet[..12]));
    frames.push(vec![0; 14]);
    assert_eq!(seen_after(&guest, &internet, frames).await, 1);

    guest.stop().await;
    one.remove().await.unwrap();
    two.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_claim_of_a_guest_reaches_the_table_of_neighbours() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let arp = |operation: u8, from: Ipv4Addr, of: Ipv4Addr| {
        let mut payload = vec![0, 1, 8, 0, 6, 4, 0, operation];
        payload.extend(GUEST_MAC_BYTES);
        payload.extend(from.octets());
        payload.extend([0; 6]);
        payload.extend(of.octets());
        ethernet(GUEST_MAC_BYTES, 0x0806, &payload)
    };
    let mut frames: Vec<_> =
        (0..200).map(|last| arp(1, Ipv4Addr::new(10, 200, 0, last), GATEWAY)).collect();
    frames.push(arp(2, GATEWAY, GATEWAY));
    frames.push(arp(2, namespace.slot.host_end(), namespace.host_address()));
    frames.push(arp(1, GUEST, namespace.host_address()));
    guest.send_frames(frames).await;
    let name = namespace.slot.namespace();
    let (_, text) = shell(&format!("ip -n {name} neigh show dev tap0")).await;
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(&GUEST.to_string()) && text.contains("PERMANENT"), "{text}");
    // An honest question is answered.
    let ask = format!(
        "ip neigh flush dev tap0; exec 3<>/dev/udp/{GATEWAY}/53; echo >&3; sleep 0.3; ip neigh show dev tap0"
    );
    let (_, text) = guest.run(&format!("bash -c '{ask}'")).await;
    assert!(text.contains(GATEWAY_MAC), "{text}");
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_packet_in_pieces_is_judged_as_a_whole() {
    let Some(instance) = instance().await else { return };
    let [target] = instance.addresses();
    let internet = Internet::with(&instance, &[target]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let denied = Policy {
        deny: destinations(&[&format!("{target}:{}", internet.other_port)]),
        ..Policy::default()
    };
    namespace.gate().set_policy(&denied).await.unwrap();
    let socket = guest.udp().await;
    let at = |port| SocketAddr::from((target, port));
    assert!(echoes_datagram(&socket, at(internet.port), 5000).await);
    internet.watch(target).await;
    assert!(!echoes_datagram(&socket, at(internet.other_port), 5000).await);
    assert_eq!(internet.seen().await, 0);
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_connections_of_a_guest_are_bounded() {
    let Some(instance) = instance().await else { return };
    let [target] = instance.addresses();
    let internet = Internet::with(&instance, &[target]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let socket = guest.udp().await;
    for port in 10_000..20_000 {
        // Some get lost on the way, which is why there are so many.
        let _ = socket.send_to(b"x", (target, port)).await;
    }
    let count = format!(
        "ip netns exec {} cat /proc/sys/net/netfilter/nf_conntrack_count",
        namespace.slot.namespace()
    );
    let (_, text) = shell(&count).await;
    let count: u32 = text.trim().parse().unwrap();
    assert!((500..=2100).contains(&count), "{count}");
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}
