//! What the kernel gives: namespaces, control groups, devices, limits.

use std::{
    fs,
    io::ErrorKind,
    net::{SocketAddr, TcpListener},
    path::Path,
};

use rustix::process::{PidfdFlags, Resource, getpid, getrlimit, pidfd_open};

use super::{Finding, output};

/// Two hundred machines with their connections.
const OPEN_FILES: u64 = 16_384;
const CONTROLLERS: [&str; 4] = ["cpu", "memory", "pids", "io"];

pub(super) async fn namespaces(is_root: bool) -> Vec<Finding> {
    if output("unshare", &["--version"]).await.is_none() {
        return vec![Finding::fail(
            "namespaces",
            "unshare cannot be run",
            "apt-get install util-linux",
        )];
    }
    let mut findings = Vec::new();
    let tried = async |kinds: &[&str]| {
        let arguments: Vec<&str> = kinds.iter().copied().chain(["true"]).collect();
        output("unshare", &arguments).await.is_some_and(|(works, _)| works)
    };
    findings.push(if !is_root {
        Finding::warn("namespaces", "not tried", "run it as root")
    } else if tried(&["--net", "--mount", "--pid", "--ipc", "--fork"]).await {
        Finding::ok("namespaces", "network, mount, pid and ipc")
    } else {
        Finding::fail(
            "namespaces",
            "network, mount, pid or ipc namespaces cannot be made",
            "each machine has a network of its own: run this outside a container, or in a privileged one",
        )
    });
    findings.push(if tried(&["--user", "--map-root-user"]).await {
        Finding::ok("user namespaces", "can be made")
    } else {
        Finding::warn(
            "user namespaces",
            "cannot be made",
            "QEMU is confined without them, by its own user and the other namespaces; allow them (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns) for one wall more",
        )
    });
    findings
}

pub(super) fn tun(is_root: bool) -> Finding {
    const CHECK: &str = "/dev/net/tun";
    match fs::File::options().read(true).write(true).open(CHECK) {
        Ok(_) => Finding::ok(CHECK, "can be opened"),
        Err(error) if error.kind() == ErrorKind::PermissionDenied && !is_root => {
            Finding::warn(CHECK, "not tried", "run it as root")
        }
        Err(error) => Finding::fail(
            CHECK,
            error.to_string(),
            "load the module tun, or pass the device into the container",
        ),
    }
}

pub(super) fn cgroups(is_root: bool) -> Finding {
    const CHECK: &str = "cgroups";
    let root = Path::new("/sys/fs/cgroup");
    if let Ok(text) = fs::read_to_string(root.join("cgroup.controllers")) {
        let lacking: Vec<_> = CONTROLLERS
            .into_iter()
            .filter(|name| !text.split_whitespace().any(|found| found == *name))
            .collect();
        if !lacking.is_empty() {
            return Finding::warn(
                CHECK,
                format!("v2, without {}", lacking.join(", ")),
                "let the host delegate these controllers (under systemd: Delegate=yes): machines have no such limit without",
            );
        }
        return match is_delegated(root) {
            true => Finding::ok(CHECK, format!("v2 with {}", CONTROLLERS.join(", "))),
            false if !is_root => {
                Finding::warn(CHECK, "v2", "run it as root to see whether groups can be made")
            }
            false => Finding::warn(
                CHECK,
                "v2, but no group can be made",
                "mount /sys/fs/cgroup for writing, or set Delegate=yes in the unit",
            ),
        };
    }
    let found: Vec<_> = ["cpu", "memory", "pids", "blkio"]
        .into_iter()
        .filter(|name| root.join(name).is_dir())
        .collect();
    if found.contains(&"memory") {
        let advice = "boot with systemd.unified_cgroup_hierarchy=1: version 2 counts memory and disk together";
        return if is_root && !is_delegated(&root.join("memory")) {
            Finding::warn(
                CHECK,
                "v1, but no group can be made",
                "mount the controllers for writing",
            )
        } else {
            Finding {
                advice: Some(advice.to_owned()),
                ..Finding::ok(CHECK, format!("v1 with {}", found.join(", ")))
            }
        };
    }
    Finding::warn(
        CHECK,
        "none",
        "machines are limited by rlimits alone: mount cgroup2 at /sys/fs/cgroup",
    )
}

/// Tried, for only the kernel knows.
fn is_delegated(hierarchy: &Path) -> bool {
    let group = hierarchy.join(format!("atoll-doctor-{}", std::process::id()));
    fs::create_dir(&group).and_then(|()| fs::remove_dir(&group)).is_ok()
}

pub(super) fn features() -> Finding {
    const CHECK: &str = "kernel";
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    if pidfd_open(getpid(), PidfdFlags::empty()).is_err() {
        return Finding::fail(
            CHECK,
            format!("{release}, without pidfd"),
            "run Linux 5.10 or newer",
        );
    }
    let mut parts = release.split(['.', '-']).map_while(|part| part.parse::<u32>().ok());
    let version = (parts.next().unwrap_or(0), parts.next().unwrap_or(0));
    if version < (6, 7) {
        let advice =
            "run Linux 6.7 or newer: snapshots find changed pages faster with PAGEMAP_SCAN";
        return Finding {
            advice: Some(advice.to_owned()),
            ..Finding::ok(CHECK, format!("{release}, with pidfd"))
        };
    }
    Finding::ok(CHECK, format!("{release}, with pidfd and PAGEMAP_SCAN"))
}

pub(super) fn open_files() -> Finding {
    const CHECK: &str = "open files";
    let limit = getrlimit(Resource::Nofile);
    match limit.maximum {
        Some(most) if most < OPEN_FILES => Finding::warn(
            CHECK,
            format!("at most {most}"),
            format!(
                "raise the limit to {OPEN_FILES} or more (LimitNOFILE= in the unit, ulimit -n)"
            ),
        ),
        Some(most) => Finding::ok(CHECK, format!("at most {most}")),
        None => Finding::ok(CHECK, "no limit"),
    }
}

pub(super) fn port(listen: SocketAddr) -> Finding {
    const CHECK: &str = "port";
    match TcpListener::bind(listen) {
        Ok(_) => Finding::ok(CHECK, format!("{listen} is free")),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Finding::warn(
            CHECK,
            format!("{listen} is in use"),
            "fine if that is your server; else name another with --listen",
        ),
        Err(error) => {
            Finding::warn(CHECK, format!("{listen}: {error}"), "name another with --listen")
        }
    }
}
