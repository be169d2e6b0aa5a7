//! Terminals: what a process sees of one, and what becomes of it when whoever is attached comes and goes.
use std::time::Duration;

use protocol::frame::Channel;
use protocol::message::{Command, ErrorCode, TerminalOpen, TerminalStatus, WindowSize};
use protocol::{Reply, Request};

use crate::support::{Client, Event, refused};

const SIZE: WindowSize = WindowSize { rows: 30, columns: 101 };

fn terminal(id: &str, script: &str) -> TerminalOpen {
    TerminalOpen {
        id: id.to_owned(),
        command: Some(Command::Script(script.as_bytes().to_vec().into())),
        working_directory: None,
        environment: vec![("TERM".to_owned(), "xterm".to_owned())],
        user: None,
        size: SIZE,
        linger_ms: 600_000,
    }
}

fn open(client: &mut Client, id: &str, script: &str) -> u32 {
    let stream = client.open(&Request::TerminalOpen(terminal(id, script)));
    assert_eq!(client.reply(stream), Reply::TerminalAttached { offset: 0 });
    stream
}

fn attach(client: &mut Client, id: &str, offset: Option<u64>) -> (u32, u64) {
    let request = Request::TerminalAttach { id: id.to_owned(), offset, size: None };
    let stream = client.open(&request);
    match client.reply(stream) {
        Reply::TerminalAttached { offset } => (stream, offset),
        other => panic!("an attachment was due, not {other:?}"),
    }
}

/// What it prints until `end` is in it.
fn until(client: &mut Client, stream: u32, end: &[u8]) -> Vec<u8> {
    let mut output = Vec::new();
    while !output.windows(end.len()).any(|window| window == end) {
        match client.next(stream) {
            Event::Data(Channel::Content, data) => output.extend_from_slice(&data),
            other => panic!("{other:?} came before {:?}", String::from_utf8_lossy(end)),
        }
    }
    output
}

/// The rest of what it prints, and its exit code.
fn rest(client: &mut Client, stream: u32) -> (String, i32) {
    let mut output = Vec::new();
    let exit_code = loop {
        match client.next(stream) {
            Event::Data(Channel::Content, data) => output.extend_from_slice(&data),
            Event::Reply(Reply::TerminalEnded { exit_code }) => break exit_code,
            other => panic!("{other:?} does not belong to a terminal"),
        }
    };
    assert_eq!(client.next(stream), Event::Finish);
    (String::from_utf8_lossy(&output).into_owned(), exit_code)
}

fn status(client: &mut Client, id: &str) -> Option<TerminalStatus> {
    match client.call(&Request::TerminalList) {
        Reply::Terminals(all) => all.into_iter().find(|one| one.id == id),
        other => panic!("a list was due, not {other:?}"),
    }
}

#[test]
fn a_process_has_a_terminal_that_controls_it() {
    let mut client = Client::start();
    let stream = open(
        &mut client,
        "a",
        "test -t 0 && test -t 1 && test -t 2 && stty size && echo $TERM && echo by name >/dev/tty; exit 7",
    );
    let (output, exit_code) = rest(&mut client, stream);
    assert_eq!((output.as_str(), exit_code), ("30 101\r\nxterm\r\nby name\r\n", 7));
}

#[test]
fn without_a_command_it_is_a_login_shell() {
    let mut client = Client::start();
    let request = TerminalOpen { command: None, ..terminal("a", "") };
    let stream = client.open(&Request::TerminalOpen(request));
    assert_eq!(client.reply(stream), Reply::TerminalAttached { offset: 0 });
    client.send_data(stream, b"echo \"<$0>\" \"<$SHELL>\"; exit 5\n");
    let (output, exit_code) = rest(&mut client, stream);
    assert!(output.contains("<-") && output.contains("</"), "{output}");
    assert_eq!(exit_code, 5);
}

#[test]
fn every_byte_goes_both_ways_and_a_megabyte_too() {
    let mut client = Client::start();
    let stream = open(&mut client, "a", "stty raw -echo; printf ready; exec cat");
    until(&mut client, stream, b"ready");
    let typed: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
    client.send_data(stream, &typed);
    let mut output = Vec::new();
    while output.len() < typed.len() {
        match client.next(stream) {
            Event::Data(Channel::Content, data) => output.extend_from_slice(&data),
            other => panic!("{other:?}"),
        }
    }
    assert!(output == typed, "other bytes than were typed");
    client.call(&Request::TerminalEnd { id: "a".to_owned(), grace_ms: 5000 });
    assert_eq!(rest(&mut client, stream).1, 128 + 1);
}

#[test]
fn a_new_size_and_a_signal_reach_the_foreground() {
    let mut client = Client::start();
    let script = "trap 'stty size' WINCH; trap 'echo interrupted; exit 3' INT; echo ready; while :; do sleep 0.05; done";
    let stream = open(&mut client, "a", script);
    until(&mut client, stream, b"ready");
    let size = WindowSize { rows: 11, columns: 222 };
    assert_eq!(client.call(&Request::TerminalResize { id: "a".to_owned(), size }), Reply::Done);
    until(&mut client, stream, b"11 222");
    let interrupt = Request::TerminalSignal { id: "a".to_owned(), signal: 2 };
    assert_eq!(client.call(&interrupt), Reply::Done);
    let (output, exit_code) = rest(&mut client, stream);
    assert!(output.contains("interrupted"), "{output}");
    assert_eq!(exit_code, 3);
}

#[test]
fn whoever_comes_back_goes_on_where_they_were() {
    let mut client = Client::start();
    let stream =
        open(&mut client, "a", "stty -echo; echo first; read line; echo second; read line; exit 4");
    let first = until(&mut client, stream, b"first\r\n");
    client.send_data(stream, b"\n");
    until(&mut client, stream, b"second\r\n");
    // The connection is lost, and everything on it.
    client.greet([2; 16]);
    assert!(!status(&mut client, "a").unwrap().attached);
    let (stream, offset) = attach(&mut client, "a", Some(first.len() as u64));
    assert_eq!(offset, first.len() as u64);
    assert!(until(&mut client, stream, b"second\r\n").ends_with(b"second\r\n"));
    client.greet([3; 16]);
    let (stream, offset) = attach(&mut client, "a", None);
    assert_eq!(offset, 0);
    assert!(until(&mut client, stream, b"second\r\n").starts_with(&first));
    client.send_data(stream, b"\n");
    assert_eq!(rest(&mut client, stream).1, 4);
    // Also after its end, for a while.
    let (stream, _) = attach(&mut client, "a", Some(u64::MAX));
    assert_eq!(rest(&mut client, stream), (String::new(), 4));
    assert_eq!(status(&mut client, "a").unwrap().exit_code, Some(4));
}

#[test]
fn the_last_to_attach_has_it() {
    let mut client = Client::start();
    let first = open(&mut client, "a", "stty -echo; echo ready; read line; echo $line");
    until(&mut client, first, b"ready\r\n");
    let (second, offset) = attach(&mut client, "a", Some(7));
    assert_eq!(offset, 7);
    assert_eq!(refused(client.reply(first)), ErrorCode::Conflict);
    client.send_data(second, b"mine\n");
    assert_eq!(rest(&mut client, second), ("mine\r\n".to_owned(), 0));
}

#[test]
fn a_reader_that_stops_stops_its_own_terminal_alone() {
    let mut client = Client::start();
    let flood = open(&mut client, "flood", "yes");
    let before = client.call(&Request::Ping);
    assert_eq!(before, Reply::Done);
    // It prints until nobody takes it any longer, and what waits does not grow.
    let mut last = 0;
    client.wait_until("the flood stands", |client| {
        let now = status(client, "flood").unwrap().output_bytes;
        let stands = now == last && now > u64::from(protocol::INITIAL_CREDIT);
        last = now;
        std::thread::yield_now();
        stands
    });
    assert!(last <= u64::from(protocol::INITIAL_CREDIT) + (1 << 20), "{last}");
    let other = open(&mut client, "other", "echo alive");
    assert_eq!(rest(&mut client, other), ("alive\r\n".to_owned(), 0));
    // Taken again, it goes on.
    let mut taken = 0;
    while taken < 4 << 20 {
        match client.next(flood) {
            Event::Data(Channel::Content, data) => taken += data.len(),
            other => panic!("{other:?}"),
        }
    }
    // With nobody attached it does not wait for anyone.
    client.reset(flood);
    let at = status(&mut client, "flood").unwrap().output_bytes;
    client.wait_until("it goes on alone", |client| {
        status(client, "flood").unwrap().output_bytes > at + (4 << 20)
    });
    let (flood, offset) = attach(&mut client, "flood", Some(0));
    assert!(offset > at);
    client.call(&Request::TerminalEnd { id: "flood".to_owned(), grace_ms: 5000 });
    assert_eq!(rest(&mut client, flood).1, 128 + 1);
}

#[test]
fn one_that_nobody_comes_back_to_ends() {
    let mut client = Client::start();
    let marker = tempfile::NamedTempFile::new().unwrap();
    let script = format!(
        "trap 'echo gone >{}; exit' HUP; echo ready; while :; do sleep 0.05; done",
        marker.path().display()
    );
    let stream = client
        .open(&Request::TerminalOpen(TerminalOpen { linger_ms: 1, ..terminal("a", &script) }));
    client.reply(stream);
    until(&mut client, stream, b"ready");
    client.reset(stream);
    client.wait_until("it was hung up and forgotten", |client| status(client, "a").is_none());
    assert_eq!(std::fs::read_to_string(marker.path()).unwrap(), "gone\n");
}

#[test]
fn one_that_does_not_end_is_killed() {
    let mut client = Client::start();
    let stream = open(&mut client, "a", "trap '' HUP; echo ready; while :; do sleep 0.05; done");
    until(&mut client, stream, b"ready");
    client.call(&Request::TerminalEnd { id: "a".to_owned(), grace_ms: 10 });
    assert_eq!(rest(&mut client, stream).1, 128 + 9);
}

#[test]
fn the_end_comes_after_the_last_byte_and_does_not_wait_for_the_background() {
    let mut client = Client::start();
    for round in 0..5 {
        let script = "trap '' HUP; sleep 300 & seq 1 20000; exit 6";
        let stream = open(&mut client, &format!("a{round}"), script);
        let (output, exit_code) = rest(&mut client, stream);
        assert!(output.ends_with("19999\r\n20000\r\n"), "{} bytes", output.len());
        assert_eq!((output.lines().count(), exit_code), (20_000, 6));
    }
}

#[test]
fn twenty_at_once_are_kept_apart() {
    let mut client = Client::start();
    let streams: Vec<u32> = (0..20)
        .map(|n| {
            open(
                &mut client,
                &format!("t{n}"),
                "stty -echo; echo ready; read line; echo $line; exit ${#line}",
            )
        })
        .collect();
    for (at, &stream) in streams.iter().enumerate() {
        until(&mut client, stream, b"ready\r\n");
        client.send_data(stream, format!("{}\n", "x".repeat(at + 1)).as_bytes());
    }
    for (at, &stream) in streams.iter().enumerate() {
        let (output, exit_code) = rest(&mut client, stream);
        assert_eq!(output, format!("{}\r\n", "x".repeat(at + 1)));
        assert_eq!(usize::try_from(exit_code).unwrap(), at + 1);
    }
}

#[test]
fn what_cannot_be_is_refused() {
    let mut client = Client::start();
    let stream = open(&mut client, "a", "read line");
    let refusal = |client: &mut Client, request: TerminalOpen| {
        client.refusal(&Request::TerminalOpen(request))
    };
    assert_eq!(refusal(&mut client, terminal("a", "true")), ErrorCode::Conflict);
    assert_eq!(refusal(&mut client, terminal("../a", "true")), ErrorCode::Invalid);
    let nobody = TerminalOpen { user: Some("ghost".to_owned()), ..terminal("b", "true") };
    assert_eq!(refusal(&mut client, nobody), ErrorCode::Invalid);
    let none = WindowSize { rows: 0, columns: 80 };
    let flat = TerminalOpen { size: none, ..terminal("b", "true") };
    assert_eq!(refusal(&mut client, flat), ErrorCode::Invalid);
    let missing = TerminalOpen {
        command: Some(Command::Arguments(vec![b"/no/such/program".to_vec().into()])),
        ..terminal("b", "")
    };
    assert_eq!(refusal(&mut client, missing), ErrorCode::Invalid);
    assert!(status(&mut client, "b").is_none());
    for request in [
        Request::TerminalAttach { id: "b".to_owned(), offset: None, size: None },
        Request::TerminalResize { id: "b".to_owned(), size: SIZE },
        Request::TerminalSignal { id: "b".to_owned(), signal: 2 },
        Request::TerminalEnd { id: "b".to_owned(), grace_ms: 0 },
    ] {
        assert_eq!(client.refusal(&request), ErrorCode::NotFound);
    }
    assert_eq!(
        client.refusal(&Request::TerminalSignal { id: "a".to_owned(), signal: 200 }),
        ErrorCode::Invalid
    );
    client.send_data(stream, b"\n");
    assert_eq!(rest(&mut client, stream).1, 0);
}

#[test]
fn a_shutdown_ends_a_shell_at_its_prompt_at_once() {
    let mut client = Client::start();
    let request = TerminalOpen { command: None, ..terminal("a", "") };
    let stream = client.open(&Request::TerminalOpen(request));
    client.reply(stream);
    let began = std::time::Instant::now();
    assert_eq!(client.call(&Request::Release { grace_ms: 600_000 }), Reply::Done);
    assert!(began.elapsed() < Duration::from_secs(60));
    rest(&mut client, stream);
}
