//! Archives, against the real server on this host and beside the `tar` that everybody has.

use std::fs::{self, Permissions};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use protocol::files::{FilesReply, FilesRequest, Unpack};
use protocol::message::{ErrorCode, Failure};
use protocol::{Reply, Request};
use tar::{EntryType, Header};

use crate::support::{Client, Event};

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

    fn pack(&mut self, path: &Path) -> Vec<u8> {
        let path = path.as_os_str().as_bytes().to_vec().into();
        let stream =
            self.client.open(&Request::Files { user: None, request: FilesRequest::Pack { path } });
        assert_eq!(self.client.reply(stream), Reply::Files(FilesReply::Packing));
        self.client.content(stream)
    }

    fn unpack_as(&mut self, path: &Path, owner: Option<&str>, archive: &[u8]) -> Reply {
        let path = path.as_os_str().as_bytes().to_vec().into();
        let request = Unpack { path, owner: owner.map(str::to_owned) };
        let stream = self
            .client
            .open(&Request::Files { user: None, request: FilesRequest::Unpack(request) });
        self.client.send_data(stream, archive);
        self.client.finish(stream);
        self.client.reply(stream)
    }

    fn unpack(&mut self, path: &Path, archive: &[u8]) -> u64 {
        match self.unpack_as(path, None, archive) {
            Reply::Files(FilesReply::Unpacked { entries, .. }) => entries,
            other => panic!("an archive is unpacked, not {other:?}"),
        }
    }

    fn refused(&mut self, archive: &[u8]) -> Failure {
        let target = self.path("target");
        match self.unpack_as(&target, None, archive) {
            Reply::Failed(failure) => failure,
            other => panic!("a refusal was due, not {other:?}"),
        }
    }
}

fn run(command: &mut Command) -> Vec<u8> {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

/// All of a tree that an archive keeps: kind, mode, owner, time, content, names of one file.
fn described(root: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut ahead = vec![PathBuf::new()];
    while let Some(name) = ahead.pop() {
        let path = root.join(&name);
        let stat = path.symlink_metadata().unwrap();
        let content = if stat.is_dir() {
            for entry in fs::read_dir(&path).unwrap() {
                ahead.push(name.join(entry.unwrap().file_name()));
            }
            String::new()
        } else if stat.is_symlink() {
            format!("{:?}", fs::read_link(&path).unwrap())
        } else {
            let bytes = fs::read(&path).unwrap();
            format!("{} {} names {:x}", bytes.len(), stat.nlink(), crc(&bytes))
        };
        found.push(format!(
            "{name:?} {:o} {}:{} {} {content}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.mtime()
        ));
    }
    found.sort();
    found
}

fn crc(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, &byte| sum.wrapping_mul(0x0100_0000_01b3) ^ u64::from(byte))
}

/// One of everything that an archive keeps.
fn make_tree(root: &Path) {
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    for directory in ["", "empty", "sub", "sub/deep", ".hidden"] {
        fs::create_dir(root.join(directory)).unwrap();
    }
    fs::write(root.join("every.bin"), &every_byte).unwrap();
    fs::write(root.join("sub/nothing"), "").unwrap();
    fs::write(root.join("sub/.dot"), "dot").unwrap();
    fs::write(root.join("n".repeat(255)), "long").unwrap();
    let long = root.join("sub/deep").join("d".repeat(200));
    fs::create_dir(&long).unwrap();
    fs::write(long.join("f".repeat(200)), "far").unwrap();
    for name in [
        "日本語 é 😀 #?%&+ 'quoted' \"x\".txt".as_bytes(),
        b"-dash",
        b"new\nline",
        b"no utf8 \xff\xfe",
    ] {
        fs::write(root.join(std::ffi::OsString::from_vec(name.to_vec())), name).unwrap();
    }
    fs::write(root.join("script"), "#!/bin/sh\n").unwrap();
    fs::hard_link(root.join("script"), root.join("sub/same")).unwrap();
    symlink("../script", root.join("sub/link")).unwrap();
    symlink("/nowhere/".to_owned() + &"x".repeat(150), root.join("broken")).unwrap();
    let sparse = fs::File::create(root.join("holes")).unwrap();
    sparse.set_len(8 << 20).unwrap();
    for place in 0..40 {
        sparse.write_all_at(b"data", (place * 128) << 10).unwrap();
    }
    std::os::unix::fs::chown(root.join("script"), Some(1000), Some(3_000_000)).unwrap();
    fs::set_permissions(root.join("script"), Permissions::from_mode(0o4755)).unwrap();
    fs::set_permissions(root.join("sub"), Permissions::from_mode(0o2750)).unwrap();
    fs::set_permissions(root.join("empty"), Permissions::from_mode(0o1777)).unwrap();
    run(Command::new("find").arg(root).args([
        "-depth",
        "-exec",
        "touch",
        "-h",
        "-d",
        "@1234567890",
        "{}",
        "+",
    ]));
    run(Command::new("touch").args(["-d", "@-5"]).arg(root.join("every.bin")));
}

#[test]
fn a_tree_comes_back_as_it_went_with_modes_owners_links_times_and_holes() {
    let mut place = Place::new();
    let (tree, ours, theirs) = (place.path("tree"), place.path("ours"), place.path("theirs"));
    make_tree(&tree);
    let expected = described(&tree);
    let archive = place.pack(&tree);
    assert!(archive.len() < 4 << 20, "holes are not in the archive: {} bytes", archive.len());

    let entries = place.unpack(&ours, &archive);
    assert_eq!(described(&ours), expected);
    assert_eq!(entries, expected.len() as u64);
    assert!(fs::metadata(ours.join("holes")).unwrap().blocks() < 4096, "holes stay holes");

    fs::write(place.path("archive"), &archive).unwrap();
    fs::create_dir(&theirs).unwrap();
    run(Command::new("tar").arg("-C").arg(&theirs).arg("-xpf").arg(place.path("archive")));
    assert_eq!(described(&theirs), expected);
    // Over what is there, where the target itself is left alone.
    place.unpack(&ours, &archive);
    assert_eq!(described(&ours)[1..], expected[1..]);
}

#[test]
fn archives_of_other_programs_are_unpacked() {
    let mut place = Place::new();
    let tree = place.path("tree");
    make_tree(&tree);
    let expected = described(&tree);
    for arguments in [
        &["--format=gnu"][..],
        &["--format=gnu", "--sparse"],
        &["--format=pax"],
        &["--format=pax", "--sparse", "--sparse-version=0.0"],
        &["--format=pax", "--sparse", "--sparse-version=0.1"],
        &["--format=pax", "--sparse", "--sparse-version=1.0"],
    ] {
        let archive =
            run(Command::new("tar").args(arguments).arg("-C").arg(&tree).args(["-cf", "-", "."]));
        let target = place.path("unpacked");
        place.unpack(&target, &archive);
        assert_eq!(described(&target), expected, "{arguments:?}");
        fs::remove_dir_all(&target).unwrap();
    }
}

#[test]
fn a_file_alone_is_an_archive_of_one() {
    let mut place = Place::new();
    let (file, target) = (place.path("one"), place.path("target"));
    fs::write(&file, "content").unwrap();
    let archive = place.pack(&file);
    assert_eq!(place.unpack(&target, &archive), 1);
    assert_eq!(fs::read(target.join("one")).unwrap(), b"content");
}

#[test]
fn what_is_no_file_is_left_out_and_told() {
    let mut place = Place::new();
    let tree = place.path("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("kept"), "kept").unwrap();
    run(Command::new("mkfifo").arg(tree.join("fifo")));
    let _socket = std::os::unix::net::UnixListener::bind(tree.join("socket")).unwrap();
    let archive = place.pack(&tree);
    let text = String::from_utf8_lossy(&archive);
    assert!(text.contains("comment=left out fifo: it is a FIFO"));
    assert!(text.contains("comment=left out socket: it is a socket"));
    fs::write(place.path("archive"), &archive).unwrap();
    let listed = run(Command::new("tar").arg("-tf").arg(place.path("archive")));
    assert_eq!(String::from_utf8_lossy(&listed), "./\nkept\n");
}

#[test]
fn an_owner_that_is_asked_for_has_everything() {
    let mut place = Place::new();
    let (tree, target) = (place.path("tree"), place.path("a/b/target"));
    make_tree(&tree);
    let archive = place.pack(&tree);
    place.unpack_as(&target, Some("1234:2345"), &archive);
    for line in described(&target) {
        assert!(line.contains(" 1234:2345 "), "{line}");
    }
    // And so do the parents that were made on the way.
    let parent = fs::metadata(place.path("a")).unwrap();
    assert_eq!((parent.uid(), parent.gid(), parent.mode() & 0o777), (1234, 2345, 0o755));
}

#[test]
fn a_target_that_was_there_keeps_its_own_mode() {
    let mut place = Place::new();
    let (tree, target) = (place.path("tree"), place.path("target"));
    fs::create_dir(&tree).unwrap();
    fs::create_dir(&target).unwrap();
    fs::set_permissions(&target, Permissions::from_mode(0o1777)).unwrap();
    let archive = place.pack(&tree);
    place.unpack(&target, &archive);
    assert_eq!(fs::metadata(&target).unwrap().mode() & 0o7777, 0o1777);
}

fn entry(kind: EntryType, name: &[u8], link: &[u8], content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.as_old_mut().name[..name.len()].copy_from_slice(name);
    header.as_old_mut().linkname[..link.len()].copy_from_slice(link);
    header.set_entry_type(kind);
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(1);
    header.set_size(content.len() as u64);
    header.set_cksum();
    let mut bytes = header.as_bytes().to_vec();
    bytes.extend_from_slice(content);
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes
}

fn archive(entries: &[Vec<u8>]) -> Vec<u8> {
    [entries.concat(), vec![0; 1024]].concat()
}

#[test]
fn nothing_leaves_the_target() {
    let mut place = Place::new();
    let outside = place.path("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("secret"), "secret").unwrap();
    let (to_outside, up) = (outside.as_os_str().as_bytes().to_vec(), b"../outside");
    let file = |name: &[u8]| entry(EntryType::Regular, name, b"", b"evil");
    let link = |target: &[u8]| entry(EntryType::Symlink, b"link", target, b"");
    let absolute = [&to_outside[..], b"/file"].concat();
    let hostile = [
        archive(&[file(b"../outside/file")]),
        archive(&[file(b"a/../../outside/file")]),
        archive(&[file(&absolute)]),
        archive(&[link(&to_outside), file(b"link/file")]),
        archive(&[link(up), file(b"link/file")]),
        archive(&[link(b".."), file(b"link/outside/file")]),
        archive(&[link(up), entry(EntryType::Directory, b"link/made", b"", b"")]),
        archive(&[link(up), entry(EntryType::Directory, b"link/", b"", b"")]),
        archive(&[entry(EntryType::Link, b"hard", b"../outside/secret", b"")]),
        archive(&[entry(EntryType::Link, b"hard", b"missing", b"")]),
        archive(&[link(up), entry(EntryType::Link, b"hard", b"link/secret", b"")]),
        archive(&[link(up), entry(EntryType::Symlink, b"link/secret", b"x", b"")]),
        archive(&[entry(EntryType::Char, b"device", b"", b"")]),
        archive(&[entry(EntryType::Block, b"device", b"", b"")]),
        archive(&[entry(EntryType::Fifo, b"fifo", b"", b"")]),
        archive(&[file(b"/")]),
        archive(&[file(b"..")]),
    ];
    for (number, archive) in hostile.iter().enumerate() {
        let failure = place.refused(archive);
        assert_eq!(failure.code, ErrorCode::Invalid, "{number}: {failure:?}");
        let names: Vec<_> =
            fs::read_dir(&outside).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["secret"], "{number}");
        assert_eq!(fs::read(outside.join("secret")).unwrap(), b"secret", "{number}");
        assert!(!place.path("target/hard").exists(), "{number}");
        fs::remove_dir_all(place.path("target")).unwrap();
    }
}

#[test]
fn links_inside_are_followed_and_a_link_in_a_files_place_is_replaced() {
    let mut place = Place::new();
    let (target, outside) = (place.path("target"), place.path("outside"));
    fs::create_dir_all(target.join("real")).unwrap();
    fs::write(&outside, "kept").unwrap();
    symlink("real", target.join("alias")).unwrap();
    symlink(&outside, target.join("file")).unwrap();
    let archive = archive(&[
        entry(EntryType::Directory, b"alias/", b"", b""),
        entry(EntryType::Regular, b"alias/new", b"", b"new"),
        entry(EntryType::Regular, b"file", b"", b"file"),
        entry(EntryType::Regular, b"made/on/the/way", b"", b"way"),
    ]);
    assert_eq!(place.unpack(&target, &archive), 4);
    assert_eq!(fs::read(target.join("real/new")).unwrap(), b"new");
    assert!(target.join("alias").is_symlink());
    assert_eq!(fs::read(&outside).unwrap(), b"kept");
    assert!(!target.join("file").is_symlink());
    assert_eq!(fs::metadata(target.join("made/on")).unwrap().mode() & 0o777, 0o755);
}

#[test]
fn a_failure_names_the_entry_and_what_is_there() {
    let mut place = Place::new();
    let good = entry(EntryType::Regular, b"good", b"", b"1234");
    let failure =
        place.refused(&archive(&[good.clone(), entry(EntryType::Regular, b"../bad", b"", b"")]));
    assert!(
        failure.message.contains("../bad") && failure.message.contains("1 entries (4 bytes)"),
        "{failure:?}"
    );
    assert_eq!(fs::read(place.path("target/good")).unwrap(), b"1234");

    let mut cut = archive(&[good, entry(EntryType::Regular, b"half", b"", &[7; 5000])]);
    cut.truncate(3000);
    let failure = place.refused(&cut);
    assert!(
        failure.message.contains("half") && failure.message.contains("ends early"),
        "{failure:?}"
    );
    assert!(!place.path("target/half").exists());
    for (nothing, says) in [(&b""[..], "ends early"), (&[b'x'; 2000][..], "not a tar")] {
        let failure = place.refused(nothing);
        assert!(
            failure.code == ErrorCode::Invalid && failure.message.contains(says),
            "{failure:?}"
        );
    }
}

#[test]
fn a_client_that_goes_away_leaves_no_half_file() {
    let mut place = Place::new();
    let target = place.path("target");
    let archive = archive(&[entry(EntryType::Regular, b"half", b"", &[7; 500_000])]);
    let path = target.as_os_str().as_bytes().to_vec().into();
    let stream = place.client.open(&Request::Files {
        user: None,
        request: FilesRequest::Unpack(Unpack { path, owner: None }),
    });
    place.client.send_data(stream, &archive[..200_000]);
    place.client.wait_until("the file has begun", |client| {
        client.call(&Request::Ping);
        target.join("half").exists()
    });
    place.client.reset(stream);
    place.client.wait_until("the file is gone", |client| {
        client.call(&Request::Ping);
        !target.join("half").exists()
    });
}

#[test]
fn a_hole_of_ten_gibibytes_costs_nothing() {
    let mut place = Place::new();
    let mut sparse = Header::new_gnu();
    sparse.as_old_mut().name[..4].copy_from_slice(b"hole");
    sparse.set_entry_type(EntryType::GNUSparse);
    sparse.set_size(0);
    sparse.set_mode(0o600);
    sparse.set_uid(0);
    sparse.set_gid(0);
    sparse.set_mtime(1);
    sparse.as_gnu_mut().unwrap().realsize = *b"120000000000";
    sparse.set_cksum();
    let target = place.path("target");
    place.unpack(&target, &archive(&[sparse.as_bytes().to_vec()]));
    let hole = fs::metadata(target.join("hole")).unwrap();
    assert_eq!((hole.len(), hole.blocks()), (10 << 30, 0));
    let packed = place.pack(&target);
    assert!(packed.len() < 10_000, "{}", packed.len());
}

#[test]
fn many_small_files_go_both_ways() {
    let mut place = Place::new();
    let (tree, target) = (place.path("tree"), place.path("target"));
    for directory in 0..20 {
        let directory = tree.join(directory.to_string());
        fs::create_dir_all(&directory).unwrap();
        for file in 0..100 {
            fs::write(directory.join(file.to_string()), vec![b'x'; file * 31]).unwrap();
        }
    }
    let archive = place.pack(&tree);
    assert_eq!(place.unpack(&target, &archive), 2021);
    assert_eq!(described(&target), described(&tree));
}

#[test]
fn what_cannot_be_packed_is_refused_before_anything_comes() {
    let mut place = Place::new();
    run(Command::new("mkfifo").arg(place.path("fifo")));
    for (name, code) in [("missing", ErrorCode::NotFound), ("fifo", ErrorCode::WrongKind)] {
        let path = place.path(name).as_os_str().as_bytes().to_vec().into();
        let request = Request::Files { user: None, request: FilesRequest::Pack { path } };
        assert_eq!(place.client.refusal(&request), code, "{name}");
    }
    let stream = place.client.open(&Request::Files {
        user: None,
        request: FilesRequest::Pack { path: b"/".to_vec().into() },
    });
    assert_eq!(place.client.reply(stream), Reply::Files(FilesReply::Packing));
    assert!(matches!(place.client.next(stream), Event::Data(..)));
    place.client.reset(stream);
    assert_eq!(place.client.call(&Request::Ping), Reply::Done);
}

#[test]
fn a_user_unpacks_and_packs_with_their_own_rights() {
    let mut place = Place::new();
    fs::set_permissions(place.directory.path(), Permissions::from_mode(0o755)).unwrap();
    let (tree, theirs) = (place.path("tree"), place.path("theirs"));
    make_tree(&tree);
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(1234), Some(1234)).unwrap();
    // Directories that not even their owner may write to, as tools keep what they have fetched.
    let read_only = |mut block: Vec<u8>, mode| {
        let mut header = Header::from_byte_slice(&block[..512]).clone();
        header.set_mode(mode);
        header.set_cksum();
        block[..512].copy_from_slice(header.as_bytes());
        block
    };
    let kept = archive(&[
        read_only(entry(EntryType::Directory, b"kept", b"", b""), 0o555),
        read_only(entry(EntryType::Directory, b"kept/deep", b"", b""), 0o500),
        entry(EntryType::Regular, b"kept/deep/file", b"", b"1234"),
    ]);
    let archive = place.pack(&tree);
    let mut ask = |path: &Path, request: fn(Unpack) -> FilesRequest, archive: &[u8]| {
        let path = path.as_os_str().as_bytes().to_vec().into();
        let request = request(Unpack { path, owner: None });
        let stream = place.client.open(&Request::Files { user: Some("1234".into()), request });
        place.client.send_data(stream, archive);
        place.client.finish(stream);
        place.client.reply(stream)
    };
    let unpacked = ask(&theirs.join("sub"), FilesRequest::Unpack, &archive);
    assert!(matches!(unpacked, Reply::Files(FilesReply::Unpacked { .. })), "{unpacked:?}");
    let described = described(&theirs.join("sub"));
    assert!(described.len() > 15, "{described:?}");
    assert!(described.iter().all(|line| line.contains(" 1234:1234 ")), "{described:?}");
    let unpacked = ask(&theirs.join("tools"), FilesRequest::Unpack, &kept);
    assert!(matches!(unpacked, Reply::Files(FilesReply::Unpacked { .. })), "{unpacked:?}");
    let mode = |name: &str| fs::metadata(theirs.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("tools/kept"), mode("tools/kept/deep")), (0o555, 0o500));
    assert_eq!(fs::read(theirs.join("tools/kept/deep/file")).unwrap(), b"1234");
    let refused = ask(&tree.join("sub"), FilesRequest::Unpack, &archive);
    assert!(
        matches!(&refused, Reply::Failed(failure) if failure.code == ErrorCode::Denied),
        "{refused:?}"
    );
    let secret = |unpack: Unpack| FilesRequest::Pack { path: unpack.path };
    fs::set_permissions(&tree, Permissions::from_mode(0o700)).unwrap();
    let refused = ask(&tree, secret, b"");
    assert!(
        matches!(&refused, Reply::Failed(failure) if failure.code == ErrorCode::Denied),
        "{refused:?}"
    );
}
