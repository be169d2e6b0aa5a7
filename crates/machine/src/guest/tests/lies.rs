//! An agent in the hands of an attacker: whatever it says costs its own sandbox at most, and is told in clear words.

use futures::FutureExt;
use futures::future::BoxFuture;

use super::super::connection::WAITING;
use super::*;

/// What is told on the stream of a request, and how the request must end.
struct Lie {
    name: &'static str,
    tell: fn(Agent, u32) -> BoxFuture<'static, Agent>,
    ends: fn(&Error) -> bool,
    /// Whether the connection outlives it.
    connection: Survives,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Survives {
    Yes,
    No,
}

fn misbehaved(error: &Error) -> bool {
    matches!(error, Error::Misbehaved(_))
}

fn lost(error: &Error) -> bool {
    matches!(error, Error::Lost)
}

/// Refused, in words that neither move a cursor nor fill a log.
fn harmless(error: &Error) -> bool {
    let Error::Refused(failure) = error else { return false };
    failure.message.len() <= 1024 && !failure.message.contains(char::is_control)
}

fn silent(error: &Error) -> bool {
    matches!(error, Error::Silent)
}

fn lie(
    name: &'static str,
    tell: fn(Agent, u32) -> BoxFuture<'static, Agent>,
    ends: fn(&Error) -> bool,
    connection: Survives,
) -> Lie {
    Lie { name, tell, ends, connection }
}

/// An honest one, with two fields overwritten.
fn header(kind: u8, length: u32) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::encode(&mut bytes, Kind::Finish, Channel::Content, 1, false, &[]);
    bytes[1] = kind;
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes
}

#[rustfmt::skip]
fn lies() -> Vec<Lie> {
    use Survives::{No, Yes};
    vec![
        lie("a reply of noise", |mut agent, stream| async move {
            agent.send(Kind::Reply, stream, &[0xff; 64]).await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("an empty reply", |mut agent, stream| async move {
            agent.send(Kind::Reply, stream, &[]).await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("a list that says it is longer than it is", |mut agent, stream| async move {
            let mut reply = encode(&Reply::Execs(Vec::new()));
            reply.pop();
            reply.extend([0xff, 0xff, 0xff, 0xff, 0x0f]);
            agent.send(Kind::Reply, stream, &reply).await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("a reply without end", |mut agent, stream| async move {
            for _ in 0..=MAX_MESSAGE / MAX_PAYLOAD {
                let mut bytes = Vec::new();
                frame::encode(&mut bytes, Kind::Reply, Channel::Content, stream, true, &[1; MAX_PAYLOAD]);
                agent.write(&bytes).await;
            }
            agent
        }.boxed(), misbehaved, Yes),
        lie("a reply that is begun and never ended", |mut agent, stream| async move {
            let mut bytes = Vec::new();
            frame::encode(&mut bytes, Kind::Reply, Channel::Content, stream, true, &[1; 100]);
            agent.write(&bytes).await;
            agent
        }.boxed(), silent, Yes),
        lie("data in place of a reply", |mut agent, stream| async move {
            agent.send(Kind::Data, stream, b"data").await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("an end without a reply", |mut agent, stream| async move {
            agent.send(Kind::Finish, stream, &[]).await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("a reset", |mut agent, stream| async move {
            agent.send(Kind::Reset, stream, &[]).await;
            agent
        }.boxed(), |error| matches!(error, Error::Reset), Yes),
        lie("a credit of three bytes", |mut agent, stream| async move {
            agent.send(Kind::Credit, stream, &[1, 2, 3]).await;
            agent
        }.boxed(), misbehaved, Yes),
        lie("credit without bounds, and nothing else", |mut agent, stream| async move {
            for _ in 0..1000 {
                agent.send(Kind::Credit, stream, &u32::MAX.to_le_bytes()).await;
            }
            agent
        }.boxed(), silent, Yes),
        lie("a failure that moves the cursor and forges a line", |mut agent, stream| async move {
            let message = format!("no\x1b[2J\nERROR {}", "x".repeat(100_000));
            agent.reply(stream, &Reply::Failed(Failure { code: ErrorCode::NoSpace, message })).await;
            agent
        }.boxed(), harmless, Yes),
        lie("answers to what nobody asked", |mut agent, stream| async move {
            for other in (1..10_000).filter(|other| *other != stream) {
                agent.reply(other, &Reply::Done).await;
            }
            agent
        }.boxed(), silent, Yes),
        lie("nothing", |agent, _| async move { agent }.boxed(), silent, Yes),
        lie("a request", |mut agent, stream| async move {
            agent.send(Kind::Request, stream, &encode(&Request::Ping)).await;
            agent
        }.boxed(), lost, No),
        lie("a greeting", |mut agent, stream| async move {
            agent.send(Kind::Hello, stream, &encode(&Hello { version: 1, nonce: [0; 16] })).await;
            agent
        }.boxed(), lost, No),
        lie("noise between frames", |mut agent, _| async move {
            agent.write(&[0x55; 4096]).await;
            agent
        }.boxed(), lost, No),
        lie("a frame of four gigabytes", |mut agent, _| async move {
            agent.write(&header(4, u32::MAX)).await;
            agent
        }.boxed(), lost, No),
        lie("a frame of an unknown kind", |mut agent, _| async move {
            agent.write(&header(0xee, 0)).await;
            agent
        }.boxed(), lost, No),
    ]
}

#[tokio::test]
async fn every_lie_costs_its_own_sandbox_only_and_is_told() {
    let (neighbour, neighbours_agent) = connected().await;
    let answering = tokio::spawn(neighbours_agent.answer_pings());
    for Lie { name, tell, ends, connection } in lies() {
        let (guest, mut agent) = connected().await;
        let calling = tokio::spawn({
            let guest = guest.clone();
            async move { guest.call(Request::Sync, Duration::from_secs(2)).await }
        });
        let (stream, _) = agent.request().await;
        let agent = tell(agent, stream).await;
        ping(&neighbour).await;
        let error = calling.await.unwrap().expect_err(name);
        assert!(ends(&error), "{name}: {error:?}");
        match connection {
            Survives::Yes => {
                let answering = tokio::spawn(agent.answer_pings());
                ping(&guest).await;
                answering.abort();
                assert_eq!(guest.connection.waiting_bytes(), 0, "{name}");
            }
            Survives::No => assert!(guest.is_lost(), "{name}"),
        }
    }
    answering.abort();
}

#[tokio::test]
async fn what_waits_for_slow_readers_is_bounded_over_all_streams() {
    const STREAMS: usize = 200;
    let (guest, mut agent) = connected().await;
    let mut streams = Vec::new();
    for _ in 0..STREAMS {
        streams.push(guest.open(Request::ExecList).unwrap());
        let (id, _) = agent.request().await;
        for _ in 0..INITIAL_CREDIT as usize / MAX_PAYLOAD {
            agent.send(Kind::Data, id, &[1; MAX_PAYLOAD]).await;
        }
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(guest.connection.waiting_bytes() <= WAITING);
    let mut crowded = 0;
    for stream in &streams {
        match stream.next().await {
            Some(Ok(Event::Data(..))) => {}
            Some(Err(Error::Busy)) => crowded += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!((50..150).contains(&crowded), "{crowded} of {STREAMS}");
    drop(streams);
    assert_eq!(guest.connection.waiting_bytes(), 0);
    ping(&guest).await;
    answering.abort();
}

#[tokio::test]
async fn a_flood_of_empty_frames_is_taken_slowly() {
    const FRAMES: usize = 60_000;
    let (guest, mut agent) = connected().await;
    let (neighbour, neighbours_agent) = connected().await;
    let answering = tokio::spawn(neighbours_agent.answer_pings());
    let mut flood = Vec::new();
    for _ in 0..FRAMES {
        frame::encode(&mut flood, Kind::Finish, Channel::Content, 4_000_000_000, false, &[]);
    }
    let begun = std::time::Instant::now();
    let flooding = tokio::spawn(async move {
        agent.write(&flood).await;
        agent
    });
    ping(&neighbour).await;
    let agent = flooding.await.unwrap();
    let answering_too = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(begun.elapsed() > Duration::from_millis(500), "{:?}", begun.elapsed());
    answering.abort();
    answering_too.abort();
}
