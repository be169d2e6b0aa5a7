//! Files with the rights of a user who is not root.

use std::fs::Permissions;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};

use protocol::message::{ErrorCode, FileRequest, FileWrite};
use protocol::{Reply, Request};

use crate::support::{Client, file_read, file_write, refused};

fn as_somebody(request: FileRequest) -> Request {
    Request::FileAs { user: "54321:54322".to_owned(), request }
}

fn write_as_somebody(client: &mut Client, request: FileWrite, content: &[u8]) -> Reply {
    let stream = client.open(&as_somebody(FileRequest::Write(request)));
    client.send_data(stream, content);
    client.finish(stream);
    client.reply(stream)
}

/// A directory of which 54321 may do what the mode says.
fn open_to_all(mode: u32) -> tempfile::TempDir {
    let directory = tempfile::Builder::new().tempdir_in("/tmp").unwrap();
    std::fs::set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
    directory
}

#[test]
fn what_a_user_writes_is_theirs_with_all_that_is_made_on_the_way() {
    let mut client = Client::start();
    let directory = open_to_all(0o777);
    let path = directory.path().join("a/b/file");
    let request = FileWrite { create_parents: true, ..file_write(path.as_os_str().as_bytes()) };
    for content in [&b"first"[..], b"second"] {
        let reply = write_as_somebody(&mut client, request.clone(), content);
        assert!(matches!(reply, Reply::Written { .. }), "{reply:?}");
        assert_eq!(std::fs::read(&path).unwrap(), content);
    }
    for made in path.ancestors().take(3) {
        let made = made.metadata().unwrap();
        assert_eq!((made.uid(), made.gid()), (54_321, 54_322));
    }
    assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o644);
    assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    let path = path.as_os_str().as_bytes().to_vec();
    let delete = FileRequest::Delete { path: path.into() };
    assert_eq!(client.call(&as_somebody(delete)), Reply::Done);
}

#[test]
fn a_user_gets_no_further_than_their_rights() {
    let mut client = Client::start();
    let (closed, sticky) = (open_to_all(0o700), open_to_all(0o1777));
    let path = |directory: &tempfile::TempDir, name: &str| {
        directory.path().join(name).as_os_str().as_bytes().to_vec()
    };
    std::fs::write(closed.path().join("secret"), "x").unwrap();
    for name in ["readable", "private"] {
        std::fs::write(sticky.path().join(name), "x").unwrap();
    }
    let private = sticky.path().join("private");
    std::fs::set_permissions(&private, Permissions::from_mode(0o600)).unwrap();
    let denied = [
        FileRequest::Read(file_read(&path(&closed, "secret"))),
        FileRequest::Read(file_read(&path(&sticky, "private"))),
        FileRequest::Stat { path: path(&closed, "secret").into() },
        FileRequest::List { path: path(&closed, "").into(), depth: 1 },
        FileRequest::Delete { path: path(&closed, "secret").into() },
        FileRequest::Delete { path: path(&sticky, "readable").into() },
    ];
    for request in denied {
        let refusal = client.refusal(&as_somebody(request.clone()));
        assert_eq!(refusal, ErrorCode::Denied, "{request:?}");
    }
    let theirs = FileWrite { owner: Some("0".to_owned()), ..file_write(&path(&sticky, "new")) };
    for request in [
        file_write(&path(&closed, "new")),
        file_write(&path(&sticky, "readable")),
        file_write(&path(&sticky, "private")),
        theirs,
    ] {
        let reply = write_as_somebody(&mut client, request.clone(), b"y");
        assert_eq!(refused(reply), ErrorCode::Denied, "{request:?}");
    }
    // All is as it was, and root is root.
    assert_eq!(std::fs::read_dir(sticky.path()).unwrap().count(), 2);
    assert_eq!(client.read_file(&path(&closed, "secret")), b"x");
    let readable = FileRequest::Read(file_read(&path(&sticky, "readable")));
    let stream = client.open(&as_somebody(readable));
    assert!(matches!(client.reply(stream), Reply::File(_)));
    assert_eq!(client.content(stream), b"x");
    let nobody = Request::FileAs {
        user: "ghost".to_owned(),
        request: FileRequest::Stat { path: path(&sticky, "readable").into() },
    };
    assert_eq!(client.refusal(&nobody), ErrorCode::Invalid);
}
