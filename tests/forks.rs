//! Forks: children of one instant of a sandbox, apart from then on.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use api::{
    CreateSandbox, CreateVolume, ErrorCode, Fork, ForkTree, Promote, SandboxId, SandboxStatus,
    UpdateLifecycle, VolumeMount,
};
use client::Method;
use rustix::process::{Signal, kill_process};
use serde_json::json;
use tests::{Answer, Held, Host, command, small, suite, until};

suite! {
    a_fork_is_its_parent_at_one_instant,
    a_fork_of_what_rests_leaves_it_at_rest,
    a_tree_ends_with_its_winner,
    a_tree_that_nobody_promotes_leaves_nothing,
    a_fork_that_cannot_be_is_refused,
    a_fork_of_what_has_just_died_is_refused_with_the_reason,
    a_promoted_child_keeps_the_time_to_live_that_it_was_given;
    soak: sixteen_children_start_from_one_instant,
}

fn metadata(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

async fn a_fork_is_its_parent_at_one_instant(host: Host) {
    let _room = host.room(3).await;
    let server = host.server().await;
    let client = server.client();
    let volume = CreateVolume {
        name: "the-parents".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    client.create_volume(&volume).await.unwrap();
    let mount = VolumeMount { name: "the-parents".to_owned(), read_only: false, mount_path: None };
    let parent = server
        .sandbox(&CreateSandbox {
            metadata: Some(metadata(&[("job", "7"), ("role", "parent")])),
            env: Some(metadata(&[("GIVEN", "at create")])),
            ttl_seconds: Some(1234),
            volumes: Some(vec![mount]),
            ..small()
        })
        .await;
    let held = parent.hold().await;
    let fork = Fork { metadata: Some(metadata(&[("role", "child")])), count: Some(2) };
    let forked = client.fork(&parent.id, &fork).await.unwrap();
    assert_eq!(forked.children.len(), 2);
    assert_eq!(forked.sandbox.id, forked.children[0].id);
    for child in &forked.children {
        assert_eq!((child.status, child.ttl_seconds), (SandboxStatus::Running, Some(1234)));
        assert_eq!((&*child.metadata["job"], &*child.metadata["role"]), ("7", "child"));
        assert!(child.volumes.is_empty(), "{child:?}");
        assert_eq!(Held::of(client, &child.id).await.unwrap(), held);
        let change =
            "echo $GIVEN; mountpoint -q /mnt/the-parents || echo apart; echo child > /root/held";
        let said = client.exec(&child.id, &command(change)).await.unwrap();
        assert_eq!(said.stdout, "at create\napart\n");
    }
    assert_eq!(parent.held().await, held);
    assert_eq!(parent.run("mountpoint -q /mnt/the-parents && echo still").await, "still\n");
    assert!(client.snapshots(Some(&parent.id)).await.unwrap().is_empty(), "none is left over");
    for child in &forked.children {
        client.delete_sandbox(&child.id).await.unwrap();
    }
    parent.delete().await;
    client.delete_volume(&volume.name).await.unwrap();
}

async fn a_fork_of_what_rests_leaves_it_at_rest(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&small()).await;
    let held = parent.hold().await;
    for status in [SandboxStatus::Paused, SandboxStatus::Hibernated] {
        if status == SandboxStatus::Paused {
            client.pause(&parent.id).await.unwrap();
        } else {
            client.hibernate(&parent.id).await.unwrap();
        }
        let child = client.fork(&parent.id, &Fork::default()).await.unwrap().sandbox;
        assert_eq!(Held::of(client, &child.id).await.unwrap(), held);
        client.delete_sandbox(&child.id).await.unwrap();
        assert_eq!(client.sandbox(&parent.id).await.unwrap().status, status);
    }
}

async fn a_tree_ends_with_its_winner(host: Host) {
    let _room = host.room(3).await;
    let server = host.server().await;
    let client = server.client();
    let request = CreateSandbox { metadata: Some(metadata(&[("job", "8")])), ..small() };
    let parent = server.sandbox(&request).await;
    let added = metadata(&[("explore", "1"), ("explore_ttl", "600")]);
    let tree = ForkTree { count: 3, metadata: Some(added) };
    let tree = client.fork_tree(&parent.id, &tree).await.unwrap();
    assert_eq!((tree.parent_id, tree.children.len()), (parent.id, 3));
    let mut drawn = BTreeSet::new();
    for child in &tree.children {
        assert_eq!(child.ttl_seconds, Some(600));
        assert_eq!((&*child.metadata["job"], &*child.metadata["explore"]), ("8", "1"));
        assert_eq!(child.metadata["fork_tree_id"], tree.tree_id);
        let said = client.exec(&child.id, &command("cat /proc/sys/kernel/random/uuid")).await;
        drawn.insert(said.unwrap().stdout);
    }
    assert_eq!(drawn.len(), 3);
    let winner = tree.children[1].id;
    let promote = Promote { cleanup_siblings: Some(true), tree_id: None };
    let promoted = client.promote(&winner, &promote).await.unwrap();
    let losers: BTreeSet<SandboxId> = [tree.children[0].id, tree.children[2].id].into();
    assert_eq!((promoted.winner, promoted.tree_id), (winner, Some(tree.tree_id)));
    assert_eq!(promoted.deleted.into_iter().collect::<BTreeSet<_>>(), losers);
    assert!(promoted.failures.is_empty(), "{:?}", promoted.failures);
    for loser in &losers {
        assert_eq!(client.sandbox(loser).await.unwrap_err().status(), Some(404));
    }
    let shown = client.sandbox(&winner).await.unwrap();
    assert!(!shown.metadata.contains_key("fork_tree_id"), "{shown:?}");
    assert_ne!(shown.ttl_seconds, Some(600), "what bounded the search does not end its result");
    let said = client.exec(&winner, &command("echo works")).await.unwrap();
    assert_eq!(said.stdout, "works\n");
    assert_eq!(client.snapshot(&tree.snapshot_id).await.unwrap_err().status(), Some(404));
    // Nor was the parent touched.
    assert_eq!(parent.run("echo works").await, "works\n");
    client.delete_sandbox(&winner).await.unwrap();
}

async fn a_tree_that_nobody_promotes_leaves_nothing(host: Host) {
    let _room = host.room(3).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&small()).await;
    let tree = client.fork_tree(&parent.id, &ForkTree { count: 2, metadata: None }).await.unwrap();
    parent.delete().await;
    for child in &tree.children {
        assert_eq!(child.ttl_seconds, Some(3600), "the parent's");
        let said = client.exec(&child.id, &command("echo works")).await.unwrap();
        assert_eq!(said.stdout, "works\n", "whatever became of the parent");
        client.delete_sandbox(&child.id).await.unwrap();
    }
    until("its snapshot is gone", Duration::from_secs(20), async || {
        let gone = client.snapshot(&tree.snapshot_id).await.err()?;
        (gone.status() == Some(404)).then_some(())
    })
    .await;
}

async fn a_fork_that_cannot_be_is_refused(host: Host) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    for (route, body) in [
        ("/fork-tree", json!({"count": 0})),
        ("/fork-tree", json!({"count": 17})),
        ("/fork-tree", json!({"count": 2, "metadata": {"explore_ttl": "soon"}})),
        ("/fork-tree", json!({"count": 2, "metadata": {"explore_ttl": "0"}})),
        ("/fork", json!({"count": 0})),
        ("/fork", json!({"count": -1})),
        ("/promote", json!({"cleanup_siblings": true})),
        ("/promote", json!({"cleanup_siblings": true, "tree_id": "nope"})),
    ] {
        let refused = Answer::to(sandbox.request(Method::POST, route).json(&body)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{route} {body}");
    }
    let unknown = SandboxId::random();
    let fork = server.client().fork(&unknown, &Fork::default()).await.unwrap_err();
    assert_eq!(fork.code(), Some(ErrorCode::NotFound));
    let promote = server.client().promote(&unknown, &Promote::default()).await.unwrap_err();
    assert_eq!(promote.code(), Some(ErrorCode::NotFound));
    assert_eq!(sandbox.run("echo works").await, "works\n");
    assert!(server.client().snapshots(Some(&sandbox.id)).await.unwrap().is_empty());
}

async fn a_fork_of_what_has_just_died_is_refused_with_the_reason(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    for route in ["/fork", "/fork-tree", "/snapshots"] {
        let parent = server.sandbox(&small()).await;
        kill_process(server.machine_of(&parent.id), Signal::KILL).unwrap();
        let refused = until("it is known to be dead", Duration::from_secs(30), async || {
            let request = parent.request(Method::POST, route).json(&json!({"count": 1}));
            let answer = Answer::to(request).await;
            // Until its end is noticed.
            (answer.status != 503).then_some(answer)
        })
        .await;
        assert_eq!(refused.refusal(), (409, "conflict".to_owned()), "{route}");
        assert!(refused.text().contains("has failed"), "{route}: {}", refused.text());
        let left = server.client().snapshots(Some(&parent.id)).await.unwrap();
        assert!(left.is_empty(), "{route}: {left:?}");
        parent.delete().await;
    }
}

async fn a_promoted_child_keeps_the_time_to_live_that_it_was_given(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&small()).await;
    let added = Some(metadata(&[("explore_ttl", "900")]));
    let tree = client.fork_tree(&parent.id, &ForkTree { count: 1, metadata: added }).await.unwrap();
    let child = tree.children[0].id;
    let keep = UpdateLifecycle { persistent: Some(true), ..UpdateLifecycle::default() };
    client.update_lifecycle(&child, &keep).await.unwrap();
    client.promote(&child, &Promote::default()).await.unwrap();
    assert_eq!(client.sandbox(&child).await.unwrap().ttl_seconds, None);
    assert!(client.snapshots(Some(&parent.id)).await.unwrap().is_empty(), "of no child any more");
    client.delete_sandbox(&child).await.unwrap();
    parent.delete().await;
}

async fn sixteen_children_start_from_one_instant(host: Host) {
    let _room = host.room(3).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&small()).await;
    let held = parent.hold().await;
    let tree = client.fork_tree(&parent.id, &ForkTree { count: 16, metadata: None }).await.unwrap();
    assert_eq!(tree.children.len(), 16);
    for child in &tree.children {
        assert_eq!(Held::of(client, &child.id).await.unwrap(), held);
        client.delete_sandbox(&child.id).await.unwrap();
    }
}
