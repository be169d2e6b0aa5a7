//! Programs of the host that the server runs.

use std::path::PathBuf;

use super::{Finding, output};

/// Each with the Debian package that has it.
const NEEDED: [(&str, &str); 12] = [
    ("mke2fs", "e2fsprogs"),
    ("e2fsck", "e2fsprogs"),
    ("resize2fs", "e2fsprogs"),
    ("ip", "iproute2"),
    ("nft", "nftables"),
    ("mmdebstrap", "mmdebstrap"),
    ("unshare", "util-linux"),
    ("setpriv", "util-linux"),
    ("tar", "tar"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("gzip", "gzip"),
];
/// From there on mke2fs writes no zeroes that a sparse file has anyway.
const E2FSPROGS: (u32, u32) = (1, 47);

pub(super) async fn check() -> Vec<Finding> {
    let missing: Vec<_> = NEEDED.iter().filter(|(tool, _)| find(tool).is_none()).collect();
    let mut findings = Vec::new();
    if missing.is_empty() {
        let version =
            output("mmdebstrap", &["--version"]).await.map_or_else(String::new, |(_, text)| text);
        let version = version.lines().next().unwrap_or_default();
        findings.push(Finding::ok("tools", format!("all {} are there; {version}", NEEDED.len())));
    } else {
        let names: Vec<_> = missing.iter().map(|(tool, _)| *tool).collect();
        let mut packages: Vec<_> = missing.iter().map(|(_, package)| *package).collect();
        packages.dedup();
        findings.push(Finding::fail(
            "tools",
            format!("missing: {}", names.join(", ")),
            format!("apt-get install {}", packages.join(" ")),
        ));
    }
    if find("mke2fs").is_some() {
        let said = output("mke2fs", &["-V"]).await.map_or_else(String::new, |(_, text)| text);
        findings.push(match release(&said) {
            Some(found) if found >= E2FSPROGS => {
                Finding::ok("e2fsprogs", format!("{}.{}", found.0, found.1))
            }
            found => Finding::warn(
                "e2fsprogs",
                found.map_or_else(
                    || "unknown".to_owned(),
                    |(major, minor)| format!("{major}.{minor}"),
                ),
                "install e2fsprogs 1.47 or newer: new volumes are slower and larger without it",
            ),
        });
    }
    findings
}

/// Of `mke2fs 1.47.0 (5-Feb-2023)`.
fn release(said: &str) -> Option<(u32, u32)> {
    let mut parts = said.strip_prefix("mke2fs ")?.split(['.', ' ', '-']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn find(program: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

pub(super) async fn nftables(is_root: bool) -> Vec<Finding> {
    const CHECK: &str = "nftables";
    let finding = match output("nft", &["list", "tables"]).await {
        None => Finding::fail(CHECK, "nft cannot be run", "apt-get install nftables"),
        Some((true, tables)) => {
            let ours = tables.lines().filter(|line| line.contains(" atoll_")).count();
            Finding::ok(CHECK, format!("{} tables, {ours} of them ours", tables.lines().count()))
        }
        Some((false, _)) if !is_root => Finding::warn(CHECK, "not tried", "run it as root"),
        Some((false, said)) => Finding::fail(
            CHECK,
            said.lines().next().unwrap_or_default().to_owned(),
            "sandboxes are walled in by packet filter rules: load nf_tables, or give the container CAP_NET_ADMIN",
        ),
    };
    vec![finding]
}

pub(super) async fn clock() -> Vec<Finding> {
    const CHECK: &str = "clock";
    let asked = output("timedatectl", &["show", "--property=NTPSynchronized", "--value"]).await;
    let finding = match asked {
        Some((true, answer)) if answer == "yes" => Finding::ok(CHECK, "synchronised"),
        Some((true, _)) => Finding::warn(
            CHECK,
            "not synchronised",
            "run chrony or systemd-timesyncd: guests take their time from this host",
        ),
        Some((false, _)) | None => Finding::warn(
            CHECK,
            "nobody here can tell whether it is synchronised",
            "run chrony or systemd-timesyncd: guests take their time from this host",
        ),
    };
    vec![finding]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_of_e2fsprogs_is_read() {
        assert_eq!(release("mke2fs 1.47.0 (5-Feb-2023)\n\tUsing"), Some((1, 47)));
        assert_eq!(release("mke2fs 1.46-WIP (20-Mar-2020)"), Some((1, 46)));
        assert_eq!(release("no such thing"), None);
    }
}
