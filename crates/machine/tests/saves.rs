//! Machines on real QEMU: saved while they run on from a saved one.
#![expect(clippy::unwrap_used, reason = "nobody handles the failures of a test")]

mod harness;

use std::fs::File;
use std::os::unix::fs::FileExt;

use harness::{
    Bake, DEADLINE, Running, assert_clean, clone_file, place, read_write, run, snapshot,
};
use machine::guest::{Guest, Request};
use machine::hypervisor::{Hypervisor, Place};
use machine::{Error, Machine, Save, WriteBack};

const PAGE: usize = 4096;

/// The guest's memory as the process has it, which must stand still.
fn memory_of(machine: &Machine) -> Vec<u8> {
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", machine.pid())).unwrap();
    let line = maps.lines().find(|line| line.contains("/memory")).unwrap();
    let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
    let [start, end] = [start, end].map(|number| u64::from_str_radix(number, 16).unwrap());
    let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
    assert_eq!(bytes.len() as u64, harness::SPEC.shape.memory_bytes());
    File::open(format!("/proc/{}/mem", machine.pid()))
        .unwrap()
        .read_exact_at(&mut bytes, start)
        .unwrap();
    bytes
}

#[track_caller]
fn assert_equal(one: &[u8], other: &[u8]) {
    assert_eq!(one.len(), other.len());
    let differing = one.chunks(PAGE).zip(other.chunks(PAGE)).filter(|(one, other)| one != other);
    assert_eq!(differing.count(), 0, "pages differ");
}

/// What a snapshot must bring back: a file in memory, one on the disk, and a shell that counts.
const SCRIPT: &str = "mkdir -p /run/m && mount -t tmpfs none /run/m; \
    head -c 8000000 /dev/urandom > /run/m/memory; head -c 4000000 /dev/urandom > /root/disk; sync; \
    md5sum /run/m/memory /root/disk > /run/m/sums; nohup sh -c 'n=0; while :; do n=$((n+1)); echo $n >> /run/m/count; sleep 0.02; done' >/dev/null 2>&1 & \
    until test -s /run/m/count; do sleep 0.1; done";

async fn check(guest: &Guest, id: &str) {
    let (output, status) = run(
        guest,
        id,
        "md5sum -c /run/m/sums && wc -l < /run/m/count && sleep 1 && wc -l < /run/m/count",
    )
    .await;
    assert_eq!(status.exit_code, Some(0), "{output}");
    let counts: Vec<u64> = output.lines().filter_map(|line| line.parse().ok()).collect();
    assert!(counts.len() == 2 && counts[0] < counts[1], "the process stands still: {output}");
}

#[tokio::test]
async fn a_snapshot_has_the_memory_byte_for_byte_and_the_source_goes_on() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("source").await;
    run(&guest, "fill", SCRIPT).await;
    guest.call(Request::Quiesce, DEADLINE).await.unwrap();
    let (taken, saved) = bake.save(&machine, bake.directory.join("taken")).await;
    assert!(!machine.is_running().await.unwrap());
    assert_equal(&memory_of(&machine), &std::fs::read(taken.memory()).unwrap());
    assert!(saved.changed_pages > 8_000_000 / PAGE as u64, "{saved:?}");
    assert!(saved.written_bytes <= saved.changed_pages * PAGE as u64, "{saved:?}");
    machine.resume().await.unwrap();
    guest.call(Request::Thaw { unix_time_ns: 1 }, DEADLINE).await.unwrap();
    check(&guest, "source").await;

    let (_one, guest) = taken.start("one").await;
    check(&guest, "one").await;
    let (_other, guest) = taken.start("other").await;
    check(&guest, "other").await;
}

#[tokio::test]
async fn ten_generations_of_snapshots_lose_nothing() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("generation0").await;
    run(&guest, "fill", SCRIPT).await;
    // Goes on through all of them.
    let heavy = "nohup sh -c 'while :; do head -c 3000000 /dev/zero > /root/heavy1; sync; cp /root/heavy1 /root/heavy2; \
                 mkdir /root/heavy; touch /root/heavy/file; rm -r /root/heavy; done' >/dev/null 2>&1 &";
    run(&guest, "heavy", heavy).await;
    let (mut last, _) =
        snapshot(bake, &machine, &guest, bake.directory.join("generation0-taken")).await;
    machine.into_inner().kill().await.unwrap();
    for generation in 1..=10 {
        let (machine, guest) = last.start("running").await;
        check(&guest, &format!("check{generation}")).await;
        let script = format!(
            "test $(ls /root/generations /run/m/generations | grep -c '^[0-9]') = {}; echo $?; \
             mkdir -p /root/generations /run/m/generations; touch /root/generations/{generation} /run/m/generations/{generation}",
            2 * (generation - 1)
        );
        let (output, _) = run(&guest, &format!("write{generation}"), &script).await;
        assert_eq!(output.lines().last(), Some("0"), "{output}");
        let directory = bake.directory.join(format!("generation{generation}"));
        let (taken, _) = snapshot(&last, &machine, &guest, directory).await;
        assert_clean(&taken.root_disk());
        run(&guest, &format!("goes-on{generation}"), "true").await;
        machine.into_inner().kill().await.unwrap();
        last = taken;
    }
}

#[tokio::test]
async fn a_machine_that_a_later_server_found_is_saved_as_well_though_its_bake_is_gone() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("first").await;
    run(&guest, "fill", SCRIPT).await;
    let (taken, _) = snapshot(bake, &machine, &guest, bake.directory.join("first-taken")).await;
    let directory = taken.clone_disk("found");
    let home = place(directory.clone());
    let known = Place { directory: directory.clone(), uid: home.uid, tap: None };
    let machine = Running::from(
        taken.load(taken.prepare(home).await, &directory.join("rootfs")).await.unwrap(),
    );
    machine.resume().await.unwrap();
    drop(machine.into_inner());
    let machine = Running::from(Hypervisor::adopt(&known).await.unwrap());
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    std::fs::remove_file(taken.memory()).unwrap();

    // Through the descriptor: the file has no name any longer.
    let mut base = machine.base_memory().unwrap();
    std::io::copy(&mut base, &mut File::create_new(taken.memory()).unwrap()).unwrap();
    let (again, _) = snapshot(&taken, &machine, &guest, bake.directory.join("found-taken")).await;
    let (_machine, guest) = again.start("goes-on").await;
    check(&guest, "check").await;
}

/// To a clone of the bake's memory; the disk is not cloned.
async fn save_to<F>(bake: &Bake, machine: &Machine, name: &str, while_stopped: F) -> Save<F> {
    let directory = bake.directory.join(name);
    std::fs::create_dir(&directory).unwrap();
    clone_file(&bake.memory(), &directory.join("memory"));
    Save {
        state: File::create(directory.join("state")).unwrap(),
        memory: machine
            .copy_ahead(read_write(&directory.join("memory")), WriteBack::Later)
            .await
            .unwrap(),
        while_stopped,
    }
}

fn nothing() -> std::io::Result<()> {
    Ok(())
}

#[tokio::test]
async fn memory_that_other_machines_read_is_never_written_over() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("over").await;
    let ahead = machine.copy_ahead(read_write(&bake.memory()), WriteBack::Now).await;
    assert!(matches!(ahead, Err(Error::Unfit(_))));
    let ahead = machine.copy_ahead(tempfile::tempfile().unwrap(), WriteBack::Now).await;
    assert!(matches!(ahead, Err(Error::Unfit(_))));
    assert!(machine.is_running().await.unwrap());
    run(&guest, "goes-on", "true").await;
}

#[tokio::test]
async fn a_save_that_fails_leaves_the_machine_as_it_was() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("fails").await;
    let save =
        save_to(bake, &machine, "no-disk", || Err(std::io::ErrorKind::StorageFull.into())).await;
    let error = machine.save(save).await.unwrap_err();
    assert!(
        matches!(error, Error::Host { ref source, .. } if source.kind() == std::io::ErrorKind::StorageFull),
        "{error:?}"
    );
    machine.resume().await.unwrap();

    let full = File::options().write(true).open("/dev/full").unwrap();
    let save = Save { state: full, ..save_to(bake, &machine, "no-state", nothing).await };
    machine.save(save).await.unwrap_err();
    machine.resume().await.unwrap();
    run(&guest, "goes-on", "true").await;
    machine.save(save_to(bake, &machine, "in-the-end", nothing).await).await.unwrap();
    machine.resume().await.unwrap();
    run(&guest, "goes-on-still", "true").await;
}

#[tokio::test]
async fn the_death_of_qemu_ends_a_save() {
    let bake = Bake::shared().await;
    let (machine, _) = bake.start("dies").await;
    let pid = machine.pid();
    let save = save_to(bake, &machine, "dies-taken", move || {
        let process = nix::unistd::Pid::from_raw(pid.cast_signed());
        nix::sys::signal::kill(process, nix::sys::signal::Signal::SIGKILL)?;
        while std::path::Path::new(&format!("/proc/{pid}")).exists() {
            std::thread::yield_now();
        }
        Ok(())
    })
    .await;
    let saved = tokio::time::timeout(DEADLINE, machine.save(save)).await.unwrap();
    assert!(matches!(saved, Err(Error::Exited { .. })), "{saved:?}");
}

#[tokio::test]
async fn a_paused_machine_is_saved_and_stays_so() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("paused").await;
    run(&guest, "fill", SCRIPT).await;
    guest.call(Request::Quiesce, DEADLINE).await.unwrap();
    machine.stop().await.unwrap();
    let (taken, _) = bake.save(&machine, bake.directory.join("paused-taken")).await;
    assert!(!machine.is_running().await.unwrap());
    machine.into_inner().kill().await.unwrap();
    let (_machine, guest) = taken.start("woken").await;
    check(&guest, "check").await;
}
