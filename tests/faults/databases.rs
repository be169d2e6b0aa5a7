//! Clones and backups of databases.

use std::{fs, time::Duration};

use api::{CloneDatabase, CreateDatabase};
use tests::{Host, clock_of, pause, psql, sql, until};

use super::{Fault, Victim, faults_of};

pub(super) async fn a_clone_of_a_database_is_made_whatever_is_killed_or_fails(host: Host) {
    const MADE: Duration = Duration::from_secs(280);
    let _room = host.room(2).await;
    let mut victim = Victim::alone().await;
    let client = victim.server.client();
    let begun = client.create_database(&CreateDatabase::default()).await.unwrap();
    let source = client.database_ready(&begun.id, MADE).await.unwrap();
    let url = source.connection.unwrap().connection_url;
    sql(&url, "CREATE TABLE kept AS SELECT 7 AS x").await;
    let faults = [
        ("fork.caught", Fault::Error),
        ("fork.caught", Fault::Kill),
        ("create.row_inserting", Fault::Error),
        ("create.row_inserted", Fault::Kill),
        ("machine.disk_publishing", Fault::Error),
        ("machine.disk_published", Fault::Kill),
    ];
    for (point, fault) in faults {
        victim.arm(point, fault).await;
        let client = victim.server.client().clone();
        let begun = client.clone_database(&source.id, &CloneDatabase::default()).await.unwrap();
        victim.is_over(point, fault).await;
        let client = victim.server.client();
        let made = client.database_ready(&begun.id, MADE).await.unwrap();
        let cloned = made.connection.expect(point).connection_url;
        assert_eq!(sql(&cloned, "SELECT x FROM kept").await, "7", "{point}");
        assert_eq!(sql(&url, "SELECT x FROM kept").await, "7", "{point}");
        client.delete_database(&made.id).await.unwrap();
        let data = victim.server.data();
        let count = |directory: &str| fs::read_dir(data.join(directory)).unwrap().count();
        until(point, MADE, async || (count("volumes") == 1).then_some(())).await;
        assert_eq!(client.volumes().await.unwrap(), [], "{point}");
        assert_eq!(count("snapshots"), 0, "{point}");
    }
    host.end(victim.server).await;
}

/// Nobody asks again: what URLs say is what PostgreSQL knows, in a moment.
pub(super) async fn a_database_is_reached_by_its_url_whatever_was_killed_or_failed_as_passwords_changed(
    host: Host,
) {
    const SETTLED: Duration = Duration::from_secs(120);
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let client = victim.server.client();
    let begun = client.create_database(&CreateDatabase::default()).await.unwrap();
    let made = client.database_ready(&begun.id, SETTLED).await.unwrap();
    let mut before = made.connection.unwrap().connection_url;
    sql(&before, "CREATE TABLE kept AS SELECT 7 AS x").await;
    for (point, fault) in faults_of("renew") {
        victim.arm(&point, fault).await;
        let client = victim.server.client().clone();
        let told = client.reset_database_credentials(&made.id).await;
        assert!(told.is_err(), "{point}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        let now = client.database(&made.id).await.unwrap().connection.expect(&point).connection_url;
        assert_ne!(now, before, "{point}");
        until(&point, SETTLED, async || {
            psql(&now, "SELECT x FROM kept").await.status.success().then_some(())
        })
        .await;
        assert!(!psql(&before, "SELECT 1").await.status.success(), "{point}");
        before = now;
    }
    host.end(victim.server).await;
}

pub(super) async fn a_database_can_be_gone_back_to_whatever_is_killed_or_fails_in_its_backup(
    host: Host,
) {
    /// From the failure of one to the next.
    const BACKED_UP: Duration = Duration::from_secs(200);
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let mut databases = Vec::new();
    for (point, fault) in faults_of("backup") {
        victim.arm(&point, fault).await;
        let client = victim.server.client().clone();
        // Its first backup follows when its clients have gone.
        let request = CreateDatabase { idle_seconds: Some(6), ..CreateDatabase::default() };
        let begun = client.create_database(&request).await.unwrap();
        let made = client.database_ready(&begun.id, BACKED_UP).await.unwrap();
        let url = made.connection.unwrap().connection_url;
        sql(&url, "CREATE TABLE ledger AS SELECT 'before' AS entry").await;
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        until(&point, BACKED_UP, async || {
            sql(&url, "SELECT 1").await;
            pause(Duration::from_secs(4)).await;
            let seen = client.database(&made.id).await.unwrap();
            (seen.last_backup_at.is_some() && seen.backup_error.is_none()).then_some(())
        })
        .await;
        let chains = victim.server.data().join("database-backups").join(made.id.to_string());
        let bases = (fs::read_dir(chains).unwrap())
            .flat_map(|chain| fs::read_dir(chain.unwrap().path()).unwrap())
            .filter(|entry| {
                entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("base-")
            });
        assert_eq!(bases.count(), 1, "{point}: what was broken off is there still");
        databases.push((point, made.id, url));
    }
    for (point, id, url) in &databases {
        let target_time = Some(clock_of(url).await);
        sql(url, "INSERT INTO ledger VALUES ('after')").await;
        let client = victim.server.client();
        let request = CloneDatabase { target_time, ..CloneDatabase::default() };
        let begun = client.clone_database(id, &request).await.unwrap();
        let then = client.database_ready(&begun.id, BACKED_UP).await.unwrap();
        let then_url = then.connection.expect(point).connection_url;
        assert_eq!(sql(&then_url, "SELECT entry FROM ledger").await, "before", "{point}");
        client.delete_database(&then.id).await.unwrap();
        client.delete_database(id).await.unwrap();
    }
    host.end(victim.server).await;
}
