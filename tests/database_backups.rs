//! Backups of databases: made, gone back to, kept from a store that is away, removed with their database.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{fs, net::Ipv4Addr, path::Path, time::Duration};

use api::{CloneDatabase, CreateDatabase, Database, DatabaseId, DatabaseStatus};
use client::Client;
use tests::{
    End, Host, ObjectStorage, Options, Server, clock_of, command, pause, sql, suite, until,
};

suite! {
    a_database_is_made_as_another_was_between_two_commits,
    after_a_gap_in_the_log_a_new_base_backup_follows,
    backups_go_to_an_object_storage_and_come_back,
    a_store_that_is_away_is_told_of_and_the_database_goes_on;
    soak:
}

/// A template that was never used on this host is made first.
const MADE: Duration = Duration::from_secs(280);
/// Of a guest under emulation on a host that has more to do.
const SOON: Duration = Duration::from_secs(200);

/// Soon done with its backups: what is told when nobody is connected is told within seconds.
async fn made(client: &Client) -> (DatabaseId, String) {
    let request = CreateDatabase { idle_seconds: Some(6), ..CreateDatabase::default() };
    let begun = client.create_database(&request).await.unwrap();
    ready(client, &begun.id).await
}

async fn ready(client: &Client, id: &DatabaseId) -> (DatabaseId, String) {
    let database = client.database_ready(id, MADE).await.unwrap();
    assert_eq!(database.status, DatabaseStatus::Running, "{database:?}");
    (database.id, database.connection.unwrap().connection_url)
}

async fn when(client: &Client, id: &DatabaseId, what: &str, is: impl Fn(&Database) -> bool) {
    until(what, SOON, async || {
        let database = client.database(id).await.unwrap();
        is(&database).then_some(())
    })
    .await;
}

/// One commit, a time, another commit.
async fn two_commits(client: &Client, id: &DatabaseId, url: &str) -> String {
    sql(url, "CREATE TABLE ledger (entry text)").await;
    when(client, id, "the first backup", |database| database.last_backup_at.is_some()).await;
    sql(url, "INSERT INTO ledger VALUES ('before')").await;
    let between = clock_of(url).await;
    sql(url, "INSERT INTO ledger VALUES ('after')").await;
    between
}

const LEDGER: &str = "SELECT string_agg(entry, ' ' ORDER BY entry DESC) FROM ledger";

async fn as_of(client: &Client, id: &DatabaseId, time: &str) -> (DatabaseId, String) {
    let request = CloneDatabase { target_time: Some(time.to_owned()), ..CloneDatabase::default() };
    let begun = client.clone_database(id, &request).await.unwrap();
    assert_eq!((begun.status, begun.cloned_from), (DatabaseStatus::Provisioning, Some(*id)));
    ready(client, &begun.id).await
}

async fn refusal(client: &Client, id: &DatabaseId, time: &str) -> Option<u16> {
    let request = CloneDatabase { target_time: Some(time.to_owned()), ..CloneDatabase::default() };
    client.clone_database(id, &request).await.unwrap_err().status()
}

fn below(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

async fn a_database_is_made_as_another_was_between_two_commits(host: Host) {
    let mut server = Server::start().await;
    let client = server.client().clone();
    let (id, url) = made(&client).await;
    let between = two_commits(&client, &id, &url).await;
    for (time, status) in
        [("1999-12-31T00:00:00Z", 400), ("2999-12-31T00:00:00Z", 400), ("yesterday", 400)]
    {
        assert_eq!(refusal(&client, &id, time).await, Some(status), "{time}");
    }
    let (then, then_url) = as_of(&client, &id, &between).await;
    assert_eq!(sql(&then_url, LEDGER).await, "before");
    assert_eq!(sql(&url, LEDGER).await, "before after");
    assert_ne!(then_url.split('@').next(), url.split('@').next());
    let names = sql(&then_url, "SELECT count(*) FROM pg_roles WHERE rolname LIKE 'u\\_%'").await;
    assert_eq!(names, "1", "the source's role is there no longer");

    // What is asleep, and in a server that was started anew, is in the store to its last commit.
    when(&client, &id, "it hibernates", |one| one.status == DatabaseStatus::Hibernated).await;
    server.restart(End::Killed).await;
    let client = server.client().clone();
    // The server may have died before it had written that down: then it does so again.
    when(&client, &id, "it hibernates", |one| one.status == DatabaseStatus::Hibernated).await;
    let slept = client.database(&id).await.unwrap();
    let until = slept.restorable_until.unwrap();
    assert!(slept.last_backup_at.unwrap() <= until && slept.restorable_from.unwrap() < until);

    // A clone is backed up by itself, and its source may go.
    sql(&then_url, "INSERT INTO ledger VALUES ('again')").await;
    when(&client, &then, "the clone's backup", |clone| clone.last_backup_at.is_some()).await;
    let store = server.data().join("database-backups");
    assert!(below(&store).contains(&id.to_string()));
    client.delete_database(&id).await.unwrap();
    tests::until("its backups go", SOON, async || {
        (!below(&store).contains(&id.to_string())).then_some(())
    })
    .await;
    assert_eq!(sql(&then_url, LEDGER).await, "before again");
    client.delete_database(&then).await.unwrap();
    tests::until("no backups are left", SOON, async || below(&store).is_empty().then_some(()))
        .await;
    host.end(server).await;
}

async fn after_a_gap_in_the_log_a_new_base_backup_follows(host: Host) {
    let server = Server::start().await;
    let client = server.client();
    let (id, url) = made(client).await;
    sql(&url, "CREATE TABLE ledger (entry text)").await;
    when(client, &id, "the first backup", |database| database.last_backup_at.is_some()).await;
    let first = client.database(&id).await.unwrap().last_backup_at;
    let lost = clock_of(&url).await;
    // As when PostgreSQL has thrown away what nobody fetched for too long.
    let drop_slot = "setpriv --reuid=postgres --regid=postgres --init-groups \
                     /usr/lib/postgresql/17/bin/psql -h /run/postgresql -U postgres -Xqc \"SELECT pg_drop_replication_slot('atoll')\" 2>&1";
    let dropped = client.exec(&id.sandbox(), &command(drop_slot)).await.unwrap();
    assert_eq!(dropped.exit_code, 0, "{dropped:?}");
    sql(&url, "INSERT INTO ledger VALUES ('before')").await;
    when(client, &id, "another backup", |database| database.last_backup_at > first).await;
    assert_eq!(refusal(client, &id, &lost).await, Some(400));
    let between = clock_of(&url).await;
    sql(&url, "INSERT INTO ledger VALUES ('after')").await;
    let (then, then_url) = as_of(client, &id, &between).await;
    assert_eq!(sql(&then_url, LEDGER).await, "before");
    assert_eq!(sql(&url, LEDGER).await, "before after");
    for id in [id, then] {
        client.delete_database(&id).await.unwrap();
    }
    host.end(server).await;
}

async fn backups_go_to_an_object_storage_and_come_back(host: Host) {
    let storage = ObjectStorage::start(Ipv4Addr::LOCALHOST).await;
    let server = Server::start_with(Options {
        arguments: vec!["--databases-backups".to_owned(), "s3://bucket/of/mine".to_owned()],
        environment: vec![
            ("AWS_ENDPOINT", format!("http://127.0.0.1:{}", storage.port)),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_ACCESS_KEY_ID", "test".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "test".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ],
        ..Options::default()
    })
    .await;
    let client = server.client();
    let (id, url) = made(client).await;
    let between = two_commits(client, &id, &url).await;
    let (then, then_url) = as_of(client, &id, &between).await;
    assert_eq!(sql(&then_url, LEDGER).await, "before");
    assert!(!server.data().join("database-backups").exists());
    for id in [id, then] {
        client.delete_database(&id).await.unwrap();
    }
    let log = || server.log();
    until("its backups are removed", SOON, async || {
        log().contains("removed its backups").then_some(())
    })
    .await;
    drop(storage);
    host.end(server).await;
}

async fn a_store_that_is_away_is_told_of_and_the_database_goes_on(host: Host) {
    let place = tempfile::tempdir_in(tests::pool()).unwrap();
    let (store, away) = (place.path().join("store"), place.path().join("away"));
    let server = Server::start_with(Options {
        arguments: vec!["--databases-backups".to_owned(), store.display().to_string()],
        ..Options::default()
    })
    .await;
    let client = server.client();
    fs::rename(&store, &away).unwrap();
    fs::write(&store, "in its place").unwrap();
    let (id, url) = made(client).await;
    sql(&url, "CREATE TABLE ledger (entry text); INSERT INTO ledger VALUES ('kept')").await;
    when(client, &id, "it is told", |database| database.backup_error.is_some()).await;
    let told = client.database(&id).await.unwrap();
    assert_eq!((told.last_backup_at, told.restorable_until), (None, None));
    let metrics = server.get("/metrics").await.text();
    for line in ["atoll_databases_failing_backup 1", "atoll_databases_without_backup 1"] {
        assert!(metrics.lines().any(|found| found == line), "{line}: {metrics}");
    }
    assert_eq!(refusal(client, &id, "2999-12-31T00:00:00Z").await, Some(400));
    assert_eq!(refusal(client, &id, "2020-12-31T00:00:00Z").await, Some(409));
    // It sleeps all the same, and wakes.
    when(client, &id, "it hibernates", |one| one.status == DatabaseStatus::Hibernated).await;
    assert_eq!(sql(&url, "SELECT entry FROM ledger").await, "kept");

    fs::remove_file(&store).unwrap();
    fs::rename(&away, &store).unwrap();
    // Somebody has to be there: what sleeps is not woken for its backup.
    until("it is backed up", SOON, async || {
        sql(&url, "SELECT 1").await;
        pause(Duration::from_secs(5)).await;
        let database = client.database(&id).await.unwrap();
        (database.last_backup_at.is_some() && database.backup_error.is_none()).then_some(())
    })
    .await;
    assert_eq!(below(&store), [id.to_string()]);
    client.delete_database(&id).await.unwrap();
    host.end(server).await;
}
