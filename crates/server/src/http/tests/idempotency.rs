//! `Idempotency-Key`: once, whatever is sent how often.

use api::ErrorCode;
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::{super::idempotency::UNREPEATABLE, Server, access::all_routes, refusal};
use crate::{clock::Clock, config::Capacity};

const DAY: i64 = 86_400_000;

/// Routes that may be carried out once more when a server ended before it answered: what they make has ids that the
/// request decides on, and the others change nothing by coming twice. A new route is named here or among [`UNREPEATABLE`].
const REPEATABLE: &[&str] = &[
    "/v1/me/tokens",
    "/v1/templates/build",
    "/v1/sandboxes",
    "/v1/sandboxes/{id}/pause",
    "/v1/sandboxes/{id}/resume",
    "/v1/sandboxes/{id}/hibernate",
    "/v1/sandboxes/{id}/wake",
    "/v1/sandboxes/{id}/fork",
    "/v1/sandboxes/{id}/fork-tree",
    "/v1/sandboxes/{id}/promote",
    "/v1/sandboxes/{id}/snapshots",
    "/v1/sandboxes/{id}/fs/import",
    "/v1/sandboxes/{id}/fs/mkdir",
    "/v1/sandboxes/{id}/ports",
    "/v1/sandboxes/{id}/preview-token",
    "/v1/sandboxes/{id}/repl/sessions/{session_id}/restart",
    "/v1/volumes",
    "/v1/volumes/{id}/attach",
    "/v1/volumes/{id}/detach",
    "/v1/databases",
    "/v1/databases/{id}/wake",
    "/v1/databases/{id}/clone",
    "/v1/databases/{id}/reset-credentials",
    "/v1/databases/{id}/failover",
    "/v1/machines",
    "/v1/machines/{id}/start",
    "/v1/machines/{id}/stop",
    "/v1/machines/{id}/volume/attach",
    "/v1/machines/{id}/volume/detach",
    "/v1/machines/{id}/execs",
];

#[test]
fn each_post_is_known_to_be_repeatable_or_not() {
    for (method, path) in all_routes() {
        // What goes to a port is the guest's affair.
        if method == "POST" && !path.contains("/proxy/") {
            let is_repeatable = REPEATABLE.contains(&&*path);
            assert!(
                is_repeatable != UNREPEATABLE.contains(&&*path),
                "{path} is missing in this test"
            );
        }
    }
}

/// Volumes can be made, however full the host's disk is.
async fn started(clock: Clock) -> Server {
    let capacity = Capacity { disk_reserve: Some(0), ..Capacity::default() };
    Server::start_as(clock, std::collections::BTreeMap::new(), capacity).await
}

fn keyed(request: RequestBuilder, key: &str) -> RequestBuilder {
    request.header("Idempotency-Key", key)
}

fn is_replayed(response: &Response) -> bool {
    response.headers().get("idempotency-replayed").is_some_and(|value| value == "true")
}

async fn volume(server: &Server, key: &str, name: &str) -> Response {
    let request =
        server.request(Method::POST, "/v1/volumes").json(&json!({"name": name, "size_mb": 64}));
    keyed(request, key).send().await.unwrap()
}

#[tokio::test]
async fn a_post_that_comes_again_is_done_once_and_answered_alike() {
    let server = started(Clock::default()).await;
    let first = volume(&server, "k", "v").await;
    assert_eq!((first.status().as_u16(), is_replayed(&first)), (201, false));
    let first: Value = first.json().await.unwrap();
    for _ in 0..2 {
        let again = volume(&server, "k", "v").await;
        assert_eq!((again.status().as_u16(), is_replayed(&again)), (201, true));
        assert_eq!(again.json::<Value>().await.unwrap(), first);
    }
    // Without the key, or with another, it is another request.
    assert_eq!(refusal(volume(&server, "other", "v").await).await, ErrorCode::Conflict);
    assert_eq!(refusal(volume(&server, "k", "w").await).await, ErrorCode::Conflict);
    let elsewhere = keyed(server.inside(Method::POST, "/pause"), "k").send().await.unwrap();
    assert_eq!(refusal(elsewhere).await, ErrorCode::Conflict);
    // A refusal is the same as well, but for its own request id.
    let refused = volume(&server, "other", "v").await;
    assert!(is_replayed(&refused));
    assert_eq!(refusal(refused).await, ErrorCode::Conflict);
    server.stop().await;
}

#[tokio::test]
async fn a_key_is_of_a_post_alone_and_has_bounds() {
    let server = started(Clock::default()).await;
    for bad in ["", &"x".repeat(256), "a\tb"] {
        assert_eq!(refusal(volume(&server, bad, "v").await).await, ErrorCode::InvalidRequest);
    }
    let volumes = keyed(server.request(Method::GET, "/v1/volumes"), "k").send().await.unwrap();
    assert_eq!((volumes.status().as_u16(), is_replayed(&volumes)), (200, false));
    assert_eq!(volume(&server, "k", "v").await.status(), 201);
    server.stop().await;
}

#[tokio::test]
async fn the_same_command_at_once_runs_once_and_is_answered_to_all() {
    let server = started(Clock::default()).await;
    let file = server.directory.path().join("ran");
    let command = format!("echo ran >> {}; sleep 1; echo $RANDOM$RANDOM$RANDOM", file.display());
    let ask =
        || keyed(server.inside(Method::POST, "/exec").json(&json!({"cmd": command})), "k").send();
    let answers = futures::future::join_all((0..6).map(|_| ask())).await;
    let mut said = Vec::new();
    for answer in answers {
        said.push(answer.unwrap().json::<Value>().await.unwrap());
    }
    said.push(ask().await.unwrap().json().await.unwrap());
    assert!(said.iter().all(|one| one == &said[0]), "{said:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "ran\n");
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_hears_the_answer_when_it_asks_again() {
    let server = started(Clock::default()).await;
    let file = server.directory.path().join("ran");
    let command = format!("echo ran >> {}; sleep 2; echo done", file.display());
    let ask =
        || keyed(server.inside(Method::POST, "/exec").json(&json!({"cmd": command})), "k").send();
    let gone = tokio::time::timeout(std::time::Duration::from_millis(700), ask()).await;
    assert!(gone.is_err(), "it sleeps");
    let answer: Value = ask().await.unwrap().json().await.unwrap();
    assert_eq!(answer["stdout"], "done\n");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "ran\n");
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_kept_is_not_done_again_either() {
    let server = started(Clock::default()).await;
    let file = server.directory.path().join("ran");
    let command = json!({"cmd": format!("echo ran >> {}", file.display())});
    let stream =
        || keyed(server.inside(Method::POST, "/exec/stream").json(&command), "stream").send();
    assert!(stream().await.unwrap().text().await.unwrap().contains("event: exit"));
    assert_eq!(refusal(stream().await.unwrap()).await, ErrorCode::Conflict);

    let long = json!({"cmd": format!("echo ran >> {}; head -c 2000000 /dev/zero", file.display())});
    let long = || keyed(server.inside(Method::POST, "/exec").json(&long), "long").send();
    assert_eq!(long().await.unwrap().json::<Value>().await.unwrap()["exit_code"], 0);
    assert_eq!(refusal(long().await.unwrap()).await, ErrorCode::Conflict);
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "ran\nran\n");

    let token = || keyed(server.request(Method::POST, "/v1/me/tokens"), "token").send();
    let token_of = token().await.unwrap().json::<api::NewKey>().await.unwrap().token;
    assert_eq!(refusal(token().await.unwrap()).await, ErrorCode::Conflict);
    let row = server.app.db.keyed(&api::AccountId::default_account(), "token").await.unwrap();
    assert!(!row.unwrap().answer.unwrap().contains(&token_of[..20]));
    server.stop().await;
}

#[tokio::test]
async fn a_day_later_the_key_is_new() {
    let clock = Clock::held_at(400 * DAY);
    let server = started(clock.clone()).await;
    assert_eq!(volume(&server, "k", "v").await.status(), 201);
    // Whatever the time of day does meanwhile.
    clock.jump(-30 * DAY);
    clock.advance(DAY - 1);
    assert!(is_replayed(&volume(&server, "k", "v").await));
    clock.advance(2);
    assert_eq!(volume(&server, "k", "w").await.status(), 201);
    server.stop().await;
}
