//! Servers, machines and hosts that end in the midst of work: what clients are told, and what is kept of it.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use api::{SandboxId, SandboxStatus};
use bytes::Bytes;
use client::{Client, ExecEvent, ExecEvents, Method, WriteOptions};
use rustix::process::{Signal, kill_process};
use tests::{
    Answer, End, Footprint, Host, Server, command, has_failed, is_sound, pause, small, suite,
    until, will_not_be_repeated,
};

suite! {
    a_server_ends_quickly_whatever_is_under_way,
    a_second_request_ends_a_server_at_once,
    a_restart_of_the_host_makes_failed_sandboxes_that_say_so,
    what_is_in_flight_when_a_machine_dies_is_answered_at_once,
    the_log_has_every_line_once_after_a_restart,
    kills_at_random_moments_lose_nothing_that_was_acknowledged;
    soak:
}

/// Reads events until the stream ends: whether it said so itself.
async fn last_event(mut events: ExecEvents) -> Result<ExecEvent, client::Error> {
    let mut last = None;
    while let Some(event) = events.next().await? {
        last = Some(event);
    }
    Ok(last.unwrap())
}

async fn a_server_ends_quickly_whatever_is_under_way(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let (client, id) = (server.client().clone(), sandbox.id);
    let mut streams = Vec::new();
    for script in ["sleep 300", "yes", "while sleep 0.1; do echo tick; done"] {
        let mut events =
            client.exec_stream(&id, &command(format!("echo begun; {script}"))).await.unwrap();
        events.next().await.unwrap();
        streams.push(tokio::spawn(last_event(events)));
    }
    let following = server.request(Method::GET, &format!("/v1/sandboxes/{id}/logs?follow=1"));
    let following = tokio::spawn(following.send());
    let waiting = tokio::spawn({
        let client = client.clone();
        async move { client.exec(&id, &command("sleep 299")).await }
    });
    until("all of it runs", Duration::from_secs(20), async || {
        let seen = client.exec(&id, &command("pgrep -f 'sleep 299'")).await.unwrap();
        (seen.exit_code == 0).then_some(())
    })
    .await;
    let began = Instant::now();
    assert!(server.stop(End::Asked).await.success());
    let taken = began.elapsed();
    // On a host that is not busy it is about one.
    assert!(taken < Duration::from_secs(6), "{taken:?}");
    for stream in streams {
        // Either its last word is an error, or it broke off: nobody takes it for the end of the command.
        if let Ok(ExecEvent::Failed { message }) = stream.await.unwrap() {
            will_not_be_repeated(&message);
        }
    }
    let refused = waiting.await.unwrap().unwrap_err();
    if let Some(refusal) = refused.refusal() {
        will_not_be_repeated(&refusal.message);
        assert_eq!(refusal.status, 503);
    }
    drop(following.await.unwrap());
    server.start_again().await;
    let alive = server.client().exec(&id, &command("pgrep -fc 'sleep 299'")).await.unwrap();
    assert_eq!(alive.exit_code, 0, "the commands go on");
    host.end(server).await;
}

async fn a_second_request_ends_a_server_at_once(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let kept = server.create(&small()).await;
    let client = server.client().clone();
    // Something that a first request waits for.
    let creating = tokio::spawn(async move { client.create_sandbox(&small()).await });
    pause(Duration::from_millis(20)).await;
    let pid = server.process_id();
    kill_process(pid, Signal::TERM).unwrap();
    pause(Duration::from_millis(30)).await;
    let began = Instant::now();
    // It may have been quicker.
    server.stop(End::Asked).await;
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    drop(creating.await);
    server.start_again().await;
    is_sound(&server).await;
    assert_eq!(server.client().sandbox(&kept.id).await.unwrap().status, SandboxStatus::Running);
    host.end(server).await;
}

async fn a_restart_of_the_host_makes_failed_sandboxes_that_say_so(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(2).await;
    let (one, other) = (server.create(&small()).await, server.create(&small()).await);
    let data = server.data().to_owned();
    server.stop(End::Killed).await;
    // What a restart takes: processes, networks, packet filter rules, /run. And the host's boot has another name.
    let number = std::fs::read_to_string(data.join("instance")).unwrap();
    Footprint::of(&data).remove();
    std::fs::remove_file(format!("/run/atoll/instance-{}", number.trim())).unwrap();
    let foreign = "00000000-0000-4000-8000-000000000000\n";
    std::fs::write(data.join("boot-id"), foreign).unwrap();
    server.start_again().await;
    assert_eq!(
        std::fs::read_to_string(data.join("instance")).unwrap(),
        number,
        "it keeps its number"
    );
    for sandbox in [&one, &other] {
        let failed = server.client().sandbox(&sandbox.id).await.unwrap();
        assert_eq!(failed.status, SandboxStatus::Failed);
        let why = failed.error.unwrap();
        assert!(why.contains("the host was restarted"), "{why}");
        let refused = server.client().exec(&sandbox.id, &command("true")).await.unwrap_err();
        assert_eq!(refused.status(), Some(409), "{refused}");
    }
    server.client().delete_sandbox(&one.id).await.unwrap();
    // The reason is still there when the server, not the host, is started once more.
    server.restart(End::Killed).await;
    let failed = server.client().sandbox(&other.id).await.unwrap();
    assert!(failed.error.unwrap().contains("the host was restarted"));
    server.client().delete_sandbox(&other.id).await.unwrap();
    let fresh = server.create(&small()).await;
    let result = server.client().exec(&fresh.id, &command("echo works")).await.unwrap();
    assert_eq!(result.stdout, "works\n");
    host.end(server).await;
}

async fn what_is_in_flight_when_a_machine_dies_is_answered_at_once(host: Host) {
    let server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let (client, id) = (server.client().clone(), sandbox.id);
    let mut events = client.exec_stream(&id, &command("echo begun; sleep 300")).await.unwrap();
    events.next().await.unwrap();
    let stream = tokio::spawn(last_event(events));
    let exec = tokio::spawn({
        let client = client.clone();
        async move { client.exec(&id, &command("sleep 299")).await }
    });
    // More than what lies on the way would hold.
    client.exec(&id, &command("head -c 200000000 /dev/zero > /root/big")).await.unwrap();
    let mut read = client.read_file(&id, "/root/big").await.unwrap();
    read.chunk().await.unwrap();
    let (send, body) = tokio::sync::mpsc::channel::<Result<Bytes, std::io::Error>>(1);
    let path = format!("/v1/sandboxes/{id}/fs?path=/root/up");
    let body = reqwest::Body::wrap_stream(tokio_stream::wrappers::ReceiverStream::new(body));
    let upload = server.request(Method::PUT, &path).body(body);
    let upload = tokio::spawn(Answer::to(upload));
    send.send(Ok(Bytes::from_static(b"part"))).await.unwrap();
    until("all of it runs", Duration::from_secs(20), async || {
        let seen = client.exec(&id, &command("pgrep -f 'sleep 299'")).await.unwrap();
        (seen.exit_code == 0).then_some(())
    })
    .await;
    kill_process(server.machine_of(&id), Signal::KILL).unwrap();
    let at_once = Duration::from_secs(10);
    match tokio::time::timeout(at_once, stream).await.expect("the stream ends").unwrap() {
        Ok(ExecEvent::Failed { message }) => will_not_be_repeated(&message),
        Err(error) => assert!(error.refusal().is_none(), "{error}"),
        Ok(other) => panic!("{other:?}"),
    }
    let exec = tokio::time::timeout(at_once, exec).await.expect("the exec ends").unwrap();
    // One that has been kept alive already can only break off.
    if let Some(refusal) = exec.unwrap_err().refusal() {
        assert!([409, 503].contains(&refusal.status), "{refusal:?}");
        will_not_be_repeated(&refusal.message);
    }
    let rest = tokio::time::timeout(at_once, read.bytes()).await.expect("the read ends");
    assert!(rest.is_err(), "a part is not taken for the whole");
    let upload = tokio::time::timeout(at_once, upload).await.expect("the upload ends").unwrap();
    assert!([404, 409, 503].contains(&upload.status), "{upload:?}");
    will_not_be_repeated(&upload.text());
    drop(send);
    has_failed(&server, &id).await;
    host.end(server).await;
}

async fn the_log_has_every_line_once_after_a_restart(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let counting = "for i in $(seq 1 200); do echo line $i; sleep 0.05; done";
    let events = server.client().exec_stream(&sandbox.id, &command(counting)).await.unwrap();
    let log = async |server: &Server| {
        server.get(&format!("/v1/sandboxes/{}/logs?stream=stdout", sandbox.id)).await.text()
    };
    until("it prints", Duration::from_secs(20), async || {
        log(&server).await.contains("line 20\n").then_some(())
    })
    .await;
    server.restart(End::Killed).await;
    drop(events);
    let text = until("it has ended", Duration::from_secs(60), async || {
        let text = log(&server).await;
        text.contains("line 200\n").then_some(text)
    })
    .await;
    let expected: String = (1..=200).map(|number| format!("line {number}\n")).collect();
    assert_eq!(text, expected);
    host.end(server).await;
}

/// What clients were told: it has to hold whenever the server dies.
#[derive(Default)]
struct Promised {
    /// Created, and whether its delete was begun and acknowledged.
    sandboxes: BTreeMap<SandboxId, Fate>,
    /// Files whose write was acknowledged.
    files: Vec<(SandboxId, String)>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Created,
    DeleteBegun,
    Deleted,
}

/// Creates, runs, writes and deletes until the server is gone.
async fn load(client: Client, seed: u64, promised: Arc<Mutex<Promised>>) {
    for round in 0.. {
        let Ok(sandbox) = client.create_sandbox(&small()).await else { return };
        promised.lock().unwrap().sandboxes.insert(sandbox.id, Fate::Created);
        if client.exec(&sandbox.id, &command("echo $RANDOM > /root/x; sync")).await.is_err() {
            return;
        }
        let path = format!("/root/{seed}-{round}");
        let options = WriteOptions::default();
        if client.write_file(&sandbox.id, &path, "kept", &options).await.is_err() {
            return;
        }
        promised.lock().unwrap().files.push((sandbox.id, path));
        if (seed + round).is_multiple_of(3) {
            promised.lock().unwrap().sandboxes.insert(sandbox.id, Fate::DeleteBegun);
            let gone = client.delete_sandbox(&sandbox.id).await;
            if gone.is_err() {
                return;
            }
            promised.lock().unwrap().sandboxes.insert(sandbox.id, Fate::Deleted);
        } else if promised
            .lock()
            .unwrap()
            .sandboxes
            .values()
            .filter(|fate| **fate == Fate::Created)
            .count()
            > 2
        {
            return;
        }
    }
}

async fn kills_at_random_moments_lose_nothing_that_was_acknowledged(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(3).await;
    // Reproducible, and spread over the steps of a create, an exec, a write and a delete.
    let mut random: u64 = 0x9e37_79b9_7f4a_7c15;
    for round in 0..4 {
        let promised = Arc::new(Mutex::new(Promised::default()));
        let tasks: Vec<_> = (0..2)
            .map(|seed| tokio::spawn(load(server.client().clone(), seed, promised.clone())))
            .collect();
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        pause(Duration::from_millis(100 + (random >> 33) % 1900)).await;
        server.restart(if round % 2 == 0 { End::Killed } else { End::Asked }).await;
        for task in tasks {
            task.await.unwrap();
        }
        let promised = std::mem::take(&mut *promised.lock().unwrap());
        for (id, fate) in &promised.sandboxes {
            let status = server.get(&format!("/v1/sandboxes/{id}")).await.status;
            match fate {
                Fate::Created => assert_eq!(status, 200, "{id} was told to exist"),
                Fate::Deleted => assert_eq!(status, 404, "{id} was told to be gone"),
                Fate::DeleteBegun => {
                    until("a delete that was begun is done", Duration::from_secs(20), async || {
                        let answer = server.get(&format!("/v1/sandboxes/{id}")).await;
                        let is_kept = || answer.text().contains("\"running\"");
                        (answer.status == 404 || is_kept()).then_some(())
                    })
                    .await;
                }
            }
        }
        is_sound(&server).await;
        for (id, path) in &promised.files {
            if promised.sandboxes[id] == Fate::Created {
                let read =
                    server.client().read_file(id, path).await.unwrap().bytes().await.unwrap();
                assert_eq!(read, b"kept", "{path} was told to be written");
            }
        }
        server.delete_all().await;
    }
    host.end(server).await;
}
