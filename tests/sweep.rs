//! What servers that are gone leave on the host, and that only that goes.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::{Duration, SystemTime},
};

use api::SandboxStatus;
use serde_json::Value;
use tests::{End, Footprint, Host, Server, command, program, small, suite, until};
use tokio::process::Command;

suite! {
    an_instance_whose_data_directory_is_gone_is_removed,
    every_start_sweeps_what_dead_instances_left,
    control_groups_that_nothing_else_tells_of_are_removed,
    servers_that_run_and_servers_that_rest_keep_everything,
    what_no_row_names_goes_and_what_a_row_names_stays,
    a_data_directory_of_a_killed_set_up_goes,
    nothing_is_removed_for_a_database_that_is_not_its_own,
    without_root_it_says_so;
    soak:
}

/// Of all that a sweep found, the lines about this server.
async fn sweep(data: &Path, arguments: &[&str]) -> Vec<Value> {
    let command = Command::new(program())
        .args(["sweep", "--json", "--data-dir"])
        .arg(data)
        .args(arguments)
        .env_remove("ATOLL_DATA_DIR")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output =
        tokio::time::timeout(Duration::from_secs(120), command).await.expect("it ends").unwrap();
    // Others on this host may have something that cannot be removed.
    let said = String::from_utf8_lossy(&output.stderr);
    let swept: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{said}"));
    swept["leftovers"].as_array().unwrap().clone()
}

fn about<'a>(leftovers: &'a [Value], text: &str) -> Vec<&'a Value> {
    leftovers.iter().filter(|leftover| leftover.to_string().contains(text)).collect()
}

fn kinds(leftovers: &[&Value]) -> Vec<String> {
    let mut kinds: Vec<_> =
        leftovers.iter().map(|leftover| leftover["kind"].as_str().unwrap().to_owned()).collect();
    kinds.sort();
    kinds.dedup();
    kinds
}

/// Hides a data directory, as if somebody had deleted it.
struct Hidden {
    from: PathBuf,
    to: PathBuf,
}

impl Hidden {
    fn hide(data: &Path) -> Self {
        let to = data.with_extension("hidden");
        std::fs::rename(data, &to).unwrap();
        Self { from: data.to_owned(), to }
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        std::fs::rename(&self.to, &self.from).unwrap();
    }
}

/// A process that was killed may still wait for its parent.
async fn only_files_are_left(data: &Path) {
    until("nothing but files is left", Duration::from_secs(10), async || {
        let left = Footprint::of(data);
        (Footprint { files: left.files.clone(), ..Footprint::default() } == left).then_some(())
    })
    .await;
}

async fn an_instance_whose_data_directory_is_gone_is_removed(host: Host) {
    // Every start of another server sweeps, too.
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    let sandbox = server.create(&small()).await;
    server.stop(End::Killed).await;
    let elsewhere = tempfile::tempdir().unwrap();
    let data = server.data().to_owned();
    let before = Footprint::of(&data);
    assert!(!before.processes.is_empty() && !before.tables.is_empty());
    {
        let _hidden = Hidden::hide(&data);
        let looked = sweep(elsewhere.path(), &["--dry-run"]).await;
        let looked = about(&looked, data.to_str().unwrap());
        assert_eq!(kinds(&looked), ["claim", "interface", "namespace", "processes", "table"]);
        assert!(looked.iter().all(|leftover| leftover["outcome"] == "would_go"));
        // A dry run removes nothing.
        let again = sweep(elsewhere.path(), &["--dry-run"]).await;
        assert_eq!(about(&again, data.to_str().unwrap()).len(), looked.len());
        let removed = sweep(elsewhere.path(), &[]).await;
        let removed = about(&removed, data.to_str().unwrap());
        assert_eq!(removed.len(), looked.len());
        assert!(removed.iter().all(|leftover| leftover["outcome"] == "removed"), "{removed:?}");
        assert!(about(&sweep(elsewhere.path(), &[]).await, data.to_str().unwrap()).is_empty());
    }
    only_files_are_left(&data).await;
    // The directory comes back: its server finds out that the machine is gone.
    server.start_again().await;
    let status = server.client().sandbox(&sandbox.id).await.unwrap().status;
    assert_eq!(status, SandboxStatus::Failed);
    host.end(server).await;
}

async fn every_start_sweeps_what_dead_instances_left(host: Host) {
    let _room = host.room(3).await;
    let mut dead = Server::start().await;
    dead.stop(End::Killed).await;
    let data = dead.data().to_owned();
    assert!(!Footprint::of(&data).tables.is_empty());
    let number = std::fs::read_to_string(data.join("instance")).unwrap();
    let claim = format!("/run/atoll/instance-{}", number.trim());
    let hidden = Hidden::hide(&data);
    let other = Server::start().await;
    until("the start of another swept it", Duration::from_secs(30), async || {
        (!Path::new(&claim).exists()).then_some(())
    })
    .await;
    drop(hidden);
    only_files_are_left(&data).await;
    host.end(other).await;
    dead.start_again().await;
    host.end(dead).await;
}

async fn control_groups_that_nothing_else_tells_of_are_removed(_: Host) {
    // The uid of a machine of an instance that no server of this host has.
    let number = (0..1024)
        .rev()
        .find(|number| !Path::new(&format!("/run/atoll/instance-{number}")).exists());
    let uid = 1_900_000_000 + number.unwrap() * 1024 + 7;
    let hierarchies = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup"];
    let hierarchy = hierarchies.iter().find(|path| Path::new(path).join("cgroup.procs").exists());
    let group = Path::new(hierarchy.unwrap()).join(format!("atoll-{uid}.00c0ffee"));
    std::fs::create_dir(&group).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let told = format!("of uid {uid}");
    let looked = sweep(elsewhere.path(), &["--dry-run"]).await;
    // The start of another server may have been first.
    assert!(!about(&looked, &told).is_empty() || !group.exists(), "{looked:?}");
    sweep(elsewhere.path(), &[]).await;
    assert!(!group.exists());
}

async fn servers_that_run_and_servers_that_rest_keep_everything(host: Host) {
    let _room = host.room(2).await;
    let (running, mut resting) = tokio::join!(Server::start(), Server::start());
    let (one, other) = (running.create(&small()).await, resting.create(&small()).await);
    resting.stop(End::Asked).await;
    let before = Footprint::of(resting.data());
    assert!(!before.processes.is_empty());
    for data in [running.data(), resting.data()] {
        let swept = sweep(data, &[]).await;
        for owner in [running.data(), resting.data()] {
            assert!(about(&swept, owner.to_str().unwrap()).is_empty(), "{swept:?}");
        }
    }
    assert_eq!(Footprint::of(resting.data()), before);
    resting.start_again().await;
    for (server, sandbox) in [(&running, &one), (&resting, &other)] {
        let result = server.client().exec(&sandbox.id, &command("echo works")).await.unwrap();
        assert_eq!(result.stdout, "works\n");
    }
    host.end(running).await;
    host.end(resting).await;
}

async fn what_no_row_names_goes_and_what_a_row_names_stays(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let sandbox = server.create(&small()).await;
    server.stop(End::Asked).await;
    let data = server.data().to_owned();
    let before = Footprint::of(&data);
    let number: u32 =
        std::fs::read_to_string(data.join("instance")).unwrap().trim().parse().unwrap();
    let made = [
        data.join("sandboxes/00000000-0000-4000-8000-000000000000"),
        data.join("machines/77"),
        data.join("temporary/tree-1-0"),
    ];
    for directory in &made {
        std::fs::create_dir_all(directory.join("below")).unwrap();
    }
    let mut stray = std::process::Command::new("sleep")
        .arg("600")
        .uid(1_900_000_000 + number * 1024 + 77)
        .spawn()
        .unwrap();
    let namespace = format!("atoll-{number}-77");
    let ip = Command::new("ip").args(["netns", "add", &namespace]).status().await.unwrap();
    assert!(ip.success());

    let looked = sweep(&data, &["--dry-run"]).await;
    let outcome = |leftovers: &[Value], text: &str| {
        let found = about(leftovers, text);
        assert_eq!(found.len(), 1, "{text}: {leftovers:?}");
        found[0]["outcome"].as_str().unwrap().to_owned()
    };
    let user = format!("1 of uid {}", 1_900_000_000 + number * 1024 + 77);
    let names =
        || made.iter().map(|path| path.to_str().unwrap()).chain([user.as_str(), &namespace]);
    for name in names() {
        assert_eq!(outcome(&looked, name), "would_go");
    }
    assert!(made.iter().all(|path| path.exists()) && stray.try_wait().unwrap().is_none());
    let removed = sweep(&data, &[]).await;
    for name in names() {
        assert_eq!(outcome(&removed, name), "removed");
    }
    stray.wait().unwrap();
    assert_eq!(Footprint::of(&data), before, "what a row names is as it was");
    server.start_again().await;
    let result = server.client().exec(&sandbox.id, &command("echo works")).await.unwrap();
    assert_eq!(result.stdout, "works\n");
    host.end(server).await;
}

async fn a_data_directory_of_a_killed_set_up_goes(host: Host) {
    let _room = host.room(3).await;
    let mut server = Server::start().await;
    server.stop(End::Killed).await;
    let pool = server.data().parent().unwrap().to_owned();
    // As `prepare` and `demo` name theirs.
    let scratch = pool.join(format!("scratch-{}", std::process::id()));
    let number = std::fs::read_to_string(server.data().join("instance")).unwrap();
    let claim = PathBuf::from(format!("/run/atoll/instance-{}", number.trim()));
    std::fs::rename(server.data(), &scratch).unwrap();
    std::fs::write(&claim, scratch.as_os_str().as_encoded_bytes()).unwrap();
    let elsewhere = tempfile::tempdir_in(&pool).unwrap();
    let data = elsewhere.path().join("data");
    let young = sweep(&data, &[]).await;
    assert!(about(&young, scratch.to_str().unwrap()).is_empty(), "it may just be starting");
    let aged = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    let instance = std::fs::File::options().append(true).open(scratch.join("instance")).unwrap();
    instance.set_modified(aged).unwrap();
    // It lies beside the data directory of the settings.
    let beside = pool.join("nobody");
    let swept = sweep(&beside, &[]).await;
    let swept = about(&swept, scratch.to_str().unwrap());
    assert!(kinds(&swept).contains(&"data_directory".to_owned()), "{swept:?}");
    assert!(swept.iter().all(|leftover| leftover["outcome"] == "removed"), "{swept:?}");
    assert!(!scratch.exists() && !claim.exists());
    std::fs::create_dir(server.data()).unwrap();
    std::fs::write(server.data().join("instance"), number).unwrap();
    assert!(Footprint::of(server.data()).is_empty());
}

async fn nothing_is_removed_for_a_database_that_is_not_its_own(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let sandbox = server.create(&small()).await;
    server.stop(End::Asked).await;
    let before = Footprint::of(server.data());
    let elsewhere = tempfile::tempdir().unwrap();
    let database = format!("sqlite:{}", elsewhere.path().join("new.sqlite").display());
    let swept = sweep(server.data(), &["--database", &database]).await;
    assert!(about(&swept, server.data().to_str().unwrap()).is_empty(), "{swept:?}");
    assert!(!elsewhere.path().join("new.sqlite").exists(), "it makes no database");
    assert_eq!(Footprint::of(server.data()), before);
    // Nor does a server start with it, which would take the sandboxes for leftovers.
    let serve = Command::new(program())
        .args(["serve", "--listen", "127.0.0.1:0", "--database", &database, "--data-dir"])
        .arg(server.data())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let refused = tokio::time::timeout(Duration::from_secs(60), serve).await.unwrap().unwrap();
    assert!(!refused.status.success());
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(said.contains("--database"), "{said}");
    assert_eq!(Footprint::of(server.data()), before);
    server.start_again().await;
    let result = server.client().exec(&sandbox.id, &command("echo works")).await.unwrap();
    assert_eq!(result.stdout, "works\n");
    host.end(server).await;
}

async fn without_root_it_says_so(_: Host) {
    // The test's program may lie where only root gets to.
    let copy = tempfile::Builder::new().prefix("atoll").tempdir_in("/tmp").unwrap();
    let path = copy.path().join("atoll");
    std::fs::copy(program(), &path).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(copy.path(), open).unwrap();
    let output = Command::new(&path).arg("sweep").uid(65534).output().await.unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("root"));
}
