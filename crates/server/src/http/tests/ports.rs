//! Ports of a sandbox, before real servers on real sockets: what they are sent and what comes of their answers.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::Duration,
};

use api::{ErrorCode, NewPreviewToken, PortList, PreviewTokenList, Scope};
use futures::StreamExt;
use reqwest::Method;
use serde_json::json;

use super::{BTreeMap, Clock, Config, KEY, Server, refusal};
use crate::config::{PreviewAccess, PreviewConfig};

const DEADLINE: Duration = Duration::from_secs(60);

/// A server in the guest: answers each connection in a thread of its own.
fn guest(answer: impl Fn(Guest) + Send + Sync + 'static) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let answer = std::sync::Arc::new(answer);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, answer) = (stream.unwrap(), std::sync::Arc::clone(&answer));
            stream.set_read_timeout(Some(DEADLINE)).unwrap();
            std::thread::spawn(move || answer(Guest::new(stream)));
        }
    });
    port
}

struct Guest {
    stream: TcpStream,
    reader: BufReader<TcpStream>,
}

impl Guest {
    fn new(stream: TcpStream) -> Self {
        let reader = BufReader::new(stream.try_clone().unwrap());
        Self { stream, reader }
    }

    /// The lines of a request's head.
    fn head(&mut self) -> Vec<String> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            self.reader.read_line(&mut line).unwrap();
            let line = line.trim_end().to_owned();
            if line.is_empty() {
                return lines;
            }
            lines.push(line);
        }
    }

    fn say(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).unwrap();
    }

    fn answer(&mut self, text: &str) {
        let length = text.len();
        self.say(&format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n{text}"));
    }
}

/// Answers with the head it was sent.
fn mirror() -> u16 {
    guest(|mut guest| {
        let head = guest.head().join("\n");
        guest.answer(&head);
    })
}

async fn text(request: reqwest::RequestBuilder) -> String {
    let response = request.send().await.unwrap();
    assert_eq!(response.status(), 200);
    response.text().await.unwrap()
}

#[tokio::test]
async fn a_request_arrives_as_it_was_sent_without_what_is_ours() {
    let server = Server::start().await;
    let port = mirror();
    let sent = server
        .inside(Method::GET, &format!("/proxy/{port}/a%2Fb/../c?x=%20y&access_token={KEY}&z"))
        .header("X-API-Key", KEY)
        .header("Cookie", "theirs=1; atoll_preview=ours")
        .header("X-Theirs", "2");
    let seen = text(sent).await;
    // reqwest takes the dots out itself.
    assert!(
        seen.starts_with("GET /c?x=%20y&z HTTP/1.1\n")
            || seen.starts_with("GET /a%2Fb/../c?x=%20y&z HTTP/1.1\n"),
        "{seen}"
    );
    for line in [
        "cookie: theirs=1".to_owned(),
        "x-theirs: 2".to_owned(),
        format!("host: localhost:{port}"),
        "x-forwarded-for: 127.0.0.1".to_owned(),
        format!("x-forwarded-prefix: /v1/sandboxes/{}/proxy/{port}", server.sandbox),
    ] {
        assert!(seen.lines().any(|seen| seen == line), "{line} in {seen}");
    }
    for ours in [KEY, "atoll_preview", "authorization", "x-api-key", "access_token"] {
        assert!(!seen.contains(ours), "{ours} in {seen}");
    }
    // What is not ours is the guest's affair.
    let theirs = server
        .anonymous(
            Method::GET,
            &format!("/v1/sandboxes/{}/proxy/{port}?access_token=x", server.sandbox),
        )
        .header("X-API-Key", KEY)
        .header("Idempotency-Key", "once")
        .bearer_auth("of-the-guest");
    let seen = text(theirs).await;
    for theirs in ["GET /?access_token=x ", "Bearer of-the-guest", "idempotency-key: once"] {
        assert!(seen.contains(theirs), "{theirs} in {seen}");
    }
    server.stop().await;
}

#[tokio::test]
async fn an_answer_comes_while_it_is_made_and_a_body_goes_while_it_is_sent() {
    let server = Server::start().await;
    let (go, wait) = mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let events = guest(move |mut guest| {
        guest.head();
        guest.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        wait.lock().unwrap().recv_timeout(DEADLINE).unwrap();
        guest.say("data: 2\n\n");
    });
    let response =
        server.inside(Method::GET, &format!("/proxy/{events}/events")).send().await.unwrap();
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    let mut body = response.bytes_stream();
    assert_eq!(body.next().await.unwrap().unwrap(), "data: 1\n\n");
    go.send(()).unwrap();
    assert_eq!(body.next().await.unwrap().unwrap(), "data: 2\n\n");
    assert!(body.next().await.is_none());

    let (told, tell) = mpsc::channel::<u8>();
    let upload = guest(move |mut guest| {
        let head = guest.head();
        assert!(head.iter().any(|line| line == "transfer-encoding: chunked"), "{head:?}");
        // A chunk each: its length, the byte, two ends of lines.
        for _ in 0..2 {
            let mut chunk = [0; 6];
            guest.reader.read_exact(&mut chunk).unwrap();
            told.send(chunk[3]).unwrap();
        }
        guest.answer("both");
    });
    let (pieces, piece) = futures::channel::mpsc::unbounded::<Result<&[u8], std::io::Error>>();
    let sending = server
        .inside(Method::POST, &format!("/proxy/{upload}/"))
        .body(reqwest::Body::wrap_stream(piece))
        .send();
    let sending = tokio::spawn(sending);
    let (tell, pieces) = tokio::task::spawn_blocking(move || {
        pieces.unbounded_send(Ok(b"a")).unwrap();
        assert_eq!(tell.recv_timeout(DEADLINE).unwrap(), b'a');
        (tell, pieces)
    })
    .await
    .unwrap();
    pieces.unbounded_send(Ok(b"b")).unwrap();
    drop(pieces);
    assert_eq!(sending.await.unwrap().unwrap().text().await.unwrap(), "both");
    assert_eq!(tell.recv().unwrap(), b'b');
    server.stop().await;
}

#[tokio::test]
async fn where_nothing_listens_or_answers_is_told() {
    let server = Server::start().await;
    // Taken, and nobody listens.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let nobody = socket.local_addr().unwrap().port();
    let babbling = guest(|mut guest| {
        guest.head();
        guest.say("hello\r\n\r\n");
    });
    let leaving = guest(|mut guest| drop(guest.head()));
    for port in [nobody, babbling, leaving] {
        let response = server.inside(Method::GET, &format!("/proxy/{port}/")).send().await.unwrap();
        assert_eq!(response.status(), 502, "{port}");
        let body: api::ErrorBody = response.json().await.unwrap();
        assert_eq!(body.code, ErrorCode::BadGateway);
        for words in ["connection refused", "no route to host", "timeout", "deadline exceeded"] {
            assert!(!body.error.contains(words), "{}", body.error);
        }
    }
    for bad in ["0", "70000", "x"] {
        let response = server.inside(Method::GET, &format!("/proxy/{bad}/")).send().await.unwrap();
        assert_eq!(refusal(response).await, ErrorCode::InvalidRequest);
    }
    server.stop().await;
}

#[tokio::test]
async fn one_that_never_answers_is_given_up() {
    let previews =
        PreviewConfig { answer_deadline: Duration::from_millis(300), ..PreviewConfig::default() };
    let config = Config { previews, ..Config::testing() };
    let server = Server::start_configured(Clock::default(), BTreeMap::new(), config).await;
    let (told, tell) = mpsc::channel::<()>();
    let silent = guest(move |mut guest| {
        guest.head();
        // Until it is given up.
        let _ = guest.reader.read(&mut [0]);
        told.send(()).unwrap();
    });
    let response = server.inside(Method::GET, &format!("/proxy/{silent}/")).send().await.unwrap();
    assert_eq!(refusal(response).await, ErrorCode::TimedOut);
    tokio::task::spawn_blocking(move || tell.recv_timeout(DEADLINE).unwrap()).await.unwrap();
    server.stop().await;
}

#[tokio::test]
async fn a_client_that_goes_ends_the_guests_connection() {
    let server = Server::start().await;
    let (told, tell) = mpsc::channel::<()>();
    let port = guest(move |mut guest| {
        guest.head();
        guest.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\n");
        // Says nothing more, and waits for its end.
        let _ = guest.reader.read(&mut [0]);
        told.send(()).unwrap();
    });
    let response = server.inside(Method::GET, &format!("/proxy/{port}/")).send().await.unwrap();
    let mut body = response.bytes_stream();
    assert!(body.next().await.is_some());
    drop(body);
    tokio::task::spawn_blocking(move || tell.recv_timeout(DEADLINE).unwrap()).await.unwrap();
    server.stop().await;
}

/// What comes over a connection of its own, as far as it is asked for.
fn raw(server: &Server, request: &str) -> TcpStream {
    let address = server.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn a_websocket_carries_bytes_both_ways_until_either_side_ends() {
    let server = Server::start().await;
    let port = guest(|mut guest| {
        let head = guest.head();
        let has = |line: &str| head.iter().any(|seen| seen.eq_ignore_ascii_case(line));
        assert!(has("connection: upgrade") && has("upgrade: websocket"), "{head:?}");
        assert!(has("sec-websocket-key: abc"), "{head:?}");
        guest.say("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: def\r\n\r\nfirst");
        let mut word = [0; 6];
        guest.reader.read_exact(&mut word).unwrap();
        guest.stream.write_all(&word).unwrap();
        let _ = guest.reader.read(&mut [0]);
    });
    let id = server.sandbox;
    let request = format!(
        "GET /v1/sandboxes/{id}/proxy/{port}/ws?access_token={KEY} HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n\
         Upgrade: websocket\r\nSec-WebSocket-Key: abc\r\nSec-WebSocket-Version: 13\r\n\r\n"
    );
    let mut stream = raw(&server, &request);
    let mut seen = Vec::new();
    while !seen.ends_with(b"first") {
        let mut piece = [0; 1024];
        let count = stream.read(&mut piece).unwrap();
        assert!(count > 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..count]);
    }
    let head = String::from_utf8_lossy(&seen).to_ascii_lowercase();
    assert!(head.starts_with("http/1.1 101 "), "{head}");
    assert!(head.contains("sec-websocket-accept: def") && head.contains("upgrade: websocket"));
    stream.write_all(b"\x00second"[1..].as_ref()).unwrap();
    let mut word = [0; 6];
    stream.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"second");
    // The server's own end ends it, too.
    server.stop().await;
    assert_eq!(stream.read(&mut [0; 10]).unwrap_or(0), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_request_however_it_is_framed() {
    let server = Server::start().await;
    let (told, tell) = mpsc::channel::<String>();
    let port = guest(move |mut guest| {
        let head = guest.head();
        let length = head.iter().find_map(|line| line.strip_prefix("content-length: "));
        let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
        guest.reader.read_exact(&mut body).unwrap();
        guest.answer("one");
        // Whatever else comes on this connection.
        let mut rest = String::new();
        let _ = guest.reader.read_to_string(&mut rest);
        told.send(format!("{}|{rest}", String::from_utf8_lossy(&body))).unwrap();
    });
    let id = server.sandbox;
    let head = format!(
        "POST /v1/sandboxes/{id}/proxy/{port}/ HTTP/1.1\r\nHost: a\r\nX-API-Key: {KEY}\r\n"
    );
    let hidden = "GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n";
    for (framing, refused) in [
        ("Content-Length: 3\r\nConnection: close, Content-Length\r\n\r\nabc".to_owned(), false),
        (format!("Content-Length: 3\r\nContent-Length: 30\r\n\r\nabc{hidden}"), true),
        (format!("Transfer-Encoding: xchunked\r\n\r\n{hidden}"), true),
        (format!("Content-Length: +3\r\n\r\nabc{hidden}"), true),
    ] {
        let mut stream = raw(&server, &format!("{head}{framing}"));
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        drop(stream);
        if refused {
            assert_eq!(answer, "HTTP/1.1 400", "{framing:?}");
        } else {
            assert_eq!(answer, "HTTP/1.1 200", "{framing:?}");
            assert_eq!(tell.recv_timeout(DEADLINE).unwrap(), "abc|");
        }
    }
    assert!(tell.try_recv().is_err(), "nothing else has reached the guest");
    server.stop().await;
}

#[tokio::test]
async fn a_token_opens_one_port_by_query_then_by_cookie_until_it_is_revoked() {
    let server = Server::start().await;
    let (port, other) = (mirror(), mirror());
    let made = server.inside(Method::POST, "/preview-token").json(&json!({"port": port}));
    let made = made.send().await.unwrap();
    assert_eq!(made.status(), 201);
    let made: NewPreviewToken = made.json().await.unwrap();
    let path = |port: u16| format!("/v1/sandboxes/{}/proxy/{port}/x", server.sandbox);
    let with =
        |port| server.anonymous(Method::GET, &path(port)).query(&[("access_token", &made.token)]);

    let response = with(port).send().await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap().to_owned();
    assert!(
        cookie.contains("; HttpOnly; SameSite=Lax")
            && cookie.contains(&format!("Path={}", made.path))
    );
    assert!(!response.text().await.unwrap().contains(&made.token));
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let with_cookie = |port| server.anonymous(Method::GET, &path(port)).header("Cookie", &cookie);
    let seen = text(with_cookie(port)).await;
    assert!(!seen.contains("cookie"), "{seen}");

    for refused in [with(other), with_cookie(other), server.anonymous(Method::GET, &path(port))] {
        assert_eq!(refusal(refused.send().await.unwrap()).await, ErrorCode::Unauthenticated);
    }
    // It is no key.
    for route in ["", "/ports", "/fs?path=/etc/passwd"] {
        let request =
            server.anonymous(Method::GET, &format!("/v1/sandboxes/{}{route}", server.sandbox));
        let refused = request.bearer_auth(&made.token).send().await.unwrap();
        assert_eq!(refusal(refused).await, ErrorCode::Unauthenticated);
    }
    // A browser is led away from the token.
    let client = reqwest::Client::builder()
        .no_proxy()
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .unwrap();
    let url = format!("{}{}?a=b&access_token={}", server.url, path(port), made.token);
    let response = client.get(url).header("Sec-Fetch-Mode", "navigate").send().await.unwrap();
    assert_eq!(
        (response.status().as_u16(), &response.headers()["location"]),
        (303, &format!("{}?a=b", path(port)).parse().unwrap())
    );

    let listed = server.inside(Method::GET, "/preview-token").send().await.unwrap();
    let listed = listed.text().await.unwrap();
    assert!(!listed.contains(&made.token));
    let listed: PreviewTokenList = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed.tokens, std::slice::from_ref(&made.preview));
    let revoked = server.inside(Method::DELETE, &format!("/preview-token/{}", made.preview.id));
    assert_eq!(revoked.send().await.unwrap().status(), 204);
    for refused in [with(port), with_cookie(port)] {
        assert_eq!(refusal(refused.send().await.unwrap()).await, ErrorCode::Unauthenticated);
    }
    server.stop().await;
}

#[tokio::test]
async fn a_host_of_its_own_shows_the_port_and_nothing_of_the_api() {
    let server = Server::start().await;
    let port = mirror();
    let host = format!("{port}-{}.preview.example", server.sandbox);
    let at = |path: &str| server.anonymous(Method::GET, path).header("Host", &host);
    let seen = text(at("/v1/me?x=y")).await;
    assert!(seen.starts_with("GET /v1/me?x=y HTTP/1.1\n"), "{seen}");
    assert!(seen.contains(&format!("host: {host}")) && !seen.contains("x-forwarded-prefix"));
    // Not even with a key, which the guest does not see.
    let seen = text(at("/healthz").bearer_auth(KEY)).await;
    assert!(seen.starts_with("GET /healthz ") && !seen.contains(KEY), "{seen}");
    let nobody = format!("{port}-{}.preview.example", api::SandboxId::random());
    let refused = server.anonymous(Method::GET, "/v1/me").bearer_auth(KEY).header("Host", nobody);
    assert_eq!(refusal(refused.send().await.unwrap()).await, ErrorCode::NotFound);
    server.stop().await;
}

#[tokio::test]
async fn a_setting_demands_a_token_on_hosts() {
    let previews = PreviewConfig {
        access: PreviewAccess::Token,
        suffix: Some("preview.example".to_owned()),
        ..PreviewConfig::default()
    };
    let config = Config { previews, ..Config::testing() };
    let server = Server::start_configured(Clock::default(), BTreeMap::new(), config).await;
    let port = mirror();
    let made = server
        .inside(Method::POST, "/preview-token")
        .json(&json!({"port": port, "ttl_seconds": 60}));
    let made: NewPreviewToken = made.send().await.unwrap().json().await.unwrap();
    let host = made.host.unwrap();
    assert_eq!(host, format!("{port}-{}.preview.example", server.sandbox));
    let at = |path: &str| server.anonymous(Method::GET, path).header("Host", &host);
    for refused in [at("/"), at("/").bearer_auth(KEY), at("/?access_token=atp_forged")] {
        assert_eq!(refusal(refused.send().await.unwrap()).await, ErrorCode::Unauthenticated);
    }
    let response = at(&format!("/?access_token={}", made.token)).send().await.unwrap();
    let cookie = response.headers()["set-cookie"].to_str().unwrap().to_owned();
    assert!(
        cookie.contains("; Path=/; HttpOnly") && !cookie.to_ascii_lowercase().contains("domain")
    );
    let cookie = cookie.split(';').next().unwrap().to_owned();
    assert_eq!(response.status(), 200);
    text(at("/style.css").header("Cookie", &cookie)).await;
    server.stop().await;
}

#[tokio::test]
async fn ports_are_listed_exposed_and_withdrawn() {
    let server = Server::start().await;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let listening = listener.local_addr().unwrap().port();
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let silent = socket.local_addr().unwrap().port();
    let list = async || {
        let response = server.inside(Method::GET, "/ports").send().await.unwrap();
        let list: PortList = response.json().await.unwrap();
        let find = |port| list.ports.iter().find(|one| one.port == port).cloned();
        (find(listening), find(silent))
    };
    let (found, none) = list().await;
    let found = found.unwrap();
    assert!(found.listening && !found.exposed && none.is_none());
    assert_eq!(found.addresses, ["127.0.0.1"]);
    for _ in 0..2 {
        let exposed = server.inside(Method::POST, "/ports").json(&json!({"port": silent}));
        assert_eq!(exposed.send().await.unwrap().status(), 201);
    }
    assert!(list().await.1.is_some_and(|port| port.exposed && !port.listening));
    for route in [format!("/ports/{silent}"), format!("/ports?port={silent}")] {
        let withdrawn = server.inside(Method::DELETE, &route).send().await.unwrap();
        assert_eq!(withdrawn.status(), 204);
        assert!(list().await.1.is_none());
    }
    let bad = server.inside(Method::POST, "/ports").json(&json!({"port": 0})).send().await.unwrap();
    assert_eq!(refusal(bad).await, ErrorCode::InvalidRequest);
    let key = server.key(Scope::Read).await;
    let read = server.anonymous(Method::GET, &format!("/v1/sandboxes/{}/ports", server.sandbox));
    assert_eq!(read.bearer_auth(key).send().await.unwrap().status(), 200);
    server.stop().await;
}
