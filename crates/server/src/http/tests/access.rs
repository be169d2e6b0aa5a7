//! Who may use what, and what every answer has.

use std::sync::{Mutex, PoisonError};

use api::{ErrorCode, Key, Me, NewKey, Scope};
use reqwest::Method;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use utoipa::openapi::PathItem;

use super::{KEY, Server, refusal};

/// All that a key of scope `read` may use: lists and plain reads. A new route is named here or below.
const READ: &[(&str, &str)] = &[
    ("GET", "/metrics"),
    ("GET", "/v1/me"),
    ("GET", "/v1/me/tokens"),
    ("GET", "/v1/quotas"),
    ("GET", "/v1/usage"),
    ("GET", "/v1/templates"),
    ("GET", "/v1/templates/{name}"),
    ("GET", "/v1/templates/builds"),
    ("GET", "/v1/templates/builds/{id}"),
    ("GET", "/v1/templates/builds/{id}/logs"),
    ("GET", "/v1/sandboxes"),
    ("GET", "/v1/sandboxes/{id}"),
    ("GET", "/v1/sandboxes/{id}/lifecycle"),
    ("GET", "/v1/sandboxes/{id}/network"),
    ("GET", "/v1/sandboxes/{id}/events"),
    ("GET", "/v1/sandboxes/{id}/metrics"),
    ("GET", "/v1/snapshots"),
    ("GET", "/v1/snapshots/{id}"),
    ("GET", "/v1/volumes"),
    ("GET", "/v1/volumes/{id}"),
    ("GET", "/v1/databases"),
    ("GET", "/v1/databases/{id}"),
    ("GET", "/v1/machines"),
    ("GET", "/v1/machines/{id}"),
    ("GET", "/v1/sandboxes/{id}/repl/sessions"),
    ("GET", "/v1/sandboxes/{id}/logs"),
    ("GET", "/v1/machines/{id}/execs"),
    ("GET", "/v1/machines/{id}/execs/{exec_id}"),
    ("GET", "/v1/machines/{id}/execs/{exec_id}/output"),
    ("GET", "/v1/sandboxes/{id}/fs"),
    ("GET", "/v1/sandboxes/{id}/fs/dir"),
    ("GET", "/v1/sandboxes/{id}/fs/stat"),
    ("GET", "/v1/sandboxes/{id}/ports"),
    ("GET", "/v1/sandboxes/{id}/preview-token"),
    ("GET", "/v1/sandboxes/{id}/terminals"),
    ("GET", "/v1/sandboxes/{id}/fs/archive"),
    ("GET", "/v1/sandboxes/{id}/fs/watch"),
    ("GET", "/v1/sandboxes/{id}/fs/uploads"),
    ("GET", "/v1/sandboxes/{id}/fs/uploads/{upload}"),
];
const FULL: &[(&str, &str)] = &[
    ("POST", "/v1/me/tokens"),
    ("DELETE", "/v1/me/tokens/{token}"),
    ("DELETE", "/v1/templates/{name}"),
    ("POST", "/v1/templates/build"),
    ("POST", "/v1/sandboxes"),
    ("DELETE", "/v1/sandboxes/{id}"),
    ("PATCH", "/v1/sandboxes/{id}/lifecycle"),
    ("PATCH", "/v1/sandboxes/{id}/network"),
    ("POST", "/v1/sandboxes/{id}/pause"),
    ("POST", "/v1/sandboxes/{id}/resume"),
    ("POST", "/v1/sandboxes/{id}/hibernate"),
    ("POST", "/v1/sandboxes/{id}/wake"),
    ("POST", "/v1/sandboxes/{id}/fork"),
    ("POST", "/v1/sandboxes/{id}/fork-tree"),
    ("POST", "/v1/sandboxes/{id}/promote"),
    ("POST", "/v1/sandboxes/{id}/snapshots"),
    ("DELETE", "/v1/snapshots/{id}"),
    ("POST", "/v1/volumes"),
    ("PATCH", "/v1/volumes/{id}"),
    ("DELETE", "/v1/volumes/{id}"),
    ("POST", "/v1/volumes/{id}/attach"),
    ("POST", "/v1/volumes/{id}/detach"),
    ("POST", "/v1/databases"),
    ("PATCH", "/v1/databases/{id}"),
    ("DELETE", "/v1/databases/{id}"),
    ("GET", "/v1/databases/{id}/connection"),
    ("POST", "/v1/databases/{id}/wake"),
    ("POST", "/v1/databases/{id}/clone"),
    ("POST", "/v1/databases/{id}/reset-credentials"),
    ("POST", "/v1/databases/{id}/failover"),
    ("POST", "/v1/machines"),
    ("DELETE", "/v1/machines/{id}"),
    ("POST", "/v1/machines/{id}/start"),
    ("POST", "/v1/machines/{id}/stop"),
    ("POST", "/v1/machines/{id}/volume/attach"),
    ("POST", "/v1/machines/{id}/volume/detach"),
    ("POST", "/v1/sandboxes/{id}/exec"),
    ("POST", "/v1/sandboxes/{id}/exec/stream"),
    ("POST", "/v1/sandboxes/{id}/repl/sessions"),
    ("DELETE", "/v1/sandboxes/{id}/repl/sessions/{session_id}"),
    ("POST", "/v1/sandboxes/{id}/repl/sessions/{session_id}/restart"),
    ("POST", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run"),
    ("POST", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run/stream"),
    ("POST", "/v1/machines/{id}/execs"),
    ("DELETE", "/v1/machines/{id}/execs/{exec_id}"),
    ("PUT", "/v1/sandboxes/{id}/fs"),
    ("DELETE", "/v1/sandboxes/{id}/fs"),
    ("POST", "/v1/sandboxes/{id}/fs/import"),
    ("POST", "/v1/sandboxes/{id}/fs/export"),
    ("POST", "/v1/sandboxes/{id}/ports"),
    ("DELETE", "/v1/sandboxes/{id}/ports"),
    ("DELETE", "/v1/sandboxes/{id}/ports/{port}"),
    ("POST", "/v1/sandboxes/{id}/preview-token"),
    ("DELETE", "/v1/sandboxes/{id}/preview-token/{token}"),
    ("GET", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("POST", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("PUT", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("PATCH", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("DELETE", "/v1/sandboxes/{id}/proxy/{port}/{path}"),
    ("GET", "/v1/sandboxes/{id}/ssh"),
    ("GET", "/v1/sandboxes/{id}/exec/pty"),
    ("DELETE", "/v1/sandboxes/{id}/terminals/{terminal_id}"),
    ("PATCH", "/v1/sandboxes/{id}/fs"),
    ("POST", "/v1/sandboxes/{id}/fs/move"),
    ("POST", "/v1/sandboxes/{id}/fs/mkdir"),
    ("PUT", "/v1/sandboxes/{id}/fs/archive"),
    ("POST", "/v1/sandboxes/{id}/fs/uploads"),
    ("PUT", "/v1/sandboxes/{id}/fs/uploads/{upload}/parts/{number}"),
    ("POST", "/v1/sandboxes/{id}/fs/uploads/{upload}/complete"),
    ("DELETE", "/v1/sandboxes/{id}/fs/uploads/{upload}"),
];
const OPEN: &[(&str, &str)] = &[("GET", "/healthz"), ("GET", "/version"), ("GET", "/openapi.json")];

fn methods(item: &PathItem) -> Vec<&'static str> {
    let all = [
        ("GET", item.get.is_some()),
        ("PUT", item.put.is_some()),
        ("POST", item.post.is_some()),
        ("DELETE", item.delete.is_some()),
        ("PATCH", item.patch.is_some()),
        ("HEAD", item.head.is_some()),
        ("OPTIONS", item.options.is_some()),
        ("TRACE", item.trace.is_some()),
    ];
    all.into_iter().filter(|(_, exists)| *exists).map(|(method, _)| method).collect()
}

/// Every route there is, from the document that is generated from them.
pub(super) fn all_routes() -> Vec<(&'static str, String)> {
    let document = super::super::openapi();
    document
        .paths
        .paths
        .iter()
        .flat_map(|(path, item)| methods(item).into_iter().map(|method| (method, path.clone())))
        .collect()
}

#[tokio::test]
async fn a_key_that_may_only_read_changes_nothing_on_any_route() {
    let server = Server::start().await;
    let key = server.key(Scope::Read).await;
    for (method, path) in all_routes() {
        let has = |list: &[(&str, &str)]| list.contains(&(method, path.as_str()));
        let (open, read, full) = (has(OPEN), has(READ), has(FULL));
        assert_eq!(
            usize::from(open) + usize::from(read) + usize::from(full),
            1,
            "{method} {path} is missing in this test"
        );

        let url = path
            .replace("{id}", &server.sandbox.to_string())
            .replace("{name}", "base")
            .replace("{token}", "atl_x");
        let request = |key: Option<&str>| {
            let request =
                server.anonymous(method.parse().unwrap(), &url).query(&[("path", "/nowhere")]);
            key.map_or(request.try_clone().unwrap(), |key| request.header("X-API-Key", key))
        };
        let status = request(Some(&key)).send().await.unwrap().status().as_u16();
        assert_eq!(status == 403, full, "{method} {path} with a key of scope read: {status}");
        let status = request(None).send().await.unwrap().status().as_u16();
        assert_eq!(status == 401, !open, "{method} {path} without a key: {status}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_key_that_is_none_is_refused_and_a_revoked_one_at_once() {
    let server = Server::start().await;
    let me = |key: String| server.anonymous(Method::GET, "/v1/me").bearer_auth(key).send();
    assert_eq!(me(KEY.to_owned()).await.unwrap().json::<Me>().await.unwrap().scope, Scope::Full);
    for wrong in [String::new(), "wrong".to_owned(), KEY.to_uppercase(), format!("{KEY}x")] {
        assert_eq!(refusal(me(wrong).await.unwrap()).await, ErrorCode::Unauthenticated);
    }
    let created = server
        .request(Method::POST, "/v1/me/tokens")
        .json(&serde_json::json!({"label": "ci", "expires_in_days": null}));
    let created = created.send().await.unwrap();
    assert_eq!(created.status(), 201);
    let new: NewKey = created.json().await.unwrap();
    assert_eq!(me(new.token.clone()).await.unwrap().status(), 200);
    let listed: Vec<Key> =
        server.request(Method::GET, "/v1/me/tokens").send().await.unwrap().json().await.unwrap();
    assert_eq!((listed.len(), listed[0].label.as_str()), (1, "ci"));

    let revoked = server
        .request(Method::DELETE, &format!("/v1/me/tokens/{}", new.key.prefix))
        .send()
        .await
        .unwrap();
    assert_eq!(revoked.status(), 204);
    assert_eq!(refusal(me(new.token).await.unwrap()).await, ErrorCode::Unauthenticated);
    server.stop().await;
}

#[tokio::test]
async fn every_refusal_has_the_same_shape() {
    let server = Server::start().await;
    let sandbox = format!("/v1/sandboxes/{}", server.sandbox);
    let nobody = format!("/v1/sandboxes/{}", api::SandboxId::random());
    for (method, path, body, code) in [
        (Method::GET, "/v1/nothing", "", ErrorCode::NotFound),
        (Method::GET, "/", "", ErrorCode::NotFound),
        (Method::PATCH, "/v1/sandboxes", "", ErrorCode::MethodNotAllowed),
        (Method::GET, nobody.as_str(), "", ErrorCode::NotFound),
        (Method::GET, "/v1/sandboxes/not-an-id", "", ErrorCode::NotFound),
        (Method::POST, "/v1/sandboxes", "{", ErrorCode::InvalidRequest),
        (Method::POST, "/v1/sandboxes", r#"{"cpu": "two"}"#, ErrorCode::InvalidRequest),
        (Method::POST, "/v1/me/tokens", r#"{"expires_in_days": 0}"#, ErrorCode::InvalidRequest),
        (Method::DELETE, "/v1/me/tokens/none", "", ErrorCode::NotFound),
        (Method::GET, "/v1/templates/none", "", ErrorCode::NotFound),
        (Method::GET, "/v1/templates/%ff", "", ErrorCode::NotFound),
        (Method::GET, "/v1/sandboxes/%ff", "", ErrorCode::NotFound),
        (Method::DELETE, "/v1/me/tokens/%ff", "", ErrorCode::NotFound),
        (Method::GET, "/v1/templates/builds/none", "", ErrorCode::NotFound),
        (Method::POST, &format!("{sandbox}/exec"), "", ErrorCode::InvalidRequest),
        (Method::GET, &format!("{sandbox}/fs"), "", ErrorCode::InvalidRequest),
        (Method::GET, &format!("{sandbox}/logs?stream=x"), "", ErrorCode::InvalidRequest),
    ] {
        let response = server.request(method.clone(), path).body(body).send().await.unwrap();
        assert_eq!(refusal(response).await, code, "{method} {path} {body}");
    }
    server.stop().await;
}

#[tokio::test]
async fn the_clients_request_id_comes_back_in_header_and_body() {
    let server = Server::start().await;
    let response = server
        .request(Method::GET, "/v1/nothing")
        .header("X-Request-Id", "mine-1")
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["x-request-id"], "mine-1");
    assert_eq!(response.json::<api::ErrorBody>().await.unwrap().request_id, "mine-1");
    server.stop().await;
}

#[tokio::test]
async fn a_handler_that_panics_answers_all_the_same() {
    let server = Server::start().await;
    let panicking = axum::routing::get(async || -> () { panic!("on purpose") });
    let layer = axum::middleware::from_fn_with_state(
        std::sync::Arc::clone(&server.app),
        super::super::edge::edge,
    );
    let mut router = axum::Router::new().route("/", panicking).layer(layer);
    let request = http::Request::get("/").body(axum::body::Body::empty()).unwrap();
    let response = tower::Service::call(&mut router, request).await.unwrap();
    assert_eq!(response.status(), 500);
    let body = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let body: api::ErrorBody = serde_json::from_slice(&body).unwrap();
    assert!(body.code == ErrorCode::Internal && !body.error.contains("on purpose"));
    server.stop().await;
}

#[tokio::test]
async fn metrics_name_routes_and_never_ids() {
    let server = Server::start().await;
    server.inside(Method::GET, "/lifecycle").send().await.unwrap();
    server.anonymous(Method::GET, "/v1/some/thing/of/theirs").send().await.unwrap();
    let text = server.request(Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
    assert!(text.contains(r#"route="/v1/sandboxes/{id}/lifecycle",status="200"} 1"#), "{text}");
    assert!(!text.contains(&server.sandbox.to_string()) && !text.contains("theirs"), "{text}");
    server.stop().await;
}

#[derive(Clone, Default)]
struct Captured(std::sync::Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// The runtime has one thread, so that all of the server's log comes here.
#[tokio::test]
async fn tokens_environment_and_content_are_in_no_log_line() {
    let captured = Captured::default();
    let writer = captured.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // With a single subscriber, places that log first in another test's thread would be taken for silent.
    let _second = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let _guard = tracing::subscriber::set_default(subscriber);

    let server = Server::start().await;
    let token = server.key(Scope::Full).await;
    let path = server.directory.path().join("secret-file").display().to_string();
    let exec = serde_json::json!({"cmd": "echo secret-output; echo $A; cat; exit 3", "env": {"A": "secret-value"}, "stdin": "secret-input"});
    let bearer = |request: reqwest::RequestBuilder| request.bearer_auth(&token).send();
    let inside = |method, route: &str| {
        server.anonymous(method, &format!("/v1/sandboxes/{}{route}", server.sandbox))
    };
    bearer(inside(Method::POST, "/exec").json(&exec)).await.unwrap();
    bearer(inside(Method::POST, "/exec/stream").json(&exec)).await.unwrap().text().await.unwrap();
    bearer(inside(Method::PUT, "/fs").query(&[("path", &path)]).body("secret-content"))
        .await
        .unwrap();
    bearer(inside(Method::GET, "/fs").query(&[("path", &path)]))
        .await
        .unwrap()
        .bytes()
        .await
        .unwrap();
    bearer(inside(Method::GET, "/fs?path=relative&access_token=secret-token")).await.unwrap();
    bearer(inside(Method::GET, "/proxy/1/x?access_token=secret-token")).await.unwrap();
    bearer(inside(Method::GET, "/proxy/1/x?access_token=atp_secret-token")).await.unwrap();
    let preview = bearer(inside(Method::POST, "/preview-token").body(r#"{"port": 1}"#));
    let preview: serde_json::Value = preview.await.unwrap().json().await.unwrap();
    let preview = preview["token"].as_str().unwrap().to_owned();
    inside(Method::GET, &format!("/proxy/1/x?access_token={preview}")).send().await.unwrap();
    bearer(inside(Method::POST, "/exec").body(r#"{"cmd": 1, "env": {"A": "secret-value"}}"#))
        .await
        .unwrap();
    server.anonymous(Method::GET, "/v1/me").bearer_auth("secret-wrong-key").send().await.unwrap();
    server.stop().await;

    let log = String::from_utf8(captured.0.lock().unwrap_or_else(PoisonError::into_inner).clone())
        .unwrap();
    assert!(log.contains("refused a request"), "nothing was captured: {log}");
    for secret in [
        &token[8..],
        &preview[8..],
        KEY,
        "secret-output",
        "secret-value",
        "secret-input",
        "secret-content",
        "secret-token",
        "secret-wrong-key",
    ] {
        assert!(!log.contains(secret), "{secret} is in the log");
    }
}

#[tokio::test]
async fn whoever_is_refused_in_the_middle_of_sending_hears_why() {
    let server = Server::start().await;
    let file = "/v1/sandboxes/00000000-0000-4000-8000-000000000000/fs?path=/x";
    let reader = server.key(Scope::Read).await;
    for (path, key, status) in [
        (file, "no-such-key", "401"),
        (file, reader.as_str(), "403"),
        (file, KEY, "404"),
        ("/v1/sandboxes/x/fs?path=/x", KEY, "404"),
        ("/v1/nothing", KEY, "404"),
    ] {
        // As most clients do it: all is sent before anything is read.
        let mut connection =
            TcpStream::connect(server.url.trim_start_matches("http://")).await.unwrap();
        let head = format!(
            "PUT {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {}\r\n\r\n",
            32 << 20
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..32 {
            connection.write_all(&[b'x'; 1 << 20]).await.expect(path);
        }
        let mut answer = [0; 12];
        connection.read_exact(&mut answer).await.expect(path);
        assert_eq!(answer, format!("HTTP/1.1 {status}").as_bytes(), "{path}");
    }
    server.stop().await;
}
