//! What this host lends a test: control groups and disks, given back however the test ends.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::support::DEADLINE;

/// A part of the version 2 hierarchy, where this host has one.
pub(crate) struct Hierarchy(PathBuf);

impl Hierarchy {
    pub(crate) fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("atoll-test-{}-{number}", std::process::id());
        ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"].into_iter().map(PathBuf::from).find_map(
            |root| {
                let exists = root.join("cgroup.procs").exists()
                    && root.join("cgroup.kill").exists()
                    || root.join("cgroup.controllers").exists();
                let path = root.join(&name);
                (exists && std::fs::create_dir(&path).is_ok()).then_some(Self(path))
            },
        )
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn groups(&self) -> usize {
        let entries = std::fs::read_dir(self.0.join("work")).unwrap().flatten();
        entries.filter(|entry| entry.path().is_dir()).count()
    }

    pub(crate) fn stands_still(&self) -> bool {
        let events = std::fs::read_to_string(self.0.join("work/cgroup.events")).unwrap();
        events.contains("frozen 1")
    }
}

impl Drop for Hierarchy {
    #[expect(clippy::disallowed_methods, reason = "nothing else runs on this thread")]
    fn drop(&mut self) {
        let _ = std::fs::write(self.0.join("work/cgroup.freeze"), "0");
        // Who is told to end is in the way until it has ended.
        let deadline = Instant::now() + DEADLINE;
        while !remove(&self.0) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Whether it is gone, with all below it.
fn remove(group: &Path) -> bool {
    for entry in std::fs::read_dir(group).into_iter().flatten().flatten() {
        if entry.path().is_dir() {
            let _ = std::fs::write(entry.path().join("cgroup.kill"), "1");
            remove(&entry.path());
        }
    }
    std::fs::remove_dir(group).is_ok() || !group.exists()
}

/// An ext4 file system in a file, behind a loop device.
pub(crate) struct Disk {
    device: PathBuf,
    /// Mounted here by the test itself.
    point: Option<PathBuf>,
}

pub(crate) fn run(program: &str, arguments: &[&Path]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    output.status.success().then(|| text.trim().to_owned())
}

pub(crate) fn must(program: &str, arguments: &[&Path]) -> String {
    run(program, arguments).unwrap_or_else(|| panic!("{program} {arguments:?} failed"))
}

impl Disk {
    pub(crate) fn new(file: &Path) -> Self {
        let image = std::fs::File::create_new(file).unwrap();
        image.set_len(32 << 20).unwrap();
        must("mkfs.ext4", &["-q".as_ref(), "-F".as_ref(), file]);
        let device = must("losetup", &["--find".as_ref(), "--show".as_ref(), file]).into();
        Self { device, point: None }
    }

    pub(crate) fn mounted(file: &Path, point: PathBuf) -> Self {
        let mut disk = Self::new(file);
        std::fs::create_dir_all(&point).unwrap();
        must("mount", &[&disk.device, &point]);
        disk.point = Some(point);
        disk
    }

    pub(crate) fn device(&self) -> &Path {
        &self.device
    }

    /// Nothing is left to replay.
    pub(crate) fn is_clean(&self) -> bool {
        let text = must("dumpe2fs", &["-h".as_ref(), &self.device]);
        !text.contains("needs_recovery")
    }

    fn point(&self) -> &Path {
        self.point.as_deref().expect("the test has mounted it")
    }

    pub(crate) fn freeze(&self) {
        must("fsfreeze", &["--freeze".as_ref(), self.point()]);
    }

    pub(crate) fn thaw(&self) {
        must("fsfreeze", &["--unfreeze".as_ref(), self.point()]);
    }

    pub(crate) fn is_frozen(&self) -> bool {
        let is_free = run("fsfreeze", &["--freeze".as_ref(), self.point()]).is_some();
        if is_free {
            self.thaw();
        }
        !is_free
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(point) = &self.point {
            let _ = run("fsfreeze", &["--unfreeze".as_ref(), point]);
            let _ = run("umount", &["--lazy".as_ref(), point]);
        } else {
            let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
            let source = format!("{} ", self.device.display());
            for line in mounts.lines().filter(|line| line.starts_with(&source)) {
                let point = line.split(' ').nth(1).unwrap_or_default();
                let _ = run("umount", &["--lazy".as_ref(), point.as_ref()]);
            }
        }
        let _ = run("losetup", &["--detach".as_ref(), &self.device]);
    }
}
