//! Guests on real QEMU that stand still and go on, with and without volumes.
#![expect(clippy::unwrap_used, reason = "nobody handles the failures of a test")]

mod harness;

use std::collections::BTreeSet;
use std::path::PathBuf;

use harness::{
    Bake, DEADLINE, assert_clean, make_volume, place, read_write, repair, root_disk_of, run,
    snapshot, volume,
};
use machine::guest::{
    Channel, Command, ErrorCode, Event, ExecStart, FileWrite, Guest, Mount, Repair, Reply, Request,
};
use machine::spec::WRITABLE_SLOTS;
use machine::{Error, Machine, VolumeDisk};

const FIRST: u8 = 0;
const FIRST_READ_ONLY: u8 = WRITABLE_SLOTS as u8;
const THAW: Request = Request::Thaw { unix_time_ns: 1_800_000_000_000_000_000 };

async fn done(guest: &Guest, request: Request) {
    let text = format!("{request:?}");
    let reply = guest.call(request, DEADLINE).await;
    assert!(matches!(reply, Ok(Reply::Done)), "{text}: {reply:?}");
}

async fn refused(guest: &Guest, request: Request) -> (ErrorCode, String) {
    match guest.call(request, DEADLINE).await {
        Err(Error::Refused(failure)) => (failure.code, failure.message),
        other => panic!("a refusal was due, not {other:?}"),
    }
}

async fn says(guest: &Guest, script: &str) -> String {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed).to_string();
    let (output, status) = run(guest, &id, script).await;
    assert_eq!(status.exit_code, Some(0), "{script}: {output}");
    output
}

fn exec(id: &str, script: &str) -> Request {
    Request::ExecStart(ExecStart {
        id: id.into(),
        command: Command::Script(script.as_bytes().to_vec().into()),
        working_directory: None,
        environment: Vec::new(),
        user: None,
        has_stdin: false,
        timeout_ms: 0,
        output_limit: 64 << 20,
    })
}

fn mount(slot: u8, path: &str) -> Mount {
    Mount { slot, path: path.as_bytes().to_vec().into(), read_only: slot >= FIRST_READ_ONLY }
}

async fn make(name: &str) -> (PathBuf, VolumeDisk) {
    let path = Bake::shared().await.directory.join(name);
    make_volume(&path, 32);
    let disk = volume(&path, false);
    (path, disk)
}

/// What the root disk holds at this instant, copied.
async fn disk_of(machine: &Machine, name: &str) -> PathBuf {
    let copy = Bake::shared().await.directory.join(name);
    machine.flush_disks().await.expect("disks are flushed");
    harness::reflink(&root_disk_of(machine), &copy).expect("disks are copied");
    copy
}

#[tokio::test]
async fn a_frozen_disk_is_whole_and_the_agent_answers() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("whole").await;
    let writer = "while :; do mkdir -p /root/w; for n in 1 2 3 4 5 6 7 8 9; do echo $n > /root/w/$n; done; \
        head -c 2000000 /dev/zero > /root/big; rm -r /root/w /root/big; echo round; done";
    let stream = guest.open(exec("writer", writer)).unwrap();
    while !matches!(stream.next().await, Some(Ok(Event::Data(Channel::Stdout, _)))) {}
    for round in 0..3 {
        done(&guest, Request::Quiesce).await;
        assert_clean(&disk_of(&machine, &format!("whole{round}")).await);
        done(&guest, Request::Ping).await;
        let late = guest.open(exec(&format!("late{round}"), "echo late")).unwrap();
        done(&guest, THAW).await;
        let mut text = Vec::new();
        while let Some(Ok(event)) = late.next().await {
            if let Event::Data(_, bytes) = event {
                text.extend_from_slice(&bytes);
            }
        }
        assert_eq!(text, b"late\n");
    }
    while !matches!(stream.next().await, Some(Ok(Event::Data(Channel::Stdout, _)))) {}
    assert!(says(&guest, "date +%Y").await.starts_with("2027"));
}

#[tokio::test]
async fn whatever_root_has_done_stands_still_as_well() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("root").await;
    // A file system in a file, one over it, one in memory, groups of its own, and processes out of their groups.
    let set_up = "cd /root; truncate -s 64M image; mkfs.ext4 -q image; mkdir -p inner upper work merged /run/t; \
        mount image inner; mount -t tmpfs none /run/t; mkdir inner/upper inner/work; \
        mount -t overlay none -o lowerdir=/etc,upperdir=inner/upper,workdir=inner/work merged; \
        mkdir -p /sys/fs/cgroup/own/below; \
        begin() { (exec < /dev/null > /dev/null 2>&1; echo 0 > /sys/fs/cgroup/$1/cgroup.procs; \
            exec setsid sh -c \"while :; do echo x >> $2/log; sleep 0.05; done\") & }; \
        begin own/below inner; begin '' merged; begin agent /run/t; \
        until test -e inner/log -a -e merged/log -a -e /run/t/log; do sleep 0.1; done";
    says(&guest, set_up).await;
    let sizes = "cat /root/inner/log /root/merged/log /run/t/log | wc -c";
    let before: u64 = says(&guest, sizes).await.trim().parse().unwrap();
    for round in 0..2 {
        done(&guest, Request::Quiesce).await;
        let (taken, _) =
            bake.save(&machine, bake.directory.join(format!("root-taken{round}"))).await;
        assert_clean(&taken.root_disk());
        // Nothing moves in a clone that is not repaired yet, either.
        let image = taken.directory.join("image");
        let dumped = std::process::Command::new("debugfs")
            .args(["-R", &format!("dump /root/image {}", image.display())])
            .arg(taken.root_disk())
            .output()
            .unwrap();
        assert!(dumped.status.success(), "{dumped:?}");
        assert_clean(&image);
        machine.resume().await.unwrap();
        done(&guest, THAW).await;
    }
    let after: u64 = says(&guest, sizes).await.trim().parse().unwrap();
    assert!(after > before);
}

#[tokio::test]
async fn clones_differ_from_the_first_instant_and_their_execs_go_on() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("drawing").await;
    // A number a line, as fast as it can; what was drawn after the restore follows the mark of the new name.
    let script = "read -r old < /proc/sys/kernel/hostname; while :; do read -r name < /proc/sys/kernel/hostname; \
        read -r id < /proc/sys/kernel/random/uuid; echo $name $(date +%s) $id; done";
    let stream = guest.open(exec("draws", script)).unwrap();
    while !matches!(stream.next().await, Some(Ok(Event::Data(..)))) {}
    // An upload that its host will never finish.
    let upload = FileWrite {
        path: b"/root/never".to_vec().into(),
        mode: None,
        owner: None,
        create_parents: false,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    };
    let upload = guest.open(Request::FileWrite(upload)).unwrap();
    upload.send(vec![1; 300_000].into()).await.unwrap();
    let (taken, _) = snapshot(bake, &machine, &guest, bake.directory.join("drawing-taken")).await;
    let mut first = BTreeSet::new();
    for name in ["one", "two", "three"] {
        let directory = taken.clone_disk(name);
        let prepared = taken.prepare(place(directory.clone())).await;
        let load = taken.loading(read_write(&directory.join("rootfs")), taken.disk_bytes());
        let clone = harness::Running::from(prepared.load(load).await.unwrap());
        clone.resume().await.unwrap();
        let guest = clone.connect_guest(DEADLINE).await.unwrap();
        let entropy = [u8::try_from(first.len()).unwrap(); 32];
        let repair = Repair { host_name: name.into(), entropy, ..repair() };
        done(&guest, Request::Repair(repair)).await;
        let watch = Request::ExecWatch { id: "draws".into(), stdout_offset: 0, stderr_offset: 0 };
        let stream = guest.open(watch).unwrap();
        let mut text = String::new();
        let mark = format!("\n{name} ");
        while !text.split_once(&mark).is_some_and(|(_, rest)| rest.contains('\n')) {
            if let Some(Ok(Event::Data(_, bytes))) = stream.next().await {
                text.push_str(std::str::from_utf8(&bytes).unwrap());
            }
        }
        let line = text.split_once(&mark).unwrap().1.lines().next().unwrap().to_owned();
        let (seconds, id) = line.split_once(' ').unwrap();
        assert!(seconds.parse::<u64>().unwrap() >= 1_800_000_000, "{line}");
        assert!(first.insert(id.to_owned()), "{id} was drawn twice");
        assert!(!says(&guest, "ls /root").await.contains("never"));
    }
}

#[tokio::test]
async fn volumes_are_mounted_before_anything_goes_on() {
    let bake = Bake::shared().await;
    let (path, disk) = make("before-volume").await;
    let (shared, _) = make("before-shared").await;
    let (machine, guest) =
        bake.start_with("before", vec![(FIRST, disk), (9, volume(&shared, true))]).await;
    let volumes = vec![mount(FIRST, "/mnt/data"), mount(9, "/mnt/deep/shared")];
    done(&guest, Request::VolumesMount { volumes: volumes.clone() }).await;
    let counts = "until test -e /run/stop; do echo x >> /mnt/data/log; done";
    let stream = guest.open(exec("counts", counts)).unwrap();
    says(&guest, "until test -s /mnt/data/log; do sleep 0.1; done; findmnt /mnt/deep/shared").await;

    // Away in the window of a snapshot, and back for the source.
    done(&guest, Request::Quiesce).await;
    let both = Request::VolumesUnmount { slots: vec![FIRST, 9] };
    while guest.call(both.clone(), DEADLINE).await.is_err() {
        // A shell that stood still with its file open.
        done(&guest, THAW).await;
        done(&guest, Request::Quiesce).await;
    }
    assert_clean(&path);
    let (taken, _) = bake.save(&machine, bake.directory.join("before-taken")).await;
    machine.resume().await.unwrap();
    done(&guest, THAW).await;
    says(&guest, "findmnt /mnt/data && findmnt /mnt/deep/shared").await;
    done(&guest, Request::Release { grace_ms: 0 }).await;
    machine.into_inner().kill().await.unwrap();
    drop(stream);
    assert_clean(&path);

    // Another in the clone, and none.
    let (other, disk) = make("before-other").await;
    let (_, more) = make("before-third").await;
    let disks = vec![(FIRST, disk), (2, more)];
    let volumes = vec![mount(FIRST, "/mnt/data"), mount(2, "/mnt/not/there/before")];
    let (clone, guest) = start(&taken, "with", disks, volumes).await;
    let script = "until test -s /mnt/data/log; do sleep 0.1; done; touch /run/stop; \
        until umount /mnt/data; do sleep 0.1; done; ls /mnt/data | wc -l";
    assert_eq!(says(&guest, script).await.trim(), "0");
    says(&guest, "touch /mnt/not/there/before/file && findmnt /mnt/not/there/before").await;
    clone.into_inner().kill().await.unwrap();
    assert_clean(&other);

    let (_none, guest) = start(&taken, "without", Vec::new(), Vec::new()).await;
    says(&guest, "! findmnt /mnt/data").await;
    for device in ["vdb", "vdc", "vdj", "vdk"] {
        let script = format!(
            "! dd if=/dev/zero of=/dev/{device} bs=4096 count=1 conv=fsync && test -b /dev/{device}"
        );
        says(&guest, &script).await;
    }
}

async fn start(
    bake: &Bake,
    name: &str,
    disks: Vec<(u8, VolumeDisk)>,
    volumes: Vec<Mount>,
) -> (harness::Running, Guest) {
    let directory = bake.clone_disk(name);
    let prepared = bake.prepare(place(directory.clone())).await;
    let load = bake.loading(read_write(&directory.join("rootfs")), bake.disk_bytes());
    let load = machine::hypervisor::Load { volumes: disks, ..load };
    let machine = harness::Running::from(prepared.load(load).await.unwrap());
    machine.resume().await.unwrap();
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    done(&guest, Request::Repair(Repair { volumes, ..repair() })).await;
    (machine, guest)
}

#[tokio::test]
async fn every_slot_takes_volume_after_volume_and_nothing_between() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("every").await;
    for (round, slot) in [FIRST, 3, 7, FIRST, 3].into_iter().enumerate() {
        let (path, disk) = make(&format!("every{round}")).await;
        machine.attach_volume(slot, disk).await.unwrap();
        done(&guest, Request::VolumesMount { volumes: vec![mount(slot, "/mnt/v")] }).await;
        let device = says(&guest, "touch /mnt/v/kept; findmnt -no SOURCE /mnt/v").await;
        done(&guest, Request::VolumesUnmount { slots: vec![slot] }).await;
        let script = format!("! dd if=/dev/zero of={} bs=4096 count=1 conv=fsync", device.trim());
        says(&guest, &script).await;
        machine.detach_volume(slot).await.unwrap();
        says(&guest, &script).await;
        assert_clean(&path);
    }
    let nothing = Request::VolumesMount { volumes: vec![mount(5, "/mnt/v")] };
    assert_eq!(refused(&guest, nothing).await.0, ErrorCode::NotFound);
}

#[tokio::test]
async fn a_volume_in_use_is_not_taken_away_and_its_user_is_named() {
    let bake = Bake::shared().await;
    let (_, disk) = make("used-volume").await;
    let (_machine, guest) = bake.start_with("used", vec![(FIRST, disk)]).await;
    done(&guest, Request::VolumesMount { volumes: vec![mount(FIRST, "/mnt/v")] }).await;
    let stream =
        guest.open(exec("holds", "exec 9> /mnt/v/open; echo in; exec sleep 1000")).unwrap();
    while !matches!(stream.next().await, Some(Ok(Event::Data(..)))) {}
    done(&guest, Request::Quiesce).await;
    let (code, text) = refused(&guest, Request::VolumesUnmount { slots: vec![FIRST] }).await;
    assert!(
        code == ErrorCode::Conflict && text.contains("/mnt/v") && text.contains("sleep"),
        "{text}"
    );
    done(&guest, THAW).await;
    says(&guest, "echo more > /mnt/v/more && findmnt /mnt/v").await;
}

#[tokio::test]
async fn a_volume_grows_while_it_is_mounted() {
    let bake = Bake::shared().await;
    let (path, disk) = make("grows-volume").await;
    let (machine, guest) = bake.start_with("grows-in", vec![(FIRST, disk)]).await;
    done(&guest, Request::VolumesMount { volumes: vec![mount(FIRST, "/mnt/v")] }).await;
    let blocks = "stat -f -c %b /mnt/v";
    let before: u64 = says(&guest, blocks).await.trim().parse().unwrap();
    read_write(&path).set_len(128 << 20).unwrap();
    machine.resize_volume(FIRST, 128 << 20).await.unwrap();
    done(&guest, Request::VolumeGrow { slot: FIRST }).await;
    let after: u64 = says(&guest, blocks).await.trim().parse().unwrap();
    assert!(after > 3 * before, "{before} blocks became {after}");
    done(&guest, Request::Release { grace_ms: 100 }).await;
    assert_clean(&path);
}

#[tokio::test]
async fn a_guest_whose_host_is_gone_goes_on_by_itself() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("alone").await;
    done(&guest, Request::Quiesce).await;
    drop(guest);
    tokio::time::sleep(protocol::QUIET_LIMIT + std::time::Duration::from_secs(5)).await;
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    says(&guest, "touch /root/goes-on").await;
}
