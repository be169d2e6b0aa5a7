//! Positions in the write-ahead log, and the segments it is cut into.

use std::fmt;

/// Of a cluster made with PostgreSQL's default.
pub(super) const SEGMENT_BYTES: u64 = 16 << 20;
const SEGMENTS_OF_A_FILE_ID: u64 = 0x1_0000_0000 / SEGMENT_BYTES;

/// A position as a count of bytes since the cluster was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lsn(pub(super) u64);

impl Lsn {
    /// As PostgreSQL writes it: `1/2A000028`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (high, low) = text.split_once('/')?;
        let half = |text: &str| u32::from_str_radix(text, 16).ok().map(u64::from);
        Some(Self(half(high)? << 32 | half(low)?))
    }

    /// The segment that it lies in.
    pub(super) fn segment(self) -> u64 {
        self.0 / SEGMENT_BYTES
    }

    pub(super) fn start_of(segment: u64) -> Self {
        Self(segment.saturating_mul(SEGMENT_BYTES))
    }
}

impl fmt::Display for Lsn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:X}/{:X}", self.0 >> 32, self.0 & 0xFFFF_FFFF)
    }
}

/// The name of its file.
pub(super) fn file_name(timeline: u32, segment: u64) -> String {
    format!(
        "{timeline:08X}{:08X}{:08X}",
        segment / SEGMENTS_OF_A_FILE_ID,
        segment % SEGMENTS_OF_A_FILE_ID
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_position_is_read_as_it_is_written() {
        for text in ["0/0", "0/3000028", "1A/FFFFFFFF"] {
            assert_eq!(Lsn::parse(text).unwrap().to_string(), text);
        }
        for bad in ["", "0", "0/", "x/1", "0/100000000"] {
            assert_eq!(Lsn::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn segments_are_named_as_postgresql_names_them() {
        let name = |text: &str| file_name(1, Lsn::parse(text).unwrap().segment());
        assert_eq!(name("0/3000028"), "000000010000000000000003");
        assert_eq!(name("0/FF000000"), "0000000100000000000000FF");
        assert_eq!(name("1/0"), "000000010000000100000000");
        assert_eq!(Lsn::start_of(257).to_string(), "1/1000000");
    }
}
