//! The set-up script: what it refuses, in one sentence each, and the pool that it makes. Needs root and a host that is
//! set up, apart from the pool.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    path::Path,
    process::{Command, Output},
};

use store::clone::can_reflink;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/setup.sh");

/// In a mount namespace of its own; `prepare` is a shell script that runs first.
fn set_up(pool: &Path, prepare: &str) -> Output {
    Command::new("unshare")
        .args(["--mount", "sh", "-c", &format!("{prepare}\nexec bash {SCRIPT}")])
        .env("ATOLL_POOL", pool)
        .output()
        .unwrap()
}

fn sentence(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    // Other tests set up at the same time.
    let lines: Vec<&str> =
        text.lines().filter(|line| !line.contains("waiting for another")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    lines[0].to_owned()
}

#[test]
fn what_is_missing_is_one_sentence() {
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("pool");
    let prepared = |prepare: &str| sentence(&set_up(&pool, prepare));

    let other_system = directory.path().join("os-release");
    std::fs::write(&other_system, "ID=other\nPRETTY_NAME=\"Other 1\"\n").unwrap();
    let said = prepared(&format!("mount --bind {} /etc/os-release", other_system.display()));
    assert!(said.contains("Other 1") && said.contains("Debian 12"), "{said}");

    let said = prepared(&format!("mount -t tmpfs -o size=1G none {}", directory.path().display()));
    assert!(said.contains("too little disk space"), "{said}");

    let devices = directory.path().join("devices");
    std::fs::create_dir(&devices).unwrap();
    let no_loop_devices = &format!(
        "cp -a /dev/null /dev/zero /dev/urandom {0}; mount --bind {0} /dev",
        devices.display()
    );
    let said = prepared(no_loop_devices);
    assert!(said.contains("loop device"), "{said}");

    let output = Command::new("setpriv")
        .args(["--reuid=65534", "--clear-groups", "bash", SCRIPT])
        .output()
        .unwrap();
    assert!(sentence(&output).contains("root"));

    std::fs::create_dir_all(&pool).unwrap();
    std::fs::write(pool.join("precious"), "").unwrap();
    let said = prepared("");
    assert!(said.contains("not empty"), "{said}");
}

#[test]
fn the_pool_is_made_once_and_mounted_again() {
    let directory = tempfile::tempdir().unwrap();
    let pool = directory.path().join("pool");
    let image = directory.path().join("pool.img");
    let set_up = || {
        let output = Command::new("bash").arg(SCRIPT).env("ATOLL_POOL", &pool).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let unmount = || assert!(Command::new("umount").arg(&pool).status().unwrap().success());

    assert!(set_up().contains("making"));
    let shares_blocks = can_reflink(&pool);
    std::fs::write(pool.join("file"), "kept").unwrap();
    let second = set_up();
    unmount();
    assert!(!pool.join("file").exists());
    let third = set_up();
    let kept = std::fs::read_to_string(pool.join("file"));
    unmount();
    assert!(shares_blocks.unwrap());
    assert!(!second.contains("mounting") && !second.contains("making"), "{second}");
    assert!(third.contains("mounting") && !third.contains("making"), "{third}");
    assert_eq!(kept.unwrap(), "kept");
    assert!(image.exists());
}
