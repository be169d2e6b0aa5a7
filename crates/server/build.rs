//! Builds `atoll-agent` and hands it to `agent_binary.rs`, so that the program is one file and its agent always the
//! one of the same source. A target directory of its own: the outer cargo holds the lock of the usual one.
//! `ATOLL_AGENT` names a finished agent instead.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Static: the agent runs before there is any library, in root file systems of any kind.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const STATIC: &str = "-C target-feature=+crt-static";

fn main() {
    let variable = |name: &str| env::var_os(name).map(PathBuf::from);
    let out = variable("OUT_DIR").expect("cargo sets OUT_DIR");
    let root = variable("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR").join("../..");
    println!("cargo::rerun-if-env-changed=ATOLL_AGENT");
    let agent = if let Some(finished) = variable("ATOLL_AGENT") {
        println!("cargo::rerun-if-changed={}", finished.display());
        finished
    } else {
        build(&root, &target_directory(&out).join("agent"))
    };
    fs::copy(&agent, out.join("atoll-agent"))
        .unwrap_or_else(|error| panic!("copy {}: {error}", agent.display()));
}

/// The outer cargo's: `TARGET_DIR/[TRIPLE/]PROFILE/build/PACKAGE/out` is where this script writes.
fn target_directory(out: &Path) -> &Path {
    let above = out.ancestors().nth(4).expect("OUT_DIR lies in a target directory");
    if above.ends_with(TARGET) { above.parent().unwrap_or(above) } else { above }
}

fn build(root: &Path, target_directory: &Path) -> PathBuf {
    for source in ["crates/agent", "crates/protocol", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={}", root.join(source).display());
    }
    let mut cargo = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"));
    cargo
        .args([
            "build",
            "--release",
            "--package",
            "agent",
            "--bin",
            "atoll-agent",
            "--target",
            TARGET,
        ])
        .arg("--target-dir")
        .arg(target_directory)
        .current_dir(root)
        .env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
    // What the outer cargo was told about its own build (clippy's wrapper, flags, coverage) is not meant for the agent.
    for outer in
        ["RUSTC_WRAPPER", "RUSTC_WORKSPACE_WRAPPER", "CARGO_BUILD_TARGET", "CARGO_TARGET_DIR"]
    {
        cargo.env_remove(outer);
    }
    cargo.env_remove("CARGO_ENCODED_RUSTFLAGS").env("RUSTFLAGS", STATIC);
    let status = cargo.status().expect("cargo runs, for it runs this script");
    assert!(status.success(), "build the guest agent: its errors are above");
    target_directory.join(TARGET).join("release/atoll-agent")
}
