//! A host whose time of day is set to another while sandboxes run.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};
use time::{Duration, OffsetDateTime, format_description::well_known::Rfc3339};

use super::Server;
use crate::clock::{Clock, from_ms};

const DAY: i64 = 86_400_000;
const NOW: i64 = 20_000 * DAY;

async fn expires_at(server: &Server) -> OffsetDateTime {
    let shown: Value = server.inside(Method::GET, "").send().await.unwrap().json().await.unwrap();
    OffsetDateTime::parse(shown["expires_at"].as_str().unwrap(), &Rfc3339).unwrap()
}

async fn status(server: &Server) -> u16 {
    server.inside(Method::GET, "/fs/stat?path=/").send().await.unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_jump_of_the_clock_neither_expires_a_sandbox_nor_lets_it_live_on() {
    let clock = Clock::held_at(NOW);
    let server = Server::start_at(clock.clone(), BTreeMap::new()).await;
    let change = server.inside(Method::PATCH, "/lifecycle").json(&json!({"ttl_seconds": 100}));
    assert_eq!(change.send().await.unwrap().status(), 200);
    assert_eq!(expires_at(&server).await, from_ms(NOW) + Duration::seconds(100));

    for jump in [400 * DAY, -900 * DAY] {
        clock.jump(jump);
        assert_eq!(status(&server).await, 200, "after a jump by {jump}");
        // What is told is the time of day at which it will end, by the clock as it is now.
        assert_eq!(expires_at(&server).await, from_ms(clock.now_ms()) + Duration::seconds(100));
    }
    clock.advance(99_000);
    assert_eq!(status(&server).await, 200);
    clock.advance(1000);
    assert_eq!(status(&server).await, 404, "its time is up, whatever day it is");
    server.stop().await;
}
