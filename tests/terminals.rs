//! Terminals as people and programs use them, and users that are not root.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{collections::BTreeMap, process::Stdio, time::Duration};

use api::{ErrorCode, ExecRequest, SandboxStatus, TerminalId, TerminalSignal, UpdateLifecycle};
use bytes::Bytes;
use client::{Client, Method, ScreenEvent, TerminalConnection, TerminalOptions, WriteOptions};
use serde_json::json;
use tests::{
    Answer, End, Host, Sandbox, Server, command, patterned, program, published_command, small,
    suite, until,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    process::{Child, ChildStdin, ChildStdout, Command},
};

suite! {
    the_published_command_opens_a_shell,
    a_shell_of_ours_is_as_if_it_were_here,
    a_terminal_outlives_its_server,
    every_byte_goes_both_ways,
    twenty_at_once_and_one_that_is_not_read,
    a_terminal_outlives_its_connection,
    terminals_rest_with_their_sandbox,
    a_terminal_ends_with_its_sandbox,
    a_sandbox_that_does_not_run_has_no_terminal,
    a_user_has_what_is_theirs_and_no_more;
    soak:
}

/// A guest under emulation, beside others on few cores.
const PATIENCE: Duration = Duration::from_secs(120);

fn running(cmd: &str) -> TerminalOptions {
    TerminalOptions {
        cmd: Some(cmd.to_owned()),
        size: Some((24, 80)),
        ..TerminalOptions::default()
    }
}

async fn next(terminal: &mut TerminalConnection) -> ScreenEvent {
    let next = tokio::time::timeout(PATIENCE, terminal.screen.next()).await;
    next.expect("a terminal says something").expect("not the end").unwrap()
}

/// What it shows until `end` is in it.
async fn shown(terminal: &mut TerminalConnection, end: &str) -> Vec<u8> {
    let mut shown = Vec::new();
    while memchr::memmem::find(&shown, end.as_bytes()).is_none() {
        match next(terminal).await {
            ScreenEvent::Output(bytes) => shown.extend_from_slice(&bytes),
            other @ (ScreenEvent::Exited { .. }
            | ScreenEvent::Failed { .. }
            | ScreenEvent::Closed { .. }) => {
                panic!("{other:?} after {:?}", String::from_utf8_lossy(&shown))
            }
        }
    }
    shown
}

/// The rest of what it shows, its exit code if it was told, and the code that the server closed with.
async fn rest(terminal: &mut TerminalConnection) -> (String, Option<i32>, u16) {
    let (mut shown, mut exit) = (Vec::new(), None);
    loop {
        match next(terminal).await {
            ScreenEvent::Output(bytes) => shown.extend_from_slice(&bytes),
            ScreenEvent::Exited { exit_code } => exit = Some(exit_code),
            ScreenEvent::Failed { .. } => {}
            ScreenEvent::Closed { code } => {
                return (String::from_utf8_lossy(&shown).into_owned(), exit, code);
            }
        }
    }
}

async fn until_detached(client: &Client, sandbox: &Sandbox, terminal: &TerminalId) {
    until("the terminal is detached", PATIENCE, async || {
        let all = client.terminals(&sandbox.id).await.ok()?;
        all.iter().any(|one| one.id == *terminal && !one.attached).then_some(())
    })
    .await;
}

/// A program in a terminal of its own on this host, with 33 rows and 111 columns.
struct Here {
    child: Child,
    keys: ChildStdin,
    output: ChildStdout,
    seen: String,
    line: String,
}

impl Here {
    /// `script` is of util-linux; what it runs comes back on a pipe.
    async fn start(server: &Server, inner: &str) -> Self {
        let inner = format!("tty; stty rows 33 cols 111; {inner}");
        let mut child = Command::new("script")
            .args(["-q", "-e", "-c", &inner, "/dev/null"])
            .env("ATOLL_URL", server.url())
            .env("ATOLL_KEY", server.key())
            .env("PANDASTACK_API", server.url())
            .env("PANDASTACK_API_KEY", server.key())
            .env("TERM", "xterm")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let (keys, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut here = Self { child, keys, output, seen: String::new(), line: String::new() };
        let seen = here.until("\n").await;
        let name = seen.split_whitespace().find(|word| word.starts_with("/dev/"));
        here.line = name.unwrap_or_else(|| panic!("{seen}")).to_owned();
        here
    }

    async fn type_in(&mut self, keys: &str) {
        self.keys.write_all(keys.as_bytes()).await.unwrap();
        self.keys.flush().await.unwrap();
    }

    /// What has been shown since the last time, with `end` in it.
    async fn until(&mut self, end: &str) -> String {
        let mut buffer = [0; 4096];
        loop {
            if let Some(at) = self.seen.find(end) {
                let rest = self.seen.split_off(at + end.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            let read = tokio::time::timeout(PATIENCE, self.output.read(&mut buffer)).await;
            let count = read.unwrap_or_else(|_| panic!("no {end:?} in {:?}", self.seen)).unwrap();
            assert!(count > 0, "it ended without {end:?}: {:?}", self.seen);
            self.seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
        }
    }

    /// As when its window changes.
    async fn resize(&self, rows: u16, columns: u16) {
        let (rows, columns) = (rows.to_string(), columns.to_string());
        let mut stty = Command::new("stty");
        stty.args(["-F", &self.line, "rows", &rows, "cols", &columns]);
        assert!(stty.status().await.unwrap().success());
    }

    /// Shows the rest, and ends as its program does.
    async fn end(mut self) -> (String, Option<i32>) {
        let mut rest = Vec::new();
        let read = self.output.read_to_end(&mut rest);
        tokio::time::timeout(PATIENCE, read).await.expect("it ends").unwrap();
        let status = self.child.wait().await.unwrap();
        (self.seen + &String::from_utf8_lossy(&rest), status.code())
    }
}

async fn the_published_command_opens_a_shell(host: Host) {
    let published = published_command().await;
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let inner = format!("{} sandbox ssh {}; stty -a; exit $?", published.display(), sandbox.id);
    let mut here = Here::start(&server, &inner).await;
    // Whatever its prompt is: only what is computed proves that it was carried out.
    here.type_in("stty size; echo $((6 * 7))-done\r").await;
    assert!(here.until("42-done").await.contains("33 111"));
    here.resize(12, 99).await;
    // The change and the next key go different ways.
    here.type_in(
        "until [ \"$(stty size)\" = '12 99' ]; do sleep 0.1; done; echo $((6 * 7))-seen\r",
    )
    .await;
    here.until("42-seen").await;
    // As an editor: keys one by one, not echoed, a control character among them.
    // What is awaited is not in what is echoed.
    let editor = "stty raw -echo; printf rea''dy; head -c 4 | od -An -tx1; stty sane; echo $((6 * 7))-left\r";
    here.type_in(editor).await;
    here.until("ready").await;
    here.type_in("\x03\x1b~é").await;
    assert!(here.until("42-left").await.contains("03 1b 7e c3"));
    here.type_in("\x15exit 0\r").await;
    let (rest, code) = here.end().await;
    assert!(rest.contains(" icanon") && rest.contains(" echo"), "it is as before: {rest}");
    assert_eq!(code, Some(0));
}

async fn a_shell_of_ours_is_as_if_it_were_here(host: Host) {
    let sandbox = host.sandbox().await;
    let server = host.server().await;
    let atoll = program();
    let shell = format!("{} sandbox shell {}", atoll.display(), sandbox.id);
    let inner = format!("{shell} --user panda; code=$?; stty -a; exit $code");
    let mut here = Here::start(&server, &inner).await;
    here.type_in("stty size; id -un; echo $TERM-$((6 * 7))\r").await;
    let seen = here.until("xterm-42").await;
    assert!(seen.contains("33 111") && seen.contains("panda"), "{seen}");
    here.resize(12, 99).await;
    here.type_in(
        "until [ \"$(stty size)\" = '12 99' ]; do sleep 0.1; done; echo $((6 * 7))-seen\r",
    )
    .await;
    here.until("42-seen").await;
    // Ctrl-C is for what runs there, and so is a tilde that is not alone.
    here.type_in("sleep 1000; echo ~ $((6 * 7))-on\r").await;
    until("it sleeps", PATIENCE, async || {
        let found = sandbox.exec(command("pgrep -x sleep")).await;
        (found.exit_code == 0).then_some(())
    })
    .await;
    here.type_in("\x03").await;
    here.until("^C").await;
    here.type_in("echo ~ $((6 * 7))-back\r").await;
    assert!(here.until("42-back").await.contains("/home/panda"));
    here.type_in("exit 7\r").await;
    let (rest, code) = here.end().await;
    assert!(rest.contains(" icanon") && rest.contains(" echo"), "it is as before: {rest}");
    assert_eq!(code, Some(7));

    // Leaving is not ending.
    let mut here = Here::start(&server, &format!("{shell}; code=$?; stty -a; exit $code")).await;
    here.type_in("kept=yes; echo $((6 * 7))-set\r").await;
    here.until("42-set").await;
    here.type_in("\r~.").await;
    let (rest, code) = here.end().await;
    assert!(rest.contains("--terminal") && rest.contains(" icanon"), "{rest}");
    assert_eq!(code, Some(125));
    let left = server.client().terminals(&sandbox.id).await.unwrap();
    let left = left.iter().find(|one| one.exit_code.is_none()).unwrap();
    let mut here = Here::start(&server, &format!("{shell} --terminal {}", left.id)).await;
    here.type_in("echo $kept-$((6 * 7)); exit\r").await;
    here.until("yes-42").await;
    assert_eq!(here.end().await.1, Some(0));

    // Without a terminal here, and with a command; refusals are told before anything else.
    let run = async |arguments: &[&str]| {
        let mut run = Command::new(&atoll);
        run.args(["sandbox", "shell", &sandbox.id.to_string()]).args(arguments);
        run.env("ATOLL_URL", server.url()).env("ATOLL_KEY", server.key()).stdin(Stdio::null());
        tokio::time::timeout(PATIENCE, run.output()).await.expect("it ends").unwrap()
    };
    let ran = run(&["--", "echo é; exit 9"]).await;
    assert_eq!((&ran.stdout[..], ran.status.code()), ("é\r\n".as_bytes(), Some(9)));
    let refused = run(&["--user", "ghost"]).await;
    assert_eq!(refused.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("ghost"));
}

async fn a_terminal_outlives_its_server(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    // It has to be found again at the same place.
    let sandbox = server.create(&small()).await.id;
    let mut terminal = server
        .client()
        .open_terminal(&sandbox, &running("stty -echo; echo one; read a; echo two; read a; exit 5"))
        .await
        .unwrap();
    let one = shown(&mut terminal, "one\r\n").await;
    for end in [End::Asked, End::Killed] {
        server.restart(end).await;
    }
    // The former connection is at its end, whichever way.
    while let Ok(Some(Ok(_))) = tokio::time::timeout(PATIENCE, terminal.screen.next()).await {}
    let client = server.client();
    let offset = Some(one.len() as u64);
    let mut terminal = until("it is found again", PATIENCE, async || {
        client.attach_terminal(&sandbox, &terminal.id, offset, None).await.ok()
    })
    .await;
    terminal.keyboard.type_in(Bytes::from_static(b"\n")).await.unwrap();
    assert_eq!(shown(&mut terminal, "two\r\n").await, b"two\r\n");
    terminal.keyboard.type_in(Bytes::from_static(b"\n")).await.unwrap();
    assert_eq!(rest(&mut terminal).await, (String::new(), Some(5), 1000));
    host.end(server).await;
}

async fn every_byte_goes_both_ways(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let name = "日本語 é 😀 #?%&+ 'quoted' \"x\".txt";
    let typed: Vec<u8> = (0..=255).cycle().take(64 << 10).chain(patterned(64 << 10)).collect();
    let options = TerminalOptions {
        cwd: Some("/root".to_owned()),
        env: BTreeMap::from([("NAME".to_owned(), name.to_owned())]),
        ..running("stty raw -echo; printf ready; head -c 131072 | tee \"$NAME\"")
    };
    let mut terminal = client.open_terminal(&sandbox.id, &options).await.unwrap();
    shown(&mut terminal, "ready").await;
    for piece in typed.chunks(5_000) {
        terminal.keyboard.type_in(Bytes::copy_from_slice(piece)).await.unwrap();
    }
    let mut back = Vec::new();
    while back.len() < typed.len() {
        match next(&mut terminal).await {
            ScreenEvent::Output(bytes) => back.extend_from_slice(&bytes),
            other @ (ScreenEvent::Exited { .. }
            | ScreenEvent::Failed { .. }
            | ScreenEvent::Closed { .. }) => panic!("{other:?} after {} bytes", back.len()),
        }
    }
    assert!(back == typed, "it comes back as it was typed");
    assert_eq!(rest(&mut terminal).await.1, Some(0));
    assert!(sandbox.read(format!("/root/{name}")).await == typed);
}

async fn twenty_at_once_and_one_that_is_not_read(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let mut flood = client.open_terminal(&sandbox.id, &running("yes")).await.unwrap();
    let mut all = Vec::new();
    for number in 1..=20 {
        let cmd = format!("stty -echo; echo ready; read line; echo $line; exit {number}");
        all.push(client.open_terminal(&sandbox.id, &running(&cmd)).await.unwrap());
    }
    for (at, terminal) in all.iter_mut().enumerate() {
        shown(terminal, "ready\r\n").await;
        terminal.keyboard.type_in(format!("I am {at}\n")).await.unwrap();
    }
    for (at, terminal) in all.iter_mut().enumerate() {
        let (said, exit, _) = rest(terminal).await;
        assert_eq!((said, exit), (format!("I am {at}\r\n"), Some(i32::try_from(at).unwrap() + 1)));
    }
    // It has waited, and goes on now.
    flood.keyboard.signal(TerminalSignal::Int).await.unwrap();
    assert_eq!(rest(&mut flood).await.1, Some(130));
    let left = sandbox.exec(command("pgrep -x yes")).await;
    assert_eq!(left.exit_code, 1, "nothing is left: {}", left.stdout);
}

async fn a_terminal_outlives_its_connection(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let cmd = "stty -echo; echo first; read a; echo second; read b; exit 4";
    let mut terminal = client.open_terminal(&sandbox.id, &running(cmd)).await.unwrap();
    let first = shown(&mut terminal, "first\r\n").await;
    let id = terminal.id;
    drop(terminal);
    until_detached(client, &sandbox, &id).await;
    let offset = Some(first.len() as u64);
    let attached = client.attach_terminal(&sandbox.id, &id, offset, Some((9, 99))).await;
    let mut terminal = attached.unwrap();
    terminal.keyboard.type_in("\n").await.unwrap();
    assert_eq!(shown(&mut terminal, "second\r\n").await, b"second\r\n");
    // Whoever comes last has it, with all that was shown.
    let mut other = client.attach_terminal(&sandbox.id, &id, None, None).await.unwrap();
    assert_eq!(rest(&mut terminal).await.2, 4001);
    assert!(shown(&mut other, "second\r\n").await.starts_with(&first));
    other.keyboard.type_in("\n").await.unwrap();
    assert_eq!(rest(&mut other).await, (String::new(), Some(4), 1000));
    // A client that closes it wants no more of it.
    let mut closed = client.open_terminal(&sandbox.id, &running("sleep 1000")).await.unwrap();
    closed.keyboard.close().await.unwrap();
    until("it has ended", PATIENCE, async || {
        let all = client.terminals(&sandbox.id).await.unwrap();
        all.iter().all(|one| one.exit_code.is_some()).then_some(())
    })
    .await;
}

async fn terminals_rest_with_their_sandbox(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let cmd = "kept=yes; stty -echo; echo ready; read a; echo $kept; exit 4";
    let mut terminal = client.open_terminal(&sandbox.id, &running(cmd)).await.unwrap();
    let ready = shown(&mut terminal, "ready\r\n").await;
    // Somebody who is attached is use, though nothing is typed or shown.
    let update = UpdateLifecycle { idle_seconds: Some(1), ..UpdateLifecycle::default() };
    client.update_lifecycle(&sandbox.id, &update).await.unwrap();
    tests::pause(Duration::from_secs(6)).await;
    assert_eq!(client.sandbox(&sandbox.id).await.unwrap().status, SandboxStatus::Running);
    let update = UpdateLifecycle { idle_seconds: Some(0), ..UpdateLifecycle::default() };
    client.update_lifecycle(&sandbox.id, &update).await.unwrap();

    client.hibernate(&sandbox.id).await.unwrap();
    assert_eq!(rest(&mut terminal).await.2, 1001);
    let offset = Some(ready.len() as u64);
    let attached = client.attach_terminal(&sandbox.id, &terminal.id, offset, None).await;
    let mut terminal = attached.unwrap();
    assert_eq!(client.sandbox(&sandbox.id).await.unwrap().status, SandboxStatus::Running);
    terminal.keyboard.type_in("\n").await.unwrap();
    assert_eq!(rest(&mut terminal).await, ("yes\r\n".to_owned(), Some(4), 1000));
}

async fn a_terminal_ends_with_its_sandbox(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client().clone();
    let options = TerminalOptions { size: Some((24, 80)), ..TerminalOptions::default() };
    let mut terminal = client.open_terminal(&sandbox.id, &options).await.unwrap();
    terminal.keyboard.type_in("echo $((6 * 7))\n").await.unwrap();
    shown(&mut terminal, "42").await;
    sandbox.delete().await;
    let (_, exit, code) = rest(&mut terminal).await;
    assert_eq!((exit, code), (None, 1001));
}

async fn a_sandbox_that_does_not_run_has_no_terminal(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client().clone();
    let open = async || {
        let opened = client.open_terminal(&sandbox.id, &running("true")).await;
        opened.map(|_| ()).unwrap_err().code()
    };
    client.pause(&sandbox.id).await.unwrap();
    assert_eq!(open().await, Some(ErrorCode::Conflict));
    client.resume(&sandbox.id).await.unwrap();
    let path = format!("/v1/machines/{}/stop", sandbox.id);
    let stopped = Answer::to(client.request(Method::POST, &path)).await;
    assert_eq!(stopped.status, 200, "{}", stopped.text());
    assert_eq!(open().await, Some(ErrorCode::Conflict));
    let id = sandbox.id;
    sandbox.delete().await;
    let opened = client.open_terminal(&id, &running("true")).await;
    assert_eq!(opened.map(|_| ()).unwrap_err().code(), Some(ErrorCode::NotFound));
}

async fn a_user_has_what_is_theirs_and_no_more(host: Host) {
    let sandbox = host.sandbox().await;
    let client = sandbox.client();
    let put = async |query: &str, content: &str| {
        let answer = sandbox.put(query, content.to_owned()).await;
        assert_eq!(answer.status, 200, "{query}: {}", answer.text());
    };
    // Written as the user: theirs, with the directories made on the way, and readable by them.
    put("/home/panda/a/b/file&user=panda", "x").await;
    let owners =
        sandbox.run("stat -c %U:%G:%a /home/panda/a /home/panda/a/b /home/panda/a/b/file").await;
    assert_eq!(owners, "panda:panda:755\npanda:panda:755\npanda:panda:644\n");
    put("/srv/c/file&owner=panda&mode=0640", "x").await;
    let owners = sandbox.run("stat -c %U:%a /srv/c /srv/c/file").await;
    assert_eq!(owners, "panda:755\npanda:640\n");
    // By number, and for a command and a terminal as well.
    let uid = sandbox.run("id -u panda").await.trim().to_owned();
    let as_panda =
        ExecRequest { user: Some(uid.clone()), ..command("id -un; touch ~/mine; cat a/b/file") };
    assert_eq!(sandbox.exec(as_panda).await.stdout, "panda\nx");
    let options = TerminalOptions {
        user: Some("panda".to_owned()),
        ..running("id -un; tty; test -O $(tty) && echo owned")
    };
    let mut terminal = client.open_terminal(&sandbox.id, &options).await.unwrap();
    let (said, _, _) = rest(&mut terminal).await;
    assert!(said.starts_with("panda\r\n/dev/pts/") && said.ends_with("owned\r\n"), "{said}");

    // What the user could not do is refused, whoever the key belongs to.
    sandbox.run("install -m 600 /dev/null /root/secret; chmod 700 /root; install -m 600 /dev/null /srv/secret").await;
    for (method, route) in [
        (Method::GET, "/fs?path=/srv/secret"),
        (Method::GET, "/fs?path=/root/secret"),
        (Method::GET, "/fs/dir?path=/root"),
        (Method::GET, "/fs/stat?path=/root/secret"),
        (Method::PUT, "/fs?path=/srv/secret"),
        (Method::PUT, "/fs?path=/etc/new"),
        (Method::PUT, "/fs?owner=root&path=/home/panda/new"),
        (Method::DELETE, "/fs?path=/srv/secret"),
    ] {
        let request = sandbox.request(method.clone(), &format!("{route}&user=panda"));
        let refused = Answer::to(request).await;
        assert_eq!(refused.refusal(), (400, "invalid_request".to_owned()), "{method} {route}");
        assert!(refused.text().contains("permi"), "{}", refused.text());
    }
    let ghost = Answer::to(sandbox.request(Method::GET, "/fs?path=/etc/hostname&user=ghost")).await;
    assert_eq!(ghost.refusal().0, 400);
    assert!(ghost.text().contains("ghost"));
    let ghost =
        sandbox.request(Method::POST, "/exec").json(&json!({"cmd": "true", "user": "ghost"}));
    let ghost = Answer::to(ghost).await;
    assert_eq!(ghost.refusal().0, 400);
    assert!(ghost.text().contains("ghost"));
    let options = TerminalOptions { user: Some("ghost".to_owned()), ..running("true") };
    let refused = client.open_terminal(&sandbox.id, &options).await.map(|_| ()).unwrap_err();
    assert_eq!(refused.code(), Some(ErrorCode::InvalidRequest));
    // Root is root.
    let options = WriteOptions::default();
    client.write_file(&sandbox.id, "/srv/secret", "y", &options).await.unwrap();
    assert_eq!(sandbox.read("/srv/secret").await, b"y");
}
