//! Accounts: none sees what another has, and each is told what it has used.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{fs, time::Duration};

use api::{CreateDatabase, CreateVolume, DatabaseId, SandboxId, Usage};
use client::{Client, Method, RequestBuilder};
use rustix::process::{Signal, kill_process};
use serde_json::{Value, json};
use tests::{Answer, End, Host, Options, Server, command, pause, small, suite, until};
use tokio::time::Instant;

suite! {
    nothing_of_another_account_is_there_on_any_route,
    what_a_request_names_is_looked_for_in_its_own_account,
    use_adds_up_over_restarts_and_ends_with_what_was_used;
    soak:
}

/// A template is built of another.
const BUILT: Duration = Duration::from_secs(240);
const SOON: Duration = Duration::from_secs(60);
/// All routes that name something. One that is missing here fails the claim, so that nobody adds one without this test.
const NAMING: [(&str, &str); 91] = [
    ("delete", "/v1/me/tokens/{token}"),
    ("get", "/v1/templates/{name}"),
    ("delete", "/v1/templates/{name}"),
    ("get", "/v1/templates/builds/{id}"),
    ("get", "/v1/templates/builds/{id}/logs"),
    ("get", "/v1/sandboxes/{id}"),
    ("delete", "/v1/sandboxes/{id}"),
    ("get", "/v1/sandboxes/{id}/lifecycle"),
    ("patch", "/v1/sandboxes/{id}/lifecycle"),
    ("get", "/v1/sandboxes/{id}/network"),
    ("patch", "/v1/sandboxes/{id}/network"),
    ("get", "/v1/sandboxes/{id}/events"),
    ("get", "/v1/sandboxes/{id}/metrics"),
    ("post", "/v1/sandboxes/{id}/pause"),
    ("post", "/v1/sandboxes/{id}/resume"),
    ("post", "/v1/sandboxes/{id}/hibernate"),
    ("post", "/v1/sandboxes/{id}/wake"),
    ("post", "/v1/sandboxes/{id}/fork"),
    ("post", "/v1/sandboxes/{id}/fork-tree"),
    ("post", "/v1/sandboxes/{id}/promote"),
    ("post", "/v1/sandboxes/{id}/snapshots"),
    ("get", "/v1/snapshots/{id}"),
    ("delete", "/v1/snapshots/{id}"),
    ("get", "/v1/volumes/{id}"),
    ("patch", "/v1/volumes/{id}"),
    ("delete", "/v1/volumes/{id}"),
    ("get", "/v1/databases/{id}"),
    ("patch", "/v1/databases/{id}"),
    ("delete", "/v1/databases/{id}"),
    ("get", "/v1/databases/{id}/connection"),
    ("post", "/v1/databases/{id}/wake"),
    ("post", "/v1/databases/{id}/clone"),
    ("post", "/v1/databases/{id}/reset-credentials"),
    ("post", "/v1/databases/{id}/failover"),
    ("post", "/v1/sandboxes/{id}/exec"),
    ("post", "/v1/sandboxes/{id}/exec/stream"),
    ("get", "/v1/sandboxes/{id}/repl/sessions"),
    ("post", "/v1/sandboxes/{id}/repl/sessions"),
    ("delete", "/v1/sandboxes/{id}/repl/sessions/{session_id}"),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/restart"),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run"),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run/stream"),
    ("get", "/v1/sandboxes/{id}/logs"),
    ("post", "/v1/volumes/{id}/attach"),
    ("post", "/v1/volumes/{id}/detach"),
    ("get", "/v1/machines/{id}"),
    ("delete", "/v1/machines/{id}"),
    ("post", "/v1/machines/{id}/start"),
    ("post", "/v1/machines/{id}/stop"),
    ("post", "/v1/machines/{id}/volume/attach"),
    ("post", "/v1/machines/{id}/volume/detach"),
    ("post", "/v1/machines/{id}/execs"),
    ("get", "/v1/machines/{id}/execs"),
    ("get", "/v1/machines/{id}/execs/{exec_id}"),
    ("delete", "/v1/machines/{id}/execs/{exec_id}"),
    ("get", "/v1/machines/{id}/execs/{exec_id}/output"),
    ("get", "/v1/sandboxes/{id}/fs"),
    ("put", "/v1/sandboxes/{id}/fs"),
    ("delete", "/v1/sandboxes/{id}/fs"),
    ("get", "/v1/sandboxes/{id}/fs/dir"),
    ("get", "/v1/sandboxes/{id}/fs/stat"),
    ("post", "/v1/sandboxes/{id}/fs/import"),
    ("post", "/v1/sandboxes/{id}/fs/export"),
    ("get", "/v1/sandboxes/{id}/ports"),
    ("post", "/v1/sandboxes/{id}/ports"),
    ("delete", "/v1/sandboxes/{id}/ports"),
    ("delete", "/v1/sandboxes/{id}/ports/{port}"),
    ("post", "/v1/sandboxes/{id}/preview-token"),
    ("get", "/v1/sandboxes/{id}/preview-token"),
    ("delete", "/v1/sandboxes/{id}/preview-token/{token}"),
    ("get", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("post", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("put", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("patch", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("delete", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("get", "/v1/sandboxes/{id}/ssh"),
    ("get", "/v1/sandboxes/{id}/exec/pty"),
    ("get", "/v1/sandboxes/{id}/terminals"),
    ("delete", "/v1/sandboxes/{id}/terminals/{terminal_id}"),
    ("get", "/v1/sandboxes/{id}/fs/archive"),
    ("get", "/v1/sandboxes/{id}/fs/watch"),
    ("get", "/v1/sandboxes/{id}/fs/uploads"),
    ("get", "/v1/sandboxes/{id}/fs/uploads/{upload}"),
    ("patch", "/v1/sandboxes/{id}/fs"),
    ("post", "/v1/sandboxes/{id}/fs/move"),
    ("post", "/v1/sandboxes/{id}/fs/mkdir"),
    ("put", "/v1/sandboxes/{id}/fs/archive"),
    ("post", "/v1/sandboxes/{id}/fs/uploads"),
    ("put", "/v1/sandboxes/{id}/fs/uploads/{upload}/parts/{number}"),
    ("post", "/v1/sandboxes/{id}/fs/uploads/{upload}/complete"),
    ("delete", "/v1/sandboxes/{id}/fs/uploads/{upload}"),
];
/// All others: what they list is the account's own.
const LISTING: [(&str, &str); 21] = [
    ("get", "/healthz"),
    ("get", "/version"),
    ("get", "/openapi.json"),
    ("get", "/metrics"),
    ("get", "/v1/me"),
    ("get", "/v1/me/tokens"),
    ("post", "/v1/me/tokens"),
    ("get", "/v1/quotas"),
    ("get", "/v1/usage"),
    ("get", "/v1/templates"),
    ("post", "/v1/templates/build"),
    ("get", "/v1/templates/builds"),
    ("get", "/v1/sandboxes"),
    ("post", "/v1/sandboxes"),
    ("get", "/v1/machines"),
    ("post", "/v1/machines"),
    ("get", "/v1/snapshots"),
    ("get", "/v1/volumes"),
    ("post", "/v1/volumes"),
    ("get", "/v1/databases"),
    ("post", "/v1/databases"),
];

/// What one account has.
struct Things {
    sandbox: SandboxId,
    snapshot: String,
    volume: String,
    database: DatabaseId,
    build: String,
    token: String,
}

const EXEC: &str = "theirs-exec";
const TEMPLATE: &str = "theirs-template";
const VOLUME: &str = "theirs-volume";

impl Things {
    async fn make(server: &Server) -> Self {
        let client = server.client();
        let sandbox = server.create(&small()).await.id;
        let route = |route: &str| format!("/v1/machines/{sandbox}/{route}");
        let exec = json!({"exec_id": EXEC, "script": "echo theirs"});
        let started = post(client, &route("execs"), &exec).await;
        assert_eq!(started.status, 202, "{}", started.text());
        let snapshot = client.create_snapshot(&sandbox, &api::CreateSnapshot::default()).await;
        let volume = CreateVolume {
            name: VOLUME.parse().unwrap(),
            size_mb: Some(64),
            size_gb: None,
            from_volume: None,
        };
        let volume = client.create_volume(&volume).await.unwrap().id.to_string();
        let database = CreateDatabase {
            label: Some("theirs-database".to_owned()),
            ..CreateDatabase::default()
        };
        let database = client.create_database(&database).await.unwrap().id;
        let build = server
            .request(Method::POST, "/v1/templates/build")
            .header("content-type", "application/x-www-form-urlencoded")
            .body(format!("name={TEMPLATE}&recipe=from%3D%22base%22"));
        let build = Answer::to(build).await;
        assert_eq!(build.status, 202, "{}", build.text());
        until("the template is built", BUILT, async || {
            (server.get(&format!("/v1/templates/{TEMPLATE}")).await.status == 200).then_some(())
        })
        .await;
        let token = post(client, "/v1/me/tokens", &json!({"label": "theirs-key"})).await.json();
        Self {
            sandbox,
            snapshot: snapshot.unwrap().id.to_string(),
            volume,
            database: client.database_ready(&database, BUILT).await.unwrap().id,
            build: build.json()["id"].as_str().unwrap().to_owned(),
            token: token["prefix"].as_str().unwrap().to_owned(),
        }
    }

    /// The route with what it names, as ids and as names.
    fn paths(&self, route: &str) -> Vec<String> {
        let (sandbox, database) = (self.sandbox.to_string(), self.database.to_string());
        let ids: Vec<&str> = match route.split('/').nth(2).unwrap() {
            "me" => vec![&self.token],
            "snapshots" => vec![&self.snapshot],
            "volumes" => vec![&self.volume, VOLUME],
            "databases" => vec![&database],
            "templates" if route.contains("builds") => vec![&self.build],
            "templates" => vec![TEMPLATE],
            "sandboxes" | "machines" => vec![&sandbox],
            other => panic!("{other}: what does it name?"),
        };
        let query = if route.contains("/fs") { "?path=/etc/hostname" } else { "" };
        let filled = |id: &&str| {
            let path = route.replace("{id}", id).replace("{token}", id).replace("{name}", id);
            path.replace("{exec_id}", EXEC).replace("{upload}", "u").replace("{number}", "1")
                + query
        };
        ids.iter().map(filled).collect()
    }

    /// All there, and as it was.
    async fn are_untouched(&self, server: &Server) {
        let client = server.client();
        let said = client.exec(&self.sandbox, &command("cat /etc/hostname")).await.unwrap();
        assert!(said.stdout.starts_with("sandbox-"), "{said:?}");
        assert!(client.lifecycle(&self.sandbox).await.unwrap().ttl_seconds != Some(60));
        for route in
            ["/v1/snapshots/{id}", "/v1/volumes/{id}", "/v1/databases/{id}", "/v1/templates/{name}"]
        {
            for path in self.paths(route) {
                assert_eq!(server.get(&path).await.status, 200, "{path}");
            }
        }
        let keys = server.get("/v1/me/tokens").await;
        assert!(keys.text().contains(&self.token));
    }
}

async fn post(client: &Client, path: &str, body: &Value) -> Answer {
    Answer::to(client.request(Method::POST, path).json(body)).await
}

/// One that would do something, did the thing exist.
fn request(client: &Client, method: &str, path: &str) -> RequestBuilder {
    let request = client.request(method.to_uppercase().parse().unwrap(), path);
    match method {
        "get" | "delete" => request,
        _ if path.contains("/fs/move") => {
            request.json(&json!({"from": "/etc/hostname", "to": "/a"}))
        }
        _ if path.contains("/fs/") && method == "post" => {
            request.json(&json!({"path": "/a", "url": "http://203.0.113.1/a"}))
        }
        _ if path.ends_with("/network") => request.json(&json!({"egress": "none"})),
        _ if path.ends_with("/lifecycle") => request.json(&json!({"ttl_seconds": 60})),
        _ if path.ends_with("/execs") => {
            request.json(&json!({"exec_id": "another", "script": "hostname theirs"}))
        }
        _ if path.contains("/volume/") => request.json(&json!({"volume_id": VOLUME})),
        _ if path.ends_with("/attach") || path.ends_with("/detach") => {
            request.json(&json!({"machine_id": SandboxId::random()}))
        }
        _ if path.contains("/databases/") => request.json(&json!({"label": "taken"})),
        _ if path.contains("/volumes/") => request.json(&json!({"size_mb": 128})),
        _ => request.json(&json!({"cmd": "hostname theirs", "count": 1, "port": 80, "code": "1"})),
    }
}

async fn nothing_of_another_account_is_there_on_any_route(host: Host) {
    let _room = host.room(1).await;
    let server = Server::start().await;
    let theirs = Things::make(&server).await;
    let stranger = server.account("stranger", "unlimited").await;

    let document = server.get("/openapi.json").await.json();
    let mut served = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let methods = item.as_object().unwrap().keys();
        let methods = methods.filter(|key| {
            ["get", "put", "post", "delete", "patch", "head", "options", "trace"]
                .contains(&key.as_str())
        });
        served.extend(methods.map(|method| (method.clone(), path.clone())));
    }
    let known = NAMING.iter().chain(&LISTING);
    let mut known: Vec<_> =
        known.map(|(method, path)| ((*method).to_owned(), (*path).to_owned())).collect();
    served.sort();
    known.sort();
    assert_eq!(served, known);
    assert!(NAMING.iter().all(|(_, route)| route.contains('{')));

    for (method, route) in NAMING {
        for path in theirs.paths(route) {
            let answer = Answer::to(request(&stranger, method, &path)).await;
            assert_eq!(answer.refusal(), (404, "not_found".to_owned()), "{method} {path}");
        }
    }
    let database = theirs.database.to_string();
    let names = [&theirs.snapshot, &theirs.volume, &database, &theirs.build, &theirs.token];
    for (method, route) in LISTING.into_iter().filter(|(method, _)| *method == "get") {
        let answer = Answer::to(request(&stranger, method, route)).await;
        let text = answer.text();
        assert_eq!(answer.status, 200, "{route}");
        assert!(!text.contains(&theirs.sandbox.to_string()), "{route}: {text}");
        for name in names.iter().map(|name| name.as_str()).chain([
            VOLUME,
            TEMPLATE,
            "theirs-key",
            "theirs-database",
        ]) {
            assert!(!text.contains(name), "{route}: {text}");
        }
    }
    theirs.are_untouched(&server).await;
    let output = server.get(&theirs.paths("/v1/machines/{id}/execs/{exec_id}/output")[0]).await;
    assert_eq!(output.status, 200, "{}", output.text());
    host.end(server).await;
}

async fn what_a_request_names_is_looked_for_in_its_own_account(host: Host) {
    let _room = host.room(1).await;
    let server = Server::start().await;
    let theirs = Things::make(&server).await;
    let stranger = server.account("stranger", "unlimited").await;
    for (path, body) in [
        ("/v1/sandboxes", json!({"from_snapshot": theirs.snapshot})),
        ("/v1/sandboxes", json!({"template": TEMPLATE})),
        ("/v1/sandboxes", json!({"volumes": [{"name": VOLUME}]})),
        ("/v1/sandboxes", json!({"volumes": [{"name": theirs.volume, "read_only": true}]})),
        ("/v1/machines", json!({"stack": TEMPLATE})),
        ("/v1/machines", json!({"root_volume_id": theirs.volume})),
        ("/v1/sandboxes", json!({"databases": [theirs.database]})),
        ("/v1/volumes", json!({"name": "copy", "from_volume": VOLUME})),
        ("/v1/volumes", json!({"name": "copy", "from_volume": theirs.volume})),
    ] {
        let answer = post(&stranger, path, &body).await;
        assert_eq!(answer.refusal(), (404, "not_found".to_owned()), "{path} {body}");
    }
    // The same name and the same key of a request are free for others.
    let volume = json!({"name": VOLUME, "size_mb": 64});
    for (client, expected) in [(&stranger, 201), (server.client(), 409)] {
        let request = client.request(Method::POST, "/v1/volumes").json(&volume);
        let answer = Answer::to(request.header("Idempotency-Key", "the same")).await;
        assert_eq!(answer.status, expected, "{}", answer.text());
    }
    theirs.are_untouched(&server).await;
    host.end(server).await;
}

async fn used(client: &Client) -> Usage {
    client.usage(None, None).await.unwrap()
}

/// What a clock beside the server says must lie around what the server says.
fn is_within(seconds: f64, least: Duration, most: Duration) {
    let (least, most) = (least.as_secs_f64() - 0.01, most.as_secs_f64() + 0.01);
    assert!((least..=most).contains(&seconds), "{seconds} is not between {least} and {most}");
}

async fn use_adds_up_over_restarts_and_ends_with_what_was_used(host: Host) {
    let _room = host.room(1).await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("settings.toml");
    let settings = "[prices]\ncurrency = \"EUR\"\nvcpu_hour = 3.6\nvolume_gb_month = 1.0\n";
    fs::write(&file, settings).unwrap();
    let environment = vec![("ATOLL_SETTINGS", file.display().to_string())];
    let mut server = Server::start_with(Options { environment, ..Options::default() }).await;
    let nothing = used(server.client()).await.used;
    assert_eq!((nothing.vcpu_seconds, nothing.volume_gb_seconds), (0.0, 0.0));

    let before = Instant::now();
    let sandbox = server.create(&small()).await.id;
    let volume = json!({"name": "v", "size_gb": 2});
    assert_eq!(post(server.client(), "/v1/volumes", &volume).await.status, 201);
    let after = Instant::now();
    let sends = command("for n in 1 2 3; do echo x > /dev/udp/192.0.2.1/9; done");
    assert_eq!(server.client().exec(&sandbox, &sends).await.unwrap().exit_code, 0);

    // The machine goes on without its server.
    for end in [End::Killed, End::Asked] {
        server.stop(end).await;
        pause(Duration::from_secs(2)).await;
        server.start_again().await;
        let asked = Instant::now();
        let now = used(server.client()).await.used;
        is_within(now.vcpu_seconds, asked - after, before.elapsed());
        is_within(now.volume_gb_seconds / 2.0, asked - after, before.elapsed());
        assert!((now.memory_gb_seconds - now.vcpu_seconds).abs() < 0.001, "{now:?}");
    }
    let sent = server.client().network(&sandbox).await.unwrap().sent_bytes;
    let now = used(server.client()).await;
    assert!(sent > 0 && now.used.egress_bytes >= sent, "{sent} {now:?}");
    let price = now.price.unwrap();
    assert!((price.vcpus - now.used.vcpu_seconds / 1000.0).abs() < 1e-9, "{price:?}");

    // Not while it stands still.
    server.client().pause(&sandbox).await.unwrap();
    let paused = used(server.client()).await.used.vcpu_seconds;
    pause(Duration::from_secs(2)).await;
    assert_eq!(used(server.client()).await.used.vcpu_seconds, paused);
    server.client().resume(&sandbox).await.unwrap();

    // Both die. What was used is known until the server's last sign of life.
    let sign = || fs::read_to_string(server.data().join("alive")).unwrap_or_default();
    let known = used(server.client()).await.used.vcpu_seconds;
    for _ in 0..2 {
        let last = sign();
        until("a sign of life", SOON, async || (sign() != last).then_some(())).await;
    }
    let machine = server.machine_of(&sandbox);
    let killed = Instant::now();
    server.stop(End::Killed).await;
    kill_process(machine, Signal::KILL).unwrap();
    let dead = killed.elapsed();
    pause(Duration::from_secs(2)).await;
    server.start_again().await;
    let at_first = used(server.client()).await.used;
    let most = known + (killed - before + dead).as_secs_f64();
    assert!((known..=most).contains(&at_first.vcpu_seconds), "{known} {at_first:?} {most}");
    pause(Duration::from_secs(1)).await;
    let later = used(server.client()).await.used;
    assert_eq!(later.vcpu_seconds, at_first.vcpu_seconds);
    assert!(later.volume_gb_seconds > at_first.volume_gb_seconds);

    server.client().delete_volume(&"v".parse().unwrap()).await.unwrap();
    let gone = used(server.client()).await.used.volume_gb_seconds;
    pause(Duration::from_secs(1)).await;
    let told = server.told(&["usage", "--local"]).await;
    assert_eq!(told["volume_gb_seconds"].as_f64(), Some(gone));
    assert_eq!(told["vcpu_seconds"].as_f64(), Some(later.vcpu_seconds));
    host.end(server).await;
}
