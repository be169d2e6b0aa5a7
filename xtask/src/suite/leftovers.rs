//! What a test may leave behind on a host: processes, networks, mounts, files. Taken before and after, and compared.

use std::{collections::BTreeSet, fs, path::Path, process::Command, time::Duration};

use crate::{server::pool, wait};

/// Programs of which none may be left.
const PROGRAMS: &[&str] = &["atoll", "atoll-agent", "postgres", "qemu-system-x86"];
/// Below the pool: what stays on purpose.
const KEPT: &[&str] = &["cache"];
/// Below `/run`: the claims of instance numbers, which the next start of a server sweeps, and the set-up's lock.
const KEPT_IN_RUN: &[&str] = &["atoll", "atoll-setup.lock"];

#[derive(Debug)]
pub(crate) struct Inventory(BTreeSet<String>);

impl Inventory {
    pub(crate) fn take() -> Self {
        let mut things = BTreeSet::new();
        let mut add = |kind: &str, names: Vec<String>| {
            things.extend(names.iter().map(|name| format!("{kind} {name}")))
        };
        add("process", processes());
        add("network namespace", names_in(Path::new("/run/netns")));
        add("network link", names_in(Path::new("/sys/class/net")));
        add("mount", mounts());
        add("loop device", loop_devices());
        add("nftables", nftables());
        add("cgroup", cgroups());
        let run = names_in(Path::new("/run")).into_iter();
        let ours =
            run.filter(|name| name.starts_with("atoll") && !KEPT_IN_RUN.contains(&name.as_str()));
        add("run-time file", ours.collect());
        let pool = pool();
        add(
            "file",
            names_in(&pool).into_iter().filter(|name| !KEPT.contains(&name.as_str())).collect(),
        );
        add("half-made file", names_in(&pool.join("cache/temporary")));
        Self(things)
    }

    /// What is there now and was not then. Waits a little: networks are taken down behind the answer to a delete.
    pub(crate) fn left_since(&self) -> anyhow::Result<Vec<String>> {
        for _ in 0..30 {
            if self.new_things().is_empty() {
                break;
            }
            wait::check_interrupt()?;
            wait::pause(Duration::from_millis(500));
        }
        Ok(self.new_things())
    }

    fn new_things(&self) -> Vec<String> {
        Self::take().0.difference(&self.0).cloned().collect()
    }
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn processes() -> Vec<String> {
    let mut processes = Vec::new();
    for pid in names_in(Path::new("/proc")) {
        let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        if PROGRAMS.contains(&program.trim()) {
            processes.push(format!("{pid} {}", program.trim()));
        }
    }
    processes
}

fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    text.lines().filter_map(|line| line.split(' ').nth(1)).map(str::to_owned).collect()
}

/// With what is behind them; one without is free.
fn loop_devices() -> Vec<String> {
    let mut devices = Vec::new();
    for name in names_in(Path::new("/sys/block")) {
        if let Ok(file) = fs::read_to_string(format!("/sys/block/{name}/loop/backing_file")) {
            devices.push(format!("{name} {}", file.trim()));
        }
    }
    devices
}

fn nftables() -> Vec<String> {
    let output = Command::new("nft")
        .args(["list", "tables"])
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    String::from_utf8_lossy(&output).lines().map(str::to_owned).collect()
}

/// Two levels below the root of each hierarchy: where a server makes its own.
fn cgroups() -> Vec<String> {
    let mut groups = Vec::new();
    let root = Path::new("/sys/fs/cgroup");
    for first in names_in(root) {
        for second in names_in(&root.join(&first)) {
            let path = Path::new(&first).join(&second);
            if second.contains("atoll") {
                groups.extend(
                    names_in(&root.join(&path))
                        .iter()
                        .map(|third| path.join(third).display().to_string()),
                );
            }
        }
    }
    groups
}
