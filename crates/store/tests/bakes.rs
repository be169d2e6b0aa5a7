//! A bake is whole at every instant, whoever dies while it is published.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use store::{
    Digest, Layout,
    bake::{self, BakeDraft, Manifest},
    sweep,
};

fn layout(directory: &Path) -> Layout {
    Layout::create(directory.join("data"), directory.join("cache")).unwrap()
}

fn publish(layout: &Layout, key: &Digest, content: &str) {
    let draft = BakeDraft::create(layout, key).unwrap();
    let files = draft.files();
    for path in [files.memory(), files.state(), files.rootfs()] {
        fs::write(path, content).unwrap();
    }
    let manifest =
        Manifest { description: content.to_owned(), template: key.clone(), disk_bytes: 1 };
    draft.publish(layout, manifest).unwrap();
}

#[test]
fn a_bake_replaced_by_a_process_that_is_killed_is_the_old_or_the_new_one() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let key = Digest::of(b"key");
    publish(&layout, &key, "first");
    for round in 1_usize..=20 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "publishes_for_the_test_that_kills_it", "--nocapture"])
            .env("CASE_DIRECTORY", directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // Somewhere in the publication after the one that is told last.
        let told = lines
            .take_while(Result::is_ok)
            .filter(|line| line.as_ref().unwrap().contains("published"))
            .take(round);
        assert_eq!(told.count(), round);
        child.kill().unwrap();
        child.wait().unwrap();
        let bake = bake::get(&layout, &key).unwrap().unwrap();
        for path in [bake.files.memory(), bake.files.state(), bake.files.rootfs()] {
            assert_eq!(fs::read_to_string(path).unwrap(), bake.manifest.description);
        }
    }
    sweep::temporary(&layout, sweep::Mode::Remove).unwrap();
    assert_eq!(fs::read_dir(layout.cache_temporary()).unwrap().count(), 0);
    assert!(bake::get(&layout, &key).unwrap().is_some());
}

#[test]
#[ignore = "run by a_bake_replaced_by_a_process_that_is_killed_is_the_old_or_the_new_one"]
fn publishes_for_the_test_that_kills_it() {
    let Some(directory) = std::env::var_os("CASE_DIRECTORY").map(PathBuf::from) else { return };
    let layout = layout(&directory);
    for n in 0.. {
        publish(&layout, &Digest::of(b"key"), &format!("{n}"));
        writeln!(std::io::stdout(), "published {n}").unwrap();
    }
}
