//! Ports of a sandbox from outside: a server that listens on 127.0.0.1 in a real guest.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::{ExecRequest, UpdateLifecycle};
use client::Method;
use futures::StreamExt;
use serde_json::{Value, json};
use tests::{
    Answer, Host, Sandbox, Server, command, patterned, pause, program, published_command,
    python_with, suite, until,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    process::Command,
};

suite! {
    a_server_on_the_loopback_is_reached,
    streams_of_events_and_websockets_are_not_buffered,
    bodies_of_any_size_pass_both_ways,
    a_client_that_goes_away_disturbs_nobody,
    fifty_requests_and_a_slow_reader_do_not_wait_for_each_other,
    what_rests_is_woken_or_says_so_and_an_open_stream_is_use,
    a_token_or_a_host_shows_one_port_and_nothing_else,
    the_published_clients_build_addresses_that_lead_there,
    paths_need_not_be_text;
    soak:
}

const SOON: Duration = Duration::from_secs(60);
const PORT: u16 = 8000;

/// HTTP with bodies both ways, events that wait for a file each, and an echo over WebSocket frames as they come.
const SERVER: &str = r#"
import base64, hashlib, http.server, os, time

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def answer(self, body, kind="text/plain"):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path.startswith("/events"):
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            self.close_connection = True
            for number in range(1, 4):
                self.wfile.write(b"data: %d\n\n" % number)
                while not os.path.exists("/tmp/go-%d" % number): time.sleep(0.05)
        elif self.path == "/ws":
            key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
            self.send_response(101)
            self.send_header("Upgrade", "websocket")
            self.send_header("Connection", "Upgrade")
            self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
            self.end_headers()
            self.close_connection = True
            while data := self.connection.recv(65536): self.connection.sendall(data)
            open("/tmp/ws-over", "w").close()
        elif self.path.startswith("/bytes/"):
            self.answer(b"x" * int(self.path.split("/")[2]))
        else:
            self.answer(("%s\n%s" % (self.path, self.headers)).encode())
    def do_POST(self):
        digest, left = hashlib.sha256(), None
        if "Content-Length" in self.headers: left = int(self.headers["Content-Length"])
        total = 0
        while left is None or left > 0:
            if left is None:
                size = int(self.rfile.readline(), 16)
                data = self.rfile.read(size)
                self.rfile.readline()
                if size == 0: break
            else:
                data = self.rfile.read(min(left, 1 << 16))
                left -= len(data)
            if not data: break
            digest.update(data)
            total += len(data)
        self.answer(("%d %s" % (total, digest.hexdigest())).encode())

http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"#;

/// With the server above, which is up.
async fn serving(host: &Host) -> Sandbox {
    let sandbox = host.sandbox().await;
    sandbox.write("/root/server.py", SERVER).await;
    sandbox.run("setsid python3 /root/server.py >/root/server.log 2>&1 &").await;
    until("the server listens", SOON, async || {
        let ports = sandbox.get("/ports").await.json();
        let ports = ports["ports"].as_array().unwrap().clone();
        let ours = ports.into_iter().find(|port| port["port"] == PORT)?;
        assert_eq!(ours["command"], "python3", "{ours}");
        assert_eq!(ours["addresses"], json!(["127.0.0.1"]));
        Some(())
    })
    .await;
    sandbox
}

fn proxy(path: &str) -> String {
    format!("/proxy/{PORT}{path}")
}

async fn a_server_on_the_loopback_is_reached(host: Host) {
    let sandbox = serving(&host).await;
    let answer = sandbox.get(&proxy("/a%20b?c=d")).await;
    assert_eq!(answer.status, 200);
    let text = answer.text();
    assert!(text.starts_with("/a%20b?c=d\n"), "{text}");
    let server = host.server().await;
    assert!(!text.contains(server.key()), "{text}");
    assert!(!text.to_lowercase().contains("authorization"), "{text}");
    // Whatever it is that nobody listens on.
    let nothing = sandbox.get("/proxy/8001/").await;
    assert_eq!(nothing.refusal(), (502, "bad_gateway".to_owned()));
    assert!(nothing.text().contains("8001"), "{}", nothing.text());
    // The other address of the loopback.
    sandbox
        .run("setsid python3 -m http.server 8002 --bind ::1 --directory /etc >/dev/null 2>&1 &")
        .await;
    until("the other listens", SOON, async || {
        let answer = sandbox.get("/proxy/8002/hostname").await;
        (answer.status == 200).then(|| assert!(answer.text().starts_with("sandbox-")))
    })
    .await;
}

async fn streams_of_events_and_websockets_are_not_buffered(host: Host) {
    let sandbox = serving(&host).await;
    let response = sandbox.request(Method::GET, &proxy("/events")).send().await.unwrap();
    let mut body = response.bytes_stream();
    for number in 1..=3 {
        let piece = tokio::time::timeout(SOON, body.next()).await.unwrap().unwrap().unwrap();
        assert_eq!(piece, format!("data: {number}\n\n"));
        // The server says nothing more until then.
        sandbox.run(&format!("touch /tmp/go-{number}")).await;
    }
    assert!(tokio::time::timeout(SOON, body.next()).await.unwrap().is_none());

    let server = host.server().await;
    let address = server.url().strip_prefix("http://").unwrap().to_owned();
    let mut socket = TcpStream::connect(&address).await.unwrap();
    let request = format!(
        "GET /v1/sandboxes/{}/proxy/{PORT}/ws?access_token={} HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\n\
         Connection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        sandbox.id,
        server.key()
    );
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let byte = tokio::time::timeout(SOON, socket.read_u8()).await.unwrap();
        head.push(byte.unwrap());
    }
    let head = String::from_utf8(head).unwrap();
    assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
    assert!(head.contains("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="), "{head}");
    for length in [1, 100, 100_000] {
        let sent = patterned(length);
        socket.write_all(&sent).await.unwrap();
        let mut echoed = vec![0; length];
        tokio::time::timeout(SOON, socket.read_exact(&mut echoed)).await.unwrap().unwrap();
        assert!(echoed == sent);
    }
    drop(socket);
    until("the guest hears of the end", SOON, async || {
        let there = sandbox.exec(command("test -e /tmp/ws-over")).await;
        (there.exit_code == 0).then_some(())
    })
    .await;
}

async fn bodies_of_any_size_pass_both_ways(host: Host) {
    let sandbox = serving(&host).await;
    let server = host.server().await;
    let before = server.memory_bytes();
    for length in [0, 1, 65_537, 40_000_000] {
        let answer = sandbox.get(&proxy(&format!("/bytes/{length}"))).await;
        assert_eq!((answer.status, answer.body.len()), (200, length));
    }
    let sent = patterned(20_000_000);
    sandbox.write("/root/sent", sent[..1_000_000].to_vec()).await;
    let digest = sandbox.run("sha256sum < /root/sent").await;
    let digest = digest.split_whitespace().next().unwrap();
    let small = sandbox.request(Method::POST, &proxy("/")).body(sent[..1_000_000].to_vec());
    assert_eq!(Answer::to(small).await.text(), format!("1000000 {digest}"));
    // Of unknown length.
    let pieces: Vec<_> =
        sent.chunks(100_000).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
    let body = client::Body::wrap_stream(futures::stream::iter(pieces));
    let answer = Answer::to(sandbox.request(Method::POST, &proxy("/")).body(body)).await;
    assert!(answer.text().starts_with("20000000 "), "{}", answer.text());
    let grown = server.memory_bytes().saturating_sub(before);
    assert!(grown < 100 << 20, "the server grew by {grown}");
}

async fn a_client_that_goes_away_disturbs_nobody(host: Host) {
    let sandbox = serving(&host).await;
    for _ in 0..20 {
        let response = sandbox.request(Method::GET, &proxy("/events")).send().await.unwrap();
        let mut body = response.bytes_stream();
        assert!(body.next().await.is_some());
    }
    assert_eq!(sandbox.get(&proxy("/")).await.status, 200);
    // None of their connections is left.
    until("the guest's connections end", SOON, async || {
        let open = sandbox.run("grep -c ':1F40 .* 01 ' /proc/net/tcp || true").await;
        (open.trim() == "0").then_some(())
    })
    .await;
}

async fn fifty_requests_and_a_slow_reader_do_not_wait_for_each_other(host: Host) {
    let sandbox = serving(&host).await;
    let slow = sandbox.request(Method::GET, &proxy("/bytes/100000000")).send().await.unwrap();
    let others = (0..50).map(|number| {
        let request = sandbox.request(Method::GET, &proxy(&format!("/bytes/{number}")));
        async move { (number, Answer::to(request).await) }
    });
    for (number, answer) in futures::future::join_all(others).await {
        assert_eq!((answer.status, answer.body.len()), (200, number));
    }
    assert_eq!(slow.bytes().await.unwrap().len(), 100_000_000);
}

async fn what_rests_is_woken_or_says_so_and_an_open_stream_is_use(host: Host) {
    let sandbox = serving(&host).await;
    let transition = async |name: &str| {
        let answer = Answer::to(sandbox.request(Method::POST, name)).await;
        assert!(answer.status < 300, "{name}: {}", answer.text());
    };
    transition("/pause").await;
    assert_eq!(sandbox.get(&proxy("/")).await.refusal(), (409, "conflict".to_owned()));
    transition("/resume").await;
    assert_eq!(sandbox.get(&proxy("/")).await.status, 200);
    transition("/hibernate").await;
    assert_eq!(sandbox.get("/ports").await.json(), json!({"ports": []}));
    assert_eq!(sandbox.get(&proxy("/")).await.status, 200);
    assert_eq!(sandbox.get("").await.json()["status"], "running");

    let response = sandbox.request(Method::GET, &proxy("/events")).send().await.unwrap();
    let mut body = response.bytes_stream();
    assert!(body.next().await.is_some());
    let idle = UpdateLifecycle { idle_seconds: Some(2), ..UpdateLifecycle::default() };
    sandbox.client().update_lifecycle(&sandbox.id, &idle).await.unwrap();
    // Long enough for one that nobody uses.
    pause(Duration::from_secs(8)).await;
    assert_eq!(sandbox.get("").await.json()["status"], "running");
    drop(body);
    until("it hibernates", SOON, async || {
        (sandbox.get("").await.json()["status"] == "hibernated").then_some(())
    })
    .await;
}

async fn a_token_or_a_host_shows_one_port_and_nothing_else(host: Host) {
    let sandbox = serving(&host).await;
    let server = host.server().await;
    let nobody = server.client_with(None);
    let made = sandbox.request(Method::POST, "/preview-token");
    let made = Answer::to(made.json(&json!({"port": PORT, "ttl_seconds": 600}))).await;
    assert_eq!(made.status, 201, "{}", made.text());
    let made: Value = made.json();
    let (token, path) = (made["token"].as_str().unwrap(), made["path"].as_str().unwrap());
    let shown = nobody.request(Method::GET, &format!("{path}page?access_token={token}"));
    let shown = Answer::to(shown).await;
    assert_eq!(shown.status, 200, "{}", shown.text());
    assert!(shown.text().starts_with("/page\n") && !shown.text().contains(token));
    assert!(shown.header("content-security-policy").starts_with("sandbox"));
    let id = made["id"].as_str().unwrap();
    let revoked = sandbox.request(Method::DELETE, &format!("/preview-token/{id}"));
    assert_eq!(Answer::to(revoked).await.status, 204);
    let refused = nobody.request(Method::GET, &format!("{path}?access_token={token}"));
    assert_eq!(Answer::to(refused).await.refusal(), (401, "unauthenticated".to_owned()));

    // As both published clients build it.
    let host = format!("{PORT}-{}.preview.example", sandbox.id);
    let shown = nobody.request(Method::GET, "/v1/me").header("host", &host);
    let shown = Answer::to(shown).await;
    assert!(shown.status == 200 && shown.text().starts_with("/v1/me\n"), "{}", shown.text());
    let run = ExecRequest { ..command("true") };
    let exec = format!("/v1/sandboxes/{}/exec", sandbox.id);
    let with_key = sandbox.client().request(Method::POST, &exec).header("host", &host).json(&run);
    assert!(!Answer::to(with_key).await.text().contains("exit_code"));
    let gone = nobody
        .request(Method::GET, "/")
        .header("host", format!("{PORT}-{}.x.example", api::SandboxId::random()));
    assert_eq!(Answer::to(gone).await.refusal(), (404, "not_found".to_owned()));
}

/// What a program says that is told of the sandbox and the port.
async fn told_by(server: &Server, sandbox: &Sandbox, mut program: Command) -> Value {
    program
        .args([sandbox.id.to_string(), PORT.to_string()])
        .env("PANDASTACK_API", server.url())
        .env("PANDASTACK_API_KEY", server.key())
        .kill_on_drop(true);
    let output = tokio::time::timeout(SOON, program.output()).await.expect("it ends").unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    serde_json::from_slice(&output.stdout).unwrap()
}

async fn the_published_clients_build_addresses_that_lead_there(host: Host) {
    let (python, package) = (python_with("published_client").await, published_command().await);
    let sandbox = serving(&host).await;
    let server = host.server().await;
    let here = env!("CARGO_MANIFEST_DIR");
    let mut by_python = Command::new(python);
    by_python.arg(format!("{here}/previews.py"));
    let mut by_node = Command::new("node");
    by_node
        .arg(format!("{here}/previews.js"))
        .env("NODE_PATH", package.ancestors().nth(2).unwrap());
    let host = format!("{PORT}-{}.preview.example", sandbox.id);
    let expected = json!({
        "one": format!("http://{host}"),
        "all": { PORT.to_string(): format!("https://{host}") },
    });
    assert_eq!(told_by(&server, &sandbox, by_python).await, expected);
    assert_eq!(told_by(&server, &sandbox, by_node).await, expected);
    let nobody = server.client_with(None);
    let shown = Answer::to(nobody.request(Method::GET, "/page").header("host", host)).await;
    assert!(shown.status == 200 && shown.text().starts_with("/page\n"), "{}", shown.text());

    let mut ours = Command::new(program());
    ours.args(["--json", "sandbox", "ports", &sandbox.id.to_string()]);
    ours.env("ATOLL_URL", server.url()).env("ATOLL_KEY", server.key()).kill_on_drop(true);
    let listed = tokio::time::timeout(SOON, ours.output()).await.expect("it ends").unwrap();
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    assert_eq!((&listed[0]["port"], &listed[0]["listening"]), (&json!(PORT), &json!(true)));
}

async fn paths_need_not_be_text(host: Host) {
    let sandbox = serving(&host).await;
    let shown = sandbox.get(&proxy("/a%FF%00//b?c=%FE")).await;
    assert_eq!(shown.status, 200, "{}", shown.text());
    assert!(shown.text().starts_with("/a%FF%00//b?c=%FE\n"), "{}", shown.text());
}
