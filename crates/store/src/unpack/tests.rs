//! Hostile and ordinary archives.

use std::{
    fs,
    os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
};

use tar::{Builder, EntryType, Header};

use super::*;

const LIMITS: Limits = Limits {
    bytes: 1 << 20,
    apparent_bytes: 64 << 20,
    entries: 100,
    time: Duration::from_secs(60),
};

struct Case {
    directory: tempfile::TempDir,
    tar: Builder<Vec<u8>>,
}

impl Case {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("tree")).unwrap();
        fs::create_dir(directory.path().join("outside")).unwrap();
        fs::write(directory.path().join("outside/secret"), b"secret").unwrap();
        Self { directory, tar: Builder::new(Vec::new()) }
    }

    /// Names go in as they are: the library's own checks must not protect us here.
    fn add(&mut self, kind: EntryType, name: &str, target: &str, content: &[u8]) -> &mut Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
        header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
        header.set_mode(if kind == EntryType::Directory { 0o755 } else { 0o4711 });
        header.set_uid(12);
        header.set_gid(34);
        header.set_size(content.len() as u64);
        header.set_cksum();
        self.tar.append(&header, content).unwrap();
        self
    }

    fn unpack(&mut self) -> Result<()> {
        let tar = std::mem::replace(&mut self.tar, Builder::new(Vec::new())).into_inner().unwrap();
        self.unpack_bytes(&tar)
    }

    fn unpack_bytes(&self, bytes: &[u8]) -> Result<()> {
        let archive = self.directory.path().join("archive");
        fs::write(&archive, bytes).unwrap();
        unpack(&archive, &Tree::open(&self.path("")).unwrap(), LIMITS, &mut |_| ())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("tree").join(name)
    }

    fn outside_is_untouched(&self) -> bool {
        let outside = self.directory.path().join("outside");
        fs::read_dir(&outside).unwrap().count() == 1
            && fs::read(outside.join("secret")).unwrap() == b"secret"
            && fs::read_dir(self.directory.path()).unwrap().count() == 3
    }
}

fn refused(result: Result<()>) -> String {
    match result {
        Err(Error::InvalidArchive { reason }) => reason,
        other => panic!("must be refused as the archive's fault, and was {other:?}"),
    }
}

#[test]
fn files_links_and_modes_are_kept() {
    let mut case = Case::new();
    case.add(EntryType::Directory, "./d/", "", b"")
        .add(EntryType::Regular, "./d/file", "", b"content")
        .add(EntryType::Regular, "made/on/the/way", "", b"")
        .add(EntryType::Symlink, "d/link", "/anywhere/../at all", b"")
        .add(EntryType::Link, "hard", "./d/file", b"")
        .add(EntryType::Fifo, "fifo", "", b"");
    case.unpack().unwrap();
    let file = case.path("d/file").metadata().unwrap();
    assert_eq!((file.mode() & 0o7777, file.uid(), file.gid(), file.nlink()), (0o4711, 12, 34, 2));
    assert_eq!(fs::read(case.path("hard")).unwrap(), b"content");
    assert_eq!(fs::read_link(case.path("d/link")).unwrap(), Path::new("/anywhere/../at all"));
    assert!(case.path("fifo").symlink_metadata().unwrap().file_type().is_fifo());
    assert_eq!(case.path("made/on").metadata().unwrap().permissions().mode() & 0o777, 0o755);
}

#[test]
fn names_with_two_dots_are_refused() {
    for name in ["../outside/a", "a/../../outside/a", "/../outside/a", ".."] {
        let mut case = Case::new();
        refused(case.add(EntryType::Regular, name, "", b"x").unpack());
        assert!(case.outside_is_untouched(), "{name}");
    }
}

#[test]
fn a_name_that_is_too_long_for_the_tools_is_refused() {
    let deep = |levels: usize| vec!["d"; levels].join("/");
    assert!(inside(deep(512).as_bytes()).is_ok());
    let refusal = inside(deep(1401).as_bytes()).unwrap_err().to_string();
    assert!(refusal.contains("longer than 1024 bytes") && refusal.len() < 300, "{refusal}");
}

#[test]
fn an_absolute_name_lands_in_the_tree() {
    let mut case = Case::new();
    case.add(EntryType::Regular, "/etc/atoll-test", "", b"x").unpack().unwrap();
    assert_eq!(fs::read(case.path("etc/atoll-test")).unwrap(), b"x");
    assert!(!Path::new("/etc/atoll-test").exists());
}

#[test]
fn a_link_out_leads_nothing_out() {
    let outside = |case: &Case| case.directory.path().join("outside").to_str().unwrap().to_owned();
    for relative in [false, true] {
        let mut case = Case::new();
        let target = if relative { "../outside".to_owned() } else { outside(&case) };
        case.add(EntryType::Symlink, "link", &target, b"")
            .add(EntryType::Regular, "link/new", "", b"x")
            .add(EntryType::Symlink, "file", &format!("{target}/secret"), b"")
            .add(EntryType::Regular, "file", "", b"overwritten");
        let _ = case.unpack();
        assert!(case.outside_is_untouched());
    }
    let mut case = Case::new();
    let target = outside(&case);
    case.add(EntryType::Symlink, "link", &target, b"").add(EntryType::Directory, "link/", "", b"");
    let _ = case.unpack();
    assert!(case.outside_is_untouched());
    assert_eq!(case.directory.path().join("outside").metadata().unwrap().uid(), 0);
}

#[test]
fn a_hard_link_out_is_refused() {
    for through_link in [false, true] {
        let mut case = Case::new();
        let target = case.directory.path().join("outside").to_str().unwrap().to_owned();
        if through_link {
            case.add(EntryType::Symlink, "link", &target, b"").add(
                EntryType::Link,
                "stolen",
                "link/secret",
                b"",
            );
        } else {
            case.add(EntryType::Link, "stolen", &format!("{target}/secret"), b"");
        }
        refused(case.unpack());
        assert!(!case.path("stolen").exists());
        assert_eq!(case.directory.path().join("outside/secret").metadata().unwrap().nlink(), 1);
    }
    let mut case = Case::new();
    refused(case.add(EntryType::Link, "stolen", "../outside/secret", b"").unpack());
}

#[test]
fn device_nodes_are_left_out() {
    let mut case = Case::new();
    case.add(EntryType::Char, "dev/mem", "", b"").add(EntryType::Block, "dev/sda", "", b"");
    case.add(EntryType::Regular, "dev/file", "", b"");
    case.unpack().unwrap();
    assert_eq!(fs::read_dir(case.path("dev")).unwrap().count(), 1);
}

#[test]
fn sizes_and_counts_are_bounded() {
    let mut case = Case::new();
    assert!(
        refused(case.add(EntryType::Regular, "a", "", &vec![1; 2 << 20]).unpack())
            .contains("disk_mb")
    );
    let mut case = Case::new();
    for n in 0..=LIMITS.entries {
        case.add(EntryType::Regular, &format!("f{n}"), "", b"");
    }
    refused(case.unpack());
    let mut case = Case::new();
    for name in ["a", "b", "c"] {
        case.add(EntryType::Regular, name, "", &vec![0; 30 << 20]);
    }
    refused(case.unpack());
}

#[test]
fn zeroes_become_holes() {
    let mut case = Case::new();
    let mut content = vec![0; 30 << 20];
    content[20 << 20] = 1;
    case.add(EntryType::Regular, "hole", "", &content).unpack().unwrap();
    let metadata = case.path("hole").metadata().unwrap();
    assert_eq!(metadata.len(), 30 << 20);
    assert!(metadata.blocks() * 512 <= 256 << 10);
    assert!(fs::read(case.path("hole")).unwrap() == content);
}

#[test]
fn a_hole_of_ten_gigabytes_is_refused_in_no_time() {
    let case = Case::new();
    let big = case.directory.path().join("big");
    File::create(&big).unwrap().set_len(10 << 30).unwrap();
    let output = Command::new("tar")
        .args(["-cSf", "-", "-C"])
        .arg(case.directory.path())
        .arg("big")
        .output()
        .unwrap();
    fs::remove_file(&big).unwrap();
    assert!(output.stdout.len() < 1 << 20);
    let start = Instant::now();
    refused(case.unpack_bytes(&output.stdout));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(case.outside_is_untouched());
}

#[test]
fn a_header_that_fills_the_memory_is_refused() {
    for kind in [EntryType::XHeader, EntryType::GNULongName] {
        let mut case = Case::new();
        case.add(kind, "x", "", &vec![b'a'; 8 << 20]).add(EntryType::Regular, "a", "", b"");
        refused(case.unpack());
    }
}

#[test]
fn every_usual_compression_is_taken_and_damage_is_told() {
    let mut case = Case::new();
    case.add(EntryType::Regular, "file", "", &[7; 100_000]);
    let tar = std::mem::replace(&mut case.tar, Builder::new(Vec::new())).into_inner().unwrap();
    let plain = case.directory.path().join("plain");
    fs::write(&plain, tar).unwrap();
    for program in ["cat", "gzip", "zstd", "xz"] {
        let mut command = Command::new(program);
        if program != "cat" {
            command.arg("-c");
        }
        let packed = command.arg(&plain).output().unwrap().stdout;
        let case = Case::new();
        case.unpack_bytes(&packed).unwrap();
        assert_eq!(fs::read(case.path("file")).unwrap().len(), 100_000, "{program}");
        if program != "cat" {
            refused(case.unpack_bytes(&packed[..packed.len() - 9]));
        }
    }
}

#[test]
fn what_is_no_archive_is_refused() {
    for bytes in [&b""[..], b"hello", &[0; 4096], &[0xff; 4096], b"\x1f\x8bnot gzip"] {
        refused(Case::new().unpack_bytes(bytes));
    }
}

#[test]
fn a_file_over_a_directory_and_other_clashes_are_the_archives_fault() {
    let mut case = Case::new();
    case.add(EntryType::Regular, "d/file", "", b"").add(EntryType::Regular, "d", "", b"");
    refused(case.unpack());
    let mut case = Case::new();
    case.add(EntryType::Regular, "f", "", b"").add(EntryType::Regular, "f/below", "", b"");
    refused(case.unpack());
    let mut case = Case::new();
    case.add(EntryType::Symlink, "a", "b", b"").add(EntryType::Symlink, "b", "a", b"");
    refused(case.add(EntryType::Regular, "a/x", "", b"").unpack());
}
