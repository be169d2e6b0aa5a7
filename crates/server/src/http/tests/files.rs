//! Files through the API.

use std::{fs, os::unix::ffi::OsStrExt, path::Path, time::Duration};

use api::{DirListing, ErrorCode, FileEntry, FileKind};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use reqwest::{Method, RequestBuilder, Response};
use serde_json::{Value, json};

use super::{Server, refusal};

const LIMIT: usize = 32 << 20;

fn file(server: &Server, method: Method, route: &str, path: &[u8]) -> RequestBuilder {
    server.inside(method, &format!("/fs{route}?path={}", percent_encode(path, NON_ALPHANUMERIC)))
}

fn at(server: &Server, name: impl AsRef<Path>) -> Vec<u8> {
    server.directory.path().join(name).as_os_str().as_bytes().to_vec()
}

async fn put(server: &Server, path: &[u8], content: impl Into<reqwest::Body>) -> Response {
    file(server, Method::PUT, "", path).body(content).send().await.unwrap()
}

async fn get(server: &Server, path: &[u8]) -> Vec<u8> {
    let response = file(server, Method::GET, "", path).send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.bytes().await.unwrap().to_vec()
}

async fn stat(server: &Server, path: &[u8]) -> FileEntry {
    file(server, Method::GET, "/stat", path).send().await.unwrap().json().await.unwrap()
}

async fn list(server: &Server, path: &[u8], depth: u32) -> DirListing {
    file(server, Method::GET, "/dir", path)
        .query(&[("depth", depth)])
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap()
}

#[tokio::test]
async fn any_content_under_any_name_comes_back_as_it_went() {
    let server = Server::start().await;
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    let longest = "n".repeat(255);
    let names: [&[u8]; 8] = [
        b"deep/in/every.bin",
        "日本語 é 😀 #?%&+ 'quoted' \"x\".txt".as_bytes(),
        b"-dash",
        b".dot",
        b"new\nline",
        b"not utf8 \xff\xfe",
        b"a+b c",
        longest.as_bytes(),
    ];
    for name in names {
        let path = at(&server, std::ffi::OsStr::from_bytes(name));
        for content in [&every_byte[..], b""] {
            let written = put(&server, &path, content.to_vec()).await;
            assert!(written.headers().contains_key("etag"));
            let answer: Value = written.json().await.unwrap();
            assert_eq!(
                answer,
                json!({"path": String::from_utf8_lossy(&path), "bytes": content.len()})
            );
            assert_eq!(get(&server, &path).await, content);
            assert_eq!(stat(&server, &path).await.size, content.len() as u64);
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_read_is_refused_with_its_reason() {
    let server = Server::start().await;
    let fifo = server.directory.path().join("fifo");
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    for (path, code) in [
        (at(&server, "nothing"), ErrorCode::NotFound),
        (at(&server, ""), ErrorCode::InvalidRequest),
        (b"relative/path".to_vec(), ErrorCode::InvalidRequest),
        (b"/a\0b".to_vec(), ErrorCode::InvalidRequest),
        (fifo.as_os_str().as_bytes().to_vec(), ErrorCode::InvalidRequest),
        (b"/dev/zero".to_vec(), ErrorCode::InvalidRequest),
    ] {
        let response = file(&server, Method::GET, "", &path).send().await.unwrap();
        assert_eq!(refusal(response).await, code, "{}", String::from_utf8_lossy(&path));
    }
    for route in ["/dir", "/stat"] {
        let missing =
            file(&server, Method::GET, route, &at(&server, "nothing")).send().await.unwrap();
        assert_eq!(refusal(missing).await, ErrorCode::NotFound);
    }
    assert!(!get(&server, b"/proc/self/status").await.is_empty());
    server.stop().await;
}

#[tokio::test]
async fn a_range_is_that_part_of_the_file() {
    let server = Server::start().await;
    let path = at(&server, "file");
    put(&server, &path, "0123456789").await;
    let ranged = async |range: &str| {
        file(&server, Method::GET, "", &path).header("Range", range).send().await.unwrap()
    };
    for (range, part, place) in [
        ("bytes=2-4", "234", "bytes 2-4/10"),
        ("bytes=7-", "789", "bytes 7-9/10"),
        ("bytes=-2", "89", "bytes 8-9/10"),
        ("bytes=8-99", "89", "bytes 8-9/10"),
    ] {
        let response = ranged(range).await;
        assert_eq!(
            (response.status().as_u16(), response.headers()["content-range"].to_str().unwrap()),
            (206, place)
        );
        assert_eq!(response.text().await.unwrap(), part);
    }
    for other in ["bytes=4-2", "bytes=0-1,4-5", "lines=1-2"] {
        let response = ranged(other).await;
        assert_eq!(
            (response.status().as_u16(), response.text().await.unwrap().as_str()),
            (200, "0123456789"),
            "{other}"
        );
    }
    let beyond = ranged("bytes=10-").await;
    assert_eq!(beyond.headers()["content-range"], "bytes */10");
    assert_eq!(refusal(beyond).await, ErrorCode::RangeNotSatisfiable);
    server.stop().await;
}

#[tokio::test]
async fn an_unchanged_file_is_not_sent_again_and_a_changed_one_not_overwritten() {
    let server = Server::start().await;
    let path = at(&server, "file");
    let old = put(&server, &path, "one").await.headers()["etag"].clone();
    let read = file(&server, Method::GET, "", &path).send().await.unwrap();
    assert_eq!(read.headers()["etag"], old);
    assert!(httpdate::parse_http_date(read.headers()["last-modified"].to_str().unwrap()).is_ok());
    let again = file(&server, Method::GET, "", &path)
        .header("If-None-Match", format!("\"x\", {}", old.to_str().unwrap()))
        .send()
        .await
        .unwrap();
    assert_eq!((again.status().as_u16(), &again.headers()["etag"]), (304, &old));

    let put_if = async |header: &str, value: &str| {
        file(&server, Method::PUT, "", &path)
            .header(header, value)
            .body("two")
            .send()
            .await
            .unwrap()
    };
    assert_eq!(refusal(put_if("If-None-Match", "*").await).await, ErrorCode::PreconditionFailed);
    assert_eq!(refusal(put_if("If-Match", "\"other\"").await).await, ErrorCode::PreconditionFailed);
    assert_eq!(refusal(put_if("If-Match", "").await).await, ErrorCode::InvalidRequest);
    assert_eq!(get(&server, &path).await, b"one");
    assert_eq!(put_if("If-Match", old.to_str().unwrap()).await.status(), 200);
    assert_eq!(
        refusal(put_if("If-Match", old.to_str().unwrap()).await).await,
        ErrorCode::PreconditionFailed
    );
    // A range of what is not there any longer: the whole new file.
    let resumed = file(&server, Method::GET, "", &path)
        .header("Range", "bytes=1-")
        .header("If-Range", &old)
        .send()
        .await
        .unwrap();
    assert_eq!((resumed.status().as_u16(), resumed.text().await.unwrap().as_str()), (200, "two"));
    server.stop().await;
}

#[tokio::test]
async fn head_tells_the_size_and_sends_nothing() {
    let server = Server::start().await;
    let path = at(&server, "file");
    put(&server, &path, "0123456789").await;
    let head = file(&server, Method::HEAD, "", &path).send().await.unwrap();
    assert_eq!(
        (head.status().as_u16(), head.headers()["content-length"].to_str().unwrap()),
        (200, "10")
    );
    assert!(head.headers().contains_key("etag"));
    assert_eq!(head.bytes().await.unwrap().len(), 0);
    assert_eq!(
        file(&server, Method::HEAD, "", &at(&server, "nothing")).send().await.unwrap().status(),
        404
    );
    server.stop().await;
}

#[tokio::test]
async fn the_largest_write_is_32_mib_and_one_more_byte_is_refused_in_peace() {
    let server = Server::start().await;
    let (limit, over) = (at(&server, "limit"), at(&server, "over"));
    assert_eq!(put(&server, &limit, vec![b'x'; LIMIT]).await.status(), 200);
    assert_eq!(stat(&server, &limit).await.size, LIMIT as u64);
    for _ in 0..3 {
        let known = put(&server, &over, vec![b'x'; LIMIT + 1]).await;
        assert_eq!(refusal(known).await, ErrorCode::TooLarge);
        let pieces =
            futures::stream::iter((0..33).map(|_| Ok::<_, std::io::Error>(vec![b'x'; 1 << 20])));
        let unknown = put(&server, &over, reqwest::Body::wrap_stream(pieces)).await;
        assert_eq!(refusal(unknown).await, ErrorCode::TooLarge);
    }
    assert_eq!(
        refusal(file(&server, Method::GET, "", &over).send().await.unwrap()).await,
        ErrorCode::NotFound
    );
    assert_eq!(
        fs::read_dir(server.directory.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_type().unwrap().is_file())
            .count(),
        1
    );
    server.stop().await;
}

#[tokio::test]
async fn mode_and_parents_are_as_asked_and_kept_by_the_next_write() {
    let server = Server::start().await;
    let path = at(&server, "a/b/script.sh");
    let with = async |query: &[(&str, &str)]| {
        file(&server, Method::PUT, "", &path).query(query).body("#!/bin/sh\n").send().await.unwrap()
    };
    assert_eq!(refusal(with(&[("create_parents", "false")]).await).await, ErrorCode::NotFound);
    assert_eq!(with(&[("mode", "0755"), ("owner", "65534:65534")]).await.status(), 200);
    let first = stat(&server, &path).await;
    assert_eq!(
        (first.mode.as_str(), first.user, first.group, first.kind),
        ("0755", 65534, 65534, FileKind::File)
    );
    assert_eq!(with(&[]).await.status(), 200);
    let second = stat(&server, &path).await;
    assert_eq!((second.mode.as_str(), second.user), ("0755", 65534));
    put(&server, &at(&server, "plain"), "x").await;
    assert_eq!(stat(&server, &at(&server, "plain")).await.mode, "0644");
    for bad in [("mode", "rwx"), ("owner", "no-such-user"), ("create_parents", "maybe")] {
        assert_eq!(refusal(with(&[bad]).await).await, ErrorCode::InvalidRequest, "{bad:?}");
    }
    server.stop().await;
}

#[tokio::test]
async fn a_write_that_breaks_off_changes_nothing() {
    let server = Server::start().await;
    let path = at(&server, "file");
    put(&server, &path, "old").await;
    let pieces =
        futures::stream::iter([Ok(vec![b'x'; 100_000]), Err(std::io::Error::other("gone"))]);
    let broken =
        file(&server, Method::PUT, "", &path).body(reqwest::Body::wrap_stream(pieces)).send().await;
    assert!(broken.is_err());
    // Another write goes through the same guest behind the broken one.
    put(&server, &at(&server, "other"), "x").await;
    assert_eq!(get(&server, &path).await, b"old");
    let names: Vec<String> = list(&server, &at(&server, ""), 1)
        .await
        .entries
        .into_iter()
        .filter(|entry| !entry.is_dir)
        .map(|entry| entry.name)
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    server.stop().await;
}

#[tokio::test]
async fn deleting_is_recursive_idempotent_and_follows_no_link() {
    let server = Server::start().await;
    put(&server, &at(&server, "keep/file"), "x").await;
    put(&server, &at(&server, "tree/a/b/c"), "x").await;
    std::os::unix::fs::symlink(
        server.directory.path().join("keep"),
        server.directory.path().join("tree/link"),
    )
    .unwrap();
    for _ in 0..2 {
        let deleted = file(&server, Method::DELETE, "", &at(&server, "tree")).send().await.unwrap();
        assert_eq!(deleted.status(), 204);
        assert!(deleted.bytes().await.unwrap().is_empty());
    }
    assert!(!server.directory.path().join("tree").exists());
    assert_eq!(get(&server, &at(&server, "keep/file")).await, b"x");
    server.stop().await;
}

#[tokio::test]
async fn a_listing_has_every_entry_and_walks_no_link() {
    let server = Server::start().await;
    let root = server.directory.path().join("list");
    fs::create_dir_all(root.join("sub/deeper")).unwrap();
    fs::write(root.join("file"), "abc").unwrap();
    fs::write(root.join(std::ffi::OsStr::from_bytes(b"odd\xff")), "").unwrap();
    std::os::unix::fs::symlink("sub", root.join("to-dir")).unwrap();
    std::os::unix::fs::symlink("..", root.join("sub/up")).unwrap();

    let listing = list(&server, &at(&server, "list"), 1).await;
    assert_eq!(listing.path.as_bytes(), at(&server, "list"));
    let find = |name: &str| listing.entries.iter().find(|entry| entry.name == name).unwrap();
    assert_eq!(listing.entries.len(), 4);
    assert_eq!(
        (find("file").size, find("file").kind, find("file").is_dir),
        (3, FileKind::File, false)
    );
    assert!(find("sub").is_dir && !find("to-dir").is_dir);
    assert_eq!(find("to-dir").target.as_deref(), Some("sub"));
    assert_eq!(
        find("odd\u{fffd}").name_b64.as_deref(),
        Some(BASE64_STANDARD.encode(b"odd\xff").as_str())
    );
    assert!(find("file").mtime > 1_000_000_000);

    let mut deep: Vec<String> = list(&server, &at(&server, "list"), 9)
        .await
        .entries
        .into_iter()
        .map(|entry| entry.name)
        .collect();
    deep.sort();
    assert_eq!(deep, ["deeper", "file", "odd\u{fffd}", "sub", "to-dir", "up"]);

    fs::create_dir(root.join("empty")).unwrap();
    let empty: Value = file(&server, Method::GET, "/dir", &at(&server, "list/empty"))
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    assert_eq!(empty["entries"], json!([]));
    let file_listed =
        file(&server, Method::GET, "/dir", &at(&server, "list/file")).send().await.unwrap();
    assert_eq!(refusal(file_listed).await, ErrorCode::InvalidRequest);
    server.stop().await;
}

#[tokio::test]
async fn a_directory_of_many_entries_is_listed_whole() {
    let server = Server::start().await;
    let root = server.directory.path().join("many");
    fs::create_dir(&root).unwrap();
    for number in 0..20_000 {
        fs::write(root.join(format!("entry-{number}")), "").unwrap();
    }
    let listing = list(&server, &at(&server, "many"), 1).await;
    let names: std::collections::BTreeSet<String> =
        listing.entries.into_iter().map(|entry| entry.name).collect();
    assert_eq!(names.len(), 20_000);
    server.stop().await;
}

#[tokio::test]
async fn a_reader_that_goes_away_leaves_the_guest_usable() {
    let server = Server::start().await;
    let path = at(&server, "big");
    fs::File::create(server.directory.path().join("big")).unwrap().set_len(1 << 30).unwrap();
    for _ in 0..20 {
        let mut response = file(&server, Method::GET, "", &path).send().await.unwrap();
        assert_eq!(response.headers()["content-length"], (1_u64 << 30).to_string().as_str());
        response.chunk().await.unwrap();
    }
    let small =
        tokio::time::timeout(Duration::from_secs(10), put(&server, &at(&server, "small"), "x"))
            .await;
    assert_eq!(small.expect("the guest still answers").status(), 200);
    server.stop().await;
}
