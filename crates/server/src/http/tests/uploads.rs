//! Uploads by parts, changes in place and watching, through the API.

use std::{fs, os::unix::fs::PermissionsExt, time::Duration};

use api::{ErrorCode, FileEntry, FileWritten, Upload, UploadList, UploadParts};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use reqwest::{Method, Response};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::{Server, refusal};

const PART: usize = 64 << 10;

async fn post(server: &Server, route: &str, body: Value) -> Response {
    server.inside(Method::POST, &format!("/fs{route}")).json(&body).send().await.unwrap()
}

fn at(server: &Server, name: &str) -> String {
    server.directory.path().join(name).to_str().unwrap().to_owned()
}

async fn begin(server: &Server, name: &str, size: Option<usize>) -> Upload {
    let body = json!({"path": at(server, name), "size": size, "part_size": PART, "mode": "0640"});
    let response = post(server, "/uploads", body).await;
    assert_eq!(response.status(), 201);
    response.json().await.unwrap()
}

async fn put(
    server: &Server,
    upload: &Upload,
    number: u32,
    part: &[u8],
    header: (&'static str, String),
) -> Response {
    let route = format!("/fs/uploads/{}/parts/{number}", upload.id);
    server
        .inside(Method::PUT, &route)
        .header(header.0, header.1)
        .body(part.to_vec())
        .send()
        .await
        .unwrap()
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn checksum(part: &[u8]) -> (&'static str, String) {
    ("x-checksum-sha256", hexadecimal(&Sha256::digest(part)))
}

#[tokio::test]
async fn a_file_comes_in_parts_whose_digests_are_looked_at() {
    let server = Server::start().await;
    let whole: Vec<u8> = (0..=255).cycle().take(2 * PART + 100).collect();
    let parts: Vec<_> = whole.chunks(PART).collect();
    let upload = begin(&server, "deep/file", Some(whole.len())).await;
    assert_eq!(put(&server, &upload, 3, parts[2], checksum(parts[2])).await.status(), 204);
    let digest = format!("sha-256=:{}:", BASE64_STANDARD.encode(Sha256::digest(parts[0])));
    assert_eq!(put(&server, &upload, 1, parts[0], ("content-digest", digest)).await.status(), 204);
    let damaged = put(&server, &upload, 2, parts[1], checksum(b"another")).await;
    assert_eq!(refusal(damaged).await, ErrorCode::InvalidRequest);
    let route = format!("/fs/uploads/{}", upload.id);
    let status: Upload =
        server.inside(Method::GET, &route).send().await.unwrap().json().await.unwrap();
    let run = |number| UploadParts { first: number, last: number };
    assert_eq!(status.parts, [run(1), run(3)]);
    assert_eq!(status.bytes, PART as u64 + 100);
    let listed: UploadList =
        server.inside(Method::GET, "/fs/uploads").send().await.unwrap().json().await.unwrap();
    assert_eq!(listed.uploads.len(), 1);
    let early = post(&server, &format!("/uploads/{}/complete", upload.id), json!({})).await;
    assert_eq!(refusal(early).await, ErrorCode::Conflict);
    assert!(fs::metadata(at(&server, "deep/file")).is_err());
    assert_eq!(put(&server, &upload, 2, parts[1], checksum(parts[1])).await.status(), 204);
    let body = json!({"sha256": hexadecimal(&Sha256::digest(&whole)), "size": whole.len()});
    let complete = post(&server, &format!("/uploads/{}/complete", upload.id), body).await;
    assert!(complete.headers().contains_key("etag"));
    let written: FileWritten = complete.json().await.unwrap();
    assert_eq!((written.path, written.bytes), (at(&server, "deep/file"), whole.len() as u64));
    assert!(fs::read(at(&server, "deep/file")).unwrap() == whole);
    let mode = fs::metadata(at(&server, "deep/file")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    let gone = server.inside(Method::GET, &route).send().await.unwrap();
    assert_eq!(refusal(gone).await, ErrorCode::NotFound);
    server.stop().await;
}

#[tokio::test]
async fn what_is_no_part_is_refused() {
    let server = Server::start().await;
    let upload = begin(&server, "file", Some(PART + 1)).await;
    for (number, length) in [(0, 1), (1, PART - 1), (2, 2), (3, 1)] {
        let refused = put(&server, &upload, number, &vec![0; length], ("x-a", String::new())).await;
        assert_eq!(refusal(refused).await, ErrorCode::InvalidRequest, "{number}");
    }
    let route = format!("/fs/uploads/{}/parts/1", upload.id);
    let pieces = futures::stream::iter([Ok::<_, std::io::Error>("chunked")]);
    let chunked = server.inside(Method::PUT, &route).body(reqwest::Body::wrap_stream(pieces));
    assert_eq!(refusal(chunked.send().await.unwrap()).await, ErrorCode::InvalidRequest);
    for body in [
        json!({}),
        json!({"path": "relative"}),
        json!({"path": "/a", "path_b64": "YQ=="}),
        json!({"path": at(&server, "a"), "part_size": 1}),
        json!({"path": at(&server, "a"), "size": u64::MAX}),
    ] {
        let refused = post(&server, "/uploads", body.clone()).await;
        assert_eq!(refusal(refused).await, ErrorCode::InvalidRequest, "{body}");
    }
    let aborted = server.inside(Method::DELETE, &format!("/fs/uploads/{}", upload.id));
    assert_eq!(aborted.send().await.unwrap().status(), 204);
    let names: Vec<_> = fs::read_dir(server.directory.path())
        .unwrap()
        .flatten()
        .map(|entry| entry.file_name())
        .collect();
    assert_eq!(names, ["data"]);
    server.stop().await;
}

#[tokio::test]
async fn the_same_request_with_a_key_begins_one_upload() {
    let server = Server::start().await;
    let body = json!({"path": at(&server, "file")});
    let mut ids = Vec::new();
    for _ in 0..2 {
        let request = server.inside(Method::POST, "/fs/uploads").header("idempotency-key", "once");
        let begun: Upload = request.json(&body).send().await.unwrap().json().await.unwrap();
        ids.push(begun.id);
    }
    assert_eq!(ids[0], ids[1]);
    server.stop().await;
}

#[tokio::test]
async fn files_are_moved_made_and_changed() {
    let server = Server::start().await;
    fs::write(at(&server, "one"), "1").unwrap();
    fs::write(at(&server, "two"), "2").unwrap();
    let body = json!({"from": at(&server, "one"), "to": at(&server, "two")});
    assert_eq!(refusal(post(&server, "/move", body).await).await, ErrorCode::Conflict);
    let body = json!({"from": at(&server, "one"), "to": at(&server, "two"), "overwrite": true});
    let moved: FileEntry = post(&server, "/move", body).await.json().await.unwrap();
    assert_eq!((moved.name.as_str(), moved.size), ("two", 1));
    let odd = [at(&server, "odd").as_bytes(), b"\xff"].concat();
    let body = json!({"from": at(&server, "two"), "to_b64": BASE64_STANDARD.encode(&odd)});
    let moved: FileEntry = post(&server, "/move", body).await.json().await.unwrap();
    assert_eq!(moved.path_b64.unwrap(), BASE64_STANDARD.encode(&odd));
    let body = json!({"path": at(&server, "a/b"), "mode": "0700"});
    let made: FileEntry = post(&server, "/mkdir", body).await.json().await.unwrap();
    assert!(made.is_dir && made.mode == "0700");
    let path = at(&server, "a/b");
    let change = server.inside(Method::PATCH, &format!("/fs?path={path}"));
    let change = change.json(&json!({"mode": "01777", "owner": "1:2", "mtime": 86400}));
    let changed: FileEntry = change.send().await.unwrap().json().await.unwrap();
    assert_eq!(
        (changed.mode.as_str(), changed.user, changed.group, changed.mtime),
        ("1777", 1, 2, 86400)
    );
    server.stop().await;
}

#[tokio::test]
async fn what_happens_to_files_is_streamed() {
    let server = Server::start().await;
    let route = format!("/fs/watch?path={}&recursive=true", server.directory.path().display());
    let mut response = server.inside(Method::GET, &route).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let mut seen = String::new();
    let mut until = async |what: &str| {
        while !seen.contains(what) {
            let chunk = tokio::time::timeout(Duration::from_secs(30), response.chunk()).await;
            let chunk = chunk.expect("an event comes").unwrap().expect("the stream goes on");
            seen.push_str(std::str::from_utf8(&chunk).unwrap());
        }
    };
    until("event: watching\n").await;
    let file = at(&server, "file");
    fs::write(&file, "1").unwrap();
    until("event: created\n").await;
    until("event: modified\n").await;
    fs::rename(&file, at(&server, "new")).unwrap();
    until("event: moved\n").await;
    assert!(seen.contains(&format!("\"from\":\"{file}\"")), "{seen}");
    let missing = server.inside(Method::GET, "/fs/watch?path=/no/such/place").send().await.unwrap();
    assert_eq!(refusal(missing).await, ErrorCode::NotFound);
    drop(response);
    server.stop().await;
}
