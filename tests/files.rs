//! Files in and out: every byte, every name, and what must be refused.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{CreateSandbox, FileKind};
use client::{Method, WriteOptions};
use sha2::{Digest, Sha256};
use tests::{Answer, Host, command, escaped, patterned, small, suite};

suite! {
    every_byte_survives_the_round_trip,
    an_empty_file_and_a_dotfile_and_an_empty_directory_are_there,
    odd_names_are_kept,
    names_that_are_not_utf8_are_kept,
    a_write_is_seen_by_the_next_read,
    parents_belong_to_the_owner_and_uploads_are_readable,
    a_replaced_script_keeps_its_mode_and_owner,
    a_mode_or_an_owner_that_cannot_be_is_refused,
    deleting_a_link_leaves_what_it_points_to,
    a_loop_of_links_ends,
    what_is_no_regular_file_is_refused_and_hangs_nothing,
    files_of_proc_and_sys_are_read_to_their_end,
    a_directory_of_many_entries_is_listed_whole,
    a_listing_tells_what_the_clients_read,
    a_path_is_absolute_and_resolved;
    soak: a_hundred_thousand_entries_are_listed_in_bounded_memory,
}

/// All values, and the beginnings of formats that tools like to "repair".
fn every_byte() -> Vec<u8> {
    let mut content =
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR%PDF-1.7\r\n%\xe2\xe3\xcf\xd3\r\n\xef\xbb\xbf\r\n\n\0"
            .to_vec();
    content.extend((0..=255u8).cycle().take(64 * 256));
    content
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

async fn a_hundred_thousand_entries_are_listed_in_bounded_memory(host: Host) {
    let sandbox = host.sandbox_of(&CreateSandbox { ttl_seconds: Some(7200), ..small() }).await;
    sandbox.run("mkdir -p /srv/many && cd /srv/many && seq -f 'a-rather-long-name-for-a-file-%.0f' 100000 | xargs touch").await;
    let server = host.server().await;
    sandbox.names("/etc").await;
    let (server_before, agent_before) = (server.memory_bytes(), sandbox.agent_memory_bytes().await);
    let mut listing = sandbox.request(Method::GET, "/fs/dir?path=/srv/many").send().await.unwrap();
    let (mut length, mut most) = (0, 0);
    while let Some(chunk) = listing.chunk().await.unwrap() {
        length += chunk.len();
        most = most.max(server.memory_bytes());
    }
    assert!(length > 100_000 * 100, "{length}");
    assert!(most < server_before + (32 << 20), "the server grew from {server_before} to {most}");
    assert!(sandbox.agent_memory_bytes().await < agent_before + (16 << 20));
    assert_eq!(sandbox.names("/srv/many").await.len(), 100_000);
}
