//! Commands: results, streams, limits, and what they leave behind.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateSandbox, ExecRequest};
use client::{ExecEvent, LogStream, Method};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tests::{Answer, Host, Sandbox, command, pause, small, suite, until};
use tokio::time::Instant;

suite! {
    a_long_timeout_is_told_in_the_body,
    an_answer_that_takes_long_is_kept_alive,
    a_short_timeout_gets_its_status_however_late,
    output_and_exit_code_are_told_apart,
    a_background_child_does_not_hold_the_command,
    a_timeout_kills_the_whole_tree_and_keeps_what_was_printed,
    much_output_is_whole_up_to_its_limit,
    output_that_is_not_utf8_does_not_harm_the_rest,
    a_character_is_never_split,
    an_event_stream_is_as_the_clients_read_it,
    the_exit_code_comes_after_all_output,
    a_death_by_a_signal_is_128_and_its_number,
    standard_input_has_an_end,
    ten_megabytes_of_standard_input_arrive_whole,
    a_command_line_of_a_mebibyte_and_a_here_document_work,
    environment_values_arrive_as_they_are,
    user_directory_and_home_are_as_asked,
    short_commands_leave_nothing_behind,
    a_command_that_takes_all_memory_is_told_as_such,
    a_client_that_goes_away_does_not_disturb_its_command,
    logs_have_what_commands_printed,
    fifty_commands_and_a_slow_reader_do_not_wait_for_each_other,
    a_request_that_is_no_command_is_refused,
    the_first_command_finds_a_machine_of_its_own,
    the_environment_of_the_create_is_on_no_disk,
    a_disk_that_is_not_there_takes_no_write;
    soak: two_hundred_megabytes_of_output_are_counted_and_cut,
    a_thousand_commands_leave_nothing_behind,
    a_fork_bomb_and_full_cpus_leave_the_sandbox_answering,
    a_command_of_eleven_minutes_is_answered,
}

async fn output_and_exit_code_are_told_apart(host: Host) {
    let sandbox = host.sandbox().await;
    let result = sandbox.exec(command("echo out; echo err >&2; exit 3")).await;
    assert_eq!(
        (result.stdout.as_str(), result.stderr.as_str(), result.exit_code),
        ("out\n", "err\n", 3)
    );
    assert!(!result.truncated && !result.timed_out && result.killed.is_none(), "{result:?}");
    let missing = sandbox.exec(command("no-such-program-here")).await;
    assert_eq!(missing.exit_code, 127, "{missing:?}");
    // An empty answer is one, too.
    let quiet = sandbox.exec(command("true")).await;
    assert_eq!((quiet.stdout.as_str(), quiet.stderr.as_str(), quiet.exit_code), ("", "", 0));
    let shell = sandbox.run("echo ${BASH_VERSION:+bash} $'a\\tb'").await;
    assert_eq!(shell, "bash a\tb\n");
}

async fn a_background_child_does_not_hold_the_command(host: Host) {
    let sandbox = host.sandbox().await;
    for cmd in [
        "sleep 301 & echo started",
        "setsid sleep 302 & echo started",
        "(sleep 303; echo late) & echo started",
        "nohup sleep 304 >/dev/null 2>&1 & echo started",
    ] {
        let start = Instant::now();
        assert_eq!(sandbox.run(cmd).await, "started\n", "{cmd}");
        assert!(start.elapsed() < Duration::from_secs(15), "{cmd} took {:?}", start.elapsed());
    }
    assert_eq!(sandbox.run("pgrep -cx sleep").await, "4\n", "background children go on");
    // The same in a stream: its end is the command's.
    let mut events = sandbox
        .client()
        .exec_stream(&sandbox.id, &command("sleep 305 & echo started"))
        .await
        .unwrap();
    let start = Instant::now();
    while events.next().await.unwrap().is_some() {}
    assert!(start.elapsed() < Duration::from_secs(15));
}

async fn a_timeout_kills_the_whole_tree_and_keeps_what_was_printed(host: Host) {
    let sandbox = host.sandbox().await;
    let tree = "echo before; (sleep 311 & setsid sh -c 'trap \"\" TERM HUP; sleep 312; sleep 313' & sleep 314); echo never";
    let start = Instant::now();
    let request = ExecRequest { timeout_seconds: Some(2.0), ..command(tree) };
    let refused = sandbox.client().exec(&sandbox.id, &request).await.unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    let refusal = refused.refusal().unwrap();
    assert_eq!(refusal.status, 504);
    // These words are what the published clients look for.
    assert!(refusal.message.contains("deadline exceeded"), "{}", refusal.message);
    assert_eq!(refusal.body["stdout"], "before\n");
    assert_eq!(refusal.body["timed_out"], true);
    until("nothing of the tree is left", Duration::from_secs(10), async || {
        (sandbox.exec(command("pgrep -f 'sleep 31[1-4]' | grep -vx $$")).await.stdout.is_empty())
            .then_some(())
    })
    .await;
    let mut events = sandbox
        .client()
        .exec_stream(
            &sandbox.id,
            &ExecRequest { timeout_seconds: Some(1.0), ..command("echo before; sleep 315") },
        )
        .await
        .unwrap();
    assert_eq!(events.next().await.unwrap(), Some(ExecEvent::Stdout("before\n".to_owned())));
    match events.next().await.unwrap() {
        Some(ExecEvent::Failed { message }) => {
            assert!(message.contains("deadline exceeded"), "{message}")
        }
        other => panic!("{other:?}"),
    }
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

/// What a stream prints, piece by piece, and its exit code.
async fn streamed(
    sandbox: &Sandbox,
    request: &ExecRequest,
) -> (Vec<String>, Vec<String>, Option<i32>) {
    let mut events = sandbox.client().exec_stream(&sandbox.id, request).await.unwrap();
    let (mut out, mut err, mut code) = (Vec::new(), Vec::new(), None);
    while let Some(event) = events.next().await.unwrap() {
        assert_eq!(code, None, "{event:?} came after the exit code");
        match event {
            ExecEvent::Stdout(chunk) => out.push(chunk),
            ExecEvent::Stderr(chunk) => err.push(chunk),
            ExecEvent::Exited { exit_code } => code = Some(exit_code),
            ExecEvent::Failed { message } => panic!("{message}"),
        }
    }
    (out, err, code)
}

async fn a_character_is_never_split(host: Host) {
    let sandbox = host.sandbox().await;
    // Each byte is written for itself, and seen by itself.
    let program = "import os, time\nfor byte in 'aé日😀'.encode(): os.write(1, bytes([byte])); time.sleep(0.1)\n\
                   for byte in 'é'.encode(): os.write(2, bytes([byte])); time.sleep(0.1)\nos.write(1, b'\\xf0\\x9f')";
    let (out, err, code) =
        streamed(&sandbox, &command(format!("python3 - <<'END'\n{program}\nEND"))).await;
    assert_eq!(
        (out.concat().as_str(), err.concat().as_str(), code),
        ("aé日😀\u{fffd}", "é", Some(0))
    );
    assert!(out.len() >= 4, "{out:?}");
    let long = "for i in $(seq 1000); do printf 'é日😀é日😀é日😀é日😀é日😀é日😀é日😀é日😀'; done; printf x";
    let (out, _, _) = streamed(&sandbox, &command(long)).await;
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
        let (out, err, code) =
            streamed(&sandbox, &command("seq 20000; seq 20000 >&2; exit 3")).await;
        assert!(out.concat() == expected && err.concat() == expected);
        assert_eq!(code, Some(3));
        let result = sandbox.exec(command("seq 20000; seq 20000 >&2; exit 3")).await;
        assert!(result.stdout == expected && result.stderr == expected && result.exit_code == 3);
    }
}

async fn a_death_by_a_signal_is_128_and_its_number(host: Host) {
    let sandbox = host.sandbox().await;
    for (cmd, code) in [
        ("kill -9 $$", 137),
        ("kill -TERM $$", 143),
        ("kill -SEGV $$", 139),
        ("exec sh -c 'kill -USR1 $$'", 138),
    ] {
        assert_eq!(sandbox.exec(command(cmd)).await.exit_code, code, "{cmd}");
    }
    let (_, _, code) = streamed(&sandbox, &command("kill -9 $$")).await;
    assert_eq!(code, Some(137));
}

async fn standard_input_has_an_end(host: Host) {
    let sandbox = host.sandbox().await;
    for cmd in [
        "cat",
        "python3 -c 'import sys; print(repr(sys.stdin.read()), end=\"\")' | tr -d \"'\"",
        "read line; test $? -eq 1",
    ] {
        let quick = tokio::time::timeout(Duration::from_secs(30), sandbox.run(cmd)).await;
        assert_eq!(quick.expect(cmd), "", "{cmd}");
    }
    let given =
        sandbox.exec(ExecRequest { stdin: Some("é\n\0end".to_owned()), ..command("cat") }).await;
    assert_eq!(given.stdout, "é\n\0end");
    let empty = sandbox.exec(ExecRequest { stdin: Some(String::new()), ..command("wc -c") }).await;
    assert_eq!(empty.stdout.trim(), "0");
}

async fn ten_megabytes_of_standard_input_arrive_whole(host: Host) {
    let sandbox = host.sandbox().await;
    let text: String = (0..1_300_000).map(|number| format!("{number:07}\n")).collect();
    assert!(text.len() > 10_000_000);
    let digest = format!("{:x}  -\n", Sha256::digest(&text));
    let all = sandbox.exec(ExecRequest { stdin: Some(text.clone()), ..command("sha256sum") }).await;
    assert_eq!((all.stdout, all.exit_code), (digest, 0));
    // A command need not read it.
    let unread =
        sandbox.exec(ExecRequest { stdin: Some(text), ..command("head -n 1; exit 4") }).await;
    assert_eq!((unread.stdout.as_str(), unread.exit_code), ("0000000\n", 4));
}

async fn a_command_line_of_a_mebibyte_and_a_here_document_work(host: Host) {
    let sandbox = host.sandbox().await;
    let long = "x".repeat(1 << 20);
    assert_eq!(
        sandbox.run(&format!("printf %s {long} | wc -c")).await.trim(),
        (1 << 20).to_string()
    );
    let script = "cat <<'END' | wc -l\na 'quoted' \"line\" $HOME `id`\nand another\nEND\npython3 - <<'END'\nprint('é', end='!')\nEND";
    assert_eq!(sandbox.run(script).await, "2\né!");
    let (out, _, code) = streamed(&sandbox, &command(format!("printf %s {long} | wc -c"))).await;
    assert_eq!((out.concat().trim(), code), ("1048576", Some(0)));
}

async fn environment_values_arrive_as_they_are(host: Host) {
    let sandbox = host.sandbox().await;
    let values = [
        "plain",
        "",
        "two words",
        "'single' \"double\"",
        "line\nbreak\n",
        "$HOME ${x} `id` \\",
        "é日😀",
        "=a=b",
        " lead",
        &"long".repeat(10_000),
    ];
    let env: BTreeMap<_, _> = values
        .iter()
        .enumerate()
        .map(|(index, value)| (format!("V{index}"), (*value).to_owned()))
        .collect();
    let request = ExecRequest { env: Some(env.clone()), ..command("env -0 | grep -z '^V[0-9]'") };
    let result = sandbox.exec(request).await;
    let seen: BTreeMap<_, _> = result
        .stdout
        .split_terminator('\0')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    assert!(seen == env, "{seen:?}");
}

async fn user_directory_and_home_are_as_asked(host: Host) {
    let sandbox = host.sandbox().await;
    let shown = "printf '%s %s %s %s\\n' \"$(id -un)\" \"$HOME\" \"$PWD\" \"$LANG\"; command -v python3 bash env >/dev/null";
    assert_eq!(sandbox.run(shown).await, "root /root /root C.UTF-8\n");
    let panda =
        sandbox.exec(ExecRequest { user: Some("panda".to_owned()), ..command(shown) }).await;
    assert_eq!(panda.stdout, "panda /home/panda /home/panda C.UTF-8\n", "{panda:?}");
    let elsewhere = sandbox
        .exec(ExecRequest {
            user: Some("panda:root".to_owned()),
            cwd: Some("/work".to_owned()),
            ..command("id -gn; pwd; touch made && rm made")
        })
        .await;
    assert_eq!(
        (elsewhere.stdout.as_str(), elsewhere.exit_code),
        ("root\n/work\n", 0),
        "{elsewhere:?}"
    );
    let number = sandbox
        .exec(ExecRequest {
            user: Some("12345:54321".to_owned()),
            ..command("id -u; id -g; id -G")
        })
        .await;
    assert_eq!(number.stdout, "12345\n54321\n54321\n", "{number:?}");
    for (request, field) in [
        (
            ExecRequest { user: Some("nobody-knows-me".to_owned()), ..command("true") },
            "nobody-knows-me",
        ),
        (
            ExecRequest { cwd: Some("/no/such/place".to_owned()), ..command("true") },
            "/no/such/place",
        ),
        (ExecRequest { cwd: Some("/etc/passwd".to_owned()), ..command("true") }, "/etc/passwd"),
    ] {
        let refused = sandbox.client().exec(&sandbox.id, &request).await.unwrap_err();
        assert!((400..=404).contains(&refused.status().unwrap()), "{refused:?}");
        assert!(refused.to_string().contains(field), "{refused}");
    }
}

/// What must not grow: the agent's open files and memory, its children that nobody waited for, the server's open files.
struct Held {
    agent_files: usize,
    agent_memory_kib: usize,
    zombies: usize,
    processes: usize,
    server_files: usize,
}

async fn held(host: &Host, sandbox: &Sandbox) -> Held {
    let figures = sandbox.run("ls /proc/1/fd | wc -l; awk '/^VmRSS/ { print $2 }' /proc/1/status; cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z ' || true; ls -d /proc/[0-9]* | wc -l").await;
    let figures: Vec<usize> = figures.lines().map(|line| line.trim().parse().unwrap()).collect();
    let [agent_files, agent_memory_kib, zombies, processes] = figures[..] else {
        panic!("{figures:?}")
    };
    Held {
        agent_files,
        agent_memory_kib,
        zombies,
        processes,
        server_files: host.server().await.open_files(),
    }
}

async fn many_commands(host: &Host, count: usize) {
    let sandbox = host.sandbox().await;
    for _ in 0..20 {
        sandbox.run("true & sleep 0").await;
    }
    let before = held(host, &sandbox).await;
    for number in 0..count {
        match number % 4 {
            0 => assert_eq!(sandbox.run(&format!("echo {number}")).await, format!("{number}\n")),
            1 => assert_eq!(sandbox.exec(command("(exit 3) & exit 1")).await.exit_code, 1),
            2 => assert_eq!(sandbox.exec(command("setsid true & kill -9 $$")).await.exit_code, 137),
            _ => assert_eq!(streamed(&sandbox, &command("echo s")).await.2, Some(0)),
        }
    }
    let after = until("nothing is left of the commands", Duration::from_secs(20), async || {
        let after = held(host, &sandbox).await;
        let same = after.zombies == 0
            && after.agent_files <= before.agent_files + 2
            && after.processes <= before.processes + 2;
        same.then_some(after)
    })
    .await;
    assert!(
        after.agent_memory_kib < before.agent_memory_kib + 4096,
        "the agent grew from {} to {} KiB",
        before.agent_memory_kib,
        after.agent_memory_kib
    );
    // Other claims use the same server meanwhile.
    assert!(
        after.server_files < before.server_files + 60,
        "the server had {} open files and now {}",
        before.server_files,
        after.server_files
    );
}

async fn short_commands_leave_nothing_behind(host: Host) {
    many_commands(&host, 80).await;
}

async fn a_thousand_commands_leave_nothing_behind(host: Host) {
    many_commands(&host, 1000).await;
}

async fn a_command_that_takes_all_memory_is_told_as_such(host: Host) {
    let sandbox = host.sandbox().await;
    let result = sandbox.exec(command("tail /dev/zero")).await;
    assert_eq!((result.killed.as_deref(), result.exit_code), (Some("memory"), 137), "{result:?}");
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
    sandbox.write("/srv/job/after", "x").await;
}

async fn a_fork_bomb_and_full_cpus_leave_the_sandbox_answering(host: Host) {
    let sandbox = host.sandbox().await;
    let bombs = [
        "b() { b | b & }; b; sleep 20",
        "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; sleep 20",
    ];
    for bomb in bombs {
        let request = ExecRequest { timeout_seconds: Some(25.0), ..command(bomb) };
        let watched = async {
            // It may end by its own limits or by the timeout; what counts is the rest.
            let _ = sandbox.client().exec(&sandbox.id, &request).await;
        };
        let meanwhile = async {
            pause(Duration::from_secs(5)).await;
            sandbox.write("/srv/job/file", "written").await;
            assert_eq!(sandbox.read("/srv/job/file").await, b"written");
            assert_eq!(sandbox.get("").await.json()["status"], "running");
        };
        tokio::join!(watched, meanwhile);
        until("a command works again", Duration::from_secs(60), async || {
            let result = sandbox
                .client()
                .exec(
                    &sandbox.id,
                    &ExecRequest { timeout_seconds: Some(20.0), ..command("echo alive") },
                )
                .await;
            result.is_ok_and(|result| result.stdout == "alive\n").then_some(())
        })
        .await;
    }
    // Deleted at the height of one.
    let mut events = sandbox
        .client()
        .exec_stream(&sandbox.id, &command("echo begun; b() { b | b & }; b; sleep 60"))
        .await
        .unwrap();
    assert_eq!(events.next().await.unwrap(), Some(ExecEvent::Stdout("begun\n".to_owned())));
    let start = Instant::now();
    sandbox.delete().await;
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
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
        tokio::join!(sandbox.exec(command("sleep 660; echo done")), streamed(&sandbox, &ticking));
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

async fn a_request_that_is_no_command_is_refused(host: Host) {
    let sandbox = host.sandbox().await;
    let bad = [
        json!({}),
        json!({"cmd": ""}),
        json!({"cmd": "  \n"}),
        json!({"cmd": "a\u{0}b"}),
        json!({"cmd": 7}),
        json!({"cmd": null}),
        json!({"cmd": "true", "timeout_seconds": 0}),
        json!({"cmd": "true", "timeout_seconds": -1}),
        json!({"cmd": "true", "timeout_seconds": "soon"}),
        json!({"cmd": "true", "timeout_seconds": 1e9}),
        json!({"cmd": "true", "cwd": "relative"}),
        json!({"cmd": "true", "cwd": 7}),
        json!({"cmd": "true", "user": ""}),
        json!({"cmd": "true", "user": ["root"]}),
        json!({"cmd": "true", "env": ["A=B"]}),
        json!({"cmd": "true", "env": {"A": 1}}),
        json!({"cmd": "true", "env": {"A=B": "1"}}),
        json!({"cmd": "true", "env": {"": "1"}}),
        json!({"cmd": "true", "env": {"A": "\u{0}"}}),
        json!({"cmd": "true", "stdin": 7}),
        json!([]),
        json!("true"),
    ];
    for body in bad {
        for route in ["/exec", "/exec/stream"] {
            let refused = Answer::to(sandbox.request(Method::POST, route).json(&body)).await;
            assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{route} {body}");
        }
    }
    for body in ["{", "", "cmd=true", "{\"cmd\": \"true\"} and more"] {
        let refused = Answer::to(sandbox.request(Method::POST, "/exec").body(body)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{body:?}");
    }
    // JSON is read as such whatever the content type says, and unknown fields are the clients' own.
    let fine = Answer::to(
        sandbox
            .request(Method::POST, "/exec")
            .header("content-type", "text/plain")
            .body(r#"{"cmd": "echo ok", "env": null, "user": null, "cwd": null, "shell": "fish"}"#),
    )
    .await;
    assert_eq!(fine.json()["stdout"], "ok\n");
}

async fn the_first_command_finds_a_machine_of_its_own(host: Host) {
    let [one, other] = host.two_sandboxes(&small()).await;
    let cmd = "date +%s.%N; hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid; cat /proc/sys/kernel/random/boot_id; \
               head -c 16 /dev/urandom | base64; echo $RANDOM$RANDOM$RANDOM; python3 -c 'import uuid, random; print(uuid.uuid4(), random.random())'; mktemp -u";
    let at = || time::OffsetDateTime::now_utc().unix_timestamp_nanos() as f64 / 1e9;
    let mut all = Vec::new();
    for sandbox in [&one, &other] {
        let before = at();
        let shown = sandbox.run(cmd).await;
        let after = at();
        let lines: Vec<_> = shown.lines().map(str::to_owned).collect();
        let clock: f64 = lines[0].parse().unwrap();
        assert!(
            clock > before - 1.5 && clock < after + 1.5,
            "the clock says {clock} between {before} and {after}"
        );
        all.push(lines);
    }
    for index in [1, 2, 3, 5, 6, 7, 8] {
        assert_ne!(all[0][index], all[1][index], "line {index} of {cmd}");
    }
    assert_eq!(all[0][2].len(), 32, "{}", all[0][2]);
    let resolves =
        one.run("getent hosts $(hostname) >/dev/null; hostname; cat /etc/hostname").await;
    let lines: Vec<_> = resolves.lines().collect();
    assert_eq!(lines[0], lines[1], "/etc/hostname says another name");
}

/// Whether a sparse file holds these bytes.
fn contains(path: &std::path::Path, wanted: &[u8]) -> bool {
    use rustix::fs::{SeekFrom, seek};
    use std::os::unix::fs::FileExt;
    let file = std::fs::File::open(path).unwrap();
    let mut next = 0;
    while let Ok(start) = seek(&file, SeekFrom::Data(next)) {
        let end = seek(&file, SeekFrom::Hole(start)).unwrap();
        let (mut at, mut window) = (start, vec![0; 4 << 20]);
        while at < end {
            let length = file.read_at(&mut window, at).unwrap();
            if memchr::memmem::find(&window[..length], wanted).is_some() {
                return true;
            }
            // What lies across the edge is seen next time.
            let step = length.saturating_sub(wanted.len()).max(1);
            at += step as u64;
        }
        next = end;
    }
    false
}

async fn the_environment_of_the_create_is_on_no_disk(host: Host) {
    let secret = "\u{1}a-value-nobody-else-has-6f1c\u{1}";
    let env = BTreeMap::from([
        ("TOKEN".to_owned(), secret.to_owned()),
        ("BOTH".to_owned(), "create".to_owned()),
    ]);
    let sandbox = host.sandbox_of(&CreateSandbox { env: Some(env), ..small() }).await;
    assert_eq!(sandbox.run("printf %s \"$TOKEN $BOTH\"").await, format!("{secret} create"));
    let over = ExecRequest {
        env: Some(BTreeMap::from([("BOTH".to_owned(), "exec".to_owned())])),
        ..command("printf %s \"$TOKEN $BOTH\"")
    };
    assert_eq!(sandbox.exec(over).await.stdout, format!("{secret} exec"));
    let shown = sandbox.get("").await.text();
    assert!(!shown.contains("nobody-else-has"), "{shown}");
    sandbox.write("/root/witness", "witness-7c2e-on-disk").await;
    sandbox.run("sync").await;
    let server = host.server().await;
    let directory = server.data().join("sandboxes").join(sandbox.id.to_string());
    let found = tokio::task::spawn_blocking(move || {
        let files = std::fs::read_dir(&directory).unwrap().map(|file| file.unwrap().path());
        let (mut secrets, mut witnesses) = (0, 0);
        for file in files {
            secrets += usize::from(contains(&file, b"a-value-nobody-else-has-6f1c"));
            witnesses += usize::from(contains(&file, b"witness-7c2e-on-disk"));
        }
        (secrets, witnesses)
    })
    .await
    .unwrap();
    assert_eq!(found, (0, 1), "the secret, and what shows that the search works");
}

async fn a_disk_that_is_not_there_takes_no_write(host: Host) {
    let sandbox = host.sandbox().await;
    let cmd = "for letter in b c d e f g h i j k l m n o p q; do \
               dd if=/dev/zero of=/dev/vd$letter bs=4k count=1 conv=fsync 2>/dev/null && echo vd$letter took a write; done; true";
    assert_eq!(sandbox.run(cmd).await, "");
}
