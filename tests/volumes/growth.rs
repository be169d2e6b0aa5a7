//! Sizes: what is allowed, what grows, what happens at the end of the room.

use api::{CreateSnapshot, CreateVolume, UpdateVolume};
use client::Method;
use serde_json::json;
use tests::{Answer, End, Host, Options, Server, command, small};

use super::{SIZE_MB, disk, is_clean, name, read, volume, wanted, with, written};

async fn grow(server: &Server, called: &str, size_mb: u64) -> Result<api::Volume, client::Error> {
    let update = UpdateVolume { size_mb: Some(size_mb), size_gb: None };
    server.client().update_volume(&name(called), &update).await
}

pub(super) async fn sizes_and_limits_are_checked(host: Host) {
    let arguments =
        ["--ready-machines=0", "--most-volumes=4", "--largest-volume=2048", "--volumes-total=3072"];
    let options =
        Options { arguments: arguments.map(str::to_owned).to_vec(), ..Options::default() };
    let server = Server::start_with(options).await;
    let post = async |body: serde_json::Value| {
        Answer::to(server.request(Method::POST, "/v1/volumes").json(&body)).await
    };
    for bad in [
        json!({ "name": "x", "size_mb": 0 }),
        json!({ "name": "x", "size_mb": 15 }),
        json!({ "name": "x", "size_mb": 2049 }),
        json!({ "name": "x", "size_gb": 3 }),
        json!({ "name": "x", "size_mb": 64, "size_gb": 1 }),
        json!({ "name": "x", "size_mb": -1 }),
        json!({ "size_mb": 64 }),
    ] {
        assert_eq!(post(bad.clone()).await.refusal(), (400, "invalid_request".into()), "{bad}");
    }
    let default = post(json!({ "name": "default" })).await;
    assert_eq!((default.status, &default.json()["size_mb"]), (201, &256.into()));
    assert_eq!(post(json!({ "name": "default" })).await.refusal(), (409, "conflict".into()));
    let gibibyte = post(json!({ "name": "gib", "size_gb": 1 })).await.json();
    assert_eq!((&gibibyte["size_mb"], &gibibyte["size_gb"]), (&1024.into(), &1.into()));
    assert_eq!((&gibibyte["state"], &gibibyte["kind"]), (&"available".into(), &"data".into()));
    // Over the sum of all sizes: each of the published clients by the status it knows.
    for (body, status) in [
        (json!({ "name": "x", "size_mb": 2048 }), 429),
        (json!({ "name": "x", "size_gb": 2 }), 403),
    ] {
        let refused = post(body).await;
        assert_eq!(refused.refusal(), (status, "quota_exceeded".into()));
        assert_eq!(refused.header("retry-after"), "");
    }
    let code = async |called: &str, size_mb| match grow(&server, called, size_mb).await {
        Ok(grown) => {
            assert_eq!(grown.size_mb, size_mb);
            200
        }
        Err(error) => error.status().unwrap(),
    };
    assert_eq!(code("gib", 1023).await, 400, "it never shrinks");
    assert_eq!(code("gib", 4096).await, 400);
    assert_eq!(code("gib", 1024).await, 200, "it is as large already");
    assert_eq!(code("no-such", 1024).await, 404);
    // Of two that would each fit, one does.
    post(json!({ "name": "third" })).await;
    let both = tokio::join!(code("default", 1152), code("third", 1152));
    assert!(both == (200, 429) || both == (429, 200), "{both:?}");
    post(json!({ "name": "fourth", "size_mb": 16 })).await;
    assert_eq!(post(json!({ "name": "fifth", "size_mb": 16 })).await.status, 429, "four of them");
    host.end(server).await;
}

pub(super) async fn nothing_is_kept_on_a_pool_without_room(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    volume(&server, "before").await;
    let sandbox = server.create(&with([written("before")])).await;
    let client = server.client();
    client.exec(&sandbox.id, &command("echo kept > /mnt/before/file")).await.unwrap();
    server.options_mut().arguments.push("--disk-reserve=1000000000".to_owned());
    server.restart(End::Killed).await;
    let client = server.client();
    let refusals = [
        client.create_sandbox(&small()).await.map(drop).unwrap_err(),
        client.create_volume(&wanted("after", 16)).await.map(drop).unwrap_err(),
        client
            .create_snapshot(&sandbox.id, &CreateSnapshot::default())
            .await
            .map(drop)
            .unwrap_err(),
        client.hibernate(&sandbox.id).await.unwrap_err(),
    ];
    for refusal in refusals {
        assert_eq!(refusal.status(), Some(507), "{refusal:?}");
    }
    // What is there goes on, and can be given back.
    let goes_on = command("cat /mnt/before/file; echo x >> /mnt/before/file");
    assert_eq!(client.exec(&sandbox.id, &goes_on).await.unwrap().stdout, "kept\n");
    client.delete_sandbox(&sandbox.id).await.unwrap();
    client.delete_volume(&name("before")).await.unwrap();
    assert!(client.volumes().await.unwrap().is_empty());
    host.end(server).await;
}

pub(super) async fn a_volume_grows_while_it_is_written(host: Host) {
    let server = host.server().await;
    let growing = volume(&server, "growing").await;
    assert_eq!(grow(&server, "growing", 96).await.unwrap().size_mb, 96, "while nobody has it");
    is_clean(&server, &growing).await;
    let sandbox = host.sandbox_of(&with([written("growing")])).await;
    let size = async || {
        let shown = sandbox.run("df -m --output=size /mnt/growing | tail -1").await;
        shown.trim().parse::<u64>().unwrap()
    };
    assert!((80..=96).contains(&size().await));
    sandbox.run("(while test ! -e /tmp/stop; do head -c 3000000 /dev/urandom > /mnt/growing/new; \
        mv /mnt/growing/new /mnt/growing/data; sha256sum < /mnt/growing/data > /tmp/sum; done) >/dev/null 2>&1 &").await;
    for size_mb in [200, 1500] {
        let grown = grow(&server, "growing", size_mb).await.unwrap();
        assert_eq!((grown.size_mb, grown.attached_to), (size_mb, Some(sandbox.id)));
        assert!(size().await > size_mb * 4 / 5, "{}", size().await);
    }
    sandbox.run("fallocate -l 1G /mnt/growing/large && rm /mnt/growing/large").await;
    let refusal = grow(&server, "growing", 1000).await.unwrap_err();
    assert_eq!(refusal.status(), Some(400));
    let sum = sandbox
        .run("touch /tmp/stop; wait; sleep 1; sync; sha256sum < /mnt/growing/data; cat /tmp/sum")
        .await;
    let sums: Vec<_> = sum.lines().collect();
    assert_eq!(sums[0], sums[1]);
    sandbox.delete().await;
    assert_eq!(disk(&server, &growing).metadata().unwrap().len(), 1500 << 20);
    is_clean(&server, &growing).await;
    let reader = host.sandbox_of(&with([read("growing")])).await;
    assert_eq!(reader.run("sha256sum < /mnt/growing/data").await.trim(), sums[0]);
}

pub(super) async fn a_full_volume_keeps_its_files_and_goes_on_when_it_grows(host: Host) {
    let server = host.server().await;
    let full = server.client().create_volume(&CreateVolume { ..wanted("full", 32) }).await.unwrap();
    let sandbox = host.sandbox_of(&with([written("full")])).await;
    let sum = sandbox
        .run("head -c 1000000 /dev/urandom > /mnt/full/kept; sync; sha256sum < /mnt/full/kept")
        .await;
    let filled = sandbox.exec(command("dd if=/dev/urandom of=/mnt/full/rest bs=4096; sync")).await;
    assert!(filled.stderr.contains("No space left on device"), "{filled:?}");
    let small = sandbox.exec(command("head -c 100000 /dev/zero > /mnt/full/more")).await;
    assert_ne!(small.exit_code, 0, "{small:?}");
    let rest = sandbox.run("sha256sum < /mnt/full/rest").await;
    grow(&server, "full", SIZE_MB).await.unwrap();
    sandbox.run("head -c 1000000 /dev/zero > /mnt/full/more").await;
    sandbox.delete().await;
    is_clean(&server, &full).await;
    let reader = host.sandbox_of(&with([read("full")])).await;
    let sums = reader.run("sha256sum < /mnt/full/kept; sha256sum < /mnt/full/rest").await;
    assert_eq!(sums, format!("{sum}{rest}"));
}
