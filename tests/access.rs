//! Who may do what, and how a refusal looks.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateKey, CreateSandbox, ErrorCode, ExecRequest, Scope};
use client::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use tests::{Answer, Host, Options, Server, command, small, suite, until};

suite! {
    every_route_is_in_the_table,
    a_request_without_a_valid_key_is_refused_on_every_route,
    a_key_of_scope_read_changes_nothing_on_any_route,
    a_key_works_in_either_header_until_it_is_revoked,
    a_key_is_shown_once_and_kept_as_a_hash,
    a_key_that_cannot_be_is_refused,
    the_key_of_the_environment_is_valid_beside_others,
    figures_need_a_key_unless_set_otherwise,
    a_refusal_has_the_shape_that_clients_read,
    a_request_id_is_echoed,
    secrets_are_in_no_log_line,
    odd_requests_do_not_shake_the_server;
    soak:
}

/// What a key of scope `read` gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Gate {
    /// Anyone.
    Open,
    /// Keys of both scopes.
    Read,
    /// Refused with 403.
    Full,
}

/// All routes. One that is missing here fails the first claim, so that nobody adds one without deciding.
const ROUTES: [(&str, &str, Gate); 112] = [
    ("get", "/healthz", Gate::Open),
    ("get", "/version", Gate::Open),
    ("get", "/openapi.json", Gate::Open),
    ("get", "/metrics", Gate::Read),
    ("get", "/v1/me", Gate::Read),
    ("get", "/v1/me/tokens", Gate::Read),
    ("post", "/v1/me/tokens", Gate::Full),
    ("delete", "/v1/me/tokens/{token}", Gate::Full),
    ("get", "/v1/quotas", Gate::Read),
    ("get", "/v1/usage", Gate::Read),
    ("get", "/v1/templates", Gate::Read),
    ("get", "/v1/templates/{name}", Gate::Read),
    ("delete", "/v1/templates/{name}", Gate::Full),
    ("post", "/v1/templates/build", Gate::Full),
    ("get", "/v1/templates/builds", Gate::Read),
    ("get", "/v1/templates/builds/{id}", Gate::Read),
    ("get", "/v1/templates/builds/{id}/logs", Gate::Read),
    ("get", "/v1/sandboxes", Gate::Read),
    ("post", "/v1/sandboxes", Gate::Full),
    ("get", "/v1/sandboxes/{id}", Gate::Read),
    ("delete", "/v1/sandboxes/{id}", Gate::Full),
    ("get", "/v1/sandboxes/{id}/lifecycle", Gate::Read),
    ("patch", "/v1/sandboxes/{id}/lifecycle", Gate::Full),
    ("get", "/v1/sandboxes/{id}/network", Gate::Read),
    ("patch", "/v1/sandboxes/{id}/network", Gate::Full),
    ("get", "/v1/sandboxes/{id}/events", Gate::Read),
    ("get", "/v1/sandboxes/{id}/metrics", Gate::Read),
    ("post", "/v1/sandboxes/{id}/pause", Gate::Full),
    ("post", "/v1/sandboxes/{id}/resume", Gate::Full),
    ("post", "/v1/sandboxes/{id}/hibernate", Gate::Full),
    ("post", "/v1/sandboxes/{id}/wake", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fork", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fork-tree", Gate::Full),
    ("post", "/v1/sandboxes/{id}/promote", Gate::Full),
    ("post", "/v1/sandboxes/{id}/snapshots", Gate::Full),
    ("get", "/v1/snapshots", Gate::Read),
    ("get", "/v1/snapshots/{id}", Gate::Read),
    ("delete", "/v1/snapshots/{id}", Gate::Full),
    ("get", "/v1/volumes", Gate::Read),
    ("post", "/v1/volumes", Gate::Full),
    ("get", "/v1/volumes/{id}", Gate::Read),
    ("patch", "/v1/volumes/{id}", Gate::Full),
    ("delete", "/v1/volumes/{id}", Gate::Full),
    ("post", "/v1/volumes/{id}/attach", Gate::Full),
    ("post", "/v1/volumes/{id}/detach", Gate::Full),
    ("get", "/v1/databases", Gate::Read),
    ("post", "/v1/databases", Gate::Full),
    ("get", "/v1/databases/{id}", Gate::Read),
    ("patch", "/v1/databases/{id}", Gate::Full),
    ("delete", "/v1/databases/{id}", Gate::Full),
    ("get", "/v1/databases/{id}/connection", Gate::Full),
    ("post", "/v1/databases/{id}/wake", Gate::Full),
    ("post", "/v1/databases/{id}/clone", Gate::Full),
    ("post", "/v1/databases/{id}/reset-credentials", Gate::Full),
    ("post", "/v1/databases/{id}/failover", Gate::Full),
    ("get", "/v1/machines", Gate::Read),
    ("post", "/v1/machines", Gate::Full),
    ("get", "/v1/machines/{id}", Gate::Read),
    ("delete", "/v1/machines/{id}", Gate::Full),
    ("post", "/v1/machines/{id}/start", Gate::Full),
    ("post", "/v1/machines/{id}/stop", Gate::Full),
    ("post", "/v1/machines/{id}/volume/attach", Gate::Full),
    ("post", "/v1/machines/{id}/volume/detach", Gate::Full),
    ("post", "/v1/sandboxes/{id}/exec", Gate::Full),
    ("post", "/v1/sandboxes/{id}/exec/stream", Gate::Full),
    ("get", "/v1/sandboxes/{id}/repl/sessions", Gate::Read),
    ("post", "/v1/sandboxes/{id}/repl/sessions", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/repl/sessions/{session_id}", Gate::Full),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/restart", Gate::Full),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run", Gate::Full),
    ("post", "/v1/sandboxes/{id}/repl/sessions/{session_id}/run/stream", Gate::Full),
    ("get", "/v1/sandboxes/{id}/logs", Gate::Read),
    ("post", "/v1/machines/{id}/execs", Gate::Full),
    ("get", "/v1/machines/{id}/execs", Gate::Read),
    ("get", "/v1/machines/{id}/execs/{exec_id}", Gate::Read),
    ("delete", "/v1/machines/{id}/execs/{exec_id}", Gate::Full),
    ("get", "/v1/machines/{id}/execs/{exec_id}/output", Gate::Read),
    ("get", "/v1/sandboxes/{id}/fs", Gate::Read),
    ("put", "/v1/sandboxes/{id}/fs", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/fs", Gate::Full),
    ("get", "/v1/sandboxes/{id}/fs/dir", Gate::Read),
    ("get", "/v1/sandboxes/{id}/fs/stat", Gate::Read),
    ("post", "/v1/sandboxes/{id}/fs/import", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fs/export", Gate::Full),
    ("get", "/v1/sandboxes/{id}/ports", Gate::Read),
    ("post", "/v1/sandboxes/{id}/ports", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/ports", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/ports/{port}", Gate::Full),
    ("post", "/v1/sandboxes/{id}/preview-token", Gate::Full),
    ("get", "/v1/sandboxes/{id}/preview-token", Gate::Read),
    ("delete", "/v1/sandboxes/{id}/preview-token/{token}", Gate::Full),
    ("get", "/v1/sandboxes/{id}/proxy/{port}/{path}", Gate::Full),
    ("post", "/v1/sandboxes/{id}/proxy/{port}/{path}", Gate::Full),
    ("put", "/v1/sandboxes/{id}/proxy/{port}/{path}", Gate::Full),
    ("patch", "/v1/sandboxes/{id}/proxy/{port}/{path}", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/proxy/{port}/{path}", Gate::Full),
    ("get", "/v1/sandboxes/{id}/ssh", Gate::Full),
    ("get", "/v1/sandboxes/{id}/exec/pty", Gate::Full),
    ("get", "/v1/sandboxes/{id}/terminals", Gate::Read),
    ("delete", "/v1/sandboxes/{id}/terminals/{terminal_id}", Gate::Full),
    ("get", "/v1/sandboxes/{id}/fs/archive", Gate::Read),
    ("get", "/v1/sandboxes/{id}/fs/watch", Gate::Read),
    ("get", "/v1/sandboxes/{id}/fs/uploads", Gate::Read),
    ("get", "/v1/sandboxes/{id}/fs/uploads/{upload}", Gate::Read),
    ("patch", "/v1/sandboxes/{id}/fs", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fs/move", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fs/mkdir", Gate::Full),
    ("put", "/v1/sandboxes/{id}/fs/archive", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fs/uploads", Gate::Full),
    ("put", "/v1/sandboxes/{id}/fs/uploads/{upload}/parts/{number}", Gate::Full),
    ("post", "/v1/sandboxes/{id}/fs/uploads/{upload}/complete", Gate::Full),
    ("delete", "/v1/sandboxes/{id}/fs/uploads/{upload}", Gate::Full),
];

/// The route as a request that would do something, for a sandbox that is there.
fn request(client: &Client, method: &str, route: &str, id: &str) -> RequestBuilder {
    let mut path = route
        .replace("{id}", id)
        .replace("{name}", "base")
        .replace("{token}", "atl_12345678")
        .replace("{upload}", "u")
        .replace("{number}", "1");
    if route.contains("/fs") {
        path.push_str(match route.rsplit('/').next() {
            Some("dir") => "?path=/etc",
            // Of what is there it would never end.
            Some("watch") => "?path=/none",
            _ => "?path=/etc/hostname",
        });
    }
    let request = client.request(method.to_uppercase().parse().unwrap(), &path);
    match (method, route) {
        (_, "/v1/sandboxes") if method == "post" => {
            request.json(&json!({"template": "base", "cpu": 1, "memory_mb": 1024}))
        }
        (_, "/v1/sandboxes/{id}/lifecycle") if method == "patch" => {
            request.json(&json!({"ttl_seconds": 1}))
        }
        (_, "/v1/sandboxes/{id}/network") if method == "patch" => {
            request.json(&json!({"egress": "none"}))
        }
        ("post", "/v1/me/tokens") => request.json(&json!({"label": "smuggled", "scope": "full"})),
        ("post", "/v1/templates/build") => request
            .header("content-type", "application/x-www-form-urlencoded")
            .body("name=smuggled&recipe=from%3D%22base%22"),
        ("post", "/v1/machines/{id}/execs") => {
            request.json(&json!({"exec_id": "smuggled", "script": "touch /root/smuggled"}))
        }
        ("post", "/v1/sandboxes/{id}/fs/move") => {
            request.json(&json!({"from": "/etc/hostname", "to": "/root/smuggled"}))
        }
        ("post", "/v1/sandboxes/{id}/fs/mkdir" | "/v1/sandboxes/{id}/fs/uploads") => {
            request.json(&json!({"path": "/root/smuggled"}))
        }
        ("post", _) => request
            .json(&json!({"cmd": "touch /root/smuggled", "code": "open('/root/smuggled', 'w')"})),
        ("put", _) => request.body("smuggled"),
        _ => request,
    }
}

async fn every_route_is_in_the_table(host: Host) {
    let server = host.server().await;
    let document = server.get("/openapi.json").await.json();
    let mut served = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys().filter(|key| {
            ["get", "put", "post", "delete", "patch", "head", "options", "trace"]
                .contains(&key.as_str())
        }) {
            served.push((method.clone(), path.clone()));
        }
    }
    let mut known: Vec<_> =
        ROUTES.iter().map(|(method, path, _)| ((*method).to_owned(), (*path).to_owned())).collect();
    served.sort();
    known.sort();
    assert_eq!(served, known);
}

async fn a_request_without_a_valid_key_is_refused_on_every_route(host: Host) {
    let server = host.server().await;
    let near = format!("{}x", server.key());
    for key in [None, Some("nonsense"), Some("atl_"), Some(near.as_str())] {
        let client = server.client_with(key);
        for (method, route, gate) in ROUTES {
            let answer =
                Answer::to(request(&client, method, route, "00000000-0000-4000-8000-000000000000"))
                    .await;
            match gate {
                Gate::Open => assert_eq!(answer.status, 200, "{method} {route}"),
                Gate::Read | Gate::Full => assert_eq!(
                    answer.refusal(),
                    (401, "unauthenticated".to_owned()),
                    "{method} {route}"
                ),
            }
        }
    }
    for header in ["", "Bearer", "Bearer ", "Basic YTpi", server.key()] {
        let answer = Answer::to(
            server.client_with(None).request(Method::GET, "/v1/me").header("authorization", header),
        )
        .await;
        assert_eq!(answer.refusal(), (401, "unauthenticated".to_owned()), "{header:?}");
    }
}

async fn a_key_of_scope_read_changes_nothing_on_any_route(host: Host) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let key = CreateKey {
        label: Some("reader".to_owned()),
        scope: Some(Scope::Read),
        ..CreateKey::default()
    };
    let key = server.client().create_key(&key).await.unwrap();
    let reader = server.client_with(Some(&key.token));
    let state = async || {
        let (keys, templates) =
            (server.client().keys().await.unwrap(), server.client().templates().await.unwrap());
        let builds = server.client().builds().await.unwrap();
        let ttl = sandbox.client().lifecycle(&sandbox.id).await.unwrap();
        let policy = sandbox.client().network(&sandbox.id).await.unwrap().policy;
        let labels: Vec<_> = keys.into_iter().map(|key| key.label).collect();
        (labels, templates.len(), builds.len(), ttl, policy, sandbox.names("/root").await)
    };
    sandbox.run("cp /etc/hostname /etc/hostname.before").await;
    let before = state().await;
    for (method, route, gate) in ROUTES {
        // This one's answer is as long as its sandbox lives only when it is followed.
        let answer = Answer::to(request(&reader, method, route, &sandbox.id.to_string())).await;
        match gate {
            Gate::Full => {
                assert_eq!(answer.refusal(), (403, "forbidden".to_owned()), "{method} {route}")
            }
            Gate::Open | Gate::Read
                if [
                    "/builds/",
                    "/snapshots/{",
                    "/volumes/{",
                    "/execs/{",
                    "/databases/{",
                    "/uploads/{",
                    "/fs/watch",
                ]
                .iter()
                .any(|part| route.contains(part)) =>
            {
                assert_eq!(answer.status, 404, "{method} {route}")
            }
            Gate::Open | Gate::Read => {
                assert_eq!(answer.status, 200, "{method} {route}: {}", answer.text())
            }
        }
    }
    // Methods that no route has are no way in either.
    for method in ["HEAD", "OPTIONS", "TRACE", "POST", "PUT", "PATCH", "DELETE", "BREW"] {
        let path = format!("/v1/sandboxes/{}", sandbox.id);
        let answer = Answer::to(reader.request(method.parse().unwrap(), &path)).await;
        assert!(
            answer.status == 200 && method == "HEAD" || [403, 404, 405].contains(&answer.status),
            "{method}: {}",
            answer.status
        );
    }
    assert_eq!(state().await, before);
    sandbox.run("cmp /etc/hostname /etc/hostname.before").await;
    assert_eq!(reader.me().await.unwrap().scope, Scope::Read);
}

async fn a_key_works_in_either_header_until_it_is_revoked(host: Host) {
    let server = host.server().await;
    let key = server
        .client()
        .create_key(&CreateKey { label: Some("brief".to_owned()), ..CreateKey::default() })
        .await
        .unwrap();
    let ask = async |name: &str, value: &str| {
        Answer::to(server.client_with(None).request(Method::GET, "/v1/me").header(name, value))
            .await
            .status
    };
    let bearer = format!("Bearer {}", key.token);
    assert_eq!(
        (ask("authorization", &bearer).await, ask("x-api-key", &key.token).await),
        (200, 200)
    );
    server.client().revoke_key(&key.key.prefix).await.unwrap();
    // At once: not after some cache has run out.
    assert_eq!(
        (ask("authorization", &bearer).await, ask("x-api-key", &key.token).await),
        (401, 401)
    );
    let again = server.client().revoke_key(&key.key.prefix).await.unwrap_err();
    assert_eq!(again.code(), Some(ErrorCode::NotFound));
}

async fn a_key_is_shown_once_and_kept_as_a_hash(host: Host) {
    let server = host.server().await;
    let created = Answer::to(
        server
            .request(Method::POST, "/v1/me/tokens")
            .json(&json!({"label": "shown once", "expires_in_days": 30})),
    )
    .await;
    let key = created.json();
    let token = key["token"].as_str().unwrap();
    assert!(
        token.len() > 40 && token.starts_with(key["prefix"].as_str().unwrap()),
        "{}",
        key["prefix"]
    );
    assert_eq!(key["label"], "shown once");
    assert!(key["created_at"].as_str().unwrap().ends_with('Z'));
    let list = server.get("/v1/me/tokens").await;
    assert!(list.json().as_array().unwrap().iter().any(|listed| listed["prefix"] == key["prefix"]));
    assert!(!list.text().contains(token));
    for file in std::fs::read_dir(server.data())
        .unwrap()
        .map(|file| file.unwrap().path())
        .filter(|path| path.is_file())
    {
        let content = std::fs::read(&file).unwrap();
        for secret in [token, server.key()] {
            assert!(
                memchr::memmem::find(&content, secret.as_bytes()).is_none(),
                "{}",
                file.display()
            );
        }
    }
}

async fn a_key_that_cannot_be_is_refused(host: Host) {
    let server = host.server().await;
    let bad = [
        json!({"label": "x".repeat(500)}),
        json!({"label": 7}),
        json!({"label": "a\nb"}),
        json!({"expires_in_days": 0}),
        json!({"expires_in_days": -1}),
        json!({"expires_in_days": 1_000_000}),
        json!({"expires_in_days": "soon"}),
        json!({"scope": "admin"}),
        json!({"scope": 7}),
        json!([1]),
    ];
    let before = server
        .client()
        .keys()
        .await
        .unwrap()
        .iter()
        .filter(|key| key.label.starts_with('x'))
        .count();
    for body in bad {
        let refused = Answer::to(server.request(Method::POST, "/v1/me/tokens").json(&body)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{body}");
    }
    let after = server
        .client()
        .keys()
        .await
        .unwrap()
        .iter()
        .filter(|key| key.label.starts_with('x'))
        .count();
    assert_eq!(before, after);
}

async fn the_key_of_the_environment_is_valid_beside_others(host: Host) {
    let options =
        Options { environment: vec![("ATOLL_OPEN_METRICS", "1".to_owned())], ..Options::default() };
    let mut server = Server::start_with(options).await;
    let first = server.key().to_owned();
    // A second start, with a key of its own in the environment: both are valid, and without it only the first.
    let fixed = "a-key-of-the-environment-0123456789";
    server.options_mut().environment.push(("ATOLL_API_KEY", fixed.to_owned()));
    server.restart(tests::End::Asked).await;
    for key in [first.as_str(), fixed] {
        assert_eq!(server.client_with(Some(key)).me().await.unwrap().scope, Scope::Full);
    }
    assert!(
        server.client().keys().await.unwrap().iter().all(|key| !fixed.starts_with(&key.prefix))
    );
    server.options_mut().environment.retain(|(name, _)| *name != "ATOLL_API_KEY");
    server.restart(tests::End::Asked).await;
    assert_eq!(server.client_with(Some(fixed)).me().await.unwrap_err().status(), Some(401));
    assert!(server.client().me().await.is_ok());
    // The other setting: figures for whoever asks.
    let open = Answer::to(server.client_with(None).request(Method::GET, "/metrics")).await;
    assert_eq!(open.status, 200);
    host.end(server).await;
}

async fn figures_need_a_key_unless_set_otherwise(host: Host) {
    let server = host.server().await;
    let figures = server.get("/metrics").await;
    assert_eq!(figures.status, 200);
    assert!(figures.header("content-type").starts_with("text/plain"), "{figures:?}");
    for line in figures.text().lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(name.starts_with("atoll_") || name.starts_with("process_"), "{line}");
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }
    let closed = Answer::to(server.client_with(None).request(Method::GET, "/metrics")).await;
    assert_eq!(closed.refusal(), (401, "unauthenticated".to_owned()));
    assert_eq!(
        Answer::to(server.client_with(None).request(Method::GET, "/healthz")).await.json()["status"],
        "ok"
    );
    assert!(Answer::to(server.client_with(None).request(Method::GET, "/version")).await.json()["version"].is_string());
}

async fn a_refusal_has_the_shape_that_clients_read(host: Host) {
    let server = host.server().await;
    let unknown = "00000000-0000-4000-8000-000000000000";
    // `refusal` checks the shape of each.
    for (method, path, expected) in [
        ("GET", "/nowhere".to_owned(), (404, "not_found")),
        ("GET", "/v1".to_owned(), (404, "not_found")),
        ("GET", "/v1/".to_owned(), (404, "not_found")),
        ("POST", "/v1/sandboxes/".to_owned(), (404, "not_found")),
        ("GET", "/v1/sandboxes/%ff".to_owned(), (404, "not_found")),
        ("PUT", "/v1/sandboxes".to_owned(), (405, "method_not_allowed")),
        ("BREW", "/v1/sandboxes".to_owned(), (405, "method_not_allowed")),
        ("POST", "/healthz".to_owned(), (405, "method_not_allowed")),
        ("PATCH", format!("/v1/sandboxes/{unknown}"), (405, "method_not_allowed")),
        ("GET", format!("/v1/sandboxes/{unknown}"), (404, "not_found")),
        ("GET", "/v1/templates/no-such".to_owned(), (404, "not_found")),
        ("GET", "/v1/templates/%00".to_owned(), (404, "not_found")),
        ("GET", "/v1/templates/builds/no-such".to_owned(), (404, "not_found")),
        ("DELETE", "/v1/me/tokens/no-such".to_owned(), (404, "not_found")),
        ("GET", "/v1/sandboxes?limit=x".to_owned(), (400, "invalid_request")),
    ] {
        let answer = Answer::to(server.request(method.parse().unwrap(), &path)).await;
        assert_eq!(answer.refusal(), (expected.0, expected.1.to_owned()), "{method} {path}");
        // No paths of the host, no words on which clients send a request again.
        let text = answer.text();
        for word in ["/var/lib", "connection refused", "no route to host", "i/o timeout"] {
            assert!(!text.contains(word), "{method} {path}: {text}");
        }
    }
}

async fn a_request_id_is_echoed(host: Host) {
    let server = host.server().await;
    let ask = async |path: &str, id: Option<&str>| {
        let request = server.request(Method::GET, path);
        Answer::to(match id {
            Some(id) => request.header("x-request-id", id),
            None => request,
        })
        .await
    };
    for path in ["/v1/me", "/healthz", "/nowhere"] {
        assert_eq!(
            ask(path, Some("job-7.a:b")).await.header("x-request-id"),
            "job-7.a:b",
            "{path}"
        );
        let (one, other) = (ask(path, None).await, ask(path, None).await);
        assert!(one.header("x-request-id").len() >= 16, "{path}");
        assert_ne!(one.header("x-request-id"), other.header("x-request-id"), "{path}");
    }
    assert_eq!(ask("/nowhere", Some("job-8")).await.json()["request_id"], "job-8");
    // What would garble a log or an answer is replaced.
    for id in ["quote\"", "two words", &"x".repeat(1000)] {
        assert_ne!(ask("/v1/me", Some(id)).await.header("x-request-id"), id);
    }
}

async fn secrets_are_in_no_log_line(host: Host) {
    let options =
        Options { environment: vec![("ATOLL_LOG", "trace".to_owned())], ..Options::default() };
    let server = Server::start_with(options).await;
    let _room = host.room(1).await;
    let env = |name: &str, value: &str| Some(BTreeMap::from([(name.to_owned(), value.to_owned())]));
    let sandbox = server
        .create(&CreateSandbox { env: env("A", "secret-of-the-create-1a2b"), ..small() })
        .await;
    let client = server.client();
    let request = ExecRequest {
        env: env("B", "secret-of-the-command-3c4d"),
        stdin: Some("secret-of-the-input-5e6f".to_owned()),
        ..command(
            "echo secret-of-the-text-7a8b; echo secret-of-the-output-9c0d | tr a-z a-z; cat >/dev/null",
        )
    };
    client.exec(&sandbox.id, &request).await.unwrap();
    client
        .write_file(
            &sandbox.id,
            "/root/f",
            "secret-of-the-file-1e2f",
            &client::WriteOptions::default(),
        )
        .await
        .unwrap();
    client.read_file(&sandbox.id, "/root/f").await.unwrap().bytes().await.unwrap();
    let made = client.create_key(&CreateKey::default()).await.unwrap();
    assert!(server.client_with(Some(&made.token)).me().await.is_ok());
    assert_eq!(
        server.client_with(Some("secret-of-a-wrong-key-3a4b")).me().await.unwrap_err().status(),
        Some(401)
    );
    // Refusals are logged as well.
    client
        .exec(
            &sandbox.id,
            &ExecRequest { env: env("BAD=", "secret-of-the-refused-5c6d"), ..command("true") },
        )
        .await
        .unwrap_err();
    client.delete_sandbox(&sandbox.id).await.unwrap();
    let log = server.log();
    assert!(log.contains(&sandbox.id.to_string()), "the log has something to tell");
    for line in log.lines() {
        assert!(!line.contains("secret-of"), "{line}");
        assert!(!line.contains(made.token.as_str()) && !line.contains(server.key()), "{line}");
    }
    host.end(server).await;
}

async fn odd_requests_do_not_shake_the_server(host: Host) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let server = host.server().await;
    let address = server.url().strip_prefix("http://").unwrap().to_owned();
    let (key, deep) = (server.key(), "[".repeat(100_000));
    let odd = [
        "\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}".to_owned(),
        format!(
            "GET /v1/me HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nX: {}\r\n\r\n",
            "y".repeat(1 << 20)
        ),
        format!("GET /{} HTTP/1.1\r\nHost: x\r\n\r\n", "a".repeat(200_000)),
        format!(
            "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: -1\r\n\r\n"
        ),
        format!(
            "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz"
        ),
        format!(
            "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {}\r\n\r\n{deep}",
            deep.len()
        ),
        format!(
            "POST /v1/me/tokens HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 3\r\n\r\n\u{7}{{\""
        ),
    ];
    for text in odd {
        let mut connection = tokio::net::TcpStream::connect(&address).await.unwrap();
        // The server may close on what it does not understand, in the middle of it.
        let _ = connection.write_all(text.as_bytes()).await;
        let _ = connection.shutdown().await;
        let mut answer = Vec::new();
        let ended =
            tokio::time::timeout(Duration::from_secs(20), connection.read_to_end(&mut answer))
                .await;
        assert!(ended.is_ok(), "no end after {:?}", text.chars().take(60).collect::<String>());
        assert!(
            answer.is_empty() || answer.starts_with(b"HTTP/1.1 4"),
            "{:?}",
            String::from_utf8_lossy(&answer)
        );
    }
    let nested = Answer::to(server.request(Method::POST, "/v1/sandboxes").body(deep)).await;
    assert_eq!(nested.refusal(), (400, "invalid_request".to_owned()));
    until("the server answers", Duration::from_secs(5), async || {
        (server.get("/v1/me").await.status == 200).then_some(())
    })
    .await;
    let lines: Vec<Value> = server
        .log()
        .lines()
        .filter(|line| line.contains("panicked"))
        .map(|line| json!(line))
        .collect();
    assert_eq!(lines, Vec::<Value>::new());
}
