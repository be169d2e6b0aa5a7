//! Templates from archives, with the real tools.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

use store::{
    Error, Layout, ext4, sweep,
    template::{self, Size},
};

const SIZE: Size = Size { cpu: 1, memory_mb: 512, disk_mb: 512 };

struct Case {
    directory: tempfile::TempDir,
    layout: Layout,
}

impl Case {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let layout =
            Layout::create(directory.path().join("data"), directory.path().join("cache")).unwrap();
        Self { directory, layout }
    }

    fn archive(&self, files: &[&str]) -> PathBuf {
        let tree = self.directory.path().join("tree");
        let _ = fs::remove_dir_all(&tree);
        for file in files {
            let path = tree.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, "#!").unwrap();
            let status = Command::new("chmod").arg("755").arg(&path).status().unwrap();
            assert!(status.success());
        }
        let archive = self.directory.path().join("archive.tar.gz");
        let status = Command::new("tar")
            .arg("-czf")
            .arg(&archive)
            .arg("-C")
            .arg(&tree)
            .arg(".")
            .status()
            .unwrap();
        assert!(status.success());
        archive
    }

    fn temporary_is_empty(&self) -> bool {
        fs::read_dir(self.layout.cache_temporary()).unwrap().count() == 0
    }
}

fn listing(rootfs: &Path, directory: &str) -> String {
    let output = Command::new("debugfs")
        .args(["-R", &format!("ls -p {directory}")])
        .arg(rootfs)
        .output()
        .unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn an_archive_becomes_a_clean_disk_once() {
    let case = Case::new();
    let archive = case.archive(&["bin/sh", "etc/hello"]);
    let built = template::build_from_tar(&case.layout, &archive, SIZE, &mut |_| ()).unwrap();
    assert_eq!((built.cpu, built.memory_mb, built.disk_mb), (1, 512, 512));
    assert_eq!(built.rootfs.metadata().unwrap().len(), 512 << 20);
    ext4::check(&built.rootfs).unwrap();
    assert!(listing(&built.rootfs, "/etc").contains("/hello/"));
    for mount_point in ["dev", "proc", "sys", "run", "tmp"] {
        assert!(listing(&built.rootfs, "/").contains(&format!("/{mount_point}/")), "{mount_point}");
    }
    assert!(case.temporary_is_empty());

    let again = template::build_from_tar(&case.layout, &archive, SIZE, &mut |_| ()).unwrap();
    assert_eq!((again.digest.clone(), again.created), (built.digest.clone(), built.created));
    assert_eq!(template::list(&case.layout).unwrap().len(), 1);

    template::delete(&case.layout, &built.digest).unwrap();
    template::delete(&case.layout, &built.digest).unwrap();
    assert!(template::get(&case.layout, &built.digest).unwrap().is_none());
    assert!(case.temporary_is_empty());
}

#[test]
fn an_archive_that_nothing_runs_in_is_refused() {
    let case = Case::new();
    for (files, word) in [
        (&["rootfs/bin/sh"][..], "top of the archive"),
        (&["manifest.json", "0a1b/layer.tar"][..], "container image"),
    ] {
        let result =
            template::build_from_tar(&case.layout, &case.archive(files), SIZE, &mut |_| ());
        assert!(
            matches!(&result, Err(Error::InvalidArchive { reason }) if reason.contains(word)),
            "{result:?}"
        );
    }
    assert!(case.temporary_is_empty());
    assert!(template::list(&case.layout).unwrap().is_empty());
}

#[test]
fn a_disk_too_small_for_the_files_is_refused() {
    let case = Case::new();
    let size = Size { disk_mb: 16, ..SIZE };
    let result =
        template::build_from_tar(&case.layout, &case.archive(&["bin/sh"]), size, &mut |_| ());
    assert!(matches!(result, Err(Error::DiskTooSmall { wanted_mb: 16, .. })), "{result:?}");
}

#[test]
fn the_same_template_is_never_built_twice_at_once() {
    let case = Case::new();
    let archive = case.archive(&["bin/sh"]);
    let made = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                template::build_from_tar(&case.layout, &archive, SIZE, &mut |line| {
                    if line == "making the disk" {
                        made.fetch_add(1, Ordering::Relaxed);
                    }
                })
                .unwrap();
            });
        }
    });
    assert_eq!(made.load(Ordering::Relaxed), 1);
}

/// The child is this test binary; it builds and is killed as soon as it says that the disk is being made.
#[test]
fn a_killed_build_leaves_nothing_visible_and_is_swept() {
    use std::io::{BufRead, BufReader};
    let case = Case::new();
    let archive = case.archive(&["bin/sh"]);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "builds_for_the_test_that_kills_it", "--nocapture"])
        .env("CASE_DIRECTORY", case.directory.path())
        .env("CASE_ARCHIVE", &archive)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("making the disk")));
    child.kill().unwrap();
    child.wait().unwrap();

    assert!(template::list(&case.layout).unwrap().is_empty());
    assert!(!case.temporary_is_empty());
    sweep::temporary(&case.layout, sweep::Mode::Remove).unwrap();
    assert!(case.temporary_is_empty());
    template::build_from_tar(&case.layout, &archive, SIZE, &mut |_| ()).unwrap();
}

#[test]
#[ignore = "run by a_killed_build_leaves_nothing_visible_and_is_swept"]
fn builds_for_the_test_that_kills_it() {
    let Some(directory) = std::env::var_os("CASE_DIRECTORY").map(PathBuf::from) else { return };
    let archive = PathBuf::from(std::env::var_os("CASE_ARCHIVE").unwrap());
    let layout = Layout::create(directory.join("data"), directory.join("cache")).unwrap();
    template::build_from_tar(&layout, &archive, SIZE, &mut |line| {
        use std::io::Write;
        writeln!(std::io::stdout(), "{line}").unwrap();
        if line == "making the disk" {
            loop {
                std::thread::park();
            }
        }
    })
    .unwrap();
}
