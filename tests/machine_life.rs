//! Machines: stopped and started, their volumes, their root disks, whatever ends and whenever.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use api::{
    BootMode, CreateMachine, CreateSandbox, CreateVolume, ErrorCode, Machine, SandboxId,
    SandboxStatus, UpdateVolume, Volume, VolumeId, VolumeKind, VolumeMount, VolumeName,
    VolumeState,
};
use client::{Client, Error, RootDisk};
use rustix::process::{Pid, Signal, kill_process};
use tests::{End, Footprint, Host, Server, command, pause, small, suite, until};
use tokio::process::Command;

suite! {
    a_machine_is_a_sandbox_and_boots_again_from_its_disk,
    a_sandbox_that_ended_by_itself_boots_again_with_its_volume,
    a_stop_under_heavy_writes_leaves_disks_in_order,
    volumes_are_disks_in_the_order_in_which_they_were_attached,
    of_two_machines_that_race_for_a_volume_one_gets_it,
    a_root_disk_is_kept_and_boots_another_machine,
    a_machine_that_dies_boots_again_from_what_it_had_flushed,
    a_server_that_is_killed_finds_its_machines_as_they_were,
    a_machine_in_any_state_is_deleted_without_a_trace;
    soak:
}

/// Under emulation, on a host that has more to do.
const PATIENCE: Duration = Duration::from_secs(240);

fn wanted(name: &str) -> CreateMachine {
    CreateMachine { name: Some(name.to_owned()), ..CreateMachine::default() }
}

/// Waits for a bake or for room where the server asks to.
async fn machine(server: &Server, request: &CreateMachine) -> Machine {
    patiently(async || server.client().create_machine(request).await).await
}

async fn start(client: &Client, id: &SandboxId) -> Machine {
    patiently(async || client.start_machine(id).await).await
}

async fn patiently<T>(ask: impl AsyncFn() -> Result<T, Error>) -> T {
    until("an answer", PATIENCE, async || match ask().await {
        Ok(answer) => Some(answer),
        Err(error) => {
            pause(error.may_retry_after().unwrap_or_else(|| panic!("{error:?}"))).await;
            None
        }
    })
    .await
}

async fn run(client: &Client, id: &SandboxId, cmd: &str) -> String {
    let result = client.exec(id, &command(cmd)).await.unwrap();
    assert_eq!(result.exit_code, 0, "{cmd}: {result:?}");
    result.stdout
}

async fn volume(server: &Server, name: &str) -> Volume {
    let request = CreateVolume {
        name: name.parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    server.client().create_volume(&request).await.unwrap()
}

fn named(id: VolumeId) -> VolumeName {
    id.to_string().parse().unwrap()
}

fn disk(server: &Server, id: VolumeId) -> PathBuf {
    server.data().join("volumes").join(id.to_string()).join("disk")
}

async fn is_clean(disk: &Path) {
    let check = Command::new("e2fsck").arg("-fn").arg(disk).output();
    let output = tokio::time::timeout(Duration::from_secs(120), check).await.unwrap().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

fn refusal<T: std::fmt::Debug>(answer: Result<T, Error>) -> (ErrorCode, String) {
    let error = answer.unwrap_err();
    let refusal = error.refusal().unwrap_or_else(|| panic!("{error:?}"));
    (refusal.code.unwrap(), refusal.message.clone())
}

/// The process that has this disk open.
fn holder_of(server: &Server, disk: &Path) -> Option<Pid> {
    let has_it_open = |pid: &u32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| fs::read_link(file.path()).ok()).any(|file| file == disk)
    };
    let pid = Footprint::of(server.data()).processes.into_iter().find(has_it_open)?;
    Pid::from_raw(pid.cast_signed())
}

async fn has_state(client: &Client, id: &SandboxId, state: SandboxStatus) {
    until("its state", PATIENCE, async || {
        (client.machine(id).await.unwrap().state == state).then_some(())
    })
    .await;
}

async fn a_machine_is_a_sandbox_and_boots_again_from_its_disk(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let metadata = std::collections::BTreeMap::from([("job".to_owned(), "é".to_owned())]);
    let request = CreateMachine { metadata: Some(metadata.clone()), ..wanted("first") };
    let made = machine(&server, &request).await;
    let (id, root) = (made.id, made.root_volume_id.unwrap());
    assert_eq!(
        (made.name.as_str(), made.state, made.vcpus, made.memory_mb, &made.metadata),
        ("first", SandboxStatus::Running, 1, 1024, &metadata)
    );
    assert_eq!((made.rootfs_size_gb.as_u64(), made.stack.as_str()), (Some(10), "base"));
    let shown = client.sandbox(&id).await.unwrap();
    assert_eq!(
        (shown.persistent, shown.disk_mb, shown.boot_mode),
        (true, 10_240, BootMode::Snapshot)
    );
    assert!(client.machines().await.unwrap().iter().any(|machine| machine.id == id));
    let held = client.volume(&named(root)).await.unwrap();
    assert_eq!(
        (held.kind, held.state, held.attached_to, held.size_mb),
        (VolumeKind::Root, VolumeState::Attached, Some(id), 10_240)
    );
    assert_eq!(refusal(client.delete_volume(&named(root)).await).0, ErrorCode::Conflict);

    run(client, &id, "echo not synced > /root/kept; (trap '' TERM; sleep 1000) >/dev/null 2>&1 &")
        .await;
    for _ in 0..2 {
        assert_eq!(client.stop_machine(&id).await.unwrap().state, SandboxStatus::Stopped);
    }
    assert_eq!(holder_of(&server, &disk(&server, root)), None);
    is_clean(&disk(&server, root)).await;
    for refused in [
        client.exec(&id, &command("true")).await.map(drop),
        client.pause(&id).await.map(drop),
        client.hibernate(&id).await.map(drop),
    ] {
        let (code, message) = refusal(refused);
        assert_eq!(code, ErrorCode::Conflict);
        assert!(message.contains("start"), "{message}");
    }
    for _ in 0..2 {
        assert_eq!(start(client, &id).await.state, SandboxStatus::Running);
    }
    assert_eq!(run(client, &id, "cat /root/kept; pgrep -c sleep; true").await, "not synced\n0\n");
    // Its clock is right, it has its own name, its disk is whole and has its size.
    let drift = run(client, &id, "echo $(($(date +%s) - 1))").await.trim().parse::<i64>().unwrap();
    assert!((time::OffsetDateTime::now_utc().unix_timestamp() - drift).abs() < 120, "{drift}");
    assert_eq!(run(client, &id, "hostname").await, format!("sandbox-{}\n", &id.to_string()[..8]));
    let blocks = run(client, &id, "df --output=size -B1M / | tail -1").await;
    assert!(blocks.trim().parse::<u64>().unwrap() > 9_000, "{blocks}");
    assert_eq!(client.sandbox(&id).await.unwrap().boot_mode, BootMode::Cold);
    client.delete_machine(&id, RootDisk::Goes).await.unwrap();
    assert_eq!(refusal(client.volume(&named(root)).await).0, ErrorCode::NotFound);
    assert!(!disk(&server, root).exists());

    let unknown = CreateMachine { stack: Some("no-such-stack".to_owned()), ..wanted("x") };
    assert_eq!(refusal(client.create_machine(&unknown).await).0, ErrorCode::NotFound);
    let no_name = CreateMachine { stack: Some("../x".to_owned()), ..wanted("x") };
    let refused = client.create_machine(&no_name).await.unwrap_err().to_string();
    assert!(refused.contains("`stack`"), "{refused}");
    for bad in [
        CreateMachine { vcpus: Some(0), ..wanted("x") },
        CreateMachine { memory_mb: Some(1), ..wanted("x") },
        CreateMachine { rootfs_size_gb: Some(0), ..wanted("x") },
    ] {
        assert_eq!(refusal(client.create_machine(&bad).await).0, ErrorCode::InvalidRequest);
    }
}

async fn a_sandbox_that_ended_by_itself_boots_again_with_its_volume(host: Host) {
    let room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let kept = volume(&server, "mounted").await;
    let mount = VolumeMount { name: "mounted".to_owned(), read_only: false, mount_path: None };
    let request = CreateSandbox { volumes: Some(vec![mount]), ..small() };
    let sandbox = host.sandbox_within(&room, &request).await;
    sandbox.write("/root/kept", "on disk").await;
    sandbox.write("/mnt/mounted/kept", "on the volume").await;
    // The system call itself, with nothing unmounted.
    let reboot = "sync; python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x01234567)'; sleep 20";
    let _ = client.exec(&sandbox.id, &command(reboot)).await;
    has_state(client, &sandbox.id, SandboxStatus::Stopped).await;
    assert_eq!(client.volume(&kept.name).await.unwrap().attached_to, Some(sandbox.id));
    start(client, &sandbox.id).await;
    let both = sandbox.run("cat /root/kept /mnt/mounted/kept; mountpoint -q /mnt/mounted").await;
    assert_eq!(both, "on diskon the volume");
    client.stop_machine(&sandbox.id).await.unwrap();
    is_clean(&disk(&server, kept.id)).await;
    sandbox.delete().await;
    client.delete_volume(&kept.name).await.unwrap();
}

async fn a_stop_under_heavy_writes_leaves_disks_in_order(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let (data, made) = (volume(&server, "busy").await, machine(&server, &wanted("busy")).await);
    let (id, root) = (made.id, made.root_volume_id.unwrap());
    client.stop_machine(&id).await.unwrap();
    client.attach_volume(&data.name, &id).await.unwrap();
    start(client, &id).await;
    // Each counts what it has synced; none of them listens to a request to end.
    let writers = "mkdir -p /mnt/busy /srv/busy; mount /dev/vdb /mnt/busy; for d in /mnt/busy /srv/busy; do \
        ( trap '' TERM; cd $d; n=0; while :; do n=$((n+1)); head -c $((n * 997 % 90000)) /dev/urandom > f$((n % 40)); \
          [ $((n % 20)) = 0 ] && sync . && echo $n > synced; done ) >/dev/null 2>&1 & done";
    run(client, &id, writers).await;
    until("both have written", PATIENCE, async || {
        let seen =
            client.exec(&id, &command("cat /mnt/busy/synced /srv/busy/synced")).await.unwrap();
        (seen.exit_code == 0).then_some(())
    })
    .await;
    assert_eq!(client.stop_machine(&id).await.unwrap().state, SandboxStatus::Stopped);
    is_clean(&disk(&server, root)).await;
    is_clean(&disk(&server, data.id)).await;
    let events = server.get(&format!("/v1/sandboxes/{id}/events")).await.text();
    assert!(!events.contains("did not power off"), "{events}");
    client.delete_machine(&id, RootDisk::Goes).await.unwrap();
    client.delete_volume(&data.name).await.unwrap();
}

async fn volumes_are_disks_in_the_order_in_which_they_were_attached(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let (one, two) = (volume(&server, "one").await, volume(&server, "two").await);
    let id = machine(&server, &wanted("ordered")).await.id;
    let (code, message) = refusal(client.attach_volume(&one.name, &id).await);
    assert!(code == ErrorCode::Conflict && message.contains("stop"), "{message}");
    client.stop_machine(&id).await.unwrap();
    let nobody = SandboxId::random();
    for (volume, machine) in [("no-such-volume", &id), ("one", &nobody)] {
        let answer = client.attach_volume(&volume.parse().unwrap(), machine).await;
        assert_eq!(refusal(answer).0, ErrorCode::NotFound);
    }
    for volume in [&two, &one, &two] {
        let attached = client.attach_volume(&volume.name, &id).await.unwrap();
        assert_eq!((attached.state, attached.attached_to), (VolumeState::Attached, Some(id)));
    }
    let devices = async || {
        let shown = client.machine(&id).await.unwrap().volumes.into_iter();
        shown
            .map(|held| (held.name.to_string(), held.device.unwrap(), held.mount_path))
            .collect::<Vec<_>>()
    };
    let of = |name: &str, device: &str| (name.to_owned(), device.to_owned(), None);
    assert_eq!(devices().await, [of("two", "/dev/vdb"), of("one", "/dev/vdc")]);
    start(client, &id).await;
    let write = "! grep -q /dev/vd[bc] /proc/mounts && mkdir -p /mnt/b /mnt/c && mount /dev/vdb /mnt/b && mount /dev/vdc /mnt/c && \
        echo two > /mnt/b/name && echo one > /mnt/c/name";
    run(client, &id, write).await;
    let answer = client.detach_volume(&one.name, None).await;
    assert!(refusal(answer).1.contains("stop"));

    client.stop_machine(&id).await.unwrap();
    for machine in [Some(&id), Some(&id), None] {
        let detached = client.detach_volume(&two.name, machine).await.unwrap();
        assert_eq!((detached.state, detached.attached_to), (VolumeState::Available, None));
    }
    is_clean(&disk(&server, two.id)).await;
    assert_eq!(devices().await, [of("one", "/dev/vdb")]);
    start(client, &id).await;
    assert_eq!(run(client, &id, "mount /dev/vdb /mnt/b && cat /mnt/b/name").await, "one\n");
    let swallowed = "for disk in vdc vdd; do dd if=/dev/zero of=/dev/$disk bs=4096 count=1 conv=fsync 2>/dev/null && echo $disk; done; true";
    assert_eq!(run(client, &id, swallowed).await, "");
    client.delete_machine(&id, RootDisk::Goes).await.unwrap();
    for volume in [one, two] {
        is_clean(&disk(&server, volume.id)).await;
        client.delete_volume(&volume.name).await.unwrap();
    }
}

async fn of_two_machines_that_race_for_a_volume_one_gets_it(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let prize = volume(&server, "prize").await;
    let mut machines = Vec::new();
    for name in ["left", "right"] {
        let id = machine(&server, &wanted(name)).await.id;
        client.stop_machine(&id).await.unwrap();
        machines.push(id);
    }
    for _ in 0..5 {
        let [left, right] = [0, 1].map(|index| client.attach_volume(&prize.name, &machines[index]));
        let answers: [_; 2] = tokio::join!(left, right).into();
        let winners: Vec<_> = answers.iter().filter_map(|answer| answer.as_ref().ok()).collect();
        assert_eq!(winners.len(), 1, "{answers:?}");
        let winner = winners[0].attached_to.unwrap();
        let loser = answers.into_iter().find(Result::is_err).unwrap();
        let (code, message) = refusal(loser);
        assert!(code == ErrorCode::Conflict && message.contains(&winner.to_string()), "{message}");
        let other = machines.iter().find(|id| **id != winner).unwrap();
        let answer = client.detach_volume(&prize.name, Some(other)).await;
        assert_eq!(refusal(answer).0, ErrorCode::Conflict, "it is another's");
        client.detach_volume(&prize.name, Some(&winner)).await.unwrap();
    }
    for id in machines {
        client.delete_machine(&id, RootDisk::Goes).await.unwrap();
    }
    client.delete_volume(&prize.name).await.unwrap();
}

async fn a_root_disk_is_kept_and_boots_another_machine(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let request = CreateMachine { rootfs_size_gb: Some(5), ..wanted("kept") };
    let made = machine(&server, &request).await;
    let root = named(made.root_volume_id.unwrap());
    run(client, &made.id, "echo important > /root/state").await;
    client.delete_machine(&made.id, RootDisk::Stays).await.unwrap();
    let kept = client.volume(&root).await.unwrap();
    assert_eq!(
        (kept.kind, kept.state, kept.size_mb),
        (VolumeKind::Root, VolumeState::Available, 5120)
    );
    is_clean(&disk(&server, kept.id)).await;

    let data = volume(&server, "no-root").await;
    let booted_from =
        |volume: &str| CreateMachine { root_volume_id: Some(volume.to_owned()), ..wanted("again") };
    let refused = client.create_machine(&booted_from("no-root")).await;
    assert_eq!(refusal(refused).0, ErrorCode::InvalidRequest);
    let refused = client.create_machine(&booted_from(&VolumeId::random().to_string())).await;
    assert_eq!(refusal(refused).0, ErrorCode::NotFound);
    client.delete_volume(&data.name).await.unwrap();

    let again = machine(&server, &booted_from(root.as_str())).await;
    assert_eq!((again.root_volume_id, again.rootfs_size_gb.as_u64()), (Some(kept.id), Some(5)));
    assert_eq!(run(client, &again.id, "cat /root/state").await, "important\n");
    let (code, message) = refusal(client.create_machine(&booted_from(root.as_str())).await);
    assert!(code == ErrorCode::Conflict && message.contains(&again.id.to_string()), "{message}");

    let larger = UpdateVolume { size_mb: None, size_gb: Some(6) };
    assert_eq!(refusal(client.update_volume(&root, &larger).await).0, ErrorCode::Conflict);
    assert_eq!(client.volume(&root).await.unwrap().size_mb, 5120);
    client.stop_machine(&again.id).await.unwrap();
    client.detach_volume(&root, Some(&again.id)).await.unwrap();
    assert_eq!(client.update_volume(&root, &larger).await.unwrap().size_mb, 6144);
    assert_eq!(client.machine(&again.id).await.unwrap().root_volume_id, None);
    let (code, message) = refusal(client.start_machine(&again.id).await);
    assert!(code == ErrorCode::Conflict && message.contains("root disk"), "{message}");
    client.attach_volume(&root, &again.id).await.unwrap();
    assert_eq!(client.machine(&again.id).await.unwrap().root_volume_id, Some(kept.id));
    assert_eq!(start(client, &again.id).await.state, SandboxStatus::Running);
    assert_eq!(run(client, &again.id, "cat /root/state").await, "important\n");
    client.delete_machine(&again.id, RootDisk::Goes).await.unwrap();
    assert_eq!(refusal(client.volume(&root).await).0, ErrorCode::NotFound);
}

async fn a_machine_that_dies_boots_again_from_what_it_had_flushed(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    let data = volume(&server, "freed").await;
    let made = machine(&server, &wanted("dies")).await;
    let root = made.root_volume_id.unwrap();
    client.stop_machine(&made.id).await.unwrap();
    client.attach_volume(&data.name, &made.id).await.unwrap();
    start(client, &made.id).await;
    let write = "mkdir -p /mnt/freed && mount /dev/vdb /mnt/freed && echo kept > /mnt/freed/file && echo kept > /root/file && \
        sync /root/file /mnt/freed/file && (while :; do date > /root/$RANDOM; done) >/dev/null 2>&1 &";
    run(client, &made.id, write).await;
    until("it is written", PATIENCE, async || {
        let seen = client.exec(&made.id, &command("cat /root/file /mnt/freed/file")).await.unwrap();
        (seen.stdout == "kept\nkept\n").then_some(())
    })
    .await;
    run(client, &made.id, "sync").await;
    kill_process(holder_of(&server, &disk(&server, root)).unwrap(), Signal::KILL).unwrap();
    has_state(client, &made.id, SandboxStatus::Failed).await;
    assert!(client.machine(&made.id).await.unwrap().error.is_some());
    let (code, message) = refusal(client.exec(&made.id, &command("true")).await);
    assert!(code == ErrorCode::Conflict && message.contains("start"), "{message}");
    until("its volume is free", PATIENCE, async || {
        (client.volume(&data.name).await.unwrap().state == VolumeState::Available).then_some(())
    })
    .await;
    is_clean(&disk(&server, data.id)).await;
    client.attach_volume(&data.name, &made.id).await.unwrap();
    let started = start(client, &made.id).await;
    assert_eq!((started.state, started.error), (SandboxStatus::Running, None));
    let read = "mount /dev/vdb /mnt/freed && cat /root/file /mnt/freed/file";
    assert_eq!(run(client, &made.id, read).await, "kept\nkept\n");
    client.delete_machine(&made.id, RootDisk::Goes).await.unwrap();
    client.delete_volume(&data.name).await.unwrap();
}

async fn a_server_that_is_killed_finds_its_machines_as_they_were(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(2).await;
    let (runs, stopped) =
        (machine(&server, &wanted("runs")).await, machine(&server, &wanted("stopped")).await);
    let data = volume(&server, "held").await;
    run(server.client(), &runs.id, "echo memory > /dev/shm/kept").await;
    run(server.client(), &stopped.id, "echo disk > /root/kept").await;
    server.client().stop_machine(&stopped.id).await.unwrap();
    server.client().attach_volume(&data.name, &stopped.id).await.unwrap();
    let before = server.client().machine(&stopped.id).await.unwrap();
    server.restart(End::Killed).await;
    let client = server.client();
    assert_eq!(client.machine(&stopped.id).await.unwrap(), before);
    assert_eq!(run(client, &runs.id, "cat /dev/shm/kept").await, "memory\n");

    // In the midst of both: what was begun comes to one of its ends.
    let (starting, stopping) = (client.clone(), client.clone());
    let ids = (stopped.id, runs.id);
    let both = tokio::spawn(async move {
        tokio::join!(starting.start_machine(&ids.0), stopping.stop_machine(&ids.1))
    });
    pause(Duration::from_millis(400)).await;
    server.restart(End::Killed).await;
    let _ = both.await.unwrap();
    let client = server.client();
    until("both have come to rest", PATIENCE, async || {
        let state = async |id| client.machine(id).await.unwrap().state;
        let (one, two) = (state(&stopped.id).await, state(&runs.id).await);
        let rests = |state| matches!(state, SandboxStatus::Stopped | SandboxStatus::Running);
        assert!(rests(one) && rests(two), "{one:?} {two:?}");
        (holder_of(&server, &disk(&server, runs.root_volume_id.unwrap())).is_some()
            == (two == SandboxStatus::Running))
            .then_some(())
    })
    .await;
    start(client, &stopped.id).await;
    assert_eq!(run(client, &stopped.id, "cat /root/kept").await, "disk\n");
    assert_eq!(client.volume(&data.name).await.unwrap().attached_to, Some(stopped.id));
    host.end(server).await;
}

async fn a_machine_in_any_state_is_deleted_without_a_trace(host: Host) {
    let server = Server::start().await;
    let _room = host.room(1).await;
    let client = server.client();
    let data = volume(&server, "stays").await;
    for state in
        ["stopped", "with a volume", "without a root disk", "hibernated", "starting", "failed"]
    {
        let made = machine(&server, &wanted(state)).await;
        let root = made.root_volume_id.unwrap();
        if state == "hibernated" {
            client.hibernate(&made.id).await.unwrap();
        } else if state == "failed" {
            kill_process(holder_of(&server, &disk(&server, root)).unwrap(), Signal::KILL).unwrap();
            has_state(client, &made.id, SandboxStatus::Failed).await;
        } else {
            client.stop_machine(&made.id).await.unwrap();
        }
        match state {
            "with a volume" => drop(client.attach_volume(&data.name, &made.id).await.unwrap()),
            "without a root disk" => {
                client.detach_volume(&named(root), Some(&made.id)).await.unwrap();
            }
            "starting" => {
                let (client, id) = (client.clone(), made.id);
                tokio::spawn(async move { client.start_machine(&id).await });
                until("it is being started", PATIENCE, async || {
                    holder_of(&server, &disk(&server, root)).map(drop)
                })
                .await;
            }
            _ => {}
        }
        client.delete_machine(&made.id, RootDisk::Goes).await.unwrap();
        assert_eq!(refusal(client.machine(&made.id).await).0, ErrorCode::NotFound, "{state}");
        if state == "without a root disk" {
            client.delete_volume(&named(root)).await.unwrap();
        }
        let volumes = client.volumes().await.unwrap();
        assert_eq!(volumes.len(), 1, "{state}: {volumes:?}");
        assert_eq!(volumes[0].state, VolumeState::Available, "{state}");
        let directories = fs::read_dir(server.data().join("volumes")).unwrap().count();
        assert_eq!(directories, 1, "{state}");
    }
    client.delete_volume(&data.name).await.unwrap();
    host.end(server).await;
}
