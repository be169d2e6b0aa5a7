//! Files in and out: every byte, every name, and what must be refused.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{CreateSandbox, FileKind};
use bytes::Bytes;
use client::{Body, Method, WriteOptions};
use futures::stream;
use sha2::{Digest, Sha256};
use tests::{Answer, Host, command, escaped, pause, small, suite, until};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

suite! {
    a_large_file_leaves_memory_flat,
    a_slow_upload_that_moves_is_not_cut,
    every_byte_survives_the_round_trip,
    an_empty_file_and_a_dotfile_and_an_empty_directory_are_there,
    odd_names_are_kept,
    names_that_are_not_utf8_are_kept,
    a_write_is_seen_by_the_next_read,
    two_writers_leave_one_whole_file,
    parents_belong_to_the_owner_and_uploads_are_readable,
    a_replaced_script_keeps_its_mode_and_owner,
    a_mode_or_an_owner_that_cannot_be_is_refused,
    deleting_a_link_leaves_what_it_points_to,
    a_loop_of_links_ends,
    what_is_no_regular_file_is_refused_and_hangs_nothing,
    files_of_proc_and_sys_are_read_to_their_end,
    a_full_disk_refuses_a_write_and_keeps_the_old_file,
    an_upload_that_breaks_off_leaves_the_old_file,
    a_directory_of_many_entries_is_listed_whole,
    a_listing_tells_what_the_clients_read,
    a_range_is_answered_exactly,
    conditions_on_reads_and_writes_hold,
    exactly_32_mib_are_taken_and_a_byte_more_is_refused_every_time,
    a_path_is_absolute_and_resolved;
    soak: a_gibibyte_each_way_leaves_memory_flat,
    a_hundred_thousand_entries_are_listed_in_bounded_memory,
    an_upload_of_three_minutes_is_not_cut,
}

const LIMIT: usize = 32 << 20;

/// All values, and the beginnings of formats that tools like to "repair".
fn every_byte() -> Vec<u8> {
    let mut content =
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR%PDF-1.7\r\n%\xe2\xe3\xcf\xd3\r\n\xef\xbb\xbf\r\n\n\0"
            .to_vec();
    content.extend((0..=255u8).cycle().take(64 * 256));
    content
}

/// Differs everywhere, so that a piece in the wrong place is noticed.
fn patterned(length: usize) -> Vec<u8> {
    (0..length as u64)
        .map(|index| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

async fn every_byte_survives_the_round_trip(host: Host) {
    let sandbox = host.sandbox().await;
    for (path, content) in
        [("/srv/job/in/every.bin", every_byte()), ("/srv/job/large.bin", patterned(3_000_001))]
    {
        sandbox.write(path, content.clone()).await;
        assert!(sandbox.read(path).await == content, "{path}");
        let digest = format!("{:x}", Sha256::digest(&content));
        assert_eq!(sandbox.run(&format!("sha256sum < {path}")).await, format!("{digest}  -\n"));
    }
}

async fn an_empty_file_and_a_dotfile_and_an_empty_directory_are_there(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.write("/srv/job/empty", "").await;
    sandbox.write("/srv/job/.hidden", "x").await;
    sandbox.run("mkdir /srv/job/nothing").await;
    assert_eq!(sandbox.read("/srv/job/empty").await, b"");
    let stat = sandbox.client().stat_file(&sandbox.id, "/srv/job/empty").await.unwrap();
    assert_eq!((stat.size, stat.kind), (0, FileKind::File));
    assert_eq!(sandbox.names("/srv/job").await, [".hidden", "empty", "nothing"]);
    assert_eq!(sandbox.names("/srv/job/nothing").await, [""; 0]);
    let head = sandbox.get("/fs?path=/srv/job/empty").await;
    assert_eq!((head.status, head.header("content-length")), (200, "0"));
}

async fn odd_names_are_kept(host: Host) {
    let sandbox = host.sandbox().await;
    let longest = "n".repeat(255);
    let names = [
        "日本語 é 😀 #?%&+ 'quoted' \"x\".txt",
        "-rf",
        "--help",
        &longest,
        "a line\nbreak",
        "carriage\rreturn\ttab",
        "...",
        "..hidden",
        " leading and trailing ",
        "back\\slash",
        "*",
        "$HOME `id` $(id)",
        "%2e%2e%2f",
        "a;b&c|d",
        "next\u{85}line\u{2028}separator",
        "e\u{301} decomposed",
        "é composed",
        "\u{202e}reversed",
        "~",
    ];
    for name in names {
        let path = format!("/srv/odd/{name}");
        sandbox.write(&path, name.to_owned()).await;
        assert_eq!(sandbox.read(&path).await, name.as_bytes(), "{name:?}");
        let stat = sandbox.client().stat_file(&sandbox.id, &path).await.unwrap();
        assert_eq!((stat.name.as_str(), stat.path.as_str()), (name, path.as_str()));
        assert_eq!(stat.name_b64, None, "{name:?}");
    }
    let mut sorted = names.map(str::to_owned);
    sorted.sort();
    assert_eq!(sandbox.names("/srv/odd").await, sorted);
    assert_eq!(
        sandbox.run("find /srv/odd -type f -printf x | wc -c").await.trim(),
        names.len().to_string()
    );
    for name in names {
        sandbox.client().delete_file(&sandbox.id, format!("/srv/odd/{name}")).await.unwrap();
    }
    assert_eq!(sandbox.names("/srv/odd").await, [""; 0]);
    let too_long = sandbox.put(&escaped(format!("/srv/odd/{longest}n")), "").await;
    assert_eq!(too_long.refusal(), (400, "invalid_request".to_owned()));
}

async fn names_that_are_not_utf8_are_kept(host: Host) {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    let sandbox = host.sandbox().await;
    let name = b"\xff\xfe caf\xe9";
    let path = [b"/srv/raw/".as_slice(), name].concat();
    sandbox.write(&path, "raw").await;
    assert_eq!(sandbox.read(&path).await, b"raw");
    assert_eq!(sandbox.run(r"cat $'/srv/raw/\xff\xfe caf\xe9'").await, "raw");
    let listing = sandbox.client().list_directory(&sandbox.id, "/srv/raw").await.unwrap();
    assert_eq!(listing.entries.len(), 1);
    assert_eq!(listing.entries[0].name_b64.as_deref(), Some(BASE64_STANDARD.encode(name).as_str()));
    sandbox.client().delete_file(&sandbox.id, &path).await.unwrap();
    assert_eq!(sandbox.names("/srv/raw").await, [""; 0]);
}

async fn a_write_is_seen_by_the_next_read(host: Host) {
    let sandbox = host.sandbox().await;
    for round in 0..20 {
        let content = format!("round {round}");
        sandbox.write("/srv/job/state", content.clone()).await;
        if round % 2 == 0 {
            assert_eq!(sandbox.read("/srv/job/state").await, content.as_bytes());
        } else {
            assert_eq!(sandbox.run("cat /srv/job/state").await, content);
        }
    }
    sandbox.run("echo by a command > /srv/job/state").await;
    assert_eq!(sandbox.read("/srv/job/state").await, b"by a command\n");
}

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

async fn parents_belong_to_the_owner_and_uploads_are_readable(host: Host) {
    let sandbox = host.sandbox().await;
    let options = WriteOptions { owner: Some("panda:panda".to_owned()), ..WriteOptions::default() };
    sandbox
        .client()
        .write_file(&sandbox.id, "/home/panda/deep/down/note", "theirs", &options)
        .await
        .unwrap();
    sandbox.write("/srv/shared/deep/note", "everyone's").await;
    let as_panda = |cmd: &str| api::ExecRequest { user: Some("panda".to_owned()), ..command(cmd) };
    let theirs = sandbox
        .exec(as_panda(
            "cat ~/deep/down/note && touch ~/deep/new ~/deep/down/new && rm ~/deep/down/note",
        ))
        .await;
    assert_eq!((theirs.exit_code, theirs.stdout.as_str()), (0, "theirs"), "{theirs:?}");
    let shared = sandbox.exec(as_panda("cat /srv/shared/deep/note")).await;
    assert_eq!((shared.exit_code, shared.stdout.as_str()), (0, "everyone's"), "{shared:?}");
    assert_eq!(
        sandbox.run("stat -c '%U:%G %a' /home/panda/deep /home/panda/deep/down /srv/shared /srv/shared/deep/note").await,
        "panda:panda 755\npanda:panda 755\nroot:root 755\nroot:root 644\n"
    );
    let missing = sandbox.put("/srv/none/deep/note&create_parents=false", "x").await;
    assert_eq!(missing.refusal(), (404, "not_found".to_owned()));
}

async fn a_replaced_script_keeps_its_mode_and_owner(host: Host) {
    let sandbox = host.sandbox().await;
    let options = WriteOptions { mode: Some(0o750), owner: Some("panda".to_owned()), size: None };
    sandbox
        .client()
        .write_file(&sandbox.id, "/srv/job/run.sh", "#!/bin/sh\necho one\n", &options)
        .await
        .unwrap();
    sandbox.write("/srv/job/run.sh", "#!/bin/sh\necho two\n").await;
    assert_eq!(
        sandbox.run("/srv/job/run.sh; stat -c '%a %U' /srv/job/run.sh").await,
        "two\n750 panda\n"
    );
    let other = WriteOptions { mode: Some(0o600), owner: Some("0:0".to_owned()), size: None };
    sandbox.client().write_file(&sandbox.id, "/srv/job/run.sh", "three", &other).await.unwrap();
    assert_eq!(sandbox.run("stat -c '%a %U:%G' /srv/job/run.sh").await, "600 root:root\n");
}

async fn a_mode_or_an_owner_that_cannot_be_is_refused(host: Host) {
    let sandbox = host.sandbox().await;
    for query in [
        "mode=abc",
        "mode=-1",
        "mode=77777",
        "mode=0o9",
        "owner=nobody-knows-me",
        "owner=a:b:c",
        "create_parents=perhaps",
    ] {
        let refused = sandbox.put(&format!("/srv/job/x&{query}"), "x").await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{query}");
    }
    assert_eq!(sandbox.get("/fs?path=/srv/job/x").await.status, 404);
}

async fn deleting_a_link_leaves_what_it_points_to(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox
        .run("mkdir -p /srv/job/kept /srv/job/tree && echo x > /srv/job/kept/file && cd /srv/job && ln -s kept link && ln -s kept/file tree/out && ln -s ../kept tree/up")
        .await;
    let link = sandbox.client().stat_file(&sandbox.id, "/srv/job/link").await.unwrap();
    assert_eq!(
        (link.kind, link.is_dir, link.target.as_deref()),
        (FileKind::Link, false, Some("kept"))
    );
    for path in ["/srv/job/link", "/srv/job/tree", "/srv/job/never-was"] {
        let deleted =
            Answer::to(sandbox.request(Method::DELETE, &format!("/fs?path={path}"))).await;
        assert_eq!(deleted.status, 204, "{path}");
    }
    assert_eq!(sandbox.names("/srv/job").await, ["kept"]);
    assert_eq!(sandbox.read("/srv/job/kept/file").await, b"x\n");
    let root = Answer::to(sandbox.request(Method::DELETE, "/fs?path=/")).await;
    assert_eq!(root.refusal(), (400, "invalid_request".to_owned()));
}

async fn a_loop_of_links_ends(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.run("mkdir -p /srv/loop/a/b && cd /srv/loop && ln -s .. a/b/up && ln -s self self && ln -s /srv/loop a/again").await;
    let listing = sandbox.get("/fs/dir?path=/srv/loop&depth=20").await;
    let paths: Vec<_> = listing.json()["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| entry["path"].as_str().unwrap().to_owned())
        .collect();
    let mut sorted = paths.clone();
    sorted.sort();
    assert_eq!(
        sorted,
        ["/srv/loop/a", "/srv/loop/a/again", "/srv/loop/a/b", "/srv/loop/a/b/up", "/srv/loop/self"]
    );
    let round = sandbox.get("/fs?path=/srv/loop/self").await;
    assert!((400..=404).contains(&round.status), "{round:?}");
}

async fn what_is_no_regular_file_is_refused_and_hangs_nothing(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox
        .run("mkdir -p /srv/odd && cd /srv/odd && mkfifo fifo && python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('socket')\" && ln -s /dev/zero zero")
        .await;
    for path in [
        "/srv/odd/fifo",
        "/srv/odd/socket",
        "/srv/odd/zero",
        "/dev/zero",
        "/dev/random",
        "/dev/vda",
        "/dev/tty",
        "/srv/odd",
    ] {
        let read =
            tokio::time::timeout(Duration::from_secs(20), sandbox.get(&format!("/fs?path={path}")))
                .await;
        assert_eq!(read.expect(path).refusal(), (400, "invalid_request".to_owned()), "read {path}");
    }
    for path in ["/srv/odd/fifo", "/dev/zero", "/srv/odd"] {
        let write = tokio::time::timeout(Duration::from_secs(20), sandbox.put(path, "x")).await;
        assert_eq!(
            write.expect(path).refusal(),
            (400, "invalid_request".to_owned()),
            "write {path}"
        );
    }
    sandbox.run("test -p /srv/odd/fifo && test -c /dev/zero && test -d /srv/odd").await;
    let listing = sandbox.client().list_directory(&sandbox.id, "/srv/odd").await.unwrap();
    let mut kinds: Vec<_> =
        listing.entries.iter().map(|entry| (entry.name.as_str(), entry.kind)).collect();
    kinds.sort_by_key(|(name, _)| *name);
    assert_eq!(
        kinds,
        [("fifo", FileKind::Fifo), ("socket", FileKind::Socket), ("zero", FileKind::Link)]
    );
    let file = sandbox.get("/fs/dir?path=/etc/passwd").await;
    assert_eq!(file.refusal(), (400, "invalid_request".to_owned()));
}

async fn files_of_proc_and_sys_are_read_to_their_end(host: Host) {
    let sandbox = host.sandbox().await;
    for path in ["/proc/version", "/proc/cpuinfo", "/sys/kernel/mm/transparent_hugepage/enabled"] {
        let read =
            tokio::time::timeout(Duration::from_secs(20), sandbox.get(&format!("/fs?path={path}")))
                .await
                .expect(path);
        // They say that they are empty and are not: the whole content, or a refusal; never an empty file.
        match read.status {
            200 => assert_eq!(read.text(), sandbox.run(&format!("cat {path}")).await, "{path}"),
            status => assert_eq!(read.refusal(), (status, "invalid_request".to_owned()), "{path}"),
        }
    }
    for path in ["/proc/kmsg", "/proc/kcore", "/sys/kernel/debug/tracing/trace_pipe"] {
        let bounded = tokio::time::timeout(
            Duration::from_secs(20),
            sandbox
                .request(Method::GET, &format!("/fs?path={path}"))
                .header("range", "bytes=0-99")
                .send(),
        )
        .await;
        assert!(bounded.expect(path).is_ok(), "{path}");
    }
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
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

async fn a_directory_of_many_entries_is_listed_whole(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.run("mkdir -p /srv/many && cd /srv/many && seq 5000 | xargs touch").await;
    let names = sandbox.names("/srv/many").await;
    let mut expected: Vec<_> = (1..=5000).map(|number| number.to_string()).collect();
    expected.sort();
    assert!(names == expected, "{} of 5000", names.len());
}

async fn a_listing_tells_what_the_clients_read(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.run("mkdir -p /srv/l/dir && cd /srv/l && printf 12345 > file && chown panda file && chmod 4751 file && touch -d @1000000000.9 file && ln -s dir link").await;
    let listing = sandbox.get("/fs/dir?path=/srv/l").await.json();
    assert_eq!(listing["path"], "/srv/l");
    let entries = listing["entries"].as_array().unwrap();
    let entry = |name: &str| {
        entries
            .iter()
            .find(|entry| entry["name"] == name)
            .unwrap_or_else(|| panic!("{name} in {entries:?}"))
    };
    assert_eq!(entries.len(), 3);
    assert_eq!(entry("file")["mode"], "4751");
    assert_eq!(entry("file")["mtime"], 1_000_000_000);
    assert_eq!(
        (&entry("file")["size"], &entry("file")["is_dir"], &entry("file")["type"]),
        (&5.into(), &false.into(), &"file".into())
    );
    assert_eq!(
        (&entry("dir")["is_dir"], &entry("dir")["type"], &entry("dir")["mode"]),
        (&true.into(), &"directory".into(), &"0755".into())
    );
    // The clients walk by `is_dir`: a link to a directory would lead them in circles.
    assert_eq!(
        (&entry("link")["is_dir"], &entry("link")["target"]),
        (&false.into(), &"dir".into())
    );
    assert_eq!(sandbox.get("/fs/stat?path=/srv/l/file").await.json()["mtime"], 1_000_000_000);
    for route in ["/fs", "/fs/dir", "/fs/stat"] {
        let missing = sandbox.get(&format!("{route}?path=/srv/none")).await;
        assert_eq!(missing.refusal(), (404, "not_found".to_owned()), "{route}");
    }
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

async fn a_path_is_absolute_and_resolved(host: Host) {
    let sandbox = host.sandbox().await;
    sandbox.write("/srv/job/a/file", "x").await;
    for path in ["/srv/job/./a/../a//file", "/../../srv/job/a/file", "//srv/job/a/file"] {
        assert_eq!(sandbox.read(path).await, b"x", "{path}");
    }
    let long = format!("/{}", "a/".repeat(3000));
    for path in ["", "relative", "./x", "~/x", "%00", "/a%00b", "/srv/job/%00", &long] {
        for route in ["/fs", "/fs/dir", "/fs/stat"] {
            let refused = sandbox.get(&format!("{route}?path={path}")).await;
            assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{route} {path}");
        }
        let refused = sandbox.put(path, "x").await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "PUT {path}");
    }
    for route in ["/fs", "/fs/dir", "/fs/stat"] {
        let refused = sandbox.get(route).await;
        assert_eq!(
            refused.refusal(),
            (400, "invalid_request".to_owned()),
            "{route} without a path"
        );
    }
    let through_a_file = sandbox.get("/fs?path=/srv/job/a/file/x").await;
    assert!([400, 404].contains(&through_a_file.status), "{through_a_file:?}");
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

async fn agent_memory(sandbox: &tests::Sandbox) -> u64 {
    let kib = sandbox.run("awk '/^VmRSS/ { print $2 }' /proc/1/status").await;
    kib.trim().parse::<u64>().unwrap() << 10
}

async fn large_each_way(host: &Host, sandbox: &tests::Sandbox, mebibytes: u64) {
    // Warm: what a first transfer allocates for good is no growth.
    sandbox.write("/srv/job/up", patterned(8 << 20)).await;
    sandbox.read("/srv/job/up").await;
    let server = host.server().await;
    let (server_before, agent_before) = (server.memory_bytes(), agent_memory(sandbox).await);
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
    let agent_after = agent_memory(sandbox).await;
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

async fn a_hundred_thousand_entries_are_listed_in_bounded_memory(host: Host) {
    let sandbox = host.sandbox_of(&CreateSandbox { ttl_seconds: Some(7200), ..small() }).await;
    sandbox.run("mkdir -p /srv/many && cd /srv/many && seq -f 'a-rather-long-name-for-a-file-%.0f' 100000 | xargs touch").await;
    let server = host.server().await;
    sandbox.names("/etc").await;
    let (server_before, agent_before) = (server.memory_bytes(), agent_memory(&sandbox).await);
    let mut listing = sandbox.request(Method::GET, "/fs/dir?path=/srv/many").send().await.unwrap();
    let (mut length, mut most) = (0, 0);
    while let Some(chunk) = listing.chunk().await.unwrap() {
        length += chunk.len();
        most = most.max(server.memory_bytes());
    }
    assert!(length > 100_000 * 100, "{length}");
    assert!(most < server_before + (32 << 20), "the server grew from {server_before} to {most}");
    assert!(agent_memory(&sandbox).await < agent_before + (16 << 20));
    assert_eq!(sandbox.names("/srv/many").await.len(), 100_000);
}
