//! Ends what runs under a machine's uid, whoever started it: the way to be rid of a machine of which nothing else is known.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::unix::AsyncFd;
use tokio::time::Instant;

use crate::cgroup::Group;
use crate::error::{Error, Result};

/// Memory of many GiB takes the kernel a while to take back.
const DEATH: Duration = Duration::from_secs(10);

/// Kills every process of this uid and waits until they are gone. There need be none.
///
/// # Errors
/// The process table cannot be read, or one does not end: the kernel is stuck with it.
pub async fn kill_all_of(uid: u32) -> Result<usize> {
    let end = Instant::now() + DEATH;
    let mut killed = 0;
    for pid in processes_of(uid).map_err(Error::host("list processes"))? {
        // The descriptor is held, so the number cannot pass to another process behind the comparison.
        let Ok(pidfd) = rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK) else { continue };
        let still_theirs = owner(pid) == Some(uid);
        let group = Group::of(pid.as_raw_nonzero().get().unsigned_abs());
        if !still_theirs || rustix::process::pidfd_send_signal(&pidfd, Signal::KILL).is_err() {
            continue;
        }
        killed += 1;
        // SAFETY: the descriptor is owned here and outlives its registration.
        #[expect(unsafe_code, reason = "tokio asks for the promise that the descriptor stays open")]
        let watched = unsafe { AsyncFd::register(pidfd) };
        let watched = watched.map_err(|error| Error::host("watch a process")(error.into()))?;
        let gone = tokio::time::timeout_at(end, watched.readable()).await;
        let gone =
            gone.map_err(|_| Error::host("kill a process")(std::io::ErrorKind::TimedOut.into()))?;
        drop(gone.map_err(Error::host("watch a process"))?);
        // As a rule it is empty at once; a server that watches the process removes it as well.
        let _ = tokio::task::spawn_blocking(move || group.remove()).await;
    }
    Ok(killed)
}

/// Those of these uids that have processes, with how many.
///
/// # Errors
/// The process table cannot be read.
pub fn uids_in_use(range: RangeInclusive<u32>) -> Result<BTreeMap<u32, usize>> {
    let failed = Error::host("list processes");
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").map_err(failed)? {
        let name = entry.map_err(Error::host("list processes"))?.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        if let Some(uid) = pid.and_then(owner).filter(|uid| range.contains(uid)) {
            *found.entry(uid).or_default() += 1;
        }
    }
    Ok(found)
}

fn processes_of(uid: u32) -> std::io::Result<Vec<Pid>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let pid = name.to_str().and_then(|name| name.parse().ok()).and_then(Pid::from_raw);
        found.extend(pid.filter(|pid| owner(*pid) == Some(uid)));
    }
    Ok(found)
}

/// `None`: it has ended.
fn owner(pid: Pid) -> Option<u32> {
    std::fs::metadata(format!("/proc/{}", pid.as_raw_nonzero())).ok().map(|metadata| metadata.uid())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;

    use super::*;

    #[tokio::test]
    async fn every_process_of_the_uid_ends_and_no_other() {
        let sleep = |uid| std::process::Command::new("sleep").arg("600").uid(uid).spawn().unwrap();
        let (mut one, mut two, mut other) =
            (sleep(1_899_999_001), sleep(1_899_999_001), sleep(1_899_999_002));
        let users = uids_in_use(1_899_999_001..=1_899_999_002).unwrap();
        assert_eq!(users, BTreeMap::from([(1_899_999_001, 2), (1_899_999_002, 1)]));
        assert_eq!(kill_all_of(1_899_999_001).await.unwrap(), 2);
        assert!(!one.wait().unwrap().success());
        assert!(!two.wait().unwrap().success());
        assert!(other.try_wait().unwrap().is_none());
        other.kill().unwrap();
        other.wait().unwrap();
        assert_eq!(kill_all_of(1_899_999_001).await.unwrap(), 0);
    }
}
