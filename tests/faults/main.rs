//! The server fails or dies at every step of an operation, and then nothing is lost, nothing happened twice, nothing is
//! left.
//!
//! The points are read from the sources: those named `create.…` are tried by the claims about creates, and so on. One
//! that its operation does not come by fails the claim.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

mod commands;
mod creates;
mod databases;
mod machines;
mod removal;
mod rest;
mod snapshots;
mod volumes;

use std::{
    collections::BTreeSet,
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use api::{SandboxId, SandboxStatus};
use client::{SandboxFilter, WriteOptions};
use commands::{
    a_command_runs_at_most_once_whatever_is_killed_or_fails,
    a_command_with_a_key_runs_at_most_once_whatever_is_killed,
    a_write_is_whole_or_not_at_all_whatever_is_killed_or_fails,
    an_exec_runs_once_and_is_told_truly_whatever_is_killed_or_fails,
};
use creates::{
    a_create_that_fails_anywhere_leaves_nothing, a_create_that_is_killed_anywhere_leaves_nothing,
    what_is_asked_for_with_a_key_is_made_once_whatever_is_killed_or_fails,
};
use databases::{
    a_clone_of_a_database_is_made_whatever_is_killed_or_fails,
    a_database_can_be_gone_back_to_whatever_is_killed_or_fails_in_its_backup,
    a_database_is_reached_by_its_url_whatever_was_killed_or_failed_as_passwords_changed,
};
use machines::{
    a_machine_is_whole_whatever_is_killed_or_fails_as_it_stops_and_starts,
    a_machine_is_whole_whose_server_is_killed_as_it_stops_and_starts,
    a_machine_that_is_not_made_leaves_no_disk,
};
use removal::{
    a_delete_comes_to_its_end_whatever_is_killed_or_fails,
    a_start_comes_to_its_end_whatever_was_killed_or_failed,
};
use rest::a_sandbox_is_whole_whatever_is_killed_or_fails_on_its_way_to_rest_and_back;
use rustix::process::Signal;
use snapshots::{
    a_fork_leaves_nothing_but_children_whatever_is_killed_or_fails,
    a_snapshot_is_whole_or_not_at_all_whatever_is_killed_or_fails,
};
use tests::{
    Footprint, Host, Options, Server, command, failpoints_program, patterned, small, suite, until,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
};
use volumes::{
    a_sandbox_that_failed_to_wake_lets_go_of_what_it_wrote,
    a_volume_has_one_holder_whatever_is_killed_or_fails_as_it_comes_and_goes,
};

suite! {
    every_point_belongs_to_an_operation,
    a_create_that_is_killed_anywhere_leaves_nothing,
    a_create_that_fails_anywhere_leaves_nothing,
    what_is_asked_for_with_a_key_is_made_once_whatever_is_killed_or_fails,
    a_command_with_a_key_runs_at_most_once_whatever_is_killed,
    a_command_runs_at_most_once_whatever_is_killed_or_fails,
    an_exec_runs_once_and_is_told_truly_whatever_is_killed_or_fails,
    a_write_is_whole_or_not_at_all_whatever_is_killed_or_fails,
    a_delete_comes_to_its_end_whatever_is_killed_or_fails,
    a_start_comes_to_its_end_whatever_was_killed_or_failed,
    a_snapshot_is_whole_or_not_at_all_whatever_is_killed_or_fails,
    a_fork_leaves_nothing_but_children_whatever_is_killed_or_fails,
    a_clone_of_a_database_is_made_whatever_is_killed_or_fails,
    a_database_is_reached_by_its_url_whatever_was_killed_or_failed_as_passwords_changed,
    a_sandbox_is_whole_whatever_is_killed_or_fails_on_its_way_to_rest_and_back,
    a_machine_is_whole_whose_server_is_killed_as_it_stops_and_starts,
    a_volume_has_one_holder_whatever_is_killed_or_fails_as_it_comes_and_goes,
    a_machine_that_is_not_made_leaves_no_disk,
    a_sandbox_that_failed_to_wake_lets_go_of_what_it_wrote;
    soak: a_machine_is_whole_whatever_is_killed_or_fails_as_it_stops_and_starts,
        a_database_can_be_gone_back_to_whatever_is_killed_or_fails_in_its_backup,
}

const OPERATIONS: [&str; 20] = [
    "create",
    "exec",
    "execs",
    "write",
    "delete",
    "sweep",
    "snapshot",
    "fork",
    "pause",
    "resume",
    "hibernate",
    "wake",
    "keyed",
    "machine",
    "stop",
    "start",
    "attach",
    "detach",
    "backup",
    "renew",
];

const SETTLED: Duration = Duration::from_secs(60);

/// A place in the sources at which the program under test can be killed, and perhaps fail.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    name: String,
    may_fail: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    Kill,
    Error,
}

impl Fault {
    /// Once, so that what follows is undisturbed.
    fn action(self) -> &'static str {
        match self {
            Self::Kill => "1*return(kill)",
            Self::Error => "1*return(error)",
        }
    }
}

fn all_points() -> BTreeSet<Point> {
    let mut points = BTreeSet::new();
    gather(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates"), &mut points);
    points
}

fn gather(directory: &Path, points: &mut BTreeSet<Point>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            gather(&path, points);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path).unwrap();
            for call in text.split("fault::point!(").skip(1) {
                let (name, rest) =
                    call.trim_start().trim_start_matches('"').split_once('"').unwrap();
                let may_fail = rest.trim_start().starts_with(',');
                points.insert(Point { name: name.to_owned(), may_fail });
            }
        }
    }
}

/// Each with what can befall it.
fn faults_of(operation: &str) -> Vec<(String, Fault)> {
    let prefix = format!("{operation}.");
    let points = all_points().into_iter().filter(|point| point.name.starts_with(&prefix));
    let faults: Vec<_> = points
        .flat_map(|Point { name, may_fail }| {
            let error = may_fail.then(|| (name.clone(), Fault::Error));
            [(name, Fault::Kill)].into_iter().chain(error)
        })
        .collect();
    assert!(!faults.is_empty());
    faults
}

async fn every_point_belongs_to_an_operation(_: Host) {
    let mut names = BTreeSet::new();
    for point in all_points() {
        let operation = point.name.split_once('.').unwrap().0;
        assert!(OPERATIONS.contains(&operation), "no claim tries {point:?}");
        assert!(names.insert(point.name.clone()), "{point:?} can fail in one place only");
    }
}

/// A server that does as it is told, with a sandbox that must come to no harm.
struct Victim {
    server: Server,
    control: PathBuf,
    witness: SandboxId,
    _directory: tempfile::TempDir,
}

impl Victim {
    async fn start() -> Self {
        let mut victim = Self::alone().await;
        let witness = victim.server.create(&small()).await.id;
        victim.witness = witness;
        let client = victim.server.client();
        client
            .write_file(&witness, "/srv/kept", patterned(100_000), &WriteOptions::default())
            .await
            .unwrap();
        // A command that goes on, whoever listens.
        let ticking = "while :; do date +%s%N > /srv/tick; sleep 0.5; done";
        drop(client.exec_stream(&witness, &command(ticking)).await.unwrap());
        until("it ticks", SETTLED, async || client.stat_file(&witness, "/srv/tick").await.ok())
            .await;
        victim
    }

    /// Without a witness.
    async fn alone() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("failpoints");
        let options = Options {
            program: Some(failpoints_program()),
            // Each create comes by everything.
            arguments: ["--ready-machines", "0"].map(str::to_owned).to_vec(),
            environment: vec![("ATOLL_FAILPOINTS", control.display().to_string())],
            ..Options::default()
        };
        let server = Server::start_with(options).await;
        Self { server, control, witness: SandboxId::random(), _directory: directory }
    }

    async fn arm(&self, point: &str, fault: Fault) {
        let mut connection = UnixStream::connect(&self.control).await.unwrap();
        let line = format!("{point}={}\n", fault.action());
        connection.write_all(line.as_bytes()).await.unwrap();
        let mut told = String::new();
        BufReader::new(connection).read_line(&mut told).await.unwrap();
        assert_eq!(told, "done\n", "{point}");
    }

    /// After an operation at one of whose points something was to happen; a server that was killed is up again.
    async fn is_over(&mut self, point: &str, fault: Fault) {
        if fault == Fault::Kill {
            let ended = self.server.ended().await;
            assert!(is_killed(ended), "{point}: {ended}");
            self.server.start_again().await;
        }
        let reached = format!("point=\"{point}\"");
        until(point, SETTLED, async || self.server.log().contains(&reached).then_some(())).await;
    }

    /// All that are listed run, nothing else is on the host, and the witness has noticed nothing.
    async fn is_sound(&self, after: &str) {
        let client = self.server.client();
        until(after, SETTLED, async || {
            let listed = client.sandboxes(&SandboxFilter::default()).await.unwrap();
            let settled = listed.iter().all(|sandbox| sandbox.status == SandboxStatus::Running);
            let ids: BTreeSet<_> =
                listed.iter().map(|sandbox| format!("sandboxes/{}", sandbox.id)).collect();
            let now = Footprint::of(self.server.data());
            let of = |kind: &str| -> BTreeSet<_> {
                now.files.iter().filter(|file| file.starts_with(kind)).cloned().collect()
            };
            let is_exact = of("sandboxes/") == ids
                && of("temporary/").is_empty()
                && [of("machines/").len(), now.processes.len(), now.namespaces.len()]
                    .iter()
                    .chain([&now.links.len()])
                    .all(|count| *count == ids.len());
            (settled && is_exact).then_some(())
        })
        .await;
        let shown = client.sandbox(&self.witness).await.unwrap();
        assert_eq!(shown.status, SandboxStatus::Running, "{after}");
        let kept = client.read_file(&self.witness, "/srv/kept").await.unwrap();
        assert!(kept.bytes().await.unwrap() == patterned(100_000), "{after}");
        let tick = async || {
            let content = client.read_file(&self.witness, "/srv/tick").await.unwrap();
            content.bytes().await.unwrap()
        };
        let before = tick().await;
        until(after, SETTLED, async || (tick().await != before).then_some(())).await;
    }

    /// All but the witness, which must work first.
    async fn delete_others(&self, after: &str) {
        let client = self.server.client();
        for sandbox in client.sandboxes(&SandboxFilter::default()).await.unwrap() {
            if sandbox.id != self.witness {
                let said = client.exec(&sandbox.id, &command("echo works")).await.unwrap();
                assert_eq!(said.stdout, "works\n", "{after}");
                client.delete_sandbox(&sandbox.id).await.unwrap();
            }
        }
    }

    fn instance(&self) -> u32 {
        let text = fs::read_to_string(self.server.data().join("instance")).unwrap();
        text.trim().parse().unwrap()
    }
}

fn is_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::KILL.as_raw())
}
