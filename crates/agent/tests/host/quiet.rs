//! Quiet moments, with real groups and real file systems: of the test's own, never of the host's.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use agent::Options;
use protocol::frame::Channel;
use protocol::message::ErrorCode;
use protocol::{Reply, Request};

use crate::lent::{Disk, Hierarchy};
use crate::support::{Client, Event, exec, file_write};

const THAW: Request = Request::Thaw { unix_time_ns: 0 };

/// The disk is mounted at `disk`.
struct Place {
    client: Client,
    hierarchy: Hierarchy,
    disk: Disk,
    directory: tempfile::TempDir,
}

impl Place {
    /// `None` where the host has no version 2 hierarchy.
    fn new(adjust: impl FnOnce(&mut Options)) -> Option<Self> {
        let hierarchy = Hierarchy::new()?;
        let directory = tempfile::tempdir().unwrap();
        let point = directory.path().join("disk");
        let disk = Disk::mounted(&directory.path().join("image"), point.clone());
        let mut options = Options::hosted();
        options.groups = Some(hierarchy.path().to_owned());
        options.file_systems = Some(directory.path().to_owned());
        options.spill_directory = point;
        adjust(&mut options);
        Some(Self { client: Client::start_with(options), hierarchy, disk, directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join("disk").join(name)
    }

    /// An exec that counts on its output and on the disk, until it is killed.
    fn begin_to_count(&mut self) -> u32 {
        let script = format!(
            "n=0; while :; do n=$((n+1)); echo $n; echo $n > {}; done",
            self.path("n").display()
        );
        let stream = self.client.open(&Request::ExecStart(exec(&script)));
        let counted = self.path("n");
        self.client.wait_until("it counts", |_| counted.exists());
        stream
    }
}

fn bytes_of(path: &Path) -> Vec<u8> {
    use std::os::unix::ffi::OsStrExt;
    path.as_os_str().as_bytes().to_vec()
}

fn data_until_still(client: &mut Client, stream: u32) {
    // Whatever was printed before is delivered before the answer to what is asked now.
    client.call(&Request::Ping);
    while client.has(stream) {
        client.next(stream);
    }
}

#[test]
fn everything_stands_still_and_goes_on() {
    let Some(mut place) = Place::new(|_| ()) else { return };
    let stream = place.begin_to_count();
    for _ in 0..2 {
        assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
        assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
        assert!(place.disk.is_frozen() && place.hierarchy.stands_still());
        data_until_still(&mut place.client, stream);
        let before = std::fs::read(place.path("n")).unwrap();
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(100) {
            assert_eq!(place.client.call(&Request::Ping), Reply::Done);
        }
        assert_eq!(std::fs::read(place.path("n")).unwrap(), before);
        assert_eq!(place.client.call(&THAW), Reply::Done);
        assert_eq!(place.client.call(&THAW), Reply::Done);
        assert!(!place.disk.is_frozen() && !place.hierarchy.stands_still());
        assert!(matches!(place.client.next(stream), Event::Data(Channel::Stdout, _)));
    }
}

#[test]
fn what_is_asked_meanwhile_is_done_afterwards_in_its_order() {
    let Some(mut place) = Place::new(|_| ()) else { return };
    let (old, new) = (place.path("old"), place.path("new"));
    std::fs::write(&old, "old").unwrap();
    let client = &mut place.client;
    assert_eq!(client.call(&Request::Quiesce), Reply::Done);
    let deletion = client.open(&Request::FileDelete { path: bytes_of(&old).into() });
    let mut cat = exec(&format!("cat; ls {}", old.parent().unwrap().display()));
    cat.has_stdin = true;
    let id = cat.id.clone();
    let running = client.open(&Request::ExecStart(cat));
    client.send_data(running, b"given ");
    let status = client.open(&Request::ExecStatus { id });
    let upload = client.open(&Request::FileWrite(file_write(&bytes_of(&new))));
    client.send_data(upload, b"content");
    client.finish(upload);
    client.send_data(running, b"input\n");
    client.finish(running);
    assert_eq!(client.read_file(&bytes_of(&old)), b"old");
    assert!(![deletion, running, status, upload].into_iter().any(|stream| client.has(stream)));
    assert_eq!(client.call(&THAW), Reply::Done);
    assert_eq!(client.reply(deletion), Reply::Done);
    assert!(matches!(client.reply(status), Reply::ExecStatus(_)));
    assert!(matches!(client.reply(upload), Reply::Written { bytes: 7, .. }));
    let ran = client.end_of_exec(running);
    assert!(ran.text().starts_with("given input\n") && !ran.text().contains("old"), "{ran:?}");
    assert_eq!(client.read_file(&bytes_of(&new)), b"content");
}

#[test]
fn a_later_host_finds_it_standing_and_its_execs_whole() {
    let Some(mut place) = Place::new(|_| ()) else { return };
    let client = &mut place.client;
    // More than stays in memory, so that a part is in a file, and an upload whose file has no name yet.
    let start = exec("seq 1 200000; sleep 0.3; echo end");
    let id = start.id.clone();
    let stream = client.open(&Request::ExecStart(start));
    while !matches!(client.next(stream), Event::Data(..)) {}
    let upload = client
        .open(&Request::FileWrite(file_write(&bytes_of(&place.directory.path().join("disk/up")))));
    client.send_data(upload, &vec![1; 512 << 10]);
    client.wait_until("the agent has written all of it", |client| {
        client.call(&Request::Ping);
        has_deleted_file(512 << 10)
    });
    client.call(&Request::Ping);
    assert_eq!(client.call(&Request::Quiesce), Reply::Done);
    client.greet([7; 16]);
    assert_eq!(client.call(&Request::Ping), Reply::Done);
    assert_eq!(client.call(&Request::Quiesce), Reply::Done);
    let forgotten = client.open(&Request::ExecsForget { ids: vec!["other".into()] });
    assert_eq!(client.call(&THAW), Reply::Done);
    assert_eq!(client.reply(forgotten), Reply::Done);
    let again = client.open(&Request::ExecWatch { id, stdout_offset: 0, stderr_offset: 0 });
    let expected: String = (1..=200_000).map(|n| format!("{n}\n")).collect();
    assert!(client.end_of_exec(again).text() == expected + "end\n");
    assert!(!place.path("up").exists());
}

/// Of so many bytes, open in this program.
fn has_deleted_file(bytes: u64) -> bool {
    let mut open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    open.any(|entry| {
        let is_deleted = std::fs::read_link(entry.path())
            .is_ok_and(|target| target.to_string_lossy().ends_with("(deleted)"));
        is_deleted && std::fs::metadata(entry.path()).is_ok_and(|file| file.len() == bytes)
    })
}

#[test]
fn without_a_word_from_the_host_it_goes_on_by_itself() {
    let limit = Duration::from_millis(500);
    let Some(mut place) = Place::new(|options| options.quiet_limit = limit) else { return };
    place.begin_to_count();
    assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
    let begun = Instant::now();
    while begun.elapsed() < limit * 2 {
        assert_eq!(place.client.call(&Request::Ping), Reply::Done);
        assert!(place.hierarchy.stands_still());
    }
    let Place { client, hierarchy, disk, .. } = &mut place;
    client.wait_until("it goes on", |_| !hierarchy.stands_still() && !disk.is_frozen());
    assert_eq!(client.call(&THAW), Reply::Done);
}

#[test]
fn a_file_system_that_its_user_has_frozen_stays_so() {
    let Some(mut place) = Place::new(|options| options.spill_directory = std::env::temp_dir())
    else {
        return;
    };
    place.disk.freeze();
    assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
    assert_eq!(place.client.call(&THAW), Reply::Done);
    assert!(place.disk.is_frozen());
    place.disk.thaw();
}

#[test]
fn a_file_system_in_a_file_of_another_stands_still_with_it() {
    let Some(mut place) = Place::new(|_| ()) else { return };
    let inner = Disk::mounted(&place.path("image"), place.directory.path().join("inner"));
    let script =
        format!("while :; do date > {}/inner/date; done", place.directory.path().display());
    place.client.open(&Request::ExecStart(exec(&script)));
    for _ in 0..3 {
        assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
        assert!(place.disk.is_frozen() && inner.is_frozen());
        assert_eq!(place.client.call(&THAW), Reply::Done);
        assert!(!place.disk.is_frozen() && !inner.is_frozen());
    }
}

#[test]
fn a_process_that_cannot_be_stopped_is_named_and_everything_goes_on() {
    let Some(mut place) = Place::new(|options| options.spill_directory = std::env::temp_dir())
    else {
        return;
    };
    place.disk.freeze();
    let script = format!("exec tee {}", place.path("never").display());
    let mut start = exec(&script);
    start.has_stdin = true;
    let stuck = place.client.open(&Request::ExecStart(start));
    let Reply::ExecStarted { pid } = place.client.reply(stuck) else {
        panic!("it has been started")
    };
    place.client.wait_until("it waits for the disk", |_| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.contains("(tee) D")
    });
    let ticking =
        place.client.open(&Request::ExecStart(exec("while :; do echo tick; sleep 0.01; done")));
    assert!(matches!(place.client.reply(ticking), Reply::ExecStarted { .. }));
    let failure = match place.client.call(&Request::Quiesce) {
        Reply::Failed(failure) => failure,
        other => panic!("it is not quiet, so {other:?} is wrong"),
    };
    assert_eq!(failure.code, ErrorCode::Conflict);
    assert!(failure.message.contains("tee"), "{failure}");
    assert!(!place.hierarchy.stands_still());
    data_until_still(&mut place.client, ticking);
    assert!(matches!(place.client.next(ticking), Event::Data(..)));
    place.disk.thaw();
    place.client.finish(stuck);
    assert_eq!(place.client.end_of_exec(stuck).exit_code(), 0);
}
