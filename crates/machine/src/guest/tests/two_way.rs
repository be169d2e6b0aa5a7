//! Connections into the guest: each side ends for itself.

use super::*;

async fn dialed(guest: &Guest, agent: &mut Agent) -> (u32, Stream) {
    let stream = guest.open(Request::Dial { port: 80 }).unwrap();
    let (id, request) = agent.request().await;
    assert_eq!(request, Request::Dial { port: 80 });
    agent.reply(id, &Reply::Connected).await;
    assert_eq!(stream.next().await.unwrap().unwrap(), Event::Reply(Reply::Connected));
    (id, stream)
}

#[tokio::test]
async fn what_a_guest_has_finished_can_still_be_sent_to() {
    let (guest, mut agent) = connected().await;
    let (id, stream) = dialed(&guest, &mut agent).await;
    agent.send(Kind::Finish, id, &[]).await;
    assert_eq!(stream.next().await.unwrap().unwrap(), Event::Finished);
    stream.send(Bytes::from_static(b"more")).await.unwrap();
    assert_eq!(agent.next(Kind::Data).await.1, b"more");
    stream.finish().await.unwrap();
    agent.next(Kind::Finish).await;
    drop(stream);
    // Both sides have ended, so there is nothing to reset.
    let pinging = tokio::spawn(async move { ping(&guest).await });
    assert_eq!(agent.frame().await.0.kind, Kind::Request);
    pinging.abort();
}

#[tokio::test]
async fn one_that_is_dropped_before_its_own_end_is_reset() {
    let (guest, mut agent) = connected().await;
    let (id, stream) = dialed(&guest, &mut agent).await;
    agent.send(Kind::Finish, id, &[]).await;
    assert_eq!(stream.next().await.unwrap().unwrap(), Event::Finished);
    drop(stream);
    assert_eq!(agent.next(Kind::Reset).await.0.stream, id);
}

#[tokio::test]
async fn a_guest_that_takes_no_more_leaves_what_it_said() {
    let (guest, mut agent) = connected().await;
    let (id, stream) = dialed(&guest, &mut agent).await;
    agent.send(Kind::Data, id, b"all").await;
    agent.send(Kind::Finish, id, &[]).await;
    agent.send(Kind::Reset, id, &[]).await;
    let answering = tokio::spawn(agent.answer_pings());
    ping(&guest).await;
    assert!(stream.send(Bytes::from_static(b"more")).await.is_err());
    assert!(matches!(stream.next().await, Some(Ok(Event::Data(_, bytes))) if bytes[..] == *b"all"));
    assert_eq!(stream.next().await.unwrap().unwrap(), Event::Finished);
    answering.abort();
}
