//! Terminals over WebSockets.
#![expect(clippy::wildcard_enum_match_arm, reason = "a test fails on whatever was not due")]

use std::time::Duration;

use api::{ErrorCode, Scope, Terminal, TerminalList};
use futures::{SinkExt, StreamExt};
use reqwest::{Method, RequestBuilder, Response, Upgraded};
use serde_json::{Value, json};
use tokio_tungstenite::{
    WebSocketStream,
    tungstenite::{
        Message,
        protocol::{CloseFrame, Role},
    },
};

use super::{Server, refusal};
use crate::Config;

const DEADLINE: Duration = Duration::from_secs(60);

/// A client's end.
struct Client {
    socket: WebSocketStream<Upgraded>,
    id: String,
    offset: u64,
}

fn upgrading(request: RequestBuilder) -> RequestBuilder {
    request
        .header("connection", "Upgrade")
        .header("upgrade", "websocket")
        .header("sec-websocket-version", "13")
        .header("sec-websocket-key", "dGhlIHNhbXBsZSBub25jZQ==")
}

async fn answer(server: &Server, route: &str, query: &[(&str, &str)]) -> Response {
    upgrading(server.inside(Method::GET, route).query(query)).send().await.unwrap()
}

impl Client {
    async fn open(server: &Server, route: &str, query: &[(&str, &str)]) -> Self {
        Self::of(answer(server, route, query).await).await
    }

    async fn of(response: Response) -> Self {
        assert_eq!(response.status(), 101, "{}", response.text().await.unwrap());
        let header = |name| response.headers()[name].to_str().unwrap().to_owned();
        let (id, offset) = (header("x-terminal-id"), header("x-terminal-offset").parse().unwrap());
        let upgraded = response.upgrade().await.unwrap();
        Self {
            socket: WebSocketStream::from_raw_socket(upgraded, Role::Client, None).await,
            id,
            offset,
        }
    }

    async fn send(&mut self, message: Message) {
        self.socket.send(message).await.unwrap();
    }

    async fn type_in(&mut self, bytes: impl Into<Vec<u8>>) {
        self.send(Message::Binary(bytes.into().into())).await;
    }

    async fn say(&mut self, value: Value) {
        self.send(Message::text(value.to_string())).await;
    }

    async fn next(&mut self) -> Message {
        loop {
            let next = tokio::time::timeout(DEADLINE, self.socket.next()).await;
            match next.expect("something comes in time").expect("not the end").unwrap() {
                Message::Ping(_) | Message::Pong(_) => {}
                message => return message,
            }
        }
    }

    /// What it shows until `end` is in it.
    async fn until(&mut self, end: &str) -> Vec<u8> {
        let mut shown = Vec::new();
        while !String::from_utf8_lossy(&shown).contains(end) {
            match self.next().await {
                Message::Binary(bytes) => shown.extend_from_slice(&bytes),
                other => panic!("{other:?} came before {end:?}"),
            }
        }
        shown
    }

    /// All that is left: what it shows, what is said, and the code it closes with.
    async fn rest(&mut self) -> (String, Vec<Value>, u16) {
        let (mut shown, mut said) = (Vec::new(), Vec::new());
        loop {
            match self.next().await {
                Message::Binary(bytes) => shown.extend_from_slice(&bytes),
                Message::Text(text) => said.push(serde_json::from_str(&text).unwrap()),
                Message::Close(frame) => {
                    let code = frame.expect("a code").code.into();
                    return (String::from_utf8_lossy(&shown).into_owned(), said, code);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    async fn close(&mut self, code: u16) {
        let frame = CloseFrame { code: code.into(), reason: "".into() };
        self.send(Message::Close(Some(frame))).await;
    }
}

async fn terminals(server: &Server) -> Vec<Terminal> {
    let response = server.inside(Method::GET, "/terminals").send().await.unwrap();
    response.json::<TerminalList>().await.unwrap().terminals
}

async fn until_known(server: &Server, what: &str, holds: impl Fn(&[Terminal]) -> bool) {
    let wait = async {
        while !holds(&terminals(server).await) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(DEADLINE, wait).await.unwrap_or_else(|_| panic!("waited until {what}"));
}

#[tokio::test]
async fn a_command_in_a_terminal_tells_its_exit_code_before_it_closes() {
    let server = Server::start().await;
    let query = [
        ("cmd", "stty size; echo $TERM-$A; exit 7"),
        ("rows", "33"),
        ("cols", "111"),
        ("env.A", "é=1"),
    ];
    let mut client = Client::open(&server, "/exec/pty", &query).await;
    let (shown, said, code) = client.rest().await;
    assert_eq!(shown, "33 111\r\nxterm-256color-é=1\r\n");
    assert_eq!((said, code), (vec![json!({"exit": 7})], 1000));
    // The published command shows everything it is sent.
    let mut client = Client::open(&server, "/ssh", &[("cmd", "exit 7")]).await;
    assert_eq!(client.rest().await, (String::new(), Vec::new(), 1000));
    server.stop().await;
}

#[tokio::test]
async fn any_byte_is_typed_and_shown() {
    let server = Server::start().await;
    let query = [("cmd", "stty raw -echo; printf ready; exec head -c 300000")];
    let mut client = Client::open(&server, "/ssh", &query).await;
    client.until("ready").await;
    let typed: Vec<u8> = (0..=255).cycle().take(300_000).collect();
    for piece in typed.chunks(7_001) {
        client.type_in(piece).await;
    }
    let mut shown = Vec::new();
    while shown.len() < typed.len() {
        match client.next().await {
            Message::Binary(bytes) => shown.extend_from_slice(&bytes),
            other => panic!("{other:?}"),
        }
    }
    assert!(shown == typed);
    assert_eq!(client.rest().await.2, 1000);
    server.stop().await;
}

#[tokio::test]
async fn text_steers_and_what_is_not_understood_is_said() {
    let server = Server::start().await;
    let script =
        "trap 'stty size' WINCH; trap 'exit 3' INT; echo ready; while :; do sleep 0.05; done";
    let mut client = Client::open(&server, "/exec/pty", &[("cmd", script)]).await;
    client.until("ready").await;
    client.say(json!({"resize": {"rows": 12, "cols": 345}})).await;
    client.until("12 345").await;
    for bad in [json!({"resize": {"rows": 0, "cols": 80}}), json!({"signal": "NONE"}), json!([1])] {
        client.say(bad).await;
        match client.next().await {
            Message::Text(text) => assert!(text.contains("\"error\""), "{text}"),
            other => panic!("{other:?}"),
        }
    }
    client.say(json!({"signal": "INT"})).await;
    let (_, said, code) = client.rest().await;
    assert_eq!((said, code), (vec![json!({"exit": 3})], 1000));
    server.stop().await;
}

#[tokio::test]
async fn a_message_beyond_all_measure_ends_the_connection_and_not_the_terminal() {
    let server = Server::start().await;
    let mut client =
        Client::open(&server, "/ssh", &[("cmd", "stty -echo; echo ready; read a")]).await;
    client.until("ready").await;
    // It may close before it has taken all of it.
    let _ = client.socket.send(Message::Binary(vec![b'x'; (1 << 20) + 1].into())).await;
    let (_, said, code) = client.rest().await;
    assert_eq!((said.len(), code), (1, 1009));
    until_known(&server, "it is detached", |all| all.iter().any(|one| !one.attached)).await;
    server.stop().await;
}

#[tokio::test]
async fn a_lost_connection_leaves_the_terminal_and_a_closed_one_ends_it() {
    let server = Server::start().await;
    let query = [("cmd", "stty -echo; echo first; read a; echo second; read b; exit 4")];
    let mut client = Client::open(&server, "/exec/pty", &query).await;
    let first = client.until("first\r\n").await;
    let (id, at) = (client.id.clone(), first.len().to_string());
    drop(client);
    until_known(&server, "it is detached", |all| all.iter().any(|one| !one.attached)).await;
    let again = [("terminal", id.as_str()), ("offset", at.as_str())];
    let mut client = Client::open(&server, "/exec/pty", &again).await;
    assert_eq!((client.id.as_str(), client.offset), (id.as_str(), first.len() as u64));
    client.type_in("\n").await;
    assert_eq!(client.until("second").await, b"second\r\n");
    // Gone away is not closed.
    client.close(1001).await;
    until_known(&server, "it is detached", |all| all.iter().any(|one| !one.attached)).await;
    let mut client = Client::open(&server, "/exec/pty", &again[..1]).await;
    assert_eq!(client.offset, 0);
    client.until("second\r\n").await;
    client.close(1000).await;
    until_known(&server, "it has ended", |all| all.iter().all(|one| one.exit_code == Some(129)))
        .await;
    server.stop().await;
}

#[tokio::test]
async fn the_last_to_attach_has_the_terminal() {
    let server = Server::start().await;
    let mut first =
        Client::open(&server, "/ssh", &[("cmd", "stty -echo; echo ready; read a; echo $a")]).await;
    first.until("ready\r\n").await;
    let query = [("terminal", first.id.as_str()), ("offset", "7"), ("rows", "9"), ("cols", "99")];
    let mut second = Client::open(&server, "/exec/pty", &query).await;
    assert_eq!(first.rest().await.2, 4001);
    let now = terminals(&server).await;
    assert_eq!((now.len(), now[0].rows, now[0].cols, now[0].attached), (1, 9, 99, true));
    second.type_in("mine\n").await;
    assert_eq!(second.rest().await, ("mine\r\n".to_owned(), vec![json!({"exit": 0})], 1000));
    server.stop().await;
}

#[tokio::test]
async fn whoever_does_not_come_back_in_time_finds_nothing() {
    let config = Config { terminal_linger: Duration::from_millis(1), ..Config::testing() };
    let server = Server::start_configured(Default::default(), Default::default(), config).await;
    let mut client = Client::open(&server, "/ssh", &[("cmd", "echo ready; read a")]).await;
    client.until("ready").await;
    let id = client.id.clone();
    drop(client);
    until_known(&server, "it is forgotten", <[_]>::is_empty).await;
    let response = answer(&server, "/ssh", &[("terminal", &id)]).await;
    assert_eq!(refusal(response).await, ErrorCode::NotFound);
    let ended = server.inside(Method::DELETE, &format!("/terminals/{id}")).send().await.unwrap();
    assert_eq!(refusal(ended).await, ErrorCode::NotFound);
    server.stop().await;
}

#[tokio::test]
async fn a_terminal_ends_when_it_is_told_to() {
    let server = Server::start().await;
    let mut client = Client::open(&server, "/exec/pty", &[]).await;
    let path = format!("/terminals/{}", client.id);
    let ended = server.inside(Method::DELETE, &path).send().await.unwrap();
    assert_eq!(ended.status(), 204);
    let (_, said, code) = client.rest().await;
    // As a shell ends on a HUP, whichever it is.
    assert!(said[0]["exit"].is_number(), "{said:?}");
    assert_eq!(code, 1000);
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_is_refused_before_there_is_a_connection() {
    let server = Server::start().await;
    for query in [
        [("rows", "0"), ("cols", "80")],
        [("rows", "24"), ("cols", "9999")],
        [("rows", "many"), ("cols", "80")],
        [("user", "ghost"), ("cmd", "true")],
        [("cwd", "relative"), ("cmd", "true")],
        [("cwd", "/no/such/directory"), ("cmd", "true")],
        [("cmd", " "), ("cols", "80")],
        [("env.", "x"), ("cols", "80")],
    ] {
        let response = answer(&server, "/ssh", &query).await;
        assert_eq!(refusal(response).await, ErrorCode::InvalidRequest, "{query:?}");
    }
    for id in ["00000000-0000-4000-8000-000000000000", "none", "../x"] {
        let response = answer(&server, "/ssh", &[("terminal", id)]).await;
        assert_eq!(refusal(response).await, ErrorCode::NotFound, "{id}");
    }
    let plain = server.inside(Method::GET, "/ssh").send().await.unwrap();
    assert_eq!(refusal(plain).await, ErrorCode::InvalidRequest);
    let elsewhere = "/v1/sandboxes/00000000-0000-4000-8000-000000000000/ssh";
    for request in
        [server.request(Method::GET, elsewhere), upgrading(server.request(Method::GET, elsewhere))]
    {
        assert_eq!(refusal(request.send().await.unwrap()).await, ErrorCode::NotFound);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_key_of_full_scope_may_come_in_the_query_of_a_terminal_alone() {
    let server = Server::start().await;
    let (full, read) = (server.key(Scope::Full).await, server.key(Scope::Read).await);
    let path = |route: &str| format!("/v1/sandboxes/{}{route}", server.sandbox);
    let ask = async |route: &str, key: &str| {
        let request = server.anonymous(Method::GET, &path(route));
        upgrading(request.query(&[("access_token", key), ("cmd", "exit")])).send().await.unwrap()
    };
    Client::of(ask("/ssh", &full).await).await.rest().await;
    assert_eq!(refusal(ask("/ssh", &read).await).await, ErrorCode::Forbidden);
    assert_eq!(refusal(ask("/ssh", "none").await).await, ErrorCode::Unauthenticated);
    assert_eq!(refusal(ask("/terminals", &full).await).await, ErrorCode::Unauthenticated);
    server.stop().await;
}

#[tokio::test]
async fn a_server_that_stops_says_so_and_leaves_the_terminal() {
    let server = Server::start().await;
    let mut client = Client::open(&server, "/exec/pty", &[("cmd", "echo ready; read a")]).await;
    client.until("ready").await;
    let (_, (_, said, code)) = tokio::join!(server.stop(), client.rest());
    assert_eq!((said, code), (Vec::new(), 1012));
}

#[tokio::test]
async fn a_client_that_reads_nothing_stops_no_other() {
    let server = Server::start().await;
    let flood = Client::open(&server, "/ssh", &[("cmd", "yes")]).await;
    for _ in 0..3 {
        let mut other =
            Client::open(&server, "/ssh", &[("cmd", "stty -echo; read a; echo $a")]).await;
        other.type_in("alive\n").await;
        other.until("alive").await;
        assert_eq!(other.rest().await.2, 1000);
    }
    let end = format!("/terminals/{}", flood.id);
    assert_eq!(server.inside(Method::DELETE, &end).send().await.unwrap().status(), 204);
    server.stop().await;
}
