//! Creates, with a key and without.

use std::collections::BTreeSet;

use client::{Method, SandboxFilter};
use tests::{Host, command, small, until};

use super::{Fault, SETTLED, Victim, faults_of};

async fn creates_with(host: Host, fault: Fault) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    for (point, _) in faults_of("create").into_iter().filter(|(_, of)| *of == fault) {
        victim.arm(&point, fault).await;
        let created = victim.server.client().create_sandbox(&small()).await;
        assert!(created.is_err(), "{point}: {created:?}");
        if fault == Fault::Error {
            let status = created.unwrap_err().status();
            assert!(status.is_some_and(|status| status >= 500), "{point}: {status:?}");
        }
        victim.is_over(&point, fault).await;
        // What had come so far that it runs may as well be listed; what failed may not.
        victim.is_sound(&point).await;
        if fault == Fault::Error {
            let listed = victim.server.client().sandboxes(&SandboxFilter::default()).await.unwrap();
            assert_eq!(listed.len(), 1, "{point}: {listed:?}");
        }
        victim.delete_others(&point).await;
    }
    let fresh = victim.server.create(&small()).await;
    let said = victim.server.client().exec(&fresh.id, &command("echo works")).await.unwrap();
    assert_eq!(said.stdout, "works\n");
    host.end(victim.server).await;
}

pub(super) async fn a_create_that_is_killed_anywhere_leaves_nothing(host: Host) {
    creates_with(host, Fault::Kill).await;
}

pub(super) async fn a_create_that_fails_anywhere_leaves_nothing(host: Host) {
    creates_with(host, Fault::Error).await;
}

pub(super) async fn what_is_asked_for_with_a_key_is_made_once_whatever_is_killed_or_fails(
    host: Host,
) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    let points = faults_of("keyed").into_iter().chain(faults_of("create"));
    for (number, (point, fault)) in points.enumerate() {
        let key = format!("key-{number}");
        let ask = async |victim: &Victim| {
            let request = victim.server.request(Method::POST, "/v1/sandboxes").json(&small());
            request.header("Idempotency-Key", &key).send().await
        };
        victim.arm(&point, fault).await;
        let first = ask(&victim).await;
        let is_made = first.is_ok_and(|answer| answer.status() == 201);
        assert!(!is_made, "{point}");
        victim.is_over(&point, fault).await;
        let mut made = BTreeSet::new();
        for _ in 0..2 {
            let answer = until(&point, SETTLED, async || {
                let answer = ask(&victim).await.unwrap();
                (answer.status() != 503 && answer.status() != 507).then_some(answer)
            });
            let answer = answer.await;
            assert_eq!(answer.status(), 201, "{point}");
            made.insert(answer.json::<api::Sandbox>().await.unwrap().id);
        }
        victim.is_sound(&point).await;
        let listed = victim.server.client().sandboxes(&SandboxFilter::default()).await.unwrap();
        assert_eq!((made.len(), listed.len()), (1, 2), "{point}: {made:?} {listed:?}");
        victim.delete_others(&point).await;
    }
    host.end(victim.server).await;
}
