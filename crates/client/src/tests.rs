//! The client against a server that answers as told.

use std::sync::{Arc, Mutex};

use api::{CreateSandbox, ErrorCode, ExecRequest, SandboxId};
use axum::{
    Json, Router,
    body::Body,
    extract::{RawQuery, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use proptest::prelude::*;
use serde_json::json;

use super::*;

async fn serve(router: Router) -> Client {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    Client::new(&url, Some("atl_secret")).unwrap()
}

fn refusal(status: StatusCode, code: &str) -> Response {
    let body = json!({"error": "the host is full", "code": code, "detail": "the host is full", "request_id": "r-1"});
    (status, [(header::RETRY_AFTER, "7")], Json(body)).into_response()
}

#[tokio::test]
async fn a_refusal_keeps_its_code_and_its_invitation_to_retry() {
    let create = post(|| async { refusal(StatusCode::SERVICE_UNAVAILABLE, "unavailable") });
    let client = serve(Router::new().route("/v1/sandboxes", create)).await;
    let error = client.create_sandbox(&CreateSandbox::default()).await.unwrap_err();
    assert_eq!((error.code(), error.status()), (Some(ErrorCode::Unavailable), Some(503)));
    assert_eq!(error.may_retry_after(), Some(Duration::from_secs(7)));
    let refusal = error.refusal().unwrap();
    assert_eq!(
        (refusal.message.as_str(), refusal.request_id.as_deref()),
        ("the host is full", Some("r-1"))
    );
}

#[tokio::test]
async fn a_code_of_a_later_server_is_still_a_refusal_with_its_message() {
    let client =
        serve(Router::new().fallback(async || refusal(StatusCode::IM_A_TEAPOT, "teapot"))).await;
    let error = client.templates().await.unwrap_err();
    assert_eq!((error.code(), error.status()), (None, Some(418)));
    assert_eq!(error.to_string(), "the host is full");
}

#[tokio::test]
async fn an_answer_that_is_not_ours_is_an_error_and_no_panic() {
    let client = serve(Router::new().fallback(async || (StatusCode::BAD_GATEWAY, "<html>"))).await;
    assert_eq!(client.templates().await.unwrap_err().status(), Some(502));
    let client = serve(Router::new().fallback(async || "<html>")).await;
    assert!(matches!(client.templates().await, Err(Error::Unexpected { .. })));
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named_and_the_key_is_not() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let error = Client::new(&url, Some("atl_secret")).unwrap().templates().await.unwrap_err();
    assert!(matches!(&error, Error::Unreachable { .. }));
    let shown = format!("{error} {error:?}");
    assert!(shown.contains(&url) && !shown.contains("atl_secret"), "{shown}");
}

#[test]
fn a_url_that_is_none_is_refused_at_once() {
    for bad in ["", "localhost:8080", "ftp://host", "http://"] {
        assert!(matches!(Client::new(bad, None), Err(Error::BadUrl { .. })), "{bad:?}");
    }
    assert!(matches!(Client::new("http://host", Some("a\nb")), Err(Error::BadKey)));
}

#[tokio::test]
async fn the_key_goes_with_every_request() {
    let who = get(async |headers: HeaderMap| match headers.get(header::AUTHORIZATION) {
        Some(key) if key == "Bearer atl_secret" => {
            Json(json!({"account": "default", "scope": "full"})).into_response()
        }
        _ => StatusCode::UNAUTHORIZED.into_response(),
    });
    let client = serve(Router::new().route("/v1/me", who)).await;
    assert_eq!(client.me().await.unwrap().account.as_str(), "default");
}

#[tokio::test]
async fn an_exec_is_watched_to_its_exit_code() {
    let text = ": ping\n\nevent: stdout\ndata: {\"chunk\":\"caf\\u00e9\\n\"}\n\nevent: stderr\ndata: {\"chunk\":\"e\"}\n\n\
                event: novelty\ndata: {}\n\nevent: exit\ndata: {\"exit_code\":7}\n\n";
    let client = serve(Router::new().fallback(async move || Body::from(text))).await;
    let mut events =
        client.exec_stream(&SandboxId::random(), &ExecRequest::default()).await.unwrap();
    let mut seen = Vec::new();
    while let Some(event) = events.next().await.unwrap() {
        seen.push(event);
    }
    let expected = [
        ExecEvent::Stdout("café\n".to_owned()),
        ExecEvent::Stderr("e".to_owned()),
        ExecEvent::Exited { exit_code: 7 },
    ];
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn white_space_that_kept_a_long_exec_alive_is_no_part_of_the_answer() {
    let answer = "  \n  {\"stdout\":\"\",\"stderr\":\"\",\"exit_code\":0,\"duration_ms\":1,\"truncated\":false,\"timed_out\":false}";
    let client = serve(Router::new().fallback(async move || answer)).await;
    assert_eq!(
        client.exec(&SandboxId::random(), &ExecRequest::default()).await.unwrap().exit_code,
        0
    );
}

#[tokio::test]
async fn a_file_that_is_cut_short_is_an_error() {
    let half = async || {
        let pieces = [Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("gone"))];
        ([(header::CONTENT_LENGTH, "8")], Body::from_stream(futures::stream::iter(pieces)))
    };
    let client = serve(Router::new().fallback(half)).await;
    let read = async {
        let content = client.read_file(&SandboxId::random(), "/x").await?;
        content.bytes().await
    };
    assert!(read.await.is_err());
}

async fn echo_the_query(
    RawQuery(query): RawQuery,
    State(()): State<()>,
) -> Json<serde_json::Value> {
    Json(json!({"path": query.unwrap_or_default(), "bytes": 0}))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_name_reaches_the_server_as_the_same_bytes(name in prop::collection::vec(1u8.., 0..40)) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let query = runtime.block_on(async {
            let client = serve(Router::new().fallback(echo_the_query).with_state(())).await;
            let options = WriteOptions { mode: Some(0o755), ..WriteOptions::default() };
            client.write_file(&SandboxId::random(), &name, "", &options).await.unwrap().path
        });
        let value = query.strip_prefix("path=").and_then(|rest| rest.strip_suffix("&mode=0755")).unwrap();
        prop_assert_eq!(percent_encoding::percent_decode_str(value).collect::<Vec<_>>(), name);
    }
}

/// Answers each request as told, and keeps what it was.
async fn scripted(
    script: &'static [(&'static str, StatusCode, &'static str)],
) -> (Client, Arc<Mutex<Vec<String>>>) {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&heard);
    let answer = async move |method: http::Method, uri: http::Uri, body: String| {
        let request = format!("{method} {uri} {body}").trim_end().to_owned();
        let found = script.iter().find(|(expected, ..)| *expected == request);
        kept.lock().unwrap().push(request);
        match found {
            Some((_, status, answer)) => (*status, *answer).into_response(),
            None => refusal(StatusCode::NOT_FOUND, "not_found"),
        }
    };
    (serve(Router::new().fallback(answer)).await, heard)
}

const ID: &str = "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11";

#[tokio::test]
async fn snapshots_are_taken_found_and_deleted() {
    const SNAPSHOT: &str = r#"{"id": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "sandbox_id": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11",
        "template": "base", "name": "x", "cpu": 1, "memory_mb": 512, "disk_mb": 4096, "size_bytes": 7, "total_bytes": 9,
        "created_at": "2026-01-02T03:04:05Z", "novelty": 1}"#;
    let (client, heard) = scripted(&[
        (
            "POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/snapshots {\"name\":\"x\"}",
            StatusCode::CREATED,
            SNAPSHOT,
        ),
        ("GET /v1/snapshots", StatusCode::OK, r#"{"snapshots": []}"#),
        (
            "GET /v1/snapshots?sandbox_id=7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11",
            StatusCode::OK,
            r#"{"snapshots": []}"#,
        ),
        ("GET /v1/snapshots/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", StatusCode::OK, SNAPSHOT),
        ("DELETE /v1/snapshots/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", StatusCode::NO_CONTENT, ""),
    ])
    .await;
    let (sandbox, id) = (ID.parse().unwrap(), ID.parse().unwrap());
    let request = api::CreateSnapshot { name: Some("x".to_owned()) };
    let taken = client.create_snapshot(&sandbox, &request).await.unwrap();
    assert_eq!((taken.size_bytes, taken.total_bytes), (7, 9));
    assert!(client.snapshots(None).await.unwrap().is_empty());
    assert!(client.snapshots(Some(&sandbox)).await.unwrap().is_empty());
    assert_eq!(client.snapshot(&id).await.unwrap(), taken);
    client.delete_snapshot(&id).await.unwrap();
    let missing = client.delete_snapshot(&api::SnapshotId::random()).await.unwrap_err();
    assert_eq!(missing.code(), Some(ErrorCode::NotFound));
    assert_eq!(heard.lock().unwrap().len(), 6);
}

#[tokio::test]
async fn volumes_are_made_grown_cloned_and_deleted() {
    const VOLUME: &str = r#"{"id": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "name": "data", "kind": "data", "size_mb": 256,
        "size_gb": 0.25, "size_bytes": 268435456, "state": "available", "created_at": "2026-01-02T03:04:05Z"}"#;
    const ATTACHED: &str = r#"{"items": [], "volumes": [{"id": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "name": "data",
        "kind": "root", "size_mb": 1024, "size_gb": 1, "size_bytes": 1073741824, "state": "attached",
        "attached_to": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "created_at": "2026-01-02T03:04:05Z"}]}"#;
    let (client, _) = scripted(&[
        (r#"POST /v1/volumes {"name":"data","size_mb":256}"#, StatusCode::CREATED, VOLUME),
        (r#"POST /v1/volumes {"name":"copy","from_volume":"data"}"#, StatusCode::CREATED, VOLUME),
        ("GET /v1/volumes", StatusCode::OK, ATTACHED),
        ("GET /v1/volumes/data", StatusCode::OK, VOLUME),
        (r#"PATCH /v1/volumes/data {"size_mb":512}"#, StatusCode::OK, VOLUME),
        ("DELETE /v1/volumes/data", StatusCode::NO_CONTENT, ""),
    ])
    .await;
    let create = |name: &str, size_mb, from_volume: Option<&str>| api::CreateVolume {
        name: name.parse().unwrap(),
        size_mb,
        size_gb: None,
        from_volume: from_volume.map(ToOwned::to_owned),
    };
    let made = client.create_volume(&create("data", Some(256), None)).await.unwrap();
    assert_eq!((made.size_gb.as_f64(), made.attached_to), (Some(0.25), None));
    client.create_volume(&create("copy", None, Some("data"))).await.unwrap();
    let listed = client.volumes().await.unwrap();
    assert_eq!(listed[0].attached_to, Some(ID.parse().unwrap()));
    assert_eq!((listed[0].kind, listed[0].size_gb.as_u64()), (api::VolumeKind::Root, Some(1)));
    let name = "data".parse().unwrap();
    assert_eq!(client.volume(&name).await.unwrap(), made);
    let grow = api::UpdateVolume { size_mb: Some(512), size_gb: None };
    client.update_volume(&name, &grow).await.unwrap();
    client.delete_volume(&name).await.unwrap();
}

#[tokio::test]
async fn a_sandbox_rests_and_goes_on() {
    let (client, heard) = scripted(&[
        (
            "POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/pause",
            StatusCode::NO_CONTENT,
            "",
        ),
        (
            "POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/resume",
            StatusCode::NO_CONTENT,
            "",
        ),
        // These may answer with the sandbox.
        ("POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/hibernate", StatusCode::OK, "{}"),
        ("POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/wake", StatusCode::OK, "{}"),
        (
            "GET /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/events?tail=1",
            StatusCode::OK,
            r#"{"events": [{"type": "sandbox.woken", "sandbox_id": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "at": "2026-01-02T03:04:05Z"}]}"#,
        ),
    ])
    .await;
    let id = ID.parse().unwrap();
    client.pause(&id).await.unwrap();
    client.resume(&id).await.unwrap();
    client.hibernate(&id).await.unwrap();
    client.wake(&id).await.unwrap();
    let events = client.sandbox_events(&id, Some(1)).await.unwrap();
    assert_eq!(events[0].kind, api::EventKind::Woken);
    assert_eq!(heard.lock().unwrap().len(), 5);
}

#[tokio::test]
async fn a_winner_is_promoted_and_its_siblings_are_told() {
    let (client, _) = scripted(&[(
        r#"POST /v1/sandboxes/7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11/promote {"cleanup_siblings":true}"#,
        StatusCode::OK,
        r#"{"winner": "7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11", "tree_id": "t", "deleted": ["7b0c5c39-6f0e-4f4e-9d51-3e0a6b8f8f11"], "failures": {"x": "busy"}}"#,
    )])
    .await;
    let request = api::Promote { cleanup_siblings: Some(true), tree_id: None };
    let promoted = client.promote(&ID.parse().unwrap(), &request).await.unwrap();
    assert_eq!((promoted.deleted.len(), promoted.failures["x"].as_str()), (1, "busy"));
}
