//! Tar archives, whole and in pieces. Whoever may send to a sandbox may send anything.
//!
//! The sources are compiled in by their paths, for the parser alone is asked.
#![no_main]

#[path = "../../crates/agent/src/files/archive"]
#[expect(dead_code, reason = "nothing is written here")]
mod archive {
    pub(crate) mod header;
    pub(crate) mod parse;
    pub(crate) mod pax;
}

use archive::parse::{Event, Malformed, Member, Parser};
use libfuzzer_sys::fuzz_target;

const BLOCK: usize = 512;
/// Of a header, where its checksum is.
const CHECKSUM: std::ops::Range<usize> = 148..156;

fuzz_target!(|input: &[u8]| {
    let Some((&cut, input)) = input.split_first() else { return };
    for bytes in [input, &sealed(input)] {
        let whole = read(bytes, bytes.len().max(1));
        assert_eq!(whole, read(bytes, usize::from(cut) + 1), "pieces are as good as the whole");
    }
});

/// What an archive comes to: its members, with how much of each came, and how it ended.
type Outcome = (Vec<(Member, u64)>, Result<bool, Malformed>);

fn read(bytes: &[u8], piece: usize) -> Outcome {
    let (mut parser, mut members) = (Parser::new(), Vec::<(Member, u64)>::new());
    let (mut is_open, mut end) = (false, 0);
    for piece in bytes.chunks(piece) {
        let mut rest = piece;
        loop {
            let before = rest.len();
            match parser.next(&mut rest) {
                Ok(None) => break,
                Ok(Some(Event::Member(member))) => {
                    assert!(!is_open, "a member ends before the next begins");
                    (is_open, end) = (true, 0);
                    members.push((member, 0));
                }
                Ok(Some(Event::Data { offset, bytes })) => {
                    let (member, came) = members.last_mut().expect("data is a member's");
                    assert!(is_open && !bytes.is_empty() && bytes.len() <= before);
                    assert!(offset >= end, "content comes in order");
                    end = offset + bytes.len() as u64;
                    assert!(end <= member.size, "content is no longer than its member");
                    *came += bytes.len() as u64;
                }
                Ok(Some(Event::End)) => {
                    assert!(std::mem::take(&mut is_open), "a member ends once");
                }
                Err(malformed) => return (members, Err(malformed)),
            }
            assert!(rest.len() <= before);
        }
        assert!(rest.is_empty(), "all of a piece is taken");
    }
    (members, Ok(parser.is_over()))
}

/// The input with right checksums in every block that may be a header: no luck finds them.
fn sealed(input: &[u8]) -> Vec<u8> {
    let mut sealed = input.to_vec();
    for block in sealed.chunks_exact_mut(BLOCK).filter(|block| block[0] != 0) {
        block[CHECKSUM].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    sealed
}
