//! What comes out of a guest's port: frames, and the messages in them. The guest may send anything.
#![no_main]

use libfuzzer_sys::fuzz_target;
use protocol::{
    frame::{self, Assembler, HEADER, Kind},
    hello::Hello,
    message::{self, Reply, Request},
};

/// As its header says it.
const DATA: u8 = 4;

fuzz_target!(|input: &[u8]| {
    follow(input);
    // No luck finds a checksum.
    follow(&sealed(input));
    read_messages(input);
});

/// As the agent does: frame by frame, and on behind what is damaged.
fn follow(input: &[u8]) {
    let (mut rest, mut messages) = (input, Assembler::default());
    while !rest.is_empty() {
        let used = match frame::decode(rest) {
            Ok((None, 0)) => break,
            Ok((None, padding)) => padding,
            Ok((Some(found), used)) => {
                let header = found.header;
                assert_eq!(header.length, found.payload.len());
                let mut again = Vec::new();
                frame::encode(
                    &mut again,
                    header.kind,
                    header.channel,
                    header.stream,
                    header.more,
                    found.payload,
                );
                assert!(rest[..used].ends_with(&again), "a frame is written as it was read");
                let cut = frame::decode(&rest[..used - 1]);
                assert!(matches!(cut, Ok((None, _))), "a frame is whole or it is waited for");
                if matches!(header.kind, Kind::Hello | Kind::Request | Kind::Reply)
                    && let Ok(Some(message)) = messages.push(&found)
                {
                    read_messages(&message);
                }
                used
            }
            Err(_) => frame::skip_damaged(rest),
        };
        assert!((1..=rest.len()).contains(&used));
        rest = &rest[used..];
    }
}

/// The input with right checksums wherever frames seem to be.
fn sealed(input: &[u8]) -> Vec<u8> {
    let (mut sealed, mut at) = (input.to_vec(), 0);
    while let Some(header) = sealed.get(at..at + HEADER) {
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
        let end = at.saturating_add(HEADER).saturating_add(length).min(sealed.len());
        let mut checksum = crc32fast::Hasher::new();
        checksum.update(&header[..12]);
        if header[1] != DATA {
            checksum.update(&sealed[at + HEADER..end]);
        }
        let checksum = checksum.finalize().to_le_bytes();
        sealed[at + 12..at + HEADER].copy_from_slice(&checksum);
        at = end;
    }
    sealed
}

fn read_messages(bytes: &[u8]) {
    if let Ok(read) = message::decode::<Request>(bytes) {
        assert_eq!(message::decode::<Request>(&message::encode(&read)), Ok(read));
    }
    if let Ok(read) = message::decode::<Reply>(bytes) {
        assert_eq!(message::decode::<Reply>(&message::encode(&read)), Ok(read));
    }
    if let Ok(read) = message::decode::<Hello>(bytes) {
        assert_eq!(message::decode::<Hello>(&message::encode(&read)), Ok(read));
    }
}
