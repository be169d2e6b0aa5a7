//! Databases at rest, and what wakes them.

use api::{CreateDatabase, DatabaseStatus, UpdateDatabase};
use client::Method;
use tests::{Answer, Host, sql, until};

use super::{SOON, made};

pub(super) async fn an_unused_database_hibernates_and_a_connection_wakes_it(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let request = CreateDatabase { idle_seconds: Some(3), ..CreateDatabase::default() };
    let database = made(client, &request).await;
    let (id, url) = (database.id, database.connection.unwrap().connection_url);
    sql(&url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    let hibernated = async || {
        until("it hibernates", SOON, async || {
            (client.database(&id).await.unwrap().status == DatabaseStatus::Hibernated).then_some(())
        })
        .await;
    };
    hibernated().await;
    assert_eq!(sql(&url, "SELECT x FROM kept").await, "7");
    hibernated().await;
    client.wake_database(&id).await.unwrap();
    until("it runs", SOON, async || {
        (client.database(&id).await.unwrap().status == DatabaseStatus::Running).then_some(())
    })
    .await;
    let on = UpdateDatabase { always_on: Some(true), ..UpdateDatabase::default() };
    assert!(client.update_database(&id, &on).await.unwrap().always_on);
    until("it runs", SOON, async || {
        (client.database(&id).await.unwrap().status == DatabaseStatus::Running).then_some(())
    })
    .await;
    assert_eq!(sql(&url, "SELECT x FROM kept").await, "7");

    // Whatever it was made to rest by.
    for (rest, path) in [
        ("paused", format!("/v1/sandboxes/{id}/pause")),
        ("stopped", format!("/v1/machines/{id}/stop")),
    ] {
        let off = UpdateDatabase {
            always_on: Some(false),
            idle_seconds: Some(3600),
            ..UpdateDatabase::default()
        };
        client.update_database(&id, &off).await.unwrap();
        let answer = Answer::to(server.request(Method::POST, &path)).await;
        assert!(matches!(answer.status, 200 | 204), "{rest}: {}", answer.text());
        assert_eq!(client.database(&id).await.unwrap().status.to_string(), rest);
        assert_eq!(sql(&url, "SELECT x FROM kept").await, "7", "{rest}");
    }
    client.delete_database(&id).await.unwrap();
}
