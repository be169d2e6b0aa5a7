//! The handshake that begins every epoch of the channel.
//!
//! Bytes in flight at a snapshot are delivered after its restore, in both directions, and a quick reconnect is not seen
//! by the guest. Therefore the host begins with [`greeting`]: zeroes that complete a half-sent frame, then a hello with
//! a nonce. The agent drops all streams and all output not yet written, and answers with [`answer`]. The host throws
//! away every byte until it finds that answer for its own nonce; frames follow it directly.
//! Execs are not streams: they go on, and are attached to again by their id.

use serde::{Deserialize, Serialize};

use crate::frame;

/// Before the nonce in the agent's answer.
const MARK: &[u8; 16] = b"atoll-agent-here";
/// [`MARK`], the nonce, then the agent's version (u32, little-endian).
pub const ANSWER: usize = 16 + 16 + 4;

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct Hello {
    /// The host's [`crate::VERSION`].
    pub version: u32,
    /// Chosen at random for this connection.
    pub nonce: [u8; 16],
}

/// What the host sends first on every connection.
pub fn greeting(hello: &Hello) -> Vec<u8> {
    let mut bytes = vec![0; frame::MAX_FRAME];
    frame::encode(
        &mut bytes,
        frame::Kind::Hello,
        frame::Channel::Content,
        0,
        false,
        &crate::message::encode(hello),
    );
    bytes
}

/// What the agent sends first after a hello.
pub fn answer(nonce: &[u8; 16], version: u32) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[..16].copy_from_slice(MARK);
    bytes[16..32].copy_from_slice(nonce);
    bytes[32..].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// Where frames begin in `input` and the agent's version, once the answer for `nonce` is in it.
pub fn find_answer(input: &[u8], nonce: &[u8; 16]) -> Option<(usize, u32)> {
    let start =
        input.windows(32).position(|window| &window[..16] == MARK && &window[16..] == nonce)?;
    let version = input.get(start + 32..start + ANSWER)?;
    Some((start + ANSWER, u32::from_le_bytes(version.try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_answer_is_found_behind_whatever_was_in_flight(old in prop::collection::vec(any::<u8>(), 0..500), nonce: [u8; 16]) {
            let mut input = old;
            input.extend_from_slice(&answer(&[7; 16], 1)[..20]);
            let start = input.len();
            input.extend_from_slice(&answer(&nonce, 3));
            prop_assume!(nonce != [7; 16]);
            prop_assert_eq!(find_answer(&input, &nonce), Some((start + ANSWER, 3)));
            prop_assert_eq!(find_answer(&input[..input.len() - 1], &nonce), None);
        }
    }
}
