//! A sandbox's life: created as asked, found again, ended at any moment, gone without a trace.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, time::Duration};

use api::{CreateSandbox, ExecRequest, SandboxId, SandboxStatus};
use client::{Method, SandboxFilter};
use serde_json::{Value, json};
use tests::{Answer, Footprint, Host, Server, command, small, suite, until};
use tokio::time::Instant;

suite! {
    a_size_that_nobody_used_is_baked_once,
    a_small_disk_is_small_and_tells_when_it_is_full,
    ten_creates_and_deletes_leave_nothing,
    a_create_answers_with_the_whole_sandbox,
    a_create_without_a_body_is_the_default_sandbox,
    a_create_that_asks_for_the_impossible_is_refused,
    cpu_memory_and_disk_are_as_asked,
    a_list_is_filtered_and_paged,
    a_delete_while_creating_leaves_nothing,
    a_create_whose_client_goes_away_is_no_orphan,
    a_second_delete_finds_nothing,
    deletes_at_once_all_end,
    nothing_works_on_a_sandbox_that_is_gone,
    a_guest_that_powers_off_is_stopped,
    a_guest_that_reboots_is_stopped;
    soak: a_hundred_creates_and_deletes_leave_nothing,
}

async fn a_create_answers_with_the_whole_sandbox(host: Host) {
    let metadata = BTreeMap::from([
        ("job".to_owned(), "é 7".to_owned()),
        (String::from("x.y"), String::new()),
    ]);
    let sandbox = host
        .sandbox_of(&CreateSandbox {
            metadata: Some(metadata.clone()),
            ttl_seconds: Some(900),
            ..small()
        })
        .await;
    let created = &sandbox.created;
    assert_eq!((created.template.as_str(), created.cpu, created.memory_mb), ("base", 1, 1024));
    assert_eq!(
        (created.status, created.ttl_seconds, created.persistent),
        (SandboxStatus::Running, Some(900), false)
    );
    assert_eq!(created.metadata, metadata);
    assert!(created.boot_ms > 0 && created.error.is_none(), "{created:?}");
    assert!(["kvm", "tcg"].contains(&created.accelerator.as_str()), "{created:?}");
    assert!(created.guest_ip.parse::<std::net::Ipv4Addr>().is_ok(), "{created:?}");
    let left = (created.expires_at.unwrap() - time::OffsetDateTime::now_utc()).whole_seconds();
    assert!((800..=900).contains(&left), "{left}");
    // As the clients read it: numbers are numbers, times are text, nothing is null that must not be.
    let shown = sandbox.get("").await.json();
    for number in ["cpu", "memory_mb", "disk_mb", "boot_ms", "ttl_seconds"] {
        assert!(shown[number].is_u64(), "{number} in {shown}");
    }
    for text in [
        "id",
        "template",
        "status",
        "guest_ip",
        "created_at",
        "expires_at",
        "boot_mode",
        "accelerator",
    ] {
        assert!(shown[text].is_string(), "{text} in {shown}");
    }
    assert!(shown["created_at"].as_str().unwrap().ends_with('Z'), "{shown}");
    assert_eq!(
        (&shown["status"], &shown["boot_mode"], &shown["volumes"]),
        (&json!("running"), &json!("snapshot"), &json!([]))
    );
    assert_eq!(shown["id"], json!(sandbox.id.to_string()));
}

async fn a_create_without_a_body_is_the_default_sandbox(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    // The template may still have to be baked for its own size.
    let first = server.create(&CreateSandbox::default()).await;
    let created = Answer::to(
        server.request(Method::POST, "/v1/sandboxes").header("content-type", "text/plain"),
    )
    .await;
    assert_eq!(created.status, 201, "{created:?}");
    let created = created.json();
    let size = [&created["cpu"], &created["memory_mb"], &created["disk_mb"]];
    assert_eq!(
        (&created["template"], size),
        (&json!("base"), [&json!(2), &json!(2048), &json!(10_240)])
    );
    for id in [first.id, created["id"].as_str().unwrap().parse().unwrap()] {
        server.client().delete_sandbox(&id).await.unwrap();
    }
}

async fn a_create_that_asks_for_the_impossible_is_refused(host: Host) {
    let server = host.server().await;
    let text = "x".repeat(5000);
    let bad = [
        (json!({"network": "lan"}), 400, "network"),
        (json!({"network": {"egress": "lan"}}), 400, "network"),
        (json!({"network": {"allow": ["10.0.0.0/8"]}}), 400, "network.allow[0]"),
        (json!({"cpu": 0}), 400, "cpu"),
        (json!({"cpu": -1}), 400, "cpu"),
        (json!({"cpu": 1.5}), 400, "cpu"),
        (json!({"cpu": "two"}), 400, "cpu"),
        (json!({"cpu": 4096}), 400, "cpu"),
        (json!({"memory_mb": 0}), 400, "memory_mb"),
        (json!({"memory_mb": 16}), 400, "memory_mb"),
        (json!({"memory_mb": 1_000_000_000}), 400, "memory_mb"),
        (json!({"memory_mb": "1g"}), 400, "memory_mb"),
        (json!({"disk_mb": 0}), 400, "disk_mb"),
        (json!({"disk_mb": 10}), 400, "disk_mb"),
        (json!({"disk_mb": 1_000_000_000_000u64}), 400, "disk_mb"),
        (json!({"ttl_seconds": 0}), 400, "ttl_seconds"),
        (json!({"ttl_seconds": "1h"}), 400, "ttl_seconds"),
        (json!({"ttl_seconds": 60, "persistent": true}), 400, "ttl_seconds"),
        (json!({"persistent": "yes"}), 400, "persistent"),
        (json!({"metadata": ["a"]}), 400, "metadata"),
        (json!({"metadata": {"a": 1}}), 400, "metadata"),
        (json!({"metadata": {"": "x"}}), 400, "metadata"),
        (json!({"metadata": {"a": text}}), 400, "metadata"),
        (json!({"env": {"A=B": "x"}}), 400, "env"),
        (json!({"env": {"": "x"}}), 400, "env"),
        (json!({"env": {"A": "\u{0}"}}), 400, "env"),
        (json!({"env": {"A": null}}), 400, "env"),
        (json!({"volumes": "data"}), 400, "volumes"),
        (json!({"volumes": [{"name": "no-such-volume"}]}), 404, "volume"),
        (json!({"template": 7}), 400, "template"),
        (json!({"template": "../up"}), 400, "template"),
        (json!({"template": "a/b"}), 400, "template"),
        (json!({"template": "no-such-template"}), 404, "template"),
        (json!({"from_snapshot": "00000000-0000-4000-8000-000000000000"}), 404, "snapshot"),
        (json!([]), 400, "body"),
        (json!("base"), 400, "body"),
    ];
    for (body, status, word) in bad {
        let refused = Answer::to(server.request(Method::POST, "/v1/sandboxes").json(&body)).await;
        let code = if status == 404 { "not_found" } else { "invalid_request" };
        assert_eq!(refused.refusal(), (status, code.to_owned()), "{body}");
        // Whoever reads it must know which field it is about.
        assert!(refused.text().contains(word), "{body}: {}", refused.text());
    }
    for body in ["{", "{\"cpu\": 1} {}", "cpu=1"] {
        let refused = Answer::to(server.request(Method::POST, "/v1/sandboxes").body(body)).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{body}");
    }
    let huge = Answer::to(
        server
            .request(Method::POST, "/v1/sandboxes")
            .body(format!("{{\"x\": \"{}\"}}", "y".repeat(4 << 20))),
    )
    .await;
    assert_eq!(huge.refusal(), (413, "too_large".to_owned()));
}

async fn cpu_memory_and_disk_are_as_asked(host: Host) {
    let shown = "nproc; awk '/MemTotal/ { print $2 }' /proc/meminfo; df -BM --output=size / | tail -1 | tr -dc 0-9";
    // The second one's disk is larger than the template's: grown before the first command.
    for (cpu, memory_mb, disk_mb) in [(1, 1024, 10_240), (2, 2048, 14_000)] {
        let request = CreateSandbox {
            cpu: Some(cpu),
            memory_mb: Some(memory_mb),
            disk_mb: Some(disk_mb),
            ..small()
        };
        let sandbox = host.sandbox_of(&request).await;
        assert_eq!(
            (sandbox.created.cpu, sandbox.created.memory_mb, sandbox.created.disk_mb),
            (cpu, memory_mb, disk_mb)
        );
        let figures = sandbox.run(shown).await;
        let figures: Vec<u64> = figures.lines().map(|line| line.trim().parse().unwrap()).collect();
        assert_eq!(figures[0], u64::from(cpu));
        let memory = figures[1] / 1024;
        assert!(
            memory <= memory_mb && memory > memory_mb * 85 / 100,
            "{memory} of {memory_mb} MiB"
        );
        // Less what ext4 takes for itself.
        assert!(
            figures[2] <= disk_mb && figures[2] > disk_mb * 92 / 100,
            "{} of {disk_mb} MiB",
            figures[2]
        );
    }
}

async fn a_size_that_nobody_used_is_baked_once(host: Host) {
    let request = CreateSandbox { cpu: Some(1), memory_mb: Some(640), ..small() };
    let sandbox = host.sandbox_of(&request).await;
    let memory: u64 =
        sandbox.run("awk '/MemTotal/ { print $2 }' /proc/meminfo").await.trim().parse().unwrap();
    assert!((520..=640).contains(&(memory / 1024)), "{memory} KiB");
    drop(sandbox);
    let _room = host.room(1).await;
    let server = host.server().await;
    let start = Instant::now();
    let again = server.client().create_sandbox(&request).await.expect("no bake to wait for");
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    server.client().delete_sandbox(&again.id).await.unwrap();
}

async fn a_small_disk_is_small_and_tells_when_it_is_full(host: Host) {
    let server = host.server().await;
    let too_small =
        server.client().create_sandbox(&CreateSandbox { disk_mb: Some(1024), ..small() }).await;
    let disk_mb = match too_small {
        // The least is told; it depends on the template.
        Err(error) if error.status() == Some(400) => {
            let text = error.to_string();
            text.split(|c: char| !c.is_ascii_digit())
                .filter_map(|word| word.parse::<u64>().ok())
                .find(|least| *least > 1024)
                .unwrap_or_else(|| panic!("{text}"))
        }
        Err(error) if error.may_retry_after().is_some() => 1024,
        Ok(sandbox) => {
            server.client().delete_sandbox(&sandbox.id).await.unwrap();
            1024
        }
        Err(error) => panic!("{error:?}"),
    };
    let sandbox = host.sandbox_of(&CreateSandbox { disk_mb: Some(disk_mb), ..small() }).await;
    assert_eq!(sandbox.created.disk_mb, disk_mb);
    let size: u64 =
        sandbox.run("df -BM --output=size / | tail -1 | tr -dc 0-9").await.parse().unwrap();
    assert!(size <= disk_mb && size > disk_mb * 85 / 100, "{size} of {disk_mb} MiB");
    sandbox.write("/srv/job/kept", "old").await;
    let filled = sandbox.exec(command("dd if=/dev/zero of=/var/tmp/fill bs=1M; sync")).await;
    assert!(filled.stderr.contains("No space left"), "{filled:?}");
    let refused = sandbox.put("/srv/job/kept", vec![b'n'; 4 << 20]).await;
    assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()));
    assert_eq!(sandbox.read("/srv/job/kept").await, b"old");
    assert_eq!(sandbox.names("/srv/job").await, ["kept"]);
    // The sandbox is as alive as before, and has room again when some is made.
    sandbox.run("rm /var/tmp/fill").await;
    sandbox.write("/srv/job/kept", "new").await;
}

async fn a_list_is_filtered_and_paged(host: Host) {
    let _room = host.room(3).await;
    let server = host.server().await;
    let client = server.client();
    let mut made = Vec::new();
    for number in 0..3 {
        let metadata = BTreeMap::from([
            ("list".to_owned(), "paged".to_owned()),
            ("number".to_owned(), format!("{number} é&")),
        ]);
        made.push(server.create(&CreateSandbox { metadata: Some(metadata), ..small() }).await.id);
    }
    made.reverse();
    let ids = |page: &Answer| {
        page.json()
            .as_array()
            .unwrap()
            .iter()
            .map(|sandbox| sandbox["id"].as_str().unwrap().parse::<SandboxId>().unwrap())
            .collect::<Vec<_>>()
    };
    let all = server.get("/v1/sandboxes?metadata.list=paged").await;
    assert_eq!(ids(&all), made, "newest first");
    assert_eq!(all.header("x-next-cursor"), "");
    let one = server.get("/v1/sandboxes?metadata.list=paged&metadata.number=1+%C3%A9%26").await;
    assert_eq!(ids(&one), [made[1]]);
    assert_eq!(ids(&server.get("/v1/sandboxes?metadata.list=other").await), []);
    assert_eq!(ids(&server.get("/v1/sandboxes?metadata.list=paged&status=stopped").await), []);
    assert_eq!(ids(&server.get("/v1/sandboxes?metadata.list=paged&status=running").await), made);
    let (mut paged, mut cursor) = (Vec::new(), String::new());
    loop {
        let page =
            server.get(&format!("/v1/sandboxes?metadata.list=paged&limit=2&cursor={cursor}")).await;
        let found = ids(&page);
        assert!((1..=2).contains(&found.len()));
        paged.extend(found);
        page.header("x-next-cursor").clone_into(&mut cursor);
        if cursor.is_empty() {
            break;
        }
        if paged.len() == 2 {
            // A page does not shift because its first one is gone.
            client.delete_sandbox(&made[0]).await.unwrap();
        }
    }
    assert_eq!(paged, made);
    for query in [
        "status=happy",
        "limit=0",
        "limit=-1",
        "limit=many",
        "cursor=nonsense",
        "cursor=1.x",
        "limit=1&limit=2",
    ] {
        assert_eq!(
            server.get(&format!("/v1/sandboxes?{query}")).await.refusal(),
            (400, "invalid_request".to_owned()),
            "{query}"
        );
    }
    for id in &made[1..] {
        client.delete_sandbox(id).await.unwrap();
    }
}

async fn a_delete_while_creating_leaves_nothing(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let client = server.client();
    for round in 0..6 {
        let metadata = BTreeMap::from([("raced".to_owned(), round.to_string())]);
        let request = CreateSandbox { metadata: Some(metadata), ..small() };
        let find = async || {
            let filter = SandboxFilter {
                metadata: vec![("raced".to_owned(), round.to_string())],
                ..SandboxFilter::default()
            };
            client.sandboxes(&filter).await.unwrap().pop()
        };
        let racing = async {
            let seen = until("it is listed", Duration::from_secs(30), find).await;
            client.delete_sandbox(&seen.id).await.unwrap_or_else(|error| panic!("{error:?}"));
            seen
        };
        let (created, seen) = tokio::join!(client.create_sandbox(&request), racing);
        match created {
            // It was quicker than the delete.
            Ok(created) => assert_eq!(created.id, seen.id),
            Err(error) => {
                assert!([404, 409, 410, 503].contains(&error.status().unwrap()), "{error:?}")
            }
        }
        assert_eq!(client.sandbox(&seen.id).await.unwrap_err().status(), Some(404));
        assert!(find().await.is_none());
    }
}

async fn a_create_whose_client_goes_away_is_no_orphan(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let metadata = BTreeMap::from([("left".to_owned(), "alone".to_owned())]);
    let request = CreateSandbox { metadata: Some(metadata), ttl_seconds: Some(2), ..small() };
    let impatient =
        tokio::time::timeout(Duration::from_millis(30), server.client().create_sandbox(&request))
            .await;
    assert!(impatient.is_err(), "a create takes longer than this");
    let filter = SandboxFilter {
        metadata: vec![("left".to_owned(), "alone".to_owned())],
        ..SandboxFilter::default()
    };
    // Finished or taken back; either way it does not stay.
    until("it is gone", Duration::from_secs(60), async || {
        server.client().sandboxes(&filter).await.unwrap().is_empty().then_some(())
    })
    .await;
}

async fn a_second_delete_finds_nothing(host: Host) {
    let sandbox = host.sandbox().await;
    let delete = async || Answer::to(sandbox.request(Method::DELETE, "")).await;
    let first = delete().await;
    assert_eq!((first.status, first.body.len()), (204, 0));
    assert_eq!(delete().await.refusal(), (404, "not_found".to_owned()));
}

async fn deletes_at_once_all_end(host: Host) {
    let sandbox = host.sandbox().await;
    let deletes = (0..5).map(|_| Answer::to(sandbox.request(Method::DELETE, "")));
    let statuses: Vec<_> =
        futures::future::join_all(deletes).await.into_iter().map(|answer| answer.status).collect();
    assert!(
        statuses.contains(&204) && statuses.iter().all(|status| [204, 404].contains(status)),
        "{statuses:?}"
    );
    assert_eq!(sandbox.get("").await.status, 404);
}

/// Every route of one sandbox, from the server's own description.
async fn routes_of_a_sandbox(server: &Server, id: &str) -> Vec<(Method, String)> {
    let document = server.get("/openapi.json").await.json();
    let mut routes = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let is_of_one =
            ["/v1/sandboxes/{id}", "/v1/machines/{id}"].iter().any(|one| path.starts_with(one));
        if !is_of_one {
            continue;
        }
        for method in ["get", "put", "post", "delete", "patch"]
            .into_iter()
            .filter(|method| item.get(method).is_some())
        {
            let path = path
                .replace("{id}", id)
                .replace("{exec_id}", "e")
                .replace("{session_id}", "s")
                .replace("{upload}", "u")
                .replace("{number}", "1");
            let query = if path.contains("/fs") { "?path=/etc/hostname" } else { "" };
            routes.push((method.to_uppercase().parse().unwrap(), format!("{path}{query}")));
        }
    }
    assert!(routes.len() >= 12, "{routes:?}");
    routes
}

async fn all_are_404(server: &Server, id: &str) {
    for (method, route) in routes_of_a_sandbox(server, id).await {
        let body = if route.ends_with("/lifecycle") {
            json!({"ttl_seconds": 60})
        } else if route.ends_with("/network") {
            json!({"egress": "none"})
        } else if route.ends_with("/execs") {
            json!({"exec_id": "e", "script": "true"})
        } else if route.ends_with("/ports") || route.ends_with("/preview-token") {
            json!({"port": 80})
        } else if route.contains("/volume/") {
            json!({"volume_id": "any"})
        } else if route.contains("/fs/move") {
            json!({"from": "/a", "to": "/b"})
        } else if route.contains("/fs/import") || route.contains("/fs/export") {
            json!({"url": "https://store.example/a", "path": "/a"})
        } else if route.contains("/fs/") {
            json!({"path": "/a"})
        } else {
            json!({"cmd": "true", "code": "1"})
        };
        let request = server.request(method.clone(), &route);
        let request = if method == Method::GET || method == Method::DELETE {
            request
        } else {
            request.json(&body)
        };
        assert_eq!(
            Answer::to(request).await.refusal(),
            (404, "not_found".to_owned()),
            "{method} {route}"
        );
    }
}

async fn nothing_works_on_a_sandbox_that_is_gone(host: Host) {
    let sandbox = host.sandbox().await;
    let id = sandbox.id.to_string();
    sandbox.delete().await;
    let server = host.server().await;
    for unknown in
        [id.as_str(), "00000000-0000-4000-8000-000000000000", "not-an-id", "..%2f..", "%00"]
    {
        all_are_404(&server, unknown).await;
    }
}

/// The system call itself: any program of root's can make it.
async fn ends_itself(host: Host, how: &str) {
    let sandbox = host.sandbox().await;
    sandbox.write("/root/kept", "on disk").await;
    let cmd =
        format!("sync; python3 -c 'import ctypes; ctypes.CDLL(None).reboot({how})'; sleep 30");
    let request = ExecRequest { timeout_seconds: Some(26.0), ..command(cmd) };
    let start = Instant::now();
    let ended = sandbox.client().exec(&sandbox.id, &request).await;
    assert!(
        ended.is_err() && start.elapsed() < Duration::from_secs(25),
        "{ended:?} after {:?}",
        start.elapsed()
    );
    until("it is stopped", Duration::from_secs(20), async || {
        (sandbox.get("").await.json()["status"] == "stopped").then_some(())
    })
    .await;
    let refused = Answer::to(sandbox.request(Method::POST, "/exec").json(&command("true"))).await;
    assert_eq!(refused.refusal(), (409, "conflict".to_owned()));
    assert!(refused.text().contains("stopped"), "{}", refused.text());
    assert_eq!(sandbox.get("/fs?path=/root/kept").await.refusal(), (409, "conflict".to_owned()));
    let server = host.server().await;
    let stopped =
        SandboxFilter { status: Some(SandboxStatus::Stopped), ..SandboxFilter::default() };
    assert!(
        server
            .client()
            .sandboxes(&stopped)
            .await
            .unwrap()
            .iter()
            .any(|other| other.id == sandbox.id)
    );
    let directory = server.data().join("sandboxes").join(sandbox.id.to_string());
    assert!(directory.exists(), "the disk is kept");
    assert_eq!(Answer::to(sandbox.request(Method::DELETE, "")).await.status, 204);
    assert!(!directory.exists());
}

async fn a_guest_that_powers_off_is_stopped(host: Host) {
    ends_itself(host, "0x4321fedc").await;
}

async fn a_guest_that_reboots_is_stopped(host: Host) {
    ends_itself(host, "0x01234567").await;
}

/// Ends in every way that there is, some of them failures.
async fn creates_and_deletes(count: usize) {
    let server = Server::start().await;
    let client = server.client();
    // The pool of machines that stand ready is full before and after.
    let mut warm = Vec::new();
    for _ in 0..2 {
        warm.push(server.create(&small()).await.id);
    }
    for id in warm {
        client.delete_sandbox(&id).await.unwrap();
    }
    let settled = async || {
        let mut last = (Instant::now(), Footprint::of(server.data()).counts());
        until("the server is at rest", Duration::from_secs(60), async || {
            let now = Footprint::of(server.data()).counts();
            if now != last.1 {
                last = (Instant::now(), now);
            }
            (last.0.elapsed() > Duration::from_secs(3)).then_some(now)
        })
        .await
    };
    let (before, files_before) = (settled().await, server.open_files());
    for round in 0..count {
        match round % 5 {
            // Failing: what is asked for is not to be had.
            1 => {
                client
                    .create_sandbox(&CreateSandbox {
                        template: Some("no-such-template".to_owned()),
                        ..small()
                    })
                    .await
                    .unwrap_err();
            }
            // Left by its client in the middle.
            2 => {
                let request = CreateSandbox { ttl_seconds: Some(1), ..small() };
                let _ = tokio::time::timeout(
                    Duration::from_millis(60),
                    client.create_sandbox(&request),
                )
                .await;
            }
            // Its machine dies.
            3 => {
                let sandbox = server.create(&small()).await;
                rustix::process::kill_process(
                    server.machine_of(&sandbox.id),
                    rustix::process::Signal::KILL,
                )
                .unwrap();
                client.delete_sandbox(&sandbox.id).await.unwrap();
            }
            _ => {
                let sandbox = server.create(&small()).await;
                client
                    .exec(&sandbox.id, &command("echo > /root/x; sleep 300 & true"))
                    .await
                    .unwrap();
                client.delete_sandbox(&sandbox.id).await.unwrap();
            }
        }
    }
    until("no sandbox is left", Duration::from_secs(60), async || {
        client.sandboxes(&SandboxFilter::default()).await.unwrap().is_empty().then_some(())
    })
    .await;
    let after = settled().await;
    assert_eq!(
        after,
        before,
        "processes, namespaces, links, mounts, loop devices, files; now {:#?}",
        Footprint::of(server.data())
    );
    let files_after = server.open_files();
    assert!(files_after <= files_before + 8, "{files_before} open files became {files_after}");
    let metrics: Value = json!(server.get("/metrics").await.text());
    assert!(metrics.as_str().unwrap().contains("atoll"), "{metrics}");
    let left = server.end().await;
    assert!(left.is_empty(), "{left:#?}");
}

async fn ten_creates_and_deletes_leave_nothing(host: Host) {
    let _room = host.room(1).await;
    creates_and_deletes(10).await;
}

async fn a_hundred_creates_and_deletes_leave_nothing(host: Host) {
    let _room = host.room(1).await;
    creates_and_deletes(100).await;
}
