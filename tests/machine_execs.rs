//! Execs in real guests: they outlive their client, the server and their machine, and no id runs twice.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeSet, fs, time::Duration};

use api::{Exec, ExecId, ExecState, ExecStream, SandboxId, SandboxStatus, StartExec};
use client::{Client, LogStream, Method};
use futures::future::join_all;
use rustix::process::{Signal, kill_process};
use tests::{Answer, End, Host, Options, Server, command, patterned, small, suite, until};

suite! {
    a_script_is_a_record_and_exact_output,
    an_id_runs_once_whoever_asks_and_whatever_dies,
    a_start_that_the_servers_end_cuts_short_says_which_exec_it_is,
    a_running_exec_is_picked_up_by_the_next_server_with_all_its_output,
    binary_output_beyond_the_limit_is_cut_there_and_counted_in_full,
    two_hundred_at_once_are_all_accounted_for,
    a_machine_that_dies_loses_what_ran_and_keeps_what_was_printed,
    a_machine_that_dies_without_a_server_loses_what_ran,
    a_cancel_ends_all_processes_and_may_come_twice,
    an_exec_goes_on_through_a_rest_and_is_read_meanwhile,
    a_fork_has_none_of_its_parents_execs,
    what_has_aged_out_is_gone_and_does_not_run_again,
    what_was_logged_is_logged_still_after_a_restart,
    output_that_no_row_names_is_swept;
    soak:
}

const SOON: Duration = Duration::from_secs(60);

fn id(text: &str) -> ExecId {
    text.parse().unwrap()
}

fn script(exec: &str, script: impl Into<String>) -> StartExec {
    StartExec {
        exec_id: Some(id(exec)),
        script: script.into(),
        timeout_sec: Some(250.0),
        cwd: None,
        env: None,
        user: None,
        stdin: None,
    }
}

async fn ended(client: &Client, machine: &SandboxId, exec: &str) -> Exec {
    client.exec_end(machine, &id(exec)).await.unwrap()
}

/// To its end, page by page.
async fn output(client: &Client, machine: &SandboxId, exec: &str, stream: ExecStream) -> Vec<u8> {
    let mut whole = Vec::new();
    loop {
        let offset = whole.len() as u64;
        let page = client.exec_output(machine, &id(exec), stream, offset, SOON).await.unwrap();
        whole.extend(page.bytes);
        assert_eq!(page.next_offset, whole.len() as u64);
        if page.eof {
            return whole;
        }
    }
}

async fn stdout(client: &Client, machine: &SandboxId, exec: &str) -> Vec<u8> {
    output(client, machine, exec, ExecStream::Stdout).await
}

/// The status of a start under this id.
async fn status_of_start(client: &Client, machine: &SandboxId, request: &StartExec) -> u16 {
    let route = format!("/v1/machines/{machine}/execs");
    Answer::to(client.request(Method::POST, &route).json(request)).await.status
}

async fn a_script_is_a_record_and_exact_output(host: Host) {
    let sandbox = host.sandbox().await;
    let (client, machine) = (sandbox.client(), &sandbox.id);
    sandbox.write("/root/bytes", patterned(300_000)).await;
    let request = script("mount-1", "cat /root/bytes; echo err >&2; exit 3");
    let begun = client.start_exec(machine, &request).await.unwrap();
    assert_eq!((begun.machine_id, begun.exec_id.as_str()), (*machine, "mount-1"));
    let exec = ended(client, machine, "mount-1").await;
    assert_eq!((exec.state, exec.exit_code), (ExecState::Failed, Some(3)));
    assert_eq!((exec.stdout_bytes, exec.stderr_bytes, exec.truncated), (300_000, 4, false));
    assert!(stdout(client, machine, "mount-1").await == patterned(300_000));
    assert_eq!(output(client, machine, "mount-1", ExecStream::Stderr).await, b"err\n");

    let request = StartExec { timeout_sec: Some(1.0), ..script("late", "echo partial; sleep 600") };
    client.start_exec(machine, &request).await.unwrap();
    assert_eq!(ended(client, machine, "late").await.state, ExecState::Expired);
    assert_eq!(stdout(client, machine, "late").await, b"partial\n");

    sandbox.run("true").await;
    let listed = client.execs(machine, 10).await.unwrap();
    let ids: Vec<_> = listed.iter().map(|exec| exec.exec_id.as_str()).collect();
    assert_eq!(ids[1..], ["late", "mount-1"], "newest first, behind the other dialect's");
}

async fn an_id_runs_once_whoever_asks_and_whatever_dies(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    let request = script("once", "echo ran >> /root/ran; sleep 3; echo done");
    let client = server.client().clone();
    let statuses = join_all((0..10).map(|_| status_of_start(&client, &machine, &request))).await;
    assert_eq!(statuses.iter().filter(|status| **status == 202).count(), 1, "{statuses:?}");
    assert!(statuses.iter().all(|status| [202, 409].contains(status)), "{statuses:?}");
    for _ in 0..2 {
        server.restart(End::Killed).await;
        let client = server.client();
        assert_eq!(status_of_start(client, &machine, &request).await, 409);
        assert_eq!(ended(client, &machine, "once").await.state, ExecState::Succeeded);
        assert_eq!(stdout(client, &machine, "once").await, b"done\n");
        assert_eq!(status_of_start(client, &machine, &request).await, 409);
    }
    let counted = server.client().exec(&machine, &command("cat /root/ran")).await.unwrap();
    assert_eq!(counted.stdout, "ran\n");
    host.end(server).await;
}

/// Its client would otherwise take it for one that never ran, and start it again.
async fn a_start_that_the_servers_end_cuts_short_says_which_exec_it_is(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    let starting = tokio::spawn({
        let request = script("asked", "until [ -e /root/go ]; do sleep 0.2; done; echo done");
        let route = format!("/v1/machines/{machine}/execs?wait_ms=30000");
        let request = server.request(Method::POST, &route).json(&request);
        async move { Answer::to(request).await }
    });
    until("it runs", SOON, async || {
        let listed = server.client().execs(&machine, 10).await.unwrap();
        listed.iter().any(|exec| exec.state == ExecState::Running).then_some(())
    })
    .await;
    server.restart(End::Asked).await;
    let answer = starting.await.unwrap();
    assert_eq!(answer.refusal(), (503, "unavailable".to_owned()));
    assert_eq!(answer.json()["exec_id"], "asked");
    let client = server.client();
    let state = client.exec_state(&machine, &id("asked"), Duration::ZERO).await.unwrap().state;
    assert_eq!(state, ExecState::Running);
    assert_eq!(client.exec(&machine, &command("touch /root/go")).await.unwrap().exit_code, 0);
    assert_eq!(ended(client, &machine, "asked").await.state, ExecState::Succeeded);
    assert_eq!(stdout(client, &machine, "asked").await, b"done\n");
    host.end(server).await;
}

async fn a_running_exec_is_picked_up_by_the_next_server_with_all_its_output(host: Host) {
    const PIECES: usize = 60;
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    let options = client::WriteOptions::default();
    let piece = patterned(100_000);
    server.client().write_file(&machine, "/root/piece", piece.clone(), &options).await.unwrap();
    let printing = format!("for i in $(seq {PIECES}); do cat /root/piece; sleep 0.1; done; exit 5");
    server.client().start_exec(&machine, &script("long", printing)).await.unwrap();
    for restarts in 1..=2_u64 {
        let offset = restarts * 300_000;
        let reaches = async || {
            let client = server.client();
            let page =
                client.exec_output(&machine, &id("long"), ExecStream::Stdout, offset, SOON).await;
            (page.unwrap().next_offset > offset).then_some(())
        };
        until("it prints", SOON, reaches).await;
        server.restart(End::Killed).await;
    }
    let client = server.client();
    let exec = ended(client, &machine, "long").await;
    assert_eq!((exec.state, exec.exit_code), (ExecState::Failed, Some(5)));
    assert_eq!((exec.stdout_bytes, exec.truncated), ((PIECES * piece.len()) as u64, false));
    assert!(stdout(client, &machine, "long").await == piece.repeat(PIECES));
    host.end(server).await;
}

async fn binary_output_beyond_the_limit_is_cut_there_and_counted_in_full(host: Host) {
    const KEPT: usize = 64 << 20;
    let sandbox = host.sandbox().await;
    let (client, machine) = (sandbox.client(), &sandbox.id);
    let block = patterned(1 << 20);
    sandbox.write("/root/block", block.clone()).await;
    let request = script("much", "for i in $(seq 70); do cat /root/block; done; echo end >&2");
    client.start_exec(machine, &request).await.unwrap();
    let exec = ended(client, machine, "much").await;
    assert_eq!((exec.state, exec.truncated), (ExecState::Succeeded, true));
    assert_eq!((exec.stdout_bytes, exec.stderr_bytes), (70 << 20, 4));
    let kept = stdout(client, machine, "much").await;
    assert!(kept == block.repeat(KEPT >> 20), "{} bytes", kept.len());
    assert_eq!(output(client, machine, "much", ExecStream::Stderr).await, b"end\n");
}

async fn two_hundred_at_once_are_all_accounted_for(host: Host) {
    let sandbox = host.sandbox().await;
    let (client, machine) = (sandbox.client(), &sandbox.id);
    let names: Vec<_> = (0..200).map(|number| format!("job-{number}")).collect();
    let begun = join_all(names.iter().enumerate().map(|(number, name)| async move {
        let printing = format!("echo {number}; sleep 2; exit $(({number} % 3))");
        client.start_exec(machine, &script(name, printing)).await
    }))
    .await;
    assert!(begun.iter().all(Result::is_ok), "{:?}", begun.iter().find(|one| one.is_err()));
    for (number, name) in names.iter().enumerate() {
        let exec = ended(client, machine, name).await;
        assert_eq!(exec.exit_code, Some(number as i32 % 3), "{name}");
        assert_eq!(stdout(client, machine, name).await, format!("{number}\n").as_bytes());
    }
    let listed = client.execs(machine, 1000).await.unwrap();
    let listed: BTreeSet<_> = listed.iter().map(|exec| exec.exec_id.to_string()).collect();
    assert_eq!(listed, names.into_iter().collect());
}

/// One that runs and has printed more than stays in memory.
async fn leave_one_running(server: &Server, machine: &SandboxId) {
    let printing = "head -c 300000 /dev/zero; sleep 600";
    server.client().start_exec(machine, &script("doomed", printing)).await.unwrap();
    let (client, doomed) = (server.client(), id("doomed"));
    until("it prints", SOON, async || {
        let read = client.exec_output(machine, &doomed, ExecStream::Stdout, 299_999, SOON).await;
        (read.unwrap().next_offset == 300_000).then_some(())
    })
    .await;
}

async fn is_lost(server: &Server, machine: &SandboxId) {
    let exec = ended(server.client(), machine, "doomed").await;
    assert_eq!((exec.state, exec.exit_code), (ExecState::Lost, None));
    let sandbox = server.client().sandbox(machine).await.unwrap();
    assert_eq!(sandbox.status, SandboxStatus::Failed);
    let again = script("doomed", "true");
    assert_eq!(status_of_start(server.client(), machine, &again).await, 409);
}

async fn a_machine_that_dies_loses_what_ran_and_keeps_what_was_printed(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    server.client().start_exec(&machine, &script("before", "echo kept")).await.unwrap();
    assert_eq!(ended(server.client(), &machine, "before").await.exit_code, Some(0));
    leave_one_running(&server, &machine).await;
    kill_process(server.machine_of(&machine), Signal::KILL).unwrap();
    is_lost(&server, &machine).await;
    for _ in 0..2 {
        let client = server.client();
        assert!(stdout(client, &machine, "doomed").await == vec![0; 300_000]);
        assert_eq!(stdout(client, &machine, "before").await, b"kept\n");
        let cancelled = client.cancel_exec(&machine, &id("doomed")).await.unwrap();
        assert_eq!(cancelled.state, ExecState::Lost);
        server.restart(End::Asked).await;
    }
    is_lost(&server, &machine).await;
    host.end(server).await;
}

async fn a_machine_that_dies_without_a_server_loses_what_ran(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    leave_one_running(&server, &machine).await;
    let process = server.machine_of(&machine);
    server.stop(End::Killed).await;
    kill_process(process, Signal::KILL).unwrap();
    server.start_again().await;
    is_lost(&server, &machine).await;
    // What had come so far that it was written.
    let kept = stdout(server.client(), &machine, "doomed").await;
    assert!(kept.len() <= 300_000 && kept.iter().all(|byte| *byte == 0));
    host.end(server).await;
}

async fn a_cancel_ends_all_processes_and_may_come_twice(host: Host) {
    let sandbox = host.sandbox().await;
    let (client, machine) = (sandbox.client(), &sandbox.id);
    let stubborn = "trap '' TERM; setsid sleep 54321 & (sleep 54321 &); echo up; sleep 54321";
    client.start_exec(machine, &script("stubborn", stubborn)).await.unwrap();
    until("it is up", SOON, async || {
        let page = client
            .exec_output(machine, &id("stubborn"), ExecStream::Stdout, 0, SOON)
            .await
            .unwrap();
        (page.bytes == b"up\n").then_some(())
    })
    .await;
    let name = id("stubborn");
    let (first, second) =
        tokio::join!(client.cancel_exec(machine, &name), client.cancel_exec(machine, &name));
    assert!(first.is_ok() && second.is_ok(), "{first:?} {second:?}");
    assert_eq!(ended(client, machine, "stubborn").await.state, ExecState::Cancelled);
    until("nothing of it runs", SOON, async || {
        (sandbox.run("pgrep -fc 'sleep 5432[1]' || true").await.trim() == "0").then_some(())
    })
    .await;
    let again = client.cancel_exec(machine, &id("stubborn")).await.unwrap();
    assert_eq!(again.state, ExecState::Cancelled);
    client.start_exec(machine, &script("done", "exit 4")).await.unwrap();
    ended(client, machine, "done").await;
    let late = client.cancel_exec(machine, &id("done")).await.unwrap();
    assert_eq!((late.state, late.exit_code), (ExecState::Failed, Some(4)));
}

async fn an_exec_goes_on_through_a_rest_and_is_read_meanwhile(host: Host) {
    let sandbox = host.sandbox().await;
    let (client, machine) = (sandbox.client(), &sandbox.id);
    let waiting = "echo before; until [ -e /root/go ]; do sleep 0.2; done; echo after";
    client.start_exec(machine, &script("patient", waiting)).await.unwrap();
    client.start_exec(machine, &script("short", "echo short")).await.unwrap();
    ended(client, machine, "short").await;
    until("it has printed", SOON, async || {
        let page = client.exec_output(machine, &id("patient"), ExecStream::Stdout, 0, SOON).await;
        (page.unwrap().bytes == b"before\n").then_some(())
    })
    .await;
    client.hibernate(machine).await.unwrap();
    let page = client
        .exec_output(machine, &id("patient"), ExecStream::Stdout, 0, Duration::ZERO)
        .await
        .unwrap();
    assert_eq!((page.bytes.as_slice(), page.eof), (&b"before\n"[..], false));
    assert_eq!(stdout(client, machine, "short").await, b"short\n");
    let state = client.exec_state(machine, &id("patient"), Duration::ZERO).await.unwrap().state;
    assert_eq!(state, ExecState::Running);
    let resting = client.sandbox(machine).await.unwrap();
    assert_eq!(resting.status, SandboxStatus::Hibernated, "nobody has woken it");
    sandbox.run("touch /root/go").await;
    assert_eq!(stdout(client, machine, "patient").await, b"before\nafter\n");
    assert_eq!(ended(client, machine, "patient").await.state, ExecState::Succeeded);
}

async fn a_fork_has_none_of_its_parents_execs(host: Host) {
    let room = host.room(2).await;
    let parent = host.sandbox_within(&room, &small()).await;
    let client = parent.client();
    let waiting = "echo parents; until [ -e /root/go ]; do sleep 0.2; done";
    client.start_exec(&parent.id, &script("shared", waiting)).await.unwrap();
    let forked =
        Answer::to(parent.request(Method::POST, "/fork").json(&serde_json::json!({}))).await;
    let child: SandboxId = forked.json()["sandbox"]["id"].as_str().unwrap().parse().unwrap();
    assert!(client.execs(&child, 10).await.unwrap().is_empty());
    let unknown = client.exec_state(&child, &id("shared"), Duration::ZERO).await.unwrap_err();
    assert_eq!(unknown.status(), Some(404));
    client.start_exec(&child, &script("shared", "echo childs; touch /root/go")).await.unwrap();
    assert_eq!(ended(client, &child, "shared").await.state, ExecState::Succeeded);
    assert_eq!(stdout(client, &child, "shared").await, b"childs\n");
    let still = client.exec_state(&parent.id, &id("shared"), Duration::ZERO).await.unwrap();
    assert_eq!(still.state, ExecState::Running);
    parent.run("touch /root/go").await;
    assert_eq!(stdout(client, &parent.id, "shared").await, b"parents\n");
    client.delete_sandbox(&child).await.unwrap();
}

async fn what_has_aged_out_is_gone_and_does_not_run_again(host: Host) {
    let _room = host.room(1).await;
    let options = Options {
        arguments: ["--execs-kept", "2"].map(str::to_owned).to_vec(),
        ..Options::default()
    };
    let mut server = Server::start_with(options).await;
    let machine = server.create(&small()).await.id;
    for number in 0..4 {
        let name = format!("e{number}");
        let printing = format!("echo ran >> /root/ran; head -c {} /dev/zero", number * 100_000);
        server.client().start_exec(&machine, &script(&name, printing)).await.unwrap();
        ended(server.client(), &machine, &name).await;
    }
    for _ in 0..2 {
        let client = server.client();
        for old in ["e0", "e1"] {
            until("it is gone", SOON, async || {
                let gone = client.exec_state(&machine, &id(old), Duration::ZERO).await;
                gone.is_err_and(|error| error.status() == Some(410)).then_some(())
            })
            .await;
            let page =
                client.exec_output(&machine, &id(old), ExecStream::Stdout, 0, Duration::ZERO).await;
            assert_eq!(page.unwrap_err().status(), Some(410));
            let again = script(old, "echo ran >> /root/ran");
            assert_eq!(status_of_start(client, &machine, &again).await, 409);
        }
        assert_eq!(client.execs(&machine, 10).await.unwrap().len(), 2);
        assert_eq!(stdout(client, &machine, "e3").await.len(), 300_000);
        server.restart(End::Killed).await;
    }
    let files = server.data().join("sandboxes").join(machine.to_string()).join("execs");
    let files = fs::read_dir(files).unwrap().count();
    assert!(files <= 2, "output of those that aged out is on the disk: {files} files");
    host.end(server).await;
}

async fn what_was_logged_is_logged_still_after_a_restart(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    // The second goes to files, and the log has room for all.
    for cmd in ["echo one", "seq -f %0100g 2000", "echo three; echo four >&2"] {
        server.client().exec(&machine, &command(cmd)).await.unwrap();
    }
    let before = server.client().logs(&machine, LogStream::Both).await.unwrap();
    // What has ended a moment ago is still with its guest.
    server.restart(End::Killed).await;
    server.client().exec(&machine, &command("echo five")).await.unwrap();
    let expected = [&before[..], b"five\n"].concat();
    until("the log is as it was", SOON, async || {
        let after = server.client().logs(&machine, LogStream::Both).await.unwrap();
        let lines = |text: &[u8]| -> BTreeSet<String> {
            String::from_utf8_lossy(text).lines().map(str::to_owned).collect()
        };
        (lines(&after) == lines(&expected)).then_some(())
    })
    .await;
    server.restart(End::Asked).await;
    let after = server.client().logs(&machine, LogStream::Both).await.unwrap();
    assert!(after.starts_with(b"one\n") && after.ends_with(b"five\n"));
    assert_eq!(after.len(), expected.len());
    let errors = server.client().logs(&machine, LogStream::Stderr).await.unwrap();
    assert_eq!(&errors[..], b"four\n");
    host.end(server).await;
}

async fn output_that_no_row_names_is_swept(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let machine = server.create(&small()).await.id;
    server
        .client()
        .start_exec(&machine, &script("kept", "head -c 100000 /dev/zero"))
        .await
        .unwrap();
    ended(server.client(), &machine, "kept").await;
    let directory = server.data().join("sandboxes").join(machine.to_string()).join("execs");
    server.restart(End::Asked).await;
    fs::write(directory.join("stray.stdout"), b"left").unwrap();
    server.restart(End::Killed).await;
    assert_eq!(stdout(server.client(), &machine, "kept").await.len(), 100_000);
    let names: Vec<_> =
        fs::read_dir(&directory).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names, ["kept.stdout"]);
    host.end(server).await;
}
