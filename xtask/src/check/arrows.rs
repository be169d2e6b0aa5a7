//! Which crate of the workspace may use which. Everything not listed is refused.

use std::collections::BTreeSet;

use anyhow::Context;
use cargo_metadata::{DependencyKind, Metadata, MetadataCommand};

/// Each crate and the crates it may use, in its program.
const ARROWS: &[(&str, &[&str])] = &[
    ("agent", &["protocol"]),
    ("api", &[]),
    ("atoll", &["api", "client", "fault", "server"]),
    ("bench-guest", &[]),
    ("client", &["api"]),
    ("fault", &[]),
    ("machine", &["fault", "protocol"]),
    ("protocol", &[]),
    ("server", &["api", "fault", "machine", "store"]),
    ("store", &["api", "fault"]),
    ("tests", &["api", "client"]),
    ("xtask", &[]),
];

/// What a crate may use in its tests beside that: a real guest needs the agent's program.
const TEST_ARROWS: &[(&str, &[&str])] = &[("machine", &["agent"]), ("server", &["agent"])];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Use {
    Program,
    Tests,
}

/// The sentences of refusal for this workspace.
pub(super) fn refusals() -> anyhow::Result<Vec<String>> {
    let metadata = MetadataCommand::new().no_deps().exec().context("read cargo's metadata")?;
    Ok(found(&metadata)
        .into_iter()
        .filter_map(|(from, to, purpose)| refusal(&from, &to, purpose))
        .collect())
}

fn found(metadata: &Metadata) -> Vec<(String, String, Use)> {
    let members: BTreeSet<_> =
        metadata.packages.iter().map(|package| package.name.clone()).collect();
    let mut arrows = Vec::new();
    for package in &metadata.packages {
        for dependency in
            package.dependencies.iter().filter(|dependency| members.contains(&dependency.name))
        {
            let purpose = match dependency.kind {
                DependencyKind::Development => Use::Tests,
                DependencyKind::Normal | DependencyKind::Build | DependencyKind::Unknown => {
                    Use::Program
                }
            };
            arrows.push((package.name.clone(), dependency.name.clone(), purpose));
        }
    }
    arrows
}

fn refusal(from: &str, to: &str, purpose: Use) -> Option<String> {
    let listed = |arrows: &[(&str, &[&str])]| {
        arrows
            .iter()
            .find(|(name, _)| *name == from)
            .is_some_and(|(_, targets)| targets.contains(&to))
    };
    let allowed = match purpose {
        Use::Program => listed(ARROWS),
        Use::Tests => listed(ARROWS) || listed(TEST_ARROWS),
    };
    let kind = match purpose {
        Use::Program => "",
        Use::Tests => ", in tests either",
    };
    (!allowed).then(|| {
        format!("crate `{from}` may not use `{to}`{kind}: the arrows are drawn in ARCHITECTURE.md and listed in xtask/src/check/arrows.rs")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_and_store_know_neither_each_other_nor_http_nor_sandboxes() {
        for (from, to) in
            [("machine", "store"), ("store", "machine"), ("machine", "api"), ("store", "server")]
        {
            assert!(refusal(from, to, Use::Program).is_some(), "{from} uses {to}");
            assert!(refusal(from, to, Use::Tests).is_some(), "{from} uses {to} in tests");
        }
    }

    #[test]
    fn the_client_and_the_tests_cannot_reach_into_the_server() {
        for from in ["client", "tests", "api", "protocol", "agent"] {
            assert!(refusal(from, "server", Use::Program).is_some(), "{from} uses server");
        }
    }

    #[test]
    fn the_agent_is_there_for_tests_alone() {
        for from in ["machine", "server"] {
            assert!(refusal(from, "agent", Use::Program).is_some());
            assert!(refusal(from, "agent", Use::Tests).is_none());
        }
    }

    #[test]
    fn a_crate_that_is_not_listed_may_use_nothing() {
        assert!(refusal("newcomer", "api", Use::Program).is_some());
    }

    #[test]
    fn the_bench_s_floor_uses_nothing_of_ours() {
        for (to, _) in ARROWS {
            assert!(refusal("bench-guest", to, Use::Program).is_some());
            assert!(refusal("xtask", to, Use::Program).is_some());
        }
    }

    /// With a workspace on disk, so that the reading of cargo's metadata is tried as well.
    #[test]
    fn a_wrong_arrow_in_a_manifest_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("Cargo.toml", "[workspace]\nresolver = \"3\"\nmembers = [\"machine\", \"store\"]\n");
        let package = |name: &str| {
            format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n")
        };
        write("store/Cargo.toml", &package("store"));
        write("store/src/lib.rs", "");
        write(
            "machine/Cargo.toml",
            &(package("machine") + "[dependencies]\nstore = { path = \"../store\" }\n"),
        );
        write("machine/src/lib.rs", "");
        let metadata = MetadataCommand::new()
            .manifest_path(directory.path().join("Cargo.toml"))
            .no_deps()
            .exec()
            .unwrap();
        assert_eq!(found(&metadata), [("machine".to_owned(), "store".to_owned(), Use::Program)]);
    }
}
