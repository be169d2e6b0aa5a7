//! The set-up script: what it refuses, in one sentence each, and the pool that it makes. Needs root and a host that is
//! set up, apart from the pool.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs::{self, Permissions},
    os::unix::fs::PermissionsExt,
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
    fs::write(&other_system, "ID=other\nPRETTY_NAME=\"Other 1\"\n").unwrap();
    let said = prepared(&format!("mount --bind {} /etc/os-release", other_system.display()));
    assert!(said.contains("Other 1") && said.contains("Debian 12"), "{said}");

    let said = prepared(&format!("mount -t tmpfs -o size=1G none {}", directory.path().display()));
    assert!(said.contains("too little disk space"), "{said}");

    let devices = directory.path().join("devices");
    fs::create_dir(&devices).unwrap();
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

    fs::create_dir_all(&pool).unwrap();
    fs::write(pool.join("precious"), "").unwrap();
    let said = prepared("");
    assert!(said.contains("not empty"), "{said}");
}

/// What set-up writes into the apt sources of a Debian 12 with these; its QEMU is too old, and nothing is installed.
fn backports_of(sources: &[(&str, &str)]) -> Result<String, String> {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let shown = |name: &str| at(name).display().to_string();
    for made in ["apt/sources.list.d", "commands", "pool/precious"] {
        fs::create_dir_all(at(made)).unwrap();
    }
    for (name, text) in sources {
        fs::write(at("apt").join(name), text).unwrap();
    }
    fs::write(at("os-release"), "ID=debian\nVERSION_ID=12\nVERSION_CODENAME=bookworm\n").unwrap();
    let newer = shown("newer");
    let commands = [
        ("apt-cache", String::new()),
        ("apt-get", format!("case \"$*\" in *bookworm-backports*qemu*) touch {newer} ;; esac")),
        (
            "dpkg-query",
            format!(
                "case \"$*\" in *Version*) [ -e {newer} ] || exec echo 1:7.2 ;; esac\nexec /usr/bin/dpkg-query \"$@\""
            ),
        ),
    ];
    for (name, text) in commands {
        let path = at("commands").join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    let output = set_up(
        &at("pool"),
        &format!(
            "mount --bind {} /etc/apt; mount --bind {} /etc/os-release; export PATH={}:$PATH",
            shown("apt"),
            shown("os-release"),
            shown("commands")
        ),
    );
    let said = String::from_utf8(output.stderr).unwrap();
    let last = said.lines().last().unwrap_or_default().to_owned();
    // It ends at the pool, which is not empty, and before that at what is wrong with the packages.
    if !last.contains("not empty") {
        return Err(last);
    }
    assert!(at("newer").exists(), "{said}");
    Ok(fs::read_to_string(at("apt/sources.list.d/atoll-backports.sources")).unwrap())
}

#[test]
fn a_qemu_that_is_too_old_is_replaced_from_the_backports_of_the_hosts_own_mirror() {
    let stanza = |mirror: &str, more: &str| {
        format!(
            "# one\nTypes: deb\n# two\nURIs: {mirror}\nSuites: bookworm bookworm-updates\nComponents: main\n{more}"
        )
    };
    let one_line = "# deb http://not.example/debian bookworm main\n\
                    deb [arch=amd64 signed-by=/usr/share/keyrings/k.gpg] http://line.example/debian bookworm main\n";
    let modern = stanza("http://stanza.example/debian", "");
    let disabled = stanza("http://disabled.example/debian", "Enabled: no\n");
    let (file, list) = ("sources.list.d/debian.sources", "sources.list");
    for (sources, mirror) in [
        (&[(file, &*modern)][..], "stanza"),
        (&[(file, &*modern), (list, "")], "stanza"),
        (&[(list, one_line)], "line"),
        (&[("sources.list.d/debian.list", one_line)], "line"),
        (&[(file, &*disabled), (list, one_line)], "line"),
    ] {
        let written = backports_of(sources).unwrap();
        let uris = format!("\nURIs: http://{mirror}.example/debian\nSuites: bookworm-backports\n");
        assert!(written.contains(&uris), "{sources:?}: {written}");
    }
    for sources in [&[][..], &[(file, &*disabled)]] {
        let said = backports_of(sources).unwrap_err();
        assert!(said.contains("no apt source") && said.contains("bookworm"), "{said}");
    }
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
    fs::write(pool.join("file"), "kept").unwrap();
    let second = set_up();
    unmount();
    assert!(!pool.join("file").exists());
    let third = set_up();
    let kept = fs::read_to_string(pool.join("file"));
    unmount();
    assert!(shares_blocks.unwrap());
    assert!(!second.contains("mounting") && !second.contains("making"), "{second}");
    assert!(third.contains("mounting") && !third.contains("making"), "{third}");
    assert_eq!(kept.unwrap(), "kept");
    assert!(image.exists());
}
