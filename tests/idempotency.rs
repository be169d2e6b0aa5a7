//! `Idempotency-Key`: what is asked for once is done once, whoever dies meanwhile.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeSet, time::Duration};

use client::{Client, Method, SandboxFilter};
use serde_json::{Value, json};
use tests::{Answer, End, Host, Server, pause, suite, until};

suite! {
    a_create_that_comes_twice_at_once_makes_one_sandbox,
    a_create_is_answered_alike_after_a_restart,
    a_server_that_is_killed_while_it_creates_has_made_one_in_the_end,
    a_fork_and_a_snapshot_that_come_twice_are_made_once,
    a_machine_that_comes_again_boots_once;
    soak:
}

const SETTLED: Duration = Duration::from_secs(120);

async fn post(client: &Client, path: &str, key: &str, body: &Value) -> Answer {
    Answer::to(client.request(Method::POST, path).header("Idempotency-Key", key).json(body)).await
}

/// Until it is neither refused for want of room nor still under way.
async fn made(server: &Server, path: &str, key: &str, body: &Value) -> Value {
    until("it is made", SETTLED, async || {
        let answer = post(server.client(), path, key, body).await;
        match answer.status {
            201 => Some(answer.json()),
            503 | 507 => {
                pause(Duration::from_millis(500)).await;
                None
            }
            status => panic!("{status}: {}", answer.text()),
        }
    })
    .await
}

fn small() -> Value {
    json!({"template": "base", "cpu": 1, "memory_mb": 1024, "metadata": {"of": "a key"}})
}

async fn count(client: &Client) -> usize {
    client.sandboxes(&SandboxFilter::default()).await.unwrap().len()
}

async fn a_create_that_comes_twice_at_once_makes_one_sandbox(host: Host) {
    let _room = host.room(1).await;
    let server = Server::start().await;
    let body = small();
    let both = || made(&server, "/v1/sandboxes", "k", &body);
    let (one, other) = tokio::join!(both(), both());
    assert_eq!((&one["id"], count(server.client()).await), (&other["id"], 1));
    let another = post(server.client(), "/v1/sandboxes", "k", &json!({"template": "base"})).await;
    assert_eq!(another.refusal(), (409, "conflict".to_owned()));
    host.end(server).await;
}

async fn a_create_is_answered_alike_after_a_restart(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let first = made(&server, "/v1/sandboxes", "k", &small()).await;
    let refused = json!({"template": "none"});
    let refusal = post(server.client(), "/v1/sandboxes", "refused", &refused).await.refusal();
    assert_eq!(refusal.0, 404);
    for end in [End::Asked, End::Killed] {
        server.restart(end).await;
        assert_eq!(made(&server, "/v1/sandboxes", "k", &small()).await, first);
        let again = post(server.client(), "/v1/sandboxes", "refused", &refused).await;
        assert_eq!(again.refusal(), refusal);
        let another = post(server.client(), "/v1/sandboxes", "k", &refused).await;
        assert_eq!(another.refusal(), (409, "conflict".to_owned()));
    }
    assert_eq!(count(server.client()).await, 1);
    host.end(server).await;
}

async fn a_server_that_is_killed_while_it_creates_has_made_one_in_the_end(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let body = small();
    for (number, delay_ms) in [20, 120, 400].into_iter().enumerate() {
        let key = format!("killed-{number}");
        let client = server.client().clone();
        let first = {
            let (key, body) = (key.clone(), body.clone());
            let request =
                client.request(Method::POST, "/v1/sandboxes").header("Idempotency-Key", key);
            tokio::spawn(request.json(&body).send())
        };
        pause(Duration::from_millis(delay_ms)).await;
        server.restart(End::Killed).await;
        // It died with its server, or was quicker.
        let _ = first.await.unwrap();
        let sandbox = made(&server, "/v1/sandboxes", &key, &body).await;
        assert_eq!(made(&server, "/v1/sandboxes", &key, &body).await, sandbox);
        until("nothing half-made is left", SETTLED, async || {
            (count(server.client()).await == 1).then_some(())
        })
        .await;
        server.delete_all().await;
    }
    host.end(server).await;
}

async fn a_machine_that_comes_again_boots_once(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let body = json!({"name": "m", "vcpus": 1, "memory_mb": 1024});
    let both = || made(&server, "/v1/machines", "k", &body);
    let (one, other) = tokio::join!(both(), both());
    assert_eq!(one, other);
    server.restart(End::Killed).await;
    assert_eq!(made(&server, "/v1/machines", "k", &body).await, one);
    // Told again what it did, though it runs no longer; another key asks anew.
    let start = format!("/v1/machines/{}/start", one["id"].as_str().unwrap());
    let started = post(server.client(), &start, "start", &json!({})).await;
    assert_eq!(started.status, 200, "{}", started.text());
    assert_eq!(post(server.client(), &start, "start", &json!({})).await.body, started.body);
    assert_eq!(count(server.client()).await, 1);
    assert_eq!(server.client().volumes().await.unwrap().len(), 1);
    host.end(server).await;
}

async fn a_fork_and_a_snapshot_that_come_twice_are_made_once(host: Host) {
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    let parent = made(&server, "/v1/sandboxes", "parent", &small()).await;
    let inside = |route: &str| format!("/v1/sandboxes/{}/{route}", parent["id"].as_str().unwrap());
    let (fork, snapshot) = (inside("fork"), inside("snapshots"));
    let forked = made(&server, &fork, "fork", &json!({"count": 2})).await;
    let taken = made(&server, &snapshot, "snapshot", &json!({})).await;
    server.restart(End::Killed).await;
    assert_eq!(made(&server, &fork, "fork", &json!({"count": 2})).await, forked);
    assert_eq!(made(&server, &snapshot, "snapshot", &json!({})).await, taken);
    let listed = server.client().sandboxes(&SandboxFilter::default()).await.unwrap();
    let listed: BTreeSet<_> = listed.iter().map(|sandbox| sandbox.id.to_string()).collect();
    let children = forked["children"].as_array().unwrap().iter().chain([&parent]);
    assert_eq!(listed, children.map(|one| one["id"].as_str().unwrap().to_owned()).collect());
    assert_eq!(server.client().snapshots(None).await.unwrap().len(), 1);
    host.end(server).await;
}
