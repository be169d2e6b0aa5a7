//! What one client can take from the others.

use std::{num::NonZeroU32, time::Duration};

use api::{ErrorCode, ExecResult, Scope};
use reqwest::{Method, Response};
use serde_json::json;
use tokio::{io::AsyncReadExt, net::TcpStream};

use super::{Server, refusal};
use crate::config::Capacity;

async fn limited(capacity: Capacity) -> Server {
    Server::start_limited(capacity).await
}

fn retry_after(response: &Response) -> u64 {
    response.headers()["retry-after"].to_str().unwrap().parse().unwrap()
}

async fn figure(server: &Server, name: &str) -> u64 {
    let text = server.request(Method::GET, "/metrics").send().await.unwrap().text().await.unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
}

#[tokio::test]
async fn idle_connections_keep_nobody_out() {
    let server = limited(Capacity { most_connections: 16, ..Capacity::default() }).await;
    let address = server.url.strip_prefix("http://").unwrap();
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(TcpStream::connect(address).await.unwrap());
        let health = server.anonymous(Method::GET, "/healthz").timeout(Duration::from_secs(5));
        assert_eq!(health.send().await.unwrap().status(), 200);
    }
    let closed = tokio::time::timeout(Duration::from_secs(5), idle[0].read(&mut [0; 16])).await;
    assert_eq!(closed.expect("the idlest is closed").unwrap_or(0), 0);
    assert_eq!(figure(&server, "atoll_connections_limit").await, 16);
    assert!(figure(&server, "atoll_connections").await <= 16);
    server.stop().await;
}

#[tokio::test]
async fn a_connection_beyond_all_that_are_in_use_is_told_so() {
    let server = limited(Capacity { most_connections: 2, ..Capacity::default() }).await;
    let watch = async || {
        let request = server.inside(Method::POST, "/exec/stream").json(&json!({"cmd": "sleep 20"}));
        request.send().await.unwrap()
    };
    let under_way = [watch().await, watch().await];
    let refused = server.anonymous(Method::GET, "/healthz").send().await.unwrap();
    assert_eq!((refused.status().as_u16(), retry_after(&refused)), (503, 1));
    let body: serde_json::Value = refused.json().await.unwrap();
    assert_eq!((&body["code"], &body["error"]), (&json!("unavailable"), &body["detail"]));
    drop(under_way);
    let health = async || server.anonymous(Method::GET, "/healthz").send().await.unwrap().status();
    let again = async {
        while health().await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), again).await.expect("places are given back");
    server.stop().await;
}

#[tokio::test]
async fn a_key_that_asks_too_often_waits_alone() {
    let rate_limit = NonZeroU32::new(2);
    let server = limited(Capacity { rate_limit, ..Capacity::default() }).await;
    let other = server.key(Scope::Read).await;
    let (mut allowed, mut refused) = (0, None);
    // Twice the rate at once, and what comes back while they are asked for.
    while refused.is_none() && allowed < 100 {
        let response = server.request(Method::GET, "/v1/me").send().await.unwrap();
        match response.status().as_u16() {
            200 => allowed += 1,
            _ => refused = Some(response),
        }
    }
    assert!(allowed >= 4, "{allowed}");
    let refused = refused.expect("there is a limit");
    assert_eq!(retry_after(&refused), 1);
    assert_eq!(refusal(refused).await, ErrorCode::RateLimited);
    let with_other = server.anonymous(Method::GET, "/v1/me").bearer_auth(other);
    assert_eq!(with_other.send().await.unwrap().status(), 200);
    assert_eq!(server.anonymous(Method::GET, "/healthz").send().await.unwrap().status(), 200);
    server.stop().await;
}

#[tokio::test]
async fn bodies_and_output_have_a_limit_together() {
    let server = limited(Capacity { buffer_bytes: 1 << 20, ..Capacity::default() }).await;
    let exec = async |body: serde_json::Value| {
        server.inside(Method::POST, "/exec").json(&body).send().await.unwrap()
    };
    let mark = server.directory.path().join("started");
    let cmd = format!("touch {}", mark.display());
    let refused = exec(json!({"cmd": cmd, "stdin": "x".repeat(2 << 20)})).await;
    assert!(retry_after(&refused) > 0);
    assert_eq!(refusal(refused).await, ErrorCode::Unavailable);
    assert!(!mark.exists(), "nothing was started");

    let cut = exec(json!({"cmd": format!("head -c 3000000 /dev/zero | tr '\\0' x; {cmd}")})).await;
    assert_eq!(cut.status(), 200, "what has started is not refused");
    let cut: ExecResult = cut.json().await.unwrap();
    assert!(cut.truncated && cut.exit_code == 0 && mark.exists());
    assert!((64 << 10..1 << 20).contains(&cut.stdout.len()), "{}", cut.stdout.len());

    let small: ExecResult = exec(json!({"cmd": "echo fits"})).await.json().await.unwrap();
    assert_eq!((small.stdout.as_str(), small.truncated), ("fits\n", false));
    assert_eq!(figure(&server, "atoll_buffer_bytes").await, 0, "all was given back");
    assert_eq!(figure(&server, "atoll_buffer_limit_bytes").await, 1 << 20);
    server.stop().await;
}
