//! The `Range` header.
#![no_main]

// The parser names its result by the crate from which the server has it.
extern crate self as machine;

pub mod guest {
    pub use protocol::message::ReadRange;
}

#[path = "../../crates/server/src/http/range.rs"]
mod range;

use guest::ReadRange;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let Ok(header) = std::str::from_utf8(input) else { return };
    let again = match range::parse(header) {
        None => return,
        Some(ReadRange::Last(length)) => format!("bytes=-{length}"),
        Some(ReadRange::From { start, end: None }) => format!("bytes={start}-"),
        Some(ReadRange::From { start, end: Some(end) }) => {
            assert!(start < end || end == u64::MAX, "{header}: {start}..{end}");
            // Of the last byte of all nobody can name the end.
            if end == u64::MAX {
                return;
            }
            format!("bytes={start}-{}", end - 1)
        }
    };
    assert_eq!(range::parse(&again), range::parse(header), "{header} is {again}");
});
