use std::process::Command;

use super::*;
use crate::spec::{Accelerator, MachineSpec, Shape};

const LIMITS: fn() -> Limits = || {
    Limits::of(&MachineSpec {
        shape: Shape { cpus: 1, memory_mib: 256 },
        accelerator: Accelerator::Kvm,
    })
};

/// As a kernel would show it, with these files.
fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = directory.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    directory
}

fn bases(mounted: &tempfile::TempDir, own: &str) -> Vec<(Version, String)> {
    let found = Cgroups::find_in(mounted.path(), own);
    let relative = |path: &Path| path.strip_prefix(mounted.path()).unwrap().display().to_string();
    found.bases().iter().map(|(version, base)| (*version, relative(base))).collect()
}

#[test]
fn a_delegated_group_gets_the_machines_beside_its_server() {
    let service = "system.slice/atoll.service";
    let host = tree(&[
        ("cgroup.controllers", "cpuset cpu io memory pids"),
        ("cgroup.subtree_control", "memory pids"),
        (&format!("{service}/cgroup.controllers"), "cpu io memory pids"),
        (&format!("{service}/cgroup.subtree_control"), ""),
        (&format!("{service}/server/cgroup.procs"), ""),
    ]);
    let own = format!("0::/{service}/server\n");
    assert_eq!(bases(&host, &own), [(Version::Two, service.to_owned())]);
    // A real one adds up what is written; this one shows the last.
    let shared = fs::read_to_string(host.path().join(service).join("cgroup.subtree_control"));
    assert_eq!(shared.unwrap(), "+io");
    assert_eq!(
        fs::read_to_string(host.path().join("cgroup.subtree_control")).unwrap(),
        "memory pids"
    );
}

#[test]
fn without_a_delegated_group_there_is_one_at_the_top() {
    let host = tree(&[
        ("cgroup.controllers", "cpu io memory pids"),
        ("cgroup.subtree_control", "cpu io memory pids"),
        ("user.slice/session-1.scope/cgroup.procs", ""),
    ]);
    let own = "0::/user.slice/session-1.scope\n";
    assert_eq!(bases(&host, own), [(Version::Two, "atoll".to_owned())]);
    assert_eq!(
        bases(&host, own),
        [(Version::Two, "atoll".to_owned())],
        "a second server finds it there"
    );
}

#[test]
fn hierarchies_of_version_one_are_used_where_the_server_is_in_them() {
    let host = tree(&[
        ("memory/cgroup.procs", ""),
        ("memory/some/where/cgroup.procs", ""),
        ("cpu/cgroup.procs", ""),
        ("pids/cgroup.procs", ""),
        ("freezer/cgroup.procs", ""),
        ("unified/cgroup.controllers", ""),
    ]);
    let own =
        "9:name=systemd:/\n6:freezer:/\n4:memory:/some/where\n2:cpu,cpuacct:/\n3:pids:/\n0::/\n";
    let expected = [("memory/some/where", 0), ("cpu", 0), ("pids", 0)];
    assert_eq!(bases(&host, own), expected.map(|(path, _)| (Version::One, path.to_owned())));
}

#[test]
fn a_host_without_control_groups_has_none() {
    assert_eq!(bases(&tree(&[]), "0::/\n"), []);
    assert_eq!(bases(&tree(&[]), ""), []);
    let group = Cgroups::default().create(1_899_999_100, &LIMITS()).unwrap();
    assert_eq!(group.doors().unwrap().len(), 0);
    group.remove();
}

#[test]
fn a_process_is_limited_in_its_group_and_the_group_is_found_again_and_removed() {
    let cgroups = Cgroups::find();
    let uid = 1_899_999_101;
    // A run that failed may have left some.
    remove_groups(&(uid..=uid), |_| false).unwrap();
    let group = cgroups.create(uid, &LIMITS()).unwrap();
    let paths: Vec<PathBuf> = group.paths().map(Path::to_owned).collect();
    assert!(!paths.is_empty(), "this test needs control groups");
    group.limit_processor().unwrap();
    let quotas: Vec<_> = paths
        .iter()
        .flat_map(|path| ["cpu.max", "cpu.cfs_quota_us"].map(|file| path.join(file)))
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    assert!(quotas.iter().all(|quota| quota.starts_with("150000")), "{quotas:?}");
    let mut process = Command::new("sleep").arg("600").spawn().unwrap();
    for mut door in group.doors().unwrap() {
        door.write_all(process.id().to_string().as_bytes()).unwrap();
    }
    let mut found: Vec<_> = Group::of(process.id()).paths().map(Path::to_owned).collect();
    found.sort();
    let mut expected = paths.clone();
    expected.sort();
    assert_eq!(found, expected);
    let memory = (640_u64 << 20).to_string();
    let limits: Vec<_> = paths
        .iter()
        .flat_map(|path| ["memory.max", "memory.limit_in_bytes"].map(|file| path.join(file)))
        .filter_map(|file| fs::read_to_string(file).ok())
        .collect();
    assert!(limits.iter().all(|limit| limit.trim() == memory), "{limits:?}");
    process.kill().unwrap();
    process.wait().unwrap();
    // The numbers beside it are other tests'.
    assert_eq!(groups_of(&(uid..=uid)), BTreeSet::from([uid]));
    assert_eq!(remove_groups(&(uid..=uid), |_| true).unwrap(), 0);
    assert_eq!(remove_groups(&(uid..=uid), |_| false).unwrap(), paths.len());
    assert!(paths.iter().all(|path| !path.exists()));
    group.remove();
}

#[test]
fn groups_of_version_two_work_also_without_controllers() {
    let unified = Path::new("/sys/fs/cgroup/unified");
    if !unified.join("cgroup.procs").exists() {
        return;
    }
    let directory = unified.join(format!("{PREFIX}1899999102.0"));
    fs::create_dir(&directory).unwrap();
    let group = Group { directories: vec![(Version::Two, directory.clone())] };
    let mut process = Command::new("sleep").arg("600").spawn().unwrap();
    for mut door in group.doors().unwrap() {
        door.write_all(process.id().to_string().as_bytes()).unwrap();
    }
    let entered = Group::of(process.id()).paths().any(|path| path == directory);
    process.kill().unwrap();
    process.wait().unwrap();
    group.remove();
    assert!(entered && !directory.exists());
}
