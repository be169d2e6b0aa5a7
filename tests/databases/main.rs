//! Databases: made, reached by whom they may, woken, killed, deleted.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

mod clones;
mod growth;
mod making;
mod reaching;
mod rest;
mod survival;

use std::{process::Stdio, time::Duration};

use api::{CreateDatabase, Database, DatabaseConnection, DatabaseId, DatabaseStatus};
use client::Client;
use clones::{
    a_clone_is_its_own_and_its_source_goes_on,
    a_clone_is_made_though_its_source_was_renamed_or_dropped, a_clone_may_have_another_size,
    a_clone_of_a_database_at_rest_leaves_it_at_rest,
    a_clone_whose_machine_dies_at_once_is_made_all_the_same,
};
use growth::{
    a_disk_grows_and_at_its_limit_writes_are_refused_and_reads_answered,
    a_disk_grows_as_far_as_the_plan_allows, a_gigabyte_is_copied_in_and_out,
};
use making::{
    a_database_is_made_listed_apart_and_kept_with_its_sandbox,
    a_database_may_be_deleted_at_any_moment_of_its_making, a_database_that_cannot_be_is_refused,
    fifty_databases_leave_nothing_over,
};
use reaching::{
    a_certificate_of_the_operators_is_shown_to_clients,
    a_database_is_reached_at_every_address_of_its_host,
    a_sandbox_without_the_internet_reaches_the_databases_it_is_given,
    databases_with_names_share_one_port, only_its_own_credentials_open_a_database,
    sandboxes_reach_the_databases_of_their_own_account_alone,
    sessions_are_what_they_are_without_a_server_between,
};
use rest::{
    a_connection_at_any_moment_of_going_to_sleep_is_answered,
    an_unused_database_hibernates_and_a_connection_wakes_it,
    whoever_is_connected_keeps_a_database_awake_until_they_go,
};
use survival::{
    twenty_deaths_lose_no_commit, what_was_committed_survives_the_death_of_machine_and_server,
    why_a_database_cannot_be_started_is_told,
};
use tests::{command, psql, sql, suite, until};
use tokio::process::{Child, Command};

suite! {
    a_database_is_made_listed_apart_and_kept_with_its_sandbox,
    only_its_own_credentials_open_a_database,
    sandboxes_reach_the_databases_of_their_own_account_alone,
    sessions_are_what_they_are_without_a_server_between,
    an_unused_database_hibernates_and_a_connection_wakes_it,
    what_was_committed_survives_the_death_of_machine_and_server,
    a_clone_is_its_own_and_its_source_goes_on,
    a_clone_may_have_another_size,
    a_clone_of_a_database_at_rest_leaves_it_at_rest,
    a_clone_whose_machine_dies_at_once_is_made_all_the_same,
    a_database_is_reached_at_every_address_of_its_host,
    a_disk_grows_and_at_its_limit_writes_are_refused_and_reads_answered,
    a_disk_grows_as_far_as_the_plan_allows,
    databases_with_names_share_one_port,
    a_clone_is_made_though_its_source_was_renamed_or_dropped,
    a_database_may_be_deleted_at_any_moment_of_its_making,
    a_certificate_of_the_operators_is_shown_to_clients,
    a_sandbox_without_the_internet_reaches_the_databases_it_is_given,
    whoever_is_connected_keeps_a_database_awake_until_they_go,
    a_connection_at_any_moment_of_going_to_sleep_is_answered,
    why_a_database_cannot_be_started_is_told,
    a_database_that_cannot_be_is_refused;
    soak: twenty_deaths_lose_no_commit, fifty_databases_leave_nothing_over,
        a_gigabyte_is_copied_in_and_out,
}

/// A template and a size that were never used on this host are made first.
const MADE: Duration = Duration::from_secs(280);

/// Of a guest under emulation on a host that has more to do.
const SOON: Duration = Duration::from_secs(120);

async fn made(client: &Client, request: &CreateDatabase) -> Database {
    let begun = client.create_database(request).await.unwrap();
    assert_eq!(begun.status, DatabaseStatus::Provisioning);
    assert_eq!(begun.connection, None);
    let database = client.database_ready(&begun.id, MADE).await.unwrap();
    assert_eq!(database.status, DatabaseStatus::Running, "{database:?}");
    database
}

async fn any(client: &Client) -> (DatabaseId, DatabaseConnection) {
    let database = made(client, &CreateDatabase::default()).await;
    (database.id, database.connection.unwrap())
}

/// As the list has it, which neither waits nor wakes.
async fn listed(client: &Client, id: &DatabaseId) -> DatabaseStatus {
    let all = client.databases().await.unwrap();
    all.iter().find(|database| database.id == *id).unwrap().status
}

/// Why it fails.
async fn refused(url: &str) -> String {
    let output = psql(url, "SELECT 1").await;
    assert!(!output.status.success(), "{url}");
    String::from_utf8(output.stderr).unwrap()
}

/// A session in the middle of a query that does not end.
async fn asleep(url: &str) -> Child {
    let session = Command::new("psql")
        .args([url, "-XAtqc", "SELECT pg_sleep(3000)"])
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    until("it sleeps", SOON, async || {
        let asked = "SELECT count(*) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(3000)'";
        (sql(url, asked).await == "1").then_some(())
    })
    .await;
    session
}

async fn is_whole(client: &Client, id: &DatabaseId) {
    let cmd = "setpriv --reuid=postgres --regid=postgres --init-groups \
               /usr/lib/postgresql/17/bin/pg_amcheck -h /run/postgresql -U postgres --all --install-missing --heapallindexed 2>&1";
    let request = api::ExecRequest { timeout_seconds: Some(600.0), ..command(cmd) };
    let checked = client.exec(&id.sandbox(), &request).await.unwrap();
    assert_eq!((checked.exit_code, checked.stdout.as_str()), (0, ""));
}
