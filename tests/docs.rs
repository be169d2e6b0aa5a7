//! The examples of the documentation: every block marked `sh` works, in its order, in one shell for each document.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tests::{Host, program, suite};
use tokio::process::Command;

suite! {
    every_document_with_examples_is_run,
    the_readme_works,
    the_guide_to_the_command_line_works,
    the_guide_to_files_and_commands_works,
    the_guide_to_terminals_works,
    the_guide_to_networks_works,
    the_guide_to_ports_works,
    the_guide_to_volumes_works,
    the_guide_to_databases_works,
    the_guide_to_machines_works,
    the_guide_to_the_interpreter_works,
    getting_started_works,
    the_guide_to_production_works,
    the_guide_to_snapshots_works,
    the_guide_to_secrets_works,
    the_unit_is_one_that_systemd_takes,
    the_proxy_is_one_that_nginx_takes;
    soak: the_guide_to_templates_works,
}

/// Each has a claim below.
const RUN: [&str; 15] = [
    "README.md",
    "docs/guides/command-line.md",
    "docs/guides/databases.md",
    "docs/guides/files-and-commands.md",
    "docs/guides/getting-started.md",
    "docs/guides/interpreter.md",
    "docs/guides/machines.md",
    "docs/guides/network.md",
    "docs/guides/ports.md",
    "docs/guides/production.md",
    "docs/guides/secrets.md",
    "docs/guides/snapshots.md",
    "docs/guides/templates.md",
    "docs/guides/terminals.md",
    "docs/guides/volumes.md",
];

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn examples(document: &Path) -> String {
    blocks(document, "```sh")
}

fn blocks(document: &Path, fence: &str) -> String {
    let text = std::fs::read_to_string(document).unwrap();
    let mut inside = false;
    let mut script = String::new();
    for line in text.lines() {
        match (inside, line) {
            (false, line) if line == fence => inside = true,
            (true, "```") => inside = false,
            (true, line) => {
                script.push_str(line);
                script.push('\n');
            }
            (false, _) => {}
        }
    }
    script
}

fn documents(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            found.extend(documents(&path));
        } else if path.extension().is_some_and(|extension| extension == "md") {
            found.push(path);
        }
    }
    found
}

async fn every_document_with_examples_is_run(_: Host) {
    let mut found = documents(&workspace().join("docs"));
    found.push(workspace().join("README.md"));
    for document in found.into_iter().filter(|document| !examples(document).is_empty()) {
        let name = document.strip_prefix(workspace()).unwrap().to_str().unwrap();
        assert!(RUN.contains(&name), "{name} has examples that nobody runs");
    }
}

async fn works(host: &Host, document: &str) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let script = examples(&workspace().join(document));
    assert!(!script.is_empty(), "{document} has no examples");
    let directory = tempfile::tempdir().unwrap();
    // The program under its name on the PATH, as the documents have it.
    let programs = directory.path().join(".programs");
    std::fs::create_dir(&programs).unwrap();
    std::os::unix::fs::symlink(program(), programs.join("atoll")).unwrap();
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let shell = Command::new("bash")
        .args(["-euo", "pipefail", "-c", &script])
        .current_dir(directory.path())
        .env("PATH", path)
        .env("ATOLL_URL", server.url())
        .env("ATOLL_KEY", server.key())
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(1200), shell)
        .await
        .expect("examples end")
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{document}: {}\n{out}\n{err}", output.status);
}

async fn the_readme_works(host: Host) {
    works(&host, "README.md").await;
}

async fn the_guide_to_the_command_line_works(host: Host) {
    works(&host, "docs/guides/command-line.md").await;
}

async fn the_guide_to_files_and_commands_works(host: Host) {
    works(&host, "docs/guides/files-and-commands.md").await;
}

async fn the_guide_to_terminals_works(host: Host) {
    works(&host, "docs/guides/terminals.md").await;
}

async fn the_guide_to_networks_works(host: Host) {
    works(&host, "docs/guides/network.md").await;
}

async fn the_guide_to_ports_works(host: Host) {
    works(&host, "docs/guides/ports.md").await;
}

async fn the_guide_to_volumes_works(host: Host) {
    works(&host, "docs/guides/volumes.md").await;
}

async fn the_guide_to_databases_works(host: Host) {
    works(&host, "docs/guides/databases.md").await;
}

async fn the_guide_to_machines_works(host: Host) {
    works(&host, "docs/guides/machines.md").await;
}

async fn the_guide_to_the_interpreter_works(host: Host) {
    works(&host, "docs/guides/interpreter.md").await;
}

async fn getting_started_works(host: Host) {
    works(&host, "docs/guides/getting-started.md").await;
}

async fn the_guide_to_templates_works(host: Host) {
    works(&host, "docs/guides/templates.md").await;
}

async fn the_guide_to_production_works(host: Host) {
    works(&host, "docs/guides/production.md").await;
}

async fn the_guide_to_snapshots_works(host: Host) {
    works(&host, "docs/guides/snapshots.md").await;
}

async fn the_guide_to_secrets_works(host: Host) {
    works(&host, "docs/guides/secrets.md").await;
}

async fn run(command: &mut Command) -> std::process::Output {
    let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
    tokio::time::timeout(Duration::from_secs(60), running).await.expect("it ends").unwrap()
}

fn exists(program: &str) -> bool {
    std::env::var("PATH").unwrap().split(':').any(|place| Path::new(place).join(program).exists())
}

async fn the_unit_is_one_that_systemd_takes(_: Host) {
    if !exists("systemd-analyze") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let unit = directory.path().join("atoll.service");
    let text = std::fs::read_to_string(workspace().join("packaging/atoll.service")).unwrap();
    // It has to be a program that is there.
    let text = text.replace("/usr/local/bin/atoll", program().to_str().unwrap());
    std::fs::write(&unit, text).unwrap();
    let output = run(Command::new("systemd-analyze").arg("verify").arg(&unit)).await;
    let said = String::from_utf8_lossy(&output.stderr);
    // Of other units of this host it may say what it likes.
    let ours: Vec<_> = said.lines().filter(|line| line.contains("atoll")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
    for setting in std::fs::read_to_string(workspace().join("packaging/atoll.env"))
        .unwrap()
        .lines()
        .filter_map(|line| line.trim_start_matches('#').split_once('='))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("ATOLL_"))
    {
        let help = run(Command::new(program()).args(["serve", "--help"])).await;
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(help.contains(&setting), "{setting} is no setting");
    }
}

async fn the_proxy_is_one_that_nginx_takes(_: Host) {
    if !exists("nginx") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let made = run(Command::new("openssl")
        .args(["req", "-x509", "-newkey", "rsa:2048", "-nodes"])
        .args([
            "-subj",
            "/CN=atoll.example.net",
            "-keyout",
            &at("privkey.pem"),
            "-out",
            &at("fullchain.pem"),
        ]))
    .await;
    assert!(made.status.success());
    let server = blocks(&workspace().join("docs/guides/production.md"), "```nginx")
        .replace("/etc/ssl/atoll", directory.path().to_str().unwrap());
    let places: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
        .iter()
        .map(|name| format!("{name}_temp_path {};", at(name)))
        .collect();
    let whole =
        format!("pid {}; events {{}} http {{ access_log off; {places} {server} }}", at("pid"));
    std::fs::write(at("nginx.conf"), whole).unwrap();
    let mut nginx = Command::new("nginx");
    nginx.args([
        "-t",
        "-e",
        "stderr",
        "-c",
        &at("nginx.conf"),
        "-p",
        directory.path().to_str().unwrap(),
    ]);
    let output = run(&mut nginx).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
