//! Connections to what listens, and the list of it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpListener, TcpStream};

use crate::support::{Client, Event};
use protocol::message::{ErrorCode, Failure};
use protocol::{Reply, Request};
use rustix::net::{AddressFamily, SocketType};

/// A server for one connection.
fn serve(address: &str, with: impl FnOnce(TcpStream) + Send + 'static) -> u16 {
    let listener = TcpListener::bind(address).unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || with(listener.accept().unwrap().0));
    port
}

fn dial(client: &mut Client, port: u16) -> u32 {
    let stream = client.open(&Request::Dial { port });
    assert_eq!(client.reply(stream), Reply::Connected);
    stream
}

fn all(client: &mut Client, stream: u32) -> Vec<u8> {
    let mut all = Vec::new();
    loop {
        match client.next(stream) {
            Event::Data(_, bytes) => all.extend(bytes),
            Event::Finish => return all,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn each_side_ends_for_itself() {
    let mut client = Client::start();
    // Answers what it was asked once it was asked all of it.
    let port = serve("127.0.0.1:0", |mut connection| {
        let mut asked = Vec::new();
        connection.read_to_end(&mut asked).unwrap();
        connection.write_all(&asked).unwrap();
    });
    let stream = dial(&mut client, port);
    let bytes: Vec<u8> = (0..3_000_000_u32).map(|at| (at % 251) as u8).collect();
    client.send_data(stream, &bytes);
    client.finish(stream);
    assert!(all(&mut client, stream) == bytes);
}

#[test]
fn what_is_said_after_the_answer_has_ended_arrives() {
    let mut client = Client::start();
    let (told, tell) = std::sync::mpsc::channel();
    let port = serve("127.0.0.1:0", move |mut connection| {
        connection.write_all(b"first").unwrap();
        connection.shutdown(Shutdown::Write).unwrap();
        let mut asked = Vec::new();
        connection.read_to_end(&mut asked).unwrap();
        told.send(asked).unwrap();
    });
    let stream = dial(&mut client, port);
    assert_eq!(all(&mut client, stream), b"first");
    client.send_data(stream, b"second");
    client.finish(stream);
    client
        .wait_until("it has arrived", |_| matches!(tell.try_recv(), Ok(said) if said == b"second"));
}

#[test]
fn whoever_listens_elsewhere_is_found() {
    let mut client = Client::start();
    let port = serve("[::1]:0", |mut connection| connection.write_all(b"six").unwrap());
    let stream = dial(&mut client, port);
    client.finish(stream);
    assert_eq!(all(&mut client, stream), b"six");
}

#[test]
fn where_nothing_listens_is_told() {
    let mut client = Client::start();
    // Taken, so that nobody else listens there.
    let taken = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&taken, &SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let address = SocketAddrV4::try_from(rustix::net::getsockname(&taken).unwrap()).unwrap();
    for (port, code) in [(address.port(), ErrorCode::NotFound), (0, ErrorCode::Invalid)] {
        let stream = client.open(&Request::Dial { port });
        let reply = client.reply(stream);
        assert!(
            matches!(&reply, Reply::Failed(Failure { code: told, .. }) if *told == code),
            "{reply:?}"
        );
    }
}

#[test]
fn a_reset_ends_the_connection() {
    let mut client = Client::start();
    let (told, tell) = std::sync::mpsc::channel();
    let port = serve("127.0.0.1:0", move |mut connection| {
        // Waits for its end, whichever that is.
        let _ = connection.read(&mut [0; 10]);
        told.send(()).unwrap();
    });
    let stream = dial(&mut client, port);
    client.reset(stream);
    client.wait_until("the server hears of it", |_| tell.try_recv().is_ok());
}

#[test]
fn a_slow_reader_holds_up_its_server_and_nobody_else() {
    let mut client = Client::start();
    let endless = serve(
        "127.0.0.1:0",
        |mut connection| {
            while connection.write_all(&[b'x'; 65_536]).is_ok() {}
        },
    );
    let port = serve("127.0.0.1:0", |mut connection| connection.write_all(b"here").unwrap());
    let _unread = dial(&mut client, endless);
    let stream = dial(&mut client, port);
    client.finish(stream);
    assert_eq!(all(&mut client, stream), b"here");
    assert_eq!(client.call(&Request::Ping), Reply::Done);
}

#[test]
fn what_listens_is_listed() {
    let mut client = Client::start();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let Reply::Listeners(found) = client.call(&Request::Listeners) else { panic!("a list") };
    let found = found.iter().find(|found| found.port == port).unwrap();
    assert_eq!(found.process.as_ref().map(|process| process.pid), Some(std::process::id()));
}
