//! Volumes of sandboxes that are saved, paused and hibernated.

use std::{path::Path, time::Duration};

use api::{CreateSandbox, CreateSnapshot, ErrorCode, Fork, SandboxStatus, Snapshot, UpdateVolume};
use tests::{Host, Sandbox, Server, command, until};
use tokio::process::Command;

use super::{holder, is_clean, name, read, refused, swallowing, volume, with, written};

async fn snapshot(sandbox: &Sandbox) -> Result<Snapshot, client::Error> {
    sandbox.client().create_snapshot(&sandbox.id, &CreateSnapshot::default()).await
}

fn from(snapshot: &Snapshot, request: CreateSandbox) -> CreateSandbox {
    CreateSandbox { from_snapshot: Some(snapshot.id.to_string()), ..request }
}

async fn is_in(text: &str, file: &Path) -> bool {
    let search = Command::new("grep").env("LC_ALL", "C").args(["-qF", text]).arg(file).status();
    let status = tokio::time::timeout(Duration::from_secs(120), search).await.unwrap().unwrap();
    assert!(matches!(status.code(), Some(0 | 1)), "{status}");
    status.success()
}

pub(super) async fn a_snapshot_holds_nothing_of_a_volume_and_restores_without_it(host: Host) {
    let (server, room) = (host.server().await, host.room(2).await);
    let source = volume(&server, "source").await;
    let writer = host.sandbox_within(&room, &with([written("source")])).await;
    // Nobody outside this guest has seen it.
    let secret = writer.run("cat /proc/sys/kernel/random/uuid | tee /mnt/source/secret; cp /mnt/source/secret /mnt/source/old").await;
    writer.delete().await;
    let sandbox = host.sandbox_within(&room, &with([written("source")])).await;
    // Into the guest's memory, and not into that of a process.
    sandbox.run("python3 -c \"import os; os.sendfile(os.open('/dev/null', 1), os.open('/mnt/source/secret', 0), None or 0, 4096)\"; echo on the root > /root/file").await;
    let saved = snapshot(&sandbox).await.unwrap();
    sandbox.run("mountpoint /mnt/source && echo after > /mnt/source/old").await;
    for file in ["memory", "rootfs", "state"] {
        let path = server.data().join("snapshots").join(saved.id.to_string()).join(file);
        assert!(!is_in(secret.trim(), &path).await, "the volume's bytes are in {file}");
    }

    assert_eq!(
        refused(&server, &from(&saved, with([written("source")]))).await,
        ErrorCode::Conflict
    );
    let alone = host.sandbox_within(&room, &from(&saved, with([]))).await;
    let shown = alone
        .run("cat /root/file; mountpoint -q /mnt/source || echo not mounted; ls -A /mnt/source")
        .await;
    assert_eq!(shown, "on the root\nnot mounted\n");
    assert_eq!(swallowing(&alone, "vdb vdc vdj").await, "");
    alone.delete().await;
    let fork = sandbox.client().fork(&sandbox.id, &Fork::default()).await.unwrap().sandbox;
    assert!(fork.volumes.is_empty());
    let client = server.client();
    let shown =
        client.exec(&fork.id, &command("mountpoint -q /mnt/source || echo not mounted")).await;
    assert_eq!(shown.unwrap().stdout, "not mounted\n");
    client.delete_sandbox(&fork.id).await.unwrap();
    sandbox.delete().await;

    // What another wrote meanwhile is what is seen, in whatever slot it is now.
    let other = host.sandbox_within(&room, &with([written("source")])).await;
    other.run("echo changed > /mnt/source/old").await;
    other.delete().await;
    is_clean(&server, &source).await;
    for mount in [written("source"), read("source")] {
        let restored = host.sandbox_within(&room, &from(&saved, with([mount]))).await;
        assert_eq!(restored.run("cat /mnt/source/old").await, "changed\n");
        restored.delete().await;
    }
    is_clean(&server, &source).await;
    client.delete_volume(&name("source")).await.unwrap();
    assert_eq!(
        refused(&server, &from(&saved, with([written("source")]))).await,
        ErrorCode::NotFound
    );
    let without = host.sandbox_within(&room, &from(&saved, with([]))).await;
    assert_eq!(swallowing(&without, "vdb vdc vdj").await, "");
    without.delete().await;
    client.delete_snapshot(&saved.id).await.unwrap();
}

pub(super) async fn a_process_that_holds_a_volume_is_named_and_all_goes_on(host: Host) {
    let server = host.server().await;
    let (busy, calm) = (volume(&server, "busy").await, volume(&server, "calm").await);
    let sandbox = host.sandbox_of(&with([written("calm"), written("busy")])).await;
    let pid = sandbox.run("exec 3>/mnt/busy/file; sleep 1000 >/dev/null 2>&1 & echo $!").await;
    for _ in 0..2 {
        let refusal = snapshot(&sandbox).await.unwrap_err();
        let refusal = refusal.refusal().unwrap();
        assert_eq!(refusal.status, 409, "{refusal:?}");
        for part in ["/mnt/busy", "sleep", pid.trim()] {
            assert!(refusal.message.contains(part), "{part} in {refusal:?}");
        }
        let goes_on = "mountpoint -q /mnt/calm && mountpoint -q /mnt/busy && echo x >> /mnt/busy/file && echo x > /mnt/calm/file";
        sandbox.run(goes_on).await;
    }
    assert!(server.client().snapshots(Some(&sandbox.id)).await.unwrap().is_empty());
    sandbox.run(&format!("kill {pid}")).await;
    let saved = snapshot(&sandbox).await.unwrap();
    sandbox.run("mountpoint -q /mnt/calm && mountpoint -q /mnt/busy && cat /mnt/busy/file").await;
    sandbox.delete().await;
    for volume in [&busy, &calm] {
        is_clean(&server, volume).await;
    }
    server.client().delete_snapshot(&saved.id).await.unwrap();
}

async fn status(server: &Server, sandbox: &Sandbox) -> SandboxStatus {
    server.client().sandbox(&sandbox.id).await.unwrap().status
}

/// Counts into a file that it keeps open.
const COUNTING: &str = "python3 -c \"import time, itertools\nfile = open('/mnt/w/count', 'w')\n\
    for n in itertools.count():\n file.write('%d\\n' % n); file.flush(); time.sleep(0.1)\" >/dev/null 2>&1 &";

async fn counts(sandbox: &Sandbox, path: &str) {
    let count = format!("until test -s {path}; do sleep 0.05; done; wc -l < {path}");
    let before = sandbox.run(&count).await;
    until("it counts on", Duration::from_secs(20), async || {
        (sandbox.run(&count).await != before).then_some(())
    })
    .await;
    // Line by line, so nothing is lost or twice.
    sandbox.run(&format!("awk '$1 != NR - 1 {{ exit 1 }}' {path}")).await;
}

pub(super) async fn volumes_stay_as_they_were_through_a_hibernation(host: Host) {
    let (server, room) = (host.server().await, host.room(2).await);
    let (w, r) = (volume(&server, "hw").await, volume(&server, "hr").await);
    let sandbox = host.sandbox_within(&room, &with([written("hw"), read("hr")])).await;
    let counting = COUNTING.replace("/mnt/w/", "/mnt/hw/");
    sandbox.run(&format!("echo kept > /mnt/hw/kept; {counting}")).await;
    // One that its user has moved stays where he put it.
    sandbox.run("umount /mnt/hr && mkdir /srv/moved && mount -o ro $(ls /dev/vd[c-z] | while read disk; do blockdev --getsize64 $disk >/dev/null 2>&1 && echo $disk; done | tail -1) /srv/moved").await;
    let mounts = sandbox.run("grep -E '/mnt/h|/srv/moved' /proc/mounts").await;
    assert_eq!(mounts.lines().count(), 2, "{mounts}");
    for round in 0..2 {
        server.client().hibernate(&sandbox.id).await.unwrap();
        assert_eq!(status(&server, &sandbox).await, SandboxStatus::Hibernated);
        assert_eq!(holder(&server, "hw").await, Some(sandbox.id));
        assert_eq!(refused(&server, &with([written("hw")])).await, ErrorCode::Conflict);
        if round == 0 {
            is_clean(&server, &w).await;
        } else {
            // Growing needs its guest, and wakes it.
            let update = UpdateVolume { size_mb: Some(160), size_gb: None };
            server.client().update_volume(&name("hw"), &update).await.unwrap();
            let size = sandbox.run("df -m --output=size /mnt/hw | tail -1").await;
            assert!(size.trim().parse::<u64>().unwrap() > 128, "{size}");
        }
        assert_eq!(sandbox.run("cat /mnt/hw/kept").await, "kept\n");
        assert_eq!(sandbox.run("grep -E '/mnt/h|/srv/moved' /proc/mounts").await, mounts);
        counts(&sandbox, "/mnt/hw/count").await;
    }
    // What is saved of it has no volume in it, however it rests.
    sandbox.run("pkill python3; until ! pgrep python3; do sleep 0.05; done").await;
    server.client().hibernate(&sandbox.id).await.unwrap();
    let saved = snapshot(&sandbox).await.unwrap();
    assert_eq!(status(&server, &sandbox).await, SandboxStatus::Hibernated);
    assert_eq!(sandbox.run("grep -cE '/mnt/h|/srv/moved' /proc/mounts").await, "2\n");
    let restored = host.sandbox_within(&room, &from(&saved, with([]))).await;
    assert_eq!(restored.exec(command("grep -E '/mnt/h|/srv/moved' /proc/mounts")).await.stdout, "");
    restored.delete().await;
    // Deleted while it hibernates.
    server.client().hibernate(&sandbox.id).await.unwrap();
    sandbox.delete().await;
    for (volume, called) in [(&w, "hw"), (&r, "hr")] {
        assert_eq!(holder(&server, called).await, None);
        is_clean(&server, volume).await;
    }
    server.client().delete_snapshot(&saved.id).await.unwrap();
}

pub(super) async fn volumes_stay_as_they_were_through_a_pause(host: Host) {
    let server = host.server().await;
    let p = volume(&server, "p").await;
    let sandbox = host.sandbox_of(&with([written("p")])).await;
    sandbox.run("echo kept > /mnt/p/kept").await;
    let client = server.client();
    client.pause(&sandbox.id).await.unwrap();
    assert_eq!(refused(&server, &with([written("p")])).await, ErrorCode::Conflict);
    is_clean(&server, &p).await;
    let grow = async |size_mb| {
        let update = UpdateVolume { size_mb: Some(size_mb), size_gb: None };
        let grown = client.update_volume(&name("p"), &update).await.unwrap();
        assert_eq!((grown.size_mb, grown.attached_to), (size_mb, Some(sandbox.id)));
        assert_eq!(status(&server, &sandbox).await, SandboxStatus::Paused);
    };
    let size = async || {
        let shown = sandbox.run("df -m --output=size /mnt/p | tail -1").await;
        shown.trim().parse::<u64>().unwrap()
    };
    grow(200).await;
    let saved = snapshot(&sandbox).await.unwrap();
    assert_eq!(status(&server, &sandbox).await, SandboxStatus::Paused);
    // Unmounted for the snapshot, and back after a hibernation all the same.
    client.hibernate(&sandbox.id).await.unwrap();
    assert_eq!(sandbox.run("cat /mnt/p/kept").await, "kept\n");
    assert!((160..=200).contains(&size().await), "{}", size().await);
    client.pause(&sandbox.id).await.unwrap();
    grow(300).await;
    client.resume(&sandbox.id).await.unwrap();
    assert!((240..=300).contains(&size().await), "{}", size().await);
    let counting = COUNTING.replace("/mnt/w/", "/mnt/p/");
    sandbox.run(&counting).await;
    counts(&sandbox, "/mnt/p/count").await;
    client.pause(&sandbox.id).await.unwrap();
    let refusal = snapshot(&sandbox).await.unwrap_err();
    assert_eq!(refusal.status(), Some(409), "{refusal:?}");
    assert_eq!(status(&server, &sandbox).await, SandboxStatus::Paused);
    client.resume(&sandbox.id).await.unwrap();
    counts(&sandbox, "/mnt/p/count").await;
    // Deleted while it is paused.
    client.pause(&sandbox.id).await.unwrap();
    sandbox.delete().await;
    assert_eq!(holder(&server, "p").await, None);
    is_clean(&server, &p).await;
    let restored = host.sandbox_of(&from(&saved, with([written("p")]))).await;
    assert_eq!(restored.run("cat /mnt/p/kept").await, "kept\n");
    restored.delete().await;
    client.delete_snapshot(&saved.id).await.unwrap();
}
