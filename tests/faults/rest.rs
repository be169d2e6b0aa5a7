//! Sandboxes that are paused, hibernated and woken.

use api::SandboxStatus;
use tests::{Held, Host, small};

use super::{Fault, Victim, faults_of};

pub(super) async fn a_sandbox_is_whole_whatever_is_killed_or_fails_on_its_way_to_rest_and_back(
    host: Host,
) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    let resting = victim.server.sandbox(&small()).await;
    let (id, held) = (resting.id, resting.hold().await);
    let ways = [
        ("pause", SandboxStatus::Running, SandboxStatus::Paused),
        ("resume", SandboxStatus::Paused, SandboxStatus::Running),
        ("hibernate", SandboxStatus::Running, SandboxStatus::Hibernated),
        ("wake", SandboxStatus::Hibernated, SandboxStatus::Running),
    ];
    for (verb, from, to) in ways {
        for (point, fault) in faults_of(verb) {
            let client = victim.server.client();
            match verb {
                "resume" => client.pause(&id).await.unwrap(),
                "wake" => client.hibernate(&id).await.unwrap(),
                _ => {}
            }
            victim.arm(&point, fault).await;
            let client = victim.server.client();
            let done = match verb {
                "pause" => client.pause(&id).await,
                "resume" => client.resume(&id).await,
                "hibernate" => client.hibernate(&id).await,
                _ => client.wake(&id).await,
            };
            assert!(done.is_err(), "{point}: {done:?}");
            victim.is_over(&point, fault).await;
            let client = victim.server.client();
            let status = client.sandbox(&id).await.unwrap().status;
            assert!(status == from || status == to, "{point}: {status:?}");
            assert!(fault == Fault::Kill || status == from, "{point}: {status:?}");
            client.resume(&id).await.unwrap();
            assert_eq!(Held::of(client, &id).await.unwrap(), held, "{point}");
            victim.is_sound(&point).await;
            let hibernated = victim.server.data().join(format!("sandboxes/{id}/hibernated"));
            assert!(!hibernated.exists(), "{point}");
        }
    }
    let client = victim.server.client();
    client.delete_sandbox(&id).await.unwrap();
    host.end(victim.server).await;
}
