//! Who keeps a volume from being unmounted, in words for its user.

use std::path::{Path, PathBuf};

use rustix::fs::stat;

use super::file_systems::others_mounts;
use super::mountinfo::{self, Device};
use super::process::{self, Process};
use crate::failure::shown;

/// The first that is found.
pub(crate) fn holder(device: Device, points: &[Vec<u8>]) -> Option<String> {
    on_top(device, points).or_else(|| process_with(device)).or_else(|| loop_device(points))
}

/// Another file system is mounted on a directory of it.
fn on_top(device: Device, points: &[Vec<u8>]) -> Option<String> {
    let mounts = mountinfo::read("self").ok()?;
    let above = mounts.iter().find(|mounted| {
        mounted.device != device
            && points.iter().any(|point| {
                mounted.point.strip_prefix(&point[..]).is_some_and(|rest| rest.starts_with(b"/"))
            })
    })?;
    Some(format!("what is mounted at {}", shown(&above.point)))
}

fn process_with(device: Device) -> Option<String> {
    let has_open = process::all().find(|pid| uses(*pid, device));
    let has_mounted = || {
        let holds = |(pid, mounts): (i32, Vec<mountinfo::Mounted>)| {
            mounts.iter().any(|mounted| mounted.device == device).then_some(pid)
        };
        others_mounts(process::all()).find_map(holds)
    };
    let pid = has_open.or_else(has_mounted)?;
    Some(Process::of(pid).map_or_else(|| format!("process {pid}"), |process| process.to_string()))
}

/// By an open file, a directory it is in, its program, or a file in its memory. The last is asked for last: the answer may
/// have to wait for a process that cannot answer.
fn uses(pid: i32, device: Device) -> bool {
    let directory = PathBuf::from(format!("/proc/{pid}"));
    let on_device = |path: &Path| stat(path).is_ok_and(|stat| Device::of(stat.st_dev) == device);
    if ["cwd", "root", "exe"].iter().any(|link| on_device(&directory.join(link))) {
        return true;
    }
    let open = std::fs::read_dir(directory.join("fd")).into_iter().flatten().flatten();
    // What a descriptor of the disk itself leads to lies on no volume.
    let is_disk = |path: &Path| {
        stat(path).is_ok_and(|stat| stat.st_rdev != 0 && Device::of(stat.st_rdev) == device)
    };
    if open.map(|entry| entry.path()).any(|path| on_device(&path) || is_disk(&path)) {
        return true;
    }
    let number = format!("{:02x}:{:02x}", device.major, device.minor);
    let memory = std::fs::read_to_string(directory.join("maps")).unwrap_or_default();
    memory.lines().any(|line| line.split_ascii_whitespace().nth(3) == Some(&number[..]))
}

/// A loop device shows one of its files.
fn loop_device(points: &[Vec<u8>]) -> Option<String> {
    std::fs::read_dir("/sys/block").ok()?.flatten().find_map(|entry| {
        let file = std::fs::read(entry.path().join("loop/backing_file")).ok()?;
        let inside = points
            .iter()
            .any(|point| file.strip_prefix(&point[..]).is_some_and(|rest| rest.starts_with(b"/")));
        inside.then(|| format!("/dev/{}", entry.file_name().to_string_lossy()))
    })
}
