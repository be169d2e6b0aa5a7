//! What happens when more is asked for than the host has.
#![expect(clippy::unwrap_used, reason = "a claim that does not hold panics")]

use std::time::Duration;

use api::CreateSandbox;
use client::Method;
use futures::future::join_all;
use serde_json::json;
use tests::{Answer, End, Host, Options, Server, command, small, suite};
use tokio::time::Instant;

suite! {
    creates_beyond_the_limit_are_refused_so_that_clients_repeat_them,
    below_the_reserve_of_memory_nothing_is_created_and_nobody_is_ended,
    more_memory_than_the_host_may_promise_is_refused_for_good,
    idle_clones_have_little_memory_of_their_own,
    a_burst_of_creates_works_or_is_refused,
    keys_have_a_rate;
    soak: fifty_creates_at_once_work_or_are_refused,
}

/// Before this a refusal is there: the clients give up after 30 s, and everything is slower beside other tests.
const ANSWERED: Duration = Duration::from_secs(60);

async fn server_with(arguments: &[&str]) -> Server {
    let arguments = arguments.iter().map(|&argument| argument.to_owned()).collect();
    Server::start_with(Options { arguments, ..Options::default() }).await
}

async fn create(server: &Server, request: &CreateSandbox) -> Answer {
    let answer = Answer::to(server.request(Method::POST, "/v1/sandboxes").json(request));
    tokio::time::timeout(ANSWERED, answer).await.expect("no create hangs")
}

/// Refused with a time to send the same again.
fn may_be_repeated(answer: &Answer) -> bool {
    match answer.status {
        503 => answer.code() == "unavailable" && !answer.header("retry-after").is_empty(),
        429 => answer.code() == "rate_limited" && !answer.header("retry-after").is_empty(),
        507 => answer.code() == "capacity_exceeded",
        _ => false,
    }
}

async fn figure(server: &Server, name: &str) -> u64 {
    let text = server.get("/metrics").await.text();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("{name} in {text}")).parse().unwrap()
}

async fn listed(server: &Server) -> usize {
    server.get("/v1/sandboxes").await.json().as_array().unwrap().len()
}

async fn creates_beyond_the_limit_are_refused_so_that_clients_repeat_them(host: Host) {
    let server = server_with(&["--most-machines", "2"]).await;
    let _room = host.room(2).await;
    let (one, _other) = (server.create(&small()).await, server.create(&small()).await);
    let refused = create(&server, &small()).await;
    assert_eq!(refused.refusal(), (503, "unavailable".to_owned()));
    assert!(may_be_repeated(&refused), "{refused:?}");
    assert_eq!(listed(&server).await, 2, "nothing was created");
    assert_eq!(figure(&server, "atoll_machines").await, 2);
    assert_eq!(figure(&server, "atoll_machines_limit").await, 2);
    assert_eq!(figure(&server, r#"atoll_creates_refused_total{short="machines"}"#).await, 1);
    // One who waits for a place gets the next that is given back.
    let request = small();
    let (made, deleted) =
        tokio::join!(server.create(&request), server.client().delete_sandbox(&one.id));
    deleted.unwrap();
    assert_eq!(server.client().exec(&made.id, &command("echo in")).await.unwrap().stdout, "in\n");
    host.end(server).await;
}

async fn below_the_reserve_of_memory_nothing_is_created_and_nobody_is_ended(host: Host) {
    let mut server = server_with(&[]).await;
    let _room = host.room(1).await;
    let running = server.create(&small()).await;
    let machine = server.machine_of(&running.id);
    // More than any host has.
    server.options_mut().arguments = vec!["--memory-reserve=100000000".to_owned()];
    server.restart(End::Asked).await;
    // As much is promised as is left: nothing. That does not pass by waiting.
    let refused = create(&server, &small()).await;
    assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()));
    let total = figure(&server, "atoll_memory_total_bytes").await >> 20;
    let available = figure(&server, "atoll_memory_available_bytes").await >> 20;
    // Hardly less than there is altogether, and more than is available.
    let reserve = total - 700;
    assert!(available < reserve + 96, "{available} of {total} MiB");
    server.options_mut().arguments =
        vec![format!("--memory-reserve={reserve}"), "--memory-overcommit=1000".to_owned()];
    server.restart(End::Asked).await;
    let refused = create(&server, &small()).await;
    assert_eq!(refused.refusal(), (503, "unavailable".to_owned()));
    assert!(may_be_repeated(&refused));
    assert_eq!(listed(&server).await, 1);
    assert_eq!(figure(&server, "atoll_machines_ready").await, 0, "those give way");
    assert_eq!(server.machine_of(&running.id), machine, "the same machine runs on");
    let alive = server.client().exec(&running.id, &command("echo alive")).await.unwrap();
    assert_eq!(alive.stdout, "alive\n");
    server.options_mut().arguments = Vec::new();
    server.restart(End::Asked).await;
    server.create(&small()).await;
    host.end(server).await;
}

async fn more_memory_than_the_host_may_promise_is_refused_for_good(host: Host) {
    let server = server_with(&["--memory-overcommit", "0.1"]).await;
    let request = CreateSandbox { memory_mb: Some(131_072), ..small() };
    let refused = create(&server, &request).await;
    assert_eq!(refused.refusal(), (507, "capacity_exceeded".to_owned()));
    assert!(refused.json()["error"].as_str().unwrap().contains("memory_mb"));
    assert_eq!(listed(&server).await, 0);
    host.end(server).await;
}

async fn idle_clones_have_little_memory_of_their_own(host: Host) {
    let server = server_with(&["--ready-machines", "0"]).await;
    let _room = host.room(3).await;
    let mut private = Vec::new();
    for count in 1..=3u64 {
        server.create(&CreateSandbox { memory_mb: Some(2048), ..small() }).await;
        assert_eq!(figure(&server, "atoll_memory_promised_bytes").await, (count * 2048) << 20);
        private.push(figure(&server, "atoll_memory_private_bytes").await >> 20);
    }
    // The rule counts 96 MiB for each that is being started.
    let each = (private[2] - private[0]) / 2;
    assert!((10..96).contains(&each), "{private:?} MiB");
    host.end(server).await;
}

async fn burst(host: &Host, creates: usize, machines: usize) {
    let server = server_with(&["--most-machines", &machines.to_string()]).await;
    let _room = host.room(3).await;
    // Baked before, so that the burst is about room alone.
    let first = server.create(&small()).await;
    server.client().delete_sandbox(&first.id).await.unwrap();
    let began = Instant::now();
    let request = small();
    let answers = join_all((0..creates).map(|_| create(&server, &request))).await;
    let took = began.elapsed();
    let made: Vec<_> = answers.iter().filter(|answer| answer.status == 201).collect();
    for answer in &answers {
        assert!(answer.status == 201 || may_be_repeated(answer), "{answer:?}");
    }
    assert!((1..=machines).contains(&made.len()), "{} of {creates} in {took:?}", made.len());
    assert_eq!(listed(&server).await, made.len(), "a refused one was not created");
    for answer in made {
        let id = answer.json()["id"].as_str().unwrap().parse().unwrap();
        let result = server.client().exec(&id, &command("echo works")).await.unwrap();
        assert_eq!(result.stdout, "works\n");
    }
    host.end(server).await;
}

async fn a_burst_of_creates_works_or_is_refused(host: Host) {
    burst(&host, 12, 3).await;
}

async fn fifty_creates_at_once_work_or_are_refused(host: Host) {
    burst(&host, 50, 30).await;
}

async fn keys_have_a_rate(host: Host) {
    let server = server_with(&["--rate-limit", "5"]).await;
    let answers = join_all((0..40).map(|_| server.get("/v1/sandboxes"))).await;
    let refused: Vec<_> = answers.iter().filter(|answer| answer.status != 200).collect();
    assert!(!refused.is_empty());
    for answer in refused {
        assert_eq!(answer.refusal(), (429, "rate_limited".to_owned()));
        assert!(may_be_repeated(answer));
    }
    assert_eq!(server.get("/healthz").await.json(), json!({"status": "ok"}));
    tests::until("the rate allows more", Duration::from_secs(10), async || {
        (server.get("/v1/sandboxes").await.status == 200).then_some(())
    })
    .await;
    tests::pause(Duration::from_secs(1)).await;
    host.end(server).await;
}
