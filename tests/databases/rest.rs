//! Databases at rest, and what wakes them.

use std::time::Duration;

use api::{CreateDatabase, DatabaseId, DatabaseStatus, UpdateDatabase};
use client::{Client, Method};
use futures::future::join_all;
use tests::{Answer, Host, Options, Server, pause, sql, until};
use time::OffsetDateTime;

use super::{SOON, asleep, listed, made};

async fn made_with(client: &Client, idle_seconds: u64) -> (DatabaseId, String) {
    let request = CreateDatabase { idle_seconds: Some(idle_seconds), ..CreateDatabase::default() };
    let database = made(client, &request).await;
    (database.id, database.connection.unwrap().connection_url)
}

async fn hibernates(client: &Client, id: &DatabaseId) {
    until("it hibernates", SOON, async || {
        (listed(client, id).await == DatabaseStatus::Hibernated).then_some(())
    })
    .await;
}

pub(super) async fn an_unused_database_hibernates_and_a_connection_wakes_it(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let idle = Duration::from_secs(3);
    let (id, url) = made_with(client, idle.as_secs()).await;
    sql(&url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    hibernates(client, &id).await;
    assert_eq!(sql(&url, "SELECT x FROM kept").await, "7");
    hibernates(client, &id).await;
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
    // It would hibernate meanwhile.
    pause(idle * 3).await;
    assert_eq!(listed(client, &id).await, DatabaseStatus::Running);
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

pub(super) async fn whoever_is_connected_keeps_a_database_awake_until_they_go(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let idle = Duration::from_secs(3);
    let (id, url) = made_with(client, idle.as_secs()).await;
    // Nothing but the connection tells that its client is there.
    let mut sleeping = asleep(&format!("{url}?sslmode=disable")).await;
    pause(idle * 3).await;
    assert_eq!(listed(client, &id).await, DatabaseStatus::Running);
    sleeping.kill().await.unwrap();
    hibernates(client, &id).await;
    client.delete_database(&id).await.unwrap();
}

pub(super) async fn a_connection_at_any_moment_of_going_to_sleep_is_answered(host: Host) {
    /// A clock that stood still meanwhile is further off.
    const CLOCK_SECONDS: i64 = 2;
    // A backup would keep it awake now and then.
    let environment = vec![("ATOLL_DATABASES_BACKUPS", "none".to_owned())];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let client = server.client();
    let (id, url) = made_with(client, 1).await;
    sql(&url, "CREATE TABLE kept AS SELECT 7 AS x").await;
    // It begins to sleep after one to two seconds.
    for wait in (600..=2400).step_by(200).map(Duration::from_millis) {
        pause(wait).await;
        assert_eq!(sql(&url, "SELECT x FROM kept").await, "7", "{wait:?}");
    }
    hibernates(client, &id).await;
    let all = join_all((0..40).map(|_| sql(&url, "SELECT x FROM kept"))).await;
    assert_eq!(all, ["7"; 40]);

    hibernates(client, &id).await;
    pause(Duration::from_secs(2) + Duration::from_secs(CLOCK_SECONDS.unsigned_abs())).await;
    assert_eq!(listed(client, &id).await, DatabaseStatus::Hibernated);
    let before = OffsetDateTime::now_utc().unix_timestamp();
    let told: i64 = sql(&url, "SELECT floor(extract(epoch FROM clock_timestamp()))::bigint")
        .await
        .parse()
        .unwrap();
    let after = OffsetDateTime::now_utc().unix_timestamp();
    let right = before - CLOCK_SECONDS..=after + CLOCK_SECONDS;
    assert!(right.contains(&told), "{told} is not in {right:?}");
    host.end(server).await;
}
