//! The server with its rows in PostgreSQL: the same as with SQLite, also when the database goes away.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateKey, CreateSandbox, SandboxStatus};
use client::SandboxFilter;
use tests::{End, Host, Options, Postgres, Server, command, small, suite, until};

suite! {
    sandboxes_and_keys_outlive_the_server,
    a_database_that_goes_away_is_waited_for;
    soak:
}

async fn server_over(postgres: &Postgres) -> Server {
    let arguments = vec!["--database".to_owned(), postgres.url()];
    Server::start_with(Options { arguments, ..Options::default() }).await
}

async fn sandboxes_and_keys_outlive_the_server(host: Host) {
    let postgres = Postgres::start().await;
    let mut server = server_over(&postgres).await;
    let _room = host.room(1).await;
    let metadata = BTreeMap::from([("é'\"\\".to_owned(), "日本語 \u{1f600}".to_owned())]);
    let env = BTreeMap::from([("TOKEN".to_owned(), "$x 'y'\n".to_owned())]);
    let request = CreateSandbox { metadata: Some(metadata.clone()), env: Some(env), ..small() };
    let before = server.create(&request).await;
    let key = server.client().create_key(&CreateKey::default()).await.unwrap();
    server.restart(End::Killed).await;
    let client = server.client_with(Some(&key.token));
    let after = client.sandbox(&before.id).await.unwrap();
    assert_eq!((after.status, &after.metadata), (SandboxStatus::Running, &metadata));
    assert_eq!(
        (after.created_at, after.expires_at, after.ttl_seconds),
        (before.created_at, before.expires_at, before.ttl_seconds)
    );
    let shown = client.exec(&before.id, &command("printf %s \"$TOKEN\"")).await.unwrap();
    assert_eq!(shown.stdout, "$x 'y'\n");
    client.revoke_key(&key.key.prefix).await.unwrap();
    assert_eq!(client.me().await.unwrap_err().status(), Some(401));
    assert!(!server.data().join("atoll.sqlite").exists(), "there are rows in one place only");
    host.end(server).await;
}

async fn a_database_that_goes_away_is_waited_for(host: Host) {
    let mut postgres = Postgres::start().await;
    let server = server_over(&postgres).await;
    let _room = host.room(2).await;
    let kept = server.create(&small()).await;
    postgres.end().await;
    // What needs no row goes on: the key is known, the guest is there.
    let shown = server.client().exec(&kept.id, &command("echo alive")).await.unwrap();
    assert_eq!(shown.stdout, "alive\n");
    let refused = server.client().create_sandbox(&small()).await.unwrap_err();
    assert!(refused.status().is_some_and(|status| status >= 500), "{refused:?}");
    postgres.start_again().await;
    let made = until("a create works again", Duration::from_secs(60), async || {
        server.client().create_sandbox(&small()).await.ok()
    })
    .await;
    assert_eq!(server.client().sandboxes(&SandboxFilter::default()).await.unwrap().len(), 2);
    server.client().delete_sandbox(&made.id).await.unwrap();
    host.end(server).await;
}
