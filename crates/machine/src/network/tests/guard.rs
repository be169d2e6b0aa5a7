//! The host's rules, when somebody takes them away.

use std::time::Instant;

use super::{
    super::*,
    harness::{Guest, Internet, instance, must, shell},
};

#[tokio::test(flavor = "multi_thread")]
async fn rules_that_somebody_removed_or_changed_are_put_back() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let table = networks.instance.table();
    let list = format!("nft list table inet {table}");
    let (_, before) = shell(&list).await;
    for harm in [
        format!("nft delete table inet {table}"),
        format!("nft flush chain inet {table} outgoing"),
        format!("nft insert rule inet {table} forward accept"),
    ] {
        must(&harm).await;
        let start = Instant::now();
        while shell(&list).await != (true, before.clone()) {
            assert!(start.elapsed() < Duration::from_secs(30), "{harm}");
        }
    }
    networks.close().await.unwrap();
    // What was closed on purpose stays away.
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(!shell(&list).await.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_hosts_rules_are_missing_closed_ranges_stay_closed() {
    let Some(instance) = instance().await else { return };
    let [closed] = instance.addresses_in([10, 251, 1]);
    let internet = Internet::with(&instance, &[closed]).await;
    let networks = instance.networks(&[], vec![]).await;
    let namespace = networks.prepare(0).await.unwrap();
    let guest = Guest::start(&namespace).await;
    networks.guard.stop().await;
    // Without anything that forbids, and with the way back.
    let range = "100.64.0.0/10";
    must(&format!(
        "nft 'flush table inet {table}; add rule inet {table} postrouting ip saddr {range} masquerade'",
        table = networks.instance.table()
    ))
    .await;
    internet.watch(closed).await;
    assert!(!guest.reaches((closed, internet.port)).await);
    assert_eq!(internet.seen().await, 0);
    guest.stop().await;
    namespace.remove().await.unwrap();
    networks.close().await.unwrap();
    internet.remove().await;
}
