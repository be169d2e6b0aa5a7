//! Who may have a volume, and where it is mounted.

use api::{ErrorCode, UpdateVolume, VolumeMount};
use client::Method;
use tests::{Answer, Host, command, escaped, small};

use super::{
    SIZE_MB, disk, holder, is_clean, name, read, refused, swallowing, volume, wanted, with, written,
};

pub(super) async fn of_two_creates_that_race_one_wins(host: Host) {
    let server = host.server().await;
    volume(&server, "raced").await;
    // Its size is baked by then.
    host.sandbox().await.delete().await;
    let _room = host.room(2).await;
    for _ in 0..4 {
        let request = with([written("raced")]);
        let (one, other) = tokio::join!(
            server.client().create_sandbox(&request),
            server.client().create_sandbox(&request)
        );
        let (winner, loser) = match (one, other) {
            (Ok(winner), Err(loser)) | (Err(loser), Ok(winner)) => (winner, loser),
            both => panic!("{both:?}"),
        };
        assert_eq!(loser.status(), Some(409), "{loser:?}");
        assert!(loser.refusal().unwrap().message.contains(&winner.id.to_string()), "{loser}");
        assert_eq!(holder(&server, "raced").await, Some(winner.id));
        server.client().delete_sandbox(&winner.id).await.unwrap();
        assert_eq!(holder(&server, "raced").await, None);
    }
}

pub(super) async fn a_volume_has_one_writer_or_many_readers(host: Host) {
    let server = host.server().await;
    let shared = volume(&server, "shared").await;
    let writer = host.sandbox_of(&with([written("shared")])).await;
    assert_eq!(writer.created.volumes[0].mount_path.as_deref(), Some("/mnt/shared"));
    writer.run("echo kept > /mnt/shared/file").await;
    for request in [with([written("shared")]), with([read("shared")])] {
        assert_eq!(refused(&server, &request).await, ErrorCode::Conflict);
    }
    let deleted = server.client().delete_volume(&name("shared")).await.unwrap_err();
    assert_eq!(deleted.status(), Some(409));
    writer.delete().await;
    let readers = host.two_sandboxes(&with([read("shared")])).await;
    for reader in &readers {
        assert_eq!(reader.run("cat /mnt/shared/file").await, "kept\n");
        let refusal = reader.exec(command("echo x > /mnt/shared/new")).await;
        assert!(refusal.stderr.contains("Read-only file system"), "{refusal:?}");
        // Nor by the disk itself, nor mounted anew.
        assert_eq!(swallowing(reader, "vdb").await, "");
        let remounted = reader.exec(command("mount -o remount,rw /mnt/shared")).await;
        assert_ne!(remounted.exit_code, 0);
    }
    assert_eq!(refused(&server, &with([written("shared")])).await, ErrorCode::Conflict);
    let grow = UpdateVolume { size_mb: Some(2 * SIZE_MB), size_gb: None };
    let grown = server.client().update_volume(&name("shared"), &grow).await.unwrap_err();
    assert_eq!(grown.status(), Some(409));
    for reader in readers {
        reader.delete().await;
    }
    assert_eq!(holder(&server, "shared").await, None);
    is_clean(&server, &shared).await;
}

pub(super) async fn eight_that_are_written_and_eight_that_are_read_and_no_more(host: Host) {
    let server = host.server().await;
    let mut all = Vec::new();
    for number in 0..8 {
        for mount in [written(&format!("w{number}")), read(&format!("r{number}"))] {
            server.client().create_volume(&wanted(&mount.name, 16)).await.unwrap();
            all.push(mount);
        }
    }
    volume(&server, "one-more").await;
    for one_more in [written("one-more"), read("one-more")] {
        let request = with([all.clone(), vec![one_more]].concat());
        assert_eq!(refused(&server, &request).await, ErrorCode::InvalidRequest);
    }
    let twice = with([written("w0"), VolumeMount { mount_path: Some("/x".into()), ..read("w0") }]);
    assert_eq!(refused(&server, &twice).await, ErrorCode::InvalidRequest);
    let sandbox = host.sandbox_of(&with(all)).await;
    let script = "for n in 0 1 2 3 4 5 6 7; do echo $n > /mnt/w$n/number; mountpoint -q /mnt/r$n && echo r$n; done; cat /mnt/w*/number";
    let expected: String =
        (0..8).map(|n| format!("r{n}\n")).chain((0..8).map(|n| format!("{n}\n"))).collect();
    assert_eq!(sandbox.run(script).await, expected);
    sandbox.delete().await;
    let all: Vec<_> = (0..8).map(|number| read(&format!("w{number}"))).collect();
    let again = host.sandbox_of(&with(all)).await;
    assert_eq!(again.run("cat /mnt/w*/number").await, "0\n1\n2\n3\n4\n5\n6\n7\n");
}

pub(super) async fn a_volume_is_mounted_where_it_is_asked_to_be(host: Host) {
    let server = host.server().await;
    let (placed, by_id) = (volume(&server, "placed").await, volume(&server, "by-id").await);
    let at = |path: &str| VolumeMount { mount_path: Some(path.to_owned()), ..written("placed") };
    for path in ["relative", "/", "/proc/x", "/sys", "/dev/disk", "/a/../etc", "/a\0b"] {
        let code = refused(&server, &with([at(path)])).await;
        assert_eq!(code, ErrorCode::InvalidRequest, "{path}");
    }
    let nested =
        with([at("/data"), VolumeMount { mount_path: Some("/data/x".into()), ..written("by-id") }]);
    assert_eq!(refused(&server, &nested).await, ErrorCode::InvalidRequest);
    assert_eq!(refused(&server, &with([written("no-such")])).await, ErrorCode::NotFound);
    let _room = host.room(1).await;
    // Only the guest knows what is there; what failed holds nothing when it is told.
    for path in ["/etc/passwd", "/etc/passwd/below", "/bin/sh"] {
        let code = refused(&server, &with([at(path)])).await;
        assert!(
            [ErrorCode::InvalidRequest, ErrorCode::Conflict].contains(&code),
            "{path}: {code:?}"
        );
        assert_eq!(holder(&server, "placed").await, None);
    }
    drop(_room);
    let request = with([at("/srv//deep/er/"), written(&by_id.id.to_string())]);
    let sandbox = host.sandbox_of(&request).await;
    let places: Vec<_> = sandbox
        .created
        .volumes
        .iter()
        .map(|volume| (volume.name.as_str(), volume.mount_path.as_deref().unwrap()))
        .collect();
    assert_eq!(places, [("placed", "/srv/deep/er"), ("by-id", "/mnt/by-id")]);
    sandbox
        .run("mountpoint /srv/deep/er && mountpoint /mnt/by-id && echo x > /srv/deep/er/x")
        .await;
    sandbox.delete().await;
    is_clean(&server, &placed).await;
}

pub(super) async fn a_volume_is_named_by_its_id_or_its_name(host: Host) {
    let server = host.server().await;
    let volume = volume(&server, "named").await;
    for (called, size_mb) in [("named".to_owned(), 65), (volume.id.to_string(), 66)] {
        let path = format!("/v1/volumes/{called}");
        assert_eq!(server.get(&path).await.json()["id"], volume.id.to_string());
        let grow = UpdateVolume { size_mb: Some(size_mb), size_gb: None };
        let grown = Answer::to(server.request(Method::PATCH, &path).json(&grow)).await;
        assert_eq!((grown.status, &grown.json()["size_mb"]), (200, &size_mb.into()));
    }
    assert!(disk(&server, &volume).exists());
    for (called, status) in [(volume.id.to_string(), 204), ("named".to_owned(), 404)] {
        let path = format!("/v1/volumes/{called}");
        assert_eq!(Answer::to(server.request(Method::DELETE, &path)).await.status, status);
    }
    assert!(!disk(&server, &volume).exists());
    let listed = server.get("/v1/volumes").await.json();
    assert_eq!(listed["items"], listed["volumes"]);
}

pub(super) async fn names_that_look_like_paths_are_refused(host: Host) {
    let server = host.server().await;
    let long = "x".repeat(65);
    for bad in ["", ".", "..", "../x", "a/b", "/etc", "a b", "é", "a\0", "~;", long.as_str()] {
        let request = server
            .request(Method::POST, "/v1/volumes")
            .json(&serde_json::json!({ "name": bad, "size_mb": 64 }));
        assert_eq!(Answer::to(request).await.refusal(), (400, "invalid_request".into()), "{bad:?}");
        let code = refused(&server, &with([written(bad)])).await;
        assert_eq!(code, ErrorCode::InvalidRequest, "{bad:?}");
        if !bad.is_empty() {
            let got = server.get(&format!("/v1/volumes/{}", escaped(bad))).await.status;
            assert!([400, 404].contains(&got), "{bad:?}: {got}");
        }
    }
    for good in ["..x", "-", "A.b_c-9"] {
        let volume = volume(&server, good).await;
        server.client().delete_volume(&volume.name).await.unwrap();
    }
}

pub(super) async fn a_disk_without_a_volume_takes_no_bytes(host: Host) {
    let server = host.server().await;
    volume(&server, "only").await;
    let disks = "vdb vdc vdd vde vdf vdg vdh vdi vdj vdk vdl vdm vdn vdo vdp vdq";
    let sandbox = host.sandbox_of(&small()).await;
    assert_eq!(swallowing(&sandbox, disks).await, "");
    sandbox.delete().await;
    // One of them is there, the others are not.
    let sandbox = host.sandbox_of(&with([written("only")])).await;
    let others = disks.strip_prefix("vdb").unwrap();
    assert_eq!(swallowing(&sandbox, others).await, "");
}

pub(super) async fn a_clone_is_a_volume_of_its_own(host: Host) {
    let server = host.server().await;
    let original = volume(&server, "original").await;
    let writer = host.sandbox_of(&with([written("original")])).await;
    writer.run("echo first > /mnt/original/file").await;
    let copy = |to: &str, size_mb| api::CreateVolume {
        size_mb,
        from_volume: Some("original".to_owned()),
        ..wanted(to, 0)
    };
    let client = server.client();
    let refusal = client.create_volume(&copy("too-early", None)).await.unwrap_err();
    assert_eq!(refusal.status(), Some(409), "{refusal:?}");
    writer.delete().await;
    let free = client.create_volume(&copy("while-free", None)).await.unwrap();
    assert_eq!(free.size_mb, SIZE_MB);
    let smaller = client.create_volume(&copy("smaller", Some(SIZE_MB - 1))).await.unwrap_err();
    assert_eq!(smaller.status(), Some(400), "{smaller:?}");
    let reader = host.sandbox_of(&with([read("original")])).await;
    client.create_volume(&copy("while-read", Some(2 * SIZE_MB))).await.unwrap();
    reader.delete().await;
    let sandbox = host.sandbox_of(&with([written("while-free"), read("while-read")])).await;
    let shown = sandbox
        .run("cat /mnt/while-*/file; echo second > /mnt/while-free/file; df -m --output=size /mnt/while-read | tail -1")
        .await;
    let lines: Vec<_> = shown.lines().collect();
    assert_eq!(lines[..2], ["first", "first"]);
    assert!(lines[2].trim().parse::<u64>().unwrap() > SIZE_MB, "{shown}");
    sandbox.delete().await;
    let reader = host.sandbox_of(&with([read("original")])).await;
    assert_eq!(reader.run("cat /mnt/original/file").await, "first\n");
    reader.delete().await;
    for volume in [&original, &free] {
        is_clean(&server, volume).await;
    }
}
