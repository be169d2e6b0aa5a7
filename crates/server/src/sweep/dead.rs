//! Instances that no data directory has any longer: what bears their number goes.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use machine::{
    kill_all_of,
    network::{NetworkConfig, Networks, OnHost, instances_on_host},
    uids_in_use,
};

use super::{Found, Kind, blocking, control_groups};
use crate::{
    Error,
    instance::{FreeNumber, NUMBERS, claimed, hold_data, number_of, owner_of},
    sandbox::{instance_of, uids},
};

/// A data directory that was made less than so long ago may be about to be locked.
const TOO_YOUNG: Duration = Duration::from_secs(60);
const SCRATCH: &str = "scratch-";

/// What there is of one instance on the host.
struct Remains {
    number: u16,
    users: BTreeMap<u32, usize>,
    network: OnHost,
    is_claimed: bool,
}

pub(super) async fn sweep(found: &mut Found, scratch_places: &[PathBuf]) -> Result<(), Error> {
    let scratch = abandoned(scratch_places);
    let mut networks = instances_on_host().await.map_err(Error::from_start)?;
    let claimed: BTreeSet<u16> = claimed().map_err(Error::from_start)?.into_iter().collect();
    let everybody = *uids(0).start()..=*uids(NUMBERS - 1).end();
    let groups = {
        let everybody = everybody.clone();
        blocking(move || machine::groups_of(&everybody)).await?
    };
    let of_groups = groups.iter().filter_map(|uid| instance_of(*uid));
    let numbers: BTreeSet<u16> =
        claimed.iter().chain(networks.keys()).copied().chain(of_groups).collect();
    let users = uids_in_use(everybody).map_err(Error::from_start)?;
    for number in numbers {
        let users = users.range(uids(number)).map(|(uid, count)| (*uid, *count)).collect();
        let network = networks.remove(&number).unwrap_or_default();
        let remains = Remains { number, users, network, is_claimed: claimed.contains(&number) };
        if let Some(why) = remains.why_dead(&scratch) {
            remains.sweep(found, &why, &scratch).await?;
        }
    }
    for scratch in scratch {
        let why = "the command that made it is gone";
        let path = scratch.path.clone();
        let removed = if found.removes() {
            blocking(move || store::sweep::remove_directory(&path)).await?.map_err(Error::internal)
        } else {
            Ok(())
        };
        found.push(Kind::DataDirectory, scratch.path.display(), why, removed);
    }
    Ok(())
}

impl Remains {
    /// `None`: somebody has the number, or may have. Asked before the number is held: a server that starts meanwhile
    /// must not find it taken.
    fn why_dead(&self, scratch: &[Scratch]) -> Option<String> {
        let Some(owner) = owner_of(self.number) else {
            // Without a claim nobody can tell whose processes they are.
            return self.users.is_empty().then(|| "no data directory has its number".to_owned());
        };
        if owner.is_relative() {
            return None;
        }
        if scratch.iter().any(|scratch| scratch.path == owner) {
            return Some(format!("the command that made {} is gone", owner.display()));
        }
        match owner.try_exists() {
            Ok(false) => Some(format!("its data directory {} is gone", owner.display())),
            Ok(true) if number_of(&owner).is_some_and(|number| number != self.number) => {
                Some(format!("its data directory {} has another number", owner.display()))
            }
            Ok(true) | Err(_) => None,
        }
    }

    async fn sweep(self, found: &mut Found, why: &str, scratch: &[Scratch]) -> Result<(), Error> {
        let held = FreeNumber::hold(self.number).map_err(Error::from_start)?;
        let Some(held) = held.filter(|_| self.why_dead(scratch).is_some()) else { return Ok(()) };
        let before = found.all.len();
        for (uid, count) in &self.users {
            let killed = if found.removes() {
                kill_all_of(*uid).await.map(drop).map_err(Error::internal)
            } else {
                Ok(())
            };
            found.push(Kind::Processes, format!("{count} of uid {uid}"), why, killed);
        }
        // Those of processes go with them. Whatever is left now goes too: once the claim is gone, nothing names it.
        let goes_with_processes = |uid| !found.removes() && self.users.contains_key(&uid);
        let groups = blocking(move || machine::groups_of(&uids(self.number))).await?;
        control_groups(
            found,
            groups.into_iter().filter(|uid| !goes_with_processes(*uid)).collect(),
            why,
        )
        .await?;
        let networks = NetworkConfig {
            instance: self.number,
            policy: machine::network::HostPolicy::default(),
            resolvers: Vec::new(),
        };
        let networks = Networks::without_rules(networks).map_err(Error::internal)?;
        let swept = if found.removes() {
            networks.sweep(&BTreeSet::new()).await.map(drop).map_err(Error::internal)
        } else {
            Ok(())
        };
        let mut failure = swept.err();
        for (kind, names) in
            [(Kind::Namespace, &self.network.namespaces), (Kind::Interface, &self.network.links)]
        {
            for name in names {
                // One attempt was made for all of them: its failure is told once.
                found.push(kind, name, why, failure.take().map_or(Ok(()), Err));
            }
        }
        for table in &self.network.tables {
            let closed = if found.removes() {
                networks.close().await.map_err(Error::internal)
            } else {
                Ok(())
            };
            found.push(Kind::Table, table, why, closed);
        }
        let has_failed = found.all[before..]
            .iter()
            .any(|leftover| matches!(leftover.outcome, super::Outcome::Failed(_)));
        // The claim is what the rest is found by, the next time.
        let forgotten = if has_failed || (self.is_claimed && !found.removes()) {
            Ok(())
        } else {
            held.forget().map_err(Error::internal)
        };
        if self.is_claimed && !has_failed {
            found.push(Kind::Claim, format!("instance {}", self.number), why, forgotten);
        }
        Ok(())
    }
}

/// A data directory of a command that ended without removing it.
struct Scratch {
    path: PathBuf,
    _held: File,
}

fn abandoned(places: &[PathBuf]) -> Vec<Scratch> {
    let entries = places.iter().filter_map(|place| place.read_dir().ok()).flatten().flatten();
    let mut found: Vec<Scratch> = entries
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(SCRATCH.as_bytes()))
        .filter_map(|entry| entry.path().canonicalize().ok())
        .filter(|path| is_ours(path) && is_old(path))
        .filter_map(|path| {
            let held = hold_data(&path).ok()??;
            Some(Scratch { path, _held: held })
        })
        .collect();
    found.sort_by(|left, right| left.path.cmp(&right.path));
    found.dedup_by(|left, right| left.path == right.path);
    found
}

/// By more than its name.
fn is_ours(path: &Path) -> bool {
    number_of(path).is_some()
        && ["sandboxes", "machines", "temporary"].iter().all(|name| path.join(name).is_dir())
}

fn is_old(path: &Path) -> bool {
    let made = path.join("instance").metadata().and_then(|metadata| metadata.modified());
    made.is_ok_and(|made| made.elapsed().is_ok_and(|age| age > TOO_YOUNG))
}
