use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc;

use protocol::message::{ErrorCode, FileWrite};

use super::*;

type Answer = Box<dyn FnOnce(&mut TcpStream) + Send>;
/// Lines of the head, and the body.
type Asked = mpsc::Receiver<(Vec<String>, Vec<u8>)>;

/// Answers one connection after the other, each as it is told; the heads and bodies of what was asked come back.
fn server(answers: Vec<Answer>) -> (String, Asked) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/bucket/key?X-Signature=secret", listener.local_addr().unwrap());
    let (told, tell) = mpsc::channel();
    std::thread::spawn(move || {
        for answer in answers {
            let (mut stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let mut head = Vec::new();
            loop {
                let mut line = String::new();
                reader.read_line(&mut line).unwrap();
                if line.trim().is_empty() {
                    break;
                }
                head.push(line.trim().to_owned());
            }
            let length = head.iter().find_map(|line| {
                line.to_ascii_lowercase().strip_prefix("content-length: ")?.parse().ok()
            });
            let mut body = vec![0; length.unwrap_or(0)];
            reader.read_exact(&mut body).unwrap();
            let _ = told.send((head, body));
            answer(&mut stream);
        }
    });
    (url, tell)
}

fn says(text: impl Into<Vec<u8>>) -> Answer {
    let text = text.into();
    Box::new(move |stream| stream.write_all(&text).unwrap())
}

fn import(url: &str, path: &std::path::Path, sha256: Option<&str>) -> Transfer {
    let file = FileWrite {
        path: path.to_str().unwrap().as_bytes().to_vec().into(),
        mode: Some(0o640),
        owner: None,
        create_parents: true,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    };
    let task = Task::Import { file, sha256: sha256.map(str::to_owned) };
    transfer(url, task)
}

fn export(url: &str, path: &std::path::Path) -> Transfer {
    let path = path.to_str().unwrap().as_bytes().to_vec().into();
    transfer(url, Task::Export { path, method: "PUT".to_owned() })
}

fn transfer(url: &str, task: Task) -> Transfer {
    let headers = vec![("X-Theirs".to_owned(), "1".to_owned())];
    Transfer { task, url: url.to_owned(), headers, deadline_ms: 60_000 }
}

const HELLO: &str = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";

#[test]
fn a_file_appears_whole_with_its_parents() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("new/file");
    let (url, asked) =
        server(vec![says("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: \"e\"\r\n\r\nhello")]);
    let done = perform(&import(&url, &path, Some(HELLO))).unwrap();
    assert_eq!((done.bytes, done.sha256.as_str(), done.etag.as_deref()), (5, HELLO, Some("\"e\"")));
    assert_eq!(std::fs::read(&path).unwrap(), b"hello");
    let (head, _) = asked.recv().unwrap();
    assert_eq!(head[0], "GET /bucket/key?X-Signature=secret HTTP/1.1");
    assert!(head.iter().any(|line| line.eq_ignore_ascii_case("x-theirs: 1")), "{head:?}");
}

#[test]
fn what_broke_off_is_gone_on_with() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let (url, asked) = server(vec![
        says("HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
        says("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: \"e\"\r\n\r\nhel"),
        says(
            "HTTP/1.1 206 Partial\r\nContent-Length: 2\r\nContent-Range: bytes 3-4/5\r\nETag: \"e\"\r\n\r\nlo",
        ),
    ]);
    let done = perform(&import(&url, &path, Some(HELLO))).unwrap();
    assert_eq!((done.bytes, done.status), (5, 206));
    assert_eq!(std::fs::read(&path).unwrap(), b"hello");
    let heads: Vec<_> = asked.iter().map(|(head, _)| head).collect();
    let has = |line: &str| heads[2].iter().any(|seen| seen.eq_ignore_ascii_case(line));
    assert!(has("range: bytes=3-") && has("if-range: \"e\""), "{heads:?}");
    assert!(!heads[1].iter().any(|line| line.to_ascii_lowercase().starts_with("range")));
}

#[test]
fn content_that_changed_meanwhile_is_taken_from_its_beginning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    let (url, _asked) = server(vec![
        says("HTTP/1.1 200 OK\r\nContent-Length: 9\r\nETag: \"old\"\r\n\r\nold cont"),
        says("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: \"new\"\r\n\r\nhello"),
    ]);
    let done = perform(&import(&url, &path, Some(HELLO))).unwrap();
    assert_eq!(done.etag.as_deref(), Some("\"new\""));
    assert_eq!(std::fs::read(&path).unwrap(), b"hello");
}

#[test]
fn nothing_appears_of_what_is_refused_or_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, "old").unwrap();
    let expired =
        "<?xml?><Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>";
    let (url, _asked) = server(vec![
        says(format!(
            "HTTP/1.1 403 Forbidden\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{expired}",
            expired.len()
        )),
        says("HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhellO"),
    ]);
    let answered = TransferFailure::Answered {
        status: 403,
        code: Some("AccessDenied".to_owned()),
        message: "Request has expired".to_owned(),
    };
    assert_eq!(perform(&import(&url, &path, None)).unwrap_err(), answered);
    let wrong = perform(&import(&url, &path, Some(HELLO))).unwrap_err();
    assert!(matches!(wrong, TransferFailure::Digest { sha256 } if sha256 != HELLO));
    assert_eq!(std::fs::read(&path).unwrap(), b"old");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1);
    for (url, what) in [("ftp://a/b", "invalid"), ("no url", "invalid")] {
        let failure = perform(&import(url, &path, None)).unwrap_err();
        assert!(matches!(failure, TransferFailure::Invalid(_)), "{what} {failure:?}");
    }
}

#[test]
fn a_file_is_sent_with_its_length_and_again_from_its_beginning() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("file");
    std::fs::write(&path, "hello").unwrap();
    let (url, asked) = server(vec![
        says("HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"),
        says("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: \"e\"\r\nConnection: close\r\n\r\n"),
    ]);
    let done = perform(&export(&url, &path)).unwrap();
    assert_eq!((done.bytes, done.sha256.as_str(), done.etag.as_deref()), (5, HELLO, Some("\"e\"")));
    for (head, body) in asked.iter() {
        assert_eq!(head[0], "PUT /bucket/key?X-Signature=secret HTTP/1.1");
        let has = |line: &str| head.iter().any(|seen| seen.eq_ignore_ascii_case(line));
        assert!(has("content-length: 5") && !has("transfer-encoding: chunked"), "{head:?}");
        assert_eq!(body, b"hello");
    }
    for (path, code) in [
        ("/nowhere/at/all", ErrorCode::NotFound),
        ("/dev/zero", ErrorCode::WrongKind),
        ("/tmp", ErrorCode::WrongKind),
    ] {
        let failure = perform(&export(&url, path.as_ref())).unwrap_err();
        assert!(
            matches!(&failure, TransferFailure::File(failure) if failure.code == code),
            "{failure:?}"
        );
    }
}

#[test]
fn time_runs_out() {
    let (url, _asked) = server(vec![Box::new(|stream| {
        let _ = stream.read(&mut [0]);
    })]);
    let directory = tempfile::tempdir().unwrap();
    let transfer = Transfer { deadline_ms: 300, ..import(&url, &directory.path().join("a"), None) };
    assert_eq!(perform(&transfer).unwrap_err(), TransferFailure::OutOfTime);
}
