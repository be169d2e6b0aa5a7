//! The published package of the TypeScript client, with the command that it installs: `npm` brings it once.

use std::{fs, path::PathBuf, process::Stdio, time::Duration};

use tokio::process::Command;

const INSTALL_DEADLINE: Duration = Duration::from_secs(120);

/// The command. The package lies in `node_modules` two directories above.
///
/// # Panics
/// It cannot be had.
pub async fn published_command() -> PathBuf {
    let directory = std::env::temp_dir().join("atoll-published-command");
    let command = directory.join("node_modules/.bin/pandastack");
    if !command.exists() {
        fs::create_dir_all(&directory).expect("temporary files can be written");
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-audit", "--no-fund", "@pandastack/sdk@0.9.0"]);
        npm.current_dir(&directory).stdin(Stdio::null()).kill_on_drop(true);
        let installed = tokio::time::timeout(INSTALL_DEADLINE, npm.status()).await;
        let installed = installed.expect("npm answers").expect("npm can be started");
        assert!(installed.success(), "npm installs the published command");
    }
    command
}
