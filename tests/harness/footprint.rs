//! What a server has on its host: processes, networks, mounts, files. All of it carries the server's number or path,
//! so other servers on the host do not disturb the count.

use std::{
    collections::BTreeSet,
    fs, io,
    ops::RangeInclusive,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

/// As `server::sandbox::site` deals them out.
const UIDS_FROM: u32 = 1_900_000_000;
const SLOTS: u32 = 1024;

/// Directories below the data directory whose entries belong to sandboxes and machines.
const PER_SANDBOX: [&str; 3] = ["sandboxes", "machines", "temporary"];

/// Each thing by its kind and name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Footprint {
    pub processes: BTreeSet<u32>,
    pub control_groups: BTreeSet<PathBuf>,
    pub namespaces: BTreeSet<String>,
    pub links: BTreeSet<String>,
    pub mounts: BTreeSet<String>,
    pub loop_devices: BTreeSet<String>,
    pub tables: BTreeSet<String>,
    pub files: BTreeSet<String>,
}

impl Footprint {
    /// Of the server of this data directory, itself left out.
    pub fn of(data: &Path) -> Self {
        let number = instance(data);
        let belongs = |name: &str, prefix: &str| {
            number.is_some_and(|number| name.starts_with(&prefix.replace('#', &number.to_string())))
        };
        let path = data.to_string_lossy().into_owned();
        Self {
            processes: processes(data, number),
            control_groups: number.map(control_groups).unwrap_or_default(),
            namespaces: names_in("/run/netns").filter(|name| belongs(name, "atoll-#-")).collect(),
            links: names_in("/sys/class/net").filter(|name| belongs(name, "at#.")).collect(),
            mounts: read("/proc/self/mounts")
                .lines()
                .filter_map(|line| line.split(' ').nth(1))
                .filter(|place| place.starts_with(&path) || belongs(place, "/run/netns/atoll-#-"))
                .map(str::to_owned)
                .collect(),
            loop_devices: names_in("/sys/block")
                .filter(|name| {
                    read(&format!("/sys/block/{name}/loop/backing_file")).starts_with(&path)
                })
                .collect(),
            tables: output_of("nft", &["list", "tables"])
                .lines()
                .filter_map(|line| line.split(' ').nth(2))
                .filter(|table| number.is_some_and(|number| *table == format!("atoll_{number}")))
                .map(str::to_owned)
                .collect(),
            files: PER_SANDBOX
                .iter()
                .flat_map(|kind| {
                    names_in(data.join(kind)).map(move |name| format!("{kind}/{name}"))
                })
                .collect(),
        }
    }

    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// How many of each kind: equal for two moments at which the server holds as much.
    pub fn counts(&self) -> [usize; 7] {
        [
            self.processes.len(),
            self.control_groups.len(),
            self.namespaces.len(),
            self.links.len(),
            self.mounts.len(),
            self.loop_devices.len(),
            self.files.len(),
        ]
    }

    /// The server itself, at once: its machines are in the footprint that it leaves.
    pub(crate) fn end_server(data: &Path) {
        let path = data.to_string_lossy();
        for pid in names_in("/proc").filter_map(|name| name.parse::<i32>().ok()) {
            let arguments = read(&format!("/proc/{pid}/cmdline"));
            if arguments.contains(&*path) && arguments.contains("\0serve\0") {
                // It may have ended meanwhile.
                let _ = Pid::from_raw(pid).map(|pid| kill_process(pid, Signal::KILL));
            }
        }
    }

    /// By hand, after a server that could not do it: the next test begins on a clean host.
    pub fn remove(&self) {
        for pid in &self.processes {
            if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
                // It may have ended meanwhile.
                let _ = kill_process(pid, Signal::KILL);
            }
        }
        for group in &self.control_groups {
            // Its processes have been told to end.
            for _ in 0..50 {
                let busy = fs::remove_dir(group)
                    .is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy);
                if !busy {
                    break;
                }
                std::thread::park_timeout(Duration::from_millis(100));
            }
        }
        for namespace in &self.namespaces {
            output_of("ip", &["netns", "delete", namespace]);
        }
        for link in &self.links {
            output_of("ip", &["link", "delete", link]);
        }
        for table in &self.tables {
            output_of("nft", &["delete", "table", "inet", table]);
        }
        for mount in &self.mounts {
            output_of("umount", &["--lazy", mount]);
        }
    }
}

/// The number that the host's things of this server carry; `None` before its first start.
fn instance(data: &Path) -> Option<u32> {
    fs::read_to_string(data.join("instance")).ok()?.trim().parse().ok()
}

/// The uids of its machines.
fn users_of(instance: u32) -> RangeInclusive<u32> {
    let first = UIDS_FROM + instance * SLOTS;
    first..=first + SLOTS - 1
}

/// Of its machines, in any hierarchy.
fn control_groups(instance: u32) -> BTreeSet<PathBuf> {
    let users = users_of(instance);
    let mut found = BTreeSet::new();
    let mut ahead = vec![PathBuf::from("/sys/fs/cgroup")];
    while let Some(directory) = ahead.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let user = name.strip_prefix("atoll-").and_then(|rest| rest.split('.').next());
            if user.and_then(|user| user.parse().ok()).is_some_and(|user| users.contains(&user)) {
                found.insert(entry.path());
            } else if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                ahead.push(entry.path());
            }
        }
    }
    found
}

/// Those of its machines' users, and all that were started with its path, but the server itself.
fn processes(data: &Path, instance: Option<u32>) -> BTreeSet<u32> {
    let users = instance.map(users_of);
    let path = data.to_string_lossy().into_owned();
    let pids = names_in("/proc").filter_map(|name| name.parse::<u32>().ok());
    pids.filter(|pid| {
        let of_a_machine = || users.as_ref().is_some_and(|users| is_of(*pid, users));
        let started_for_it = || {
            let arguments = read(&format!("/proc/{pid}/cmdline"));
            arguments.contains(&path) && !arguments.contains("\0serve\0")
        };
        of_a_machine() || started_for_it()
    })
    .collect()
}

fn is_of(pid: u32, users: &RangeInclusive<u32>) -> bool {
    read(&format!("/proc/{pid}/status"))
        .lines()
        .find_map(|line| line.strip_prefix("Uid:"))
        .and_then(|ids| ids.split_whitespace().next()?.parse().ok())
        .is_some_and(|uid| users.contains(&uid))
}

fn names_in(directory: impl Into<PathBuf>) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory.into()).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned())
}

/// Empty where there is none: processes and devices go at any time.
fn read(path: &str) -> String {
    fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default()
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).stderr(Stdio::null()).output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}
