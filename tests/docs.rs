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
    getting_started_works;
    soak: the_guide_to_templates_works,
}

/// Each has a claim below.
const RUN: [&str; 5] = [
    "README.md",
    "docs/guides/command-line.md",
    "docs/guides/files-and-commands.md",
    "docs/guides/getting-started.md",
    "docs/guides/templates.md",
];

fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

fn examples(document: &Path) -> String {
    let text = std::fs::read_to_string(document).unwrap();
    let mut inside = false;
    let mut script = String::new();
    for line in text.lines() {
        match (inside, line) {
            (false, "```sh") => inside = true,
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

async fn getting_started_works(host: Host) {
    works(&host, "docs/guides/getting-started.md").await;
}

async fn the_guide_to_templates_works(host: Host) {
    works(&host, "docs/guides/templates.md").await;
}
