//! Who reaches a database, and where, and what a session is.

use std::process::Stdio;

use api::{
    CreateDatabase, CreateNetwork, CreateSandbox, DatabaseConnection, DatabaseId, DatabaseStatus,
};
use rustix::process::{Pid, Signal, kill_process};
use tests::{Host, Options, Sandbox, Server, command, small, sql, until};
use tokio::process::Command;

use super::{SOON, any, asleep, listed, refused};

pub(super) async fn only_its_own_credentials_open_a_database(host: Host) {
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

pub(super) async fn sandboxes_reach_the_databases_of_their_own_account_alone(host: Host) {
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

pub(super) async fn a_sandbox_without_the_internet_reaches_the_databases_it_is_given(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let (id, connection) = any(client).await;
    let request = CreateSandbox {
        databases: Some(vec![id.to_string()]),
        network: Some(CreateNetwork::Internet(false)),
        ..small()
    };
    let sandbox = host.sandbox_of(&request).await;
    assert_eq!(first_answer(&sandbox, &connection).await, "R");
    // Another of its account is none of them.
    let (other, others) = any(client).await;
    assert_ne!(first_answer(&sandbox, &others).await, "R");
    for id in [id, other] {
        client.delete_database(&id).await.unwrap();
    }
}

pub(super) async fn sessions_are_what_they_are_without_a_server_between(host: Host) {
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

pub(super) async fn a_database_is_reached_at_every_address_of_its_host(host: Host) {
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

pub(super) async fn databases_with_names_share_one_port(host: Host) {
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

    // Until it has a password of its own, nobody comes in with that of what it is made of.
    let third = client.create_database(&CreateDatabase::default()).await.unwrap().id;
    let early = format!(
        "postgresql://atoll:template@{third}.db.example:{}/postgres?sslmode=require&hostaddr={}",
        first.1.port, address
    );
    let mut tries = 0;
    while listed(client, &third).await == DatabaseStatus::Provisioning {
        refused(&early).await;
        tries += 1;
    }
    assert!(tries > 0, "it was made before anybody came");
    assert_eq!(listed(client, &third).await, DatabaseStatus::Running);
    let why = refused(&early).await;
    assert!(why.contains("password"), "{why}");
    client.delete_database(&third).await.unwrap();

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

pub(super) async fn a_certificate_of_the_operators_is_shown_to_clients(host: Host) {
    let _room = host.room(1).await;
    let directory = tempfile::tempdir().unwrap();
    let (certificate, key) =
        (directory.path().join("certificate.pem"), directory.path().join("key.pem"));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"])
        .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"])
        .arg("-out")
        .arg(&certificate)
        .arg("-keyout")
        .arg(&key)
        .output();
    let made = made.await.unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let environment = vec![
        ("ATOLL_DATABASES_CERTIFICATE", certificate.display().to_string()),
        ("ATOLL_DATABASES_KEY", key.display().to_string()),
        ("ATOLL_DATABASES_HOST", "localhost".to_owned()),
        ("ATOLL_DATABASES_LISTEN", "127.0.0.1".to_owned()),
        // No other server's, which would find them taken.
        ("ATOLL_DATABASES_PORTS", "25000-25999".to_owned()),
    ];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let (id, connection) = any(server.client()).await;
    assert_eq!((connection.host.as_str(), &connection.ca_certificate), ("localhost", &None));
    let url = connection.connection_url.as_str();
    let verified =
        |url: &str| format!("{url}?sslmode=verify-full&sslrootcert={}", certificate.display());
    assert_eq!(sql(&verified(url), "SELECT 1").await, "1");
    let elsewhere = refused(&verified(&url.replace("@localhost:", "@127.0.0.1:"))).await;
    assert!(elsewhere.contains("certificate"), "{elsewhere}");
    server.client().delete_database(&id).await.unwrap();
    host.end(server).await;
}
