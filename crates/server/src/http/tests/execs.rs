//! Commands through the API.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use api::{ErrorCode, ExecResult};
use reqwest::{Method, Response};
use serde_json::{Value, json};

use super::{Server, refusal};

async fn exec(server: &Server, request: Value) -> Response {
    server.inside(Method::POST, "/exec").json(&request).send().await.unwrap()
}

async fn result(server: &Server, request: Value) -> ExecResult {
    let response = exec(server, request).await;
    assert_eq!(response.status(), 200);
    response.json().await.unwrap()
}

/// The events as `(name, data)`. Panics at anything that is not one.
fn events(text: &str) -> Vec<(String, Value)> {
    assert!(text.is_ascii(), "{text}");
    let frames = text.split_terminator("\n\n").filter(|frame| !frame.starts_with(':'));
    frames
        .map(|frame| {
            let (name, data) = frame.split_once('\n').unwrap();
            let data = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            (name.strip_prefix("event: ").unwrap().to_owned(), data)
        })
        .collect()
}

async fn stream(server: &Server, request: Value) -> Vec<(String, Value)> {
    let response = server.inside(Method::POST, "/exec/stream").json(&request).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    events(&response.text().await.unwrap())
}

fn printed(events: &[(String, Value)], name: &str) -> String {
    events
        .iter()
        .filter(|(event, _)| event == name)
        .map(|(_, data)| data["chunk"].as_str().unwrap())
        .collect()
}

async fn until(mut condition: impl AsyncFnMut() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it comes to pass");
}

#[tokio::test]
async fn a_command_answers_with_its_output_and_exit_code() {
    let server = Server::start().await;
    let found =
        result(&server, json!({"cmd": "echo out; echo err >&2; exit 3", "timeout_seconds": null}))
            .await;
    assert_eq!(
        (found.stdout.as_str(), found.stderr.as_str(), found.exit_code),
        ("out\n", "err\n", 3)
    );
    assert_eq!((found.truncated, found.timed_out, found.killed), (false, false, None));
    assert_eq!(result(&server, json!({"cmd": "kill -9 $$"})).await.exit_code, 137);
    assert_eq!(result(&server, json!({"cmd": "printf '\\377ok'"})).await.stdout, "\u{fffd}ok");
    server.stop().await;
}

#[tokio::test]
async fn standard_input_is_at_its_end_or_arrives_whole() {
    let server = Server::start().await;
    assert_eq!(result(&server, json!({"cmd": "cat"})).await.stdout, "");
    let input = "0123456789abcdé\n".repeat(10 * 1024 * 1024 / 17);
    let found = result(&server, json!({"cmd": "cat | sha256sum", "stdin": input})).await;
    let expected = <sha2::Sha256 as sha2::Digest>::digest(input.as_bytes())
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect::<String>();
    assert_eq!(found.stdout.split_whitespace().next(), Some(expected.as_str()));
    // Nobody reads it, and that holds nobody up.
    assert_eq!(
        result(&server, json!({"cmd": "echo early", "stdin": input})).await.stdout,
        "early\n"
    );
    server.stop().await;
}

#[tokio::test]
async fn the_sandboxs_environment_is_there_and_the_commands_own_goes_over_it() {
    let server = Server::start_with(BTreeMap::from(
        [("A", "1"), ("B", "1")].map(|(key, value)| (key.to_owned(), value.to_owned())),
    ))
    .await;
    let odd = "q'\"$HOME`x`\n日本";
    let found = result(
        &server,
        json!({"cmd": "printf '%s,%s,%s' \"$A\" \"$B\" \"$C\"", "env": {"B": "2", "C": odd}}),
    )
    .await;
    assert_eq!(found.stdout, format!("1,2,{odd}"));
    server.stop().await;
}

#[tokio::test]
async fn a_timeout_keeps_what_was_printed_and_says_the_words() {
    let server = Server::start().await;
    let response =
        exec(&server, json!({"cmd": "echo before; sleep 60", "timeout_seconds": 0.5})).await;
    assert_eq!(response.status(), 504);
    let body: Value = response.json().await.unwrap();
    assert_eq!(body["error"], "command timed out: deadline exceeded");
    assert_eq!(body["detail"], body["error"]);
    assert_eq!(
        (&body["code"], &body["stdout"], &body["exit_code"], &body["timed_out"]),
        (&json!("timed_out"), &json!("before\n"), &json!(124), &json!(true))
    );
    server.stop().await;
}

#[tokio::test]
async fn output_over_the_limit_is_cut_and_the_command_ends_all_the_same() {
    let server = Server::start().await;
    let found =
        result(&server, json!({"cmd": "head -c 20000000 /dev/zero | tr '\\0' a; echo done >&2"}))
            .await;
    assert_eq!(
        (found.stdout.len(), found.truncated, found.stderr.as_str()),
        (16 << 20, true, "done\n")
    );
    server.stop().await;
}

#[tokio::test]
async fn a_command_line_of_a_mebibyte_works_and_one_beyond_the_limit_says_the_way_out() {
    let server = Server::start().await;
    let long = "x".repeat(1 << 20);
    assert_eq!(
        result(&server, json!({"cmd": format!("printf %s {long} | wc -c")})).await.stdout.trim(),
        (1 << 20).to_string()
    );
    assert_eq!(
        refusal(exec(&server, json!({"cmd": "x".repeat(4 << 20)})).await).await,
        ErrorCode::TooLarge
    );
    server.stop().await;
}

#[tokio::test]
async fn a_bad_field_is_refused_before_anything_runs() {
    let server = Server::start().await;
    for bad in [
        json!({"cmd": ""}),
        json!({"cmd": "true", "timeout_seconds": 0}),
        json!({"cmd": "true", "timeout_seconds": -1}),
        json!({"cmd": "true", "timeout_seconds": 90_000}),
        json!({"cmd": "true", "cwd": "relative"}),
        json!({"cmd": "true", "env": {"A=B": "x"}}),
        json!({"cmd": "true", "user": "no-such-user"}),
        json!({"cmd": ["true"]}),
    ] {
        assert_eq!(
            refusal(exec(&server, bad.clone()).await).await,
            ErrorCode::InvalidRequest,
            "{bad}"
        );
    }
    server.stop().await;
}

#[tokio::test]
async fn a_stream_tells_output_as_it_comes_and_the_exit_code_last() {
    let server = Server::start().await;
    let found = stream(
        &server,
        json!({"cmd": "for i in 1 2 3; do echo é日😀 $i; sleep 0.1; done; echo e >&2; exit 7"}),
    )
    .await;
    assert_eq!(printed(&found, "stdout"), "é日😀 1\né日😀 2\né日😀 3\n");
    assert_eq!(printed(&found, "stderr"), "e\n");
    assert!(found.iter().filter(|(name, _)| name == "stdout").count() >= 2);
    assert_eq!(found.last().unwrap(), &("exit".to_owned(), json!({"exit_code": 7})));
    server.stop().await;
}

#[tokio::test]
async fn a_stream_begins_before_the_first_output() {
    let server = Server::start().await;
    let request = json!({"cmd": "sleep 30", "timeout_seconds": 31});
    let request = server.inside(Method::POST, "/exec/stream").json(&request).send();
    let head = tokio::time::timeout(Duration::from_secs(5), request).await;
    assert_eq!(head.expect("the head comes at once").unwrap().status(), 200);
    server.stop().await;
}

#[tokio::test]
async fn a_character_that_comes_byte_by_byte_is_told_whole() {
    let server = Server::start().await;
    let cmd =
        "for b in '\\360' '\\237' '\\230' '\\200' 'x' '\\303'; do printf \"$b\"; sleep 0.05; done";
    let found = stream(&server, json!({"cmd": cmd})).await;
    assert_eq!(printed(&found, "stdout"), "😀x\u{fffd}");
    server.stop().await;
}

#[tokio::test]
async fn a_timeout_in_a_stream_is_an_error_that_both_clients_know() {
    let server = Server::start().await;
    let found =
        stream(&server, json!({"cmd": "echo before; sleep 60", "timeout_seconds": 0.5})).await;
    assert_eq!(printed(&found, "stdout"), "before\n");
    let (name, data) = found.last().unwrap();
    assert_eq!(name, "error");
    assert!(data["error"].as_str().unwrap().contains("timeout"));
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_away_kills_no_command() {
    let server = Server::start().await;
    for route in ["/exec", "/exec/stream"] {
        let made = server.directory.path().join(route.replace('/', "-"));
        let (begun, go) = (made.with_extension("begun"), made.with_extension("go"));
        let cmd = format!(
            "touch {}; until test -e {}; do sleep 0.05; done; echo later; touch {}",
            begun.display(),
            go.display(),
            made.display()
        );
        let request = server.inside(Method::POST, route).json(&json!({"cmd": cmd}));
        let client = tokio::spawn(async { request.send().await.unwrap().text().await });
        until(async || begun.exists()).await;
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled(), "the client is gone");
        std::fs::write(&go, "").unwrap();
        until(async || made.exists()).await;
        // What nobody watched is in the log.
        until(async || {
            let text =
                server.inside(Method::GET, "/logs").send().await.unwrap().text().await.unwrap();
            text.lines().filter(|line| *line == "later").count()
                == if route == "/exec" { 1 } else { 2 }
        })
        .await;
    }
    server.stop().await;
}

#[tokio::test]
async fn a_slow_reader_does_not_hold_up_the_others() {
    let server = Server::start().await;
    let endless = json!({"cmd": "yes | head -c 300000000"});
    let slow = server.inside(Method::POST, "/exec/stream").json(&endless).send().await.unwrap();
    let all = (0..50).map(|number| result(&server, json!({"cmd": format!("echo {number}")})));
    let results = tokio::time::timeout(Duration::from_secs(50), futures::future::join_all(all))
        .await
        .expect("the others go on");
    for (number, result) in results.iter().enumerate() {
        assert_eq!(result.stdout, format!("{number}\n"));
    }
    drop(slow);
    server.stop().await;
}

#[tokio::test]
async fn logs_are_what_was_printed_in_order_and_can_be_followed() {
    let server = Server::start().await;
    result(
        &server,
        json!({"cmd": "echo one; sleep 0.1; echo two >&2; sleep 0.1; printf 'three é'"}),
    )
    .await;
    let logs = async |query: &str| {
        let response = server.inside(Method::GET, &format!("/logs{query}")).send().await.unwrap();
        assert_eq!(response.headers()["content-type"], "text/plain; charset=utf-8");
        response.text().await.unwrap()
    };
    assert_eq!(logs("").await, "one\ntwo\nthree é\n");
    assert_eq!(logs("?stream=stderr&follow=false").await, "two\n");
    assert_eq!(logs("?stream=stdout&follow=0").await, "one\nthree é\n");

    let mut followed =
        server.inside(Method::GET, "/logs?stream=both&follow=true").send().await.unwrap();
    let mut text = String::new();
    let running = result(&server, json!({"cmd": "echo four"}));
    let read = async {
        while !text.contains("four") {
            text.push_str(std::str::from_utf8(&followed.chunk().await.unwrap().unwrap()).unwrap());
        }
    };
    tokio::time::timeout(Duration::from_secs(20), futures::future::join(running, read))
        .await
        .expect("the new line comes");
    let lines: Vec<Value> = events(&text)
        .into_iter()
        .map(|(name, data)| {
            assert_eq!(name, "line");
            data["line"].clone()
        })
        .collect();
    assert_eq!(lines, ["one", "two", "three é", "four"]);
    server.stop().await;
}

#[tokio::test]
async fn what_the_server_itself_runs_is_neither_listed_nor_logged() {
    use crate::sandbox::ExecEvent;
    let server = Server::start().await;
    let account = api::AccountId::default_account();
    let running = server.app.sandboxes.running(&account, &server.sandbox).await.unwrap();
    let request = api::ExecRequest { cmd: "echo unseen".to_owned(), ..api::ExecRequest::default() };
    let mut watch = running.unrecorded().start_exec(request).await.unwrap();
    let mut said = Vec::new();
    while let Some(event) = watch.next().await {
        if let ExecEvent::Stdout(bytes) = event.unwrap() {
            said.extend_from_slice(&bytes);
        }
    }
    assert_eq!(said, b"unseen\n");
    result(&server, json!({"cmd": "echo seen"})).await;
    let logs = server.inside(Method::GET, "/logs").send().await.unwrap();
    assert_eq!(logs.text().await.unwrap(), "seen\n");
    let listed = server.request(Method::GET, &format!("/v1/machines/{}/execs", server.sandbox));
    let listed: api::ExecList = listed.send().await.unwrap().json().await.unwrap();
    assert_eq!(listed.execs.len(), 1);
    server.stop().await;
}

#[tokio::test]
async fn an_ended_exec_is_forgotten_by_its_guest() {
    let server = Server::start().await;
    for _ in 0..20 {
        result(&server, json!({"cmd": "true"})).await;
    }
    let running = server
        .app
        .sandboxes
        .running(&api::AccountId::default_account(), &server.sandbox)
        .await
        .unwrap();
    until(async || {
        use machine::guest::{Reply, Request};
        let reply = running.guest.call(Request::ExecList, Duration::from_secs(10)).await.unwrap();
        matches!(reply, Reply::Execs(execs) if execs.is_empty())
    })
    .await;
    server.stop().await;
}

/// Of a command that prints twice: what the log has when someone else had watched it begin.
async fn logged(since: crate::sandbox::Since, lines: usize) -> Vec<bytes::Bytes> {
    use machine::guest::{Command, ExecStart, Reply, Request};
    let guest = super::guest().await;
    let start = ExecStart {
        id: "earlier".to_owned(),
        command: Command::Script(b"echo before; sleep 0.5; echo after".to_vec().into()),
        working_directory: None,
        environment: Vec::new(),
        user: None,
        has_stdin: false,
        timeout_ms: 0,
        output_limit: 1 << 20,
    };
    let watching = guest.open(Request::ExecStart(start)).unwrap();
    // It has begun, and printed.
    watching.next().await.unwrap().unwrap();
    watching.next().await.unwrap().unwrap();
    drop(watching);

    let logs = std::sync::Arc::new(crate::sandbox::Logs::default());
    let takers =
        crate::sandbox::Takers { logs: Arc::clone(&logs), usage: Arc::default(), execs: None };
    crate::sandbox::watch_again(&guest, &takers, since).await.unwrap();
    let mut reader = logs.reader();
    let mut told: Vec<bytes::Bytes> = Vec::new();
    while told.len() < lines {
        let more = tokio::time::timeout(Duration::from_secs(20), reader.more()).await;
        assert!(more.expect("the log goes on"));
        told.extend(reader.take().into_iter().map(|line| line.text));
    }
    until(async || {
        let reply = guest.call(Request::ExecList, Duration::from_secs(10)).await.unwrap();
        matches!(reply, Reply::Execs(execs) if execs.is_empty())
    })
    .await;
    told.extend(reader.take().into_iter().map(|line| line.text));
    told
}

#[tokio::test]
async fn commands_of_an_earlier_server_go_on_into_the_log() {
    assert_eq!(logged(crate::sandbox::Since::Seen, 2).await, ["before", "after"]);
}

#[tokio::test]
async fn commands_of_a_snapshot_are_in_the_log_from_now_on() {
    assert_eq!(logged(crate::sandbox::Since::Now, 1).await, ["after"]);
}
