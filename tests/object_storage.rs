//! Object storage by signed addresses, from inside a real guest: a server that speaks S3, on this host.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use client::Method;
use serde_json::{Value, json};
use tests::{
    Answer, Host, ObjectStorage, Options, Sandbox, Server, address_of_the_host, command, patterned,
    pause, small, suite,
};

suite! {
    files_go_to_an_object_storage_and_come_back_by_signed_addresses;
    soak:
}

async fn post(sandbox: &Sandbox, route: &str, body: &Value) -> Answer {
    Answer::to(sandbox.request(Method::POST, route).json(body)).await
}

/// The part of an address that nobody else may learn.
fn credential(url: &str) -> &str {
    url.split("X-Amz-Signature=").nth(1).unwrap().split('&').next().unwrap()
}

async fn files_go_to_an_object_storage_and_come_back_by_signed_addresses(host: Host) {
    let address = address_of_the_host();
    let mut storage = ObjectStorage::start(address).await;
    let options = Options {
        arguments: vec!["--egress-allow".to_owned(), format!("{address}/32:{}", storage.port)],
        ..Options::default()
    };
    let server = Server::start_with(options).await;
    let sandbox = host.sandbox_on(&server, &small()).await;

    by_commands(&sandbox, &mut storage).await;
    by_the_agent(&sandbox, &mut storage, &server).await;

    drop(sandbox);
    host.end(server).await;
}

/// As programs in a sandbox do it.
async fn by_commands(sandbox: &Sandbox, storage: &mut ObjectStorage) {
    let content = patterned(3_000_000);
    sandbox.write("/root/sent", content.clone()).await;
    let (put, get) =
        (storage.signed("PUT", "curl", 3600).await, storage.signed("GET", "curl", 3600).await);
    sandbox.run(&format!("curl --silent --show-error --fail -T /root/sent '{put}'")).await;
    sandbox.run(&format!("curl --silent --show-error --fail -o /root/back '{get}'")).await;
    sandbox.run("cmp /root/sent /root/back").await;
    let python = format!(
        "import urllib.request; open('/root/again', 'wb').write(urllib.request.urlopen('{get}').read())"
    );
    sandbox.write("/root/get.py", python).await;
    sandbox.run("python3 /root/get.py && cmp /root/sent /root/again").await;
    let expired = storage.signed("GET", "curl", 1).await;
    pause(Duration::from_secs(3)).await;
    let failed =
        sandbox.exec(command(format!("curl --silent --fail -o /dev/null '{expired}'"))).await;
    assert_eq!(failed.exit_code, 22, "{failed:?}");
}

/// Without a byte through the server.
async fn by_the_agent(sandbox: &Sandbox, storage: &mut ObjectStorage, server: &Server) {
    let digest = sandbox.run("sha256sum < /root/sent").await;
    let digest = digest.split_whitespace().next().unwrap();
    let (put, get) =
        (storage.signed("PUT", "agent", 3600).await, storage.signed("GET", "agent", 3600).await);
    let sent = post(sandbox, "/fs/export", &json!({"path": "/root/sent", "url": put})).await;
    assert_eq!(sent.status, 200, "{}", sent.text());
    assert_eq!(
        (&sent.json()["bytes"], &sent.json()["sha256"]),
        (&json!(3_000_000), &json!(digest))
    );
    let fetch = |path: &str, sha256: &str| json!({"path": path, "url": get, "sha256": sha256, "mode": "0600"});
    let got = post(sandbox, "/fs/import", &fetch("/work/new/file", digest)).await;
    assert_eq!(got.status, 200, "{}", got.text());
    sandbox.run("cmp /root/sent /work/new/file && test $(stat -c %a /work/new/file) = 600").await;

    let wrong = post(sandbox, "/fs/import", &fetch("/root/wrong", &"0".repeat(64))).await;
    assert_eq!(wrong.refusal(), (412, "precondition_failed".to_owned()));
    let expired = storage.signed("GET", "agent", 1).await;
    pause(Duration::from_secs(3)).await;
    let late = post(sandbox, "/fs/import", &json!({"path": "/root/late", "url": expired})).await;
    assert_eq!(late.refusal(), (400, "invalid_request".to_owned()));
    assert_eq!(late.json()["upstream_status"], 403, "{}", late.text());
    let missing = storage.signed("GET", "nothing", 3600).await;
    let missing =
        post(sandbox, "/fs/import", &json!({"path": "/root/missing", "url": missing})).await;
    assert_eq!(missing.json()["upstream_code"], "NoSuchKey", "{}", missing.text());
    let nothing = post(sandbox, "/fs/export", &json!({"path": "/root/nothing", "url": put})).await;
    assert_eq!(nothing.refusal(), (404, "not_found".to_owned()));
    sandbox.run("test ! -e /root/wrong -a ! -e /root/late -a ! -e /root/missing").await;

    for url in [&put, &get, &expired] {
        assert!(!server.log().contains(credential(url)));
        for answer in [&sent, &got, &late] {
            assert!(!answer.text().contains(credential(url)));
        }
    }
}
