//! The guest agent, carried in this program: a host needs one file.

/// A static executable, `/init` of the guests' initramfs.
pub static AGENT: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/atoll-agent"));

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_agent_needs_no_loader_and_no_library() {
        assert_eq!(&AGENT[..5], b"\x7fELF\x02");
        let word = |at: usize| AGENT[at..at + 8].try_into().map(u64::from_le_bytes).unwrap();
        let half = |at: usize| usize::from(u16::from_le_bytes([AGENT[at], AGENT[at + 1]]));
        let (first, size, count) = (usize::try_from(word(32)).unwrap(), half(54), half(56));
        // PT_INTERP: what a program that is not static begins with.
        assert!((0..count).all(|n| AGENT[first + n * size] != 3));
    }
}
