//! Names, asked of the gateway.

use std::sync::atomic::Ordering;

use super::{
    super::*,
    harness::{Guest, fake_resolver, instance, look_up},
};

#[tokio::test(flavor = "multi_thread")]
async fn the_gateway_resolves_before_and_after_the_server_restarts() {
    let Some(instance) = instance().await else { return };
    let (resolver, _, _resolver) = fake_resolver().await;
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
    let nobody: SocketAddr = (Ipv4Addr::LOCALHOST, 1).into();
    let networks = instance.networks(&[], vec![nobody]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let (_, text) = guest.run(&look_up("udp")).await;
    assert!(text.starts_with("code 2"), "{text}");
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_without_egress_is_refused_and_nobody_is_asked() {
    let Some(instance) = instance().await else { return };
    let (resolver, asked, _resolver) = fake_resolver().await;
    let networks = instance.networks(&[], vec![resolver]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    let none = Policy { egress: Egress::None, ..Policy::default() };
    for (policy, code, queries) in [(&none, 5, 0), (&Policy::default(), 0, 2), (&none, 5, 2)] {
        namespace.gate().set_policy(policy).await.unwrap();
        for transport in ["udp", "tcp"] {
            let (_, text) = guest.run(&look_up(transport)).await;
            assert!(text.starts_with(&format!("code {code} ")), "{transport}: {text}");
        }
        assert_eq!(asked.load(Ordering::Relaxed), queries);
    }
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_floods_the_gateway_with_queries_costs_only_itself() {
    let Some(instance) = instance().await else { return };
    let (resolver, asked, _resolver) = fake_resolver().await;
    let networks = instance.networks(&[], vec![resolver]).await;
    let (flooding, quiet) =
        (networks.prepare(0).await.unwrap(), networks.prepare(1).await.unwrap());
    let (guest, neighbour) = (Guest::start(&flooding).await, Guest::start(&quiet).await);
    let socket = guest.udp().await;
    let mut query = b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x01\0\x01".to_vec();
    let start = std::time::Instant::now();
    for number in 0..20_000_u16 {
        query[..2].copy_from_slice(&number.to_be_bytes());
        // Its own queue may be full.
        let _ = socket.send_to(&query, (GATEWAY, 53)).await;
    }
    let (_, text) = neighbour.run(&look_up("udp")).await;
    assert_eq!(text.trim(), "code 0 address 203 0 113 77");
    // The neighbour's one, a burst, and the rate.
    let most = 1 + 200 + 100 * (start.elapsed().as_secs() + 1);
    let count = asked.load(Ordering::Relaxed);
    assert!(count > 1 && u64::try_from(count).unwrap() <= most, "{count} of at most {most}");
    neighbour.stop().await;
    guest.stop().await;
    flooding.remove().await.unwrap();
    quiet.remove().await.unwrap();
    networks.close().await.unwrap();
}
