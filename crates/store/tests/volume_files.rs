//! Volumes, with the real tools and mounted file systems. Needs root.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use api::VolumeId;
use pool::{Xfs, assert_clean, is_empty, layout, run};
use proptest::prelude::*;
use store::{
    Error, Layout, sweep,
    volume::{self, Access, MINIMUM_BYTES, Recovery},
};

mod pool;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

fn disk(layout: &Layout, id: &VolumeId) -> PathBuf {
    layout.data().join(format!("volumes/{id}/disk"))
}

fn created(layout: &Layout, bytes: u64) -> VolumeId {
    let id = VolumeId::random();
    volume::create(layout, &id, bytes).unwrap();
    id
}

/// The image, mounted on the host while this lives.
struct Mounted(tempfile::TempDir);

impl Mounted {
    fn of(image: &Path) -> Self {
        let mounted = Self(tempfile::tempdir().unwrap());
        run(Command::new("mount")
            .args(["-t", "ext4", "-o", "loop"])
            .arg(image)
            .arg(mounted.path()));
        mounted
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, content: &[u8]) {
        let mut file = File::create(self.path().join(name)).unwrap();
        file.write_all(content).unwrap();
        file.sync_all().unwrap();
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        run(Command::new("umount").arg(self.path()));
    }
}

fn property(image: &Path, name: &str) -> String {
    let output = run(Command::new("dumpe2fs").arg("-h").arg(image));
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_owned()
}

fn uuid(image: &Path) -> String {
    property(image, "Filesystem UUID:")
}

/// The disk as it is when the machine that has it mounted dies: with files in the journal only.
fn crashed(layout: &Layout, id: &VolumeId) {
    let (path, copy) = (disk(layout, id), layout.data_temporary().join("crashed"));
    {
        let mounted = Mounted::of(&path);
        mounted.write("kept", b"what was flushed");
        fs::create_dir(mounted.path().join("directory")).unwrap();
        run(Command::new("sync").arg("-f").arg(mounted.path()));
        mounted.write("directory/also kept", &[7; 100_000]);
        // The loop device writes through this file's cache.
        store::clone::clone_file(&path, &copy).unwrap();
    }
    fs::rename(copy, path).unwrap();
}

#[test]
fn a_volume_of_any_size_is_made_in_a_moment_sparse_and_clean() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    for bytes in [MINIMUM_BYTES, 256 * MIB, 8 * GIB, 64 * GIB] {
        // The quickest of some: others take the processors at times.
        let mut quickest = Duration::MAX;
        for attempt in 0..20 {
            if attempt >= 3 && quickest < Duration::from_millis(100) {
                break;
            }
            let start = Instant::now();
            let id = created(&layout, bytes);
            quickest = quickest.min(start.elapsed());
            assert_eq!(volume::bytes(&layout, &id).unwrap(), bytes);
            let used = volume::used_bytes(&layout, &id).unwrap();
            assert!(used < 8 * MIB, "{bytes}: {used} used");
            assert_clean(&disk(&layout, &id));
            assert_eq!(disk(&layout, &id).metadata().unwrap().mode() & 0o777, 0o600);
            volume::remove(&layout, &id).unwrap();
        }
        assert!(quickest < Duration::from_millis(100), "{bytes}: {quickest:?}");
    }
    assert!(volume::list(&layout).unwrap().is_empty() && is_empty(&layout.data_temporary()));
}

#[test]
fn a_volume_replaces_none_and_is_never_too_small() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let (id, other) = (created(&layout, 32 * MIB), created(&layout, 64 * MIB));
    let before = uuid(&disk(&layout, &id));
    assert!(volume::create(&layout, &id, 64 * MIB).is_err());
    assert!(volume::clone(&layout, &other, &id).is_err());
    assert_eq!(uuid(&disk(&layout, &id)), before);
    let small = volume::create(&layout, &VolumeId::random(), MINIMUM_BYTES - 1);
    assert!(matches!(small, Err(Error::DiskTooSmall { .. })), "{small:?}");
    assert!(is_empty(&layout.data_temporary()));
}

#[test]
fn a_volume_that_is_not_there_is_told() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, id) = (layout(directory.path()), VolumeId::random());
    let missing = |result: Result<(), Error>| matches!(result, Err(Error::NotFound { .. }));
    assert!(missing(volume::open(&layout, &id, Access::ReadOnly).map(drop)));
    assert!(missing(volume::bytes(&layout, &id).map(drop)));
    assert!(missing(volume::used_bytes(&layout, &id).map(drop)));
    assert!(missing(volume::clone(&layout, &id, &VolumeId::random())));
    assert!(missing(volume::grow(&layout, &id, GIB)));
    assert!(missing(volume::grow_offline(&layout, &id, GIB)));
    assert!(missing(volume::recover(&layout, &id).map(drop)));
    volume::remove(&layout, &id).unwrap();
    assert!(is_empty(&layout.data_temporary()));
}

#[test]
fn a_descriptor_for_reading_does_not_write() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let id = created(&layout, 32 * MIB);
    let reader = volume::open(&layout, &id, Access::ReadOnly).unwrap();
    assert!(reader.write_all_at(b"x", 0).is_err());
    let writer = volume::open(&layout, &id, Access::Writable).unwrap();
    writer.write_all_at(&[0; 512], 0).unwrap();
}

#[test]
fn after_a_crash_what_was_flushed_is_there_and_the_file_system_is_clean() {
    let xfs = Xfs::mount();
    let layout = xfs.layout();
    let id = created(&layout, 64 * MIB);
    assert_eq!(volume::recover(&layout, &id).unwrap(), Recovery::Clean);
    crashed(&layout, &id);
    assert_eq!(volume::recover(&layout, &id).unwrap(), Recovery::Recovered);
    assert_clean(&disk(&layout, &id));
    assert_eq!(volume::recover(&layout, &id).unwrap(), Recovery::Clean);
    let mounted = Mounted::of(&disk(&layout, &id));
    assert_eq!(fs::read(mounted.path().join("kept")).unwrap(), b"what was flushed");
    assert_eq!(fs::read(mounted.path().join("directory/also kept")).unwrap(), [7; 100_000]);
}

#[test]
fn a_clone_is_equal_shares_blocks_and_lives_by_itself() {
    let xfs = Xfs::mount();
    let layout = xfs.layout();
    let (from, to) = (created(&layout, 300 * MIB), VolumeId::random());
    Mounted::of(&disk(&layout, &from)).write("file", &[5; 64 << 20]);
    let before = store::pool::room(&xfs.path()).unwrap().free_bytes;
    volume::clone(&layout, &from, &to).unwrap();
    assert!(before - store::pool::room(&xfs.path()).unwrap().free_bytes < 4 * MIB);
    assert_ne!(uuid(&disk(&layout, &from)), uuid(&disk(&layout, &to)));
    assert_clean(&disk(&layout, &to));

    Mounted::of(&disk(&layout, &from)).write("file", b"changed");
    volume::remove(&layout, &from).unwrap();
    let mounted = Mounted::of(&disk(&layout, &to));
    assert!(fs::read(mounted.path().join("file")).unwrap() == [5; 64 << 20]);
}

#[test]
fn a_volume_grows_with_its_file_system_and_never_shrinks() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let id = created(&layout, 32 * MIB);
    Mounted::of(&disk(&layout, &id)).write("file", b"kept");
    for bytes in [64 * MIB, GIB, 64 * GIB, 64 * GIB] {
        volume::grow_offline(&layout, &id, bytes).unwrap();
        assert_eq!(volume::bytes(&layout, &id).unwrap(), bytes);
        assert_clean(&disk(&layout, &id));
    }
    for grow in [volume::grow, volume::grow_offline] {
        let shrunk = grow(&layout, &id, 64 * GIB - 1);
        assert!(matches!(shrunk, Err(Error::WouldShrink { .. })), "{shrunk:?}");
    }
    let mounted = Mounted::of(&disk(&layout, &id));
    assert_eq!(fs::read(mounted.path().join("file")).unwrap(), b"kept");
    let room = store::pool::room(mounted.path()).unwrap();
    assert!(room.total_bytes > 62 * GIB, "{room:?}");
    assert!(is_empty(&layout.data_temporary()));
}

/// The kernel takes room for more group descriptors from there while the file system is mounted.
#[test]
fn a_small_volume_has_what_it_needs_to_become_a_large_one_while_mounted() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    for bytes in [MINIMUM_BYTES, 256 * MIB, 8 * GIB] {
        let id = created(&layout, bytes);
        let reserved: u64 = property(&disk(&layout, &id), "Reserved GDT blocks:").parse().unwrap();
        // A block of 4 KiB describes 64 groups of 128 MiB.
        assert!(reserved * 8 * GIB > 1000 * GIB, "{bytes}: {reserved}");
    }
}

#[test]
fn a_crashed_volume_can_grow() {
    let xfs = Xfs::mount();
    let layout = xfs.layout();
    let id = created(&layout, 64 * MIB);
    crashed(&layout, &id);
    volume::grow_offline(&layout, &id, 128 * MIB).unwrap();
    assert_clean(&disk(&layout, &id));
    let mounted = Mounted::of(&disk(&layout, &id));
    assert_eq!(fs::read(mounted.path().join("kept")).unwrap(), b"what was flushed");
}

#[test]
fn what_the_guest_made_of_its_disk_is_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let id = created(&layout, 32 * MIB);
    let writer = volume::open(&layout, &id, Access::Writable).unwrap();
    writer.write_all_at(&[0x5a; 8192], 0).unwrap();
    assert_eq!(volume::recover(&layout, &id).unwrap(), Recovery::NotExt4);
    volume::grow_offline(&layout, &id, 64 * MIB).unwrap();
    assert_eq!(volume::bytes(&layout, &id).unwrap(), 64 * MIB);
    let copy = VolumeId::random();
    volume::clone(&layout, &id, &copy).unwrap();
    assert_eq!(volume::recover(&layout, &copy).unwrap(), Recovery::NotExt4);
    // Shorter than a superblock is far in.
    writer.set_len(100).unwrap();
    assert_eq!(volume::recover(&layout, &id).unwrap(), Recovery::NotExt4);
}

#[test]
fn damage_that_wants_a_person_is_reported_and_the_disk_kept() {
    let xfs = Xfs::mount();
    let layout = xfs.layout();
    let id = created(&layout, 64 * MIB);
    crashed(&layout, &id);
    // The root directory's inode and its neighbours.
    let listing = run(Command::new("debugfs").args(["-R", "imap <2>"]).arg(disk(&layout, &id)));
    let text = String::from_utf8(listing.stdout).unwrap();
    let block: u64 = text
        .split("located at block ")
        .nth(1)
        .unwrap()
        .split(',')
        .next()
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    volume::open(&layout, &id, Access::Writable)
        .unwrap()
        .write_all_at(&[0xff; 4096], block * 4096)
        .unwrap();
    let found = volume::recover(&layout, &id).unwrap();
    let Recovery::Damaged { report } = &found else { panic!("{found:?}") };
    assert!(!report.is_empty());
    // A person can repair it.
    run_accepting(&[0, 1], Command::new("e2fsck").args(["-f", "-y"]).arg(disk(&layout, &id)));
    assert_clean(&disk(&layout, &id));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_a_guest_writes_to_its_disk_a_recovery_ends_and_the_disk_keeps_its_length(
        writes in prop::collection::vec((0_u64..MINIMUM_BYTES / 4096 / 16, any::<[u8; 64]>(), 0_u64..64), 1..40),
        state in any::<u16>(),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let layout = layout(directory.path());
        let id = created(&layout, MINIMUM_BYTES);
        let writer = volume::open(&layout, &id, Access::Writable).unwrap();
        for (block, bytes, within) in writes {
            writer.write_all_at(&bytes, block * 4096 + within * 64).unwrap();
        }
        // So that a recovery is asked for.
        writer.write_all_at(&[0x53, 0xef], 1024 + 0x38).unwrap();
        writer.write_all_at(&state.to_le_bytes(), 1024 + 0x3a).unwrap();
        volume::recover(&layout, &id).unwrap();
        prop_assert_eq!(volume::bytes(&layout, &id).unwrap(), MINIMUM_BYTES);
        match volume::grow_offline(&layout, &id, 2 * MINIMUM_BYTES) {
            Ok(()) | Err(Error::Unusable { .. } | Error::ToolFailed { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
        prop_assert!(is_empty(&layout.data_temporary()));
    }
}

fn run_accepting(codes: &[i32], command: &mut Command) {
    let output = command.output().unwrap();
    assert!(codes.contains(&output.status.code().unwrap()), "{output:?}");
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing_half_made() {
    let xfs = Xfs::mount();
    let layout = xfs.layout();
    let id = created(&layout, 32 * MIB);
    xfs.fill_but(0);
    let outcomes = [
        volume::create(&layout, &VolumeId::random(), 8 * GIB),
        volume::grow_offline(&layout, &id, 64 * GIB),
    ];
    for outcome in outcomes {
        assert!(outcome.as_ref().is_err_and(Error::is_no_space), "{outcome:?}");
    }
    assert_eq!(volume::list(&layout).unwrap(), [id]);
    assert_eq!(volume::bytes(&layout, &id).unwrap(), 32 * MIB);
    assert!(is_empty(&layout.data_temporary()));
    assert_clean(&disk(&layout, &id));
    xfs.make_room();
    created(&layout, 8 * GIB);
}

#[test]
fn a_volume_that_no_row_names_is_told_and_kept() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let (known, unknown) = (created(&layout, 32 * MIB), created(&layout, 32 * MIB));
    fs::create_dir(layout.data().join("volumes/not an id")).unwrap();
    assert_eq!(volume::orphans(&layout, &[known]).unwrap(), [unknown]);
    sweep::temporary(&layout, sweep::Mode::Remove).unwrap();
    assert!(disk(&layout, &unknown).exists());
}

#[test]
fn a_root_disk_is_put_in_the_place_of_another_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    let (source, id) = (directory.path().join("rootfs"), VolumeId::random());
    for content in [1, 2] {
        fs::write(&source, vec![content; 1 << 20]).unwrap();
        let file = volume::put_root(&layout, &id, &source, 2 << 20).unwrap();
        let mut first = [0];
        file.read_exact_at(&mut first, 0).unwrap();
        assert_eq!((first[0], file.metadata().unwrap().len()), (content, 2 << 20));
        assert_eq!(volume::bytes(&layout, &id).unwrap(), 2 << 20);
    }
    assert!(is_empty(&layout.data_temporary()));
}

/// The child is this test binary, killed somewhere in a creation.
#[test]
fn a_volume_whose_maker_is_killed_is_whole_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    for round in 1_usize..=5 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "creates_for_the_test_that_kills_it", "--nocapture"])
            .env("CASE_DIRECTORY", directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = lines.filter(|line| line.as_ref().unwrap().contains("created")).take(round);
        assert_eq!(told.count(), round);
        child.kill().unwrap();
        child.wait().unwrap();
        let volumes = volume::list(&layout).unwrap();
        assert!(volumes.len() >= round);
        for id in volumes {
            assert_clean(&disk(&layout, &id));
            volume::remove(&layout, &id).unwrap();
        }
    }
    sweep::temporary(&layout, sweep::Mode::Remove).unwrap();
    assert!(is_empty(&layout.data_temporary()));
}

#[test]
#[ignore = "run by a_volume_whose_maker_is_killed_is_whole_or_not_there"]
fn creates_for_the_test_that_kills_it() {
    let Some(directory) = std::env::var_os("CASE_DIRECTORY").map(PathBuf::from) else { return };
    let layout = layout(&directory);
    loop {
        created(&layout, 256 * MIB);
        writeln!(std::io::stdout(), "created").unwrap();
    }
}
