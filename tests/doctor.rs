//! `atoll doctor` on this host, and where something is really lacking.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    os::unix::{fs::PermissionsExt, fs::symlink},
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::Value;
use tests::{Host, program, suite};
use tokio::process::Command;

suite! {
    on_a_host_that_runs_sandboxes_nothing_fails,
    without_qemu_it_fails_and_says_what_to_install,
    a_file_system_without_reflinks_is_told,
    a_missing_tool_is_named_with_its_package,
    a_limit_of_open_files_is_told,
    a_port_in_use_is_told,
    it_works_without_root;
    soak:
}

fn doctor(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .args(["doctor", "--json"])
        .env_remove("ATOLL_DATA_DIR")
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

async fn output(command: &mut Command) -> Output {
    tokio::time::timeout(Duration::from_secs(120), command.output())
        .await
        .expect("it ends")
        .unwrap()
}

fn findings(output: &Output) -> Vec<Value> {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Verdict, what was found, and the advice.
fn line(findings: &[Value], check: &str) -> [String; 3] {
    let finding = findings.iter().find(|finding| finding["check"] == check);
    let finding = finding.unwrap_or_else(|| panic!("{check}: {findings:?}"));
    ["verdict", "found", "advice"]
        .map(|field| finding[field].as_str().unwrap_or_default().to_owned())
}

async fn on_a_host_that_runs_sandboxes_nothing_fails(_: Host) {
    let output = output(&mut doctor(&program())).await;
    let findings = findings(&output);
    let failed: Vec<_> = findings.iter().filter(|finding| finding["verdict"] == "fail").collect();
    assert!(failed.is_empty() && output.status.success(), "{failed:?}");
    for finding in &findings {
        let has_advice = finding["advice"].as_str().is_some_and(|advice| !advice.is_empty());
        assert!(finding["verdict"] == "ok" || has_advice, "no lack without advice: {finding}");
    }
    assert_eq!(line(&findings, "reflinks")[0], "ok");
    // The same for people.
    let shown = Command::new(program()).arg("doctor").stdin(Stdio::null()).output().await.unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("CHECK") && shown.contains("qemu") && shown.contains("ok "), "{shown}");
}

/// A PATH with everything of this host's but one program.
fn path_without(directory: &Path, left_out: &str) -> String {
    for place in std::env::var("PATH").unwrap().split(':') {
        for entry in std::fs::read_dir(place).into_iter().flatten().flatten() {
            let name = entry.file_name();
            if name != left_out {
                // The first of a name counts, as it does in PATH.
                let _ = symlink(entry.path(), directory.join(name));
            }
        }
    }
    directory.to_str().unwrap().to_owned()
}

async fn without_qemu_it_fails_and_says_what_to_install(_: Host) {
    let directory = tempfile::tempdir().unwrap();
    let path = path_without(directory.path(), "qemu-system-x86_64");
    let output = output(doctor(&program()).env("PATH", path)).await;
    assert_eq!(output.status.code(), Some(1));
    let [verdict, found, advice] = line(&findings(&output), "qemu");
    assert_eq!(verdict, "fail", "{found}");
    assert!(advice.contains("qemu-system-x86"), "{advice}");
}

async fn a_missing_tool_is_named_with_its_package(_: Host) {
    let directory = tempfile::tempdir().unwrap();
    let path = path_without(directory.path(), "mke2fs");
    let output = output(doctor(&program()).env("PATH", path)).await;
    assert_eq!(output.status.code(), Some(1));
    let [verdict, found, advice] = line(&findings(&output), "tools");
    assert_eq!((verdict.as_str(), found.as_str()), ("fail", "missing: mke2fs"));
    assert!(advice.contains("e2fsprogs"), "{advice}");
}

async fn a_file_system_without_reflinks_is_told(_: Host) {
    // Memory has no blocks to share.
    let pool = tempfile::tempdir_in("/dev/shm").unwrap();
    let output = output(doctor(&program()).arg("--pool").arg(pool.path())).await;
    let [verdict, found, advice] = line(&findings(&output), "reflinks");
    assert_eq!(verdict, "warn", "{found}");
    assert!(advice.contains("XFS"), "{advice}");
    assert_eq!(pool.path().read_dir().unwrap().count(), 0, "it leaves nothing behind");
}

async fn a_limit_of_open_files_is_told(_: Host) {
    let mut limited = Command::new("sh");
    limited
        .args(["-c", "ulimit -n 1000; exec \"$0\" doctor --json"])
        .arg(program())
        .env_remove("ATOLL_DATA_DIR")
        .stdin(Stdio::null());
    let [verdict, found, _] = line(&findings(&output(&mut limited).await), "open files");
    assert_eq!((verdict.as_str(), found.as_str()), ("warn", "at most 1000"));
}

async fn a_port_in_use_is_told(_: Host) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let output = output(doctor(&program()).args(["--listen", &address])).await;
    let [verdict, found, advice] = line(&findings(&output), "port");
    assert_eq!(verdict, "warn");
    assert!(found.contains(&address) && advice.contains("--listen"), "{found}: {advice}");
}

async fn it_works_without_root(_: Host) {
    // The test's program may lie where only root gets to.
    let copy = tempfile::Builder::new().prefix("atoll").tempdir_in("/tmp").unwrap();
    let path = copy.path().join("atoll");
    std::fs::copy(program(), &path).unwrap();
    std::fs::set_permissions(copy.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let output = output(doctor(&path).uid(65534).gid(65534)).await;
    let findings = findings(&output);
    assert_eq!(line(&findings, "user")[0], "warn");
    assert_eq!(line(&findings, "qemu")[0], "ok");
    for finding in &findings {
        assert_ne!(finding["verdict"], "fail", "what could not be tried does not fail: {finding}");
    }
}
