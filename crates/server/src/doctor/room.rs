//! Disk and memory.

use std::path::{Path, PathBuf};

use rustix::fs::statvfs;
use store::{Layout, clone::can_reflink, pool};

use super::Finding;

/// The built-in templates and their bakes, and some sandboxes.
const ROOM: u64 = 12 << 30;
const LEAST_ROOM: u64 = 2 << 30;
const INODES: u64 = 20_000;
const MEMORY: u64 = 4 << 30;
const LEAST_MEMORY: u64 = 1 << 30;

pub(super) async fn pool(layout: Layout) -> Vec<Finding> {
    let looked = tokio::task::spawn_blocking(move || look(&layout)).await;
    looked.unwrap_or_else(|error| {
        vec![Finding::fail("pool", error.to_string(), "look at the disk: something hangs")]
    })
}

fn look(layout: &Layout) -> Vec<Finding> {
    // What is not there yet is made below what is.
    let data = existing(layout.data());
    let cache = existing(layout.cache());
    let mut findings = vec![reflinks(&data)];
    match pool::is_same_file_system(&data, &cache) {
        Ok(true) => {}
        Ok(false) => findings.push(Finding::warn(
            "pool",
            format!("{} and {} are on different file systems", data.display(), cache.display()),
            "put --data-dir and --cache-dir on one: disks are copied instead of cloned otherwise",
        )),
        Err(error) => {
            findings.push(Finding::fail("pool", error.to_string(), "check its permissions"))
        }
    }
    findings.push(space(&data));
    findings
}

fn existing(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.ancestors().find(|path| path.is_dir()).unwrap_or(Path::new("/")).to_owned()
}

fn reflinks(directory: &Path) -> Finding {
    const CHECK: &str = "reflinks";
    let at = directory.display();
    match can_reflink(directory) {
        Ok(true) => Finding::ok(CHECK, format!("{at} can share blocks between files")),
        Ok(false) => Finding::warn(
            CHECK,
            format!("{at} cannot share blocks between files"),
            "every create copies a whole disk: use XFS or btrfs, or let scripts/setup.sh (`make setup`) make and mount an image with XFS",
        ),
        Err(error) => Finding::warn(
            CHECK,
            format!("cannot be tried in {at}: {error}"),
            "run it as root, and with the --data-dir or --pool of the server",
        ),
    }
}

fn space(directory: &Path) -> Finding {
    const CHECK: &str = "pool space";
    let answer = match statvfs(directory) {
        Ok(answer) => answer,
        Err(error) => return Finding::fail(CHECK, error.to_string(), "check the file system"),
    };
    let free = answer.f_bavail.saturating_mul(answer.f_frsize);
    let total = answer.f_blocks.saturating_mul(answer.f_frsize);
    let found = format!("{} of {} GiB free at {}", free >> 30, total >> 30, directory.display());
    let advice = "free some, or choose a larger disk with --pool; `atoll sweep --dry-run` tells what is left over";
    if free < LEAST_ROOM {
        return Finding::fail(CHECK, found, advice);
    }
    if free < ROOM {
        return Finding::warn(CHECK, found, advice);
    }
    // 0 of 0: made as they are needed.
    if answer.f_files > 0 && answer.f_favail < INODES {
        return Finding::warn(
            CHECK,
            format!("{found}, {} inodes", answer.f_favail),
            "make the file system with more inodes, or use XFS",
        );
    }
    Finding::ok(CHECK, found)
}

pub(super) fn memory() -> Vec<Finding> {
    const CHECK: &str = "memory";
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |field: &str| {
        let line = text.lines().find(|line| line.starts_with(field))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
    };
    let (Some(total), Some(available)) = (bytes("MemTotal:"), bytes("MemAvailable:")) else {
        return vec![Finding::warn(CHECK, "unknown", "mount /proc")];
    };
    let found = format!("{} of {} MiB available", available >> 20, total >> 20);
    let advice = "each running sandbox takes what it uses, from 30 MiB on; give the host more, or bound it with the capacity settings";
    let mut findings = vec![if available < LEAST_MEMORY {
        Finding::fail(CHECK, found, advice)
    } else if available < MEMORY {
        Finding::warn(CHECK, found, advice)
    } else {
        Finding::ok(CHECK, found)
    }];
    let overcommit = std::fs::read_to_string("/proc/sys/vm/overcommit_memory").unwrap_or_default();
    if overcommit.trim() == "2" {
        findings.push(Finding::warn(
            "overcommit",
            "the kernel promises no more memory than it has",
            "set vm.overcommit_memory to 0 or 1: machines reserve all of theirs, and use little of it",
        ));
    }
    findings
}
