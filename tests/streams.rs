//! What commands print: as it comes, all of it, in order, and to whoever still listens.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use client::{ExecEvent, LogStream, Method};
use serde_json::{Value, json};
use tests::{Answer, Host, command, small, suite, until};
use tokio::time::Instant;

suite! {
    a_long_timeout_is_told_in_the_body,
    an_answer_that_takes_long_is_kept_alive,
    a_short_timeout_gets_its_status_however_late,
    much_output_is_whole_up_to_its_limit,
    output_that_is_not_utf8_does_not_harm_the_rest,
    a_character_is_never_split,
    an_event_stream_is_as_the_clients_read_it,
    the_exit_code_comes_after_all_output,
    a_client_that_goes_away_does_not_disturb_its_command,
    logs_have_what_commands_printed,
    fifty_commands_and_a_slow_reader_do_not_wait_for_each_other;
    soak: two_hundred_megabytes_of_output_are_counted_and_cut,
    a_command_of_eleven_minutes_is_answered,
}

async fn much_output_is_whole_up_to_its_limit(host: Host) {
    let sandbox = host.sandbox().await;
    // Without a newline, and of every length around a chunk's.
    for length in [1, 65_535, 65_536, 65_537, 5_000_000] {
        let result =
            sandbox.exec(command(format!("head -c {length} /dev/zero | tr '\\0' a"))).await;
        assert_eq!((result.stdout.len(), result.truncated, result.exit_code), (length, false, 0));
        assert!(result.stdout.bytes().all(|byte| byte == b'a'));
    }
    let result = sandbox
        .exec(command("head -c 17000000 /dev/zero | tr '\\0' b; echo err >&2; exit 5"))
        .await;
    assert_eq!((result.stdout.len(), result.truncated, result.exit_code), (16 << 20, true, 5));
    assert_eq!(result.stderr, "err\n");
}

async fn two_hundred_megabytes_of_output_are_counted_and_cut(host: Host) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let before = server.memory_bytes();
    let result = sandbox.exec(command("head -c 200000000 /dev/zero | tr '\\0' c; exit 6")).await;
    assert_eq!((result.stdout.len(), result.truncated, result.exit_code), (16 << 20, true, 6));
    let after = server.memory_bytes();
    assert!(after < before + (160 << 20), "the server grew from {before} to {after}");
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
}

async fn output_that_is_not_utf8_does_not_harm_the_rest(host: Host) {
    let sandbox = host.sandbox().await;
    let result = sandbox.exec(command(r"printf 'a\377\376b\0c\r\nd'")).await;
    assert_eq!(result.stdout, "a\u{fffd}\u{fffd}b\0c\r\nd");
}

async fn a_character_is_never_split(host: Host) {
    let sandbox = host.sandbox().await;
    // Each byte is written for itself, and seen by itself.
    let program = "import os, time\nfor byte in 'aé日😀'.encode(): os.write(1, bytes([byte])); time.sleep(0.1)\n\
                   for byte in 'é'.encode(): os.write(2, bytes([byte])); time.sleep(0.1)\nos.write(1, b'\\xf0\\x9f')";
    let (out, err, code) =
        sandbox.streamed(&command(format!("python3 - <<'END'\n{program}\nEND"))).await;
    assert_eq!(
        (out.concat().as_str(), err.concat().as_str(), code),
        ("aé日😀\u{fffd}", "é", Some(0))
    );
    assert!(out.len() >= 4, "{out:?}");
    let long = "for i in $(seq 1000); do printf 'é日😀é日😀é日😀é日😀é日😀é日😀é日😀é日😀'; done; printf x";
    let (out, _, _) = sandbox.streamed(&command(long)).await;
    assert!(out.concat() == "é日😀".repeat(8000) + "x");
}

async fn an_event_stream_is_as_the_clients_read_it(host: Host) {
    let sandbox = host.sandbox().await;
    let request = sandbox
        .request(Method::POST, "/exec/stream")
        .json(&command("printf 'é\\u0085\\u2028\\n'; sleep 1; echo e >&2; exit 7"));
    let start = Instant::now();
    let mut response = request.send().await.unwrap();
    assert!(start.elapsed() < Duration::from_secs(20), "headers come at once");
    assert_eq!(response.status().as_u16(), 200);
    assert!(response.headers()["content-type"].to_str().unwrap().starts_with("text/event-stream"));
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.unwrap() {
        body.extend_from_slice(&chunk);
    }
    assert!(body.is_ascii(), "one client decodes Latin-1");
    let body = String::from_utf8(body).unwrap();
    assert!(body.ends_with("\n\n") && !body.contains('\r'), "{body:?}");
    let events: Vec<_> =
        body.split_terminator("\n\n").filter(|frame| !frame.starts_with(':')).collect();
    let [out, err, exit] = events[..] else { panic!("{events:?}") };
    let data = |frame: &str, name: &str| {
        let data = frame
            .strip_prefix(&format!("event: {name}\ndata: "))
            .unwrap_or_else(|| panic!("{frame:?}"));
        serde_json::from_str::<Value>(data).unwrap()
    };
    assert_eq!(data(out, "stdout"), json!({"chunk": "é\u{85}\u{2028}\n"}));
    assert_eq!(data(err, "stderr"), json!({"chunk": "e\n"}));
    assert_eq!(data(exit, "exit"), json!({"exit_code": 7}));
}

async fn the_exit_code_comes_after_all_output(host: Host) {
    let sandbox = host.sandbox().await;
    let expected: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    for _ in 0..3 {
        let (out, err, code) = sandbox.streamed(&command("seq 20000; seq 20000 >&2; exit 3")).await;
        assert!(out.concat() == expected && err.concat() == expected);
        assert_eq!(code, Some(3));
        let result = sandbox.exec(command("seq 20000; seq 20000 >&2; exit 3")).await;
        assert!(result.stdout == expected && result.stderr == expected && result.exit_code == 3);
    }
}

async fn a_client_that_goes_away_does_not_disturb_its_command(host: Host) {
    let sandbox = host.sandbox().await;
    // More than any pipe or window holds, so that a reader that is missed would block it.
    let cmd = "for i in $(seq 1 120); do head -c 20000 /dev/zero | tr '\\0' x; echo; done; echo the end; echo done > /root/done";
    let mut events = sandbox.client().exec_stream(&sandbox.id, &command(cmd)).await.unwrap();
    assert!(matches!(events.next().await.unwrap(), Some(ExecEvent::Stdout(_))));
    drop(events);
    until("the command ends by itself", Duration::from_secs(60), async || {
        (sandbox.exec(command("cat /root/done")).await.stdout == "done\n").then_some(())
    })
    .await;
    until("the log has its end", Duration::from_secs(20), async || {
        let log = sandbox.client().logs(&sandbox.id, LogStream::Stdout).await.unwrap();
        String::from_utf8_lossy(&log).contains("the end\n").then_some(())
    })
    .await;
}

async fn logs_have_what_commands_printed(host: Host) {
    let sandbox = host.sandbox().await;
    let mut following = sandbox.client().follow_logs(&sandbox.id, LogStream::Both).await.unwrap();
    sandbox.run("echo one; echo two >&2; printf 'é three'").await;
    for _ in 0..3 {
        let line = tokio::time::timeout(Duration::from_secs(20), following.next())
            .await
            .expect("a line comes")
            .unwrap()
            .unwrap();
        assert!(["one", "two", "é three"].contains(&line.as_str()), "{line}");
    }
    sandbox.run("echo four").await;
    let log = async |stream| {
        String::from_utf8(sandbox.client().logs(&sandbox.id, stream).await.unwrap().to_vec())
            .unwrap()
    };
    assert_eq!(log(LogStream::Stdout).await, "one\né three\nfour\n");
    assert_eq!(log(LogStream::Stderr).await, "two\n");
    assert_eq!(log(LogStream::Both).await.lines().count(), 4);
    let answer = sandbox.get("/logs").await;
    assert_eq!(answer.header("content-type"), "text/plain; charset=utf-8");
    assert_eq!(
        sandbox.get("/logs?stream=sideways").await.refusal(),
        (400, "invalid_request".to_owned())
    );
    // A follower's end is the sandbox's.
    assert_eq!(following.next().await.unwrap().as_deref(), Some("four"));
    sandbox.delete().await;
    let end = tokio::time::timeout(Duration::from_secs(20), following.next()).await;
    assert_eq!(end.expect("the stream ends").unwrap(), None);
}

async fn an_answer_that_takes_long_is_kept_alive(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let start = Instant::now();
    let mut response = sandbox
        .request(Method::POST, "/exec")
        .json(&command("sleep 19; echo done"))
        .send()
        .await
        .unwrap();
    let head = start.elapsed();
    assert!(
        head > Duration::from_secs(10) && head < Duration::from_secs(22),
        "the answer began after {head:?}"
    );
    assert_eq!(response.status().as_u16(), 200);
    let (mut body, mut last) = (Vec::new(), Instant::now());
    while let Some(chunk) = response.chunk().await.unwrap() {
        assert!(last.elapsed() < Duration::from_secs(15), "silent for {:?}", last.elapsed());
        last = Instant::now();
        body.extend_from_slice(&chunk);
    }
    assert!(body.starts_with(b" "), "white space first");
    let result: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (&result["stdout"], &result["exit_code"], &result["timed_out"]),
        (&json!("done\n"), &json!(0), &json!(false))
    );
}

async fn a_short_timeout_gets_its_status_however_late(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let request = json!({"cmd": "echo before; sleep 60", "timeout_seconds": 18});
    let answer = Answer::to(sandbox.request(Method::POST, "/exec").json(&request)).await;
    assert_eq!(answer.refusal(), (504, "timed_out".to_owned()));
    assert_eq!(answer.json()["stdout"], "before\n");
}

async fn a_long_timeout_is_told_in_the_body(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let request = json!({"cmd": "echo before; sleep 60", "timeout_seconds": 28});
    let answer = Answer::to(sandbox.request(Method::POST, "/exec").json(&request)).await;
    let result = answer.json();
    assert_eq!(answer.status, 200);
    assert_eq!(
        (&result["exit_code"], &result["timed_out"], &result["stdout"]),
        (&json!(124), &json!(true), &json!("before\n"))
    );
}

async fn a_command_of_eleven_minutes_is_answered(host: Host) {
    let sandbox = host.sandbox().await;
    let ticking = command("for i in $(seq 66); do echo $i; sleep 10; done");
    let (result, (out, _, code)) =
        tokio::join!(sandbox.exec(command("sleep 660; echo done")), sandbox.streamed(&ticking));
    assert_eq!((result.stdout.as_str(), result.exit_code), ("done\n", 0));
    assert_eq!((out.concat().lines().count(), code), (66, Some(0)));
}

async fn fifty_commands_and_a_slow_reader_do_not_wait_for_each_other(host: Host) {
    let sandbox = host.sandbox().await;
    // Begun and never read: its output fills every buffer on the way.
    let slow = sandbox
        .request(Method::POST, "/exec/stream")
        .json(&command("head -c 30000000 /dev/zero | tr '\\0' s; echo > /root/slow-done"))
        .send()
        .await
        .unwrap();
    let all = (0..50).map(|number| {
        let sandbox = &sandbox;
        async move {
            assert_eq!(
                sandbox.run(&format!("echo {number}; cat /etc/hostname >/dev/null")).await,
                format!("{number}\n")
            )
        }
    });
    let all = tokio::time::timeout(Duration::from_secs(120), futures::future::join_all(all)).await;
    all.expect("the others do not wait");
    sandbox.write("/srv/job/file", "files neither").await;
    drop(slow);
}
