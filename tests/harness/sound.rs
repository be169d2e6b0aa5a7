//! What holds of a server at any time, and of a sandbox whose machine is gone.

use std::time::Duration;

use api::{SandboxId, SandboxStatus};
use client::SandboxFilter;

use crate::{Footprint, Server, command, until};

/// All that are listed work, and what is on the host belongs to them or stands ready.
///
/// # Panics
/// It does not hold.
pub async fn is_sound(server: &Server) {
    // What was half-made is being removed when the server has just started.
    let all = until("nothing is being deleted", Duration::from_secs(30), async || {
        let all = server.client().sandboxes(&SandboxFilter::default()).await;
        let all = all.expect("the server answers");
        let is_settled = all.iter().all(|sandbox| sandbox.status != SandboxStatus::Deleting);
        is_settled.then_some(all)
    })
    .await;
    for sandbox in &all {
        assert_eq!(sandbox.status, SandboxStatus::Running, "{sandbox:?}");
        let result = server
            .client()
            .exec(&sandbox.id, &command("echo works"))
            .await
            .expect("the server answers");
        assert_eq!(result.stdout, "works\n");
    }
    let ids: Vec<_> = all.iter().map(|sandbox| format!("sandboxes/{}", sandbox.id)).collect();
    let now = Footprint::of(server.data());
    for file in now.files.iter().filter(|file| file.starts_with("sandboxes/")) {
        assert!(ids.contains(file), "{file} belongs to nobody");
    }
    until(
        "each machine has a network, and each network a machine",
        Duration::from_secs(30),
        async || {
            let now = Footprint::of(server.data());
            let machines = now.files.iter().filter(|file| file.starts_with("machines/")).count();
            (now.processes.len() == machines
                && now.namespaces.len() == machines
                && now.links.len() == machines)
                .then_some(())
        },
    )
    .await;
}

/// It says so, refuses work, and can be deleted.
///
/// # Panics
/// It does not hold.
pub async fn has_failed(server: &Server, id: &SandboxId) {
    let failed = until("it has failed", Duration::from_secs(20), async || {
        let now = server.client().sandbox(id).await.expect("the server answers");
        (now.status == SandboxStatus::Failed).then_some(now)
    })
    .await;
    assert!(failed.error.is_some_and(|error| !error.is_empty()));
    let refused = server
        .client()
        .exec(id, &command("true"))
        .await
        .expect_err("a failed sandbox runs nothing");
    assert_eq!(refused.status(), Some(409), "{refused}");
    server.client().delete_sandbox(id).await.expect("the server answers");
    assert_eq!(server.get(&format!("/v1/sandboxes/{id}")).await.status, 404);
}

/// On these words the published clients would run a command again.
///
/// # Panics
/// The message has them.
pub fn will_not_be_repeated(message: &str) {
    for words in ["connection refused", "no route to host", "i/o timeout"] {
        assert!(!message.contains(words), "{message}");
    }
}
