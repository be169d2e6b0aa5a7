//! Files of any size in parts, ranges of large ones, and what happens to files as it happens, in real guests.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{BeginUpload, CompleteUpload, UploadParts};
use bytes::Bytes;
use client::{Client, Method};
use sha2::{Digest, Sha256};
use tests::{Answer, End, Host, Sandbox, Server, patterned, small, suite, until};

suite! {
    an_upload_goes_on_after_its_server_was_killed,
    a_large_upload_leaves_memory_flat,
    two_uploads_leave_one_whole_file,
    a_fork_goes_on_with_its_own_copy_of_an_upload,
    a_range_of_a_file_of_many_gibibytes_is_answered_exactly,
    what_happens_to_files_is_told;
    soak: a_gibibyte_in_parts_leaves_memory_flat,
}

const PART: usize = 4 << 20;

fn digest(bytes: &[u8]) -> String {
    format!("{:x}", Sha256::digest(bytes))
}

fn begin(path: &str, size: usize) -> BeginUpload {
    BeginUpload {
        path: Some(path.to_owned()),
        size: Some(size as u64),
        part_size: Some(PART as u64),
        ..BeginUpload::default()
    }
}

async fn put(client: &Client, id: &api::SandboxId, upload: &str, number: u32, part: &[u8]) {
    let part = Bytes::copy_from_slice(part);
    let digest = digest(&part);
    client.write_part(id, upload, number, part, &digest).await.unwrap();
}

async fn an_upload_goes_on_after_its_server_was_killed(host: Host) {
    let mut server = Server::start().await;
    let _room = host.room(1).await;
    let id = server.create(&small()).await.id;
    let whole = patterned(2 * PART + 5);
    let parts: Vec<_> = whole.chunks(PART).collect();
    let request = begin("/work/deep/file", whole.len());
    let client = server.client().clone();
    let upload = client.begin_upload(&id, &request, Some("the-same")).await.unwrap().id;
    put(&client, &id, &upload, 3, parts[2]).await;
    server.restart(End::Killed).await;
    let client = server.client().clone();
    // Whoever does not know its id any longer finds it by the key.
    assert_eq!(client.begin_upload(&id, &request, Some("the-same")).await.unwrap().id, upload);
    let there = client.upload(&id, &upload).await.unwrap();
    assert_eq!(there.parts, [UploadParts { first: 3, last: 3 }]);
    put(&client, &id, &upload, 1, parts[0]).await;
    put(&client, &id, &upload, 2, parts[1]).await;
    let complete = CompleteUpload { size: Some(whole.len() as u64), sha256: Some(digest(&whole)) };
    client.complete_upload(&id, &upload, &complete).await.unwrap();
    let read = client.read_file(&id, "/work/deep/file").await.unwrap().bytes().await.unwrap();
    assert!(read == whole);
    let names = client.list_directory(&id, "/work/deep").await.unwrap().entries;
    assert_eq!(names.len(), 1);
    host.end(server).await;
}

async fn large(host: &Host, mebibytes: usize) {
    let sandbox = host.sandbox().await;
    let (server, client) = (host.server().await, sandbox.client());
    let part = patterned(PART);
    // Warm: what a first transfer allocates for good is no growth.
    sandbox.write("/work/warm", part.clone()).await;
    let before = (server.memory_bytes(), sandbox.agent_memory_bytes().await);
    let count = (mebibytes << 20) / PART;
    let wanted = begin("/work/large", mebibytes << 20);
    let upload = client.begin_upload(&sandbox.id, &wanted, None).await.unwrap().id;
    let mut most = before.0;
    for number in 1..=u32::try_from(count).unwrap() {
        put(client, &sandbox.id, &upload, number, &part).await;
        most = most.max(server.memory_bytes());
    }
    client.complete_upload(&sandbox.id, &upload, &CompleteUpload::default()).await.unwrap();
    let mut expected = Sha256::new();
    (0..count).for_each(|_| expected.update(&part));
    let said = sandbox.run("sha256sum < /work/large").await;
    assert_eq!(said, format!("{:x}  -\n", expected.finalize()));
    assert!(most < before.0 + (48 << 20), "the server grew from {} to {most}", before.0);
    let agent = sandbox.agent_memory_bytes().await;
    assert!(agent < before.1 + (16 << 20), "the agent grew from {} to {agent}", before.1);
}

async fn a_large_upload_leaves_memory_flat(host: Host) {
    large(&host, 96).await;
}

async fn a_gibibyte_in_parts_leaves_memory_flat(host: Host) {
    large(&host, 1024).await;
}

async fn two_uploads_leave_one_whole_file(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let contents = [vec![b'a'; PART + 7], vec![b'b'; PART + 9]];
    let one = async |content: &[u8]| {
        let wanted = begin("/srv/job/x", content.len());
        let upload = client.begin_upload(&sandbox.id, &wanted, None).await.unwrap().id;
        for (number, part) in (1..).zip(content.chunks(PART)) {
            put(client, &sandbox.id, &upload, number, part).await;
        }
        client.complete_upload(&sandbox.id, &upload, &CompleteUpload::default()).await.unwrap();
    };
    tokio::join!(one(&contents[0]), one(&contents[1]));
    let left = sandbox.read("/srv/job/x").await;
    assert!(contents.contains(&left), "a mix of {} bytes is left", left.len());
    assert_eq!(sandbox.names("/srv/job").await, ["x"]);
}

async fn a_fork_goes_on_with_its_own_copy_of_an_upload(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let whole = patterned(PART + 1);
    let wanted = begin("/work/file", whole.len());
    let upload = client.begin_upload(&sandbox.id, &wanted, None).await.unwrap().id;
    put(client, &sandbox.id, &upload, 1, &whole[..PART]).await;
    let _room = host.room(1).await;
    let forked = Answer::to(sandbox.request(Method::POST, "/fork")).await.json();
    let child: api::SandboxId = forked["sandbox"]["id"].as_str().unwrap().parse().unwrap();
    for (id, last) in [(&sandbox.id, b"x"), (&child, b"y")] {
        put(client, id, &upload, 2, last).await;
        client.complete_upload(id, &upload, &CompleteUpload::default()).await.unwrap();
        let read = client.read_file(id, "/work/file").await.unwrap().bytes().await.unwrap();
        assert!(read[..PART] == whole[..PART] && read[PART..] == *last, "{id}");
    }
    client.delete_sandbox(&child).await.unwrap();
}

async fn a_range_of_a_file_of_many_gibibytes_is_answered_exactly(host: Host) {
    let sandbox = host.sandbox().await;
    // A hole, with something far behind what 32 bits can count.
    sandbox.run("truncate -s 6G /work/huge && printf needle | dd of=/work/huge bs=1 seek=5000000000 conv=notrunc status=none").await;
    for (range, content) in
        [("bytes=5000000000-5000000005", &b"needle"[..]), ("bytes=-3", &b"\0\0\0"[..])]
    {
        let request = sandbox.request(Method::GET, "/fs?path=/work/huge").header("range", range);
        let part = Answer::to(request).await;
        assert_eq!((part.status, &part.body[..]), (206, content), "{range}");
        assert!(part.header("content-range").ends_with("/6442450944"), "{part:?}");
    }
    let beyond = sandbox.request(Method::GET, "/fs?path=/work/huge");
    let beyond = Answer::to(beyond.header("range", "bytes=6442450944-")).await;
    assert_eq!(beyond.refusal(), (416, "range_not_satisfiable".to_owned()));
}

/// Reads events until one is there.
async fn seen(response: &mut client::Response, so_far: &mut String, what: &str) {
    until(what, Duration::from_secs(60), async || {
        if so_far.contains(what) {
            return Some(());
        }
        let chunk = response.chunk().await.unwrap().expect("the stream goes on");
        so_far.push_str(&String::from_utf8_lossy(&chunk));
        None
    })
    .await;
}

async fn what_happens_to_files_is_told(host: Host) {
    let sandbox: Sandbox = host.sandbox().await;
    sandbox.run("mkdir -p /work/watched").await;
    let request = sandbox.request(Method::GET, "/fs/watch?path=/work/watched&recursive=true");
    let mut response = request.send().await.unwrap();
    let mut so_far = String::new();
    seen(&mut response, &mut so_far, "event: watching\n").await;
    sandbox.run("mkdir /work/watched/new && echo 1 > /work/watched/new/file").await;
    seen(&mut response, &mut so_far, "\"path\":\"/work/watched/new/file\"").await;
    sandbox.write("/work/watched/written", "1").await;
    seen(&mut response, &mut so_far, "\"path\":\"/work/watched/written\"").await;
    sandbox.run("mv /work/watched/new /work/watched/moved && rm -r /work/watched").await;
    seen(&mut response, &mut so_far, "\"from\":\"/work/watched/new\"").await;
    seen(&mut response, &mut so_far, "event: gone\n").await;
}
