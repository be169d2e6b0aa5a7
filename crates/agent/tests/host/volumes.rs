//! Volumes, with loop devices in place of slots.

use std::path::PathBuf;

use agent::Options;
use protocol::message::{ErrorCode, Failure, Mount};
use protocol::{Reply, Request};

use crate::lent::{Disk, Hierarchy, must};
use crate::support::{Client, Event, exec};

/// Three disks, behind slots 0, 1 and 8.
struct Place {
    client: Client,
    disks: Vec<Disk>,
    directory: tempfile::TempDir,
    _hierarchy: Option<Hierarchy>,
}

const SLOTS: [u8; 3] = [0, 1, 8];

impl Place {
    fn new() -> Self {
        let hierarchy = Hierarchy::new();
        let directory = tempfile::tempdir().unwrap();
        let disks: Vec<Disk> = SLOTS
            .iter()
            .map(|slot| Disk::new(&directory.path().join(format!("image{slot}"))))
            .collect();
        let mut options = Options::hosted();
        options.groups = hierarchy.as_ref().map(|hierarchy| hierarchy.path().to_owned());
        options.file_systems = Some(directory.path().to_owned());
        let devices = disks.iter().map(|disk| disk.device().to_owned());
        options.disks = SLOTS.into_iter().zip(devices).collect();
        Self { client: Client::start_with(options), disks, directory, _hierarchy: hierarchy }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn wanted(&self, slot: u8) -> Mount {
        let path = self.path(&format!("mnt/{slot}")).into_os_string().into_encoded_bytes().into();
        Mount { slot, path, read_only: false }
    }

    fn mount(&mut self, slots: &[u8]) -> Reply {
        let volumes = slots.iter().map(|slot| self.wanted(*slot)).collect();
        self.client.call(&Request::VolumesMount { volumes })
    }

    fn unmount(&mut self, slots: &[u8]) -> Reply {
        self.client.call(&Request::VolumesUnmount { slots: slots.to_vec() })
    }

    /// On this host others may begin views of their own at any moment, which hold our volumes, too.
    fn must_unmount(&mut self, slots: &[u8]) {
        let request = Request::VolumesUnmount { slots: slots.to_vec() };
        self.client
            .wait_until("the volumes are free", |client| client.call(&request) == Reply::Done);
    }

    fn is_mounted(&self, slot: u8) -> bool {
        let point = format!(" {} ", self.path(&format!("mnt/{slot}")).display());
        std::fs::read_to_string("/proc/self/mounts").unwrap().contains(&point)
    }
}

fn failure(reply: Reply) -> Failure {
    match reply {
        Reply::Failed(failure) => failure,
        other => panic!("a refusal was due, not {other:?}"),
    }
}

#[test]
fn volumes_come_and_go_and_keep_what_was_written() {
    let mut place = Place::new();
    for round in ["", "kept\n"] {
        assert_eq!(place.mount(&SLOTS), Reply::Done);
        assert_eq!(place.mount(&SLOTS), Reply::Done);
        let file = place.path("mnt/0/file");
        let ran = place.client.run(&format!("cat {0}; echo kept > {0}", file.display()));
        assert_eq!(ran.text(), round);
        // The second half of the slots cannot be written to.
        let ran = place.client.run(&format!("touch {}", place.path("mnt/8/file").display()));
        assert_ne!(ran.exit_code(), 0);
        place.must_unmount(&SLOTS);
        place.must_unmount(&SLOTS);
        assert!(!SLOTS.iter().any(|slot| place.is_mounted(*slot)));
        assert!(place.disks.iter().all(Disk::is_clean));
    }
}

#[test]
fn a_volume_in_use_stays_and_so_do_the_others_and_its_user_is_named() {
    let mut place = Place::new();
    assert_eq!(place.mount(&SLOTS), Reply::Done);
    let start = exec(&format!("cd {}; echo in; exec sleep 60", place.path("mnt/1").display()));
    let id = start.id.clone();
    let stream = place.client.open(&Request::ExecStart(start));
    while !matches!(place.client.next(stream), Event::Data(..)) {}
    for quiet in [false, true] {
        if quiet {
            assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
        }
        let failure = failure(place.unmount(&SLOTS));
        assert_eq!(failure.code, ErrorCode::Conflict);
        assert!(
            failure.message.contains("mnt/1") && failure.message.contains("sleep"),
            "{failure}"
        );
        assert!(SLOTS.iter().all(|slot| place.is_mounted(*slot)));
    }
    assert_eq!(place.client.call(&Request::Thaw { unix_time_ns: 0 }), Reply::Done);
    place.client.call(&Request::ExecCancel { id, grace_ms: 0 });
    place.client.end_of_exec(stream);
    place.must_unmount(&SLOTS);
}

#[test]
fn a_view_of_its_own_holds_a_volume_too() {
    let mut place = Place::new();
    assert_eq!(place.mount(&[0]), Reply::Done);
    let start = exec("exec unshare --mount sh -c 'echo in; exec sleep 60'");
    let id = start.id.clone();
    let stream = place.client.open(&Request::ExecStart(start));
    while !matches!(place.client.next(stream), Event::Data(..)) {}
    let failure = failure(place.unmount(&[0]));
    assert!(failure.message.contains("sleep"), "{failure}");
    assert!(place.is_mounted(0));
    place.client.call(&Request::ExecCancel { id, grace_ms: 0 });
    place.client.end_of_exec(stream);
    place.must_unmount(&[0]);
}

#[test]
fn what_was_taken_away_in_a_quiet_moment_is_back_before_processes_go_on() {
    let mut place = Place::new();
    assert_eq!(place.mount(&SLOTS), Reply::Done);
    let part = place.path("part");
    std::fs::create_dir(&part).unwrap();
    std::fs::create_dir(place.path("mnt/0/inside")).unwrap();
    must("mount", &["--bind".as_ref(), &place.path("mnt/0/inside"), &part]);
    let script = format!(
        "cd /; while :; do echo x >> {0}/log || exit 7; echo x >> {1}/log || exit 8; done",
        place.path("mnt/0").display(),
        part.display()
    );
    let start = exec(&script);
    let id = start.id.clone();
    let stream = place.client.open(&Request::ExecStart(start));
    for _ in 0..3 {
        assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
        // A shell may stand still with its output file open.
        if place.unmount(&[0, 1]) == Reply::Done {
            assert!(!place.is_mounted(0) && !place.is_mounted(1) && place.is_mounted(8));
            assert!(place.disks[0].is_clean());
        }
        assert_eq!(place.client.call(&Request::Thaw { unix_time_ns: 0 }), Reply::Done);
        assert!(SLOTS.iter().all(|slot| place.is_mounted(*slot)));
    }
    place.client.call(&Request::ExecCancel { id, grace_ms: 0 });
    assert_eq!(place.client.end_of_exec(stream).exit_code(), 137);
    place.must_unmount(&SLOTS);
    let below = std::fs::read_dir(place.path("mnt/0")).unwrap().count();
    assert_eq!(
        below + std::fs::read_dir(part).unwrap().count(),
        0,
        "nothing was written beside it"
    );
}

#[test]
fn none_is_mounted_when_one_cannot_be() {
    let mut place = Place::new();
    let data = place.wanted(0);
    let refusals = [
        (Mount { slot: 5, ..place.wanted(1) }, ErrorCode::Invalid),
        (Mount { path: b"/proc/x".to_vec().into(), ..place.wanted(1) }, ErrorCode::Invalid),
        (Mount { path: b"mnt".to_vec().into(), ..place.wanted(1) }, ErrorCode::Invalid),
        (Mount { path: b"/".to_vec().into(), ..place.wanted(1) }, ErrorCode::Invalid),
        (Mount { path: b"/etc/passwd".to_vec().into(), ..place.wanted(1) }, ErrorCode::WrongKind),
    ];
    let link = place.path("link");
    std::os::unix::fs::symlink("/proc", &link).unwrap();
    let through = link.join("sys").into_os_string().into_encoded_bytes();
    let through = (Mount { path: through.into(), ..place.wanted(1) }, ErrorCode::Invalid);
    for (wrong, code) in refusals.into_iter().chain([through]) {
        let request = Request::VolumesMount { volumes: vec![data.clone(), wrong.clone()] };
        assert_eq!(place.client.refusal(&request), code, "{wrong:?}");
        assert!(!place.is_mounted(0));
    }
}

#[test]
fn no_directory_is_made_while_everything_stands_still() {
    let mut place = Place::new();
    // So that something is frozen.
    assert_eq!(place.mount(&[1]), Reply::Done);
    assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
    assert_eq!(failure(place.mount(&[0])).code, ErrorCode::Conflict);
    std::fs::create_dir_all(place.path("mnt/0")).unwrap();
    assert_eq!(place.mount(&[0]), Reply::Done);
    assert_eq!(place.client.call(&Request::Thaw { unix_time_ns: 0 }), Reply::Done);
    assert!(place.is_mounted(0) && place.is_mounted(1));
    place.must_unmount(&[0, 1]);
}

#[test]
fn what_is_not_mounted_is_not_grown() {
    let mut place = Place::new();
    assert_eq!(place.client.refusal(&Request::VolumeGrow { slot: 0 }), ErrorCode::NotFound);
}

#[test]
fn at_the_end_processes_are_gone_and_volumes_are_clean() {
    let mut place = Place::new();
    assert_eq!(place.mount(&SLOTS), Reply::Done);
    let script = format!(
        "trap '' TERM; cd {}; echo in; while :; do echo x >> log; done",
        place.path("mnt/0").display()
    );
    let stream = place.client.open(&Request::ExecStart(exec(&script)));
    while !matches!(place.client.next(stream), Event::Data(..)) {}
    assert_eq!(place.client.call(&Request::Quiesce), Reply::Done);
    assert_eq!(place.client.call(&Request::Release { grace_ms: 100 }), Reply::Done);
    assert!(!SLOTS.iter().any(|slot| place.is_mounted(*slot)));
    assert!(place.disks.iter().all(Disk::is_clean));
    assert_eq!(place.client.end_of_exec(stream).exit_code(), 137);
    assert_eq!(place.client.refusal(&Request::ExecStart(exec("true"))), ErrorCode::Conflict);
    assert_eq!(place.client.call(&Request::Release { grace_ms: 100 }), Reply::Done);
}
