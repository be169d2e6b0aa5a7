//! Which hierarchies of control groups this host has, and where in them a server may make groups.
//!
//! In version 1 that is below the server's own group. In version 2 a group with processes cannot share out controllers,
//! and machines outlive the server's service, so there it is beside the server's group when that is a delegated one's
//! `server` (systemd: `Delegate=yes`, `DelegateSubgroup=server`), else a group of its own at the top.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::limits::Version;

pub(super) const MOUNTED: &str = "/sys/fs/cgroup";
const CONTROLLERS: [&str; 4] = ["memory", "cpu", "pids", "io"];
/// The same in version 1, where each is a hierarchy.
const HIERARCHIES: [&str; 4] = ["memory", "cpu", "pids", "blkio"];
/// The name of the server's group in a delegated one.
const SERVER: &str = "server";
/// At the top of a hierarchy that nobody has delegated a part of.
const OURS: &str = "atoll";

/// Where groups are made. Empty on a host without any.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cgroups {
    bases: Vec<(Version, PathBuf)>,
}

impl Cgroups {
    /// Prepares what has to be there. A host that refuses is one without control groups, and that is told in the log.
    pub(crate) fn find() -> Self {
        let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let found = Self::find_in(Path::new(MOUNTED), &own);
        let covered: Vec<_> = found.controllers().collect();
        let lacking: Vec<_> = CONTROLLERS
            .into_iter()
            .filter(|name| !covered.iter().any(|have| have == name))
            .collect();
        if lacking.is_empty() {
            tracing::debug!(bases = ?found.bases, "control groups");
        } else {
            tracing::warn!(
                ?lacking,
                "some of what virtual machines use is not limited by control groups; run the server as a service with Delegate=yes and DelegateSubgroup=server"
            );
        }
        found
    }

    pub(super) fn find_in(mounted: &Path, own: &str) -> Self {
        let mut bases = Vec::new();
        for (version, directory) in directories(mounted, own) {
            let base = match version {
                Version::One => directory,
                Version::Two => {
                    let root = unified(mounted).unwrap_or_else(|| mounted.to_owned());
                    match base_of_version_two(&root, &directory) {
                        Ok(Some(base)) => base,
                        Ok(None) => continue,
                        Err(error) => {
                            tracing::warn!(%error, "control groups of version 2 cannot be used");
                            continue;
                        }
                    }
                }
            };
            if is_writable(&base) {
                bases.push((version, base));
            }
        }
        Self { bases }
    }

    pub(super) fn bases(&self) -> &[(Version, PathBuf)] {
        &self.bases
    }

    /// What is limited, in the words of version 2.
    fn controllers(&self) -> impl Iterator<Item = String> {
        self.bases.iter().flat_map(|(version, base)| match version {
            Version::Two => words(&base.join("cgroup.subtree_control")),
            Version::One => CONTROLLERS
                .into_iter()
                .zip(HIERARCHIES)
                .filter(|(_, hierarchy)| base.starts_with(Path::new(MOUNTED).join(hierarchy)))
                .map(|(controller, _)| controller.to_owned())
                .collect(),
        })
    }
}

/// The directories of a process's groups, by its `/proc/PID/cgroup`, in hierarchies of interest.
pub(super) fn directories(mounted: &Path, text: &str) -> Vec<(Version, PathBuf)> {
    let below = |root: PathBuf, path: &str| root.join(path.trim_start_matches('/'));
    let mut found = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(names), Some(path)) = (fields.next(), fields.next(), fields.next())
        else {
            continue;
        };
        if names.is_empty() {
            found.extend(unified(mounted).map(|root| (Version::Two, below(root, path))));
            continue;
        }
        for name in names.split(',').filter(|name| HIERARCHIES.contains(name)) {
            let root = mounted.join(name);
            if root.join("cgroup.procs").exists() {
                found.push((Version::One, below(root, path)));
            }
        }
    }
    found
}

/// Where version 2 is mounted, alone or beside version 1.
fn unified(mounted: &Path) -> Option<PathBuf> {
    [mounted.to_owned(), mounted.join("unified")]
        .into_iter()
        .find(|root| root.join("cgroup.controllers").exists())
}

/// `None`: none of the controllers is in this hierarchy.
fn base_of_version_two(root: &Path, own: &Path) -> io::Result<Option<PathBuf>> {
    let has_any = |group: &Path| {
        words(&group.join("cgroup.controllers"))
            .iter()
            .any(|name| CONTROLLERS.contains(&name.as_str()))
    };
    if let Some(parent) =
        own.parent().filter(|parent| own.ends_with(SERVER) && parent.starts_with(root))
        && has_any(parent)
    {
        share_out(parent);
        return Ok(Some(parent.to_owned()));
    }
    if !has_any(root) {
        return Ok(None);
    }
    let base = root.join(OURS);
    share_out(root);
    match fs::create_dir(&base) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Ok(()) | Err(_) => {}
    }
    share_out(&base);
    Ok(Some(base))
}

/// Lets the groups below this one have the controllers. Those that are refused are lacking, which is told in the end.
fn share_out(group: &Path) {
    let path = group.join("cgroup.subtree_control");
    let shared = words(&path);
    for controller in CONTROLLERS.iter().filter(|name| !shared.iter().any(|have| have == *name)) {
        if let Err(error) = fs::write(&path, format!("+{controller}")) {
            tracing::debug!(controller, group = %group.display(), %error, "a controller is not shared out");
        }
    }
}

fn is_writable(directory: &Path) -> bool {
    rustix::fs::access(directory, rustix::fs::Access::WRITE_OK).is_ok()
}

fn words(path: &Path) -> Vec<String> {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().map(str::to_owned).collect()
}
