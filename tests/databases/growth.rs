//! Databases that fill their disk.

use api::{CreateVolume, DatabaseId};
use client::Client;
use tests::{Host, Options, Server, command, psql, sql, until};
use tokio::process::{Child, Command};

use super::{SOON, any, asleep};

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

    /// All but so much of its disk, which comes with some hundred megabytes in use.
    async fn fill(&self, name: &str, left_mb: u64) {
        self.inside(&format!(
            "free=$(df --output=avail -B 1M / | tail -n 1); \
             dd if=/dev/zero of=/var/lib/postgresql/{name} bs=1M count=$((free - {left_mb})) status=none"
        ))
        .await;
    }

    async fn disk_grows_beyond(&self, least_mb: u64) {
        until("the disk has grown", SOON, async || {
            let total = self.inside("df --output=size -B 1M / | tail -n 1").await;
            (total.trim().parse::<u64>().unwrap() > least_mb).then_some(())
        })
        .await;
    }

    async fn refuses(&self, reason: &str) {
        until("writes are refused", SOON, async || {
            let database = self.client.database(&self.id).await.unwrap();
            let is_it = |why: &String| why.contains("writes are refused") && why.contains(reason);
            database.error.filter(is_it)
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

pub(super) async fn a_disk_grows_and_at_its_limit_writes_are_refused_and_reads_answered(
    host: Host,
) {
    let environment = vec![("ATOLL_DATABASES_DISK_MB", "2560".to_owned())];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let filled = Filled::new(server.client()).await;
    filled.fill("filler", 400).await;
    filled.disk_grows_beyond(2300).await;
    assert_eq!(sql(&filled.url, "INSERT INTO kept VALUES (8) RETURNING x").await, "8");
    sql(&filled.url, "DELETE FROM kept WHERE x = 8").await;
    filled.fill("more", 150).await;
    filled.refuses("its limit of 2560 MB").await;
    // Whoever makes room may write for it.
    let own = "BEGIN READ WRITE; CREATE TABLE made (x int); DROP TABLE made; COMMIT";
    sql(&filled.url, own).await;
    filled.inside("rm /var/lib/postgresql/filler /var/lib/postgresql/more").await;
    filled.takes_writes_again().await;
    host.end(server).await;
}

pub(super) async fn a_disk_grows_as_far_as_the_plan_allows(host: Host) {
    let directory = tempfile::tempdir().unwrap();
    let settings = directory.path().join("settings.toml");
    std::fs::write(&settings, "default_plan = \"three\"\n[plans.three]\ntotal_gb = 3\n").unwrap();
    let environment = vec![("ATOLL_SETTINGS", settings.display().to_string())];
    let server = Server::start_with(Options { environment, ..Options::default() }).await;
    let client = server.client();
    let filled = Filled::new(client).await;
    let volume = CreateVolume {
        name: "beside".parse().unwrap(),
        size_mb: Some(768),
        size_gb: None,
        from_volume: None,
    };
    client.create_volume(&volume).await.unwrap();
    // From 2048 MiB to what the volume leaves.
    filled.fill("filler", 400).await;
    filled.disk_grows_beyond(2150).await;
    filled.fill("more", 150).await;
    filled.refuses("plan").await;
    client.delete_volume(&volume.name).await.unwrap();
    filled.takes_writes_again().await;
    filled.disk_grows_beyond(2800).await;
    host.end(server).await;
}

pub(super) async fn a_gigabyte_is_copied_in_and_out(host: Host) {
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
