//! Content on its way: whole or not at all, in parts, under conditions, within limits.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use bytes::Bytes;
use client::{Body, Method};
use futures::stream;
use sha2::{Digest, Sha256};
use tests::{Answer, Host, patterned, pause, small, suite, until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

suite! {
    a_large_file_leaves_memory_flat,
    a_slow_upload_that_moves_is_not_cut,
    two_writers_leave_one_whole_file,
    a_full_disk_refuses_a_write_and_keeps_the_old_file,
    an_upload_that_breaks_off_leaves_the_old_file,
    a_range_is_answered_exactly,
    conditions_on_reads_and_writes_hold,
    exactly_32_mib_are_taken_and_a_byte_more_is_refused_every_time;
    soak: a_gibibyte_each_way_leaves_memory_flat,
    an_upload_of_three_minutes_is_not_cut,
}

const LIMIT: usize = 32 << 20;

async fn two_writers_leave_one_whole_file(host: Host) {
    let sandbox = host.sandbox().await;
    let contents = [vec![b'a'; 1_000_000], vec![b'b'; 700_000]];
    sandbox.write("/srv/job/contested", contents[0].clone()).await;
    for _ in 0..5 {
        let [one, other] = &contents;
        let (_, _, seen) = tokio::join!(
            sandbox.write("/srv/job/contested", one.clone()),
            sandbox.write("/srv/job/contested", other.clone()),
            sandbox.read("/srv/job/contested"),
        );
        let left = sandbox.read("/srv/job/contested").await;
        assert!(contents.contains(&seen), "a mix of {} bytes was seen", seen.len());
        assert!(contents.contains(&left), "a mix of {} bytes is left", left.len());
    }
    assert_eq!(sandbox.names("/srv/job").await, ["contested"]);
}

async fn a_full_disk_refuses_a_write_and_keeps_the_old_file(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.write("/srv/job/kept", "old").await;
    // All but a few MiB; what is reserved for root is taken as well, for writes are root's.
    let fill = "cd /var/tmp && for unit in G M K; do i=0; while fallocate -l $((++i * 64))$unit fill$unit$i 2>/dev/null; do :; done; done; \
                while dd if=/dev/zero of=last bs=64K count=64 oflag=append conv=notrunc status=none 2>/dev/null; do :; done; sync; df --output=avail -k / | tail -1";
    let free: u64 = sandbox.run(fill).await.trim().parse().unwrap();
    assert!(free < 1024, "{free} KiB are still free");
    let big = vec![b'n'; 8 << 20];
    let pieces: Vec<_> = big
        .chunks(64 << 10)
        .map(|piece| Ok::<_, std::io::Error>(Bytes::copy_from_slice(piece)))
        .collect();
    for body in [Body::from(big.clone()), Body::wrap_stream(stream::iter(pieces))] {
        let refused = sandbox.put("/srv/job/kept", body).await;
        assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()));
        assert_eq!(sandbox.read("/srv/job/kept").await, b"old");
        assert_eq!(sandbox.names("/srv/job").await, ["kept"]);
    }
    sandbox.run("rm -f /var/tmp/fill* /var/tmp/last").await;
    sandbox.write("/srv/job/kept", big.clone()).await;
    assert!(sandbox.read("/srv/job/kept").await == big);
}

async fn an_upload_that_breaks_off_leaves_the_old_file(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.write("/srv/job/kept", "old").await;
    let server = host.server().await;
    let address = server.url().strip_prefix("http://").unwrap().to_owned();
    for _ in 0..3 {
        let mut connection = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "PUT /v1/sandboxes/{}/fs?path=/srv/job/kept HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nContent-Length: 4000000\r\n\r\n",
            sandbox.id,
            server.key()
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        connection.write_all(&vec![b'n'; 1_000_000]).await.unwrap();
        until("the upload reaches the guest", Duration::from_secs(20), async || {
            (half_written(&sandbox).await > 0).then_some(())
        })
        .await;
        drop(connection);
    }
    until("nothing but the old file", Duration::from_secs(20), async || {
        (half_written(&sandbox).await == 0).then_some(())
    })
    .await;
    assert_eq!(sandbox.names("/srv/job").await, ["kept"]);
    assert_eq!(sandbox.read("/srv/job/kept").await, b"old");
}

/// Files that the agent has open and that have no name yet.
async fn half_written(sandbox: &tests::Sandbox) -> usize {
    sandbox.run("ls -l /proc/1/fd | grep -c '(deleted)$' || true").await.trim().parse().unwrap()
}

async fn a_range_is_answered_exactly(host: Host) {
    let sandbox = host.sandbox().await;
    let content = patterned(100_000);
    sandbox.write("/srv/job/ranged", content.clone()).await;
    let ask = async |range: &str| {
        Answer::to(sandbox.request(Method::GET, "/fs?path=/srv/job/ranged").header("range", range))
            .await
    };
    for (range, start, end) in [
        ("bytes=0-0", 0, 1),
        ("bytes=10-19", 10, 20),
        ("bytes=99990-", 99_990, 100_000),
        ("bytes=0-", 0, 100_000),
        ("bytes=-5", 99_995, 100_000),
        ("bytes=-200000", 0, 100_000),
        ("bytes=50000-999999", 50_000, 100_000),
    ] {
        let part = ask(range).await;
        assert_eq!(part.status, 206, "{range}");
        assert!(part.body == content[start..end], "{range}");
        assert_eq!(
            part.header("content-range"),
            format!("bytes {start}-{}/100000", end - 1),
            "{range}"
        );
        assert_eq!(part.header("content-length"), (end - start).to_string(), "{range}");
    }
    for range in ["bytes=100000-", "bytes=100000-100001", "bytes=-0"] {
        let beyond = ask(range).await;
        assert_eq!(beyond.refusal(), (416, "range_not_satisfiable".to_owned()), "{range}");
        assert_eq!(beyond.header("content-range"), "bytes */100000", "{range}");
    }
    // What is no range of bytes is as if it were not there.
    for range in ["bytes=9-5", "bytes=", "bytes=a-b", "lines=0-1", "bytes"] {
        let whole = ask(range).await;
        assert!(whole.status == 200 && whole.body == content, "{range}: {}", whole.status);
    }
    let several = ask("bytes=0-1,5-6").await;
    assert!(several.status == 200 && several.body == content, "several: {}", several.status);
    let etag = sandbox.get("/fs?path=/srv/job/ranged").await.header("etag").to_owned();
    let if_range = async |tag: &str| {
        Answer::to(
            sandbox
                .request(Method::GET, "/fs?path=/srv/job/ranged")
                .header("range", "bytes=0-9")
                .header("if-range", tag),
        )
        .await
    };
    assert_eq!(if_range(&etag).await.status, 206);
    assert_eq!(if_range("\"another\"").await.status, 200);
}

async fn conditions_on_reads_and_writes_hold(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.write("/srv/job/c", "one").await;
    let read = sandbox.get("/fs?path=/srv/job/c").await;
    let etag = read.header("etag").to_owned();
    assert!(etag.starts_with('"') && etag.ends_with('"') && etag.len() > 2, "{etag}");
    assert!(read.header("last-modified").ends_with("GMT"), "{read:?}");
    let get = async |tag: &str| {
        Answer::to(sandbox.request(Method::GET, "/fs?path=/srv/job/c").header("if-none-match", tag))
            .await
    };
    for (tags, status) in [
        (etag.clone(), 304),
        (format!("\"x\", {etag}"), 304),
        (format!("W/{etag}"), 304),
        ("*".to_owned(), 304),
        ("\"x\"".to_owned(), 200),
    ] {
        let answer = get(&tags).await;
        assert_eq!(answer.status, status, "{tags}");
        assert_eq!(answer.body.is_empty(), status == 304, "{tags}");
    }
    let put = async |path: &str, name: &'static str, value: &str, content: &'static str| {
        let request = sandbox
            .request(Method::PUT, &format!("/fs?path={path}"))
            .header(name, value)
            .body(content);
        Answer::to(request).await.status
    };
    assert_eq!(put("/srv/job/c", "if-match", "\"x\"", "no").await, 412);
    assert_eq!(put("/srv/job/c", "if-none-match", "*", "no").await, 412);
    assert_eq!(put("/srv/job/none", "if-match", "*", "no").await, 412);
    assert_eq!(put("/srv/job/none", "if-match", &etag, "no").await, 412);
    assert_eq!(sandbox.read("/srv/job/c").await, b"one");
    assert_eq!(put("/srv/job/c", "if-match", &etag, "two").await, 200);
    assert_eq!(put("/srv/job/c", "if-match", &etag, "no").await, 412);
    assert_eq!(put("/srv/job/c", "if-match", "*", "six").await, 200);
    assert_eq!(put("/srv/job/new", "if-none-match", "*", "new").await, 200);
    assert_eq!(put("/srv/job/new", "if-none-match", "*", "no").await, 412);
    assert_eq!(sandbox.read("/srv/job/c").await, b"six");
    assert_eq!(sandbox.names("/srv/job").await, ["c", "new"]);
}

async fn exactly_32_mib_are_taken_and_a_byte_more_is_refused_every_time(host: Host) {
    let sandbox = host.sandbox().await;
    let whole = Bytes::from(patterned(LIMIT + 1));
    sandbox.write("/srv/job/limit", whole.slice(..LIMIT)).await;
    let digest = format!("{:x}  -\n", Sha256::digest(&whole[..LIMIT]));
    assert_eq!(sandbox.run("sha256sum < /srv/job/limit").await, digest);
    let server = host.server().await;
    let address = server.url().strip_prefix("http://").unwrap().to_owned();
    for round in 0..6 {
        // By hand, for a client library may forgive an answer that comes before it has sent everything.
        let mut connection = TcpStream::connect(&address).await.unwrap();
        let head = format!(
            "PUT /v1/sandboxes/{}/fs?path=/srv/job/over HTTP/1.1\r\nHost: {address}\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            sandbox.id,
            server.key(),
            whole.len()
        );
        connection.write_all(head.as_bytes()).await.unwrap();
        connection.write_all(&whole).await.expect("all of it is taken before the answer");
        let mut answer = String::new();
        connection.read_to_string(&mut answer).await.expect("the answer is whole");
        assert!(answer.starts_with("HTTP/1.1 413 "), "round {round}: {answer}");
        assert!(answer.contains("\"too_large\"") && answer.contains("32 MiB"), "{answer}");
    }
    let pieces: Vec<_> = whole
        .chunks(256 << 10)
        .map(|piece| Ok::<_, std::io::Error>(whole.slice_ref(piece)))
        .collect();
    let chunked = sandbox.put("/srv/job/over", Body::wrap_stream(stream::iter(pieces))).await;
    assert_eq!(chunked.refusal(), (413, "too_large".to_owned()));
    assert_eq!(sandbox.names("/srv/job").await, ["limit"]);
}

/// Downloads a file, and hands back its digest, its length, and the most memory that the server had meanwhile.
async fn download(host: &Host, sandbox: &tests::Sandbox, path: &str) -> (String, u64, u64) {
    let server = host.server().await;
    let mut content = sandbox.client().read_file(&sandbox.id, path).await.unwrap();
    let (mut digest, mut length, mut most) = (Sha256::new(), 0, 0);
    while let Some(chunk) = content.chunk().await.unwrap() {
        digest.update(&chunk);
        let before = length;
        length += chunk.len() as u64;
        if before >> 24 != length >> 24 {
            most = most.max(server.memory_bytes());
        }
    }
    (format!("{:x}", digest.finalize()), length, most)
}

async fn large_each_way(host: &Host, sandbox: &tests::Sandbox, mebibytes: u64) {
    // Warm: what a first transfer allocates for good is no growth.
    sandbox.write("/srv/job/up", patterned(8 << 20)).await;
    sandbox.read("/srv/job/up").await;
    let server = host.server().await;
    let (server_before, agent_before) = (server.memory_bytes(), sandbox.agent_memory_bytes().await);
    sandbox.run(&format!("head -c {mebibytes}M /dev/urandom > /srv/job/down")).await;
    let (digest, length, most) = download(host, sandbox, "/srv/job/down").await;
    assert_eq!(length, mebibytes << 20);
    assert_eq!(sandbox.run("sha256sum < /srv/job/down").await, format!("{digest}  -\n"));
    let part = Bytes::from(patterned(LIMIT));
    for number in 0..mebibytes.div_ceil(32) {
        sandbox.write(format!("/srv/job/part{number}"), part.clone()).await;
    }
    let room: u64 = 48 << 20;
    let server_after = most.max(server.memory_bytes());
    assert!(
        server_after < server_before + room,
        "the server grew from {server_before} to {server_after}"
    );
    let agent_after = sandbox.agent_memory_bytes().await;
    assert!(
        agent_after < agent_before + (16 << 20),
        "the agent grew from {agent_before} to {agent_after}"
    );
}

async fn a_large_file_leaves_memory_flat(host: Host) {
    let sandbox = host.sandbox().await;
    large_each_way(&host, &sandbox, 96).await;
}

async fn a_gibibyte_each_way_leaves_memory_flat(host: Host) {
    let sandbox = host.sandbox().await;
    large_each_way(&host, &sandbox, 1024).await;
}

/// A body of small pieces, one each `gap`.
fn trickle(pieces: usize, gap: Duration) -> Body {
    Body::wrap_stream(stream::unfold(0, move |sent| async move {
        if sent == pieces {
            return None;
        }
        pause(gap).await;
        Some((Ok::<_, std::io::Error>(Bytes::from(vec![b'.'; 1000])), sent + 1))
    }))
}

async fn a_slow_upload_that_moves_is_not_cut(host: Host) {
    let sandbox = host.idle_sandbox_of(&small()).await;
    let answer = sandbox.put("/srv/job/slow", trickle(20, Duration::from_millis(500))).await;
    assert_eq!(answer.json(), serde_json::json!({"path": "/srv/job/slow", "bytes": 20_000}));
}

async fn an_upload_of_three_minutes_is_not_cut(host: Host) {
    let sandbox = host.sandbox().await;
    let answer = sandbox.put("/srv/job/slow", trickle(180, Duration::from_secs(1))).await;
    assert_eq!(answer.json()["bytes"], 180_000);
}
