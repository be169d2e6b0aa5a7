//! Machines at rest: whole at every instant, true about their size, and independent of what they were made from.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use api::{SandboxId, SnapshotId};
use pool::{Xfs, is_empty, layout, write_at};
use store::{
    Digest, Error, Layout,
    sandbox_files::SandboxFiles,
    saved_machine,
    snapshot::{self, Manifest, Sizes},
    sweep,
};

mod pool;

const MIB: u64 = 1 << 20;

fn manifest() -> Manifest {
    Manifest {
        key: Digest::of(b"machine"),
        description: "machine".to_owned(),
        cpus: 1,
        memory_mib: 512,
        disk_bytes: 64 * MIB,
        agent_protocol: 1,
        machine_type: "pc-q35-8.2".to_owned(),
        created_ms: 1,
        read_pages: vec![(3, 2)],
    }
}

/// Of a machine whose memory is that at `memory` but for so many MiB from its start, and whose disk is at `rootfs`.
fn take(layout: &Layout, memory: &Path, changed_mib: usize, rootfs: &Path) -> SnapshotId {
    let id = SnapshotId::random();
    let draft = snapshot::draft(layout, &id).unwrap();
    let file = draft.clone_memory(memory).unwrap();
    file.write_all_at(&vec![changed_mib as u8; changed_mib << 20], 0).unwrap();
    draft.state_file().unwrap().write_all(b"state").unwrap();
    draft.clone_rootfs_later(rootfs.to_owned())().unwrap();
    draft.publish(manifest()).unwrap();
    id
}

struct Base {
    memory: PathBuf,
    rootfs: PathBuf,
}

impl Base {
    /// 64 MiB of memory and 16 of disk.
    fn write(directory: &Path) -> Self {
        let base = Self { memory: directory.join("memory"), rootfs: directory.join("rootfs") };
        write_at(&base.memory, 0, 64 << 20, 0xaa);
        write_at(&base.rootfs, 0, 16 << 20, 0xbb);
        base
    }
}

fn sizes_mib(layout: &Layout, id: &SnapshotId) -> (u64, u64) {
    let Sizes { own_bytes, total_bytes } = snapshot::sizes(layout, id).unwrap();
    // The state takes a block.
    (own_bytes / MIB, total_bytes / MIB)
}

/// The file system gives blocks back some moments after a file is gone.
fn wait_for_sizes_mib(layout: &Layout, id: &SnapshotId, expected: (u64, u64)) {
    let end = Instant::now() + Duration::from_secs(20);
    while sizes_mib(layout, id) != expected && Instant::now() < end {
        std::thread::yield_now();
    }
    assert_eq!(sizes_mib(layout, id), expected);
}

#[test]
fn deleting_the_parent_moves_its_bytes_to_the_child() {
    let xfs = Xfs::mount();
    let (layout, base) = (xfs.layout(), Base::write(&xfs.path()));
    let parent = take(&layout, &base.memory, 8, &base.rootfs);
    assert_eq!(sizes_mib(&layout, &parent), (8, 80));

    let memory = snapshot::get(&layout, &parent).unwrap().unwrap().files.memory();
    let child = take(&layout, &memory, 4, &base.rootfs);
    // Of the parent's 8 the child has 4, and wrote over the others.
    assert_eq!(sizes_mib(&layout, &parent), (4, 80));
    assert_eq!(sizes_mib(&layout, &child), (4, 80));

    snapshot::remove(&layout, &parent).unwrap();
    snapshot::remove(&layout, &parent).unwrap();
    assert!(matches!(snapshot::sizes(&layout, &parent), Err(Error::NotFound { .. })));
    wait_for_sizes_mib(&layout, &child, (8, 80));

    fs::remove_file(&base.memory).unwrap();
    fs::remove_file(&base.rootfs).unwrap();
    wait_for_sizes_mib(&layout, &child, (80, 80));
    let mut memory =
        fs::File::open(snapshot::get(&layout, &child).unwrap().unwrap().files.memory()).unwrap();
    let mut content = Vec::new();
    memory.read_to_end(&mut content).unwrap();
    assert!(content[..4 << 20].iter().all(|byte| *byte == 4));
    assert!(content[4 << 20..8 << 20].iter().all(|byte| *byte == 8));
    assert!(content[8 << 20..].iter().all(|byte| *byte == 0xaa));
}

#[test]
fn a_chain_of_any_depth_costs_what_each_link_changed() {
    let xfs = Xfs::mount();
    let (layout, base) = (xfs.layout(), Base::write(&xfs.path()));
    let before = store::pool::room(&xfs.path()).unwrap().free_bytes;
    let (mut memory, mut last) = (base.memory.clone(), None);
    for _ in 0..20 {
        let id = take(&layout, &memory, 1, &base.rootfs);
        memory = snapshot::get(&layout, &id).unwrap().unwrap().files.memory();
        if let Some(last) = last.replace(id) {
            snapshot::remove(&layout, &last).unwrap();
        }
    }
    wait_for_sizes_mib(&layout, &last.unwrap(), (1, 80));
    let taken = before - store::pool::room(&xfs.path()).unwrap().free_bytes;
    assert!(taken < 8 * MIB, "{taken}");
}

#[test]
fn where_nothing_is_shared_a_snapshot_holds_all_it_takes() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, base) = (layout(directory.path()), Base::write(directory.path()));
    if store::clone::can_reflink(&layout.data_temporary()).unwrap() {
        return;
    }
    let id = take(&layout, &base.memory, 8, &base.rootfs);
    assert_eq!(sizes_mib(&layout, &id), (80, 80));
}

#[test]
fn a_file_in_very_many_pieces_is_measured_in_a_moment() {
    const PIECES: u64 = 10_000;
    let xfs = Xfs::mount();
    let (layout, base) = (xfs.layout(), Base::write(&xfs.path()));
    let id = SnapshotId::random();
    let draft = snapshot::draft(&layout, &id).unwrap();
    let memory = draft.clone_memory(&base.memory).unwrap();
    // Every second block becomes its own.
    for piece in 0..PIECES / 2 {
        memory.write_all_at(&[1; 4096], piece * 8192).unwrap();
    }
    draft.state_file().unwrap().write_all(b"state").unwrap();
    draft.clone_rootfs_later(base.rootfs.clone())().unwrap();
    draft.publish(manifest()).unwrap();
    let start = Instant::now();
    let sizes = snapshot::sizes(&layout, &id).unwrap();
    let took = start.elapsed();
    assert_eq!(sizes.own_bytes, PIECES / 2 * 4096 + 4096);
    assert_eq!(sizes.total_bytes, 80 * MIB + 4096);
    assert!(took < Duration::from_secs(1), "{took:?}");
}

#[test]
fn a_draft_is_invisible_and_leaves_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, base) = (layout(directory.path()), Base::write(directory.path()));
    let id = SnapshotId::random();
    let draft = snapshot::draft(&layout, &id).unwrap();
    drop(draft.clone_memory(&base.memory).unwrap());
    draft.state_file().unwrap().write_all(b"state").unwrap();
    assert!(snapshot::get(&layout, &id).unwrap().is_none());
    assert!(snapshot::list(&layout).unwrap().is_empty());
    // Its root disk is missing.
    assert!(draft.publish(manifest()).is_err());
    assert!(snapshot::list(&layout).unwrap().is_empty());
    assert!(is_empty(&layout.data_temporary()));
}

#[test]
fn what_is_damaged_or_of_a_later_program_is_told_and_not_loaded() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, base) = (layout(directory.path()), Base::write(directory.path()));
    let reason = |id: &SnapshotId| match snapshot::get(&layout, id) {
        Err(Error::Unusable { id: named, reason, .. }) if named == id.to_string() => reason,
        other => panic!("{other:?}"),
    };
    let new = || {
        let id = take(&layout, &base.memory, 1, &base.rootfs);
        let directory =
            snapshot::get(&layout, &id).unwrap().unwrap().files.memory().with_file_name("");
        (id, directory)
    };

    let (id, files) = new();
    fs::File::options().write(true).open(files.join("memory")).unwrap().set_len(5).unwrap();
    assert!(reason(&id).contains("memory"));

    let (id, files) = new();
    fs::remove_file(files.join("rootfs")).unwrap();
    assert!(reason(&id).contains("rootfs"));

    let (id, files) = new();
    fs::write(files.join("manifest.json"), "{").unwrap();
    assert!(reason(&id).contains("manifest"));

    let (id, files) = new();
    fs::write(files.join("manifest.json"), r#"{"format": 99, "novelty": []}"#).unwrap();
    assert!(reason(&id).contains("newer"));

    // What a later program of the same format added is no obstacle.
    let (id, files) = new();
    let text = fs::read_to_string(files.join("manifest.json")).unwrap();
    fs::write(files.join("manifest.json"), text.replacen('{', r#"{"novelty": 1,"#, 1)).unwrap();
    assert_eq!(snapshot::get(&layout, &id).unwrap().unwrap().manifest, manifest());
    snapshot::remove_all_but(&layout, &[id]).unwrap();
    assert_eq!(snapshot::list(&layout).unwrap(), [id]);
}

#[test]
fn what_an_earlier_program_did_not_write_down_is_no_obstacle() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, base) = (layout(directory.path()), Base::write(directory.path()));
    let id = take(&layout, &base.memory, 1, &base.rootfs);
    let saved = || snapshot::get(&layout, &id).unwrap().unwrap();
    let path = saved().files.memory().with_file_name("manifest.json");
    let mut stored: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    stored["machine"].as_object_mut().unwrap().remove("read_pages").unwrap();
    fs::write(&path, stored.to_string()).unwrap();
    assert_eq!(saved().manifest, Manifest { read_pages: Vec::new(), ..manifest() });
}

#[test]
fn pages_are_fetched_from_a_memory_file_that_does_not_have_them_all() {
    let memory = tempfile::tempfile().unwrap();
    memory.set_len(64 << 20).unwrap();
    saved_machine::fetch(&memory, &[(0, 3), (100, 20_000), (u32::MAX, u32::MAX)]);
    assert_eq!(memory.metadata().unwrap().len(), 64 << 20);
}

#[test]
fn a_full_disk_is_told_and_leaves_nothing_half_made() {
    let xfs = Xfs::mount();
    let (layout, base) = (xfs.layout(), Base::write(&xfs.path()));
    xfs.fill_but(4 << 20);
    let id = SnapshotId::random();
    let attempt = || {
        let draft = snapshot::draft(&layout, &id)?;
        let memory = draft.clone_memory(&base.memory)?;
        let full = |source| Error::Io { doing: "write", path: "memory".into(), source };
        memory.write_all_at(&vec![1; 32 << 20], 0).map_err(full)?;
        draft.state_file()?.write_all(b"state").map_err(full)?;
        draft.clone_rootfs_later(base.rootfs.clone())().map_err(full)?;
        draft.publish(manifest())
    };
    let error = attempt().unwrap_err();
    assert!(error.is_no_space(), "{error:?}");
    assert!(snapshot::list(&layout).unwrap().is_empty());
    assert!(is_empty(&layout.data_temporary()));
    xfs.make_room();
    attempt().unwrap();
}

#[test]
fn a_hibernated_machine_is_whole_beside_its_sandbox_s_disk() {
    let directory = tempfile::tempdir().unwrap();
    let (layout, base) = (layout(directory.path()), Base::write(directory.path()));
    let files = SandboxFiles::create(&layout, &SandboxId::random()).unwrap();
    files.clone_rootfs(&base.rootfs, 16 << 20).unwrap();
    assert!(files.hibernation().unwrap().is_none());
    for content in ["first", "second"] {
        let draft = files.hibernation_draft().unwrap();
        draft.clone_memory(&base.memory).unwrap();
        draft.state_file().unwrap().write_all(content.as_bytes()).unwrap();
        draft.clone_rootfs_later(files.rootfs())().unwrap();
        draft.publish(manifest()).unwrap();
        let hibernated = files.hibernation().unwrap().unwrap();
        assert_eq!(fs::read_to_string(hibernated.files.state()).unwrap(), content);
        assert_eq!(hibernated.manifest, manifest());
        assert_eq!(fs::read(hibernated.files.rootfs()).unwrap(), fs::read(files.rootfs()).unwrap());
    }

    // A snapshot of it needs no machine.
    let (id, hibernated) = (SnapshotId::random(), files.hibernation().unwrap().unwrap());
    let draft = snapshot::draft(&layout, &id).unwrap();
    draft.clone_all_of(&hibernated).unwrap();
    let taken = draft.publish(hibernated.manifest.clone()).unwrap();
    assert_eq!(fs::read_to_string(taken.files.state()).unwrap(), "second");

    files.remove_hibernation().unwrap();
    files.remove_hibernation().unwrap();
    assert!(files.hibernation().unwrap().is_none());
    assert!(files.rootfs().exists());
    assert!(is_empty(&layout.data_temporary()));
}

/// The child is this test binary, killed somewhere in a publication.
#[test]
fn a_snapshot_whose_maker_is_killed_is_whole_or_not_there() {
    let directory = tempfile::tempdir().unwrap();
    let layout = layout(directory.path());
    for round in 1_usize..=10 {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "takes_for_the_test_that_kills_it", "--nocapture"])
            .env("CASE_DIRECTORY", directory.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let told = lines.filter(|line| line.as_ref().unwrap().contains("published")).take(round);
        assert_eq!(told.count(), round);
        child.kill().unwrap();
        child.wait().unwrap();
        let published = snapshot::list(&layout).unwrap();
        assert!(published.len() >= round);
        for id in published {
            let files = snapshot::get(&layout, &id).unwrap().unwrap().files;
            assert_eq!(fs::read(files.state()).unwrap(), b"state");
            assert_eq!(fs::read(files.memory()).unwrap(), fs::read(files.rootfs()).unwrap());
        }
        snapshot::remove_all_but(&layout, &[]).unwrap();
    }
    sweep::temporary(&layout, sweep::Mode::Remove).unwrap();
    assert!(is_empty(&layout.data_temporary()));
}

#[test]
#[ignore = "run by a_snapshot_whose_maker_is_killed_is_whole_or_not_there"]
fn takes_for_the_test_that_kills_it() {
    let Some(directory) = std::env::var_os("CASE_DIRECTORY").map(PathBuf::from) else { return };
    let (layout, source) = (layout(&directory), directory.join("source"));
    fs::write(&source, vec![7; 1 << 16]).unwrap();
    for n in 0.. {
        take(&layout, &source, 0, &source);
        writeln!(std::io::stdout(), "published {n}").unwrap();
    }
}
