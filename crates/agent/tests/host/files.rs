//! Files, as users meet them, against the real server on this host.

use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use crate::support::{Client, Event, file_read, file_write, refused};
use protocol::message::{EntryKind, ErrorCode, FileWrite, ReadRange};
use protocol::{Reply, Request};

struct Place {
    client: Client,
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { client: Client::start(), directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.directory.path()).unwrap().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn write(&mut self, name: &str, content: &[u8]) -> Reply {
        let path = self.path(name);
        self.client.write(file_write(bytes(&path)), content)
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

fn list(client: &mut Client, path: &Path, depth: u32) -> Vec<protocol::message::Entry> {
    let stream = client.open(&Request::DirList { path: bytes(path).to_vec().into(), depth });
    let mut entries = Vec::new();
    loop {
        match client.next(stream) {
            Event::Reply(Reply::Entries(batch)) => entries.extend(batch),
            Event::Finish => return entries,
            other => panic!("{other:?} does not belong to a listing"),
        }
    }
}

fn delete(client: &mut Client, path: &Path) -> Reply {
    client.call(&Request::FileDelete { path: bytes(path).to_vec().into() })
}

#[test]
fn every_byte_survives_a_round_trip() {
    let mut place = Place::new();
    let content: Vec<u8> =
        (0..3_000_000_u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    for length in [0, 1, 32_752, 32_753, 3_000_000] {
        let written = place.write("file", &content[..length]);
        assert!(matches!(written, Reply::Written { bytes, .. } if bytes == length as u64));
        let path = place.path("file");
        assert!(place.client.read_file(bytes(&path)) == content[..length]);
    }
    assert_eq!(place.names(), ["file"]);
}

#[test]
fn odd_names_are_names() {
    let mut place = Place::new();
    let long = "n".repeat(255);
    let odd: [&[u8]; 6] = [
        "日本語 é 😀 #?%&+ 'quoted' \"x\".txt".as_bytes(),
        b"-rf",
        b"a\nb",
        b"\xff\xfe",
        b".dot",
        long.as_bytes(),
    ];
    for name in odd {
        let path = [bytes(place.directory.path()), b"/", name].concat();
        place.client.write(file_write(&path), name);
        assert_eq!(place.client.read_file(&path), name);
    }
    let directory = place.directory.path().to_owned();
    assert_eq!(list(&mut place.client, &directory, 1).len(), odd.len());
}

#[test]
fn a_replaced_file_keeps_mode_and_owner_and_a_new_one_gets_its_own() {
    let mut place = Place::new();
    let path = place.path("script");
    std::fs::write(&path, "old").unwrap();
    std::os::unix::fs::chown(&path, Some(1), Some(2)).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o4755)).unwrap();
    place.write("script", b"new");
    let now = std::fs::metadata(&path).unwrap();
    assert_eq!((now.mode() & 0o7777, now.uid(), now.gid()), (0o4755, 1, 2));
    place.write("fresh", b"");
    let fresh = std::fs::metadata(place.path("fresh")).unwrap();
    assert_eq!((fresh.mode() & 0o7777, fresh.uid(), fresh.gid()), (0o644, 0, 0));
    let request = FileWrite {
        mode: Some(0o600),
        owner: Some("daemon:3".to_owned()),
        ..file_write(bytes(&path))
    };
    place.client.write(request, b"newer");
    let now = std::fs::metadata(&path).unwrap();
    assert_eq!((now.mode() & 0o7777, now.uid(), now.gid()), (0o600, 1, 3));
}

#[test]
fn parents_are_made_only_when_asked_and_belong_to_the_owner() {
    let mut place = Place::new();
    let path = place.path("a/b/c");
    assert_eq!(refused(place.write("a/b/c", b"x")), ErrorCode::NotFound);
    let request = FileWrite {
        create_parents: true,
        owner: Some("daemon".to_owned()),
        ..file_write(bytes(&path))
    };
    place.client.write(request, b"x");
    let parent = std::fs::metadata(place.path("a/b")).unwrap();
    assert_eq!((parent.mode() & 0o777, parent.uid()), (0o755, 1));
    assert_eq!(std::fs::read(path).unwrap(), b"x");
    let through_a_file =
        FileWrite { create_parents: true, ..file_write(bytes(&place.path("a/b/c/d"))) };
    assert_eq!(refused(place.client.write(through_a_file, b"")), ErrorCode::WrongKind);
}

#[test]
fn what_is_no_file_is_not_written_or_read() {
    let mut place = Place::new();
    let fifo = place.path("fifo");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    for path in [fifo, "/dev/zero".into(), "/dev".into(), "/".into()] {
        let read = place.client.refusal(&Request::FileRead(file_read(bytes(&path))));
        let written = refused(place.client.write(file_write(bytes(&path)), b"x"));
        assert_eq!(
            (read, written),
            (ErrorCode::WrongKind, ErrorCode::WrongKind),
            "{}",
            path.display()
        );
    }
    assert!(std::fs::symlink_metadata(place.path("fifo")).unwrap().file_type().is_fifo());
}

#[test]
fn without_the_finish_nothing_becomes_visible() {
    let mut place = Place::new();
    std::fs::write(place.path("file"), "old").unwrap();
    for name in ["file", "new"] {
        let stream = place.client.open(&Request::FileWrite(file_write(bytes(&place.path(name)))));
        place.client.send_data(stream, &vec![7; 600_000]);
        place.client.reset(stream);
    }
    place.client.call(&Request::Ping);
    assert_eq!(
        (place.names(), std::fs::read(place.path("file")).unwrap()),
        (vec!["file".to_owned()], b"old".to_vec())
    );
}

#[test]
fn two_writers_leave_one_whole_file() {
    let mut place = Place::new();
    let path = place.path("file");
    let streams: Vec<u32> =
        (0..2).map(|_| place.client.open(&Request::FileWrite(file_write(bytes(&path))))).collect();
    for _ in 0..20 {
        for (stream, byte) in streams.iter().zip([b'a', b'b']) {
            place.client.send_data(*stream, &vec![byte; 30_000]);
        }
    }
    for stream in &streams {
        place.client.finish(*stream);
    }
    for stream in streams {
        assert!(matches!(place.client.reply(stream), Reply::Written { bytes: 600_000, .. }));
    }
    let content = std::fs::read(path).unwrap();
    assert!(content.len() == 600_000 && content.iter().all(|byte| *byte == content[0]));
}

#[test]
fn a_write_through_a_link_changes_its_target() {
    let mut place = Place::new();
    std::fs::create_dir(place.path("real")).unwrap();
    std::fs::write(place.path("real/file"), "old").unwrap();
    symlink("real/file", place.path("link")).unwrap();
    symlink("real/dangling", place.path("loose")).unwrap();
    symlink("round", place.path("round")).unwrap();
    place.write("link", b"new");
    place.write("loose", b"made");
    assert!(std::fs::symlink_metadata(place.path("link")).unwrap().is_symlink());
    assert_eq!(std::fs::read(place.path("real/file")).unwrap(), b"new");
    assert_eq!(std::fs::read(place.path("real/dangling")).unwrap(), b"made");
    assert_eq!(refused(place.write("round", b"")), ErrorCode::Invalid);
}

#[test]
fn conditions_are_kept() {
    let mut place = Place::new();
    let path = place.path("file");
    let only_new = FileWrite { only_new: true, ..file_write(bytes(&path)) };
    let Reply::Written { etag, .. } = place.client.write(only_new.clone(), b"one") else {
        panic!("it is new")
    };
    assert_eq!(refused(place.client.write(only_new, b"two")), ErrorCode::PreconditionFailed);
    let if_same =
        |etag: &str| FileWrite { if_etags: vec![etag.to_owned()], ..file_write(bytes(&path)) };
    assert!(matches!(place.client.write(if_same(&etag), b"two"), Reply::Written { .. }));
    assert_eq!(
        refused(place.client.write(if_same(&etag), b"three")),
        ErrorCode::PreconditionFailed
    );
    let missing =
        FileWrite { if_etags: vec!["*".to_owned()], ..file_write(bytes(&place.path("none"))) };
    assert_eq!(refused(place.client.write(missing, b"")), ErrorCode::PreconditionFailed);
    assert_eq!(
        (std::fs::read(&path).unwrap(), place.names()),
        (b"two".to_vec(), vec!["file".to_owned()])
    );
}

#[test]
fn a_full_disk_keeps_the_old_file_and_leaves_nothing() {
    let mut place = Place::new();
    let options = c"size=1m";
    let flags = rustix::mount::MountFlags::empty();
    let directory = place.path("small");
    std::fs::create_dir(&directory).unwrap();
    rustix::mount::mount("tmpfs", &directory, "tmpfs", flags, options)
        .expect("these tests run as root");
    place.write("small/file", b"old");
    let told = FileWrite { size: Some(5_000_000), ..file_write(bytes(&place.path("small/file"))) };
    let refusals = [
        refused(place.write("small/file", &vec![1; 5_000_000])),
        refused(place.client.write(told, b"")),
    ];
    let left = std::fs::read_dir(&directory).unwrap().count();
    let old = std::fs::read(place.path("small/file")).unwrap();
    rustix::mount::unmount(&directory, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!((refusals, left, old), ([ErrorCode::NoSpace; 2], 1, b"old".to_vec()));
}

#[test]
fn ranges_and_etags_select_what_is_sent() {
    let mut place = Place::new();
    let path = place.path("file");
    std::fs::write(&path, "0123456789").unwrap();
    let mut request = file_read(bytes(&path));
    request.range = Some(ReadRange::Last(3));
    let stream = place.client.open(&Request::FileRead(request.clone()));
    let Reply::File(head) = place.client.reply(stream) else { panic!("there is a file") };
    assert_eq!((head.size, head.start, head.length, head.partial), (10, 7, 3, true));
    assert_eq!(place.client.content(stream), b"789");
    request.range_if_etag = Some("\"old\"".to_owned());
    let stream = place.client.open(&Request::FileRead(request.clone()));
    assert!(
        matches!(place.client.reply(stream), Reply::File(head) if !head.partial && head.length == 10)
    );
    assert_eq!(place.client.content(stream), b"0123456789");
    request.range_if_etag = None;
    request.range = Some(ReadRange::From { start: 10, end: None });
    assert_eq!(
        place.client.call(&Request::FileRead(request.clone())),
        Reply::Failed(protocol::message::Failure {
            code: ErrorCode::RangeNotSatisfiable,
            message: "10".to_owned()
        })
    );
    request.unless_etags = vec![format!("W/{}", head.etag)];
    assert_eq!(place.client.refusal(&Request::FileRead(request)), ErrorCode::NotModified);
}

#[test]
fn files_without_a_size_are_read_to_their_end() {
    let mut client = Client::start();
    let version = client.read_file(b"/proc/version");
    assert!(version.starts_with(b"Linux version"));
    let attribute = client.read_file(b"/sys/kernel/mm/transparent_hugepage/enabled");
    assert!(!attribute.is_empty() && attribute.len() < 4096);
}

#[test]
fn where_no_files_can_be_put_is_not_called_full() {
    let mut client = Client::start();
    for path in [&b"/proc/self/comm"[..], b"/sys/kernel/new"] {
        let reply = client.write(file_write(path), b"x");
        let Reply::Failed(failure) = reply else { panic!("{reply:?}") };
        assert_eq!(failure.code, ErrorCode::WrongKind, "{}", failure.message);
    }
    assert_eq!(
        client.refusal(&Request::FileRead(file_read(b"/proc/self/mem"))),
        ErrorCode::WrongKind
    );
}

#[test]
fn relative_paths_and_missing_files_are_told_apart() {
    let mut client = Client::start();
    assert_eq!(client.refusal(&Request::FileRead(file_read(b"etc/passwd"))), ErrorCode::Invalid);
    assert_eq!(client.refusal(&Request::FileRead(file_read(b"/no/such"))), ErrorCode::NotFound);
    assert_eq!(
        client.refusal(&Request::FileStat { path: b"/etc/passwd/x".to_vec().into() }),
        ErrorCode::NotFound
    );
    assert_eq!(
        client.refusal(&Request::DirList { path: b"/no/such".to_vec().into(), depth: 1 }),
        ErrorCode::NotFound
    );
    assert_eq!(
        client.refusal(&Request::DirList { path: b"/etc/passwd".to_vec().into(), depth: 1 }),
        ErrorCode::WrongKind
    );
}

#[test]
fn deleting_a_link_leaves_what_it_points_to() {
    let mut place = Place::new();
    std::fs::create_dir_all(place.path("kept/inside")).unwrap();
    std::fs::create_dir_all(place.path("tree/a/b")).unwrap();
    symlink(place.path("kept"), place.path("link")).unwrap();
    symlink(place.path("kept"), place.path("tree/a/link")).unwrap();
    for name in ["link", "tree", "tree", "no/such"] {
        let path = place.path(name);
        assert_eq!(delete(&mut place.client, &path), Reply::Done);
    }
    assert_eq!(place.names(), ["kept"]);
    assert!(place.path("kept/inside").exists());
}

#[test]
fn a_tree_deeper_than_descriptors_and_path_lengths_is_deleted() {
    let mut place = Place::new();
    let top = place.path("deep");
    std::fs::create_dir(&top).unwrap();
    let open = |directory: &std::os::fd::OwnedFd, name: &str| {
        let flags = rustix::fs::OFlags::PATH | rustix::fs::OFlags::DIRECTORY;
        rustix::fs::openat(directory, name, flags, rustix::fs::Mode::empty()).unwrap()
    };
    let mut now: std::os::fd::OwnedFd = std::fs::File::open(&top).unwrap().into();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&now, "directory", rustix::fs::Mode::RWXU).unwrap();
        rustix::fs::mkdirat(&now, "beside", rustix::fs::Mode::RWXU).unwrap();
        now = open(&now, "directory");
    }
    assert_eq!(delete(&mut place.client, &top), Reply::Done);
    assert!(!top.exists());
}

#[test]
fn neither_the_root_nor_a_mounted_file_system_is_deleted() {
    let mut place = Place::new();
    let inside = place.path("above/mounted point");
    std::fs::create_dir_all(&inside).unwrap();
    let flags = rustix::mount::MountFlags::empty();
    rustix::mount::mount("tmpfs", &inside, "tmpfs", flags, c"size=1m")
        .expect("these tests run as root");
    std::fs::write(inside.join("kept"), "").unwrap();
    let mut codes = Vec::new();
    for path in ["/".into(), "/proc".into(), place.path("above"), inside.clone()] {
        codes.push(refused(delete(&mut place.client, &path)));
    }
    let kept = inside.join("kept").exists();
    rustix::mount::unmount(&inside, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!((codes, kept), (vec![ErrorCode::Denied; 4], true));
}

#[test]
fn a_hundred_thousand_entries_are_listed() {
    let mut place = Place::new();
    for n in 0..100_000 {
        std::fs::write(place.path(&format!("entry-{n}")), "").unwrap();
    }
    let directory = place.directory.path().to_owned();
    let mut entries = list(&mut place.client, &directory, 1);
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    entries.dedup_by(|one, other| one.path == other.path);
    assert_eq!(entries.len(), 100_000);
    assert_eq!(delete(&mut place.client, &directory), Reply::Done);
}

#[test]
fn a_listing_tells_kinds_and_does_not_follow_links() {
    let mut place = Place::new();
    std::fs::create_dir(place.path("directory")).unwrap();
    std::fs::write(place.path("directory/file"), "abc").unwrap();
    symlink("..", place.path("directory/up")).unwrap();
    let directory = place.directory.path().to_owned();
    let mut entries = list(&mut place.client, &directory, 100);
    entries.sort_by(|one, other| one.path.cmp(&other.path));
    let found: Vec<_> = entries.iter().map(|entry| (entry.path.to_vec(), entry.kind)).collect();
    let path = |name: &str| bytes(&place.path(name)).to_vec();
    let expected = [
        (path("directory"), EntryKind::Directory),
        (path("directory/file"), EntryKind::File),
        (path("directory/up"), EntryKind::Link),
    ];
    assert_eq!(found, expected);
    assert_eq!((entries[1].size, entries[2].target.as_ref().unwrap().as_slice()), (3, &b".."[..]));
    let link = path("directory/up");
    assert_eq!(list(&mut place.client, &directory, 1).len(), 1);
    let stat = place.client.call(&Request::FileStat { path: link.into() });
    assert!(matches!(stat, Reply::Entries(entries) if entries[0].kind == EntryKind::Link));
}

#[test]
fn many_slow_readers_do_not_stop_anybody() {
    let mut place = Place::new();
    place.write("file", &vec![5; 4_000_000]);
    let path = place.path("file");
    let slow: Vec<u32> =
        (0..20).map(|_| place.client.open(&Request::FileRead(file_read(bytes(&path))))).collect();
    assert_eq!(place.client.read_file(bytes(&path)).len(), 4_000_000);
    for stream in slow {
        assert!(matches!(place.client.reply(stream), Reply::File(_)));
        assert_eq!(place.client.content(stream).len(), 4_000_000);
    }
}
