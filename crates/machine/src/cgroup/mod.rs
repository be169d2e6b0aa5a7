//! Control groups: what a machine may use of the host at most, and its share when others want it too.
//!
//! Each machine has a group of its own in every hierarchy the host offers, of version 2 or 1, also both at once. Its name
//! carries the machine's uid, so whatever a server leaves behind is found again by the next. A host without control
//! groups has only resource limits.

mod host;
mod limits;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub(crate) use self::host::Cgroups;
pub(crate) use self::limits::Limits;
use self::limits::{Setting, Version};
use crate::error::{Error, Result};

const PREFIX: &str = "atoll-";
/// A group empties when the kernel has taken its last process apart.
const EMPTIED: Duration = Duration::from_secs(2);
const EMPTIED_POLL: Duration = Duration::from_millis(1);
/// Deeper than any service manager nests.
const DEPTH: usize = 12;

/// The groups of one machine, one in each hierarchy.
#[derive(Debug, Clone, Default)]
pub(crate) struct Group {
    directories: Vec<(Version, PathBuf)>,
}

impl Cgroups {
    /// A new group, with everything limited except processor time: see [`Group::limit_processor`].
    pub(crate) fn create(&self, uid: u32, limits: &Limits) -> Result<Group> {
        // Never one that was there before: its removal may be under way.
        let name = format!("{PREFIX}{uid}.{:08x}", rand::random::<u32>());
        let mut group = Group::default();
        for (version, base) in self.bases() {
            let directory = base.join(&name);
            fs::create_dir(&directory).map_err(Error::file("create", &directory))?;
            group.directories.push((*version, directory));
        }
        match group.set(limits) {
            Ok(()) => Ok(group),
            Err(error) => {
                group.remove();
                Err(error)
            }
        }
    }
}

impl Group {
    /// That of a process which an earlier server started.
    pub(crate) fn of(pid: u32) -> Self {
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
        let directories = host::directories(Path::new(host::MOUNTED), &text);
        let is_ours = |directory: &Path| {
            directory.file_name().and_then(|name| uid_of(name.to_str()?)).is_some()
        };
        Self {
            directories: directories
                .into_iter()
                .filter(|(_, directory)| is_ours(directory))
                .collect(),
        }
    }

    /// The files to which a process writes to enter.
    pub(crate) fn doors(&self) -> Result<Vec<File>> {
        let open = |(_, directory): &(Version, PathBuf)| {
            let path = directory.join("cgroup.procs");
            File::options().write(true).open(&path).map_err(Error::file("open", path))
        };
        self.directories.iter().map(open).collect()
    }

    /// Only once a machine is up: loading its state and the first touch of its pages are the host's business and shall
    /// not wait for the guest's quota.
    pub(crate) fn limit_processor(&self) -> Result<()> {
        for (version, directory) in &self.directories {
            let path = directory.join(version.share());
            match fs::read_to_string(&path) {
                Ok(share) => {
                    let share = share.trim().parse().map_err(io::Error::other);
                    let share = share.map_err(Error::file("understand", path))?;
                    write(directory, &version.quota(share))?;
                }
                // Of a controller that this hierarchy does not have, or the machine has just ended.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::file("read", path)(error)),
            }
        }
        Ok(())
    }

    fn set(&self, limits: &Limits) -> Result<()> {
        for (version, directory) in &self.directories {
            for setting in limits.settings(*version) {
                write(directory, &setting)?;
            }
        }
        Ok(())
    }

    /// Once its processes have ended. Blocks until the kernel agrees, which takes no time as a rule.
    pub(crate) fn remove(&self) {
        for (_, directory) in &self.directories {
            if let Err(error) = remove(directory) {
                tracing::warn!(directory = %directory.display(), %error, "a control group stays");
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.directories.iter().map(|(_, directory)| directory.as_path())
    }
}

fn write(directory: &Path, setting: &Setting) -> Result<()> {
    let path = directory.join(setting.file);
    match File::options().write(true).open(&path) {
        Ok(mut file) => {
            file.write_all(setting.value.as_bytes()).map_err(Error::file("write", path))
        }
        // Of a controller that this hierarchy does not have.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::file("open", path)(error)),
    }
}

fn remove(directory: &Path) -> io::Result<()> {
    let end = Instant::now() + EMPTIED;
    loop {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && Instant::now() < end => {
                std::thread::park_timeout(EMPTIED_POLL);
            }
            other => return other,
        }
    }
}

/// Which of these uids have control groups, wherever a server made them.
pub fn groups_of(uids: &RangeInclusive<u32>) -> BTreeSet<u32> {
    found(uids).map(|(uid, _)| uid).collect()
}

/// Removes the control groups of machines with these uids, except those in `kept`. Their processes must have ended. How
/// many there were.
///
/// # Errors
/// One is still in use.
pub fn remove_groups(uids: &RangeInclusive<u32>, kept: impl Fn(u32) -> bool) -> Result<usize> {
    let mut count = 0;
    for (_, directory) in found(uids).filter(|(uid, _)| !kept(*uid)) {
        remove(&directory).map_err(Error::file("remove", &directory))?;
        count += 1;
    }
    Ok(count)
}

fn found(uids: &RangeInclusive<u32>) -> impl Iterator<Item = (u32, PathBuf)> {
    groups_below(Path::new(host::MOUNTED), DEPTH).into_iter().filter_map(|directory| {
        let uid = uid_of(directory.file_name()?.to_str()?)?;
        uids.contains(&uid).then_some((uid, directory))
    })
}

fn groups_below(directory: &Path, depth: usize) -> Vec<PathBuf> {
    let Some(depth) = depth.checked_sub(1) else { return Vec::new() };
    // Groups come and go meanwhile.
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for entry in entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if entry.file_name().to_str().and_then(uid_of).is_some() {
            found.push(entry.path());
        } else {
            found.extend(groups_below(&entry.path(), depth));
        }
    }
    found
}

fn uid_of(name: &str) -> Option<u32> {
    name.strip_prefix(PREFIX)?.split_once('.')?.0.parse().ok()
}
