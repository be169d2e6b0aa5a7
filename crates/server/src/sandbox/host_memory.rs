//! The memory of the host, or of the control group that this server was put into, if that is less.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostMemory {
    pub(crate) total: u64,
    /// What a new process could have without anything being swapped out.
    pub(crate) available: u64,
}

impl HostMemory {
    /// # Errors
    /// There is no `/proc`, or it is not that of Linux.
    pub(crate) fn measure() -> io::Result<Self> {
        let host = of_host(&fs::read_to_string("/proc/meminfo")?).ok_or_else(|| {
            io::Error::new(io::ErrorKind::InvalidData, "/proc/meminfo without MemAvailable")
        })?;
        Ok(groups_of_this_process().iter().filter_map(|group| group.measure()).fold(
            host,
            |least, group| Self {
                total: least.total.min(group.total),
                available: least.available.min(group.available),
            },
        ))
    }
}

/// What a process has for itself, in memory or swapped out: a few microseconds, where `smaps` takes milliseconds. `None`
/// when it has ended.
pub(crate) fn private_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    Some(kib(&status, "RssAnon:")? + kib(&status, "VmSwap:").unwrap_or(0))
}

fn of_host(meminfo: &str) -> Option<HostMemory> {
    Some(HostMemory {
        total: kib(meminfo, "MemTotal:")?,
        available: kib(meminfo, "MemAvailable:")?,
    })
}

/// In bytes.
fn kib(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    directory: PathBuf,
    version: Version,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Group {
    /// `None` where it has no limit.
    fn measure(&self) -> Option<HostMemory> {
        let read = |name: &str| fs::read_to_string(self.directory.join(name)).ok();
        let number = |name: &str| read(name)?.trim().parse::<u64>().ok();
        let (limit, used, idle_files) = match self.version {
            Version::One => (
                number("memory.limit_in_bytes"),
                number("memory.usage_in_bytes")?,
                "total_inactive_file",
            ),
            Version::Two => (
                // `max` is no number.
                [number("memory.max"), number("memory.high")].into_iter().flatten().min(),
                number("memory.current")?,
                "inactive_file",
            ),
        };
        let reclaimable = field(&read("memory.stat").unwrap_or_default(), idle_files);
        let limit = limit?;
        Some(HostMemory {
            total: limit,
            available: limit.saturating_sub(used.saturating_sub(reclaimable)),
        })
    }
}

fn field(stat: &str, name: &str) -> u64 {
    let value = |line: &str| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok();
    stat.lines().find_map(value).unwrap_or(0)
}

/// The control group of this process and those around it: each may have a limit.
fn groups_of_this_process() -> Vec<Group> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    groups(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

fn groups(cgroup: &str, mountinfo: &str) -> Vec<Group> {
    let mut found = Vec::new();
    for line in cgroup.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version = match controllers {
            "" => Version::Two,
            _ if controllers.split(',').any(|controller| controller == "memory") => Version::One,
            _ => continue,
        };
        let Some((root, mounted)) = mount_of(mountinfo, version) else { continue };
        // In a container the mount shows only a part of the tree.
        let path = Path::new(path);
        let inside = path.strip_prefix(&root).or_else(|_| path.strip_prefix("/"));
        let Ok(inside) = inside else { continue };
        let directory = mounted.join(inside);
        found.extend(
            directory
                .ancestors()
                .take_while(|ancestor| ancestor.starts_with(&mounted))
                .map(|ancestor| Group { directory: ancestor.to_owned(), version }),
        );
    }
    found
}

/// What of the tree is mounted, and where.
fn mount_of(mountinfo: &str, version: Version) -> Option<(PathBuf, PathBuf)> {
    mountinfo.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (name, _, options) = (kind.next()?, kind.next()?, kind.next()?);
        let fits = match version {
            Version::One => name == "cgroup" && options.split(',').any(|option| option == "memory"),
            Version::Two => name == "cgroup2",
        };
        let mut place = place.split(' ').skip(3);
        let (root, mounted) = (place.next()?, place.next()?);
        fits.then(|| (PathBuf::from(root), PathBuf::from(mounted)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_has_memory_and_this_process_some_of_it() {
        let memory = HostMemory::measure().unwrap();
        assert!(memory.total > 0 && memory.available <= memory.total, "{memory:?}");
        let own = private_bytes(std::process::id()).unwrap();
        assert!(own > 0 && own < memory.total);
        assert_eq!(private_bytes(u32::MAX), None);
    }

    #[test]
    fn groups_are_found_from_the_own_one_upwards() {
        let two = groups(
            "0::/system.slice/atoll.service\n",
            "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n",
        );
        let directories: Vec<_> =
            two.iter().map(|group| group.directory.to_str().unwrap()).collect();
        assert_eq!(
            directories,
            [
                "/sys/fs/cgroup/system.slice/atoll.service",
                "/sys/fs/cgroup/system.slice",
                "/sys/fs/cgroup"
            ]
        );
        // A container that sees only its own part of the tree, by the older interface.
        let one = groups(
            "8:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n",
            "40 35 0:36 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        );
        assert_eq!(
            one,
            [Group { directory: "/sys/fs/cgroup/memory".into(), version: Version::One }]
        );
        assert_eq!(groups("", ""), []);
    }

    #[test]
    fn a_group_has_what_its_limit_leaves() {
        let directory = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).unwrap();
        let group = |version| Group { directory: directory.path().to_owned(), version };
        write("memory.current", "700\n");
        write("memory.max", "max\n");
        write("memory.stat", "anon 500\ninactive_file 150\nactive_file 50\n");
        assert_eq!(group(Version::Two).measure(), None);
        write("memory.max", "1000\n");
        assert_eq!(group(Version::Two).measure(), Some(HostMemory { total: 1000, available: 450 }));
        write("memory.limit_in_bytes", "600\n");
        write("memory.usage_in_bytes", "700\n");
        assert_eq!(group(Version::One).measure(), Some(HostMemory { total: 600, available: 0 }));
    }
}
