//! Machines on real QEMU: saved, restored, found again, ended.

mod harness;

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use harness::{Bake, DEADLINE, Running, place, run};
use machine::guest::Request;
use machine::hypervisor::{Boot, Hypervisor, Load};
use machine::{Ended, Error, Machine};

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

#[tokio::test]
async fn a_saved_machine_goes_on_in_another_process() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("goes-on").await;
    let (output, status) = run(&guest, "hello", "echo hi; uname -s; exit 3").await;
    assert_eq!((output.as_str(), status.exit_code), ("hi\nLinux\n", Some(3)));
    assert!(machine.is_running().await.unwrap());
}

#[tokio::test]
async fn a_clone_writes_neither_to_the_saved_memory_nor_to_the_saved_disk() {
    let bake = Bake::shared().await;
    let modified = || {
        [bake.memory(), bake.root_disk()]
            .map(|path| std::fs::metadata(path).unwrap().modified().unwrap())
    };
    let before = modified();
    let (_machine, guest) = bake.start("writes").await;
    let (_, status) =
        run(&guest, "w", "dd if=/dev/zero of=/root/zeroes bs=1M count=8 conv=fsync; sync").await;
    assert_eq!(status.exit_code, Some(0));
    assert_eq!(before, modified());
    let (_other, guest) = bake.start("reads").await;
    let (_, status) = run(&guest, "r", "test -e /root/zeroes").await;
    assert_eq!(status.exit_code, Some(1));
}

#[tokio::test]
async fn an_empty_slot_swallows_nothing() {
    let bake = Bake::shared().await;
    let (_machine, guest) = bake.start("slots").await;
    for device in ["vdb", "vdi", "vdj", "vdq"] {
        let script = format!(
            "test -b /dev/{device} && dd if=/dev/zero of=/dev/{device} bs=4096 count=1 conv=fsync"
        );
        let (output, status) = run(&guest, device, &script).await;
        assert_ne!(status.exit_code, Some(0), "{device}: {output}");
    }
}

#[tokio::test]
async fn a_guest_sees_that_its_disk_has_grown() {
    let bake = Bake::shared().await;
    let directory = bake.clone_disk("grown");
    let disk = harness::read_write(&directory.join("rootfs"));
    let larger = bake.disk_bytes() + (1 << 30);
    disk.set_len(larger).unwrap();
    let prepared = bake.prepare(place(directory)).await;
    let loaded = prepared.load(bake.loading(disk, larger)).await;
    let machine = Running::from(loaded.unwrap());
    machine.resume().await.unwrap();
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    let (output, _) = run(&guest, "size", "cat /sys/block/vda/size").await;
    assert_eq!(output.trim(), (larger / 512).to_string());
}

#[tokio::test]
async fn a_disk_is_never_cut() {
    let bake = Bake::shared().await;
    let directory = bake.clone_disk("cut");
    let disk = harness::read_write(&directory.join("rootfs"));
    let prepared = bake.prepare(place(directory.clone())).await;
    let smaller = bake.disk_bytes() - 4096;
    let refused = prepared.load(bake.loading(disk, smaller)).await;
    assert!(matches!(refused, Err(Error::Unfit(_))));
    assert_eq!(std::fs::metadata(directory.join("rootfs")).unwrap().len(), bake.disk_bytes());
}

#[tokio::test]
async fn a_state_that_is_none_fails_soon_and_leaves_no_process() {
    let bake = Bake::shared().await;
    let directory = bake.clone_disk("garbage");
    let garbage = directory.join("garbage");
    File::create(&garbage).unwrap().write_all(&[0x51; 4096]).unwrap();
    let prepared = bake.prepare(place(directory.clone())).await;
    let (pid, begun) = (prepared.pid(), Instant::now());
    let disk = harness::read_write(&directory.join("rootfs"));
    let state = File::open(garbage).unwrap();
    let loaded = prepared.load(Load { state, ..bake.loading(disk, bake.disk_bytes()) }).await;
    assert!(
        matches!(loaded, Err(Error::Exited { ref stderr, .. }) if !stderr.is_empty()),
        "{loaded:?}"
    );
    assert!(begun.elapsed() < Duration::from_secs(9));
    assert!(!is_alive(pid));
}

#[tokio::test]
async fn a_disk_in_use_elsewhere_is_not_taken() {
    let bake = Bake::shared().await;
    let (_machine, _) = bake.start("holder").await;
    let directory = bake.directory.join("second");
    std::fs::create_dir(&directory).unwrap();
    let prepared = bake.prepare(place(directory)).await;
    let pid = prepared.pid();
    let begun = Instant::now();
    let loaded = bake.load(prepared, &bake.directory.join("holder/rootfs")).await;
    let error = loaded.map(Running::from).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    assert!(begun.elapsed() < DEADLINE);
    assert!(!is_alive(pid));
}

#[tokio::test]
async fn a_killed_machine_leaves_no_process() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("killed").await;
    let pid = machine.pid();
    machine.into_inner().kill().await.unwrap();
    assert!(!is_alive(pid));
    assert!(!bake.directory.join("killed/qemu.pid").exists());
    assert!(matches!(guest.call(Request::Ping, DEADLINE).await, Err(Error::Lost)));
}

#[tokio::test]
async fn the_death_of_qemu_ends_what_waits_for_the_guest_at_once() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("dies").await;
    let waiting = tokio::spawn(async move { run_until_lost(guest).await });
    let pid = nix::unistd::Pid::from_raw(machine.pid().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(5), machine.exited()).await.unwrap();
    assert!(matches!(ended, Ended::Died { .. }), "{ended:?}");
    assert!(matches!(
        tokio::time::timeout(Duration::from_secs(5), waiting).await.unwrap().unwrap(),
        Error::Lost
    ));
}

async fn run_until_lost(guest: machine::guest::Guest) -> Error {
    loop {
        if let Err(error) = guest.call(Request::Ping, DEADLINE).await {
            return error;
        }
    }
}

#[tokio::test]
async fn a_later_server_finds_the_machine_again() {
    let bake = Bake::shared().await;
    let directory = bake.clone_disk("found");
    let home = place(directory.clone());
    let known = place(directory.clone());
    let known = machine::hypervisor::Place { uid: home.uid, ..known };
    let machine = bake.load(bake.prepare(home).await, &directory.join("rootfs")).await.unwrap();
    machine.resume().await.unwrap();
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    run(&guest, "before", "echo kept > /tmp/note").await;
    let pid = machine.pid();
    // As when the server is killed: its ends of the sockets close.
    drop((machine, guest));

    let again = Running::from(Hypervisor::adopt(&known).await.unwrap());
    assert_eq!(again.pid(), pid);
    let guest = again.connect_guest(DEADLINE).await.unwrap();
    let (output, _) = run(&guest, "after", "cat /tmp/note").await;
    assert_eq!(output, "kept\n");
    let machine: Machine = again.into_inner();
    machine.kill().await.unwrap();
    assert!(!is_alive(pid));
    assert!(matches!(Hypervisor::adopt(&known).await, Err(Error::NoMachine { .. })));
}

#[tokio::test]
async fn a_guest_that_powers_off_is_not_taken_for_a_crash_not_even_by_a_later_server() {
    let bake = Bake::shared().await;
    let (machine, guest) = bake.start("powers-off").await;
    guest.call(Request::Shutdown { grace_ms: 0 }, DEADLINE).await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, machine.exited()).await.unwrap();
    assert!(matches!(ended, Ended::PoweredOff), "{ended:?}");

    let directory = bake.clone_disk("powers-off-later");
    let home = place(directory.clone());
    let known =
        machine::hypervisor::Place { directory: directory.clone(), uid: home.uid, tap: None };
    let machine = Running::from(
        bake.load(bake.prepare(home).await, &directory.join("rootfs")).await.unwrap(),
    );
    machine.resume().await.unwrap();
    // The first server is killed: its ends of the sockets close. Its child is still ours, so it is reaped here, too.
    drop(machine.into_inner());
    let machine = Running::from(Hypervisor::adopt(&known).await.unwrap());
    let guest = machine.connect_guest(DEADLINE).await.unwrap();
    guest.call(Request::Repair(harness::repair()), DEADLINE).await.unwrap();
    guest.call(Request::Shutdown { grace_ms: 0 }, DEADLINE).await.unwrap();
    let ended = tokio::time::timeout(DEADLINE, machine.exited()).await.unwrap();
    assert!(matches!(ended, Ended::PoweredOff), "{ended:?}");
}

#[tokio::test]
async fn a_process_that_is_not_the_machines_is_not_adopted() {
    let bake = Bake::shared().await;
    let directory = bake.directory.join("impostor");
    std::fs::create_dir(&directory).unwrap();
    let stranger = std::process::id();
    std::fs::write(directory.join("qemu.pid"), format!("{stranger} 1 not-this-boot\n")).unwrap();
    assert!(matches!(Hypervisor::adopt(&place(directory)).await, Err(Error::NoMachine { .. })));
}

#[tokio::test]
async fn a_prepared_process_that_is_not_needed_goes() {
    let bake = Bake::shared().await;
    let directory = bake.directory.join("unneeded");
    std::fs::create_dir(&directory).unwrap();
    let prepared = bake.prepare(place(directory)).await;
    let pid = prepared.pid();
    drop(prepared);
    let gone = async {
        while is_alive(pid) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap();
}

#[tokio::test]
async fn a_qemu_has_no_privileges_and_no_network_but_its_own() {
    let bake = Bake::shared().await;
    let (machine, _) = bake.start("jailed").await;
    let status = std::fs::read_to_string(format!("/proc/{}/status", machine.pid())).unwrap();
    let field = |name: &str| {
        status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
    };
    let uids: Vec<_> = field("Uid:").split_whitespace().map(str::to_owned).collect();
    assert!(uids.iter().all(|uid| uid == &uids[0]) && uids[0].starts_with("1899"), "{uids:?}");
    assert_eq!(
        (field("Groups:").as_str(), field("NoNewPrivs:").as_str(), field("Seccomp:").as_str()),
        ("", "1", "2")
    );
    assert_eq!(field("CapEff:").trim_start_matches('0'), "");
    let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).unwrap();
    assert_ne!(namespace(&machine.pid().to_string()), namespace("self"));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", machine.pid())).unwrap();
    assert!(
        limits.lines().any(|line| line.starts_with("Max core file size") && line.contains(" 0 "))
    );
}

#[tokio::test]
async fn the_probe_decides_soon_and_remembers() {
    let directory = harness::scratch("probe");
    let remembered = directory.join("accelerator");
    let hypervisor = Hypervisor::find().unwrap();
    let probe = async || {
        let begun = Instant::now();
        let (kernel, initramfs) =
            (harness::guest_file("vmlinuz"), harness::guest_file("initramfs"));
        (hypervisor.probe(&kernel, &initramfs, &remembered).await.unwrap(), begun.elapsed())
    };
    let (first, duration) = probe().await;
    assert!(duration < Duration::from_secs(40));
    let (second, duration) = probe().await;
    assert_eq!(first, second);
    assert!(duration < Duration::from_secs(1));
    let left: Vec<_> =
        std::fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(left.iter().all(|name| name == "accelerator"), "{left:?}");
}

#[tokio::test]
async fn a_kernel_that_does_not_come_up_is_told_with_its_console_and_leaves_no_process() {
    let directory = harness::scratch("no-agent");
    std::fs::create_dir(directory.join("place")).unwrap();
    // A kernel without the agent panics and, having no way to reboot, ends QEMU.
    let initramfs = directory.join("initramfs");
    File::create(&initramfs).unwrap();
    let memory = File::options()
        .create_new(true)
        .read(true)
        .write(true)
        .open(directory.join("memory"))
        .unwrap();
    memory.set_len(harness::SPEC.shape.memory_bytes()).unwrap();
    let disk = File::options()
        .create_new(true)
        .read(true)
        .write(true)
        .open(directory.join("rootfs"))
        .unwrap();
    disk.set_len(1 << 20).unwrap();
    let boot = Boot {
        kernel: harness::guest_file("vmlinuz"),
        initramfs,
        memory,
        root_disk: disk,
        place: place(directory.join("place")),
    };
    let error = Hypervisor::find()
        .unwrap()
        .boot(&harness::SPEC, boot)
        .await
        .map(Running::from)
        .map(|_| ())
        .unwrap_err();
    assert!(
        matches!(error, Error::NotBooted { ref console } if console.contains("Kernel panic")),
        "{error}"
    );
    assert!(!directory.join("place/qemu.pid").exists());
}
