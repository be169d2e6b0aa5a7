//! What holds a virtual machine's process on the host, and the server itself.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use tests::{End, Footprint, Host, Server, small, suite, until};

suite! {
    a_machine_has_namespaces_of_its_own_and_an_empty_root,
    a_machine_has_no_capability_and_no_way_to_one,
    a_machine_holds_no_directory_and_no_file_of_another,
    a_machine_is_in_control_groups_that_go_with_it,
    a_restart_of_the_server_changes_nothing_of_it,
    the_server_has_only_the_capabilities_it_uses;
    soak:
}

/// Capabilities of servers, by `linux/capability.h`.
const SERVER: [u32; 17] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 18, 19, 21, 27, 29, 31];

fn proc(pid: u32, name: &str) -> PathBuf {
    Path::new("/proc").join(pid.to_string()).join(name)
}

fn status(pid: u32) -> BTreeMap<String, String> {
    let text = fs::read_to_string(proc(pid, "status")).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

async fn machine(host: &Host) -> (tests::Sandbox, u32) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let pid = server.machine_of(&sandbox.id).as_raw_nonzero().get().unsigned_abs();
    (sandbox, pid)
}

async fn a_machine_has_namespaces_of_its_own_and_an_empty_root(host: Host) {
    let (_sandbox, pid) = machine(&host).await;
    for namespace in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let of = |pid: u32| fs::read_link(proc(pid, &format!("ns/{namespace}"))).unwrap();
        assert_ne!(of(pid), of(std::process::id()), "{namespace}");
    }
    let list = |path: &str| -> Vec<_> {
        let entries = fs::read_dir(proc(pid, path)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!((list("root"), list("root/dev")), (vec!["dev".to_owned()], vec!["null".to_owned()]));
    assert_eq!(list("cwd"), ["dev"]);
    let mounts = fs::read_to_string(proc(pid, "mountinfo")).unwrap();
    assert_eq!(mounts.lines().count(), 2, "{mounts}");
}

async fn a_machine_has_no_capability_and_no_way_to_one(host: Host) {
    let (_sandbox, pid) = machine(&host).await;
    let status = status(pid);
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"));
    assert_eq!(status["NSpid"].split_whitespace().last(), Some("1"));
    let uid = status["Uid"].split_whitespace().next().unwrap();
    assert!(uid.parse::<u32>().unwrap() >= 1_900_000_000);
    let map = fs::read_to_string(proc(pid, "uid_map")).unwrap();
    assert_eq!(map.split_whitespace().collect::<Vec<_>>(), [uid, uid, "1"]);
}

async fn a_machine_holds_no_directory_and_no_file_of_another(host: Host) {
    let (sandbox, pid) = machine(&host).await;
    let (other, _) = machine(&host).await;
    for entry in fs::read_dir(proc(pid, "fd")).unwrap() {
        let path = entry.unwrap().path();
        // Events may be gone by now.
        let Ok(metadata) = fs::metadata(&path) else { continue };
        let target = fs::read_link(&path).unwrap().to_string_lossy().into_owned();
        assert!(!metadata.is_dir(), "{target}");
        assert!(!target.contains(&other.id.to_string()), "{target}");
        assert!(
            !target.contains("sandboxes") || target.contains(&sandbox.id.to_string()),
            "{target}"
        );
    }
}

async fn a_machine_is_in_control_groups_that_go_with_it(host: Host) {
    let (sandbox, pid) = machine(&host).await;
    let groups = fs::read_to_string(proc(pid, "cgroup")).unwrap();
    let uid = status(pid)["Uid"].split_whitespace().next().unwrap().to_owned();
    let server = host.server().await;
    let own: Vec<_> = Footprint::of(server.data())
        .control_groups
        .into_iter()
        .filter(|group| group.to_string_lossy().contains(&format!("/atoll-{uid}.")))
        .collect();
    assert!(!own.is_empty() && groups.contains(&format!("/atoll-{uid}.")), "{groups}");
    let limits: Vec<u64> = own
        .iter()
        .flat_map(|group| ["memory.max", "memory.limit_in_bytes"].map(|file| group.join(file)))
        .filter_map(|file| fs::read_to_string(file).ok()?.trim().parse().ok())
        .collect();
    let memory = sandbox.created.memory_mb << 20;
    assert!(limits.iter().all(|limit| (memory..memory + (1 << 30)).contains(limit)), "{limits:?}");
    // Its processor time is limited once it is up.
    let quotas: Vec<_> = own
        .iter()
        .flat_map(|group| ["cpu.max", "cpu.cfs_quota_us"].map(|file| group.join(file)))
        .filter(|file| file.exists())
        .collect();
    until("its processor time is limited", Duration::from_secs(30), async || {
        let limited = |file| fs::read_to_string(file).unwrap().starts_with("150000");
        quotas.iter().all(limited).then_some(())
    })
    .await;
    sandbox.delete().await;
    assert!(own.iter().all(|group| !group.exists()), "{own:?}");
}

async fn a_restart_of_the_server_changes_nothing_of_it(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let sandbox = server.create(&small()).await;
    let pid = server.machine_of(&sandbox.id).as_raw_nonzero().get().unsigned_abs();
    let groups = || fs::read_to_string(proc(pid, "cgroup")).unwrap();
    let before = groups();
    server.restart(End::Killed).await;
    assert_eq!(groups(), before);
    assert_eq!(status(pid)["NSpid"].split_whitespace().last(), Some("1"));
    host.end(server).await;
}

async fn the_server_has_only_the_capabilities_it_uses(host: Host) {
    let server = host.server().await;
    let status = status(server.process_id().as_raw_nonzero().get().unsigned_abs());
    let allowed = SERVER.iter().fold(0_u64, |set, number| set | 1 << number);
    for set in ["CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb"] {
        let held = u64::from_str_radix(&status[set], 16).unwrap();
        assert_eq!(held & !allowed, 0, "{set} {held:x}");
    }
}
