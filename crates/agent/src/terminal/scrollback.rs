//! The last of what a terminal has printed. Bytes have numbers, counted from the terminal's beginning, so that a client
//! that comes back says where it was.

use std::collections::VecDeque;

/// A few hundred screens of text.
pub(crate) const MOST: usize = 256 << 10;

#[derive(Debug, Default)]
pub(crate) struct Scrollback {
    bytes: VecDeque<u8>,
    /// Of the first byte that is still known.
    start: u64,
}

impl Scrollback {
    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }

    /// The oldest make room.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        let kept = &bytes[bytes.len().saturating_sub(MOST)..];
        let excess = (self.bytes.len() + kept.len()).saturating_sub(MOST);
        self.bytes.drain(..excess);
        self.start += (excess + bytes.len() - kept.len()) as u64;
        self.bytes.extend(kept);
    }

    /// What can be pushed before the byte `at` is forgotten.
    pub(crate) fn room_behind(&self, at: u64) -> usize {
        let waiting = usize::try_from(self.end().saturating_sub(at)).unwrap_or(usize::MAX);
        MOST.saturating_sub(waiting)
    }

    /// At most `most` bytes from `at` on, appended to `to`.
    pub(crate) fn copy(&self, at: u64, most: usize, to: &mut Vec<u8>) {
        let from = usize::try_from(at.saturating_sub(self.start)).unwrap_or(usize::MAX);
        let (first, second) = self.bytes.as_slices();
        let rest =
            first.iter().skip(from).chain(second.iter().skip(from.saturating_sub(first.len())));
        to.extend(rest.take(most));
    }

    /// Nothing more comes: what it holds too much is given back.
    pub(crate) fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_last_bytes_are_there_under_their_numbers(pieces in prop::collection::vec((any::<u8>(), 0..MOST + 3), 0..5), at in 0..2 * MOST as u64, most in 0..5000_usize) {
            let (mut scrollback, mut all) = (Scrollback::default(), Vec::new());
            for (byte, length) in pieces {
                let piece: Vec<u8> = (0..length).map(|at| byte.wrapping_add(at as u8)).collect();
                scrollback.push(&piece);
                all.extend_from_slice(&piece);
            }
            prop_assert_eq!(scrollback.end(), all.len() as u64);
            prop_assert_eq!(scrollback.end() - scrollback.start(), all.len().min(MOST) as u64);
            let at = at.clamp(scrollback.start(), scrollback.end());
            let mut copied = Vec::new();
            scrollback.copy(at, most, &mut copied);
            let from = at as usize;
            prop_assert_eq!(&copied[..], &all[from..(from + most).min(all.len())]);
        }
    }
}
