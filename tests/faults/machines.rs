//! Machines that are made, stopped and started.

use std::{fs, time::Duration};

use api::{CreateMachine, Machine, SandboxId, SandboxStatus};
use client::{RootDisk, WriteOptions};
use tests::{Footprint, Host, patterned, pause, until};

use super::{Fault, SETTLED, Victim, faults_of};

pub(super) async fn machine(victim: &Victim) -> Machine {
    until("a machine", Duration::from_secs(900), async || {
        match victim.server.client().create_machine(&CreateMachine::default()).await {
            Ok(machine) => Some(machine),
            Err(error) => {
                pause(error.may_retry_after().unwrap_or_else(|| panic!("{error:?}"))).await;
                None
            }
        }
    })
    .await
}

/// Runs again, with what was on its disk.
async fn boots(victim: &Victim, id: &SandboxId, after: &str) {
    let client = victim.server.client();
    let started = until(after, SETTLED * 3, async || match client.start_machine(id).await {
        Ok(machine) => Some(machine),
        Err(error) => {
            pause(error.may_retry_after().unwrap_or_else(|| panic!("{after}: {error:?}"))).await;
            None
        }
    });
    assert_eq!(started.await.state, SandboxStatus::Running, "{after}");
    let kept = client.read_file(id, "/srv/kept").await.unwrap();
    assert!(kept.bytes().await.unwrap() == patterned(100_000), "{after}");
}

/// With a fault at one of its steps, and then undisturbed.
async fn stops(victim: &mut Victim, id: &SandboxId, (point, fault): (String, Fault)) {
    victim.arm(&point, fault).await;
    let done = victim.server.client().stop_machine(id).await;
    assert!(done.is_err(), "{point}: {done:?}");
    victim.is_over(&point, fault).await;
    let client = victim.server.client();
    // A stop that was begun comes to its end.
    until(&point, SETTLED * 2, async || {
        let state = client.machine(id).await.unwrap().state;
        let known = [SandboxStatus::Running, SandboxStatus::Stopped].contains(&state);
        assert!(known, "{point}: {state:?}");
        (point == "stop.target_writing" || state == SandboxStatus::Stopped).then_some(())
    })
    .await;
    assert_eq!(client.stop_machine(id).await.unwrap().state, SandboxStatus::Stopped, "{point}");
}

async fn starts(victim: &mut Victim, id: &SandboxId, (point, fault): (String, Fault)) {
    victim.arm(&point, fault).await;
    let done = victim.server.client().start_machine(id).await;
    assert!(done.is_err(), "{point}: {done:?}");
    victim.is_over(&point, fault).await;
    let state = victim.server.client().machine(id).await.unwrap().state;
    let known = [SandboxStatus::Running, SandboxStatus::Stopped].contains(&state);
    assert!(known, "{point}: {state:?}");
    boots(victim, id, &point).await;
    until(&point, SETTLED, async || {
        let now = Footprint::of(victim.server.data());
        let all = (now.processes.len(), now.namespaces.len(), now.files.len());
        (all == (1, 1, 2)).then_some(())
    })
    .await;
}

pub(super) async fn a_machine_is_whole_whose_server_is_killed_as_it_stops_and_starts(host: Host) {
    let at = |point: &str| vec![(point.to_owned(), Fault::Kill)];
    switched(host, at("stop.machine_ending"), at("start.row_writing")).await;
}

pub(super) async fn a_machine_is_whole_whatever_is_killed_or_fails_as_it_stops_and_starts(
    host: Host,
) {
    switched(host, faults_of("stop"), faults_of("start")).await;
}

/// Together, for a boot takes long.
async fn switched(host: Host, off: Vec<(String, Fault)>, on: Vec<(String, Fault)>) {
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let id = machine(&victim).await.id;
    let (client, options) = (victim.server.client(), WriteOptions::default());
    client.write_file(&id, "/srv/kept", patterned(100_000), &options).await.unwrap();
    assert_eq!(off.len(), on.len());
    for (off, on) in off.into_iter().zip(on) {
        stops(&mut victim, &id, off).await;
        starts(&mut victim, &id, on).await;
    }
    victim.server.client().delete_machine(&id, RootDisk::Goes).await.unwrap();
    host.end(victim.server).await;
}

pub(super) async fn a_machine_that_is_not_made_leaves_no_disk(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    // Its size is baked by now, so that the point is come by.
    let first = machine(&victim).await.id;
    victim.server.client().delete_machine(&first, RootDisk::Goes).await.unwrap();
    for (point, fault) in faults_of("machine") {
        victim.arm(&point, fault).await;
        let made = victim.server.client().create_machine(&CreateMachine::default()).await;
        assert!(made.is_err(), "{point}: {made:?}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        until(&point, SETTLED, async || {
            let machines = client.machines().await.unwrap();
            let volumes = client.volumes().await.unwrap();
            let stored = fs::read_dir(victim.server.data().join("volumes")).unwrap().count();
            let now = Footprint::of(victim.server.data());
            let nothing = (machines.len(), volumes.len(), stored) == (0, 0, 0);
            (nothing && now.processes.is_empty() && now.files.is_empty()).then_some(())
        })
        .await;
    }
    host.end(victim.server).await;
}
