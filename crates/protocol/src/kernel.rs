//! Kernels of the interpreter: requests to them, and the events that come back as `Content` data, each behind its length.

use serde::{Deserialize, Serialize};

use crate::message::{Failure, Malformed, PathBytes, decode, encode};

/// The longest event: an image, or a table.
pub const MAX_EVENT: usize = 32 << 20;
/// Cells that may wait in one session, beside the one that runs.
pub const MOST_WAITING: usize = 16;
/// A cell whose time is up is interrupted. One that goes on all the same loses its kernel after so long.
pub const INTERRUPT_GRACE_MS: u64 = 20_000;

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct KernelStart {
    /// Unique in this guest; `[A-Za-z0-9._-]{1,128}`.
    pub id: String,
    /// `python`, or the name or language of a kernel specification in the guest.
    pub language: String,
    /// On top of `HOME`, `PATH`, `LANG`, `USER`.
    pub environment: Vec<(String, String)>,
    /// Default: root's home.
    pub working_directory: Option<PathBytes>,
}

impl std::fmt::Debug for KernelStart {
    /// The environment may hold secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelStart")
            .field("id", &self.id)
            .field("language", &self.language)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct KernelRun {
    pub id: String,
    pub code: String,
    /// 0: none. Counts from the request on, so it includes the wait for cells before.
    pub timeout_ms: u64,
    /// Bytes of each of standard output, standard error and all results; what comes beyond is dropped.
    pub output_limit: u64,
}

impl std::fmt::Debug for KernelRun {
    /// The code may hold secrets.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KernelRun").field("id", &self.id).finish_non_exhaustive()
    }
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct KernelStatus {
    pub id: String,
    pub language: String,
    pub state: KernelState,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, PartialEq, Eq)]
pub enum KernelState {
    Starting,
    Idle,
    /// Somebody waits for a cell.
    Busy,
    /// It ended by itself.
    Dead,
    /// It was ended as there was no memory left.
    OutOfMemory,
}

/// In the order in which they happened. The last is [`KernelEvent::Ready`], [`KernelEvent::Ended`] or
/// [`KernelEvent::Failed`]; without any of these the kernel has ended.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum KernelEvent {
    /// The kernel waits for its first cell.
    Ready,
    Stdout(serde_bytes::ByteBuf),
    Stderr(serde_bytes::ByteBuf),
    /// One output in several forms, by MIME type. Images are base64; JSON is text.
    Result(Vec<(String, String)>),
    Error {
        name: String,
        value: String,
        /// Formatted, without colours.
        traceback: String,
    },
    /// The time is up: the cell is being interrupted.
    TimedOut,
    Ended(KernelEnd),
    /// Nothing was run.
    Failed(Failure),
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub struct KernelEnd {
    pub end: CellEnd,
    pub timed_out: bool,
    pub truncated: bool,
    pub duration_ms: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize, PartialEq, Eq)]
pub enum CellEnd {
    Finished,
    /// [`KernelEvent::Error`] came before.
    Failed,
    /// It took no notice of its interrupt, and its kernel was ended; a new one begins.
    Restarted,
    /// The kernel ended in the middle of it.
    Died {
        how: String,
    },
}

/// One event as it travels.
pub fn frame(event: &KernelEvent) -> Vec<u8> {
    let message = encode(event);
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    let mut bytes = length.to_le_bytes().to_vec();
    bytes.extend_from_slice(&message);
    bytes
}

/// Puts events together from data as it comes.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
    start: usize,
}

impl Events {
    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..std::mem::take(&mut self.start));
        self.bytes.extend_from_slice(bytes);
    }

    /// # Errors
    /// What came is no event, or longer than [`MAX_EVENT`].
    pub fn take(&mut self) -> Result<Option<KernelEvent>, Malformed> {
        let rest = &self.bytes[self.start..];
        let Some((length, rest)) = rest.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > MAX_EVENT {
            return Err(Malformed);
        }
        let Some(message) = rest.get(..length) else { return Ok(None) };
        let event = decode(message)?;
        self.start += 4 + length;
        Ok(Some(event))
    }

    /// Of an event that is not whole yet.
    pub fn waiting_bytes(&self) -> usize {
        self.bytes.len() - self.start
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn events_are_whole_however_their_bytes_were_cut(texts in prop::collection::vec(".{0,40}", 0..8), cut in 1usize..20) {
            let sent: Vec<_> = texts.iter().map(|text| KernelEvent::Stdout(text.clone().into_bytes().into())).collect();
            let bytes: Vec<u8> = sent.iter().flat_map(frame).collect();
            let (mut events, mut got) = (Events::default(), Vec::new());
            for piece in bytes.chunks(cut) {
                events.push(piece);
                while let Some(event) = events.take().unwrap() {
                    got.push(event);
                }
            }
            prop_assert_eq!(got, sent);
            prop_assert_eq!(events.waiting_bytes(), 0);
        }

        #[test]
        fn no_bytes_are_too_odd(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut events = Events::default();
            events.push(&bytes);
            while let Ok(Some(_)) = events.take() {}
        }
    }
}
