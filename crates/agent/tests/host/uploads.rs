//! Uploads by parts, and what is changed and watched in place, against the real server on this host.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use protocol::files::{
    Change, FilesReply, FilesRequest, MakeDirectory, Noticed, UploadBegin, UploadStatus, What,
};
use protocol::frame::Channel;
use protocol::message::{Entry, ErrorCode, FileWrite, PathBytes};
use protocol::{Reply, Request};
use sha2::{Digest, Sha256};

use crate::support::{Client, Event, file_write, refused};

const PART: u64 = 64 << 10;

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
        let entries = fs::read_dir(self.directory.path()).unwrap().flatten();
        let mut names: Vec<_> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn ask(&mut self, request: FilesRequest) -> Reply {
        self.client.call(&Request::Files { user: None, request })
    }

    fn begin(&mut self, name: &str, size: Option<u64>) -> UploadStatus {
        let path = self.path(name);
        let write = FileWrite { size, create_parents: true, ..file_write(bytes(&path)) };
        let begin = UploadBegin { id: "upload".into(), write, part_size: PART };
        status(self.ask(FilesRequest::UploadBegin(begin)))
    }

    fn part(&mut self, number: u32, content: &[u8]) -> Reply {
        let length = content.len() as u64;
        let request = FilesRequest::UploadPart { id: "upload".into(), number, length };
        let stream = self.client.open(&Request::Files { user: None, request });
        self.client.send_data(stream, content);
        self.client.finish(stream);
        self.client.reply(stream)
    }

    fn status(&mut self) -> UploadStatus {
        status(self.ask(FilesRequest::UploadStatus { id: "upload".into() }))
    }

    fn complete(&mut self, size: Option<u64>, sha256: Option<[u8; 32]>) -> Reply {
        self.ask(FilesRequest::UploadComplete { id: "upload".into(), size, sha256 })
    }
}

fn bytes(path: &Path) -> &[u8] {
    path.as_os_str().as_bytes()
}

fn status(reply: Reply) -> UploadStatus {
    match reply {
        Reply::Files(FilesReply::Upload(status)) => status,
        other => panic!("an upload was due, not {other:?}"),
    }
}

fn entry(reply: Reply) -> Entry {
    match reply {
        Reply::Files(FilesReply::Entry(entry)) => entry,
        other => panic!("an entry was due, not {other:?}"),
    }
}

fn content(length: u64) -> Vec<u8> {
    (0..length).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn parts_come_in_any_order_and_again_and_the_file_appears_whole() {
    let mut place = Place::new();
    let whole = content(PART * 3 + 77);
    let parts: Vec<_> = whole.chunks(PART as usize).collect();
    fs::write(place.path("file"), "old").unwrap();
    fs::set_permissions(place.path("file"), fs::Permissions::from_mode(0o750)).unwrap();
    place.begin("file", Some(whole.len() as u64));
    assert_eq!(place.part(4, parts[3]), Reply::Done);
    assert_eq!(place.part(2, parts[0]), Reply::Done);
    assert_eq!(place.part(2, parts[1]), Reply::Done);
    let status = place.status();
    assert_eq!((status.parts, status.bytes), (vec![(2, 2), (4, 4)], PART + 77));
    assert_eq!(refused(place.complete(None, None)), ErrorCode::Conflict);
    // A host that has begun anew asks for it by its id.
    place.client.greet([9; 16]);
    assert_eq!(place.part(3, parts[2]), Reply::Done);
    assert_eq!(place.part(1, parts[0]), Reply::Done);
    assert_eq!(fs::read(place.path("file")).unwrap(), b"old");
    let wrong = place.complete(None, Some([0; 32]));
    assert_eq!(refused(wrong), ErrorCode::PreconditionFailed);
    let digest = Sha256::digest(&whole).into();
    let written = place.complete(Some(whole.len() as u64), Some(digest));
    assert!(matches!(written, Reply::Written { bytes, .. } if bytes == whole.len() as u64));
    assert!(fs::read(place.path("file")).unwrap() == whole);
    assert_eq!(fs::metadata(place.path("file")).unwrap().mode() & 0o777, 0o750);
    assert_eq!(place.names(), ["file"]);
    assert_eq!(refused(place.complete(None, None)), ErrorCode::NotFound);
}

#[test]
fn a_size_that_is_not_known_is_that_of_the_parts() {
    let mut place = Place::new();
    let whole = content(PART * 2 + 5);
    place.begin("made/on/the/way", None);
    // Shorter than the others, so it is the last.
    assert_eq!(place.part(1, &whole[..10]), Reply::Done);
    assert_eq!(refused(place.part(3, &whole[..5])), ErrorCode::Invalid);
    assert_eq!(place.part(1, &whole[..PART as usize]), Reply::Done);
    assert_eq!(place.part(2, &whole[PART as usize..2 * PART as usize]), Reply::Done);
    assert_eq!(place.part(3, &whole[2 * PART as usize..]), Reply::Done);
    assert_eq!(refused(place.complete(Some(1), None)), ErrorCode::Conflict);
    assert!(matches!(place.complete(None, None), Reply::Written { .. }));
    assert!(fs::read(place.path("made/on/the/way")).unwrap() == whole);
}

#[test]
fn an_empty_file_needs_no_part() {
    let mut place = Place::new();
    place.begin("empty", Some(0));
    assert!(matches!(place.complete(None, None), Reply::Written { bytes: 0, .. }));
    assert_eq!(fs::read(place.path("empty")).unwrap(), b"");
}

#[test]
fn a_part_that_breaks_off_or_has_another_length_is_not_there() {
    let mut place = Place::new();
    place.begin("file", Some(PART + 1));
    assert_eq!(place.part(1, &content(PART)), Reply::Done);
    for (number, length) in [(1, PART - 1), (2, 2), (3, 1), (0, 1), (200_000, 1)] {
        assert_eq!(refused(place.part(number, &content(length))), ErrorCode::Invalid, "{number}");
    }
    assert_eq!(place.status().parts, [(1, 1)]);
    let request = FilesRequest::UploadPart { id: "upload".into(), number: 1, length: PART };
    let stream = place.client.open(&Request::Files { user: None, request });
    place.client.send_data(stream, &[1; 1000]);
    place.client.wait_until("the part is being written", |client| {
        let request = FilesRequest::UploadStatus { id: "upload".into() };
        status(client.call(&Request::Files { user: None, request })).parts.is_empty()
    });
    assert_eq!(refused(place.part(1, &content(PART))), ErrorCode::Busy);
    place.client.reset(stream);
    place.client.wait_until("the part can be sent again", |client| {
        let request = FilesRequest::UploadPart { id: "upload".into(), number: 1, length: PART };
        let stream = client.open(&Request::Files { user: None, request });
        client.send_data(stream, &content(PART));
        client.finish(stream);
        client.reply(stream) == Reply::Done
    });
    assert_eq!(place.part(2, &[7]), Reply::Done);
    assert!(matches!(place.complete(None, None), Reply::Written { .. }));
}

#[test]
fn an_upload_that_is_aborted_leaves_nothing() {
    let mut place = Place::new();
    place.begin("file", None);
    assert_eq!(place.part(1, &content(10)), Reply::Done);
    assert_eq!(place.names().len(), 1);
    assert_eq!(place.ask(FilesRequest::UploadAbort { id: "upload".into() }), Reply::Done);
    assert_eq!(place.ask(FilesRequest::UploadAbort { id: "upload".into() }), Reply::Done);
    assert_eq!(place.names(), [""; 0]);
    assert_eq!(place.ask(FilesRequest::UploadList), Reply::Files(FilesReply::Uploads(Vec::new())));
}

#[test]
fn what_was_put_in_the_place_of_an_upload_is_not_written_to() {
    let mut place = Place::new();
    let secret = place.path("secret");
    fs::write(&secret, "secret").unwrap();
    place.begin("sub/file", None);
    let temporary = fs::read_dir(place.path("sub")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(&temporary).unwrap();
    std::os::unix::fs::symlink(&secret, &temporary).unwrap();
    assert_eq!(refused(place.part(1, b"evil")), ErrorCode::NotFound);
    fs::remove_file(&temporary).unwrap();
    fs::hard_link(&secret, &temporary).unwrap();
    assert_eq!(refused(place.part(1, b"evil")), ErrorCode::NotFound);
    assert_eq!(place.ask(FilesRequest::UploadAbort { id: "upload".into() }), Reply::Done);
    assert_eq!(fs::read(&secret).unwrap(), b"secret");
    assert!(temporary.exists());
}

#[test]
fn there_are_only_so_many_uploads_at_once() {
    let mut place = Place::new();
    let path = place.path("file");
    let begin = |number: usize| {
        let write = FileWrite { create_parents: true, ..file_write(bytes(&path)) };
        FilesRequest::UploadBegin(UploadBegin { id: number.to_string(), write, part_size: PART })
    };
    for number in 0..64 {
        status(place.ask(begin(number)));
    }
    assert_eq!(refused(place.ask(begin(64))), ErrorCode::Conflict);
    // The same again is no other.
    status(place.ask(begin(5)));
    assert_eq!(place.names().len(), 64);
    assert_eq!(place.ask(FilesRequest::UploadAbort { id: "5".into() }), Reply::Done);
    status(place.ask(begin(64)));
}

fn named(place: &Place, name: &str) -> PathBytes {
    bytes(&place.path(name)).to_vec().into()
}

#[test]
fn things_are_moved_and_only_replaced_when_asked() {
    let mut place = Place::new();
    for name in ["one", "two"] {
        fs::write(place.path(name), name).unwrap();
    }
    fs::create_dir(place.path("directory")).unwrap();
    let request = |place: &Place, from, to, overwrite| FilesRequest::Move {
        from: named(place, from),
        to: named(place, to),
        overwrite,
    };
    let refusals = [
        ("missing", "x", true, ErrorCode::NotFound),
        ("one", "two", false, ErrorCode::Exists),
        ("one", "directory", true, ErrorCode::WrongKind),
        ("directory", "two", true, ErrorCode::WrongKind),
        ("directory", "directory/in/it", true, ErrorCode::Invalid),
    ];
    for (from, to, overwrite, code) in refusals {
        let request = request(&place, from, to, overwrite);
        assert_eq!(refused(place.ask(request)), code, "{from} to {to}");
    }
    let moved = request(&place, "one", "two", true);
    assert_eq!(entry(place.ask(moved)).path, named(&place, "two"));
    assert_eq!(fs::read(place.path("two")).unwrap(), b"one");
    let moved = request(&place, "two", "made/here/two", false);
    assert_eq!(entry(place.ask(moved)).size, 3);
    let moved = request(&place, "directory", "other", false);
    entry(place.ask(moved));
    assert_eq!(place.names(), ["made", "other"]);
}

#[test]
fn directories_are_made_and_things_are_changed() {
    let mut place = Place::new();
    let make = |path, create_parents| {
        FilesRequest::MakeDirectory(MakeDirectory {
            path,
            mode: Some(0o2770),
            owner: Some("1000:1001".into()),
            create_parents,
        })
    };
    let path = named(&place, "a/b/c");
    assert_eq!(refused(place.ask(make(path.clone(), false))), ErrorCode::NotFound);
    let made = entry(place.ask(make(path.clone(), true)));
    assert_eq!((made.mode, made.user, made.group), (0o2770, 1000, 1001));
    assert_eq!(entry(place.ask(make(path.clone(), false))), made);
    let parent = fs::metadata(place.path("a")).unwrap();
    assert_eq!((parent.uid(), parent.mode() & 0o777), (1000, 0o755));
    fs::write(place.path("file"), "").unwrap();
    let in_file = named(&place, "file");
    assert_eq!(refused(place.ask(make(in_file, true))), ErrorCode::Exists);
    let change = Change {
        path: named(&place, "file"),
        mode: Some(0o4711),
        owner: Some("7:8".into()),
        modified_ns: Some(-1_500_000_000),
    };
    let changed = entry(place.ask(FilesRequest::Change(change)));
    assert_eq!((changed.mode, changed.user, changed.group), (0o4711, 7, 8));
    assert_eq!(changed.modified_ns, -1_500_000_000);
    let missing =
        Change { path: named(&place, "none"), mode: None, owner: None, modified_ns: None };
    assert_eq!(refused(place.ask(FilesRequest::Change(missing))), ErrorCode::NotFound);
}

struct Watch {
    stream: u32,
    buffer: Vec<u8>,
}

impl Watch {
    fn begin(place: &mut Place, name: &str, recursive: bool) -> Self {
        let request = FilesRequest::Watch { path: named(place, name), recursive };
        let stream = place.client.open(&Request::Files { user: None, request });
        assert_eq!(place.client.reply(stream), Reply::Files(FilesReply::Watching));
        Self { stream, buffer: Vec::new() }
    }

    fn next(&mut self, place: &mut Place) -> Noticed {
        loop {
            if let Some(length) = self.buffer.first_chunk::<4>() {
                let length = u32::from_le_bytes(*length) as usize;
                if self.buffer.len() >= 4 + length {
                    let rest = self.buffer.split_off(4 + length);
                    let message = std::mem::replace(&mut self.buffer, rest);
                    return protocol::message::decode(&message[4..]).unwrap();
                }
            }
            match place.client.next(self.stream) {
                Event::Data(Channel::Content, data) => self.buffer.extend(data),
                other => panic!("{other:?} does not belong to a watch"),
            }
        }
    }

    /// Skips what else happens meanwhile.
    fn until(&mut self, place: &mut Place, what: What, path: impl AsRef<Path>) -> Noticed {
        let path = path.as_ref();
        loop {
            let noticed = self.next(place);
            if noticed.what == what && noticed.path[..] == *bytes(path) {
                return noticed;
            }
        }
    }
}

#[test]
fn what_happens_below_a_directory_is_told() {
    let mut place = Place::new();
    fs::create_dir(place.path("sub")).unwrap();
    let mut watch = Watch::begin(&mut place, "", true);
    let path = place.path("sub/file");
    fs::write(&path, "1").unwrap();
    watch.until(&mut place, What::Created, &path);
    watch.until(&mut place, What::Modified, &path);
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    watch.until(&mut place, What::Changed, &path);
    let new = place.path("renamed");
    fs::rename(&path, &new).unwrap();
    let moved = watch.until(&mut place, What::Moved, &new);
    assert_eq!(moved.from.unwrap()[..], *bytes(&path));
    // Directories that come later are watched as well, and what was in them already is told.
    fs::create_dir_all(place.path("x/y")).unwrap();
    let deep = place.path("x/y/deep");
    let path = place.path("x/y");
    watch.until(&mut place, What::Created, &path);
    fs::write(&deep, "1").unwrap();
    watch.until(&mut place, What::Created, &deep);
    fs::remove_file(&deep).unwrap();
    watch.until(&mut place, What::Deleted, &deep);
    fs::rename(place.path("x"), place.path("z")).unwrap();
    let path = place.path("z");
    watch.until(&mut place, What::Moved, &path);
    fs::write(place.path("z/y/again"), "1").unwrap();
    let path = place.path("z/y/again");
    watch.until(&mut place, What::Created, &path);
}

#[test]
fn a_watch_ends_with_what_it_watches() {
    let mut place = Place::new();
    let file = place.path("file");
    fs::write(&file, "").unwrap();
    let mut watch = Watch::begin(&mut place, "file", true);
    fs::write(&file, "1").unwrap();
    watch.until(&mut place, What::Modified, &file);
    fs::remove_file(&file).unwrap();
    while watch.next(&mut place).what != What::Gone {}
    loop {
        match place.client.next(watch.stream) {
            Event::Finish => break,
            Event::Data(..) => {}
            other => panic!("{other:?} does not belong to a watch"),
        }
    }
    let missing = FilesRequest::Watch { path: named(&place, "none"), recursive: false };
    assert_eq!(refused(place.ask(missing)), ErrorCode::NotFound);
}

#[test]
fn a_watch_that_nobody_reads_tells_that_it_missed_something() {
    let mut place = Place::new();
    let mut watch = Watch::begin(&mut place, "", true);
    let most: u64 = fs::read_to_string("/proc/sys/fs/inotify/max_queued_events")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    // Long names, so that what may be on its way is soon used up; each twice as long as the kernel's queue.
    let name = "n".repeat(240);
    for number in 0..2 * most.max(8192) {
        let path = place.path(&format!("{name}{}", number % 512));
        if number % 1024 < 512 {
            fs::write(path, "").unwrap();
        } else {
            fs::remove_file(path).unwrap();
        }
    }
    // Of this, too, nobody is told; it is watched all the same.
    fs::create_dir_all(place.path("lost/deep")).unwrap();
    while watch.next(&mut place).what != What::Overflow {}
    assert_eq!(place.client.call(&Request::Ping), Reply::Done);
    let found = place.path("lost/deep/found");
    fs::write(&found, "").unwrap();
    watch.until(&mut place, What::Created, &found);
}
