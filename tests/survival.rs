//! Servers and machines that end at any moment, and what is there afterwards.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use api::{CreateSandbox, ExecRequest, SandboxStatus};
use client::SandboxFilter;
use rustix::process::{Pid, Signal, kill_process};
use tests::{
    Answer, End, Host, Server, command, has_failed, is_sound, pause, program, small, suite, until,
    will_not_be_repeated,
};
use tokio::process::Command;

suite! {
    a_running_sandbox_survives_a_server_that_is_asked_to_end,
    a_running_sandbox_survives_a_server_that_is_killed,
    what_was_half_made_is_gone_after_a_kill,
    a_sandbox_that_expired_without_a_server_is_gone,
    a_machine_that_dies_makes_a_failed_sandbox,
    a_machine_that_dies_without_a_server_makes_a_failed_sandbox,
    a_stopped_sandbox_is_still_there_after_a_restart,
    a_data_directory_has_one_server,
    a_server_that_cannot_start_says_why,
    two_servers_on_a_host_do_not_see_each_other;
    soak: ten_kills_under_load_leave_a_server_that_works,
}

async fn survives(host: Host, end: End) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let metadata = BTreeMap::from([("kept".to_owned(), "yes".to_owned())]);
    let env = BTreeMap::from([("TOKEN".to_owned(), "still here".to_owned())]);
    let request = CreateSandbox { metadata: Some(metadata), env: Some(env), ..small() };
    let before = server.create(&request).await;
    let (id, client) = (before.id, server.client().clone());
    client
        .exec(
            &id,
            &command("echo kept > /root/file; sleep 1000 >/dev/null 2>&1 & echo $! > /root/pid"),
        )
        .await
        .unwrap();
    // It prints far more than any pipe or window holds: were its output not taken any longer, it would stand still.
    let printing = "python3 -c \"import time\nfor i in range(1, 201): print('x' * 20000, flush=True); print(i, file=open('/root/count', 'w')); time.sleep(0.05)\"; echo end > /root/end";
    let mut events = client.exec_stream(&id, &command(printing)).await.unwrap();
    events.next().await.unwrap();
    // A client that waits for a command learns of the end; it does not hang.
    let waiting = tokio::spawn({
        let client = client.clone();
        async move {
            client
                .exec(&id, &ExecRequest { timeout_seconds: Some(20.0), ..command("sleep 15") })
                .await
        }
    });
    let machine = server.machine_of(&id);
    server.restart(end).await;
    drop(events);
    let waited = tokio::time::timeout(Duration::from_secs(40), waiting)
        .await
        .expect("no client hangs")
        .unwrap();
    assert!(waited.is_err() || end == End::Asked, "{waited:?}");
    assert_eq!(server.machine_of(&id), machine, "the same machine runs on");
    let client = server.client().clone();
    let after = client.sandbox(&id).await.unwrap();
    assert_eq!(
        (after.status, &after.metadata, &after.guest_ip, after.expires_at),
        (SandboxStatus::Running, &before.metadata, &before.guest_ip, before.expires_at)
    );
    let first = client
        .exec(&id, &command("cat /root/file; kill -0 $(cat /root/pid) && echo lives; echo $TOKEN"))
        .await
        .unwrap();
    assert_eq!(first.stdout, "kept\nlives\nstill here\n");
    until(
        "the command of the earlier server comes to its end",
        Duration::from_secs(90),
        async || {
            let shown = client.exec(&id, &command("cat /root/count /root/end")).await.unwrap();
            shown.stdout.ends_with("200\nend\n").then_some(())
        },
    )
    .await;
    client
        .write_file(&id, "/root/new", "written after", &client::WriteOptions::default())
        .await
        .unwrap();
    assert_eq!(
        client.read_file(&id, "/root/new").await.unwrap().bytes().await.unwrap(),
        b"written after"
    );
    // The network was kept, too.
    let gateway = client.exec(&id, &command("ping -c 1 -W 5 $(ip route | awk '/default/ { print $3 }') >/dev/null && echo reached")).await.unwrap();
    assert_eq!(gateway.stdout, "reached\n");
    client.delete_sandbox(&id).await.unwrap();
    until("its machine is gone", Duration::from_secs(10), async || (!runs(machine)).then_some(()))
        .await;
    let fresh = server.create(&small()).await;
    assert_eq!(
        server.client().exec(&fresh.id, &command("echo works")).await.unwrap().stdout,
        "works\n"
    );
    host.end(server).await;
}

fn runs(pid: Pid) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()))
        .unwrap_or_default();
    !status.is_empty() && !status.contains("State:\tZ")
}

async fn a_running_sandbox_survives_a_server_that_is_asked_to_end(host: Host) {
    survives(host, End::Asked).await;
}

async fn a_running_sandbox_survives_a_server_that_is_killed(host: Host) {
    survives(host, End::Killed).await;
}

async fn what_was_half_made_is_gone_after_a_kill(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let ready = server.create(&small()).await;
    server.client().delete_sandbox(&ready.id).await.unwrap();
    // At different points on the way.
    for moment in [5, 40, 90, 160] {
        let client = server.client().clone();
        let request = CreateSandbox { ttl_seconds: Some(600), ..small() };
        let creating = tokio::spawn(async move { client.create_sandbox(&request).await });
        pause(Duration::from_millis(moment)).await;
        server.restart(End::Killed).await;
        if let Ok(created) = creating.await.unwrap() {
            assert_eq!(
                server.client().sandbox(&created.id).await.unwrap().status,
                SandboxStatus::Running
            );
        }
        is_sound(&server).await;
        server.delete_all().await;
    }
    host.end(server).await;
}

async fn a_sandbox_that_expired_without_a_server_is_gone(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&CreateSandbox { ttl_seconds: Some(3), ..small() }).await;
    let machine = server.machine_of(&sandbox.id);
    server.stop(End::Killed).await;
    let end = sandbox.expires_at.unwrap();
    until("its time is up", Duration::from_secs(10), async || {
        (time::OffsetDateTime::now_utc() > end).then_some(())
    })
    .await;
    server.start_again().await;
    until("it is gone", Duration::from_secs(20), async || {
        (server.get(&format!("/v1/sandboxes/{}", sandbox.id)).await.status == 404).then_some(())
    })
    .await;
    assert!(!runs(machine));
    host.end(server).await;
}

async fn a_machine_that_dies_makes_a_failed_sandbox(host: Host) {
    let server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let client = server.client().clone();
    let running = tokio::spawn({
        let (client, id) = (client.clone(), sandbox.id);
        async move {
            client
                .exec(&id, &ExecRequest { timeout_seconds: Some(25.0), ..command("sleep 60") })
                .await
        }
    });
    until("the command runs", Duration::from_secs(20), async || {
        let seen = client.exec(&sandbox.id, &command("pgrep -x sleep")).await.unwrap();
        (seen.exit_code == 0).then_some(())
    })
    .await;
    kill_process(server.machine_of(&sandbox.id), Signal::KILL).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(15), running)
        .await
        .expect("the client is told")
        .unwrap()
        .unwrap_err();
    let refusal = ended.refusal().unwrap();
    assert!([409, 503].contains(&refusal.status), "{refusal:?}");
    will_not_be_repeated(&refusal.message);
    has_failed(&server, &sandbox.id).await;
    host.end(server).await;
}

async fn a_machine_that_dies_without_a_server_makes_a_failed_sandbox(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(2).await;
    let (dead, alive) = (server.create(&small()).await, server.create(&small()).await);
    let machine = server.machine_of(&dead.id);
    server.stop(End::Killed).await;
    kill_process(machine, Signal::KILL).unwrap();
    server.start_again().await;
    has_failed(&server, &dead.id).await;
    assert_eq!(
        server.client().exec(&alive.id, &command("echo works")).await.unwrap().stdout,
        "works\n"
    );
    host.end(server).await;
}

async fn a_stopped_sandbox_is_still_there_after_a_restart(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let request = ExecRequest {
        timeout_seconds: Some(20.0),
        ..command(
            "sync; python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x4321fedc)'; sleep 30",
        )
    };
    server.client().exec(&sandbox.id, &request).await.unwrap_err();
    let stopped = async |server: &Server| {
        server.client().sandbox(&sandbox.id).await.unwrap().status == SandboxStatus::Stopped
    };
    until("it is stopped", Duration::from_secs(20), async || stopped(&server).await.then_some(()))
        .await;
    server.restart(End::Asked).await;
    assert!(stopped(&server).await);
    assert!(
        server.data().join("sandboxes").join(sandbox.id.to_string()).exists(),
        "its disk is kept"
    );
    host.end(server).await;
}

/// Runs `atoll serve` where it cannot start, and hands back what it says.
async fn refused(arguments: &[&str]) -> String {
    let command = Command::new(program())
        .arg("serve")
        .args(arguments)
        .env_remove("ATOLL_DATA_DIR")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output =
        tokio::time::timeout(Duration::from_secs(60), command).await.expect("it ends").unwrap();
    assert!(!output.status.success(), "{arguments:?}");
    assert!(output.stdout.is_empty(), "it says no URL");
    let said = String::from_utf8(output.stderr).unwrap();
    let last = said.lines().filter(|line| line.starts_with("error: ")).collect::<Vec<_>>();
    assert_eq!(last.len(), 1, "one clear sentence: {said}");
    assert!(!said.contains("panicked"), "{said}");
    last[0].to_owned()
}

async fn a_data_directory_has_one_server(host: Host) {
    let server = Server::start().await;
    let said =
        refused(&["--listen", "127.0.0.1:0", "--data-dir", server.data().to_str().unwrap()]).await;
    assert!(said.contains("another server"), "{said}");
    assert_eq!(server.get("/v1/me").await.status, 200, "the first one is not disturbed");
    host.end(server).await;
}

async fn a_server_that_cannot_start_says_why(host: Host) {
    let server = host.server().await;
    let data = tempfile::tempdir_in(server.data().parent().unwrap()).unwrap();
    let data = data.path().to_str().unwrap();
    let taken = server.url().strip_prefix("http://").unwrap();
    let said = refused(&["--listen", taken, "--data-dir", data]).await;
    assert!(said.contains(taken), "{said}");
    let said = refused(&[
        "--listen",
        "127.0.0.1:0",
        "--data-dir",
        data,
        "--database",
        "postgres://nobody@127.0.0.1:1/none",
    ])
    .await;
    assert!(said.contains("database"), "{said}");
    assert!(!said.contains("nobody@"), "a URL may hold a password: {said}");
    let said =
        refused(&["--listen", "127.0.0.1:0", "--data-dir", data, "--egress-allow", "everything"])
            .await;
    assert!(said.contains("everything"), "{said}");
    let said = refused(&["--listen", "127.0.0.1:0", "--data-dir", "/proc/atoll"]).await;
    assert!(said.contains("/proc/atoll"), "{said}");
}

async fn two_servers_on_a_host_do_not_see_each_other(host: Host) {
    let (mut one, other) = tokio::join!(Server::start(), Server::start());
    let _room = host.room(2).await;
    let (mine, theirs) = (one.create(&small()).await, other.create(&small()).await);
    assert_ne!(mine.guest_ip, theirs.guest_ip);
    assert_eq!(one.get(&format!("/v1/sandboxes/{}", theirs.id)).await.status, 404);
    assert_eq!(one.client().sandboxes(&SandboxFilter::default()).await.unwrap().len(), 1);
    let foreign =
        Answer::to(one.client_with(Some(other.key())).request(client::Method::GET, "/v1/me")).await;
    assert_eq!(foreign.status, 401);
    let works = async |server: &Server, sandbox: &api::Sandbox| {
        server
            .client()
            .exec(&sandbox.id, &command("getent hosts localhost >/dev/null; echo works"))
            .await
            .unwrap()
            .stdout
            == "works\n"
    };
    assert!(works(&one, &mine).await && works(&other, &theirs).await);
    // The recovery of one leaves the other alone.
    one.restart(End::Killed).await;
    assert!(works(&one, &mine).await && works(&other, &theirs).await);
    host.end(one).await;
    assert!(works(&other, &theirs).await);
    host.end(other).await;
}

async fn ten_kills_under_load_leave_a_server_that_works(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(3).await;
    let kept = server.create(&CreateSandbox { ttl_seconds: Some(7200), ..small() }).await;
    for round in 0..10 {
        let client = server.client().clone();
        let load: Vec<_> = (0..2)
            .map(|_| {
                let client = client.clone();
                tokio::spawn(async move {
                    while let Ok(sandbox) = client.create_sandbox(&small()).await {
                        // The server may be gone at any of these.
                        let _ = client
                            .exec(
                                &sandbox.id,
                                &command("head -c 100000 /dev/urandom > /root/x; sync"),
                            )
                            .await;
                        let _ = client.delete_sandbox(&sandbox.id).await;
                    }
                })
            })
            .collect();
        pause(Duration::from_millis(1500 + 370 * round)).await;
        server.restart(End::Killed).await;
        for task in load {
            task.await.unwrap();
        }
        is_sound(&server).await;
        assert_eq!(server.client().sandbox(&kept.id).await.unwrap().status, SandboxStatus::Running);
    }
    host.end(server).await;
}
