//! Snapshots: memory and disk of one instant, whatever becomes of the sandbox, and sandboxes made from them.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use api::{
    CreateNetwork, CreateSandbox, CreateSnapshot, CreateVolume, Egress, SandboxStatus, Snapshot,
    SnapshotId, UpdateNetwork, VolumeMount,
};
use client::{ExecEvent, Method, SandboxFilter};
use rustix::fs::SeekFrom;
use tests::{Answer, End, Host, Sandbox, Server, command, from, pause, small, suite, until};
use tokio::process::Command;

suite! {
    every_generation_is_exact_and_needs_no_other,
    a_disk_is_clean_and_a_database_whole_under_heavy_writing,
    an_environment_is_in_no_snapshot,
    a_clone_has_what_its_own_create_asked_for,
    a_snapshot_leaves_what_rests_at_rest,
    a_command_goes_on_and_is_watched_while_a_snapshot_is_taken,
    snapshots_are_listed_until_they_are_deleted,
    a_delete_under_a_snapshot_or_a_restore_leaves_nothing;
    soak: ten_generations_are_exact, a_newer_qemu_goes_on_where_an_older_left_off
}

async fn snapshot_of(sandbox: &Sandbox) -> Snapshot {
    let request = CreateSnapshot::default();
    sandbox.client().create_snapshot(&sandbox.id, &request).await.unwrap()
}

fn file_of(server: &Server, snapshot: &SnapshotId, name: &str) -> PathBuf {
    server.data().join("snapshots").join(snapshot.to_string()).join(name)
}

/// Nothing is changed by looking.
async fn disk_is_clean(server: &Server, snapshot: &SnapshotId) {
    let mut check = Command::new("e2fsck");
    let check = check.arg("-fn").arg(file_of(server, snapshot, "rootfs")).output().await.unwrap();
    assert!(check.status.success(), "{check:?}");
}

async fn generations(host: Host, count: usize) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let mut sandbox = server.sandbox(&small()).await;
    let mut held = sandbox.hold().await;
    for number in 0..count {
        let snapshot = snapshot_of(&sandbox).await.id;
        disk_is_clean(&server, &snapshot).await;
        // The source goes on, and what it does now is not in the snapshot.
        sandbox.run("echo later > /root/held").await;
        assert_eq!(sandbox.held().await.memory, held.memory);
        sandbox.delete().await;
        sandbox = server.restored(&snapshot).await;
        assert_eq!(sandbox.held().await, held, "generation {number}");
        client.delete_snapshot(&snapshot).await.unwrap();
        sandbox.run("head -c 300000 /dev/urandom > /root/held").await;
        let memory = held.memory;
        held = sandbox.held().await;
        assert_eq!(held.memory, memory, "the snapshot it runs from was deleted");
    }
    // Between two that remain, one is deleted.
    let chain = [snapshot_of(&sandbox).await.id, snapshot_of(&sandbox).await.id];
    client.delete_snapshot(&chain[0]).await.unwrap();
    sandbox.delete().await;
    let last = server.restored(&chain[1]).await;
    assert_eq!(last.held().await, held);
    client.delete_snapshot(&chain[1]).await.unwrap();
}

/// Of another QEMU than the host's own: a directory with its `qemu-system-x86_64`.
const OTHER_QEMU: &str = "ATOLL_OTHER_QEMU";

fn releases_of_qemu(server: &Server) -> BTreeSet<String> {
    let log = server.log();
    let told = log.lines().filter_map(|line| line.split_once("qemu=\""));
    told.filter_map(|(_, rest)| Some(rest.split_once('"')?.0.to_owned())).collect()
}

/// Shown where another release is at hand, and nothing otherwise.
async fn a_newer_qemu_goes_on_where_an_older_left_off(host: Host) {
    let Ok(other) = std::env::var(OTHER_QEMU) else { return };
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    let running = server.sandbox(&small()).await;
    let hibernated = server.sandbox(&small()).await;
    let held = [running.hold().await, hibernated.hold().await];
    let snapshot = snapshot_of(&running).await.id;
    hibernated.client().hibernate(&hibernated.id).await.unwrap();

    let path = format!("{other}:{}", std::env::var("PATH").unwrap());
    server.options_mut().environment.push(("PATH", path));
    server.restart(End::Asked).await;
    assert_eq!(releases_of_qemu(&server).len(), 2, "{:?}", releases_of_qemu(&server));

    let (running, hibernated) = (running.on(&server), hibernated.on(&server));
    assert_eq!(running.held().await, held[0], "it runs on in the older");
    running.delete().await;
    assert_eq!(hibernated.held().await, held[1]);
    hibernated.delete().await;
    let clone = server.restored(&snapshot).await;
    assert_eq!(clone.held().await, held[0]);
    let snapshot_of_newer = snapshot_of(&clone).await.id;
    disk_is_clean(&server, &snapshot_of_newer).await;
    clone.delete().await;
    assert_eq!(server.restored(&snapshot_of_newer).await.held().await, held[0]);
    // From a bake of the older.
    assert_eq!(server.sandbox(&small()).await.run("echo new").await, "new\n");
    host.end(server).await;
}

async fn every_generation_is_exact_and_needs_no_other(host: Host) {
    generations(host, 2).await;
}

async fn ten_generations_are_exact(host: Host) {
    generations(host, 10).await;
}

/// Counts up in a database, and beside it says what the database has acknowledged.
const DATABASE: &str = "\
import os, sqlite3
db = sqlite3.connect('/root/db', isolation_level=None)
db.execute('pragma journal_mode=wal'); db.execute('pragma synchronous=full')
db.execute('create table t (n integer primary key, filling blob)')
n = 0
while True:
    n += 1
    db.execute('insert into t values (?, randomblob(2000))', (n,))
    with open('/root/said.new', 'w') as said: said.write(str(n))
    os.rename('/root/said.new', '/root/said')
";

async fn a_disk_is_clean_and_a_database_whole_under_heavy_writing(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let source = server.sandbox(&small()).await;
    source.write("/root/db.py", DATABASE).await;
    source
        .run(
            "sh -c 'while :; do head -c 3000000 /dev/urandom > /root/a; mkdir -p /root/d/$$; cp -r /etc /root/d; rm -r /root/d; done' >/dev/null 2>&1 &
             python3 /root/db.py >/root/errors 2>&1 & echo $! > /root/writer; until [ -e /root/said ]; do sleep 0.1; done",
        )
        .await;
    let mut snapshots = Vec::new();
    for _ in 0..2 {
        let snapshot = snapshot_of(&source).await.id;
        disk_is_clean(&server, &snapshot).await;
        snapshots.push(snapshot);
        // Into the midst of other work.
        pause(Duration::from_millis(300)).await;
    }
    source.delete().await;
    let clone = server.restored(&snapshots[1]).await;
    // Its writer has gone on; dead, it leaves a log to be recovered.
    let checked = clone
        .run(
            "cat /root/errors; kill -9 $(cat /root/writer); said=$(cat /root/said); python3 -c \"
import sqlite3
db = sqlite3.connect('/root/db')
count = db.execute('select count(*) from t').fetchone()[0]
print(db.execute('pragma integrity_check').fetchone()[0], count >= $said > 0)\"",
        )
        .await;
    assert_eq!(checked, "ok True\n");
    for snapshot in snapshots {
        server.client().delete_snapshot(&snapshot).await.unwrap();
    }
}

/// Only what the file holds: its holes are passed over.
fn holds(file: &Path, wanted: &str) -> bool {
    let file = File::open(file).unwrap();
    let length = file.metadata().unwrap().len();
    let mut window = vec![0; 4 << 20];
    let mut place = 0;
    while let Ok(data) = rustix::fs::seek(&file, SeekFrom::Data(place)) {
        let read = file.read_at(&mut window, data).unwrap();
        if memchr::memmem::find(&window[..read], wanted.as_bytes()).is_some() {
            return true;
        }
        if data + read as u64 >= length {
            return false;
        }
        // What lies across the edge is in the next.
        place = data + read as u64 - wanted.len() as u64;
    }
    false
}

async fn an_environment_is_in_no_snapshot(host: Host) {
    let secret = |name: &str| format!("{name}-{}", SnapshotId::random());
    let (unused, used) = (secret("unused"), secret("used"));
    let mark = secret("mark");
    let env = |name: &str, value: &str| Some(BTreeMap::from([(name.to_owned(), value.to_owned())]));
    let _room = host.room(2).await;
    let server = host.server().await;
    let source = server.sandbox(&CreateSandbox { env: env("UNUSED", &unused), ..small() }).await;
    source.write("/root/mark", mark.clone()).await;
    let first = snapshot_of(&source).await.id;
    let all =
        |snapshot| ["memory", "state", "rootfs"].map(|name| file_of(&server, &snapshot, name));
    assert!(holds(&all(first)[2], &mark), "what is on the disk is found");
    assert!(!all(first).iter().any(|file| holds(file, &unused)));
    assert_eq!(source.run("echo $UNUSED").await.trim(), unused, "commands have it");
    source.delete().await;

    let clone = server.sandbox(&CreateSandbox { env: env("USED", &used), ..from(&first) }).await;
    assert_eq!(clone.run("echo $UNUSED; echo $USED").await, format!("\n{used}\n"));
    // A process that still has it keeps it, and so would its snapshot's memory; never the disk.
    clone.run("sleep 1000 >/dev/null 2>&1 &").await;
    let second = snapshot_of(&clone).await.id;
    assert!(holds(&all(second)[0], &used));
    assert!(!holds(&all(second)[2], &used));
    for snapshot in [first, second] {
        server.client().delete_snapshot(&snapshot).await.unwrap();
    }
}

async fn a_clone_has_what_its_own_create_asked_for(host: Host) {
    let map = |name: &str, value: &str| Some(BTreeMap::from([(name.to_owned(), value.to_owned())]));
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let source = server
        .sandbox(&CreateSandbox {
            metadata: map("of", "the source"),
            env: map("OF", "the source"),
            ttl_seconds: Some(900),
            ..small()
        })
        .await;
    let snapshot = snapshot_of(&source).await;
    assert_eq!((snapshot.sandbox_id, snapshot.memory_mb), (source.id, source.created.memory_mb));
    let volume = CreateVolume {
        name: "its-own".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    client.create_volume(&volume).await.unwrap();
    let own = CreateSandbox {
        // All four are the snapshot's to say.
        template: Some("code-interpreter".to_owned()),
        cpu: Some(2),
        memory_mb: Some(2048),
        disk_mb: Some(4096),
        metadata: map("of", "the clone"),
        env: map("OWN", "the clone's"),
        ttl_seconds: Some(333),
        volumes: Some(vec![VolumeMount {
            name: "its-own".to_owned(),
            read_only: false,
            mount_path: None,
        }]),
        network: Some(CreateNetwork::Policy(UpdateNetwork {
            egress: Some(Egress::None),
            ..UpdateNetwork::default()
        })),
        from_snapshot: Some(snapshot.id.to_string()),
        ..CreateSandbox::default()
    };
    // What is not asked for is as strict as it was.
    let cut_off = UpdateNetwork { egress: Some(Egress::None), ..UpdateNetwork::default() };
    client.update_network(&source.id, &cut_off).await.unwrap();
    let of_cut_off = snapshot_of(&source).await.id;
    let open = UpdateNetwork { egress: Some(Egress::Internet), ..UpdateNetwork::default() };
    client.update_network(&source.id, &open).await.unwrap();
    for (asked, egress) in [(None, Egress::None), (Some(open), Egress::Internet)] {
        let request = CreateSandbox {
            network: asked.map(CreateNetwork::Policy),
            from_snapshot: Some(of_cut_off.to_string()),
            ..CreateSandbox::default()
        };
        let made = server.sandbox(&request).await;
        assert_eq!(client.network(&made.id).await.unwrap().policy.egress, egress);
    }
    client.delete_snapshot(&of_cut_off).await.unwrap();
    let clone = server.sandbox(&own).await;
    let (made, of) = (&clone.created, &source.created);
    assert_eq!(
        (&made.template, made.cpu, made.memory_mb, made.disk_mb),
        (&of.template, of.cpu, of.memory_mb, of.disk_mb)
    );
    assert_eq!((made.from_snapshot, made.ttl_seconds), (Some(snapshot.id), Some(333)));
    assert_eq!(Some(&made.metadata), own.metadata.as_ref());
    assert_eq!(made.volumes.len(), 1);
    assert_eq!(client.network(&clone.id).await.unwrap().policy.egress, Egress::None);
    assert_eq!(client.network(&source.id).await.unwrap().policy.egress, Egress::Internet);
    let said = clone.run("echo \"$OF$OWN\"; mountpoint -q /mnt/its-own && echo mounted").await;
    assert_eq!(said, "the clone's\nmounted\n");
    clone.delete().await;
    client.delete_volume(&volume.name).await.unwrap();
    client.delete_snapshot(&snapshot.id).await.unwrap();
}

async fn a_snapshot_leaves_what_rests_at_rest(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let source = server.sandbox(&small()).await;
    let held = source.hold().await;
    client.pause(&source.id).await.unwrap();
    let paused = snapshot_of(&source).await.id;
    let status = async || client.sandbox(&source.id).await.unwrap().status;
    assert_eq!(status().await, SandboxStatus::Paused);
    disk_is_clean(&server, &paused).await;
    let clone = server.restored(&paused).await;
    assert_eq!(clone.held().await, held);
    clone.clock_is_right().await;
    clone.delete().await;
    client.resume(&source.id).await.unwrap();
    source.clock_is_right().await;
    client.hibernate(&source.id).await.unwrap();
    let hibernated = snapshot_of(&source).await.id;
    assert_eq!(status().await, SandboxStatus::Hibernated);
    disk_is_clean(&server, &hibernated).await;
    let clone = server.restored(&hibernated).await;
    assert_eq!(clone.held().await, held);
    clone.delete().await;
    assert_eq!(source.held().await, held);
    for snapshot in [paused, hibernated] {
        client.delete_snapshot(&snapshot).await.unwrap();
    }
}

async fn a_command_goes_on_and_is_watched_while_a_snapshot_is_taken(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let source = server.sandbox(&small()).await;
    let counting =
        command("for i in $(seq 1 30); do echo $i; sleep 0.1; done; echo end > /root/end");
    let mut events = source.client().exec_stream(&source.id, &counting).await.unwrap();
    let mut said = String::new();
    let mut taken = None;
    loop {
        match events.next().await.unwrap().unwrap() {
            ExecEvent::Stdout(chunk) => said.push_str(&chunk),
            ExecEvent::Exited { exit_code } => break assert_eq!(exit_code, 0),
            other @ (ExecEvent::Stderr(_) | ExecEvent::Failed { .. }) => panic!("{other:?}"),
        }
        if taken.is_none() && said.contains("5\n") {
            taken = Some(snapshot_of(&source).await.id);
        }
    }
    let all: String = (1..=30).map(|number| format!("{number}\n")).collect();
    assert_eq!(said, all);
    // In a clone it goes on as well, though nobody watches it there.
    let snapshot = taken.unwrap();
    let clone = server.restored(&snapshot).await;
    until("the command ends", Duration::from_secs(30), async || {
        (clone.exec(command("cat /root/end")).await.stdout == "end\n").then_some(())
    })
    .await;
    server.client().delete_snapshot(&snapshot).await.unwrap();
}

async fn snapshots_are_listed_until_they_are_deleted(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let sandbox = server.sandbox(&small()).await;
    let named = CreateSnapshot { name: Some("after é set-up".to_owned()) };
    let first = client.create_snapshot(&sandbox.id, &named).await.unwrap();
    sandbox.run("head -c 20000000 /dev/urandom > /root/twenty").await;
    let second = snapshot_of(&sandbox).await;
    assert_eq!((first.name.as_str(), second.name.as_str()), ("after é set-up", ""));
    let (megabytes, before) = (20_000_000, client.snapshot(&first.id).await.unwrap());
    assert!(second.size_bytes > megabytes && second.size_bytes < 10 * megabytes, "{second:?}");
    assert!(before.size_bytes > 0 && before.size_bytes < megabytes, "{before:?}");
    assert!(second.total_bytes > second.size_bytes + before.size_bytes, "{second:?}");
    let listed = async || {
        let listed = client.snapshots(Some(&sandbox.id)).await.unwrap();
        listed.into_iter().map(|snapshot| snapshot.id).collect::<Vec<_>>()
    };
    assert_eq!(listed().await, [second.id, first.id]);
    let all = client.snapshots(None).await.unwrap();
    assert!(all.iter().any(|snapshot| snapshot.id == first.id));
    client.delete_snapshot(&first.id).await.unwrap();
    assert_eq!(listed().await, [second.id]);
    assert!(!file_of(&server, &first.id, "").exists());
    let gone = client.snapshot(&first.id).await.unwrap_err();
    assert_eq!(gone.status(), Some(404));
    assert_eq!(client.delete_snapshot(&first.id).await.unwrap_err().status(), Some(404));
    for id in [first.id.to_string(), SnapshotId::random().to_string(), "../x".to_owned()] {
        let request = CreateSandbox { from_snapshot: Some(id), ..small() };
        assert_eq!(client.create_sandbox(&request).await.unwrap_err().status(), Some(404));
    }
    let long = serde_json::json!({"name": "x".repeat(300)});
    let refused = Answer::to(sandbox.request(Method::POST, "/snapshots").json(&long)).await;
    assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()));
    let bad = server.get("/v1/snapshots?sandbox_id=x").await;
    assert_eq!(bad.refusal(), (400, "invalid_request".to_owned()));
    let id = sandbox.id;
    sandbox.delete().await;
    let late = client.create_snapshot(&id, &CreateSnapshot::default()).await.unwrap_err();
    assert_eq!(late.status(), Some(404));
    // It outlives its sandbox.
    assert_eq!(listed_of(&server, &id).await, [second.id]);
    client.delete_snapshot(&second.id).await.unwrap();
}

async fn listed_of(server: &Server, sandbox: &api::SandboxId) -> Vec<SnapshotId> {
    let listed = server.client().snapshots(Some(sandbox)).await.unwrap();
    listed.into_iter().map(|snapshot| snapshot.id).collect()
}

async fn a_delete_under_a_snapshot_or_a_restore_leaves_nothing(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let doomed = server.sandbox(&small()).await;
    let request = CreateSnapshot::default();
    let (taken, deleted) = tokio::join!(client.create_snapshot(&doomed.id, &request), async {
        pause(Duration::from_millis(20)).await;
        client.delete_sandbox(&doomed.id).await
    });
    deleted.unwrap();
    assert_eq!(client.sandbox(&doomed.id).await.unwrap_err().status(), Some(404));
    // Either is right; if there is one, it is whole.
    let snapshot = match taken {
        Ok(snapshot) => snapshot.id,
        Err(error) => {
            assert_eq!(error.status(), Some(404), "{error:?}");
            assert_eq!(listed_of(&server, &doomed.id).await, []);
            snapshot_of(&server.sandbox(&small()).await).await.id
        }
    };
    disk_is_clean(&server, &snapshot).await;
    let mark = BTreeMap::from([("doomed".to_owned(), "yes".to_owned())]);
    let request = CreateSandbox { metadata: Some(mark), ..from(&snapshot) };
    let filter = SandboxFilter {
        metadata: vec![("doomed".to_owned(), "yes".to_owned())],
        ..SandboxFilter::default()
    };
    let (restored, ()) = tokio::join!(client.create_sandbox(&request), async {
        let id = until("it is on its way", Duration::from_secs(20), async || {
            client.sandboxes(&filter).await.unwrap().first().map(|sandbox| sandbox.id)
        });
        client.delete_sandbox(&id.await).await.unwrap();
    });
    assert!(restored.is_ok() || restored.as_ref().unwrap_err().status() == Some(409));
    assert!(client.sandboxes(&filter).await.unwrap().is_empty());
    // A snapshot goes while a sandbox is made of it: that is made whole, or not at all.
    let request = from(&snapshot);
    let (restored, deleted) = tokio::join!(client.create_sandbox(&request), async {
        pause(Duration::from_millis(20)).await;
        client.delete_snapshot(&snapshot).await
    });
    deleted.unwrap();
    match restored {
        Ok(restored) => {
            let said = client.exec(&restored.id, &command("echo works")).await.unwrap();
            assert_eq!(said.stdout, "works\n");
            client.delete_sandbox(&restored.id).await.unwrap();
        }
        Err(error) => assert_eq!(error.status(), Some(404), "{error:?}"),
    }
}
