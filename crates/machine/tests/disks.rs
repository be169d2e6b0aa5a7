//! Machines on real QEMU: with volumes in their slots.
#![expect(clippy::print_stdout, reason = "what a guest said is shown where a test fails")]

mod harness;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use harness::{
    Bake, DEADLINE, Running, assert_clean, make_volume, place, read_write, run, snapshot, volume,
};
use machine::guest::{Guest, Mount, Reply, Request};
use machine::hypervisor::{Hypervisor, Load, Place};
use machine::spec::WRITABLE_SLOTS;
use machine::{Error, VolumeDisk};

const FIRST: u8 = 0;
const FIRST_READ_ONLY: u8 = WRITABLE_SLOTS as u8;

/// What the guest runs ends with this status.
async fn ends(guest: &Guest, script: &str) -> Option<i32> {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
    let (output, status) = run(guest, &id, script).await;
    println!("{script}: {output}");
    status.exit_code
}

async fn volume_for(name: &str) -> PathBuf {
    let path = Bake::shared().await.directory.join(name);
    make_volume(&path, 64);
    path
}

fn device(slot: u8) -> char {
    char::from(b'b' + slot)
}

/// Mounts what is in a slot at `/mnt`.
async fn mount(guest: &Guest, slot: u8) {
    let read_only = slot >= FIRST_READ_ONLY;
    let volumes = vec![Mount { slot, path: b"/mnt".to_vec().into(), read_only }];
    let mounted = guest.call(Request::VolumesMount { volumes }, DEADLINE).await;
    assert_eq!(mounted.expect("the volume is mounted"), Reply::Done);
}

async fn unmount(guest: &Guest, slot: u8) {
    let unmounted = guest.call(Request::VolumesUnmount { slots: vec![slot] }, DEADLINE).await;
    assert_eq!(unmounted.expect("the volume is unmounted"), Reply::Done);
}

#[tokio::test]
async fn a_volume_keeps_what_one_machine_has_written_for_the_next() {
    let bake = Bake::shared().await;
    let path = volume_for("kept").await;
    let (machine, guest) = bake.start_with("writer", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "echo kept > /mnt/note").await, Some(0));
    unmount(&guest, FIRST).await;
    machine.into_inner().kill().await.unwrap();
    assert_clean(&path);

    let (_machine, guest) =
        bake.start_with("reader", vec![(FIRST_READ_ONLY, volume(&path, true))]).await;
    mount(&guest, FIRST_READ_ONLY).await;
    assert_eq!(ends(&guest, "test $(cat /mnt/note) = kept && ! touch /mnt/other").await, Some(0));
}

#[tokio::test]
async fn all_slots_take_a_volume_at_once() {
    let bake = Bake::shared().await;
    let mut volumes = Vec::new();
    for slot in 0..16 {
        let path = bake.directory.join(format!("all{slot}"));
        make_volume(&path, 8);
        std::process::Command::new("tune2fs")
            .args(["-L", &format!("slot{slot}")])
            .arg(&path)
            .output()
            .unwrap();
        volumes.push((slot, volume(&path, slot >= FIRST_READ_ONLY)));
    }
    let (_machine, guest) = bake.start_with("all", volumes).await;
    let mounts = (0..16).map(|slot| Mount {
        slot,
        path: format!("/mnt/slot{slot}").into_bytes().into(),
        read_only: slot >= FIRST_READ_ONLY,
    });
    let mounting = Request::VolumesMount { volumes: mounts.collect() };
    assert_eq!(guest.call(mounting, DEADLINE).await.unwrap(), Reply::Done);
    let script = "for n in $(seq 0 15); do test $(e2label $(findmnt -no SOURCE /mnt/slot$n)) = slot$n || exit 1; done";
    assert_eq!(ends(&guest, script).await, Some(0));
}

#[tokio::test]
async fn what_a_guest_has_flushed_is_flushed_on_the_host() {
    let bake = Bake::shared().await;
    let path = volume_for("flushed").await;
    let (machine, guest) = bake.start_with("flusher", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    let flushes = async || {
        let volumes = machine.statistics().await.unwrap().volumes;
        volumes.iter().find(|(slot, _)| *slot == FIRST).unwrap().1.flushes
    };
    let before = flushes().await;
    assert_eq!(
        ends(&guest, "echo 'must not be lost' > /mnt/note && sync /mnt/note").await,
        Some(0)
    );
    assert!(flushes().await > before);
    // No unmounting, no more flushing.
    machine.into_inner().kill().await.unwrap();
    let recovered = std::process::Command::new("e2fsck").arg("-p").arg(&path).output().unwrap();
    assert!(recovered.status.code().is_some_and(|code| code <= 1), "{recovered:?}");
    assert_clean(&path);
    let read = std::process::Command::new("debugfs")
        .args(["-R", "cat /note"])
        .arg(&path)
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&read.stdout), "must not be lost\n");
}

#[tokio::test]
async fn a_volume_in_use_is_refused_at_a_load_and_its_holder_unharmed() {
    let bake = Bake::shared().await;
    let path = volume_for("held").await;
    let (holder, guest) = bake.start_with("holder", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    for (name, slot) in [("second-writer", FIRST + 1), ("second-reader", FIRST_READ_ONLY)] {
        let directory = bake.clone_disk(name);
        let prepared = bake.prepare(place(directory.clone())).await;
        let (pid, begun) = (prepared.pid(), Instant::now());
        let load = bake.loading(read_write(&directory.join("rootfs")), bake.disk_bytes());
        let volumes = vec![(slot, volume(&path, slot >= FIRST_READ_ONLY))];
        let error = prepared.load(Load { volumes, ..load }).await.unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error:?}");
        assert!(begun.elapsed() < Duration::from_secs(10));
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }
    assert_eq!(ends(&guest, "echo written > /mnt/note && sync").await, Some(0));
    unmount(&guest, FIRST).await;
    holder.into_inner().kill().await.unwrap();
    assert_clean(&path);
}

#[tokio::test]
async fn a_volume_in_use_is_refused_at_an_attach_and_both_machines_unharmed() {
    let bake = Bake::shared().await;
    let (path, free) = (volume_for("taken").await, volume_for("free").await);
    let (holder, first) = bake.start_with("taker", vec![(FIRST, volume(&path, false))]).await;
    mount(&first, FIRST).await;
    let (second, guest) = bake.start("late").await;
    for slot in [FIRST, FIRST_READ_ONLY] {
        let taken = volume(&path, slot >= FIRST_READ_ONLY);
        let error = second.attach_volume(slot, taken).await.unwrap_err();
        assert!(matches!(error, Error::Locked { .. }), "{error:?}");
        let script =
            format!("dd if=/dev/zero of=/dev/vd{} bs=4096 count=1 conv=fsync", device(slot));
        assert_ne!(ends(&guest, &script).await, Some(0));
    }
    // The slot takes another, and this one once it is free.
    second.attach_volume(FIRST, volume(&free, false)).await.unwrap();
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "touch /mnt/free").await, Some(0));
    unmount(&guest, FIRST).await;
    second.detach_volume(FIRST).await.unwrap();
    assert_eq!(ends(&first, "touch /mnt/taken").await, Some(0));
    unmount(&first, FIRST).await;
    holder.detach_volume(FIRST).await.unwrap();
    second.attach_volume(FIRST, volume(&path, false)).await.unwrap();
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "test -e /mnt/taken").await, Some(0));
    unmount(&guest, FIRST).await;
    assert_clean(&free);
}

#[tokio::test]
async fn a_volume_of_a_killed_machine_is_free_at_once() {
    let bake = Bake::shared().await;
    let path = volume_for("left").await;
    let (holder, _) = bake.start_with("killed", vec![(FIRST, volume(&path, false))]).await;
    holder.into_inner().kill().await.unwrap();
    let (_next, guest) = bake.start_with("next", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
}

#[tokio::test]
async fn many_machines_read_one_volume() {
    let bake = Bake::shared().await;
    let path = volume_for("shared").await;
    let (_one, guest) = bake.start_with("one", vec![(FIRST_READ_ONLY, volume(&path, true))]).await;
    let (other, _) = bake.start("other").await;
    other.attach_volume(FIRST_READ_ONLY + 1, volume(&path, true)).await.unwrap();
    let refused = other.attach_volume(FIRST, volume(&path, false)).await;
    assert!(matches!(refused, Err(Error::Locked { .. })), "{refused:?}");
    mount(&guest, FIRST_READ_ONLY).await;
}

#[tokio::test]
async fn a_detached_slot_swallows_nothing_and_takes_the_next_volume() {
    let bake = Bake::shared().await;
    let (one, other) = (volume_for("one-volume").await, volume_for("other-volume").await);
    let (machine, guest) = bake.start("detached").await;
    for path in [&one, &other] {
        machine.attach_volume(FIRST, volume(path, false)).await.unwrap();
        mount(&guest, FIRST).await;
        assert_eq!(ends(&guest, "touch /mnt/$$").await, Some(0));
        unmount(&guest, FIRST).await;
        machine.detach_volume(FIRST).await.unwrap();
        let script =
            format!("dd if=/dev/zero of=/dev/vd{} bs=4096 count=1 conv=fsync", device(FIRST));
        assert_ne!(ends(&guest, &script).await, Some(0));
        assert_clean(path);
    }
    assert!(matches!(machine.detach_volume(FIRST).await, Err(Error::QmpRefused { .. })));
    machine.attach_volume(FIRST, volume(&one, false)).await.unwrap();
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "test $(ls /mnt | grep -c '^[0-9]') = 1").await, Some(0));
}

#[tokio::test]
async fn a_volume_grows_while_it_is_in_use_and_never_shrinks() {
    let bake = Bake::shared().await;
    let path = volume_for("grows").await;
    let (machine, guest) = bake.start_with("grower", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    let larger = 128 << 20;
    read_write(&path).set_len(larger).unwrap();
    machine.resize_volume(FIRST, larger).await.unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), larger);
    let grown = guest.call(Request::VolumeGrow { slot: FIRST }, DEADLINE).await;
    assert_eq!(grown.unwrap(), Reply::Done);
    assert_eq!(
        ends(&guest, "head -c 90000000 /dev/zero > /mnt/large && rm /mnt/large").await,
        Some(0)
    );
    let refused = machine.resize_volume(FIRST, larger / 2).await;
    assert!(matches!(refused, Err(Error::Unfit(_))));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), larger);
    let refused = machine.resize_volume(FIRST + 1, larger).await;
    assert!(matches!(refused, Err(Error::Unfit(_))));
}

#[tokio::test]
async fn what_does_not_fit_a_slot_is_refused_and_a_volume_in_it_stays() {
    let bake = Bake::shared().await;
    let (path, other) = (volume_for("fits").await, volume_for("fits-not").await);
    let (machine, guest) = bake.start_with("fitting", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    let unfit = [
        (FIRST + 1, volume(&other, true)),
        (FIRST_READ_ONLY, volume(&other, false)),
        (16, volume(&other, false)),
        (FIRST + 1, VolumeDisk { bytes: 32 << 20, ..volume(&other, false) }),
    ];
    for (slot, disk) in unfit {
        let refused = machine.attach_volume(slot, disk).await;
        assert!(matches!(refused, Err(Error::Unfit(_))), "{refused:?}");
    }
    let refused = machine.attach_volume(FIRST, volume(&other, false)).await;
    assert!(matches!(refused, Err(Error::QmpRefused { .. })), "{refused:?}");
    assert_eq!(ends(&guest, "echo here > /mnt/note").await, Some(0));
    unmount(&guest, FIRST).await;
    machine.into_inner().kill().await.unwrap();
    assert_clean(&path);
    assert_eq!(std::fs::metadata(&other).unwrap().len(), 64 << 20);
}

#[tokio::test]
async fn a_machine_that_a_later_server_found_gives_its_volumes_back_and_takes_others() {
    let bake = Bake::shared().await;
    let (path, other) = (volume_for("found-volume").await, volume_for("new-volume").await);
    let directory = bake.clone_disk("found");
    let home = place(directory.clone());
    let known = Place { directory: directory.clone(), uid: home.uid, tap: None };
    let load = bake.loading(read_write(&directory.join("rootfs")), bake.disk_bytes());
    let load = Load { volumes: vec![(FIRST, volume(&path, false))], ..load };
    let machine = Running::from(bake.prepare(home).await.load(load).await.unwrap());
    machine.resume().await.unwrap();
    drop(machine.into_inner());
    let machine = Running::from(Hypervisor::adopt(&known).await.unwrap());
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    machine.detach_volume(FIRST).await.unwrap();
    machine.attach_volume(FIRST, volume(&other, false)).await.unwrap();
    mount(&guest, FIRST).await;
    // The other one is free.
    let (second, _) = bake.start("found-second").await;
    second.attach_volume(FIRST, volume(&path, false)).await.unwrap();
}

#[tokio::test]
async fn a_snapshot_holds_nothing_of_a_volume_and_is_restored_with_another() {
    let bake = Bake::shared().await;
    let (path, other) = (volume_for("of-source").await, volume_for("of-clone").await);
    let (machine, guest) =
        bake.start_with("with-volume", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "echo source > /mnt/note").await, Some(0));
    unmount(&guest, FIRST).await;
    machine.detach_volume(FIRST).await.unwrap();
    let (taken, _) =
        snapshot(bake, &machine, &guest, bake.directory.join("with-volume-taken")).await;
    machine.attach_volume(FIRST, volume(&path, false)).await.unwrap();
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "test $(cat /mnt/note) = source").await, Some(0));

    let (clone, guest) = taken.start_with("its-clone", vec![(FIRST, volume(&other, false))]).await;
    mount(&guest, FIRST).await;
    assert_eq!(ends(&guest, "! test -e /mnt/note; touch /mnt/clone").await, Some(0));
    unmount(&guest, FIRST).await;
    clone.into_inner().kill().await.unwrap();
    assert_clean(&other);
}

#[tokio::test]
async fn what_a_guest_uses_of_its_disks_is_counted() {
    let bake = Bake::shared().await;
    let path = volume_for("counted").await;
    let (machine, guest) = bake.start_with("counting", vec![(FIRST, volume(&path, false))]).await;
    mount(&guest, FIRST).await;
    let before = machine.statistics().await.unwrap();
    assert_eq!(before.volumes.len(), 1, "{before:?}");
    let script = "head -c 3000000 /dev/zero | tee /mnt/zeroes > /root/zeroes; sync";
    assert_eq!(ends(&guest, script).await, Some(0));
    let after = machine.statistics().await.unwrap();
    assert!(
        after.root_disk.written_bytes >= before.root_disk.written_bytes + 3_000_000,
        "{after:?}"
    );
    assert!(after.volumes[0].1.written_bytes >= before.volumes[0].1.written_bytes + 3_000_000);
    assert!(after.vcpu_time > before.vcpu_time && after.vcpu_time < Duration::from_secs(60));
}

#[tokio::test]
async fn a_durable_root_disk_is_flushed_when_its_guest_flushes() {
    let bake = Bake::shared().await;
    let directory = bake.clone_disk("durable");
    let mut load = bake.loading(read_write(&directory.join("rootfs")), bake.disk_bytes());
    load.root_disk.durability = machine::Durability::Durable;
    let prepared = bake.prepare(place(directory)).await;
    let machine = Running::from(prepared.load(load).await.unwrap());
    machine.resume().await.unwrap();
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    assert_eq!(ends(&guest, "echo flushed > /root/note && sync /root/note").await, Some(0));
    assert!(machine.statistics().await.unwrap().root_disk.flushes > 0);
}
