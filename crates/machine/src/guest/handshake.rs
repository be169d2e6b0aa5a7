//! The first exchange on a connection: see [`protocol::hello`].

use std::io;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use protocol::hello::{ANSWER, Hello, find_answer, greeting};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::error::{Error, Result};

/// Until the first greeting is repeated, and at most between two: what is sent before the guest has opened its port
/// may be lost, and a starved guest must be given time, since each greeting makes the answer to the last one stale.
const FIRST_PATIENCE: Duration = Duration::from_millis(500);
const LONGEST_PATIENCE: Duration = Duration::from_secs(4);

pub(super) struct Greeted {
    pub(super) version: u32,
    /// What came behind the answer.
    pub(super) rest: BytesMut,
}

/// Waits for the answer to its *last* greeting: the agent starts anew at each one that reaches it, so an answer to an
/// earlier one would be followed by a reset of all streams opened since.
pub(super) async fn greet(stream: &UnixStream) -> Result<Greeted> {
    let mut patience = FIRST_PATIENCE;
    let (mut nonce, mut outgoing) = new_greeting();
    let mut again = Instant::now() + patience;
    let mut input = BytesMut::new();
    loop {
        let interest = if outgoing.has_remaining() {
            Interest::READABLE | Interest::WRITABLE
        } else {
            Interest::READABLE
        };
        tokio::select! {
            ready = stream.ready(interest) => {
                let ready = ready.map_err(|_| Error::Lost)?;
                if ready.is_writable() && outgoing.has_remaining() {
                    match stream.try_write(&outgoing) {
                        Ok(count) => outgoing.advance(count),
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => return Err(Error::Lost),
                    }
                }
                if ready.is_readable() {
                    input.reserve(64 * 1024);
                    match stream.try_read_buf(&mut input) {
                        Ok(0) => return Err(Error::Lost),
                        Ok(_) => {}
                        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                        Err(_) => return Err(Error::Lost),
                    }
                    if let Some((end, version)) = find_answer(&input, &nonce) {
                        input.advance(end);
                        return Ok(Greeted { version, rest: input });
                    }
                    // Old output, however long it is.
                    input.advance(input.len().saturating_sub(ANSWER - 1));
                }
            }
            // Not while the last one is still on its way: they would only pile up.
            () = tokio::time::sleep_until(again), if !outgoing.has_remaining() => {
                patience = (patience * 2).min(LONGEST_PATIENCE);
                again = Instant::now() + patience;
                (nonce, outgoing) = new_greeting();
            }
        }
    }
}

fn new_greeting() -> ([u8; 16], bytes::Bytes) {
    let nonce = rand::random();
    (nonce, greeting(&Hello { version: protocol::VERSION, nonce }).into())
}
