//! Databases that are made, listed and deleted, and those that cannot be.

use std::{fs, sync::Arc, time::Duration};

use api::{CloneDatabase, CreateDatabase, CreateSandbox, DatabaseId, DatabaseStatus};
use client::{Client, Method};
use serde_json::{Value, json};
use tests::{Answer, Host, Server, pause, small, sql, until};

use super::{SOON, any, made, refused};

pub(super) async fn a_database_is_made_listed_apart_and_kept_with_its_sandbox(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let label = Some("notes".to_owned());
    let request = CreateDatabase { label, ..CreateDatabase::default() };
    let database = made(client, &request).await;
    let connection = database.connection.clone().unwrap();
    let id = database.id;
    assert_eq!(client.database_connection(&id).await.unwrap(), connection);
    assert_eq!(sql(&connection.connection_url, "SELECT 6 * 7").await, "42");
    let version = sql(&connection.connection_url, "SHOW server_version_num").await;
    assert!(version.starts_with("17"), "{version}");
    let mut settings = String::new();
    for name in ["fsync", "synchronous_commit", "data_checksums", "server_encoding"] {
        settings += &sql(&connection.connection_url, &format!("SHOW {name}")).await;
    }
    assert_eq!(settings, "ononon UTF8".replace(' ', ""));
    sql(&connection.connection_url, "CREATE EXTENSION vector").await;

    let listed = client.databases().await.unwrap();
    let mine = listed.iter().find(|other| other.id == id).unwrap();
    assert_eq!((mine.label.as_str(), &mine.connection), ("notes", &None));
    let text = server.get("/v1/databases").await.text();
    assert!(!text.contains(&connection.password));
    let metrics = server.get("/metrics").await.text();
    let is_told = metrics.lines().any(|line| line.starts_with("atoll_database_disk_bytes"));
    assert!(is_told, "{metrics}");
    let path = format!("/v1/sandboxes/{}", id.sandbox());
    for list in ["/v1/sandboxes", "/v1/machines", "/v1/volumes"] {
        assert!(!server.get(list).await.text().contains(&id.to_string()), "{list}");
    }
    // Nor can its disk be made longer behind it by whoever knows its id.
    let shown = server.get(&format!("/v1/machines/{id}")).await.json();
    let root = shown["root_volume_id"].as_str().unwrap();
    let larger = server.request(Method::PATCH, &format!("/v1/volumes/{root}"));
    let told = Answer::to(larger.json(&json!({"size_mb": 4096}))).await;
    assert_eq!(told.refusal(), (409, "conflict".to_owned()));
    assert_eq!(server.get(&format!("/v1/volumes/{root}")).await.json()["size_mb"], 2048);
    for (method, path, body) in [
        (Method::DELETE, path.clone(), json!({})),
        (Method::DELETE, format!("/v1/machines/{id}"), json!({})),
        (Method::PATCH, format!("{path}/lifecycle"), json!({"ttl_seconds": 1})),
        (Method::PATCH, format!("{path}/network"), json!({"deny": []})),
        (Method::POST, format!("/v1/databases/{id}/failover"), json!({})),
    ] {
        let request = server.request(method, &path).json(&body);
        assert_eq!(Answer::to(request).await.refusal(), (409, "conflict".to_owned()), "{path}");
    }

    // One key more, one password less.
    let key = json!({"label": "reader", "scope": "read"});
    let key = Answer::to(server.request(Method::POST, "/v1/me/tokens").json(&key)).await.json();
    let reader = server.client_with(key["token"].as_str());
    let seen = reader.database(&id).await.unwrap();
    assert_eq!((seen.status, seen.connection), (DatabaseStatus::Running, None));
    assert_eq!(reader.database_connection(&id).await.unwrap_err().status(), Some(403));

    client.delete_database(&id).await.unwrap();
    assert_eq!(client.database(&id).await.unwrap_err().status(), Some(404));
    assert_eq!(server.get(&path).await.refusal(), (404, "not_found".to_owned()));
    refused(&connection.connection_url).await;
}

pub(super) async fn a_database_that_cannot_be_is_refused(host: Host) {
    let server = host.server().await;
    let ask = async |body: Value| {
        Answer::to(server.request(Method::POST, "/v1/databases").json(&body)).await.refusal()
    };
    for body in [
        json!({"size": "2g"}),
        json!({"memory_mb": 100_000}),
        json!({"memory_mb": 0}),
        json!({"cpu": 0}),
        json!({"idle_seconds": 0}),
        json!({"label": "x".repeat(300)}),
    ] {
        assert_eq!(ask(body.clone()).await, (400, "invalid_request".to_owned()), "{body}");
    }
    for unknown in ["00000000-0000-4000-8000-000000000000", "not-an-id", "..%2f.."] {
        for (method, route) in [
            (Method::GET, ""),
            (Method::DELETE, ""),
            (Method::PATCH, ""),
            (Method::GET, "/connection"),
            (Method::POST, "/wake"),
            (Method::POST, "/clone"),
            (Method::POST, "/reset-credentials"),
            (Method::POST, "/failover"),
        ] {
            let path = format!("/v1/databases/{unknown}{route}");
            let answer = Answer::to(server.request(method, &path)).await;
            assert_eq!(answer.refusal(), (404, "not_found".to_owned()), "{path}");
        }
    }
    let request = CreateSandbox { databases: Some(vec!["not-an-id".to_owned()]), ..small() };
    assert_eq!(server.client().create_sandbox(&request).await.unwrap_err().status(), Some(404));
}

/// Whatever of it is under way, which may take longer than an answer.
async fn delete(client: &Client, id: &DatabaseId) {
    until("it is deleted", SOON, async || {
        let Err(error) = client.delete_database(id).await else { return Some(()) };
        assert!(matches!(error.status(), Some(404 | 503)), "{error}");
        (error.status() == Some(404)).then_some(())
    })
    .await;
}

pub(super) async fn a_database_may_be_deleted_at_any_moment_of_its_making(host: Host) {
    let server = Server::start().await;
    let client = server.client();
    let (source, connection) = any(client).await;
    sql(&connection.connection_url, "CREATE TABLE kept AS SELECT 7 AS x").await;
    for wait in [0, 200, 600, 1500].map(Duration::from_millis) {
        let half = client.create_database(&CreateDatabase::default()).await.unwrap();
        pause(wait).await;
        delete(client, &half.id).await;
        let half = client.clone_database(&source, &CloneDatabase::default()).await.unwrap();
        pause(wait).await;
        delete(client, &half.id).await;
        assert_eq!(sql(&connection.connection_url, "SELECT x FROM kept").await, "7", "{wait:?}");
    }
    let root = client.machine(&source.sandbox()).await.unwrap().root_volume_id.unwrap();
    let below = |directory: &str| -> Vec<_> {
        let entries = fs::read_dir(server.data().join(directory)).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    until("nothing of them is left", SOON, async || {
        let is_so = below("volumes") == [root.to_string()] && below("snapshots").is_empty();
        is_so.then_some(())
    })
    .await;
    let left = client.databases().await.unwrap();
    assert_eq!(left.iter().map(|database| database.id).collect::<Vec<_>>(), [source]);
    host.end(server).await;
}

pub(super) async fn fifty_databases_leave_nothing_over(host: Host) {
    let server: Arc<Server> = host.server().await;
    for _ in 0..50 {
        let (id, connection) = any(server.client()).await;
        assert_eq!(sql(&connection.connection_url, "SELECT 1").await, "1");
        server.client().delete_database(&id).await.unwrap();
    }
    assert_eq!(server.client().databases().await.unwrap(), []);
}
