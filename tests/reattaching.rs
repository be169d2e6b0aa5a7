//! Terminals that are come back to: after a connection broke, and in clones of their sandbox.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::{process::Stdio, time::Duration};

use api::{CreateSnapshot, Fork, SandboxId, TerminalId};
use client::{Client, ScreenEvent, TerminalConnection, TerminalOptions};
use tests::{End, Host, Server, program, small, suite, until};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    process::Command,
    sync::watch,
};

suite! {
    a_shell_of_ours_goes_on_when_its_connection_broke,
    a_clone_has_a_copy_of_each_terminal;
    soak:
}

/// A guest under emulation, beside others on few cores.
const PATIENCE: Duration = Duration::from_secs(120);

/// A way to the server that breaks whenever the server's address is told anew: the URL to use instead.
async fn fragile_way(server: &Server) -> (String, watch::Sender<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (tell, told) = watch::channel(address(server));
    tokio::spawn(async move {
        while let Ok((mut near, _)) = listener.accept().await {
            let mut told = told.clone();
            let target = told.borrow_and_update().clone();
            tokio::spawn(async move {
                let Ok(mut far) = TcpStream::connect(target).await else { return };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
                    _ = told.changed() => {}
                }
            });
        }
    });
    (url, tell)
}

fn address(server: &Server) -> String {
    server.url().strip_prefix("http://").unwrap().to_owned()
}

async fn read_until(from: &mut (impl AsyncRead + Unpin), end: &str) -> String {
    let (mut seen, mut buffer) = (String::new(), [0; 1024]);
    while !seen.contains(end) {
        let read = tokio::time::timeout(PATIENCE, from.read(&mut buffer)).await;
        let count = read.unwrap_or_else(|_| panic!("no {end:?} in {seen:?}")).unwrap();
        assert!(count > 0, "it ended without {end:?}: {seen:?}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    seen
}

async fn a_shell_of_ours_goes_on_when_its_connection_broke(host: Host) {
    let _room = host.room(1).await;
    let mut server = Server::start().await;
    let sandbox = server.create(&small()).await.id;
    let (url, tell) = fragile_way(&server).await;
    let script = "stty -echo; echo one; read a; echo got-$a; read b; echo then-$b; exit 5";
    let mut shell = Command::new(program())
        .args(["sandbox", "shell", &sandbox.to_string(), "--", script])
        .env("ATOLL_URL", &url)
        .env("ATOLL_KEY", server.key())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut keys = shell.stdin.take().unwrap();
    let (mut shown, mut said) = (shell.stdout.take().unwrap(), shell.stderr.take().unwrap());
    read_until(&mut shown, "one\r\n").await;

    tell.send_replace(address(&server));
    read_until(&mut said, "lost").await;
    // Typed while there is no connection: it arrives all the same.
    keys.write_all(b"x\n").await.unwrap();
    read_until(&mut shown, "got-x\r\n").await;

    server.restart(End::Killed).await;
    tell.send_replace(address(&server));
    read_until(&mut said, "lost").await;
    keys.write_all(b"y\n").await.unwrap();
    read_until(&mut shown, "then-y\r\n").await;
    let ended = tokio::time::timeout(PATIENCE, shell.wait()).await.expect("it ends").unwrap();
    assert_eq!(ended.code(), Some(5));
    host.end(server).await;
}

/// The rest of what it shows, and its exit code.
async fn rest(terminal: &mut TerminalConnection) -> (String, Option<i32>) {
    let (mut shown, mut exit) = (Vec::new(), None);
    loop {
        let next = tokio::time::timeout(PATIENCE, terminal.screen.next()).await;
        match next.expect("something happens").expect("it is not over").unwrap() {
            ScreenEvent::Output(bytes) => shown.extend_from_slice(&bytes),
            ScreenEvent::Exited { exit_code } => exit = Some(exit_code),
            ScreenEvent::Failed { message } => panic!("{message}"),
            ScreenEvent::Closed { .. } => {
                return (String::from_utf8_lossy(&shown).into_owned(), exit);
            }
        }
    }
}

/// What the terminal says to its own sandbox's name, from where the first had come to.
async fn answer(client: &Client, sandbox: &SandboxId, id: &TerminalId, name: &str) -> String {
    let mut terminal = until("it is attached to", PATIENCE, async || {
        client.attach_terminal(sandbox, id, Some("ready\r\n".len() as u64), None).await.ok()
    })
    .await;
    terminal.keyboard.type_in(format!("{name}\n")).await.unwrap();
    let (said, exit) = rest(&mut terminal).await;
    assert_eq!(exit, Some(4));
    said
}

async fn a_clone_has_a_copy_of_each_terminal(host: Host) {
    let _room = host.room(2).await;
    let server = host.server().await;
    let client = server.client();
    let parent = server.sandbox(&small()).await;
    let options = TerminalOptions {
        cmd: Some("kept=yes; stty -echo; echo ready; read a; echo $kept-$a; exit 4".to_owned()),
        size: Some((24, 80)),
        ..TerminalOptions::default()
    };
    let mut terminal = client.open_terminal(&parent.id, &options).await.unwrap();
    let mut shown = Vec::new();
    while !shown.ends_with(b"ready\r\n") {
        let next = tokio::time::timeout(PATIENCE, terminal.screen.next()).await;
        match next.expect("something is shown") {
            Some(Ok(ScreenEvent::Output(bytes))) => shown.extend_from_slice(&bytes),
            other => panic!("{other:?}"),
        }
    }
    let snapshot = client.create_snapshot(&parent.id, &CreateSnapshot::default()).await.unwrap().id;
    let fork = Fork { count: Some(1), ..Fork::default() };
    let child = client.fork(&parent.id, &fork).await.unwrap().sandbox.id;
    // The same id in each, and each is a terminal of its own.
    assert_eq!(answer(client, &child, &terminal.id, "child").await, "yes-child\r\n");
    client.delete_sandbox(&child).await.unwrap();
    let restored = server.restored(&snapshot).await;
    assert_eq!(answer(client, &restored.id, &terminal.id, "restored").await, "yes-restored\r\n");
    restored.delete().await;
    assert_eq!(answer(client, &parent.id, &terminal.id, "parent").await, "yes-parent\r\n");
    parent.delete().await;
    client.delete_snapshot(&snapshot).await.unwrap();
}
