//! The host's end against an agent that does exactly what a test wants, also what no honest one would.

mod lies;
mod two_way;

use std::time::Duration;

use bytes::Bytes;
use protocol::frame::{self, HEADER, Header, Kind, MAX_PAYLOAD};
use protocol::hello::{self, Hello};
use protocol::{INITIAL_CREDIT, MAX_MESSAGE, MAX_STREAMS};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use super::*;

const DEADLINE: Duration = Duration::from_secs(20);

struct Agent {
    stream: UnixStream,
    input: Vec<u8>,
}

impl Agent {
    async fn frame(&mut self) -> (Header, Vec<u8>) {
        loop {
            let (frame, used) = frame::decode(&self.input).unwrap();
            let frame = frame.map(|frame| (frame.header, frame.payload.to_vec()));
            self.input.drain(..used);
            if let Some(frame) = frame {
                return frame;
            }
            assert!(self.stream.read_buf(&mut self.input).await.unwrap() > 0, "the host hung up");
        }
    }

    /// The next frame that is of this kind; those before it are dropped.
    async fn next(&mut self, kind: Kind) -> (Header, Vec<u8>) {
        loop {
            let frame = self.frame().await;
            if frame.0.kind == kind {
                return frame;
            }
        }
    }

    async fn hello(&mut self) -> Hello {
        decode(&self.next(Kind::Hello).await.1).unwrap()
    }

    async fn request(&mut self) -> (u32, Request) {
        let (header, payload) = self.next(Kind::Request).await;
        (header.stream, decode(&payload).unwrap())
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    async fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, kind, Channel::Stdout, stream, false, payload);
        self.write(&bytes).await;
    }

    async fn reply(&mut self, stream: u32, reply: &Reply) {
        let mut bytes = Vec::new();
        frame::encode_message(&mut bytes, Kind::Reply, stream, &encode(reply));
        self.write(&bytes).await;
    }

    /// Answers pings until the host hangs up.
    async fn answer_pings(mut self) {
        loop {
            if let (stream, Request::Ping) = self.request().await {
                self.reply(stream, &Reply::Done).await;
            }
        }
    }
}

fn pair() -> (UnixStream, Agent) {
    let (ours, stream) = UnixStream::pair().unwrap();
    (ours, Agent { stream, input: Vec::new() })
}

async fn connected() -> (Guest, Agent) {
    connected_to(protocol::VERSION).await
}

async fn connected_to(version: u32) -> (Guest, Agent) {
    let (ours, mut agent) = pair();
    let answering = async {
        let hello = agent.hello().await;
        agent.write(&hello::answer(&hello.nonce, version)).await;
    };
    let (guest, ()) = tokio::join!(Guest::connect(ours, DEADLINE), answering);
    (guest.unwrap(), agent)
}

fn failure() -> Failure {
    Failure { code: ErrorCode::NoSpace, message: "the disk is full".into() }
}

fn upload() -> Request {
    Request::FileWrite(FileWrite {
        path: b"/root/file".to_vec().into(),
        mode: None,
        owner: None,
        create_parents: false,
        if_etags: Vec::new(),
        only_new: false,
        size: None,
    })
}

async fn ping(guest: &Guest) {
    assert_eq!(guest.call(Request::Ping, DEADLINE).await.unwrap(), Reply::Done);
}

#[tokio::test]
async fn what_was_in_flight_before_the_answer_is_thrown_away() {
    let (ours, mut agent) = pair();
    let answering = async {
        let hello = agent.hello().await;
        agent.write(&vec![0xA7; 300_000]).await;
        agent.write(&hello::answer(&[3; 16], 1)).await;
        agent.write(&hello::answer(&hello.nonce, 5)).await;
        agent
    };
    let (guest, agent) = tokio::join!(Guest::connect(ours, DEADLINE), answering);
    let guest = guest.unwrap();
    assert_eq!(guest.version(), 5);
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    answering.abort();
}

#[tokio::test]
async fn only_the_last_greeting_counts() {
    // An agent starts anew at each, so streams opened after the answer to an earlier one would be dropped.
    let (ours, mut agent) = pair();
    let answering = async {
        let first = agent.hello().await;
        let second = agent.hello().await;
        assert_ne!(first.nonce, second.nonce);
        agent.write(&hello::answer(&first.nonce, 1)).await;
        agent.write(&hello::answer(&second.nonce, 2)).await;
    };
    let (guest, ()) = tokio::join!(Guest::connect(ours, DEADLINE), answering);
    assert_eq!(guest.unwrap().version(), 2);
}

#[tokio::test]
async fn an_agent_that_never_answers_is_silent_and_one_that_leaves_is_lost() {
    let (ours, _agent) = pair();
    assert!(matches!(Guest::connect(ours, Duration::from_millis(50)).await, Err(Error::Silent)));
    let (ours, agent) = pair();
    drop(agent);
    assert!(matches!(Guest::connect(ours, DEADLINE).await, Err(Error::Lost)));
    let (guest, _agent) = connected().await;
    assert!(matches!(
        guest.call(Request::Ping, Duration::from_millis(50)).await,
        Err(Error::Silent)
    ));
}

#[tokio::test]
async fn an_agent_is_not_sent_what_it_does_not_know() {
    // Older than any request.
    let (guest, mut agent) = connected_to(0).await;
    assert!(matches!(
        guest.call(Request::Ping, DEADLINE).await,
        Err(Error::OldAgent { speaks: 0, needs: 1 })
    ));
    drop(guest);
    let mut rest = Vec::new();
    agent.stream.read_to_end(&mut rest).await.unwrap();
    assert_eq!((rest.len(), agent.input.len()), (0, 0));
}

#[tokio::test]
async fn a_failure_is_an_error_and_the_next_call_is_not_harmed() {
    let (guest, mut agent) = connected().await;
    let answering = tokio::spawn(async move {
        let (stream, _) = agent.request().await;
        agent.reply(stream, &Reply::Failed(failure())).await;
        agent.answer_pings().await;
    });
    let refused = guest.call(Request::Sync, DEADLINE).await;
    assert!(matches!(refused, Err(Error::Refused(ref told)) if *told == failure()), "{refused:?}");
    ping(&guest).await;
    answering.abort();
}

#[tokio::test]
async fn a_stream_nobody_reads_does_not_stop_the_others() {
    let (guest, mut agent) = connected().await;
    let unread = guest.open(Request::ExecList).unwrap();
    let (stream, _) = agent.request().await;
    for _ in 0..INITIAL_CREDIT as usize / MAX_PAYLOAD {
        agent.send(Kind::Data, stream, &[1; MAX_PAYLOAD]).await;
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(matches!(unread.next().await, Some(Ok(Event::Data(Channel::Stdout, _)))));
    answering.abort();
}

#[tokio::test]
async fn data_beyond_the_credit_costs_that_stream_alone() {
    let (guest, mut agent) = connected().await;
    let flooded = guest.open(Request::ExecList).unwrap();
    let (stream, _) = agent.request().await;
    for _ in 0..=INITIAL_CREDIT as usize / MAX_PAYLOAD {
        agent.send(Kind::Data, stream, &[1; MAX_PAYLOAD]).await;
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(matches!(flooded.next().await, Some(Err(Error::Misbehaved(_)))));
    assert!(flooded.next().await.is_none());
    answering.abort();
}

#[tokio::test]
async fn replies_beyond_all_measure_cost_that_stream_alone() {
    let (guest, mut agent) = connected().await;
    let flooded = guest.open(Request::ExecList).unwrap();
    let (stream, _) = agent.request().await;
    let reply = Reply::Written { bytes: 0, etag: "e".repeat(MAX_MESSAGE - 100) };
    for _ in 0..6 {
        agent.reply(stream, &reply).await;
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(matches!(flooded.next().await, Some(Err(Error::Misbehaved(_)))));
    answering.abort();
}

#[tokio::test]
async fn credit_is_granted_as_data_is_consumed() {
    const TOTAL: usize = 8 << 20;
    let (guest, mut agent) = connected().await;
    let stream = guest.open(Request::ExecList).unwrap();
    let sending = tokio::spawn(async move {
        let (stream, _) = agent.request().await;
        let (mut credit, mut left) = (INITIAL_CREDIT as usize, TOTAL);
        while left > 0 {
            let length = left.min(MAX_PAYLOAD - 1);
            while credit < length {
                let (_, grant) = agent.next(Kind::Credit).await;
                credit += u32::from_le_bytes(grant[..].try_into().unwrap()) as usize;
            }
            agent.send(Kind::Data, stream, &vec![7; length]).await;
            credit -= length;
            left -= length;
        }
        agent.send(Kind::Finish, stream, &[]).await;
        agent
    });
    let mut received = 0;
    loop {
        match stream.next().await.unwrap().unwrap() {
            Event::Data(Channel::Stdout, bytes) => received += bytes.len(),
            Event::Finished => break,
            event @ (Event::Reply(_) | Event::Data(..)) => panic!("{event:?}"),
        }
    }
    assert_eq!(received, TOTAL);
    sending.await.unwrap();
}

#[tokio::test]
async fn small_pieces_are_put_together_while_they_wait() {
    let (guest, mut agent) = connected().await;
    let stream = guest.open(Request::ExecList).unwrap();
    let (id, _) = agent.request().await;
    for byte in 0..100 {
        agent.send(Kind::Data, id, &[byte]).await;
    }
    agent.send(Kind::Finish, id, &[]).await;
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    let Some(Ok(Event::Data(_, received))) = stream.next().await else { panic!("no data") };
    assert_eq!(received, (0..100).collect::<Vec<u8>>());
    assert!(matches!(stream.next().await, Some(Ok(Event::Finished))));
    answering.abort();
}

#[tokio::test]
async fn a_sender_waits_for_the_agents_credit() {
    const TOTAL: usize = 3 << 20;
    let (guest, mut agent) = connected().await;
    let sending = tokio::spawn(async move {
        let stream = guest.open(upload()).unwrap();
        stream.send(Bytes::from(vec![9; TOTAL])).await.unwrap();
        stream.finish().await.unwrap();
        stream.next().await.unwrap().unwrap()
    });
    let (id, _) = agent.request().await;
    let mut received = 0;
    while received < INITIAL_CREDIT as usize {
        received += agent.next(Kind::Data).await.1.len();
    }
    assert_eq!(received, INITIAL_CREDIT as usize);
    let more = tokio::time::timeout(Duration::from_millis(50), agent.frame()).await;
    assert!(more.is_err(), "{more:?}");
    agent.send(Kind::Credit, id, &u32::MAX.to_le_bytes()).await;
    loop {
        let (header, payload) = agent.frame().await;
        if header.kind == Kind::Finish {
            break;
        }
        assert_eq!(header.kind, Kind::Data);
        received += payload.len();
    }
    assert_eq!(received, TOTAL);
    agent.reply(id, &Reply::Written { bytes: TOTAL as u64, etag: String::new() }).await;
    assert!(matches!(sending.await.unwrap(), Event::Reply(Reply::Written { .. })));
}

#[tokio::test]
async fn an_upload_that_is_refused_half_way_ends_with_the_reason() {
    let (guest, mut agent) = connected().await;
    let stream = guest.open(upload()).unwrap();
    let refusing = async {
        let (id, _) = agent.request().await;
        for _ in 0..10 {
            agent.next(Kind::Data).await;
        }
        agent.reply(id, &Reply::Failed(failure())).await;
        // The rest of what was allowed is on its way still.
        agent.next(Kind::Reset).await;
    };
    let sending = async {
        let refused = stream.send(Bytes::from(vec![9; 3 << 20])).await;
        assert!(
            matches!(refused, Err(Error::Refused(ref told)) if *told == failure()),
            "{refused:?}"
        );
        drop(stream);
    };
    tokio::join!(refusing, sending);
}

#[tokio::test]
async fn what_waits_for_a_lost_agent_fails_at_once() {
    let (guest, agent) = connected().await;
    let stream = guest.open(Request::ExecList).unwrap();
    let sending = guest.open(upload()).unwrap();
    let losing = async {
        tokio::task::yield_now().await;
        drop(agent);
    };
    let (next, sent, called, ()) = tokio::join!(
        stream.next(),
        sending.send(Bytes::from(vec![9; 3 << 20])),
        guest.call(Request::Ping, DEADLINE),
        losing
    );
    assert!(matches!(next, Some(Err(Error::Lost))), "{next:?}");
    assert!(matches!(sent, Err(Error::Lost)), "{sent:?}");
    assert!(matches!(called, Err(Error::Lost)), "{called:?}");
    assert!(guest.is_lost());
    assert!(matches!(guest.open(Request::Ping), Err(Error::Lost)));
}

#[tokio::test]
async fn an_agent_that_talks_nonsense_loses_the_connection() {
    for nonsense in [vec![0x55; 64], {
        let mut request = Vec::new();
        frame::encode_message(&mut request, Kind::Request, 1, &encode(&Request::Ping));
        request
    }] {
        let (guest, mut agent) = connected().await;
        let stream = guest.open(Request::ExecList).unwrap();
        agent.write(&nonsense).await;
        assert!(matches!(stream.next().await, Some(Err(Error::Lost))));
    }
}

#[tokio::test]
async fn frames_for_streams_that_are_not_open_change_nothing() {
    let (guest, mut agent) = connected().await;
    for kind in [Kind::Data, Kind::Finish, Kind::Credit, Kind::Reset, Kind::Reply] {
        agent.send(kind, 4_000_000_000, &[1, 2, 3]).await;
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    answering.abort();
}

#[tokio::test]
async fn a_stream_that_is_dropped_is_reset() {
    let (guest, mut agent) = connected().await;
    drop(guest.open(Request::ExecList).unwrap());
    let (id, _) = agent.request().await;
    assert_eq!(
        agent.frame().await.0,
        Header { kind: Kind::Reset, channel: Channel::Content, more: false, stream: id, length: 0 }
    );
}

#[tokio::test]
async fn a_stream_that_is_over_is_not_reset() {
    let (guest, mut agent) = connected().await;
    let calling = async {
        ping(&guest).await;
        ping(&guest).await;
    };
    let answering = async {
        for _ in 0..2 {
            let (header, _) = agent.frame().await;
            assert_eq!(header.kind, Kind::Request);
            agent.reply(header.stream, &Reply::Done).await;
        }
    };
    tokio::join!(calling, answering);
}

#[tokio::test]
async fn an_agent_that_reads_nothing_can_not_make_the_host_collect_requests() {
    let (guest, mut agent) = connected().await;
    // More than the socket holds, so that the writer stands still.
    let held = guest.open(upload()).unwrap();
    held.send(Bytes::from(vec![0; 700_000])).await.unwrap();
    let opened = (0..2 * MAX_STREAMS).filter(|_| guest.open(Request::Ping).is_ok()).count();
    assert_eq!(opened, MAX_STREAMS - 1);
    assert!(matches!(guest.open(Request::Ping), Err(Error::Busy)));
    for _ in 0..opened {
        agent.next(Kind::Reset).await;
    }
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    answering.abort();
}

#[tokio::test]
async fn a_long_request_arrives_whole() {
    let (guest, mut agent) = connected().await;
    let id = "x".repeat(3 * MAX_PAYLOAD + HEADER);
    let _stream = guest.open(Request::ExecStatus { id: id.clone() }).unwrap();
    let mut assembler = frame::Assembler::default();
    loop {
        let (header, payload) = agent.next(Kind::Request).await;
        if let Some(whole) = assembler.push(&frame::Frame { header, payload: &payload }).unwrap() {
            assert_eq!(decode::<Request>(&whole).unwrap(), Request::ExecStatus { id });
            return;
        }
    }
}
