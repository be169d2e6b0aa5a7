//! Clones of databases.

use api::{CloneDatabase, DatabaseSize, DatabaseStatus, SandboxStatus};
use rustix::process::{Signal, kill_process};
use tests::{Host, sql, until};

use super::{MADE, SOON, any, is_whole, refused};

pub(super) async fn a_clone_is_its_own_and_its_source_goes_on(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, source) = any(client).await;
    let url = source.connection_url.as_str();
    sql(url, "CREATE TABLE kept (x int); INSERT INTO kept SELECT generate_series(1, 1000)").await;
    let begun = client.clone_database(&id, &CloneDatabase::default()).await.unwrap();
    assert_eq!((begun.cloned_from, begun.label.as_str()), (Some(id), " (clone)"));
    let made = client.database_ready(&begun.id, MADE).await.unwrap();
    let clone = made.connection.unwrap();
    let cloned = clone.connection_url.as_str();
    assert_eq!(sql(cloned, "DELETE FROM kept WHERE x > 1; SELECT count(*) FROM kept").await, "1");
    assert_eq!(sql(url, "SELECT count(*) FROM kept").await, "1000");
    for (role, port) in [(&source, clone.port), (&clone, source.port)] {
        let crossed = format!(
            "postgresql://{}:{}@{}:{port}/{}",
            role.username, role.password, role.host, role.database
        );
        let why = refused(&crossed).await;
        assert!(why.contains("password"), "{why}");
    }
    let listed = server.get("/v1/snapshots").await.text();
    assert!(!listed.contains(&id.to_string()), "{listed}");
    client.delete_database(&id).await.unwrap();
    assert_eq!(sql(cloned, "SELECT count(*) FROM kept").await, "1");
    let past = CloneDatabase {
        target_time: Some("2026-01-01T00:00:00Z".to_owned()),
        ..CloneDatabase::default()
    };
    // Before itself it was never, whether its own backups have begun or not.
    let told = client.clone_database(&made.id, &past).await.unwrap_err().status();
    assert!(matches!(told, Some(400 | 409)), "{told:?}");
    client.delete_database(&made.id).await.unwrap();
}

pub(super) async fn a_clone_may_have_another_size(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, source) = any(client).await;
    let url = source.connection_url.as_str();
    let filled =
        "CREATE TABLE kept (x int PRIMARY KEY); INSERT INTO kept SELECT generate_series(1, 1000)";
    sql(url, filled).await;
    let larger = CloneDatabase { size: Some(DatabaseSize::FourG), ..CloneDatabase::default() };
    let cloning = async {
        let begun = client.clone_database(&id, &larger).await.unwrap();
        client.database_ready(&begun.id, MADE).await.unwrap()
    };
    let inserting = async {
        for x in 1001..=1020 {
            sql(url, &format!("INSERT INTO kept VALUES ({x})")).await;
        }
    };
    let (made, ()) = tokio::join!(cloning, inserting);
    assert_eq!((made.size, made.memory_mb, made.cpu), (DatabaseSize::FourG, 4096, 2), "{made:?}");
    let clone = made.connection.unwrap();
    let cloned = clone.connection_url.as_str();
    // All that was acknowledged before, and of the rest what came first.
    let of_an_instant = "SELECT count(*) >= 1000 AND count(*) = max(x) FROM kept";
    assert_eq!(sql(cloned, of_an_instant).await, "t");
    assert_eq!(sql(url, "SELECT count(*) FROM kept").await, "1020");
    assert_eq!(sql(cloned, "SHOW max_connections").await, "500");
    is_whole(client, &made.id).await;
    let mut roots = Vec::new();
    for id in [made.id, id] {
        roots.extend(client.machine(&id.sandbox()).await.unwrap().root_volume_id);
        client.delete_database(&id).await.unwrap();
    }
    let left = client.volumes().await.unwrap();
    assert_eq!(roots.len(), 2);
    assert!(left.iter().all(|volume| !roots.contains(&volume.id)), "{left:?}");
}

pub(super) async fn a_clone_of_a_database_at_rest_leaves_it_at_rest(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, source) = any(client).await;
    let url = source.connection_url.as_str();
    sql(url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    client.hibernate(&id.sandbox()).await.unwrap();
    until("it hibernates", SOON, async || {
        (client.database(&id).await.unwrap().status == DatabaseStatus::Hibernated).then_some(())
    })
    .await;
    let begun = client.clone_database(&id, &CloneDatabase::default()).await.unwrap();
    let made = client.database_ready(&begun.id, MADE).await.unwrap();
    let clone = made.connection.unwrap();
    assert_eq!(sql(&clone.connection_url, "SELECT x FROM kept").await, "7");
    assert_eq!(client.database(&id).await.unwrap().status, DatabaseStatus::Hibernated);
    assert_eq!(sql(url, "SELECT x FROM kept").await, "7");
    for id in [made.id, id] {
        client.delete_database(&id).await.unwrap();
    }
}

pub(super) async fn a_clone_whose_machine_dies_at_once_is_made_all_the_same(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, source) = any(client).await;
    sql(&source.connection_url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    let begun = client.clone_database(&id, &CloneDatabase::default()).await.unwrap();
    let root = until("its machine runs", SOON, async || {
        let machine = client.machine(&begun.id.sandbox()).await.ok()?;
        machine.root_volume_id.filter(|_| machine.state == SandboxStatus::Running)
    })
    .await;
    kill_process(server.machine_of_volume(&root), Signal::KILL).unwrap();
    let made = client.database_ready(&begun.id, MADE).await.unwrap();
    let clone = made.connection.expect("it is made");
    assert_eq!(sql(&clone.connection_url, "SELECT x FROM kept").await, "7");
    for id in [made.id, id] {
        client.delete_database(&id).await.unwrap();
    }
}

pub(super) async fn a_clone_is_made_though_its_source_was_renamed_or_dropped(host: Host) {
    let server = host.server().await;
    let client = server.client();
    for (change, how) in [("ALTER", "RENAME TO app"), ("DROP", "")] {
        let (id, source) = any(client).await;
        let (place, own) = source.connection_url.rsplit_once('/').unwrap();
        assert_eq!(own, source.database);
        sql(&format!("{place}/postgres"), &format!("{change} DATABASE {own} {how}")).await;
        let begun = client.clone_database(&id, &CloneDatabase::default()).await.unwrap();
        let made = client.database_ready(&begun.id, MADE).await.unwrap();
        assert_eq!(made.status, DatabaseStatus::Running, "{change}: {made:?}");
        assert_eq!(
            sql(&made.connection.unwrap().connection_url, "SELECT 1").await,
            "1",
            "{change}"
        );
        for id in [made.id, id] {
            client.delete_database(&id).await.unwrap();
        }
    }
}
