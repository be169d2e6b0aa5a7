//! Many creates and deletes at once, a third of them broken off half-way: each works or is refused in the way clients
//! repeat, none hangs, nothing is left, and the server's memory stays as it was.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateSandbox, Sandbox, SandboxStatus};
use client::{Client, Error, SandboxFilter};
use futures::future::join_all;
use rustix::process::{Signal, kill_process};
use tests::{End, Footprint, Host, Server, command, pause, small, suite, until};

suite! {
    sixty_creates_and_deletes_in_bursts_leave_nothing;
    soak: five_hundred_creates_and_deletes_in_bursts_leave_nothing
}

/// At once.
const BURST: usize = 50;
/// Under software emulation a burst keeps every core busy for as long as its guests take to start.
const PATIENCE: Duration = Duration::from_secs(240);
const SETTLED: Duration = Duration::from_secs(90);
/// What a server may grow by over hundreds of sandboxes: the C library's arenas, not anything for each of them.
const GROWTH: u64 = 8 << 20;

/// How one create goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Course {
    /// To its end: a command, a delete.
    Whole,
    /// Nobody waits for the answer.
    ClientLeaves,
    DeletedWhileCreating,
    MachineKilled,
}

/// A third of them go wrong.
fn course_of(number: usize) -> Course {
    match number % 9 {
        2 => Course::ClientLeaves,
        5 => Course::DeletedWhileCreating,
        8 => Course::MachineKilled,
        _ => Course::Whole,
    }
}

/// What clients repeat (contract: nothing was created); anything else is a failure of the server.
fn is_refused_for_capacity(error: &Error) -> bool {
    error.may_retry_after().is_some() || error.status() == Some(507)
}

/// Whether it was made; a refusal in the way clients repeat is as good.
async fn go(server: &Server, tag: &str, number: usize) -> bool {
    let client = server.client();
    let metadata = BTreeMap::from([("burst".to_owned(), format!("{tag}-{number}"))]);
    let request = CreateSandbox { metadata: Some(metadata), ttl_seconds: Some(1800), ..small() };
    let course = course_of(number);
    match course {
        Course::ClientLeaves => {
            let patience = Duration::from_millis(20 + 37 * number as u64);
            let created = tokio::time::timeout(patience, client.create_sandbox(&request)).await;
            if let Ok(created) = created {
                finish(client, created).await;
            }
            true
        }
        Course::DeletedWhileCreating => {
            let creating = client.create_sandbox(&request);
            let deleting = async {
                let seen = until("it is listed", PATIENCE, async || {
                    find(client, tag, number).await.into_iter().next()
                });
                // Refused, it is never listed.
                if let Ok(seen) = tokio::time::timeout(Duration::from_secs(45), seen).await {
                    gone(client, &seen).await;
                }
            };
            let (created, ()) = tokio::join!(creating, deleting);
            match created {
                Ok(_) => true,
                Err(error) => {
                    let status = error.status();
                    assert!(
                        is_refused_for_capacity(&error) || matches!(status, Some(404 | 409 | 410)),
                        "{error:?}"
                    );
                    false
                }
            }
        }
        Course::Whole | Course::MachineKilled => match client.create_sandbox(&request).await {
            Ok(created) if course == Course::MachineKilled => {
                // It may have ended meanwhile.
                let _ = kill_process(server.machine_of(&created.id), Signal::KILL);
                gone(client, &created).await;
                true
            }
            created => finish(client, created).await,
        },
    }
}

async fn finish(client: &Client, created: Result<Sandbox, Error>) -> bool {
    match created {
        Ok(sandbox) => {
            let said = client.exec(&sandbox.id, &command("echo works")).await.unwrap();
            assert_eq!(said.stdout, "works\n");
            gone(client, &sandbox).await;
            true
        }
        Err(error) => {
            assert!(is_refused_for_capacity(&error), "{error:?}");
            false
        }
    }
}

async fn gone(client: &Client, sandbox: &Sandbox) {
    match client.delete_sandbox(&sandbox.id).await {
        Ok(()) => {}
        Err(error) => assert_eq!(error.status(), Some(404), "{error:?}"),
    }
    assert_eq!(client.sandbox(&sandbox.id).await.unwrap_err().status(), Some(404));
}

async fn find(client: &Client, tag: &str, number: usize) -> Vec<Sandbox> {
    let metadata = vec![("burst".to_owned(), format!("{tag}-{number}"))];
    client.sandboxes(&SandboxFilter { metadata, ..SandboxFilter::default() }).await.unwrap()
}

/// How many were made.
async fn burst(server: &Server, tag: &str, count: usize) -> usize {
    let all = join_all((0..count).map(|number| go(server, tag, number)));
    let made = tokio::time::timeout(PATIENCE, all).await.expect("none hangs");
    made.into_iter().filter(|made| *made).count()
}

/// The server is killed in the middle of a burst whose clients learn of it, and another one is started.
async fn killed_burst(server: &mut Server, count: usize, after: Duration) {
    let client = server.client().clone();
    let creating: Vec<_> = (0..count)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move {
                let created = client.create_sandbox(&small()).await?;
                client.delete_sandbox(&created.id).await
            })
        })
        .collect();
    pause(after).await;
    server.restart(End::Killed).await;
    let ended = tokio::time::timeout(PATIENCE, join_all(creating)).await.expect("none hangs");
    for outcome in ended {
        // Done, refused, or broken off: only an answer that is none of these is wrong.
        if let Err(error) = outcome.unwrap()
            && let Some(status) = error.status()
        {
            assert!(is_refused_for_capacity(&error) || status == 404, "{error:?}");
        }
    }
}

/// Whom nobody waited for are deleted; then there is nothing but machines that stand ready.
async fn settle(server: &Server) {
    let client = server.client();
    until("all are running or gone", SETTLED, async || {
        let listed = client.sandboxes(&SandboxFilter::default()).await.unwrap();
        let moving = |sandbox: &Sandbox| {
            matches!(sandbox.status, SandboxStatus::Creating | SandboxStatus::Deleting)
        };
        (!listed.iter().any(moving)).then_some(())
    })
    .await;
    for sandbox in client.sandboxes(&SandboxFilter::default()).await.unwrap() {
        assert_eq!(sandbox.status, SandboxStatus::Running, "{sandbox:?}");
        gone(client, &sandbox).await;
    }
    until("nothing is left", SETTLED, async || {
        let now = Footprint::of(server.data());
        let of = |kind: &str| now.files.iter().filter(|file| file.starts_with(kind)).count();
        let machines = of("machines/");
        let is_clean = of("sandboxes/") + of("temporary/") == 0
            && [now.namespaces.len(), now.links.len(), now.processes.len()]
                .iter()
                .all(|count| *count == machines);
        is_clean.then_some(())
    })
    .await;
}

async fn sixty_creates_and_deletes_in_bursts_leave_nothing(host: Host) {
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    // Baked before, so that nobody is refused for that.
    let first = server.create(&small()).await;
    gone(server.client(), &first).await;
    killed_burst(&mut server, 10, Duration::from_millis(700)).await;
    settle(&server).await;
    let made = burst(&server, "short", BURST).await;
    assert!(made > 0, "some get through");
    settle(&server).await;
    host.end(server).await;
}

async fn five_hundred_creates_and_deletes_in_bursts_leave_nothing(host: Host) {
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    let first = server.create(&small()).await;
    gone(server.client(), &first).await;
    for round in 0..4 {
        killed_burst(&mut server, BURST, Duration::from_millis(300 + 900 * round)).await;
        settle(&server).await;
    }
    let (mut before, mut made) = ((0, 0), 0);
    for round in 0..6 {
        made += burst(&server, &format!("long{round}"), BURST).await;
        settle(&server).await;
        if round == 0 {
            before = (server.memory_bytes(), server.open_files());
        }
    }
    let after = (server.memory_bytes(), server.open_files());
    assert!(made >= 6 * BURST / 3, "{made} were made");
    assert!(after.0 <= before.0 + GROWTH, "{before:?} {after:?}");
    assert!(after.1 <= before.1 + 8, "{before:?} {after:?}");
    host.end(server).await;
}
