//! What was committed, when machine or server die.

use std::process::Stdio;

use api::{CreateDatabase, DatabaseId, DatabaseStatus};
use rustix::process::{Pid, Signal, kill_process};
use tests::{End, Host, Server, command, psql, sql, until};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use super::{MADE, SOON, any, asleep, is_whole};

/// Commits numbers, one by one, for as long as it can; the last that was acknowledged.
async fn commit_from(url: &str, first: u64) -> Child {
    let script = format!(
        "i={first}; while psql '{url}' -XAtqc \"INSERT INTO ledger VALUES ($i)\" >/dev/null 2>&1; do echo $i; i=$((i + 1)); done"
    );
    Command::new("bash")
        .args(["-c", &script])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}

/// The process that is a database.
async fn machine_of(server: &Server, id: &DatabaseId) -> Pid {
    let machine = server.client().machine(&id.sandbox()).await.unwrap();
    server.machine_of_volume(&machine.root_volume_id.unwrap())
}

/// Kills the machine under commits, and under a load if there is one; none that was acknowledged is missing afterwards.
async fn lose_nothing(
    server: &Server,
    id: &DatabaseId,
    url: &str,
    round: u64,
    load: Option<&mut Child>,
) {
    let first = round * 1_000_000;
    let mut committing = commit_from(url, first).await;
    let mut lines = BufReader::new(committing.stdout.take().unwrap()).lines();
    let mut acknowledged = Vec::new();
    let deadline = tokio::time::Instant::now() + SOON;
    while acknowledged.len() < 5 {
        let line = tokio::time::timeout_at(deadline, lines.next_line()).await;
        let line = line.expect("commits go on").unwrap();
        acknowledged.push(line.expect("commits are acknowledged").parse::<u64>().unwrap());
    }
    if let Some(load) = load {
        assert_eq!(load.try_wait().unwrap(), None, "the load goes on");
    }
    kill_process(machine_of(server, id).await, Signal::KILL).unwrap();
    // Whoever came later would wait for the recovery and then go on.
    committing.kill().await.unwrap();
    while let Some(line) = lines.next_line().await.unwrap() {
        acknowledged.push(line.parse().unwrap());
    }
    until("it recovers", SOON * 2, async || {
        let database = server.client().database(id).await.unwrap();
        (database.status == DatabaseStatus::Running).then_some(())
    })
    .await;
    let found = sql(url, &format!("SELECT x FROM ledger WHERE x >= {first}")).await;
    for number in &acknowledged {
        assert!(found.lines().any(|line| line == number.to_string()), "{number} in {found}");
    }
}

pub(super) async fn what_was_committed_survives_the_death_of_machine_and_server(host: Host) {
    let mut server = Server::start().await;
    let client = server.client().clone();
    let (id, connection) = any(&client).await;
    let url = connection.connection_url.clone();
    sql(&url, "CREATE TABLE ledger (x bigint PRIMARY KEY)").await;
    let mut sleeping = asleep(&url).await;
    for round in 1..=2 {
        lose_nothing(&server, &id, &url, round, None).await;
    }
    let ended = tokio::time::timeout(SOON, sleeping.wait()).await;
    assert!(!ended.expect("a session ends with its machine").unwrap().success());
    is_whole(&client, &id).await;

    // The server alone, then both: the machine goes on, or starts again.
    let machine = machine_of(&server, &id).await;
    server.restart(End::Killed).await;
    assert_eq!(sql(&url, "INSERT INTO ledger VALUES (1) RETURNING x").await, "1");
    assert_eq!(machine_of(&server, &id).await, machine);
    server.stop(End::Killed).await;
    kill_process(machine, Signal::KILL).unwrap();
    server.start_again().await;
    until("it recovers", SOON, async || {
        let database = server.client().database(&id).await.unwrap();
        (database.status == DatabaseStatus::Running).then_some(())
    })
    .await;
    assert_eq!(sql(&url, "SELECT count(*) FROM ledger WHERE x = 1").await, "1");
    assert_eq!(server.client().database_connection(&id).await.unwrap(), connection);

    // Half made when the server dies.
    let half = server.client().create_database(&CreateDatabase::default()).await.unwrap();
    server.restart(End::Killed).await;
    let half = server.client().database_ready(&half.id, MADE).await.unwrap();
    assert_eq!(sql(&half.connection.unwrap().connection_url, "SELECT 1").await, "1");
    host.end(server).await;
}

pub(super) async fn why_a_database_cannot_be_started_is_told(host: Host) {
    const REASON: &str = "PostgreSQL did not start: FATAL:";
    let server = host.server().await;
    let client = server.client();
    let (id, connection) = any(client).await;
    let url = connection.connection_url.as_str();
    sql(url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
    let inside = async |cmd: &str| {
        let ended = client.exec(&id.sandbox(), &command(cmd)).await.unwrap();
        assert_eq!(ended.exit_code, 0, "{cmd}: {ended:?}");
    };
    inside(
        "mv /var/lib/postgresql/data/pg_wal /var/lib/postgresql/away && \
         { pkill -9 -x postgres; while pgrep -x postgres >/dev/null; do sleep 0.1; done; }",
    )
    .await;
    until("a client is told why", SOON, async || {
        let said = psql(url, "SELECT 1").await;
        assert!(!said.status.success(), "{said:?}");
        String::from_utf8_lossy(&said.stderr).contains("cannot be reached now").then_some(())
    })
    .await;
    until("it is told of the database", SOON, async || {
        let database = client.database(&id).await.unwrap();
        let is_told =
            database.error.is_some_and(|error| error.contains(REASON) && error.contains("pg_wal"));
        (is_told && database.status == DatabaseStatus::Recovering).then_some(())
    })
    .await;
    inside("mv /var/lib/postgresql/away /var/lib/postgresql/data/pg_wal").await;
    until("it answers", SOON, async || {
        let answered = psql(url, "SELECT x FROM kept").await;
        answered.status.success().then(|| assert_eq!(answered.stdout, b"7\n"))
    })
    .await;
    until("nothing is told any longer", SOON, async || {
        let database = client.database(&id).await.unwrap();
        (database.error.is_none() && database.status == DatabaseStatus::Running).then_some(())
    })
    .await;
    client.delete_database(&id).await.unwrap();
}

pub(super) async fn twenty_deaths_lose_no_commit(host: Host) {
    let server = host.server().await;
    let (id, connection) = any(server.client()).await;
    let url = connection.connection_url.as_str();
    sql(url, "CREATE TABLE ledger (x bigint PRIMARY KEY)").await;
    let prepared = Command::new("pgbench").args(["-i", "-q", "-s", "5", url]).output();
    assert!(prepared.await.unwrap().status.success());
    for round in 1..=20 {
        let mut load = Command::new("pgbench")
            .args(["-n", "-c", "4", "-T", "600", url])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        lose_nothing(&server, &id, url, round, Some(&mut load)).await;
        load.kill().await.unwrap();
    }
    let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(bbalance) FROM pgbench_branches)";
    assert_eq!(sql(url, sums).await, "t");
    assert_eq!(sql(url, "SELECT count(*) > 0 FROM pgbench_history").await, "t");
    is_whole(server.client(), &id).await;
    server.client().delete_database(&id).await.unwrap();
}
