//! Snapshots and forks.

use std::fs;

use api::{CreateSnapshot, Fork, ForkTree};
use tests::{Host, from, patterned};

use super::{Fault, Victim, faults_of};

pub(super) async fn a_snapshot_is_whole_or_not_at_all_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("snapshot") {
        victim.arm(&point, fault).await;
        let request = CreateSnapshot::default();
        let taken = victim.server.client().create_snapshot(&victim.witness, &request).await;
        assert!(taken.is_err(), "{point}: {taken:?}");
        victim.is_over(&point, fault).await;
        // It ticks: nothing was left frozen.
        victim.is_sound(&point).await;
        let client = victim.server.client();
        let listed = client.snapshots(None).await.unwrap();
        let stored = fs::read_dir(victim.server.data().join("snapshots")).unwrap().count();
        assert_eq!(stored, listed.len(), "{point}");
        assert!(listed.is_empty() || point == "snapshot.row_inserted", "{point}: {listed:?}");
        for snapshot in listed {
            let restored = victim.server.create(&from(&snapshot.id)).await.id;
            let kept = client.read_file(&restored, "/srv/kept").await.unwrap();
            assert!(kept.bytes().await.unwrap() == patterned(100_000), "{point}");
            client.delete_sandbox(&restored).await.unwrap();
            client.delete_snapshot(&snapshot.id).await.unwrap();
        }
    }
    host.end(victim.server).await;
}

pub(super) async fn a_fork_leaves_nothing_but_children_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(3).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("fork") {
        victim.arm(&point, fault).await;
        let forked = victim.server.client().fork(&victim.witness, &Fork::default()).await;
        assert!(forked.is_err(), "{point}: {forked:?}");
        victim.is_over(&point, fault).await;
        // What had come so far that it runs may as well be listed. Nothing lies among what is being made any longer.
        victim.is_sound(&point).await;
        assert!(victim.server.client().snapshots(None).await.unwrap().is_empty(), "{point}");
        victim.delete_others(&point).await;
    }
    let point = "snapshot.row_inserted";
    victim.arm(point, Fault::Kill).await;
    let tree = ForkTree { count: 2, metadata: None };
    victim.server.client().fork_tree(&victim.witness, &tree).await.unwrap_err();
    victim.is_over(point, Fault::Kill).await;
    victim.is_sound(point).await;
    assert!(victim.server.client().snapshots(None).await.unwrap().is_empty(), "of no child");
    assert_eq!(fs::read_dir(victim.server.data().join("snapshots")).unwrap().count(), 0);
    host.end(victim.server).await;
}
