//! The command line as people and scripts use it.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::PermissionsExt},
    process::{Output, Stdio},
    time::Duration,
};

use serde_json::Value;
use tests::{Host, Server, program, suite};
use tokio::{io::AsyncWriteExt, process::Command};

suite! {
    a_sandbox_from_create_to_delete,
    exec_ends_as_its_command_does,
    files_are_copied_both_ways_byte_by_byte,
    directories_and_large_files_are_copied_both_ways,
    logs_are_printed_and_followed,
    keys_are_made_listed_and_revoked,
    volumes_from_create_to_delete,
    a_database_from_create_to_delete_by_command,
    templates_are_listed,
    every_command_explains_itself,
    a_failure_is_a_sentence_and_a_hint;
    soak:
}

const SMALL: [&str; 6] = ["sandbox", "create", "--cpu", "1", "--memory-mb", "1024"];

fn atoll<S: AsRef<OsStr>>(server: &Server, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program());
    command
        .args(arguments)
        .env("ATOLL_URL", server.url())
        .env("ATOLL_KEY", server.key())
        .stdin(Stdio::null())
        .kill_on_drop(true);
    command
}

async fn output(command: &mut Command) -> Output {
    output_within(command, Duration::from_secs(120)).await
}

async fn output_within(command: &mut Command, deadline: Duration) -> Output {
    tokio::time::timeout(deadline, command.output()).await.expect("a command ends").unwrap()
}

/// What a command that works prints.
async fn printed<S: AsRef<OsStr>>(
    server: &Server,
    arguments: impl IntoIterator<Item = S>,
) -> String {
    let mut command = atoll(server, arguments);
    let output = output(&mut command).await;
    assert!(
        output.status.success(),
        "{:?}: {}",
        command.as_std(),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap()
}

async fn create(server: &Server) -> String {
    let printed = printed(server, SMALL).await;
    let id = printed.strip_suffix('\n').unwrap().to_owned();
    assert!(id.parse::<api::SandboxId>().is_ok(), "nothing but the id: {id:?}");
    id
}

async fn a_sandbox_from_create_to_delete(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let json = printed(
        &server,
        SMALL.into_iter().chain([
            "--ttl",
            "600",
            "--metadata",
            "job=é 7",
            "--env",
            "GREETING=hello world",
            "--json",
        ]),
    )
    .await;
    let created: Value = serde_json::from_str(&json).unwrap();
    let id = created["id"].as_str().unwrap();
    assert_eq!(
        (&created["ttl_seconds"], &created["metadata"]["job"]),
        (&600.into(), &"é 7".into())
    );
    assert_eq!(
        printed(&server, ["sandbox", "exec", id, "--", "echo $GREETING"]).await,
        "hello world\n"
    );
    let table = printed(&server, ["sandbox", "list", "--metadata", "job=é 7"]).await;
    assert_eq!(table.lines().count(), 2, "{table}");
    assert!(table.starts_with("ID ") && table.contains(id) && table.contains("running"), "{table}");
    let list: Value = serde_json::from_str(
        &printed(&server, ["sandbox", "list", "--json", "--status", "running"]).await,
    )
    .unwrap();
    assert!(list.as_array().unwrap().iter().any(|sandbox| sandbox["id"] == id));
    let shown = printed(&server, ["sandbox", "get", id]).await;
    assert!(shown.contains(id) && shown.contains("base"), "{shown}");
    assert_eq!(printed(&server, ["sandbox", "delete", id]).await, "");
    let gone = output(&mut atoll(&server, ["sandbox", "get", id])).await;
    assert_eq!(gone.status.code(), Some(1));
}

async fn exec_ends_as_its_command_does(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let id = create(&server).await;
    for (arguments, code) in [
        (&["--", "exit 7"][..], 7),
        (&["--", "kill -9 $$"], 137),
        (&["--timeout", "1", "--", "sleep", "60"], 124),
        (&["--cwd", "/no/such", "--", "true"], 125),
        (&["--user", "nobody-knows-me", "--", "true"], 125),
    ] {
        let ended =
            output(&mut atoll(&server, ["sandbox", "exec", &id].iter().chain(arguments))).await;
        assert_eq!(ended.status.code(), Some(code), "{arguments:?}: {ended:?}");
    }
    let both =
        output(&mut atoll(&server, ["sandbox", "exec", &id, "--", "echo out; echo err >&2"])).await;
    assert_eq!((both.stdout.as_slice(), both.stderr.as_slice()), (&b"out\n"[..], &b"err\n"[..]));
    // Several arguments reach the program as they are.
    let odd = printed(
        &server,
        ["sandbox", "exec", &id, "--", "printf", "%s|", "two words", "$HOME", "it's", "", "é*"],
    )
    .await;
    assert_eq!(odd, "two words|$HOME|it's||é*|");
    let mut reading = atoll(&server, ["sandbox", "exec", &id, "-i", "--", "cat; echo end"]);
    let mut child = reading.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all("é\nsecond".as_bytes()).await.unwrap();
    let read = tokio::time::timeout(Duration::from_secs(60), child.wait_with_output())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(String::from_utf8(read.stdout).unwrap(), "é\nsecondend\n");
    let json: Value = serde_json::from_str(
        &printed(&server, ["--json", "sandbox", "exec", &id, "--", "echo x"]).await,
    )
    .unwrap();
    assert_eq!((&json["stdout"], &json["exit_code"]), (&"x\n".into(), &0.into()));
    printed(&server, ["sandbox", "delete", &id]).await;
}

async fn files_are_copied_both_ways_byte_by_byte(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let id = create(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let name = OsStr::from_bytes(b"odd \xff name\n.bin");
    let content: Vec<u8> = (0..=255u8).cycle().take(200_001).collect();
    for (file, content) in [(name, content.as_slice()), (OsStr::new("empty"), b"")] {
        let local = directory.path().join(file);
        std::fs::write(&local, content).unwrap();
        std::fs::set_permissions(&local, std::fs::Permissions::from_mode(0o750)).unwrap();
        let mut remote = format!("{id}:/srv/in/").into_bytes();
        remote.extend_from_slice(file.as_bytes());
        let remote = OsStr::from_bytes(&remote);
        printed(&server, [OsStr::new("cp"), local.as_os_str(), remote]).await;
        let back = directory.path().join("back");
        printed(&server, [OsStr::new("cp"), remote, back.as_os_str()]).await;
        assert!(std::fs::read(&back).unwrap() == content, "{file:?}");
        assert_eq!(std::fs::metadata(&back).unwrap().permissions().mode() & 0o777, 0o750);
    }
    // From and to the standard streams, and into a directory.
    let mut from_stdin = atoll(&server, ["cp", "-", &format!("{id}:/work/piped")]);
    let mut child = from_stdin.stdin(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"piped\0bytes").await.unwrap();
    assert!(
        tokio::time::timeout(Duration::from_secs(60), child.wait())
            .await
            .unwrap()
            .unwrap()
            .success()
    );
    assert_eq!(
        output(&mut atoll(&server, ["cp", &format!("{id}:/work/piped"), "-"])).await.stdout,
        b"piped\0bytes"
    );
    printed(&server, ["cp", &format!("{id}:/work/piped"), directory.path().to_str().unwrap()])
        .await;
    assert_eq!(std::fs::read(directory.path().join("piped")).unwrap(), b"piped\0bytes");
    // What fails leaves what was there.
    let missing = output(&mut atoll(
        &server,
        ["cp", &format!("{id}:/no/such"), directory.path().join("piped").to_str().unwrap()],
    ))
    .await;
    assert_eq!(missing.status.code(), Some(1));
    assert_eq!(std::fs::read(directory.path().join("piped")).unwrap(), b"piped\0bytes");
    printed(&server, ["sandbox", "delete", &id]).await;
}

async fn directories_and_large_files_are_copied_both_ways(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let id = create(&server).await;
    let directory = tempfile::tempdir().unwrap();
    let (tree, back) = (directory.path().join("tree"), directory.path().join("back"));
    std::fs::create_dir_all(tree.join("sub/empty")).unwrap();
    std::fs::write(tree.join(OsStr::from_bytes(b"sub/odd \xff")), "odd").unwrap();
    std::fs::write(tree.join("script"), "#!/bin/sh\necho ran\n").unwrap();
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(tree.join("script"), mode(0o750)).unwrap();
    std::fs::set_permissions(tree.join("sub"), mode(0o700)).unwrap();
    std::os::unix::fs::symlink("script", tree.join("link")).unwrap();
    // Under a name that is not there, then into a directory that is.
    for to in ["/srv/tree", "/srv"] {
        printed(&server, ["cp", "-r", tree.to_str().unwrap(), &format!("{id}:{to}")]).await;
    }
    let inside = ["sandbox", "exec", &id, "--", "/srv/tree/link && stat -c '%a %U' /srv/tree/sub"];
    assert_eq!(printed(&server, inside).await, "ran\n700 root\n");
    printed(&server, ["cp", "-r", &format!("{id}:/srv/tree"), back.to_str().unwrap()]).await;
    let same = Command::new("diff").arg("-r").args([&tree, &back]).status().await.unwrap();
    assert!(same.success());
    for name in ["script", "sub"] {
        let modes = [&tree, &back].map(|side| side.join(name).metadata().unwrap().permissions());
        assert_eq!(modes[0], modes[1], "{name}");
    }
    // More than one request takes, and into the same place again.
    let large = directory.path().join("large");
    let content: Vec<u8> = (0..=255u8).cycle().take((33 << 20) + 5).collect();
    std::fs::write(&large, &content).unwrap();
    for _ in 0..2 {
        printed(&server, ["cp", large.to_str().unwrap(), &format!("{id}:/srv/")]).await;
    }
    let again = directory.path().join("again");
    printed(&server, ["cp", &format!("{id}:/srv/large"), again.to_str().unwrap()]).await;
    assert!(std::fs::read(&again).unwrap() == content);
    let refused = output(&mut atoll(&server, ["cp", "/", &format!("{id}:/srv/")])).await;
    assert!(String::from_utf8_lossy(&refused.stderr).contains("hint: copy it with -r"));
    printed(&server, ["sandbox", "delete", &id]).await;
}

async fn logs_are_printed_and_followed(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    let id = create(&server).await;
    printed(&server, ["sandbox", "exec", &id, "--", "echo one; echo two >&2"]).await;
    assert_eq!(printed(&server, ["logs", &id, "--stream", "stdout"]).await, "one\n");
    assert_eq!(printed(&server, ["logs", &id, "--stream", "stderr"]).await, "two\n");
    let following = tokio::spawn({
        let mut command = atoll(&server, ["logs", &id, "--follow", "--stream", "stdout"]);
        async move { output(&mut command).await }
    });
    printed(&server, ["sandbox", "exec", &id, "--", "echo three"]).await;
    printed(&server, ["sandbox", "delete", &id]).await;
    let followed = following.await.unwrap();
    let followed = String::from_utf8(followed.stdout).unwrap();
    assert!(followed.is_empty() || followed == "one\nthree\n" || followed == "one\n", "{followed}");
}

async fn keys_are_made_listed_and_revoked(host: Host) {
    let server = host.server().await;
    let token = printed(&server, ["key", "create", "--label", "for ci", "--scope", "read"]).await;
    let token = token.trim();
    let with = async |key: &str, arguments: &[&str]| {
        output(atoll(&server, arguments).env("ATOLL_KEY", key)).await
    };
    assert!(with(token, &["sandbox", "list"]).await.status.success());
    let forbidden = with(token, &["sandbox", "create"]).await;
    assert_eq!(forbidden.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&forbidden.stderr).contains("hint: "));
    let keys: Value =
        serde_json::from_str(&printed(&server, ["key", "list", "--json"]).await).unwrap();
    let key = keys.as_array().unwrap().iter().find(|key| key["label"] == "for ci").unwrap();
    let prefix = key["prefix"].as_str().unwrap();
    assert!(token.starts_with(prefix) && key["scope"] == "read");
    let table = printed(&server, ["key", "list"]).await;
    assert!(
        table.contains(prefix) && table.contains("for ci") && !table.contains(token),
        "{table}"
    );
    printed(&server, ["key", "revoke", prefix]).await;
    assert_eq!(with(token, &["sandbox", "list"]).await.status.code(), Some(1));
    // Without a key, by whoever is root on the server's host.
    let mut local = atoll(&server, ["key", "create", "--local", "--label", "local", "--data-dir"]);
    let local =
        output(local.arg(server.data()).env_remove("ATOLL_KEY").env_remove("ATOLL_URL")).await;
    assert!(local.status.success(), "{}", String::from_utf8_lossy(&local.stderr));
    let token = String::from_utf8(local.stdout).unwrap();
    tests::until("the server knows it", Duration::from_secs(5), async || {
        with(token.trim(), &["sandbox", "list"]).await.status.success().then_some(())
    })
    .await;
}

async fn volumes_from_create_to_delete(host: Host) {
    let _room = host.room(1).await;
    let server = host.server().await;
    assert_eq!(printed(&server, ["volume", "create", "cli", "--size-mb", "64"]).await, "cli\n");
    let got = async |volume: &str| {
        let json = printed(&server, ["volume", "get", volume, "--json"]).await;
        serde_json::from_str::<Value>(&json).unwrap()
    };
    let id = got("cli").await["id"].as_str().unwrap().to_owned();
    let create = SMALL.into_iter().chain(["--volume", "cli", "--volume", &id]);
    let twice = output(&mut atoll(&server, create)).await;
    assert_eq!(twice.status.code(), Some(1), "{twice:?}");
    let create = SMALL.into_iter().chain(["--volume", "cli:/srv/cli"]);
    let sandbox = printed(&server, create).await;
    let sandbox = sandbox.trim();
    printed(&server, ["sandbox", "exec", sandbox, "--", "echo kept > /srv/cli/file"]).await;
    assert!(printed(&server, ["sandbox", "get", sandbox]).await.contains("cli:/srv/cli"));
    let table = printed(&server, ["volume", "list"]).await;
    let line = table.lines().find(|line| line.starts_with("cli ")).unwrap();
    assert!(line.contains(&id) && line.contains("attached") && line.contains(sandbox), "{table}");
    for refused in [&["volume", "delete", "cli"][..], &["volume", "clone", "cli", "copy"]] {
        let refused = output(&mut atoll(&server, refused)).await;
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(String::from_utf8_lossy(&refused.stderr).contains(sandbox), "{refused:?}");
    }
    printed(&server, ["volume", "grow", "cli", "--size-mb", "128"]).await;
    let shown = ["sandbox", "exec", sandbox, "--", "df -m --output=size /srv/cli | tail -1"];
    assert!(printed(&server, shown).await.trim().parse::<u32>().unwrap() > 100);
    let smaller = output(&mut atoll(&server, ["volume", "grow", "cli", "--size-mb", "64"])).await;
    assert_eq!(smaller.status.code(), Some(1), "{smaller:?}");
    printed(&server, ["sandbox", "delete", sandbox]).await;
    assert_eq!(printed(&server, ["volume", "clone", "cli", "copy"]).await, "copy\n");
    let create = SMALL.into_iter().chain(["--volume", "copy:ro", "--volume", "cli:/data:ro"]);
    let sandbox = printed(&server, create).await;
    let sandbox = sandbox.trim();
    let both = ["sandbox", "exec", sandbox, "--", "cat /mnt/copy/file /data/file"];
    assert_eq!(printed(&server, both).await, "kept\nkept\n");
    printed(&server, ["sandbox", "delete", sandbox]).await;
    assert_eq!(printed(&server, ["volume", "delete", &id, "copy"]).await, "");
    let gone = output(&mut atoll(&server, ["volume", "get", "cli"])).await;
    assert_eq!(gone.status.code(), Some(1), "{gone:?}");
}

async fn a_database_from_create_to_delete_by_command(host: Host) {
    /// A template that was never used on this host is made first.
    const MADE: Duration = Duration::from_secs(280);
    let server = host.server().await;
    let mut create = atoll(&server, ["db", "create", "--label", "cli", "--idle", "3600"]);
    let created = output_within(&mut create, MADE).await;
    assert!(created.status.success(), "{}", String::from_utf8_lossy(&created.stderr));
    let id = String::from_utf8(created.stdout).unwrap();
    let id = id.trim();
    assert!(id.parse::<api::DatabaseId>().is_ok(), "nothing but the id: {id:?}");
    let table = printed(&server, ["db", "list"]).await;
    let line = table.lines().find(|line| line.starts_with(id)).unwrap();
    assert!(line.contains("cli") && line.contains("running"), "{table}");
    let got: Value =
        serde_json::from_str(&printed(&server, ["db", "get", id, "--json"]).await).unwrap();
    assert_eq!((&got["id"], &got["status"]), (&id.into(), &"running".into()));
    assert_eq!((&got["idle_seconds"], &got["connection_url"]), (&3600.into(), &Value::Null));
    let url = printed(&server, ["db", "connection", id]).await;
    assert_eq!(tests::sql(url.trim(), "CREATE TABLE kept AS SELECT 7 AS x").await, "");
    let asked = printed(&server, ["db", "psql", id, "--", "-Atc", "SELECT x FROM kept"]).await;
    assert_eq!(asked, "7\n");
    let clone = printed(&server, ["db", "clone", id, "--label", "copy"]).await;
    let clone = clone.trim();
    let asked = printed(&server, ["db", "psql", clone, "--", "-Atc", "SELECT x FROM kept"]).await;
    assert_eq!(asked, "7\n");
    assert_eq!(printed(&server, ["db", "delete", id, clone]).await, "");
    for gone in [&["delete", id][..], &["get", clone], &["psql", id, "--", "-Atc", "SELECT 1"]] {
        let gone = output(&mut atoll(&server, ["db"].iter().chain(gone))).await;
        assert_eq!(gone.status.code(), Some(1), "{gone:?}");
    }
    let table = printed(&server, ["db", "list"]).await;
    assert!(!table.contains(id) && !table.contains(clone), "{table}");
}

async fn templates_are_listed(host: Host) {
    let server = host.server().await;
    let table = printed(&server, ["template", "list"]).await;
    assert!(
        table.contains("base")
            && table.contains("ubuntu-24.04")
            && table.contains("code-interpreter"),
        "{table}"
    );
    let json: Value =
        serde_json::from_str(&printed(&server, ["template", "get", "base", "--json"]).await)
            .unwrap();
    assert_eq!(json["name"], "base");
    let failed = output(&mut atoll(&server, ["template", "build", "base", "/dev/null"])).await;
    assert_eq!(failed.status.code(), Some(1));
}

async fn every_command_explains_itself(host: Host) {
    let server = host.server().await;
    let help = printed(&server, ["help"]).await;
    for name in ["serve", "demo", "sandbox", "cp", "logs", "template", "key", "version"] {
        assert!(help.contains(name), "{name} in {help}");
        let own = printed(&server, ["help", name]).await;
        assert!(own.contains("Usage: "), "{own}");
        assert!(own.lines().all(|line| line.chars().count() <= 100), "{own}");
    }
    assert!(printed(&server, ["version"]).await.starts_with("atoll "));
    for senseless in [
        &["sandbox", "fly"][..],
        &[],
        &["sandbox", "get", "not-an-id"],
        &["sandbox", "exec"],
        &["cp", "a"],
        &["sandbox", "create", "--ttl", "soon"],
    ] {
        assert_eq!(
            output(&mut atoll(&server, senseless)).await.status.code(),
            Some(2),
            "{senseless:?}"
        );
    }
}

async fn a_failure_is_a_sentence_and_a_hint(host: Host) {
    let server = host.server().await;
    let said = async |command: &mut Command| {
        let output = output(command).await;
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(output.stdout.is_empty(), "{output:?}");
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            said.starts_with("error: ")
                && !said.contains("panicked")
                && !said.lines().next().unwrap().ends_with('.'),
            "{said}"
        );
        said
    };
    let list = ["sandbox", "list"];
    assert!(said(atoll(&server, list).env("ATOLL_KEY", "wrong")).await.contains("hint: "));
    assert!(said(atoll(&server, list).env_remove("ATOLL_KEY")).await.contains("ATOLL_KEY"));
    assert!(
        said(atoll(&server, list).env("ATOLL_URL", "http://127.0.0.1:1")).await.contains("hint: ")
    );
    assert!(said(atoll(&server, list).env("ATOLL_URL", "nonsense")).await.contains("hint: "));
    let unknown =
        said(&mut atoll(&server, ["sandbox", "get", "00000000-0000-4000-8000-000000000000"])).await;
    assert!(unknown.contains("sandbox not found"), "{unknown}");
    let neither = said(&mut atoll(&server, ["cp", "/etc/hostname", "/tmp/x"])).await;
    assert!(neither.contains("hint: "), "{neither}");
}
