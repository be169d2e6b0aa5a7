//! Plans: what an account may have, to the last gigabyte and whoever asks at once.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{DatabaseId, DatabaseStatus, SandboxId};
use client::{Client, Method, SandboxFilter};
use serde_json::{Value, json};
use tests::{Answer, Host, Options, Server, pause, suite, until};

suite! {
    the_free_plan_leaves_twenty_gigabytes_beside_a_machine_of_ten,
    a_machines_root_disk_counts_once_wherever_it_is,
    of_twenty_creates_at_once_ten_are_admitted,
    a_fork_and_a_snapshot_count_before_anything_stands_still,
    a_database_counts_once_from_when_it_is_asked_for,
    another_plan_holds_within_moments,
    a_settings_file_that_is_wrong_says_where;
    soak:
}

const ADMITTED: Duration = Duration::from_secs(240);

async fn server_with(settings: &str) -> (Server, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("settings.toml");
    std::fs::write(&file, settings).unwrap();
    let environment = vec![("ATOLL_SETTINGS", file.display().to_string())];
    (Server::start_with(Options { environment, ..Options::default() }).await, directory)
}

async fn post(client: &Client, path: &str, body: &Value) -> Answer {
    Answer::to(client.request(Method::POST, path).json(body)).await
}

fn small() -> Value {
    json!({"template": "base", "cpu": 1, "memory_mb": 1024, "disk_mb": 10_240})
}

/// Refused for want of room on a busy host, it is asked for again.
async fn settled(client: &Client, path: &str, body: &Value) -> Answer {
    until("it is admitted or refused", ADMITTED, async || {
        let answer = post(client, path, body).await;
        if [503, 507].contains(&answer.status) {
            pause(Duration::from_secs(1)).await;
            return None;
        }
        Some(answer)
    })
    .await
}

async fn created(client: &Client) -> SandboxId {
    let answer = settled(client, "/v1/sandboxes", &small()).await;
    assert_eq!(answer.status, 201, "{}", answer.text());
    answer.json()["id"].as_str().unwrap().parse().unwrap()
}

/// In the dialect in which more than one may have is 403.
const OVER_IN_GB: (u16, &str) = (403, "quota_exceeded");
/// In the other, which is not told when to try again.
const OVER: (u16, &str) = (429, "quota_exceeded");

fn is(answer: &Answer, expected: (u16, &str)) {
    assert_eq!(answer.refusal(), (expected.0, expected.1.to_owned()), "{}", answer.text());
    assert!(!answer.headers.contains_key("retry-after"));
}

async fn the_free_plan_leaves_twenty_gigabytes_beside_a_machine_of_ten(host: Host) {
    let _room = host.room(1).await;
    let server = Server::start().await;
    let ada = server.account("ada", "free").await;
    let volume = async |name: &str, size: Value| {
        let mut body = json!({"name": name});
        body.as_object_mut().unwrap().extend(size.as_object().unwrap().clone());
        post(&ada, "/v1/volumes", &body).await
    };
    let sandbox = created(&ada).await;
    is(&volume("small", json!({"size_gb": 4})).await, (400, "invalid_request"));
    is(&volume("large", json!({"size_gb": 21})).await, OVER_IN_GB);
    is(&volume("large", json!({"size_mb": 21 * 1024})).await, OVER);
    assert_eq!(volume("fits", json!({"size_gb": 20})).await.status, 201);
    is(&volume("more", json!({"size_gb": 5})).await, OVER_IN_GB);
    is(&post(&ada, "/v1/sandboxes", &small()).await, OVER);

    let quotas = Answer::to(ada.request(Method::GET, "/v1/quotas")).await.json();
    assert_eq!(quotas["plan"], "free");
    for (name, limit, usage) in [
        ("volumes", json!(2), json!(1)),
        ("total_gb", json!(30), json!(30)),
        ("volume_min_gb", json!(5), json!(20)),
        ("sandboxes", Value::Null, json!(1)),
        ("vcpus", Value::Null, json!(1)),
        ("memory_mb", Value::Null, json!(1024)),
    ] {
        assert_eq!((&quotas["limits"][name], &quotas["usage"][name]), (&limit, &usage), "{name}");
    }
    let names =
        |field: &str| quotas[field].as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names("limits"), names("usage"));

    // The root disk is given back with its sandbox; a volume without a size is as large as the plan asks for.
    ada.delete_sandbox(&sandbox).await.unwrap();
    let second = volume("second", json!({})).await;
    assert_eq!((second.status, &second.json()["size_gb"]), (201, &json!(5)));
    is(&volume("third", json!({"size_gb": 5})).await, OVER_IN_GB);
    let grow = async |size: Value| {
        Answer::to(ada.request(Method::PATCH, "/v1/volumes/second").json(&size)).await
    };
    is(&grow(json!({"size_gb": 11})).await, OVER_IN_GB);
    is(&grow(json!({"size_mb": 11 * 1024})).await, OVER);
    assert_eq!(grow(json!({"size_gb": 10})).await.status, 200);
    host.end(server).await;
}

async fn a_machines_root_disk_counts_once_wherever_it_is(host: Host) {
    let _room = host.room(1).await;
    let server = Server::start().await;
    let ada = server.account("ada", "free").await;
    let total = async || {
        let quotas = ada.quotas().await.unwrap();
        (quotas.usage["total_gb"].as_f64().unwrap(), quotas.usage["volumes"].as_f64().unwrap())
    };
    let machine = json!({"name": "m", "rootfs_size_gb": 10});
    let made = settled(&ada, "/v1/machines", &machine).await;
    assert_eq!(made.status, 201, "{}", made.text());
    let (id, root) = (made.json()["id"].clone(), made.json()["root_volume_id"].clone());
    let (id, root) = (id.as_str().unwrap(), root.as_str().unwrap());
    assert_eq!(total().await, (10.0, 0.0));
    let large = json!({"name": "m", "rootfs_size_gb": 21});
    is(&post(&ada, "/v1/machines", &large).await, OVER_IN_GB);
    let volume = json!({"name": "fits", "size_gb": 20});
    assert_eq!(post(&ada, "/v1/volumes", &volume).await.status, 201);
    is(&post(&ada, "/v1/machines", &machine).await, OVER_IN_GB);

    // Off, it has what it had; its disk beside it is a volume.
    let stopped = post(&ada, &format!("/v1/machines/{id}/stop"), &json!({})).await;
    assert_eq!(stopped.status, 200, "{}", stopped.text());
    assert_eq!(total().await, (30.0, 1.0));
    let detach = format!("/v1/machines/{id}/volume/detach");
    let detached = post(&ada, &detach, &json!({"volume_id": root})).await;
    assert_eq!(detached.status, 200, "{}", detached.text());
    assert_eq!(total().await, (30.0, 2.0));
    let gone = Answer::to(ada.request(Method::DELETE, &format!("/v1/machines/{id}"))).await;
    assert_eq!(gone.status, 204, "{}", gone.text());
    assert_eq!(total().await, (30.0, 2.0));
    // It boots from there, and is still one disk.
    let again = json!({"name": "m", "root_volume_id": root});
    let again = settled(&ada, "/v1/machines", &again).await;
    assert_eq!(again.status, 201, "{}", again.text());
    assert_eq!(total().await, (30.0, 1.0));
    let id = again.json()["id"].as_str().unwrap().parse().unwrap();
    ada.delete_sandbox(&id).await.unwrap();
    host.end(server).await;
}

async fn of_twenty_creates_at_once_ten_are_admitted(host: Host) {
    let _room = host.room(3).await;
    let (server, _settings) = server_with("[plans.ten]\nsandboxes = 10\n").await;
    let ada = server.account("ada", "ten").await;
    let body = small();
    let asks = (0..20).map(|_| settled(&ada, "/v1/sandboxes", &body));
    let answers = futures::future::join_all(asks).await;
    let (admitted, refused): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| answer.status == 201);
    assert_eq!((admitted.len(), refused.len()), (10, 10));
    for answer in &refused {
        is(answer, OVER);
    }
    let all = ada.sandboxes(&SandboxFilter::default()).await.unwrap();
    assert_eq!(all.len(), 10);
    for sandbox in all {
        ada.delete_sandbox(&sandbox.id).await.unwrap();
    }
    host.end(server).await;
}

async fn a_fork_and_a_snapshot_count_before_anything_stands_still(host: Host) {
    let _room = host.room(3).await;
    let (server, _settings) =
        server_with("[plans.few]\nsandboxes = 3\nsnapshots = 1\nvcpus = 3\n").await;
    let ada = server.account("ada", "few").await;
    let parent = created(&ada).await;
    let route = |route: &str| format!("/v1/sandboxes/{parent}/{route}");
    let (fork, tree, snapshots) = (route("fork"), route("fork-tree"), route("snapshots"));
    is(&settled(&ada, &fork, &json!({"count": 3})).await, OVER);
    is(&settled(&ada, &tree, &json!({"count": 3})).await, OVER);
    assert_eq!(settled(&ada, &snapshots, &json!({})).await.status, 201);
    is(&settled(&ada, &snapshots, &json!({})).await, OVER);
    // Where children begin is no snapshot of the account's own.
    assert_eq!(settled(&ada, &fork, &json!({"count": 2})).await.status, 201);
    is(&settled(&ada, &fork, &json!({})).await, OVER);
    for sandbox in ada.sandboxes(&SandboxFilter::default()).await.unwrap() {
        ada.delete_sandbox(&sandbox.id).await.unwrap();
    }
    host.end(server).await;
}

async fn a_database_counts_once_from_when_it_is_asked_for(host: Host) {
    let _room = host.room(1).await;
    let (server, _settings) = server_with("[plans.one]\nsandboxes = 1\ntotal_gb = 2\n").await;
    let ada = server.account("ada", "one").await;
    let body = json!({});
    let asks = (0..20).map(|_| post(&ada, "/v1/databases", &body));
    let answers = futures::future::join_all(asks).await;
    let (admitted, refused): (Vec<_>, Vec<_>) =
        answers.into_iter().partition(|answer| answer.status < 300);
    assert_eq!((admitted.len(), refused.len()), (1, 19));
    for answer in &refused {
        is(answer, OVER);
    }
    let id: DatabaseId = admitted[0].json()["id"].as_str().unwrap().parse().unwrap();
    let made = ada.database_ready(&id, ADMITTED).await.unwrap();
    assert_eq!(made.status, DatabaseStatus::Running, "{made:?}");
    let clone = format!("/v1/databases/{id}/clone");
    for path in ["/v1/databases", clone.as_str()] {
        is(&post(&ada, path, &body).await, OVER);
    }
    ada.delete_database(&id).await.unwrap();
    let another = post(&ada, "/v1/databases", &body).await.json();
    let another = another["id"].as_str().unwrap().parse().unwrap();
    ada.database_ready(&another, ADMITTED).await.unwrap();
    ada.delete_database(&another).await.unwrap();
    host.end(server).await;
}

async fn another_plan_holds_within_moments(host: Host) {
    let (server, _settings) = server_with("[plans.none]\nvolumes = 0\n").await;
    let ada = server.account("ada", "none").await;
    let volume = json!({"name": "v", "size_mb": 64});
    is(&post(&ada, "/v1/volumes", &volume).await, OVER);
    server.told(&["account", "set-plan", "ada"]).await;
    until("it may have one", Duration::from_secs(30), async || {
        (post(&ada, "/v1/volumes", &volume).await.status == 201).then_some(())
    })
    .await;
    // Not while it has something; then with its keys.
    assert!(!server.local(&["account", "delete", "ada"]).await.status.success());
    ada.delete_volume(&"v".parse().unwrap()).await.unwrap();
    server.told(&["account", "delete", "ada"]).await;
    until("its keys are refused", Duration::from_secs(30), async || ada.me().await.err()).await;
    host.end(server).await;
}

async fn a_settings_file_that_is_wrong_says_where(host: Host) {
    let server = host.server().await;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "[plans.team]\nsandboxs = 3\n").unwrap();
    let path = file.path().display().to_string();
    let output = server.local(&["account", "list", "--settings", &path]).await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success());
    for part in [path.as_str(), "line 2", "sandboxs", "total_gb"] {
        assert!(said.contains(part), "{part}: {said}");
    }
}
