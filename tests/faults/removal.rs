//! What is deleted, and what a dead server has left.

use std::fs;

use api::SandboxId;
use tests::{End, Host, small, until};
use tokio::process::Command;

use super::{Fault, SETTLED, Victim, faults_of, is_killed};

/// A slot that no machine of these tests gets.
const FAR_SLOT: u32 = 900;

/// As `server::sandbox::site` deals them out.
const UIDS_FROM: u32 = 1_900_000_000;

pub(super) async fn a_delete_comes_to_its_end_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("delete") {
        let doomed = victim.server.create(&small()).await.id;
        victim.arm(&point, fault).await;
        // Told or not: its network goes behind the answer.
        let deleted = victim.server.client().delete_sandbox(&doomed).await;
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        if deleted.is_ok() {
            assert_eq!(client.sandbox(&doomed).await.unwrap_err().status(), Some(404), "{point}");
        }
        until(&point, SETTLED, async || match client.delete_sandbox(&doomed).await {
            Err(error) if error.status() == Some(404) => Some(()),
            Ok(()) | Err(_) => None,
        })
        .await;
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

/// What a server could have left, and no row names.
async fn make_a_mess(victim: &Victim) -> tokio::process::Child {
    let data = victim.server.data();
    for directory in [
        format!("sandboxes/{}", SandboxId::random()),
        format!("machines/{FAR_SLOT}"),
        "temporary/discarded-1-0/content".to_owned(),
    ] {
        fs::create_dir_all(data.join(&directory)).unwrap();
        fs::write(data.join(&directory).join("rootfs"), b"left").unwrap();
    }
    let namespace = format!("atoll-{}-{FAR_SLOT}", victim.instance());
    let made = Command::new("ip").args(["netns", "add", &namespace]).status().await.unwrap();
    assert!(made.success());
    let uid = UIDS_FROM + victim.instance() * 1024 + FAR_SLOT;
    Command::new("sleep").arg("600").uid(uid).kill_on_drop(true).spawn().unwrap()
}

pub(super) async fn a_start_comes_to_its_end_whatever_was_killed_or_failed(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("sweep") {
        victim.server.stop(End::Killed).await;
        let mut process = make_a_mess(&victim).await;
        let told = format!("{point}={}", fault.action());
        let ended = victim.server.start_to_its_end(&[("FAILPOINTS", &told)]).await;
        match fault {
            Fault::Kill => assert!(is_killed(ended), "{point}: {ended}"),
            Fault::Error => assert!(ended.code().is_some_and(|code| code != 0), "{point}: {ended}"),
        }
        victim.server.start_again().await;
        let swept = tokio::time::timeout(SETTLED, process.wait()).await;
        assert!(is_killed(swept.expect("what is left over is ended").unwrap()));
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}
