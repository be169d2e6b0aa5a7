//! Databases: made, reached by whom they may, woken, killed, deleted.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{process::Stdio, sync::Arc, time::Duration};

use api::{
    CloneDatabase, CreateDatabase, CreateSandbox, Database, DatabaseConnection, DatabaseId,
    DatabaseSize, DatabaseStatus, UpdateDatabase,
};
use client::{Client, Method};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tests::{Answer, End, Host, Options, Sandbox, Server, command, psql, small, sql, suite, until};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

suite! {
    a_database_is_made_listed_apart_and_kept_with_its_sandbox,
    only_its_own_credentials_open_a_database,
    sandboxes_reach_the_databases_of_their_own_account_alone,
    sessions_are_what_they_are_without_a_server_between,
    an_unused_database_hibernates_and_a_connection_wakes_it,
    what_was_committed_survives_the_death_of_machine_and_server,
    a_clone_is_its_own_and_its_source_goes_on,
    a_database_is_reached_at_every_address_of_its_host,
    a_disk_grows_and_at_its_limit_writes_are_refused_and_reads_answered,
    databases_with_names_share_one_port,
    a_database_that_cannot_be_is_refused;
    soak: a_clone_may_have_another_size, twenty_deaths_lose_no_commit, fifty_databases_leave_nothing_over,
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

/// Why it fails.
async fn refused(url: &str) -> String {
    let output = psql(url, "SELECT 1").await;
    assert!(!output.status.success(), "{url}");
    String::from_utf8(output.stderr).unwrap()
}

async fn a_database_is_made_listed_apart_and_kept_with_its_sandbox(host: Host) {
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
    let path = format!("/v1/sandboxes/{}", id.sandbox());
    for list in ["/v1/sandboxes", "/v1/machines"] {
        assert!(!server.get(list).await.text().contains(&id.to_string()), "{list}");
    }
    for (method, path) in [
        (Method::DELETE, path.clone()),
        (Method::DELETE, format!("/v1/machines/{id}")),
        (Method::PATCH, format!("{path}/lifecycle")),
        (Method::POST, format!("/v1/databases/{id}/failover")),
    ] {
        let request = server.request(method, &path).json(&json!({"ttl_seconds": 1}));
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

async fn only_its_own_credentials_open_a_database(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, own) = any(client).await;
    let url = |role: &str, password: &str, database: &str| {
        format!("postgresql://{role}:{password}@{}:{}/{database}", own.host, own.port)
    };
    // What every database is restored from.
    for (role, password, database) in [
        ("atoll", "template", "postgres"),
        ("blank", "", "blank"),
        ("blank", "template", own.database.as_str()),
        ("postgres", "postgres", "postgres"),
        ("postgres", "", own.database.as_str()),
        (own.username.as_str(), "wrong", own.database.as_str()),
        (own.username.as_str(), "", own.database.as_str()),
    ] {
        let why = refused(&url(role, password, database)).await;
        assert!(why.contains("password"), "{role} {database}: {why}");
    }
    let (other, others) = any(client).await;
    assert_ne!((&own.username, &own.database), (&others.username, &others.database));
    refused(&url(&others.username, &others.password, &others.database)).await;

    // A session that stays open ends with its password.
    let mut session = Command::new("psql")
        .args([own.connection_url.as_str(), "-XAtqc", "SELECT 'in'; SELECT pg_sleep(600)"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    until("it is connected", SOON, async || {
        (client.database(&id).await.unwrap().connections > 0).then_some(())
    })
    .await;
    let renewed = client.reset_database_credentials(&id).await.unwrap().connection.unwrap();
    assert_ne!(renewed.password, own.password);
    let ended = tokio::time::timeout(SOON, session.wait()).await;
    assert!(!ended.expect("the session ends").unwrap().success());
    refused(&own.connection_url).await;
    assert_eq!(sql(&renewed.connection_url, "SELECT 1").await, "1");
    for id in [id, other] {
        client.delete_database(&id).await.unwrap();
    }
}

/// The first byte that PostgreSQL answers a start with: `R` asks for a password, `E` refuses.
async fn first_answer(sandbox: &Sandbox, connection: &DatabaseConnection) -> String {
    let script = format!(
        r#"
import socket, struct
try:
    s = socket.create_connection(("{}", {}), timeout=20)
    body = struct.pack("!I", 196608) + b"user\0{}\0database\0{}\0\0"
    s.sendall(struct.pack("!I", len(body) + 4) + body)
    print(s.recv(1).decode())
except OSError as error:
    print("closed")
"#,
        connection.host, connection.port, connection.username, connection.database
    );
    sandbox.write("/root/ask.py", script).await;
    sandbox.run("python3 /root/ask.py").await.trim().to_owned()
}

async fn sandboxes_reach_the_databases_of_their_own_account_alone(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, connection) = any(client).await;
    let request = CreateSandbox { databases: Some(vec![id.to_string()]), ..small() };
    let sandbox = host.sandbox_of(&request).await;
    assert_eq!(first_answer(&sandbox, &connection).await, "R");
    assert_eq!(sandbox.run("printf %s $DATABASE_URL").await, connection.connection_url);
    let search = format!("grep -rls {} /etc /root /home /tmp /var || true", connection.password);
    assert_eq!(sandbox.run(&search).await, "");
    // Of the same address, what is no database's.
    let port = server.url().rsplit(':').next().unwrap().trim_end_matches('/').to_owned();
    for port in ["22", port.as_str(), "5432"] {
        let cmd = format!(
            "timeout 5 bash -c 'exec 3<>/dev/tcp/{}/{port}' 2>/dev/null && echo open || echo shut",
            connection.host
        );
        assert_eq!(sandbox.run(&cmd).await.trim(), "shut", "{port}");
    }
    // Changed while it lives: its next command has the new one.
    let renewed = client.reset_database_credentials(&id).await.unwrap().connection.unwrap();
    assert_eq!(sandbox.run("printf %s $DATABASE_URL").await, renewed.connection_url);

    let other = server.account("neighbour", "unlimited").await;
    let foreign = other.create_sandbox(&small()).await.unwrap();
    let run = |cmd: String| {
        let other = other.clone();
        async move { other.exec(&foreign.id, &command(cmd)).await.unwrap().stdout }
    };
    let ask = format!(
        "python3 - <<'END'\nimport socket, struct\ns = socket.create_connection(('{}', {}), timeout=20)\nbody = struct.pack('!I', 196608) + b'user\\0u\\0\\0'\ns.sendall(struct.pack('!I', len(body) + 4) + body)\nprint(s.recv(1).decode(), b'28000' in s.recv(200))\nEND",
        connection.host, connection.port
    );
    assert_eq!(run(ask).await.trim(), "E True");
    assert_eq!(other.database(&id).await.unwrap_err().status(), Some(404));
    let stolen = CreateSandbox { databases: Some(vec![id.to_string()]), ..small() };
    assert_eq!(other.create_sandbox(&stolen).await.unwrap_err().status(), Some(404));
    other.delete_sandbox(&foreign.id).await.unwrap();
    client.delete_database(&id).await.unwrap();
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

async fn sessions_are_what_they_are_without_a_server_between(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, connection) = any(client).await;
    let url = connection.connection_url.as_str();
    for mode in ["disable", "require"] {
        let with_mode = format!("{url}?sslmode={mode}");
        assert_eq!(sql(&with_mode, "SELECT 1").await, "1", "{mode}");
    }
    let certificate = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(certificate.path(), connection.ca_certificate.clone().unwrap()).unwrap();
    let verified =
        format!("{url}?sslmode=verify-full&sslrootcert={}", certificate.path().display());
    assert_eq!(sql(&verified, "SELECT 1").await, "1");

    // Cancelled by the client, on a connection of its own.
    let sleeping = asleep(url).await;
    let pid = Pid::from_raw(sleeping.id().unwrap().cast_signed()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let cancelled = tokio::time::timeout(SOON, sleeping.wait_with_output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&cancelled.stderr);
    assert!(said.contains("canceling statement due to user request"), "{said}");

    // Ended from elsewhere, while its client does not look at it.
    let named = format!("{url}?application_name=unattended");
    let mut unattended = Command::new("psql")
        .args([named.as_str(), "-XAtqc", "SELECT 1", "-c", "\\! cat"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let its = "FROM pg_stat_activity WHERE application_name = 'unattended' AND state = 'idle'";
    until("it is connected and idle", SOON, async || {
        (sql(url, &format!("SELECT count(*) {its} AND query = 'SELECT 1'")).await == "1")
            .then_some(())
    })
    .await;
    sql(url, &format!("SELECT pg_terminate_backend(pid) {its}")).await;
    until("it is not counted", SOON, async || {
        (client.database(&id).await.unwrap().connections == 0).then_some(())
    })
    .await;
    assert_eq!(unattended.try_wait().unwrap(), None);
    drop(unattended);

    // In and out again, as it was.
    sql(url, "CREATE TABLE copied (line text)").await;
    let script = format!(
        "seq 1 400000 | sed 's/$/ and something to make the line longer than its number/' >$0/in && \
         psql '{url}' -XAtqc '\\copy copied FROM '$0'/in' && psql '{url}' -XAtqc '\\copy copied TO '$0'/out' && cmp $0/in $0/out"
    );
    let directory = tempfile::tempdir().unwrap();
    let copied = Command::new("bash").arg("-ec").arg(&script).arg(directory.path()).output();
    let copied = tokio::time::timeout(SOON * 2, copied).await.unwrap().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));

    let script =
        format!("LISTEN news;\n\\! psql '{url}' -Xqc 'NOTIFY news, $$hello$$'\nSELECT 1;\n");
    std::fs::write(directory.path().join("listen"), script).unwrap();
    let heard =
        Command::new("psql").args([url, "-XAtqf"]).arg(directory.path().join("listen")).output();
    let heard = tokio::time::timeout(SOON, heard).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&heard.stdout).contains("hello"), "{heard:?}");

    // All are there before the first asks.
    std::fs::write(directory.path().join("ask"), "SELECT 1;\n").unwrap();
    let arguments = [url, "-n", "-c", "200", "-j", "2", "-t", "2", "-f"];
    let asked = Command::new("pgbench").args(arguments).arg(directory.path().join("ask")).output();
    let asked = tokio::time::timeout(SOON * 2, asked).await.unwrap().unwrap();
    let told = String::from_utf8_lossy(&asked.stdout);
    assert!(told.contains("processed: 400/400"), "{asked:?}");
    client.delete_database(&id).await.unwrap();
}

async fn an_unused_database_hibernates_and_a_connection_wakes_it(host: Host) {
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

/// Kills the machine under commits; none that was acknowledged is missing afterwards.
async fn lose_nothing(server: &Server, id: &DatabaseId, url: &str, round: u64) {
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

async fn is_whole(client: &Client, id: &DatabaseId) {
    let cmd = "setpriv --reuid=postgres --regid=postgres --init-groups \
               /usr/lib/postgresql/17/bin/pg_amcheck -h /run/postgresql -U postgres --all --install-missing --heapallindexed 2>&1";
    let request = api::ExecRequest { timeout_seconds: Some(120.0), ..command(cmd) };
    let checked = client.exec(&id.sandbox(), &request).await.unwrap();
    assert_eq!((checked.exit_code, checked.stdout.as_str()), (0, ""));
}

async fn what_was_committed_survives_the_death_of_machine_and_server(host: Host) {
    let mut server = Server::start().await;
    let client = server.client().clone();
    let (id, connection) = any(&client).await;
    let url = connection.connection_url.clone();
    sql(&url, "CREATE TABLE ledger (x bigint PRIMARY KEY)").await;
    let mut sleeping = asleep(&url).await;
    for round in 1..=2 {
        lose_nothing(&server, &id, &url, round).await;
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

    // Half made, and half deleted, when the server dies.
    let half = server.client().create_database(&CreateDatabase::default()).await.unwrap();
    server.restart(End::Killed).await;
    let half = server.client().database_ready(&half.id, MADE).await.unwrap();
    assert_eq!(sql(&half.connection.unwrap().connection_url, "SELECT 1").await, "1");
    host.end(server).await;
}

async fn a_clone_is_its_own_and_its_source_goes_on(host: Host) {
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

/// A database with a session that stays, and what is asked of it.
struct Filled {
    client: Client,
    id: DatabaseId,
    url: String,
    _session: Child,
}

impl Filled {
    async fn new(client: &Client) -> Self {
        let (id, connection) = any(client).await;
        let url = connection.connection_url;
        sql(&url, "CREATE TABLE kept (x int); INSERT INTO kept VALUES (7)").await;
        let _session = asleep(&url).await;
        Self { client: client.clone(), id, url, _session }
    }

    async fn inside(&self, cmd: &str) -> String {
        let request = api::ExecRequest { timeout_seconds: Some(100.0), ..command(cmd) };
        let ended = self.client.exec(&self.id.sandbox(), &request).await.unwrap();
        assert_eq!(ended.exit_code, 0, "{cmd}: {ended:?}");
        ended.stdout
    }

    async fn refuses(&self) {
        until("writes are refused", SOON, async || {
            let database = self.client.database(&self.id).await.unwrap();
            database.error.filter(|why| why.contains("writes are refused"))
        })
        .await;
        let output = psql(&self.url, "INSERT INTO kept VALUES (8)").await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("read-only transaction"), "{said}");
        assert_eq!(sql(&self.url, "SELECT x FROM kept").await, "7");
    }

    async fn takes_writes_again(&self) {
        until("writes are taken", SOON, async || {
            psql(&self.url, "INSERT INTO kept VALUES (9)").await.status.success().then_some(())
        })
        .await;
        assert_eq!(sql(&self.url, "SELECT x FROM kept WHERE x = 7").await, "7");
        until("it says so", SOON, async || {
            self.client.database(&self.id).await.unwrap().error.is_none().then_some(())
        })
        .await;
    }
}

async fn a_database_is_reached_at_every_address_of_its_host(host: Host) {
    let _room = host.room(1).await;
    let environment = vec![
        ("ATOLL_DATABASES_LISTEN", "0.0.0.0".to_owned()),
        // No other server's, which would find them taken.
        ("ATOLL_DATABASES_PORTS", "24000-24999".to_owned()),
    ];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let (id, connection) = any(server.client()).await;
    for host in [connection.host.as_str(), "127.0.0.1"] {
        let url = connection.connection_url.replace(&connection.host, host);
        assert_eq!(sql(&url, "SELECT 6 * 7").await, "42", "{host}");
    }
    server.client().delete_database(&id).await.unwrap();
    host.end(server).await;
}

async fn a_disk_grows_and_at_its_limit_writes_are_refused_and_reads_answered(host: Host) {
    let environment = vec![("ATOLL_DATABASES_DISK_MB", "2560".to_owned())];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let filled = Filled::new(server.client()).await;
    // Of 2 GiB, which come with some hundred megabytes in use.
    let fill = |name: &str, left_mb: u64| {
        format!(
            "free=$(df --output=avail -B 1M / | tail -n 1); \
             dd if=/dev/zero of=/var/lib/postgresql/{name} bs=1M count=$((free - {left_mb})) status=none"
        )
    };
    filled.inside(&fill("filler", 400)).await;
    until("the disk has grown", SOON, async || {
        let total = filled.inside("df --output=size -B 1M / | tail -n 1").await;
        (total.trim().parse::<u64>().unwrap() > 2300).then_some(())
    })
    .await;
    assert_eq!(sql(&filled.url, "INSERT INTO kept VALUES (8) RETURNING x").await, "8");
    sql(&filled.url, "DELETE FROM kept WHERE x = 8").await;
    filled.inside(&fill("more", 150)).await;
    filled.refuses().await;
    // Whoever makes room may write for it.
    let own = "BEGIN READ WRITE; CREATE TABLE made (x int); DROP TABLE made; COMMIT";
    sql(&filled.url, own).await;
    filled.inside("rm /var/lib/postgresql/filler /var/lib/postgresql/more").await;
    filled.takes_writes_again().await;
    host.end(server).await;
}

async fn databases_with_names_share_one_port(host: Host) {
    let _room = host.room(1).await;
    let environment = vec![("ATOLL_DATABASES_SUFFIX", "db.example".to_owned())];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let client = server.client();
    let (first, second) = tokio::join!(any(client), any(client));
    let sandbox = CreateSandbox { databases: Some(vec![first.0.to_string()]), ..small() };
    let sandbox = client.create_sandbox(&sandbox).await.unwrap().id;
    let inside = async |cmd: String| {
        client.exec(&sandbox, &command(cmd)).await.unwrap().stdout.trim().to_owned()
    };
    // Nobody outside knows that domain.
    let found = format!("getent ahostsv4 {} | awk 'NR == 1 {{ print $1 }}'", first.1.host);
    let address = inside(found).await;
    assert!(address.starts_with("100."), "{address}");

    for (id, connection) in [&first, &second] {
        assert_eq!(connection.host, format!("{id}.db.example"));
        assert_eq!(connection.port, first.1.port);
        let url = format!("{}&hostaddr={address}", connection.connection_url);
        assert_eq!(sql(&url, "SELECT current_database()").await, connection.database);
        let certificate = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(certificate.path(), connection.ca_certificate.clone().unwrap()).unwrap();
        let verified = url.replace("sslmode=require", "sslmode=verify-full");
        let verified = format!("{verified}&sslrootcert={}", certificate.path().display());
        assert_eq!(sql(&verified, "SELECT 1").await, "1");
    }
    let url = format!("{}&hostaddr={address}", first.1.connection_url);
    // Whose password it is says nothing of where it leads to.
    let other = url.replace(&first.1.host, &second.1.host);
    assert!(refused(&other).await.contains("password"));
    let unknown = url.replace(&first.0.to_string(), &DatabaseId::random().to_string());
    assert!(refused(&unknown).await.contains("there is no database"));
    let plain = refused(&url.replace("sslmode=require", "sslmode=disable")).await;
    assert!(plain.contains("sslmode=require"), "{plain}");

    let sleeping = asleep(&url).await;
    let pid = Pid::from_raw(sleeping.id().unwrap().cast_signed()).unwrap();
    kill_process(pid, Signal::INT).unwrap();
    let cancelled = tokio::time::timeout(SOON, sleeping.wait_with_output()).await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&cancelled.stderr);
    assert!(said.contains("canceling statement due to user request"), "{said}");
    for (id, _) in [first, second] {
        client.delete_database(&id).await.unwrap();
    }
    client.delete_sandbox(&sandbox).await.unwrap();
    host.end(server).await;
}

async fn a_clone_may_have_another_size(host: Host) {
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

async fn a_database_that_cannot_be_is_refused(host: Host) {
    let server = host.server().await;
    let ask = async |body: Value| {
        Answer::to(server.request(Method::POST, "/v1/databases").json(&body)).await.refusal()
    };
    for body in [
        json!({"size": "2g"}),
        json!({"memory_mb": 100_000}),
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

async fn twenty_deaths_lose_no_commit(host: Host) {
    let server = host.server().await;
    let (id, connection) = any(server.client()).await;
    let url = connection.connection_url.as_str();
    sql(url, "CREATE TABLE ledger (x bigint PRIMARY KEY)").await;
    let prepared = Command::new("pgbench").args(["-i", "-q", "-s", "5", url]).output();
    assert!(prepared.await.unwrap().status.success());
    for round in 1..=20 {
        let load = Command::new("pgbench")
            .args(["-n", "-c", "4", "-T", "600", url])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn();
        lose_nothing(&server, &id, url, round).await;
        load.unwrap().kill().await.unwrap();
    }
    let sums = "SELECT (SELECT sum(abalance) FROM pgbench_accounts) = (SELECT sum(bbalance) FROM pgbench_branches)";
    assert_eq!(sql(url, sums).await, "t");
    is_whole(server.client(), &id).await;
    server.client().delete_database(&id).await.unwrap();
}

async fn fifty_databases_leave_nothing_over(host: Host) {
    let server: Arc<Server> = host.server().await;
    for _ in 0..50 {
        let (id, connection) = any(server.client()).await;
        assert_eq!(sql(&connection.connection_url, "SELECT 1").await, "1");
        server.client().delete_database(&id).await.unwrap();
    }
    assert_eq!(server.client().databases().await.unwrap(), []);
}

async fn a_gigabyte_is_copied_in_and_out(host: Host) {
    let server = host.server().await;
    let (id, connection) = any(server.client()).await;
    let url = connection.connection_url.as_str();
    sql(url, "CREATE TABLE copied (line text)").await;
    // 10 million lines of 100 bytes: more than the disk begins with, in the log and the table.
    let script = format!(
        "lines() {{ seq -f '%094.0f-line' 1 10000000; }}; sum=$(lines | sha256sum); \
         lines | psql '{url}' -v ON_ERROR_STOP=1 -Xqc 'COPY copied FROM STDIN'; \
         test \"$(psql '{url}' -v ON_ERROR_STOP=1 -Xqc 'COPY copied TO STDOUT' | sha256sum)\" = \"$sum\""
    );
    let copied = Command::new("bash").args(["-eo", "pipefail", "-c", &script]).output();
    let copied = tokio::time::timeout(SOON * 15, copied).await.unwrap().unwrap();
    assert!(copied.status.success(), "{}", String::from_utf8_lossy(&copied.stderr));
    server.client().delete_database(&id).await.unwrap();
}
