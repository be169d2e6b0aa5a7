//! The channel itself: epochs, damage, bounds.

use crate::support::{Client, Event, exec, file_write};
use protocol::frame::{self, Channel, Kind};
use protocol::message::ErrorCode;
use protocol::{Reply, Request};

#[test]
fn a_new_epoch_forgets_what_was_half_said() {
    let mut client = Client::start();
    client.open(&Request::ExecStart(exec("head -c 30000000 /dev/zero; sleep 30")));
    client.open(&Request::FileWrite(file_write(b"/tmp/never")));
    let mut cut = Vec::new();
    frame::encode(
        &mut cut,
        Kind::Request,
        Channel::Content,
        99,
        false,
        &protocol::message::encode(&Request::Ping),
    );
    client.send_raw(&cut[..cut.len() - 3]);
    client.greet([2; 16]);
    assert_eq!(client.call(&Request::Ping), Reply::Done);
}

#[test]
fn damage_is_skipped() {
    let mut client = Client::start();
    client.send_raw(b"\xa7\x02nonsense\xa7\xa7\xa7");
    client.send_raw(&[0xff; 5000]);
    client.greet([3; 16]);
    assert_eq!(client.call(&Request::Ping), Reply::Done);
}

#[test]
fn a_request_from_the_future_is_refused_and_no_more() {
    let mut client = Client::start();
    let mut bytes = Vec::new();
    frame::encode(&mut bytes, Kind::Request, Channel::Content, 7777, false, &[200, 1, 2, 3]);
    client.send_raw(&bytes);
    assert!(
        matches!(client.reply(7777), Reply::Failed(failure) if failure.code == ErrorCode::Invalid)
    );
    assert_eq!(client.call(&Request::Ping), Reply::Done);
}

#[test]
fn more_streams_than_allowed_are_reset() {
    let mut client = Client::start();
    let begin = |stream| {
        let mut bytes = Vec::new();
        frame::encode(&mut bytes, Kind::Request, Channel::Content, stream, true, b"a part");
        bytes
    };
    let most = u32::try_from(protocol::MAX_STREAMS).unwrap();
    for stream in 10_000..10_000 + most {
        client.send_raw(&begin(stream));
    }
    client.send_raw(&begin(50_000));
    assert_eq!(client.next(50_000), Event::Reset);
}

#[test]
fn a_host_without_measure_is_told_so() {
    let mut client = Client::start();
    let mut start = exec("sleep 30");
    start.has_stdin = true;
    let stream = client.open(&Request::ExecStart(start));
    assert!(matches!(client.reply(stream), Reply::ExecStarted { .. }));
    let mut bytes = Vec::new();
    frame::encode(
        &mut bytes,
        Kind::Data,
        Channel::Content,
        stream,
        false,
        &[0; frame::MAX_PAYLOAD],
    );
    for _ in 0..(256 << 20) / frame::MAX_PAYLOAD + 10 {
        client.send_raw(&bytes);
    }
    assert!(
        matches!(client.reply(stream), Reply::Failed(failure) if failure.code == ErrorCode::Busy)
    );
}
