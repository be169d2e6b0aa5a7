//! The data directory of the settings, while no server runs there: what its rows do not name.

use std::collections::BTreeSet;

use api::SandboxId;
use machine::{
    kill_all_of,
    network::{NetworkConfig, Networks, instances_on_host},
    uids_in_use,
};
use store::{Layout, machine_files, sandbox_files, sweep::of_data};

use super::{Found, Kind, blocking, control_groups};
use crate::{
    Config, Error,
    db::Db,
    instance::{hold_data, number_of, owner_of},
    sandbox::{State, Target, uids},
};

const WHY: &str = "no row names it";

/// What the rows name.
struct Kept {
    sandboxes: BTreeSet<SandboxId>,
    slots: BTreeSet<u16>,
}

pub(super) async fn sweep(
    found: &mut Found,
    config: &Config,
    layout: &Layout,
    remarks: &mut Vec<String>,
) -> Result<(), Error> {
    let data = layout.data().display().to_string();
    let Some(number) = number_of(layout.data()) else {
        remarks.push(format!("no server has used the data directory {data} yet"));
        return Ok(());
    };
    let Some(_held) = hold_data(layout.data()).map_err(Error::from_start)? else {
        remarks.push(format!("a server runs in {data} and keeps that in order itself"));
        return Ok(());
    };
    let (mode, drafts) = (found.mode, layout.clone());
    let drafts = blocking(move || of_data(&drafts, mode)).await?.map_err(Error::from_start)?;
    for path in drafts {
        found.push(Kind::Draft, path.display(), "whoever made it is gone", Ok(()));
    }
    let kept = match kept(config).await {
        Ok(Some(kept)) => kept,
        Ok(None) => {
            remarks.push(format!("the database is new, so it cannot be the one of {data}; give --database as to the server"));
            return Ok(());
        }
        Err(error) => {
            remarks.push(format!(
                "sandboxes in {data} were left alone, for their rows cannot be read ({}): start the server once, or give --database as to it",
                [error.message.clone(), error.causes()].join(" ").trim()
            ));
            return Ok(());
        }
    };
    sandboxes(found, layout, &kept).await?;
    let is_ours = owner_of(number)
        .is_none_or(|owner| layout.data().canonicalize().is_ok_and(|data| data == owner));
    if !is_ours {
        remarks
            .push(format!("{data} was copied from another data directory, which has its number"));
        return Ok(());
    }
    machines(found, layout, number, &kept).await?;
    networks(found, number, &kept).await
}

/// `None`: nothing was ever written there.
async fn kept(config: &Config) -> Result<Option<Kept>, Error> {
    let db = Db::look_into(&config.database_url()).await?;
    let rows = db.all_sandboxes().await?;
    let is_new = rows.is_empty() && db.keys().await?.is_empty();
    db.close().await;
    // As a server's start looks for machines.
    let runs = |state, target| {
        matches!(state, State::Running | State::Paused) && target != Target::Deleted
    };
    Ok((!is_new).then(|| Kept {
        slots: rows
            .iter()
            .filter(|row| runs(row.state, row.target))
            .filter_map(|row| row.slot)
            .collect(),
        sandboxes: rows.into_iter().map(|row| row.id).collect(),
    }))
}

async fn sandboxes(found: &mut Found, layout: &Layout, kept: &Kept) -> Result<(), Error> {
    for id in sandbox_files::list(layout).map_err(Error::from_start)? {
        if kept.sandboxes.contains(&id) {
            continue;
        }
        let removed = if found.removes() {
            let layout = layout.clone();
            blocking(move || sandbox_files::remove(&layout, &id)).await?.map_err(Error::internal)
        } else {
            Ok(())
        };
        found.push(Kind::SandboxDirectory, layout.sandbox(&id).display(), WHY, removed);
    }
    Ok(())
}

async fn machines(
    found: &mut Found,
    layout: &Layout,
    number: u16,
    kept: &Kept,
) -> Result<(), Error> {
    let first = *uids(number).start();
    let users = uids_in_use(uids(number)).map_err(Error::from_start)?;
    let is_kept = |uid: u32| {
        let slot = u16::try_from(uid - first);
        users.contains_key(&uid) || slot.is_ok_and(|slot| kept.slots.contains(&slot))
    };
    let groups = blocking(move || machine::groups_of(&uids(number))).await?;
    control_groups(found, groups.into_iter().filter(|uid| !is_kept(*uid)).collect(), WHY).await?;
    for (uid, count) in users {
        let slot = u16::try_from(uid - first).map_err(Error::internal)?;
        if kept.slots.contains(&slot) {
            continue;
        }
        let killed = if found.removes() {
            kill_all_of(uid).await.map(drop).map_err(Error::internal)
        } else {
            Ok(())
        };
        found.push(Kind::Processes, format!("{count} of uid {uid}"), WHY, killed);
    }
    for slot in machine_files::list(layout).map_err(Error::from_start)? {
        if kept.slots.contains(&slot) {
            continue;
        }
        let removed = if found.removes() {
            machine_files::remove(layout, slot).map_err(Error::internal)
        } else {
            Ok(())
        };
        found.push(Kind::MachineDirectory, layout.machine(slot).display(), WHY, removed);
    }
    Ok(())
}

async fn networks(found: &mut Found, number: u16, kept: &Kept) -> Result<(), Error> {
    let mut on_host = instances_on_host().await.map_err(Error::from_start)?;
    let Some(mut network) = on_host.remove(&number) else { return Ok(()) };
    let is_kept = |name: &String| {
        let slot = name.rsplit(['-', '.']).next().and_then(|slot| slot.parse().ok());
        slot.is_some_and(|slot| kept.slots.contains(&slot))
    };
    network.namespaces.retain(|name| !is_kept(name));
    network.links.retain(|name| !is_kept(name));
    let config = NetworkConfig {
        instance: number,
        policy: machine::network::HostPolicy::default(),
        resolvers: Vec::new(),
    };
    let networks = Networks::without_rules(config).map_err(Error::internal)?;
    let mut failure = None;
    if found.removes() && !(network.namespaces.is_empty() && network.links.is_empty()) {
        failure = networks.sweep(&kept.slots).await.map_err(Error::internal).err();
    }
    for (kind, names) in [(Kind::Namespace, network.namespaces), (Kind::Interface, network.links)] {
        for name in names {
            found.push(kind, name, WHY, failure.take().map_or(Ok(()), Err));
        }
    }
    // The rules that wall machines in stay as long as there is one.
    if kept.slots.is_empty() {
        for table in network.tables {
            let closed = if found.removes() {
                networks.close().await.map_err(Error::internal)
            } else {
                Ok(())
            };
            found.push(Kind::Table, table, "no machine runs behind it", closed);
        }
    }
    Ok(())
}
