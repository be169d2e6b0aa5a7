//! Commands: results, streams, limits, and what they leave behind.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateSandbox, ExecRequest};
use client::{ExecEvent, Method};
use serde_json::json;
use sha2::{Digest, Sha256};
use tests::{Answer, Host, Sandbox, command, pause, small, suite, until};
use tokio::time::Instant;

suite! {
    output_and_exit_code_are_told_apart,
    a_background_child_does_not_hold_the_command,
    a_timeout_kills_the_whole_tree_and_keeps_what_was_printed,
    a_death_by_a_signal_is_128_and_its_number,
    standard_input_has_an_end,
    ten_megabytes_of_standard_input_arrive_whole,
    a_command_line_of_a_mebibyte_and_a_here_document_work,
    environment_values_arrive_as_they_are,
    user_directory_and_home_are_as_asked,
    short_commands_leave_nothing_behind,
    a_command_that_takes_all_memory_is_told_as_such,
    a_sandbox_whose_processes_multiply_can_be_deleted,
    a_request_that_is_no_command_is_refused,
    the_first_command_finds_a_machine_of_its_own,
    the_environment_of_the_create_is_on_no_disk,
    a_disk_that_is_not_there_takes_no_write;
    soak: a_thousand_commands_leave_nothing_behind,
    a_fork_bomb_and_full_cpus_leave_the_sandbox_answering,
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
    let (_, _, code) = sandbox.streamed(&command("kill -9 $$")).await;
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
    let (out, _, code) = sandbox.streamed(&command(format!("printf %s {long} | wc -c"))).await;
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
            _ => assert_eq!(sandbox.streamed(&command("echo s")).await.2, Some(0)),
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

async fn a_sandbox_whose_processes_multiply_can_be_deleted(host: Host) {
    let sandbox = host.sandbox().await;
    let bomb = command("echo lit; b() { b | b & }; b; while :; do :; done");
    let mut events = sandbox.client().exec_stream(&sandbox.id, &bomb).await.unwrap();
    events.next().await.unwrap();
    // Of those that the server answers by itself, none waits for the guest.
    assert_eq!(sandbox.get("").await.json()["status"], "running");
    let (client, id) = (sandbox.client().clone(), sandbox.id);
    sandbox.delete().await;
    assert_eq!(client.sandbox(&id).await.unwrap_err().status(), Some(404));
    // Its watcher is told; it does not wait for ever.
    while let Ok(Some(_)) = events.next().await {}
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
