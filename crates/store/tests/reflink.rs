//! Clones on a file system that can share blocks.

#![expect(clippy::unwrap_used, reason = "helpers of tests are outside of test functions")]

use std::{
    fs::{self, File},
    os::unix::fs::FileExt,
    path::Path,
};

use pool::Xfs;

use store::{
    clone::{Method, can_reflink, clone_file},
    pool::{allocated_bytes, is_same_file_system, room},
};

mod pool;

fn filled(path: &Path) -> Vec<u8> {
    let file = File::create(path).unwrap();
    file.set_len(1 << 30).unwrap();
    file.write_all_at(&vec![7; 64 << 20], 100 << 20).unwrap();
    file.sync_all().unwrap();
    vec![7; 64 << 20]
}

#[test]
fn clones_share_their_blocks_until_one_is_written() {
    let xfs = Xfs::mount();
    assert!(can_reflink(&xfs.path()).unwrap());
    assert_eq!(fs::read_dir(xfs.path()).unwrap().count(), 0);
    let (source, target) = (xfs.path().join("source"), xfs.path().join("target"));
    let content = filled(&source);
    let before = room(&xfs.path()).unwrap();
    assert_eq!(clone_file(&source, &target).unwrap(), Method::Reflink);
    let after = room(&xfs.path()).unwrap();
    assert!(before.free_bytes - after.free_bytes < 4 << 20, "{before:?} {after:?}");

    let clone = File::options().read(true).write(true).open(&target).unwrap();
    clone.write_all_at(b"changed", 100 << 20).unwrap();
    let mut original = vec![0; content.len()];
    File::open(&source).unwrap().read_exact_at(&mut original, 100 << 20).unwrap();
    assert!(original == content);
    let mut changed = [0; 9];
    clone.read_exact_at(&mut changed, 100 << 20).unwrap();
    assert_eq!(&changed, b"changed\x07\x07");
}

#[test]
fn across_file_systems_a_clone_is_a_sparse_copy() {
    let (xfs, elsewhere) = (Xfs::mount(), tempfile::tempdir().unwrap());
    assert!(!is_same_file_system(&xfs.path(), elsewhere.path()).unwrap());
    let (source, target) = (xfs.path().join("source"), elsewhere.path().join("target"));
    let content = filled(&source);
    assert_eq!(clone_file(&source, &target).unwrap(), Method::Copy);
    assert_eq!(target.metadata().unwrap().len(), 1 << 30);
    assert!(allocated_bytes(&target).unwrap() < 80 << 20);
    let mut copied = vec![0; content.len()];
    File::open(&target).unwrap().read_exact_at(&mut copied, 100 << 20).unwrap();
    assert!(copied == content);
}
