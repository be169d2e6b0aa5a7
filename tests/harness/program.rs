//! Where the program under test is.

use std::{
    path::{Path, PathBuf},
    time::SystemTime,
};

/// `ATOLL_PROGRAM` names it, as `cargo xtask test` does; else the newest that was built beside this test program.
///
/// # Panics
/// There is none.
pub fn program() -> PathBuf {
    if let Some(program) = std::env::var_os("ATOLL_PROGRAM") {
        return PathBuf::from(program);
    }
    let target = target_directory();
    ["release/atoll", "debug/atoll"]
        .iter()
        .map(|name| target.join(name))
        .max_by_key(|path| built_at(path))
        .filter(|path| path.exists())
        .expect(
            "the program is built first: run `cargo build -p atoll`, or let ATOLL_PROGRAM name it",
        )
}

/// The one with points at which it fails or dies: named by `ATOLL_FAILPOINTS_PROGRAM`, or made by `cargo xtask failpoints`.
///
/// # Panics
/// There is none.
pub fn failpoints_program() -> PathBuf {
    let program = std::env::var_os("ATOLL_FAILPOINTS_PROGRAM")
        .map_or_else(|| target_directory().join("debug/atoll-failpoints"), PathBuf::from);
    assert!(program.exists(), "{} is built first: `cargo xtask failpoints`", program.display());
    program
}

/// Of this workspace: this program is in `PROFILE/deps` below it.
pub(crate) fn target_directory() -> PathBuf {
    let this = std::env::current_exe().expect("a program knows its path");
    this.ancestors().nth(3).expect("cargo puts test programs below the target directory").to_owned()
}

fn built_at(program: &Path) -> Option<SystemTime> {
    program.metadata().and_then(|metadata| metadata.modified()).ok()
}
