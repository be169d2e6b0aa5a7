//! Execs that outlive their client.

use std::time::Duration;

use api::{ErrorBody, ErrorCode, Exec, ExecList, ExecOutput, ExecState};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::{Server, refusal};
use crate::sandbox::ExecLimits;

const SOON: Duration = Duration::from_secs(60);

impl Server {
    fn execs(&self, method: Method, route: &str) -> RequestBuilder {
        self.request(method, &format!("/v1/machines/{}/execs{route}", self.sandbox))
    }

    async fn begin(&self, request: Value) -> Response {
        self.execs(Method::POST, "").json(&request).send().await.unwrap()
    }

    async fn begun(&self, request: Value) -> Exec {
        let response = self.begin(request).await;
        assert_eq!(response.status(), 202);
        response.json().await.unwrap()
    }

    async fn look(&self, id: &str) -> Response {
        self.execs(Method::GET, &format!("/{id}?wait_ms=30000")).send().await.unwrap()
    }

    async fn ended(&self, id: &str) -> Exec {
        let exec: Exec = self.look(id).await.json().await.unwrap();
        assert_ne!(exec.state, ExecState::Running);
        exec
    }

    async fn page(&self, id: &str, query: &str) -> ExecOutput {
        let response = self.execs(Method::GET, &format!("/{id}/output?{query}")).send().await;
        response.unwrap().json().await.unwrap()
    }

    /// To its end, page by page.
    async fn output(&self, id: &str, stream: &str) -> Vec<u8> {
        let mut whole = Vec::new();
        loop {
            let query = format!("stream={stream}&offset={}&wait_ms=30000", whole.len());
            let page = self.page(id, &query).await;
            assert_eq!(page.offset, whole.len() as u64);
            whole.extend(BASE64.decode(page.data).unwrap());
            assert_eq!(page.next_offset, whole.len() as u64);
            if page.eof {
                return whole;
            }
        }
    }

    /// The end is in the database, and nothing of it in memory.
    async fn is_written_down(&self, id: &str) {
        let id = id.parse().unwrap();
        let written = async || {
            let row = self.app.db.exec(&self.sandbox, &id).await.unwrap();
            row.is_some_and(|row| row.state != ExecState::Running)
        };
        until(written).await;
    }
}

async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, wait).await.expect("it comes to pass");
}

#[tokio::test]
async fn a_short_script_comes_back_finished_and_is_kept_as_it_was() {
    let server = Server::start().await;
    let script = "printf 'a\\0\\377'; echo err >&2; exit 3";
    let request = json!({"exec_id": "mount-1", "script": script, "timeout_sec": 60});
    server.begun(request).await;
    let exec = server.ended("mount-1").await;
    assert_eq!((exec.state, exec.exit_code), (ExecState::Failed, Some(3)));
    assert_eq!((exec.stdout_bytes, exec.stderr_bytes, exec.truncated), (3, 4, false));
    assert_eq!(exec.machine_id, server.sandbox);
    assert!(exec.finished_at.unwrap() >= exec.started_at);
    assert_eq!(server.output("mount-1", "stdout").await, b"a\0\xff");
    server.is_written_down("mount-1").await;
    assert_eq!(server.ended("mount-1").await, exec);
    assert_eq!(server.output("mount-1", "stdout").await, b"a\0\xff");
    assert_eq!(server.output("mount-1", "stderr").await, b"err\n");
    let page = server.page("mount-1", "offset=1&limit=1").await;
    assert_eq!((page.next_offset, page.data.as_str(), page.eof), (2, "AA==", false));
    let page = server.page("mount-1", "offset=99").await;
    assert_eq!((page.data.as_str(), page.eof), ("", true));
    server.stop().await;
}

#[tokio::test]
async fn a_running_one_is_read_by_offset_and_an_empty_page_is_not_its_end() {
    let server = Server::start().await;
    let go = server.directory.path().join("go");
    let script = format!("echo one; until [ -e {} ]; do sleep 0.05; done; echo two", go.display());
    let exec = server.begun(json!({"exec_id": "e", "script": script})).await;
    assert_eq!((exec.state, exec.exit_code, exec.finished_at), (ExecState::Running, None, None));
    let page = server.page("e", "wait_ms=30000").await;
    assert_eq!((page.next_offset, page.eof), (4, false));
    let page = server.page("e", "offset=4").await;
    assert_eq!((page.data.as_str(), page.next_offset, page.eof), ("", 4, false));
    let listed: ExecList =
        server.execs(Method::GET, "?limit=5").send().await.unwrap().json().await.unwrap();
    assert_eq!(listed.execs.len(), 1);
    std::fs::write(go, "").unwrap();
    assert_eq!(server.output("e", "stdout").await, b"one\ntwo\n");
    server.stop().await;
}

#[tokio::test]
async fn an_id_runs_once_however_many_ask_for_it() {
    let server = Server::start().await;
    let ran = server.directory.path().join("ran");
    let request = json!({"exec_id": "once", "script": format!("echo ran >> {}", ran.display())});
    let begun = futures::future::join_all((0..20).map(|_| server.begin(request.clone()))).await;
    let accepted = begun.iter().filter(|response| response.status() == 202).count();
    assert_eq!(accepted, 1);
    assert!(begun.iter().all(|response| [202, 409].contains(&response.status().as_u16())));
    assert_eq!(server.ended("once").await.state, ExecState::Succeeded);
    server.is_written_down("once").await;
    assert_eq!(refusal(server.begin(request).await).await, ErrorCode::Conflict);
    assert_eq!(std::fs::read_to_string(ran).unwrap(), "ran\n");
    server.stop().await;
}

#[tokio::test]
async fn what_never_ran_may_be_asked_for_again() {
    let server = Server::start().await;
    let request = |user: &str| json!({"exec_id": "e", "script": "true", "user": user});
    let refused = server.begin(request("no-such-user")).await;
    assert_eq!(refusal(refused).await, ErrorCode::InvalidRequest);
    assert_eq!(refusal(server.look("e").await).await, ErrorCode::NotFound);
    let user = rustix::process::geteuid().as_raw().to_string();
    server.begun(request(&user)).await;
    assert_eq!(server.ended("e").await.state, ExecState::Succeeded);
    for bad in [
        json!({"exec_id": "a/b", "script": "true"}),
        json!({"exec_id": "", "script": "true"}),
        json!({"exec_id": "x".repeat(129), "script": "true"}),
        json!({"exec_id": "f"}),
        json!({"exec_id": "f", "script": " "}),
        json!({"exec_id": "f", "script": "true", "timeout_sec": 86_401}),
        json!({"exec_id": "f", "script": "true", "timeout_sec": 0}),
    ] {
        let refused = server.begin(bad.clone()).await;
        assert_eq!(refusal(refused).await, ErrorCode::InvalidRequest, "{bad}");
    }
    for (field, bad) in [
        ("script", json!({"script": "a\0b"})),
        ("timeout_sec", json!({"script": "true", "timeout_sec": 0})),
    ] {
        let refused: ErrorBody = server.begin(bad).await.json().await.unwrap();
        assert!(refused.error.contains(&format!("`{field}`")), "{}", refused.error);
    }
    for unknown in ["f", "%2e%2e", "a%2fb", "%ff"] {
        assert_eq!(refusal(server.look(unknown).await).await, ErrorCode::NotFound, "{unknown}");
    }
    let nameless = server.begun(json!({"script": "true"})).await;
    assert!(!nameless.exec_id.as_str().is_empty());
    server.stop().await;
}

#[tokio::test]
async fn a_cancel_ends_the_whole_tree_and_may_come_twice() {
    let server = Server::start().await;
    let (gone, pid) = (server.directory.path().join("gone"), server.directory.path().join("pid"));
    // Without a process of the trap's own, which the signal to the whole tree may meet as well. It may meet the other one
    // first.
    let script = format!(
        "trap ': > {}; exit 0' TERM; sleep 600 & echo $! > {}; while :; do wait; done",
        gone.display(),
        pid.display()
    );
    server.begun(json!({"exec_id": "e", "script": script, "timeout_sec": 86400})).await;
    until(async || std::fs::read_to_string(&pid).is_ok_and(|pid| pid.ends_with('\n'))).await;
    for _ in 0..2 {
        let cancelled = server.execs(Method::DELETE, "/e?wait_ms=30000").send().await.unwrap();
        assert_eq!(cancelled.status(), 200);
        let exec: Exec = cancelled.json().await.unwrap();
        assert_eq!(exec.state, ExecState::Cancelled);
    }
    assert!(gone.exists(), "it was asked to end first");
    let child: i32 = std::fs::read_to_string(&pid).unwrap().trim().parse().unwrap();
    let child = rustix::process::Pid::from_raw(child).unwrap();
    until(async || rustix::process::test_kill_process(child).is_err()).await;
    server.is_written_down("e").await;
    let again = server.execs(Method::DELETE, "/e").send().await.unwrap();
    assert_eq!(again.json::<Exec>().await.unwrap().state, ExecState::Cancelled);
    server.stop().await;
}

#[tokio::test]
async fn a_timeout_expires_it_with_what_it_had_printed() {
    let server = Server::start().await;
    let script = "echo partial; sleep 600";
    server.begun(json!({"exec_id": "e", "script": script, "timeout_sec": 0.5})).await;
    assert_eq!(server.ended("e").await.state, ExecState::Expired);
    assert_eq!(server.output("e", "stdout").await, b"partial\n");
    server.stop().await;
}

#[tokio::test]
async fn output_beyond_the_limit_is_counted_and_said_to_be_cut() {
    let limits = ExecLimits { output_bytes: 1 << 20, ..ExecLimits::default() };
    let server = Server::start_keeping(limits).await;
    let script = "seq 1 400000; seq 1 9 >&2";
    server.begun(json!({"exec_id": "e", "script": script})).await;
    let exec = server.ended("e").await;
    let whole: String = (1..=400_000).map(|number| format!("{number}\n")).collect();
    assert_eq!((exec.stdout_bytes, exec.truncated), (whole.len() as u64, true));
    for _ in 0..2 {
        let kept = server.output("e", "stdout").await;
        assert!(kept == whole.as_bytes()[..1 << 20], "{} bytes", kept.len());
        assert_eq!(server.output("e", "stderr").await, b"1\n2\n3\n4\n5\n6\n7\n8\n9\n");
        server.is_written_down("e").await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_sandbox_keeps_no_more_output_than_it_may() {
    let limits =
        ExecLimits { output_bytes: 1 << 20, total_output_bytes: 3 << 20, ..ExecLimits::default() };
    let server = Server::start_keeping(limits).await;
    for number in 0..5 {
        let id = format!("e{number}");
        server.begun(json!({"exec_id": id, "script": "seq 1 150000"})).await;
        let exec = server.ended(&id).await;
        assert!(!exec.truncated, "{number}: the older made room");
        server.is_written_down(&id).await;
    }
    let oldest = server.execs(Method::GET, "/e0/output").send().await.unwrap();
    assert_eq!(refusal(oldest).await, ErrorCode::Gone);
    assert!(server.output("e4", "stdout").await.ends_with(b"\n150000\n"));
    server.stop().await;
}

#[tokio::test]
async fn the_oldest_age_out_and_are_told_to_be_gone() {
    let server = Server::start_keeping(ExecLimits { kept: 3, ..ExecLimits::default() }).await;
    for number in 0..6 {
        let id = format!("e{number}");
        server.begun(json!({"exec_id": id, "script": "echo hello"})).await;
        server.ended(&id).await;
        server.is_written_down(&id).await;
    }
    until(async || server.look("e2").await.status() == 410).await;
    assert_eq!(refusal(server.look("e0").await).await, ErrorCode::Gone);
    let output = server.execs(Method::GET, "/e1/output").send().await.unwrap();
    assert_eq!(refusal(output).await, ErrorCode::Gone);
    let again = server.begin(json!({"exec_id": "e0", "script": "true"})).await;
    assert_eq!(refusal(again).await, ErrorCode::Conflict);
    let listed: ExecList =
        server.execs(Method::GET, "").send().await.unwrap().json().await.unwrap();
    let ids: Vec<_> = listed.execs.iter().map(|exec| exec.exec_id.as_str()).collect();
    assert_eq!(ids, ["e5", "e4", "e3"]);
    server.stop().await;
}

#[tokio::test]
async fn the_other_dialects_commands_are_execs_too() {
    let server = Server::start().await;
    for route in ["/exec", "/exec/stream"] {
        let request = json!({"cmd": "echo from the other; exit 4"});
        let answer = server.inside(Method::POST, route).json(&request).send().await.unwrap();
        answer.text().await.unwrap();
    }
    let listed: ExecList =
        server.execs(Method::GET, "").send().await.unwrap().json().await.unwrap();
    assert_eq!(listed.execs.len(), 2);
    for exec in listed.execs {
        assert_eq!((exec.state, exec.exit_code), (ExecState::Failed, Some(4)));
        server.is_written_down(exec.exec_id.as_str()).await;
        assert_eq!(server.output(exec.exec_id.as_str(), "stdout").await, b"from the other\n");
    }
    server.stop().await;
}

#[tokio::test]
async fn no_more_run_at_once_than_may() {
    let server = Server::start_keeping(ExecLimits { running: 2, ..ExecLimits::default() }).await;
    for id in ["a", "b"] {
        server.begun(json!({"exec_id": id, "script": "sleep 600"})).await;
    }
    let third = json!({"exec_id": "c", "script": "true"});
    assert_eq!(refusal(server.begin(third.clone()).await).await, ErrorCode::Unavailable);
    let command = server.inside(Method::POST, "/exec").json(&json!({"cmd": "true"})).send().await;
    assert_eq!(refusal(command.unwrap()).await, ErrorCode::Unavailable);
    server.execs(Method::DELETE, "/a?wait_ms=30000").send().await.unwrap();
    server.begun(third).await;
    assert_eq!(server.ended("c").await.state, ExecState::Succeeded);
    server.execs(Method::DELETE, "/b?wait_ms=30000").send().await.unwrap();
    server.stop().await;
}
