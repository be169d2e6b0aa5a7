//! Archives through the API.

use std::{fs, os::unix::ffi::OsStrExt, path::Path, process::Command};

use api::{ErrorCode, Unpacked};
use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use reqwest::{Method, RequestBuilder};

use super::{Server, refusal};

fn archive(server: &Server, method: Method, path: &Path, more: &str) -> RequestBuilder {
    let path = percent_encode(path.as_os_str().as_bytes(), NON_ALPHANUMERIC);
    server.inside(method, &format!("/fs/archive?path={path}{more}"))
}

fn tar(arguments: &[&str], directory: &Path) -> Vec<u8> {
    let output = Command::new("tar").arg("-C").arg(directory).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

fn tree(server: &Server) -> std::path::PathBuf {
    let tree = server.directory.path().join("tree");
    fs::create_dir_all(tree.join("sub")).unwrap();
    fs::write(tree.join("sub/file"), vec![b'x'; 300_000]).unwrap();
    fs::write(tree.join("empty"), "").unwrap();
    tree
}

#[tokio::test]
async fn an_archive_goes_in_however_it_is_compressed() {
    let server = Server::start().await;
    let tree = tree(&server);
    let plain = tar(&["-cf", "-", "."], &tree);
    let gzip = tar(&["-czf", "-", "."], &tree);
    let packed = async |format: &str| {
        let request = archive(&server, Method::GET, &tree, &format!("&format={format}"));
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), 200);
        response.bytes().await.unwrap().to_vec()
    };
    let zstd = packed("tar.zst").await;
    assert_eq!(zstd[..4], [0x28, 0xb5, 0x2f, 0xfd]);
    assert!(zstd.len() < 10_000);
    let twice = [&gzip[..0], &gzip[..]].concat();
    for (number, (body, header)) in [
        (plain.clone(), None),
        (plain, Some(("content-type", "application/x-tar"))),
        (gzip.clone(), None),
        (gzip.clone(), Some(("content-encoding", "gzip"))),
        (twice, Some(("content-type", "application/gzip"))),
        (zstd, None),
    ]
    .into_iter()
    .enumerate()
    {
        let target = server.directory.path().join(format!("target{number}"));
        let mut request = archive(&server, Method::PUT, &target, "").body(body);
        if let Some((name, value)) = header {
            request = request.header(name, value);
        }
        let response = request.send().await.unwrap();
        let text = response.text().await.unwrap();
        let unpacked: Unpacked = serde_json::from_str(&text).expect(&text);
        assert_eq!((unpacked.entries, unpacked.bytes), (4, 300_000), "{number}");
        assert_eq!(fs::read(target.join("sub/file")).unwrap(), vec![b'x'; 300_000]);
        assert_eq!(fs::read(target.join("empty")).unwrap(), b"");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_archive_comes_out_in_the_format_that_is_asked_for() {
    let server = Server::start().await;
    let tree = tree(&server);
    for (format, media_type, option) in [
        ("", "application/x-tar", "-tf"),
        ("tar", "application/x-tar", "-tf"),
        ("tar.gz", "application/gzip", "-tzf"),
    ] {
        let request = archive(&server, Method::GET, &tree, &format!("&format={format}"));
        let response = request.send().await.unwrap();
        assert_eq!(response.headers()["content-type"], media_type);
        let disposition = response.headers()["content-disposition"].to_str().unwrap();
        assert!(disposition.contains("filename=\"tree.tar"), "{disposition}");
        let file = server.directory.path().join("archive");
        fs::write(&file, response.bytes().await.unwrap()).unwrap();
        let listed = tar(&[option, file.to_str().unwrap()], &tree);
        let mut names: Vec<_> = std::str::from_utf8(&listed).unwrap().lines().collect();
        names.sort_unstable();
        assert_eq!(names, ["./", "empty", "sub/", "sub/file"], "{format}");
    }
    server.stop().await;
}

#[tokio::test]
async fn what_is_no_archive_is_refused_with_its_reason() {
    let server = Server::start().await;
    let (tree, target) = (tree(&server), server.directory.path().join("target"));
    let gzip = tar(&["-czf", "-", "."], &tree);
    let mut broken = gzip.clone();
    let middle = broken.len() / 2;
    broken[middle..].fill(0x55);
    let bzip = b"BZh91AY&SY".to_vec();
    for (number, (body, header)) in [
        (b"".to_vec(), None),
        (b"no archive".repeat(100), None),
        (broken, None),
        (gzip[..middle].to_vec(), None),
        (bzip, None),
        (gzip, Some("zstd")),
        (b"no archive".repeat(100), Some("br")),
    ]
    .into_iter()
    .enumerate()
    {
        let mut request = archive(&server, Method::PUT, &target, "").body(body);
        if let Some(encoding) = header {
            request = request.header("content-encoding", encoding);
        }
        let response = request.send().await.unwrap();
        assert_eq!(refusal(response).await, ErrorCode::InvalidRequest, "{number}");
    }
    let format = archive(&server, Method::GET, &tree, "&format=zip").send().await.unwrap();
    assert_eq!(refusal(format).await, ErrorCode::InvalidRequest);
    let missing = archive(&server, Method::GET, &tree.join("none"), "").send().await.unwrap();
    assert_eq!(refusal(missing).await, ErrorCode::NotFound);
    let ghost = archive(&server, Method::PUT, &target, "&owner=no-such-user").send().await.unwrap();
    assert_eq!(refusal(ghost).await, ErrorCode::InvalidRequest);
    server.stop().await;
}
