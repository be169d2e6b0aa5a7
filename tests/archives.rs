//! Directories as archives, in real guests.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    ffi::OsStr,
    fs::{self, Permissions},
    os::unix::{ffi::OsStrExt, fs::PermissionsExt, fs::symlink},
    path::Path,
    process::Command,
};

use client::Method;
use serde_json::json;
use tests::{Answer, Host, Sandbox, suite};

suite! {
    a_tree_goes_in_and_comes_out_as_it_was,
    an_archive_cannot_leave_its_directory,
    a_full_disk_refuses_an_archive_and_a_part_and_keeps_what_is_there,
    what_has_no_end_is_not_packed,
    many_small_files_leave_memory_flat,
    what_is_unpacked_belongs_to_the_user_who_was_named;
    soak: a_hundred_thousand_files_go_both_ways,
}

fn tar(arguments: &[&str], directory: &Path) -> Vec<u8> {
    let output = Command::new("tar").arg("-C").arg(directory).args(arguments).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    output.stdout
}

async fn unpack(sandbox: &Sandbox, path_and_query: &str, archive: Vec<u8>) -> Answer {
    let route = format!("/fs/archive?path={path_and_query}");
    Answer::to(sandbox.request(Method::PUT, &route).body(archive)).await
}

async fn pack(sandbox: &Sandbox, path_and_query: &str) -> Vec<u8> {
    let answer = sandbox.get(&format!("/fs/archive?path={path_and_query}")).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    answer.body.to_vec()
}

/// Content of every kind under names of every kind.
fn make_tree(tree: &Path) {
    for directory in ["sub/deep", "empty", ".hidden"] {
        fs::create_dir_all(tree.join(directory)).unwrap();
    }
    let every_byte: Vec<u8> = (0..=255).cycle().take(70_000).collect();
    fs::write(tree.join("every.bin"), &every_byte).unwrap();
    fs::write(tree.join("sub/nothing"), "").unwrap();
    fs::write(tree.join("sub/.dot"), "dot").unwrap();
    fs::write(tree.join("n".repeat(255)), "long").unwrap();
    for name in [
        "日本語 é 😀 #?%&+ 'quoted' \"x\".txt".as_bytes(),
        b"-dash",
        b"new\nline",
        b"no utf8 \xff\xfe",
    ] {
        fs::write(tree.join(OsStr::from_bytes(name)), name).unwrap();
    }
    fs::write(tree.join("script"), "#!/bin/sh\necho ran\n").unwrap();
    fs::set_permissions(tree.join("script"), Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(tree.join("sub"), Permissions::from_mode(0o750)).unwrap();
    fs::hard_link(tree.join("script"), tree.join("sub/same")).unwrap();
    symlink("../script", tree.join("sub/link")).unwrap();
    // Both lead into a circle.
    symlink(".", tree.join("sub/circle")).unwrap();
    let touched = Command::new("find")
        .arg(tree)
        .args(["-depth", "-exec", "touch", "-h", "-d", "@1234567890", "{}", "+"])
        .status();
    assert!(touched.unwrap().success());
}

/// One line for each thing: kind, mode, time, size, names, target; and what the files hold.
const DESCRIBE: &str = "cd \"$0\" && find . -printf '%P %y %m %T@ %n %l\\n' | sort; find . -type f -print0 | sort -z | xargs -0 sha256sum";

async fn a_tree_goes_in_and_comes_out_as_it_was(host: Host) {
    let sandbox = host.sandbox().await;
    let directory = tempfile::tempdir().unwrap();
    let tree = directory.path().join("tree");
    fs::create_dir(&tree).unwrap();
    make_tree(&tree);
    let described = |path: &Path| {
        let output = Command::new("sh").arg("-c").arg(DESCRIBE).arg(path).output().unwrap();
        assert!(output.status.success());
        output.stdout
    };
    let expected = described(&tree);
    let things = Command::new("find").arg(&tree).arg("-print0").output().unwrap().stdout;
    let things = things.iter().filter(|&&byte| byte == 0).count();
    for (format, option) in [("tar", "-cf"), ("tar.gz", "-czf")] {
        let path = format!("/srv/{format}");
        let answer = unpack(&sandbox, &path, tar(&[option, "-", "."], &tree)).await;
        assert_eq!(answer.json()["entries"], things, "{}", answer.text());
        let inside = sandbox.run(&format!("set -- {path}; {}", DESCRIBE.replace("$0", "$1"))).await;
        assert_eq!(inside, String::from_utf8_lossy(&expected), "{format}");
        assert_eq!(sandbox.run(&format!("{path}/script")).await, "ran\n");
        let back = directory.path().join(format);
        fs::create_dir(&back).unwrap();
        let file = directory.path().join("archive");
        fs::write(&file, pack(&sandbox, &format!("{path}&format={format}")).await).unwrap();
        tar(&["-xpf", file.to_str().unwrap()], &back);
        assert!(described(&back) == expected, "{format}");
    }
    // Between two places of a sandbox, and over what is there: a script stays one.
    let zstd = pack(&sandbox, "/srv/tar&format=tar.zst").await;
    sandbox.run("chmod 0644 /srv/tar.gz/script").await;
    assert_eq!(unpack(&sandbox, "/srv/tar.gz", zstd).await.status, 200);
    assert_eq!(sandbox.run("/srv/tar.gz/script").await, "ran\n");
    // A link is deleted, and not what it points to.
    Answer::to(sandbox.request(Method::DELETE, "/fs?path=/srv/tar/sub/link")).await;
    assert_eq!(sandbox.run("/srv/tar/script").await, "ran\n");
}

async fn an_archive_cannot_leave_its_directory(host: Host) {
    let sandbox = host.sandbox().await;
    // As root of the guest would make them, and its tar would unpack them.
    let make = r#"python3 - <<'END'
import io, tarfile
def archive(name, *members):
    with tarfile.open('/tmp/' + name, 'w') as tar:
        for path, kind, link in members:
            info = tarfile.TarInfo(path)
            info.type, info.linkname = kind, link
            info.size = 4 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b'evil'))
F, L, H = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE
archive('up', ('../outside/file', F, ''))
archive('absolute', ('/srv/outside/file', F, ''))
archive('through', ('link', L, '/srv/outside'), ('link/file', F, ''))
archive('around', ('a/link', L, '../../outside'), ('a/link/file', F, ''))
archive('hard', ('hard', H, '../outside/kept'))
archive('device', ('device', tarfile.CHRTYPE, ''))
archive('fifo', ('fifo', tarfile.FIFOTYPE, ''))
END
mkdir /srv/outside && echo kept > /srv/outside/kept"#;
    sandbox.run(&format!("command -v python3 >/dev/null || exit 77; {make}")).await;
    for name in ["up", "absolute", "through", "around", "hard", "device", "fifo"] {
        let archive = sandbox.read(format!("/tmp/{name}")).await;
        let answer = unpack(&sandbox, &format!("/srv/{name}"), archive).await;
        assert_eq!(answer.refusal(), (400, "invalid_request".to_owned()), "{name}");
        assert!(answer.text().contains("before it are in /srv/"), "{}", answer.text());
        assert_eq!(sandbox.names("/srv/outside").await, ["kept"], "{name}");
    }
    // A hole of ten gibibytes is a hole.
    sandbox.run("truncate -s 10G /srv/hole && cd /srv && tar -Scf /tmp/hole hole && rm hole").await;
    let hole = sandbox.read("/tmp/hole").await;
    assert_eq!(unpack(&sandbox, "/srv/holes", hole).await.status, 200);
    assert_eq!(sandbox.run("stat -c '%s %b' /srv/holes/hole").await, "10737418240 0\n");
    assert!(pack(&sandbox, "/srv/holes").await.len() < 20_000);
}

async fn a_full_disk_refuses_an_archive_and_a_part_and_keeps_what_is_there(host: Host) {
    let sandbox = host.sandbox().await;
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a-first"), "first").unwrap();
    fs::write(directory.path().join("b-big"), vec![b'x'; 12 << 20]).unwrap();
    let archive = tar(&["-cf", "-", "a-first", "b-big"], directory.path());
    let begin = json!({"path": "/srv/job/upload", "part_size": 12 << 20});
    let begun = Answer::to(sandbox.request(Method::POST, "/fs/uploads").json(&begin)).await;
    let upload = begun.json()["id"].as_str().unwrap().to_owned();
    // The first file finds room, the second does not.
    let fill = "cd /var/tmp && fallocate -l 4M spare && for unit in G M K; do i=0; while fallocate -l $((++i * 64))$unit fill$unit$i 2>/dev/null; do :; done; done; \
                while dd if=/dev/zero of=last bs=64K count=64 oflag=append conv=notrunc status=none 2>/dev/null; do :; done; rm spare; sync";
    sandbox.run(fill).await;
    let refused = unpack(&sandbox, "/srv/job/target", archive.clone()).await;
    assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()));
    assert!(refused.text().contains("b-big"), "{}", refused.text());
    assert!(!sandbox.names("/srv/job/target").await.contains(&"b-big".to_owned()));
    let route = format!("/fs/uploads/{upload}");
    let part = vec![b'x'; 12 << 20];
    let put = || sandbox.request(Method::PUT, &format!("{route}/parts/1")).body(part.clone());
    assert_eq!(Answer::to(put()).await.refusal(), (507, "capacity_exceeded".to_owned()));
    sandbox.run("rm -f /var/tmp/fill* /var/tmp/last").await;
    assert_eq!(Answer::to(put()).await.status, 204);
    assert_eq!(Answer::to(sandbox.request(Method::DELETE, &route)).await.status, 204);
    assert_eq!(unpack(&sandbox, "/srv/job/target", archive).await.status, 200);
    assert_eq!(sandbox.names("/srv/job").await, ["target"]);
    assert_eq!(sandbox.names("/srv/job/target").await, ["a-first", "b-big"]);
}

async fn what_has_no_end_is_not_packed(host: Host) {
    let sandbox = host.sandbox().await;
    for path in ["/proc", "/proc/self/status", "/sys", "/dev/zero"] {
        let answer = sandbox.get(&format!("/fs/archive?path={path}")).await;
        assert_eq!(answer.refusal(), (400, "invalid_request".to_owned()), "{path}");
    }
    sandbox.run("mkdir -p /srv/odd && mkfifo /srv/odd/fifo && ln -s /dev/zero /srv/odd/zero && ln -s . /srv/odd/loop").await;
    let archive = pack(&sandbox, "/srv/odd").await;
    assert!(String::from_utf8_lossy(&archive).contains("left out fifo: it is a FIFO"));
    assert!(archive.len() < 20_000, "{}", archive.len());
}

async fn both_ways(host: &Host, files: usize) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let make = format!(
        "mkdir -p /srv/many && cd /srv/many && for n in $(seq {files}); do echo $n > $n; done"
    );
    sandbox.run(&make).await;
    let archive = pack(&sandbox, "/srv/many").await;
    unpack(&sandbox, "/srv/warm", archive.clone()).await;
    let before = (server.memory_bytes(), sandbox.agent_memory_bytes().await);
    let answer = unpack(&sandbox, "/srv/again", archive).await;
    assert_eq!(answer.json()["entries"], files + 1, "{}", answer.text());
    assert_eq!(pack(&sandbox, "/srv/again").await.len() % 512, 0);
    let listed = sandbox.client().list_directory(&sandbox.id, "/srv/again").await.unwrap();
    assert_eq!(listed.entries.len(), files);
    let after = (server.memory_bytes(), sandbox.agent_memory_bytes().await);
    assert!(after.0 < before.0 + (48 << 20), "the server grew from {} to {}", before.0, after.0);
    assert!(after.1 < before.1 + (16 << 20), "the agent grew from {} to {}", before.1, after.1);
    assert_eq!(sandbox.run("diff -r /srv/many /srv/again && echo same").await, "same\n");
}

async fn many_small_files_leave_memory_flat(host: Host) {
    both_ways(&host, 2000).await;
}

async fn a_hundred_thousand_files_go_both_ways(host: Host) {
    both_ways(&host, 100_000).await;
}

async fn what_is_unpacked_belongs_to_the_user_who_was_named(host: Host) {
    let sandbox = host.sandbox().await;
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("sub")).unwrap();
    fs::write(directory.path().join("sub/file"), "content").unwrap();
    let archive = tar(&["-cf", "-", "sub"], directory.path());
    for query in ["owner=panda", "user=panda"] {
        let path = format!("/home/panda/{}/deep", &query[..4]);
        let answer = unpack(&sandbox, &format!("{path}&{query}"), archive.clone()).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let owners =
            sandbox.run(&format!("stat -c %U {path}/.. {path} {path}/sub {path}/sub/file")).await;
        assert_eq!(owners, "panda\n".repeat(4), "{query}");
    }
    let refused = unpack(&sandbox, "/etc/theirs&user=panda", archive).await;
    assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()));
    let secret = sandbox.get("/fs/archive?path=/root&user=panda").await;
    assert_eq!(secret.refusal(), (400, "invalid_request".to_owned()));
}
