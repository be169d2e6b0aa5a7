//! What sandboxes start from: the built-in templates, and those of one's own.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{Build, BuildStatus, CreateSandbox, ExecRequest, TemplateName};
use client::{Body, BuildSource, Client, Method};
use serde_json::{Value, json};
use tests::{Answer, Host, command, small, suite};

suite! {
    a_recipe_of_ones_own_becomes_a_template,
    a_root_file_system_becomes_a_template,
    the_code_interpreter_draws_a_chart,
    the_built_in_templates_are_listed,
    an_alias_is_a_template_too,
    base_has_what_its_users_expect,
    a_build_that_cannot_begin_is_refused,
    a_build_that_fails_says_why_and_changes_nothing,
    a_template_that_cannot_be_baked_is_none,
    a_built_in_template_is_neither_deleted_nor_replaced;
    soak: a_recipe_with_packages_becomes_a_template,
}

fn name(text: &str) -> TemplateName {
    text.parse().unwrap()
}

/// Of one's own, and small.
fn of_template(template: &str) -> CreateSandbox {
    CreateSandbox { template: Some(template.to_owned()), ..small() }
}

/// Builds to the end, and hands back what became of it with its log.
async fn build(client: &Client, template: &str, source: BuildSource) -> (Build, Vec<String>) {
    let begun = client.build_template(&name(template), source).await.unwrap();
    let mut lines = client.build_log(&begun.id).await.unwrap();
    let mut log = Vec::new();
    while let Some(line) = lines.next().await.unwrap() {
        log.push(line);
    }
    (client.build(&begun.id).await.unwrap(), log)
}

async fn the_built_in_templates_are_listed(host: Host) {
    let server = host.server().await;
    let list = server.get("/v1/templates").await.json();
    let list = list.as_array().expect("a bare array");
    for wanted in ["base", "code-interpreter"] {
        let found: &Value = list.iter().find(|template| template["name"] == wanted).unwrap();
        assert_eq!(found["is_global"], true, "{found}");
        // The clients do arithmetic with these.
        for (field, value) in [("cpu", 2), ("memory_mb", 2048), ("disk_mb", 10_240)] {
            assert_eq!(found[field], value, "{field} in {found}");
        }
        assert!(found["size_bytes"].as_u64().is_some(), "{found}");
        assert!(
            !found["label"].as_str().unwrap().is_empty()
                && !found["description"].as_str().unwrap().is_empty(),
            "{found}"
        );
        assert_eq!(&server.get(&format!("/v1/templates/{wanted}")).await.json()["name"], wanted);
    }
    assert_eq!(server.get("/v1/templates/no-such").await.refusal(), (404, "not_found".to_owned()));
}

async fn an_alias_is_a_template_too(host: Host) {
    let sandbox = host.sandbox_of(&of_template("ubuntu-24.04")).await;
    assert!(["base", "ubuntu-24.04"].contains(&sandbox.created.template.as_str()));
    assert_eq!(
        sandbox.run("grep -c trixie /etc/os-release >/dev/null && echo Debian 13").await,
        "Debian 13\n"
    );
    assert_eq!(host.server().await.get("/v1/templates/ubuntu-24.04").await.json()["name"], "base");
}

async fn base_has_what_its_users_expect(host: Host) {
    let sandbox = host.sandbox().await;
    let programs = "bash git curl tar gzip xz zstd ps top ip ss python python3 pip node npm gcc g++ make sha256sum find unshare mkfs.ext4";
    let missing = sandbox
        .run(&format!("for p in {programs}; do command -v $p >/dev/null || echo $p; done"))
        .await;
    assert_eq!(missing, "");
    let shown = sandbox.run("grep -c '^panda:' /etc/passwd; stat -c '%a %n' /work /home/panda /tmp; ls -A /work; test -s /etc/ssl/certs/ca-certificates.crt && echo certificates").await;
    assert_eq!(shown, "1\n777 /work\n777 /home/panda\n1777 /tmp\ncertificates\n");
    let as_panda = ExecRequest {
        user: Some("panda".to_owned()),
        ..command(
            "echo 'int main(void) { return 42; }' > /work/a.c && gcc -o /work/a /work/a.c && /work/a",
        )
    };
    assert_eq!(sandbox.exec(as_panda).await.exit_code, 42);
    // Nothing of ours is installed into it: the agent comes from outside.
    let ours =
        sandbox.run("find / -xdev -iname '*atoll*' -not -path '/proc/*' 2>/dev/null | head").await;
    assert_eq!(ours, "");
    let mounts = sandbox.run("for m in /proc /sys /dev /dev/pts /dev/shm /run /tmp; do test -d $m || echo $m; done; findmnt -n -o FSTYPE /; test -w /dev/null && test -e /dev/fd/0 && echo devices").await;
    assert_eq!(mounts, "ext4\ndevices\n");
}

async fn the_code_interpreter_draws_a_chart(host: Host) {
    let sandbox = host.sandbox_of(&of_template("code-interpreter")).await;
    sandbox.write("/work/sales.csv", "region,revenue\nnorth,10\nsouth,20\nnorth,5\n").await;
    sandbox
        .write(
            "/work/chart.py",
            "import matplotlib\nmatplotlib.use('Agg')\nimport matplotlib.pyplot as plt, pandas as pd, psycopg2, scipy\n\
             sums = pd.read_csv('/work/sales.csv').groupby('region').revenue.sum()\nprint(sums.to_dict())\nsums.plot.bar()\nplt.savefig('/work/chart.png')\n",
        )
        .await;
    assert_eq!(sandbox.run("python3 /work/chart.py").await, "{'north': 15, 'south': 20}\n");
    let chart = sandbox.read("/work/chart.png").await;
    assert!(
        chart.starts_with(b"\x89PNG\r\n\x1a\n") && chart.ends_with(b"IEND\xaeB`\x82"),
        "{} bytes",
        chart.len()
    );
    assert_eq!(sandbox.run("python3 -c 'import ipykernel; print(1)'").await, "1\n");
}

async fn a_built_in_template_is_neither_deleted_nor_replaced(host: Host) {
    let server = host.server().await;
    for template in ["base", "ubuntu-24.04", "code-interpreter"] {
        let refused = server.client().delete_template(&name(template)).await.unwrap_err();
        assert_eq!(refused.status(), Some(409), "{refused}");
        let refused = server
            .client()
            .build_template(&name(template), BuildSource::Recipe("from = \"base\"".to_owned()))
            .await
            .unwrap_err();
        assert_eq!(refused.status(), Some(409), "{refused}");
    }
    assert_eq!(server.get("/v1/templates/base").await.status, 200);
}

async fn a_build_that_cannot_begin_is_refused(host: Host) {
    let server = host.server().await;
    let form = async |fields: &[(&str, &str)]| {
        let form = fields.iter().fold(reqwest::multipart::Form::new(), |form, (name, value)| {
            form.text((*name).to_owned(), (*value).to_owned())
        });
        let multipart =
            Answer::to(server.request(Method::POST, "/v1/templates/build").multipart(form)).await;
        let urlencoded =
            Answer::to(server.request(Method::POST, "/v1/templates/build").form(fields)).await;
        assert_eq!(multipart.refusal(), urlencoded.refusal(), "{fields:?}");
        multipart
    };
    let dockerfile = form(&[("name", "never"), ("dockerfile", "FROM debian")]).await;
    let image = form(&[("name", "never"), ("image_ref", "docker.io/library/debian:13")]).await;
    for refused in [dockerfile, image] {
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()));
        assert!(refused.text().contains("rootfs"), "it says the way out: {}", refused.text());
    }
    for fields in [
        &[("name", "never")][..],
        &[("recipe", "from = \"base\"")],
        &[("name", ""), ("recipe", "from = \"base\"")],
        &[("name", "../up"), ("recipe", "from = \"base\"")],
        &[("name", "builds"), ("recipe", "from = \"base\"")],
        &[("name", "never"), ("recipe", "not toml at all")],
        &[("name", "never"), ("recipe", "unknown_field = 1")],
        &[("name", "never"), ("recipe", "from = \"no-such\"")],
        &[("name", "never"), ("recipe", "from = \"base\"\npackages = [\"--option\"]")],
        &[
            ("name", "never"),
            ("recipe", "from = \"base\"\n[[files]]\npath = \"relative\"\ncontent = \"\""),
        ],
        &[
            ("name", "never"),
            (
                "recipe",
                "from = \"base\"\n[[files]]\npath = \"/a/../../etc/passwd\"\ncontent = \"\"",
            ),
        ],
        &[
            ("name", "never"),
            ("recipe", "from = \"base\"\n[[directories]]\npath = \"/a\"\nmode = \"999\""),
        ],
        &[("name", "never"), ("recipe", "from = \"base\"\ncpu = 0")],
        &[("name", "never"), ("recipe", "from = \"base\""), ("size_mb", "20480")],
        &[("name", "never"), ("recipe", "from = \"base\""), ("kernel", "6.1")],
    ] {
        assert_eq!(form(fields).await.refusal(), (400, "invalid_request".to_owned()), "{fields:?}");
    }
    let empty = Answer::to(server.request(Method::POST, "/v1/templates/build")).await;
    assert_eq!(empty.refusal(), (400, "invalid_request".to_owned()));
    assert!(
        server.client().builds().await.unwrap().iter().all(|build| build.name.as_str() != "never")
    );
}

async fn a_build_that_fails_says_why_and_changes_nothing(host: Host) {
    let server = host.server().await;
    let client = server.client();
    // As the published clients send it; it fails before the next one begins.
    let form = reqwest::multipart::Form::new()
        .text("name", "broken")
        .text("size_mb", "20480")
        .text("rootfs", "no tar either");
    let begun = server.request(Method::POST, "/v1/templates/build").multipart(form);
    let begun = Answer::to(begun).await.json();
    assert_eq!((&begun["size_mb"], &begun["started_at"]), (&json!(20_480), &Value::Null));
    let (failed, log) =
        build(client, "broken", BuildSource::Tar(Body::from("this is no tar at all".repeat(100))))
            .await;
    assert_eq!(failed.status, BuildStatus::Failed);
    assert!(
        failed.error.as_ref().is_some_and(|error| !error.is_empty() && !error.contains("/var/lib")),
        "{failed:?}"
    );
    assert!(!log.is_empty());
    assert_eq!(server.get("/v1/templates/broken").await.status, 404);
    assert_eq!(
        client.create_sandbox(&of_template("broken")).await.unwrap_err().status(),
        Some(404)
    );
    let builds = server.get("/v1/templates/builds").await.json();
    assert!(
        builds
            .as_array()
            .unwrap()
            .iter()
            .any(|build| build["id"] == failed.id && build["status"] == "failed"),
        "{builds}"
    );
    // As the published clients follow it.
    let events = server.get(&format!("/v1/templates/builds/{}/logs", failed.id)).await;
    assert!(events.header("content-type").starts_with("text/event-stream"));
    assert!(events.text().ends_with("event: done\ndata: end\n\n"), "{}", events.text());
    assert!(
        std::fs::read_dir(server.data()).unwrap().all(|file| !file
            .unwrap()
            .file_name()
            .to_string_lossy()
            .starts_with("upload-")),
        "the upload is gone"
    );
}

async fn a_recipe_of_ones_own_becomes_a_template(host: Host) {
    let server = host.server().await;
    let client = server.client();
    let recipe = r#"
label = "Mine"
description = "With a greeting"
from = "base"
cpu = 1
memory_mb = 1024

[[users]]
name = "worker"

[[directories]]
path = "/srv/data"
mode = "0750"
owner = "worker"

[[files]]
path = "/srv/data/greeting"
content = "hello from a recipe\n"
mode = "0640"
owner = "worker"

[[links]]
path = "/srv/link"
target = "data/greeting"
"#;
    let (built, log) = build(client, "mine", BuildSource::Recipe(recipe.to_owned())).await;
    assert_eq!(built.status, BuildStatus::Done, "{built:?}\n{}", log.join("\n"));
    let (started, ended) = (built.started_at.unwrap(), built.ended_at.unwrap());
    assert!(built.created_at <= started && started <= ended, "{built:?}");
    assert_eq!(built.size_mb, Some(10_240));
    let shown = server.get("/v1/templates/mine").await.json();
    assert_eq!(
        (&shown["label"], &shown["cpu"], &shown["memory_mb"], &shown["is_global"]),
        (&json!("Mine"), &json!(1), &json!(1024), &json!(false))
    );
    // Its size is its own default, and baked already: the first create is not told to come again.
    let request = CreateSandbox { cpu: None, memory_mb: None, ..of_template("mine") };
    let room = host.room(1).await;
    let first = client.create_sandbox(&request).await.unwrap();
    client.delete_sandbox(&first.id).await.unwrap();
    drop(room);
    let sandbox = host.sandbox_of(&request).await;
    assert_eq!((sandbox.created.cpu, sandbox.created.memory_mb), (1, 1024));
    assert_eq!(sandbox.run("cat /srv/link; stat -c '%a %U' /srv/data /srv/data/greeting; git --version | cut -c1-3").await, "hello from a recipe\n750 worker\n640 worker\ngit\n");
    client.delete_template(&name("mine")).await.unwrap();
    assert_eq!(server.get("/v1/templates/mine").await.status, 404);
    assert_eq!(client.create_sandbox(&request).await.unwrap_err().status(), Some(404));
    assert_eq!(sandbox.run("echo alive").await, "alive\n");
}

async fn a_template_that_cannot_be_baked_is_none(host: Host) {
    let server = host.server().await;
    let recipe = "from = \"base\"\nwarm_up = [\"exit 3\"]".to_owned();
    let (failed, log) = build(server.client(), "cold", BuildSource::Recipe(recipe)).await;
    assert_eq!(failed.status, BuildStatus::Failed, "{failed:?}\n{}", log.join("\n"));
    assert!(failed.error.is_some_and(|error| error.contains("warm_up")));
    assert_eq!(server.get("/v1/templates/cold").await.status, 404);
}

/// A tree with a shell and hardly anything else, packed in a sandbox.
async fn tiny_root(host: &Host) -> Vec<u8> {
    let sandbox = host.sandbox().await;
    sandbox
        .run(
            "mkdir -p /srv/tiny && cd /srv/tiny && mkdir -p bin etc root tmp && cp /bin/dash bin/sh && \
             for p in cat ls echo uname sleep stat; do cp $(command -v $p) bin/; done && \
             for p in bin/*; do ldd $p | grep -o '/[^ ]*' ; done | sort -u | while read l; do mkdir -p .$(dirname $l) && cp -L $l .$l; done && \
             echo 'root:x:0:0::/root:/bin/sh' > etc/passwd && echo 'root:x:0:' > etc/group && ln -s sh bin/linked && chmod 1777 tmp && \
             tar -C /srv/tiny --numeric-owner -czf /srv/tiny.tar.gz .",
        )
        .await;
    sandbox.read("/srv/tiny.tar.gz").await
}

async fn a_root_file_system_becomes_a_template(host: Host) {
    let tar = tiny_root(&host).await;
    let server = host.server().await;
    let client = server.client();
    let (built, log) = build(client, "tiny", BuildSource::Tar(Body::from(tar))).await;
    assert_eq!(built.status, BuildStatus::Done, "{built:?}\n{}", log.join("\n"));
    let sandbox = host.sandbox_of(&of_template("tiny")).await;
    // No bash, no init, no /proc or /dev of its own: the agent brings what is missing.
    assert_eq!(sandbox.run("echo \"in $0: $(cat /etc/passwd | cut -d: -f1 2>/dev/null || echo root)\"; ls /proc/self/fd >/dev/null && echo proc").await.lines().last(), Some("proc"));
    assert_eq!(sandbox.exec(command("exit 5")).await.exit_code, 5);
    sandbox.write("/tmp/deep/file", "x").await;
    assert_eq!(sandbox.run("cat /tmp/deep/file").await, "x");
    assert_eq!(
        sandbox.run("stat -c %a /tmp; ls -l /bin/linked | cat >/dev/null && echo link").await,
        "1777\nlink\n"
    );
    drop(sandbox);
    client.delete_template(&name("tiny")).await.unwrap();
}

async fn a_recipe_with_packages_becomes_a_template(host: Host) {
    let server = host.server().await;
    let (failed, log) = build(
        server.client(),
        "none",
        BuildSource::Recipe(
            "from = \"base\"\npackages = [\"no-such-package-anywhere\"]".to_owned(),
        ),
    )
    .await;
    assert_eq!(failed.status, BuildStatus::Failed, "{}", log.join("\n"));
    let (built, log) = build(
        server.client(),
        "with-jq",
        BuildSource::Recipe(
            "from = \"base\"\npackages = [\"jq\"]\nwarm_up = [\"jq --version\"]".to_owned(),
        ),
    )
    .await;
    assert_eq!(built.status, BuildStatus::Done, "{built:?}\n{}", log.join("\n"));
    let sandbox = host.sandbox_of(&of_template("with-jq")).await;
    assert_eq!(sandbox.run("echo '{\"a\": 7}' | jq .a").await, "7\n");
    drop(sandbox);
    let (again, _) = build(
        server.client(),
        "with-jq",
        BuildSource::Recipe(
            "from = \"base\"\npackages = [\"jq\"]\nwarm_up = [\"jq --version\"]".to_owned(),
        ),
    )
    .await;
    assert_eq!(again.status, BuildStatus::Done);
    tokio::time::timeout(
        Duration::from_secs(10),
        server.client().delete_template(&name("with-jq")),
    )
    .await
    .unwrap()
    .unwrap();
}
