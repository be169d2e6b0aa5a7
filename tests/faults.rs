//! The server fails or dies at every step of an operation, and then nothing is lost, nothing happened twice, nothing is
//! left.
//!
//! The points are read from the sources: those named `create.…` are tried by the claims about creates, and so on. One
//! that its operation does not come by fails the claim.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    collections::BTreeSet,
    fs,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::ExitStatus,
    time::Duration,
};

use api::{
    CloneDatabase, CreateDatabase, CreateMachine, CreateSandbox, CreateSnapshot, CreateVolume,
    ExecState, ExecStream, Fork, ForkTree, Machine, SandboxId, SandboxStatus, StartExec,
    VolumeMount,
};
use client::{Method, RootDisk, SandboxFilter, WriteOptions};
use rustix::process::Signal;
use tests::{
    End, Footprint, Held, Host, Options, Server, clock_of, command, failpoints_program, from,
    patterned, pause, small, sql, suite, until,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    process::Command,
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
    a_sandbox_is_whole_whatever_is_killed_or_fails_on_its_way_to_rest_and_back,
    a_machine_is_whole_whose_server_is_killed_as_it_stops_and_starts,
    a_volume_has_one_holder_whatever_is_killed_or_fails_as_it_comes_and_goes,
    a_machine_that_is_not_made_leaves_no_disk,
    a_sandbox_that_failed_to_wake_lets_go_of_what_it_wrote;
    soak: a_machine_is_whole_whatever_is_killed_or_fails_as_it_stops_and_starts,
        a_database_can_be_gone_back_to_whatever_is_killed_or_fails_in_its_backup,
}

const OPERATIONS: [&str; 19] = [
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
];
const SETTLED: Duration = Duration::from_secs(60);
/// A slot that no machine of these tests gets.
const FAR_SLOT: u32 = 900;
/// As `server::sandbox::site` deals them out.
const UIDS_FROM: u32 = 1_900_000_000;

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

async fn a_create_that_is_killed_anywhere_leaves_nothing(host: Host) {
    creates_with(host, Fault::Kill).await;
}

async fn a_create_that_fails_anywhere_leaves_nothing(host: Host) {
    creates_with(host, Fault::Error).await;
}

async fn what_is_asked_for_with_a_key_is_made_once_whatever_is_killed_or_fails(host: Host) {
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

async fn a_command_with_a_key_runs_at_most_once_whatever_is_killed(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    for (number, (point, fault)) in faults_of("keyed").into_iter().enumerate() {
        let (key, ran) = (format!("key-{number}"), format!("/srv/keyed-{number}"));
        let path = format!("/v1/sandboxes/{}/exec", victim.witness);
        let ask = async |victim: &Victim| {
            let request = command(format!("echo ran >> {ran}; echo said"));
            let request = victim.server.request(Method::POST, &path).json(&request);
            request.header("Idempotency-Key", &key).send().await
        };
        victim.arm(&point, fault).await;
        let first = ask(&victim).await;
        assert!(first.is_err() || fault == Fault::Error, "{point}: {first:?}");
        victim.is_over(&point, fault).await;
        let status = ask(&victim).await.unwrap().status().as_u16();
        assert_eq!(ask(&victim).await.unwrap().status(), status, "{point}");
        let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
        let counted = victim.server.client().exec(&victim.witness, &counting).await.unwrap();
        let times = counted.stdout.trim().parse::<usize>().unwrap();
        // Told as done only if it was done.
        assert!(times <= 1 && (times == 1 || status == 409), "{point}: {times} times, {status}");
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

async fn a_command_runs_at_most_once_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    for (number, (point, fault)) in faults_of("exec").into_iter().enumerate() {
        victim.arm(&point, fault).await;
        let ran = format!("/srv/ran-{number}");
        let request = command(format!("echo ran >> {ran}"));
        let done = victim.server.client().exec(&victim.witness, &request).await;
        assert!(done.is_err() || fault == Fault::Error, "{point}: {done:?}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        let count = async || {
            let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
            let counted = client.exec(&victim.witness, &counting).await.unwrap();
            counted.stdout.trim().parse::<usize>().unwrap()
        };
        if ["exec.started", "exec.ended", "exec.forgetting"].contains(&&*point) {
            until(&point, SETTLED, async || (count().await > 0).then_some(())).await;
        }
        let times = count().await;
        assert!(times <= 1, "{point}: the command ran {times} times");
        assert!(point != "exec.starting" || times == 0, "{point}: it was never sent");
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

/// Under an id of the client's, at each step of start, run, cancel and output.
async fn an_exec_runs_once_and_is_told_truly_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    let (piece, options) = (patterned(200_000), WriteOptions::default());
    let client = victim.server.client();
    client.write_file(&victim.witness, "/srv/piece", piece.clone(), &options).await.unwrap();
    for (number, (point, fault)) in faults_of("execs").into_iter().enumerate() {
        let machine = victim.witness;
        let cancels = point.starts_with("execs.cancel");
        let (name, ran) = (format!("e{number}").parse().unwrap(), format!("/srv/exec-{number}"));
        let last = if cancels { "sleep 600" } else { "sleep 1; exit 7" };
        let request = StartExec {
            exec_id: Some(name),
            script: format!("echo ran >> {ran}; cat /srv/piece; {last}"),
            timeout_sec: Some(600.0),
            cwd: None,
            env: None,
            user: None,
            stdin: None,
        };
        let name = request.exec_id.clone().unwrap();
        victim.arm(&point, fault).await;
        let client = victim.server.client();
        let started = client.start_exec(&machine, &request).await;
        // Each may be what comes by the point, and fail there.
        let _ = client.exec_output(&machine, &name, ExecStream::Stdout, 0, Duration::ZERO).await;
        if cancels {
            let _ = client.cancel_exec(&machine, &name).await;
        }
        victim.is_over(&point, fault).await;

        let client = victim.server.client();
        match client.start_exec(&machine, &request).await {
            Ok(_) => assert!(started.is_err(), "{point}: started twice"),
            Err(error) => assert_eq!(error.status(), Some(409), "{point}"),
        }
        if cancels {
            client.cancel_exec(&machine, &name).await.unwrap();
        }
        let exec = client.exec_end(&machine, &name).await.unwrap();
        let counting = command(format!("cat {ran} 2>/dev/null | wc -l"));
        let times = client.exec(&machine, &counting).await.unwrap().stdout;
        let times: usize = times.trim().parse().unwrap();
        assert!(times <= 1, "{point}: it ran {times} times");
        let mut output = Vec::new();
        loop {
            let offset = output.len() as u64;
            let page =
                client.exec_output(&machine, &name, ExecStream::Stdout, offset, SETTLED).await;
            let page = page.unwrap();
            output.extend(page.bytes);
            if page.eof {
                break;
            }
        }
        match exec.state {
            // Its server died before it had asked the guest.
            ExecState::Lost => {
                assert_eq!((point.as_str(), fault), ("execs.reserved", Fault::Kill));
                assert_eq!((exec.exit_code, times), (None, 0), "{point}");
            }
            ExecState::Failed => assert_eq!((exec.exit_code, times), (Some(7), 1), "{point}"),
            ExecState::Cancelled => assert!(cancels && times == 1, "{point}"),
            state @ (ExecState::Running | ExecState::Succeeded | ExecState::Expired) => {
                panic!("{point}: it is {state}")
            }
        }
        if exec.state != ExecState::Lost {
            assert_eq!(exec.stdout_bytes, piece.len() as u64, "{point}");
            let is_cut = point == "execs.output_writing" && fault == Fault::Error;
            assert_eq!(exec.truncated, is_cut, "{point}");
            assert!(if is_cut { piece.starts_with(&output) } else { output == piece }, "{point}");
        }
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

async fn a_write_is_whole_or_not_at_all_whatever_is_killed_or_fails(host: Host) {
    const PATH: &str = "/srv/written/file";
    let _room = host.room(1).await;
    let mut victim = Victim::start().await;
    let mut old = b"the first".to_vec();
    let client = victim.server.client();
    client.write_file(&victim.witness, PATH, old.clone(), &WriteOptions::default()).await.unwrap();
    for (number, (point, fault)) in faults_of("write").into_iter().enumerate() {
        victim.arm(&point, fault).await;
        let new = patterned(700_000 + number);
        let options = WriteOptions::default();
        let client = victim.server.client();
        let written = client.write_file(&victim.witness, PATH, new.clone(), &options).await;
        assert!(written.is_err(), "{point}: {written:?}");
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        // The guest has put away what it was left with.
        until(&point, SETTLED, async || {
            let listed = client.list_directory(&victim.witness, "/srv/written").await.unwrap();
            (listed.entries.len() == 1).then_some(())
        })
        .await;
        let content = client.read_file(&victim.witness, PATH).await.unwrap();
        let content = content.bytes().await.unwrap();
        assert!(content == old || content == new, "{point}: {} bytes", content.len());
        if fault == Fault::Error {
            assert!(content == old, "{point}: a write that failed has changed the file");
        }
        assert!(point != "write.answering" || content == new, "{point}: the guest had it all");
        old = content.to_vec();
        victim.is_sound(&point).await;
    }
    host.end(victim.server).await;
}

async fn a_delete_comes_to_its_end_whatever_is_killed_or_fails(host: Host) {
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

async fn a_start_comes_to_its_end_whatever_was_killed_or_failed(host: Host) {
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

async fn a_snapshot_is_whole_or_not_at_all_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(2).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("snapshot") {
        victim.arm(&point, fault).await;
        let request = CreateSnapshot::default();
        let taken = victim.server.client().create_snapshot(&victim.witness, &request).await;
        assert!(taken.is_err(), "{point}: {taken:?}");
        victim.is_over(&point, fault).await;
        // It ticks: nothing was left frozen.
        victim.is_sound(&point).await;
        let client = victim.server.client();
        let listed = client.snapshots(None).await.unwrap();
        let stored = fs::read_dir(victim.server.data().join("snapshots")).unwrap().count();
        assert_eq!(stored, listed.len(), "{point}");
        assert!(listed.is_empty() || point == "snapshot.row_inserted", "{point}: {listed:?}");
        for snapshot in listed {
            let restored = victim.server.create(&from(&snapshot.id)).await.id;
            let kept = client.read_file(&restored, "/srv/kept").await.unwrap();
            assert!(kept.bytes().await.unwrap() == patterned(100_000), "{point}");
            client.delete_sandbox(&restored).await.unwrap();
            client.delete_snapshot(&snapshot.id).await.unwrap();
        }
    }
    host.end(victim.server).await;
}

async fn a_fork_leaves_nothing_but_children_whatever_is_killed_or_fails(host: Host) {
    let _room = host.room(3).await;
    let mut victim = Victim::start().await;
    for (point, fault) in faults_of("fork") {
        victim.arm(&point, fault).await;
        let forked = victim.server.client().fork(&victim.witness, &Fork::default()).await;
        assert!(forked.is_err(), "{point}: {forked:?}");
        victim.is_over(&point, fault).await;
        // What had come so far that it runs may as well be listed. Nothing lies among what is being made any longer.
        victim.is_sound(&point).await;
        assert!(victim.server.client().snapshots(None).await.unwrap().is_empty(), "{point}");
        victim.delete_others(&point).await;
    }
    let point = "snapshot.row_inserted";
    victim.arm(point, Fault::Kill).await;
    let tree = ForkTree { count: 2, metadata: None };
    victim.server.client().fork_tree(&victim.witness, &tree).await.unwrap_err();
    victim.is_over(point, Fault::Kill).await;
    victim.is_sound(point).await;
    assert!(victim.server.client().snapshots(None).await.unwrap().is_empty(), "of no child");
    assert_eq!(fs::read_dir(victim.server.data().join("snapshots")).unwrap().count(), 0);
    host.end(victim.server).await;
}

async fn a_sandbox_is_whole_whatever_is_killed_or_fails_on_its_way_to_rest_and_back(host: Host) {
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

async fn machine(victim: &Victim) -> Machine {
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

async fn a_machine_is_whole_whose_server_is_killed_as_it_stops_and_starts(host: Host) {
    let at = |point: &str| vec![(point.to_owned(), Fault::Kill)];
    switched(host, at("stop.machine_ending"), at("start.row_writing")).await;
}

async fn a_machine_is_whole_whatever_is_killed_or_fails_as_it_stops_and_starts(host: Host) {
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

async fn a_volume_has_one_holder_whatever_is_killed_or_fails_as_it_comes_and_goes(host: Host) {
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let id = machine(&victim).await.id;
    let client = victim.server.client();
    client.stop_machine(&id).await.unwrap();
    let request = CreateVolume {
        name: "moved".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    let name = client.create_volume(&request).await.unwrap().name;
    for (operation, after) in [("attach", Some(id)), ("detach", None)] {
        for (point, fault) in faults_of(operation) {
            let client = victim.server.client();
            if operation == "attach" {
                client.detach_volume(&name, Some(&id)).await.unwrap();
            } else {
                client.attach_volume(&name, &id).await.unwrap();
            }
            victim.arm(&point, fault).await;
            let client = victim.server.client();
            let done = if operation == "attach" {
                client.attach_volume(&name, &id).await
            } else {
                client.detach_volume(&name, Some(&id)).await
            };
            assert!(done.is_err(), "{point}: {done:?}");
            victim.is_over(&point, fault).await;
            let client = victim.server.client();
            let (volume, machine) =
                (client.volume(&name).await.unwrap(), client.machine(&id).await.unwrap());
            assert_eq!(volume.attached_to.is_some(), machine.volumes.len() == 1, "{point}");
            let again = if operation == "attach" {
                client.attach_volume(&name, &id).await.unwrap()
            } else {
                client.detach_volume(&name, Some(&id)).await.unwrap()
            };
            assert_eq!(again.attached_to, after, "{point}");
        }
    }
    victim.server.client().delete_volume(&name).await.unwrap();
    host.end(victim.server).await;
}

async fn a_machine_that_is_not_made_leaves_no_disk(host: Host) {
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

async fn a_sandbox_that_failed_to_wake_lets_go_of_what_it_wrote(host: Host) {
    let _room = host.room(3).await;
    let victim = Victim::start().await;
    let client = victim.server.client();
    let volume = CreateVolume {
        name: "held".parse().unwrap(),
        size_mb: Some(64),
        size_gb: None,
        from_volume: None,
    };
    client.create_volume(&volume).await.unwrap();
    let with = |read_only| {
        let mount = VolumeMount { name: "held".to_owned(), read_only, mount_path: None };
        CreateSandbox { volumes: Some(vec![mount]), ..small() }
    };
    for (number, point) in ["create.guest_connecting", "create.repairing"].iter().enumerate() {
        let writer = victim.server.create(&with(false)).await.id;
        let append = command("echo line >> /mnt/held/lines; sync; wc -l < /mnt/held/lines");
        let counted = client.exec(&writer, &append).await.unwrap().stdout;
        assert_eq!(counted.trim(), (number + 1).to_string());
        client.hibernate(&writer).await.unwrap();
        victim.arm(point, Fault::Error).await;
        assert!(client.wake(&writer).await.is_err(), "{point}");
        // Its memory knows less than the volume holds, so it never comes back; the volume is whole, and free.
        assert_eq!(client.sandbox(&writer).await.unwrap().status, SandboxStatus::Failed);
        until(point, SETTLED, async || {
            client.volume(&volume.name).await.unwrap().attached_to.is_none().then_some(())
        })
        .await;
        client.delete_sandbox(&writer).await.unwrap();
    }
    // What only reads has changed nothing, and can be woken again.
    let reader = victim.server.create(&with(true)).await.id;
    client.hibernate(&reader).await.unwrap();
    victim.arm("create.repairing", Fault::Error).await;
    assert!(client.wake(&reader).await.is_err());
    assert_eq!(client.sandbox(&reader).await.unwrap().status, SandboxStatus::Hibernated);
    let counted = client.exec(&reader, &command("wc -l < /mnt/held/lines")).await.unwrap();
    assert_eq!(counted.stdout, "2\n");
    client.delete_sandbox(&reader).await.unwrap();
    client.delete_volume(&volume.name).await.unwrap();
    victim.is_sound("failed wakes").await;
    host.end(victim.server).await;
}

async fn a_database_can_be_gone_back_to_whatever_is_killed_or_fails_in_its_backup(host: Host) {
    /// From the failure of one to the next.
    const BACKED_UP: Duration = Duration::from_secs(200);
    let _room = host.room(1).await;
    let mut victim = Victim::alone().await;
    let mut databases = Vec::new();
    for (point, fault) in faults_of("backup") {
        victim.arm(&point, fault).await;
        let client = victim.server.client().clone();
        // Its first backup follows when its clients have gone.
        let request = CreateDatabase { idle_seconds: Some(6), ..CreateDatabase::default() };
        let begun = client.create_database(&request).await.unwrap();
        let made = client.database_ready(&begun.id, BACKED_UP).await.unwrap();
        let url = made.connection.unwrap().connection_url;
        sql(&url, "CREATE TABLE ledger AS SELECT 'before' AS entry").await;
        victim.is_over(&point, fault).await;
        let client = victim.server.client();
        until(&point, BACKED_UP, async || {
            sql(&url, "SELECT 1").await;
            pause(Duration::from_secs(4)).await;
            let seen = client.database(&made.id).await.unwrap();
            (seen.last_backup_at.is_some() && seen.backup_error.is_none()).then_some(())
        })
        .await;
        let chains = victim.server.data().join("database-backups").join(made.id.to_string());
        let bases = (fs::read_dir(chains).unwrap())
            .flat_map(|chain| fs::read_dir(chain.unwrap().path()).unwrap())
            .filter(|entry| {
                entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("base-")
            });
        assert_eq!(bases.count(), 1, "{point}: what was broken off is there still");
        databases.push((point, made.id, url));
    }
    for (point, id, url) in &databases {
        let target_time = Some(clock_of(url).await);
        sql(url, "INSERT INTO ledger VALUES ('after')").await;
        let client = victim.server.client();
        let request = CloneDatabase { target_time, ..CloneDatabase::default() };
        let begun = client.clone_database(id, &request).await.unwrap();
        let then = client.database_ready(&begun.id, BACKED_UP).await.unwrap();
        let then_url = then.connection.expect(point).connection_url;
        assert_eq!(sql(&then_url, "SELECT entry FROM ledger").await, "before", "{point}");
        client.delete_database(&then.id).await.unwrap();
        client.delete_database(id).await.unwrap();
    }
    host.end(victim.server).await;
}
