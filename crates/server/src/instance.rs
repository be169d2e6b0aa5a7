//! Which server of this host a data directory belongs to: uids, addresses, namespaces and tables carry its number.

use std::{
    fs::{File, OpenOptions},
    io::{ErrorKind, Read, Seek, Write},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rand::Rng;
use rustix::fs::{FlockOperation, flock};

/// Instances on a host.
pub(crate) const NUMBERS: u16 = 1024;
const CLAIMS: &str = "/run/atoll";
const TRIES: usize = 4096;
/// A server that was just killed may hold its lock until the kernel has taken it down.
const PATIENCE: Duration = Duration::from_secs(3);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Held while the server runs; the locks go with the process, however it ends.
pub(crate) struct Instance {
    pub(crate) number: u16,
    _data: File,
    _claim: File,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("another server uses the data directory {path}; stop it, or name another with --data-dir", path = .path.display())]
    DataInUse { path: PathBuf },
    #[error("all {NUMBERS} instance numbers of this host are in use")]
    Exhausted,
    #[error("claim an instance number at {path}", path = .path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

impl Instance {
    /// The number in the data directory if it is free on this host, else a new one, written there. A data directory
    /// whose number another one holds has been copied: nothing that carries the number is its own.
    pub(crate) fn claim(data: &Path) -> Result<Self, Error> {
        Self::claim_in(data, Path::new(CLAIMS))
    }

    fn claim_in(data: &Path, claims: &Path) -> Result<Self, Error> {
        let path = data.join("instance");
        let at = |path: &Path| {
            let path = path.to_owned();
            move |source| Error::Io { path, source }
        };
        let mut file = open(&path).map_err(at(&path))?;
        let end = Instant::now() + PATIENCE;
        // Whoever sweeps compares it with the directories it finds, from wherever it was started.
        let data = &data.canonicalize().map_err(at(data))?;
        while !try_lock(&file).map_err(at(&path))? {
            if Instant::now() > end {
                return Err(Error::DataInUse { path: data.to_owned() });
            }
            std::thread::park_timeout(LOOK_AGAIN);
        }
        std::fs::create_dir_all(claims).map_err(at(claims))?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(at(&path))?;
        let written = text.trim().parse().ok().filter(|number| *number < NUMBERS);
        let mut random = rand::rng();
        let tries =
            written.into_iter().chain(std::iter::repeat_with(|| random.random_range(0..NUMBERS)));
        for number in tries.take(TRIES) {
            let claim_path = claims.join(format!("instance-{number}"));
            let Some(claim) = lock_claim(&claim_path).map_err(at(&claim_path))? else { continue };
            // A number stays with the directory that had it, also while no server of it runs.
            if written != Some(number)
                && owner(&claim_path).is_some_and(|owner| owner != *data && owner.exists())
            {
                continue;
            }
            std::fs::write(&claim_path, data.as_os_str().as_encoded_bytes())
                .map_err(at(&claim_path))?;
            file.rewind().and_then(|()| file.set_len(0)).map_err(at(&path))?;
            writeln!(file, "{number}").and_then(|()| file.sync_all()).map_err(at(&path))?;
            return Ok(Self { number, _data: file, _claim: claim });
        }
        Err(Error::Exhausted)
    }
}

/// A number that no server uses, held so that none takes it.
pub(crate) struct FreeNumber {
    path: PathBuf,
    _claim: File,
}

impl FreeNumber {
    /// `None`: a server has it.
    pub(crate) fn hold(number: u16) -> std::io::Result<Option<Self>> {
        std::fs::create_dir_all(CLAIMS)?;
        let path = claim_path(number);
        Ok(lock_claim(&path)?.map(|claim| Self { path, _claim: claim }))
    }

    /// The number belongs to no data directory any longer.
    pub(crate) fn forget(self) -> std::io::Result<()> {
        std::fs::remove_file(&self.path)
    }
}

/// All numbers that were ever claimed since the host was started.
pub(crate) fn claimed() -> std::io::Result<Vec<u16>> {
    let entries = match std::fs::read_dir(CLAIMS) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix("instance-")?.parse().ok());
        numbers.extend(number.filter(|number: &u16| *number < NUMBERS));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// The data directory that has this number, as its claim says.
pub(crate) fn owner_of(number: u16) -> Option<PathBuf> {
    owner(&claim_path(number))
}

/// The number that a data directory has, if a server ever used it.
pub(crate) fn number_of(data: &Path) -> Option<u16> {
    let text = std::fs::read_to_string(data.join("instance")).ok()?;
    text.trim().parse().ok().filter(|number| *number < NUMBERS)
}

/// Held while no server may start in this data directory. `None`: one runs there, or none ever did.
pub(crate) fn hold_data(data: &Path) -> std::io::Result<Option<File>> {
    let file = match File::open(data.join("instance")) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(try_lock(&file)?.then_some(file))
}

fn claim_path(number: u16) -> PathBuf {
    Path::new(CLAIMS).join(format!("instance-{number}"))
}

/// `None` when another has it. Claims that were forgotten are removed with the lock in hand, so what was locked counts
/// only if it is still what the name leads to.
fn lock_claim(path: &Path) -> std::io::Result<Option<File>> {
    use std::os::unix::fs::MetadataExt;
    loop {
        let claim = open(path)?;
        if !try_lock(&claim)? {
            return Ok(None);
        }
        let locked = claim.metadata()?;
        match path.metadata() {
            Ok(named) if (named.dev(), named.ino()) == (locked.dev(), locked.ino()) => {
                return Ok(Some(claim));
            }
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
}

fn open(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)
}

fn owner(claim: &Path) -> Option<PathBuf> {
    std::fs::read_to_string(claim).ok().filter(|text| !text.is_empty()).map(PathBuf::from)
}

fn try_lock(file: &File) -> std::io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(error) if std::io::Error::from(error).kind() == ErrorKind::WouldBlock => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_directory_has_one_server_at_a_time_and_keeps_its_number() {
        let (data, claims) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = Instance::claim_in(data.path(), claims.path()).unwrap();
        assert!(matches!(
            Instance::claim_in(data.path(), claims.path()),
            Err(Error::DataInUse { .. })
        ));
        let number = first.number;
        drop(first);
        assert_eq!(Instance::claim_in(data.path(), claims.path()).unwrap().number, number);
    }

    #[test]
    fn two_servers_never_have_the_same_number() {
        let claims = tempfile::tempdir().unwrap();
        let servers: Vec<_> = (0..100)
            .map(|_| {
                let data = tempfile::tempdir().unwrap();
                let instance = Instance::claim_in(data.path(), claims.path()).unwrap();
                (data, instance)
            })
            .collect();
        let mut numbers: Vec<_> = servers.iter().map(|(_, instance)| instance.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), servers.len());
    }

    #[test]
    fn a_copied_data_directory_gets_a_number_of_its_own_while_the_first_runs() {
        let (data, copy, claims) = (
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
            tempfile::tempdir().unwrap(),
        );
        let first = Instance::claim_in(data.path(), claims.path()).unwrap();
        std::fs::copy(data.path().join("instance"), copy.path().join("instance")).unwrap();
        let second = Instance::claim_in(copy.path(), claims.path()).unwrap();
        assert_ne!(first.number, second.number);
    }
}
