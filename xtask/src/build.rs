//! Builds the programs that the suite and the bench start.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, ensure};
use cargo_metadata::MetadataCommand;

use crate::wait;

const HOST_TARGET: &str = "x86_64-unknown-linux-gnu";

/// `atoll`, as it is shipped.
pub(crate) fn release_program(root: &Path) -> anyhow::Result<PathBuf> {
    cargo(root, &["build", "--release", "--quiet", "--package", "atoll"], &[])?;
    Ok(target_directory()?.join("release/atoll"))
}

/// `atoll` with points at which it fails or dies. Built as the tests of the workspace are, whose dependencies then serve
/// for it as well: only our own crates differ.
pub(crate) fn failpoints_program(root: &Path) -> anyhow::Result<PathBuf> {
    let arguments = [
        "build",
        "--quiet",
        "--workspace",
        "--bin",
        "atoll",
        "--test",
        "faults",
        "--features",
        "atoll/failpoints",
    ];
    cargo(root, &arguments, &[])?;
    let built = target_directory()?.join("debug/atoll");
    let program = built.with_file_name("atoll-failpoints");
    // Nobody shall take it for the other; the next build of that one puts it back.
    std::fs::rename(&built, &program).context("name the program with failpoints")?;
    Ok(program)
}

/// Static, because it runs before there is a root file system.
pub(crate) fn floor_guest(root: &Path) -> anyhow::Result<PathBuf> {
    let arguments =
        ["build", "--release", "--quiet", "--package", "bench-guest", "--target", HOST_TARGET];
    cargo(root, &arguments, &[("RUSTFLAGS", "-C target-feature=+crt-static")])?;
    Ok(target_directory()?.join(HOST_TARGET).join("release/bench-guest"))
}

pub(crate) fn target_directory() -> anyhow::Result<PathBuf> {
    let metadata = MetadataCommand::new().no_deps().exec().context("read cargo's metadata")?;
    Ok(metadata.target_directory.into_std_path_buf())
}

/// Cargo as if a person had started it: what it told us about our own package would have build scripts run again that
/// look at it, and everything above them built again.
pub(crate) fn cargo_command(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    for (name, _) in std::env::vars_os() {
        let is_of_our_package = name.to_str().is_some_and(|name| {
            ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"]
                .iter()
                .any(|start| name.starts_with(start))
        });
        if is_of_our_package {
            command.env_remove(name);
        }
    }
    command
}

fn cargo(root: &Path, arguments: &[&str], environment: &[(&str, &str)]) -> anyhow::Result<()> {
    let line = format!("cargo {}", arguments.join(" "));
    let mut command = cargo_command(root);
    command.args(arguments).envs(environment.iter().copied());
    let mut child = command.spawn().with_context(|| format!("start `{line}`"))?;
    let status = wait::end_of(&mut child)?;
    ensure!(status.success(), "run `{line}`");
    Ok(())
}
