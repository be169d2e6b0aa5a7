//! Clones of databases.

use api::{CloneDatabase, DatabaseSize};
use tests::{Host, sql};

use super::{MADE, any, refused};

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
        refused(&crossed).await;
    }
    let listed = server.get("/v1/snapshots").await.text();
    assert!(!listed.contains(&id.to_string()), "{listed}");
    client.delete_database(&id).await.unwrap();
    assert_eq!(sql(cloned, "SELECT count(*) FROM kept").await, "1");
    let past = CloneDatabase {
        target_time: Some("2026-01-01T00:00:00Z".to_owned()),
        ..CloneDatabase::default()
    };
    assert_eq!(client.clone_database(&made.id, &past).await.unwrap_err().status(), Some(409));
    client.delete_database(&made.id).await.unwrap();
}

pub(super) async fn a_clone_may_have_another_size(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, source) = any(client).await;
    sql(&source.connection_url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    let larger = CloneDatabase { size: Some(DatabaseSize::FourG), ..CloneDatabase::default() };
    let begun = client.clone_database(&id, &larger).await.unwrap();
    let made = client.database_ready(&begun.id, MADE).await.unwrap();
    assert_eq!((made.size, made.memory_mb, made.cpu), (DatabaseSize::FourG, 4096, 2));
    let url = made.connection.unwrap().connection_url;
    assert_eq!(sql(&url, "SELECT x FROM kept").await, "7");
    assert_eq!(sql(&url, "SHOW max_connections").await, "500");
    for id in [made.id, id] {
        client.delete_database(&id).await.unwrap();
    }
    assert!(client.volumes().await.unwrap().is_empty());
}
