//! Sandboxes at rest: paused in memory, hibernated on the disk, and as they were when they go on.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{fs, time::Duration};

use api::{CreateKey, CreateSandbox, EventKind, SandboxId, SandboxStatus, Scope, UpdateLifecycle};
use client::{Client, ExecEvent, LogStream, Method};
use rustix::process::{Pid, Signal, kill_process};
use tests::{
    Answer, End, Footprint, Held, Host, Sandbox, Server, command, has_failed, pause, small, suite,
    until,
};
use time::OffsetDateTime;
use tokio::time::Instant;

suite! {
    what_rests_goes_on_as_it_was,
    a_paused_sandbox_uses_no_processor_and_refuses_work,
    a_hibernated_sandbox_is_on_the_disk_alone,
    looking_at_a_hibernated_sandbox_does_not_wake_it,
    whatever_works_in_a_hibernated_sandbox_wakes_it,
    a_time_to_live_stands_still_while_paused,
    a_time_to_live_stands_still_while_hibernated,
    a_command_goes_on_after_a_rest,
    an_unused_sandbox_hibernates_and_a_used_one_does_not,
    a_delete_under_any_transition_leaves_nothing,
    what_rests_outlives_its_server,
    a_machine_that_dies_while_paused_makes_a_failed_sandbox;
    soak: ten_rests_lose_nothing
}

/// What a guest's clock may be off by, counted in seconds on both sides.
const CLOCK: i64 = 3;
const SOON: Duration = Duration::from_secs(30);

async fn status(client: &Client, id: &SandboxId) -> SandboxStatus {
    client.sandbox(id).await.unwrap().status
}

/// Of its machine, over all its threads.
fn runs(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero()));
    status.is_ok_and(|status| !status.contains("State:\tZ"))
}

/// The very first command after a rest.
async fn is_as_before(sandbox: &Sandbox, held: &Held) {
    let before = OffsetDateTime::now_utc().unix_timestamp();
    let first = sandbox
        .run("date +%s; cat /etc/machine-id; ping -c 1 -W 5 $(ip route | awk '/default/ { print $3 }') >/dev/null && echo reached")
        .await;
    let after = OffsetDateTime::now_utc().unix_timestamp();
    let [clock, machine_id, network] = first.lines().collect::<Vec<_>>()[..] else {
        panic!("{first}");
    };
    let clock: i64 = clock.parse().unwrap();
    assert_eq!(machine_id, sandbox.id.to_string().replace('-', ""), "it is the same machine");
    assert!((before - CLOCK..=after + CLOCK).contains(&clock), "{before} {clock} {after}");
    assert_eq!(network, "reached");
    assert_eq!(sandbox.held().await, *held);
}

async fn rests(host: Host, rounds: usize) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let held = sandbox.hold().await;
    for _ in 0..rounds {
        client.pause(&sandbox.id).await.unwrap();
        client.resume(&sandbox.id).await.unwrap();
        is_as_before(&sandbox, &held).await;
        client.hibernate(&sandbox.id).await.unwrap();
        client.wake(&sandbox.id).await.unwrap();
        is_as_before(&sandbox, &held).await;
        // From one rest into the other.
        client.pause(&sandbox.id).await.unwrap();
        client.hibernate(&sandbox.id).await.unwrap();
        client.resume(&sandbox.id).await.unwrap();
        is_as_before(&sandbox, &held).await;
    }
    let kinds: Vec<_> = client.sandbox_events(&sandbox.id, None).await.unwrap();
    let of = |kind| kinds.iter().filter(|event| event.kind == kind).count();
    assert_eq!(of(EventKind::Running), 1);
    assert_eq!(of(EventKind::Paused), 2 * rounds);
    assert_eq!(of(EventKind::Resumed), rounds);
    assert_eq!((of(EventKind::Hibernated), of(EventKind::Woken)), (2 * rounds, 2 * rounds));
    let last = client.sandbox_events(&sandbox.id, Some(2)).await.unwrap();
    assert_eq!(last, kinds[kinds.len() - 2..]);
}

async fn what_rests_goes_on_as_it_was(host: Host) {
    rests(host, 1).await;
}

async fn ten_rests_lose_nothing(host: Host) {
    rests(host, 10).await;
}

async fn a_paused_sandbox_uses_no_processor_and_refuses_work(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    sandbox.run("sh -c 'while :; do :; done' >/dev/null 2>&1 &").await;
    client.pause(&sandbox.id).await.unwrap();
    client.pause(&sandbox.id).await.unwrap();
    assert_eq!(status(client, &sandbox.id).await, SandboxStatus::Paused);
    let used = async || client.sandbox_metrics(&sandbox.id).await.unwrap();
    let before = used().await;
    assert!(before.cpu.seconds > 0.0 && before.memory.private_bytes > 0, "{before:?}");
    assert!(before.disk.used_bytes > 0 && before.disk.total_bytes > 0, "{before:?}");
    pause(Duration::from_secs(1)).await;
    let after = used().await;
    assert!(after.cpu.seconds - before.cpu.seconds < 0.05, "{before:?} {after:?}");
    let refused = client.exec(&sandbox.id, &command("true")).await.unwrap_err();
    assert_eq!(refused.status(), Some(409));
    assert!(refused.to_string().contains("resume"), "it says the way out: {refused}");
    assert_eq!(sandbox.get("/fs?path=/etc/hostname").await.status, 409);
    assert_eq!(sandbox.put("/root/x", "x").await.status, 409);
    client.resume(&sandbox.id).await.unwrap();
    client.resume(&sandbox.id).await.unwrap();
    assert_eq!(sandbox.run("echo works").await, "works\n");
}

async fn a_hibernated_sandbox_is_on_the_disk_alone(host: Host) {
    let server = host.server().await;
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let machine = server.machine_of(&sandbox.id);
    client.hibernate(&sandbox.id).await.unwrap();
    client.hibernate(&sandbox.id).await.unwrap();
    assert!(!runs(machine));
    let shown = client.sandbox(&sandbox.id).await.unwrap();
    assert_eq!((shown.status, shown.expires_at), (SandboxStatus::Hibernated, None));
    let used = client.sandbox_metrics(&sandbox.id).await.unwrap();
    assert_eq!((used.cpu.seconds, used.memory.private_bytes), (0.0, 0));
    assert!(used.disk.used_bytes > 0);
    let refused = Answer::to(sandbox.request(Method::POST, "/pause")).await;
    assert_eq!(refused.refusal(), (409, "conflict".to_owned()));
    let files = server.data().join("sandboxes").join(sandbox.id.to_string());
    assert!(files.join("hibernated/manifest.json").exists() && !files.join("rootfs").exists());
    client.wake(&sandbox.id).await.unwrap();
    client.wake(&sandbox.id).await.unwrap();
    assert!(!files.join("hibernated").exists() && files.join("rootfs").exists());
    assert_eq!(sandbox.run("echo works").await, "works\n");
}

async fn looking_at_a_hibernated_sandbox_does_not_wake_it(host: Host) {
    let server = host.server().await;
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    sandbox.run("echo printed").await;
    let request = CreateKey { scope: Some(Scope::Read), ..CreateKey::default() };
    let reader = client.create_key(&request).await.unwrap();
    let reader = server.client_with(Some(&reader.token));
    client.hibernate(&sandbox.id).await.unwrap();
    for client in [client, &reader] {
        for route in ["", "/lifecycle", "/events", "/metrics", "/network", "/logs"] {
            let path = format!("/v1/sandboxes/{}{route}", sandbox.id);
            let answer = Answer::to(client.request(Method::GET, &path)).await;
            assert_eq!(answer.status, 200, "{route}");
        }
    }
    assert_eq!(client.logs(&sandbox.id, LogStream::Both).await.unwrap(), "printed\n");
    client.follow_logs(&sandbox.id, LogStream::Both).await.unwrap();
    // Who may only look does not change what it is.
    for route in ["/fs?path=/etc/hostname", "/fs/dir?path=/", "/fs/stat?path=/"] {
        let path = format!("/v1/sandboxes/{}{route}", sandbox.id);
        let refused = Answer::to(reader.request(Method::GET, &path)).await;
        assert_eq!(refused.refusal(), (409, "conflict".to_owned()), "{route}");
    }
    for route in ["/wake", "/resume", "/exec", "/snapshots"] {
        let path = format!("/v1/sandboxes/{}{route}", sandbox.id);
        let refused = Answer::to(reader.request(Method::POST, &path)).await;
        assert_eq!(refused.refusal(), (403, "forbidden".to_owned()), "{route}");
    }
    assert_eq!(status(client, &sandbox.id).await, SandboxStatus::Hibernated);
}

async fn whatever_works_in_a_hibernated_sandbox_wakes_it(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    sandbox.write("/root/file", "written").await;
    client.hibernate(&sandbox.id).await.unwrap();
    assert_eq!(sandbox.read("/root/file").await, b"written");
    assert_eq!(status(client, &sandbox.id).await, SandboxStatus::Running);
    client.hibernate(&sandbox.id).await.unwrap();
    sandbox.write("/root/other", "written").await;
    client.hibernate(&sandbox.id).await.unwrap();
    // All at once, and each is served.
    let (command, file, names) = tokio::join!(
        sandbox.run("cat /root/other"),
        sandbox.read("/root/file"),
        sandbox.names("/root")
    );
    assert_eq!((command.as_str(), &file[..]), ("written", &b"written"[..]));
    assert!(names.contains(&"other".to_owned()), "{names:?}");
}

async fn time_stands_still(host: Host, rest: SandboxStatus) {
    let request = CreateSandbox { ttl_seconds: Some(8), ..small() };
    let sandbox = host.idle_sandbox_of(&request).await;
    let client = sandbox.client();
    let created = Instant::now();
    if rest == SandboxStatus::Paused {
        client.pause(&sandbox.id).await.unwrap();
    } else {
        client.hibernate(&sandbox.id).await.unwrap();
    }
    let lifecycle = client.lifecycle(&sandbox.id).await.unwrap();
    assert_eq!((lifecycle.status, lifecycle.ttl_seconds), (rest, Some(8)));
    assert_eq!(lifecycle.expires_at, None);
    until("its time would be over", SOON, async || {
        (created.elapsed() > Duration::from_secs(10)).then_some(())
    })
    .await;
    assert_eq!(status(client, &sandbox.id).await, rest);
    client.resume(&sandbox.id).await.unwrap();
    let expires = client.lifecycle(&sandbox.id).await.unwrap().expires_at.unwrap();
    let left = expires - OffsetDateTime::now_utc();
    assert!(left.is_positive() && left <= Duration::from_secs(8), "{left}");
    until("what was left is over", SOON, async || {
        (sandbox.get("").await.status == 404).then_some(())
    })
    .await;
}

async fn a_time_to_live_stands_still_while_paused(host: Host) {
    time_stands_still(host, SandboxStatus::Paused).await;
}

async fn a_time_to_live_stands_still_while_hibernated(host: Host) {
    time_stands_still(host, SandboxStatus::Hibernated).await;
}

async fn a_command_goes_on_after_a_rest(host: Host) {
    const COUNT: &str = "for i in $(seq 1 25); do echo $i; sleep 0.1; done; touch /root/end";
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    // Watched through a pause: not a line is lost.
    let mut events = client.exec_stream(&sandbox.id, &command(COUNT)).await.unwrap();
    events.next().await.unwrap();
    let mut said = String::from("1\n");
    client.pause(&sandbox.id).await.unwrap();
    client.resume(&sandbox.id).await.unwrap();
    loop {
        match events.next().await.unwrap().unwrap() {
            ExecEvent::Stdout(chunk) => said.push_str(&chunk),
            ExecEvent::Exited { exit_code } => break assert_eq!(exit_code, 0),
            other @ (ExecEvent::Stderr(_) | ExecEvent::Failed { .. }) => panic!("{other:?}"),
        }
    }
    let all: String = (1..=25).map(|number| format!("{number}\n")).collect();
    assert_eq!(said, all);
    // A hibernation ends the watching, and says so; the command itself goes on.
    sandbox.run("rm /root/end").await;
    let mut events = client.exec_stream(&sandbox.id, &command(COUNT)).await.unwrap();
    events.next().await.unwrap();
    client.hibernate(&sandbox.id).await.unwrap();
    let told = tokio::time::timeout(SOON, async {
        loop {
            match events.next().await {
                Ok(Some(ExecEvent::Stdout(_))) => {}
                other => return other,
            }
        }
    })
    .await
    .expect("no client hangs");
    assert!(!matches!(told, Ok(Some(ExecEvent::Exited { .. }))), "{told:?}");
    client.wake(&sandbox.id).await.unwrap();
    until("the command ends", SOON, async || client.stat_file(&sandbox.id, "/root/end").await.ok())
        .await;
    // What it printed after is in the log, each line once.
    let twice = format!("{all}{all}");
    let log = async || {
        let logged = client.logs(&sandbox.id, LogStream::Stdout).await.unwrap();
        String::from_utf8_lossy(&logged).into_owned()
    };
    until("all is in the log", SOON, async || (log().await.len() >= twice.len()).then_some(()))
        .await;
    assert_eq!(log().await, twice);
}

async fn is_idle(sandbox: &Sandbox) {
    until("it hibernates", SOON, async || {
        (status(sandbox.client(), &sandbox.id).await == SandboxStatus::Hibernated).then_some(())
    })
    .await;
}

async fn an_unused_sandbox_hibernates_and_a_used_one_does_not(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let patch = UpdateLifecycle { idle_seconds: Some(1), ..UpdateLifecycle::default() };
    let told = client.update_lifecycle(&sandbox.id, &patch).await.unwrap();
    assert_eq!(told.idle_seconds, Some(1));
    is_idle(&sandbox).await;
    // A command that runs is use, though nobody watches it.
    let working = command("echo begun; sleep 4; touch /root/end");
    let mut events = client.exec_stream(&sandbox.id, &working).await.unwrap();
    events.next().await.unwrap();
    drop(events);
    let begun = Instant::now();
    is_idle(&sandbox).await;
    assert!(begun.elapsed() >= Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(client.stat_file(&sandbox.id, "/root/end").await.is_ok());
    // A stream is use: an upload that is not over.
    let slow = client::Body::wrap_stream(futures::stream::unfold(0, |count| async move {
        pause(Duration::from_millis(200)).await;
        (count < 15).then(|| (Ok::<_, std::io::Error>(bytes::Bytes::from_static(b".")), count + 1))
    }));
    let uploaded = sandbox.put("/root/slow", slow).await;
    assert_eq!(uploaded.status, 200, "{uploaded:?}");
    is_idle(&sandbox).await;
    let events = client.sandbox_events(&sandbox.id, None).await.unwrap();
    let of = |kind| events.iter().filter(|event| event.kind == kind).count();
    assert_eq!((of(EventKind::Hibernated), of(EventKind::Woken)), (3, 2));
    for bad in [-1, i64::MAX] {
        let body = serde_json::json!({"idle_seconds": bad});
        let refused = Answer::to(sandbox.request(Method::PATCH, "/lifecycle").json(&body)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()));
    }
    // 0 takes it back.
    let patch = UpdateLifecycle { idle_seconds: Some(0), ..UpdateLifecycle::default() };
    assert_eq!(client.update_lifecycle(&sandbox.id, &patch).await.unwrap().idle_seconds, None);
    client.wake(&sandbox.id).await.unwrap();
    pause(Duration::from_secs(3)).await;
    assert_eq!(status(client, &sandbox.id).await, SandboxStatus::Running);
}

async fn a_delete_under_any_transition_leaves_nothing(host: Host) {
    let server = host.server().await;
    for verb in ["pause", "resume", "hibernate", "wake"] {
        let sandbox = host.sandbox().await;
        let client = sandbox.client();
        match verb {
            "resume" => client.pause(&sandbox.id).await.unwrap(),
            "wake" => client.hibernate(&sandbox.id).await.unwrap(),
            _ => {}
        }
        let begun = sandbox.request(Method::POST, &format!("/{verb}"));
        let (answer, deleted) = tokio::join!(Answer::to(begun), async {
            pause(Duration::from_millis(15)).await;
            client.delete_sandbox(&sandbox.id).await
        });
        deleted.unwrap();
        assert!([200, 204, 404].contains(&answer.status), "{verb}: {answer:?}");
        assert_eq!(sandbox.get("").await.status, 404, "{verb}");
        assert_eq!(client.delete_sandbox(&sandbox.id).await.unwrap_err().status(), Some(404));
        for verb in ["pause", "resume", "hibernate", "wake", "snapshots", "fork"] {
            let gone = Answer::to(sandbox.request(Method::POST, &format!("/{verb}"))).await;
            assert_eq!(gone.refusal(), (404, "not_found".to_owned()), "{verb}");
        }
        let name = format!("sandboxes/{}", sandbox.id);
        assert!(!Footprint::of(server.data()).files.contains(&name), "{verb}");
    }
}

async fn what_rests_outlives_its_server(host: Host) {
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    let request = CreateSandbox { ttl_seconds: Some(900), ..small() };
    let paused = server.sandbox(&request).await;
    let hibernated = server.sandbox(&request).await;
    let held = [paused.hold().await, hibernated.hold().await];
    paused.client().pause(&paused.id).await.unwrap();
    hibernated.client().hibernate(&hibernated.id).await.unwrap();
    let machine = server.machine_of(&paused.id);
    for end in [End::Killed, End::Asked] {
        server.restart(end).await;
        let client = server.client();
        assert_eq!(status(client, &paused.id).await, SandboxStatus::Paused);
        assert_eq!(status(client, &hibernated.id).await, SandboxStatus::Hibernated);
        assert_eq!(client.lifecycle(&paused.id).await.unwrap().expires_at, None);
        assert!(runs(machine));
    }
    let client = server.client();
    client.resume(&paused.id).await.unwrap();
    assert_eq!(Held::of(client, &paused.id).await.unwrap(), held[0]);
    assert_eq!(Held::of(client, &hibernated.id).await.unwrap(), held[1]);
    let left = client.lifecycle(&hibernated.id).await.unwrap().expires_at.unwrap();
    assert!(left - OffsetDateTime::now_utc() > Duration::from_secs(600));
    host.end(server).await;
}

async fn a_machine_that_dies_while_paused_makes_a_failed_sandbox(host: Host) {
    let server = host.server().await;
    let sandbox = host.sandbox().await;
    sandbox.client().pause(&sandbox.id).await.unwrap();
    kill_process(server.machine_of(&sandbox.id), Signal::KILL).unwrap();
    has_failed(&server, &sandbox.id).await;
}
