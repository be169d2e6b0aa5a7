//! Real namespaces, rules and packets, hence root. A guest is a second namespace whose own tap is joined
//! to the machine's by copying frames. Nothing leaves this host.

mod guard;
mod harness;
mod hostile;
mod names;
mod policy;
mod reach;

use std::time::Instant;

use self::harness::{Guest, instance, must, shell};
use super::*;

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

/// Not a claim but a measurement: `cargo test -p machine -- --ignored --nocapture how_long`.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
#[expect(clippy::print_stderr, reason = "its result is for a person")]
async fn how_long_preparing_and_removing_take() {
    let Some(instance) = instance().await else { return };
    let networks = instance.networks(&[], vec![]).await;
    let (mut prepare, mut change, mut remove) = (Vec::new(), Vec::new(), Vec::new());
    let policy = Policy { egress: Egress::None, ..Policy::default() };
    for slot in 0..40 {
        let start = Instant::now();
        let namespace = networks.prepare(slot).await.unwrap();
        prepare.push(start.elapsed());
        let start = Instant::now();
        namespace.gate().set_policy(&policy).await.unwrap();
        change.push(start.elapsed());
        let start = Instant::now();
        namespace.remove().await.unwrap();
        remove.push(start.elapsed());
    }
    for (name, mut times) in
        [("prepare", prepare), ("change of policy", change), ("remove", remove)]
    {
        times.sort_unstable();
        eprintln!("{name}: median {:?}, p95 {:?}, max {:?}", times[20], times[37], times[39]);
    }
    networks.close().await.unwrap();
}
