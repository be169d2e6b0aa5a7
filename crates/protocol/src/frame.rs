//! Frames: a header of 16 bytes, then the payload. A frame is never longer than 32 KiB, because the guest's
//! virtio-serial driver splits longer writes (Linux `drivers/char/virtio_console.c`, `port_fops_write`).

use std::fmt;

pub const HEADER: usize = 16;
pub const MAX_FRAME: usize = 32 * 1024;
pub const MAX_PAYLOAD: usize = MAX_FRAME - HEADER;

/// The first byte of every frame. Where a frame would begin, zero bytes are skipped: a host that connects anew sends
/// [`MAX_FRAME`] of them, which completes whatever frame its predecessor left half-sent (and breaks its checksum).
const MAGIC: u8 = 0xA7;
const MORE: u8 = 0x01;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Host to agent: a new epoch begins; see [`crate::hello`].
    Hello,
    /// Host to agent: opens the stream.
    Request,
    /// Agent to host: a structured answer on the stream; there may be several.
    Reply,
    /// Bytes, on the frame's channel.
    Data,
    /// This side sends nothing more on the stream.
    Finish,
    /// The receiver has consumed so many bytes of data (a little-endian u32); as many more may be sent.
    Credit,
    /// The stream is over at once, in both directions.
    Reset,
}

impl Kind {
    const ALL: [Self; 7] = [
        Self::Hello,
        Self::Request,
        Self::Reply,
        Self::Data,
        Self::Finish,
        Self::Credit,
        Self::Reset,
    ];

    fn byte(self) -> u8 {
        match self {
            Self::Hello => 1,
            Self::Request => 2,
            Self::Reply => 3,
            Self::Data => 4,
            Self::Finish => 5,
            Self::Credit => 6,
            Self::Reset => 7,
        }
    }

    /// Messages are acted upon, so a damaged one must be noticed. Data only becomes visible through a later message.
    fn payload_is_checked(self) -> bool {
        match self {
            Self::Data => false,
            Self::Hello
            | Self::Request
            | Self::Reply
            | Self::Finish
            | Self::Credit
            | Self::Reset => true,
        }
    }
}

/// What a [`Kind::Data`] frame's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Channel {
    /// A file's content, the standard input of an exec, or what a connection carries.
    Content,
    Stdout,
    Stderr,
}

impl Channel {
    fn byte(self) -> u8 {
        match self {
            Self::Content => 0,
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Content, Self::Stdout, Self::Stderr]
            .into_iter()
            .find(|channel| channel.byte() == byte)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub channel: Channel,
    /// The message goes on in the next frame of this kind on this stream.
    pub more: bool,
    pub stream: u32,
    /// Length of the payload.
    pub length: usize,
}

#[derive(Clone, PartialEq, Eq)]
pub struct Frame<'a> {
    pub header: Header,
    pub payload: &'a [u8],
}

impl fmt::Debug for Frame<'_> {
    /// Payloads may hold secrets and files: only their length is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame").field("header", &self.header).finish_non_exhaustive()
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("a frame does not begin with its mark")]
    NoMark,
    #[error("a frame's header is damaged or unknown")]
    BadHeader,
    #[error("a frame's checksum is wrong")]
    BadChecksum,
}

/// Appends one frame.
///
/// # Panics
/// If the payload is longer than [`MAX_PAYLOAD`]; callers split with [`encode_message`] or send data in pieces.
pub fn encode(
    out: &mut Vec<u8>,
    kind: Kind,
    channel: Channel,
    stream: u32,
    more: bool,
    payload: &[u8],
) {
    assert!(payload.len() <= MAX_PAYLOAD, "a frame's payload is bounded by its senders");
    let header = encode_header(kind, channel, stream, more, payload);
    out.extend_from_slice(&header);
    out.extend_from_slice(payload);
}

/// The header alone, for senders that write header and payload without copying them together.
pub fn encode_header(
    kind: Kind,
    channel: Channel,
    stream: u32,
    more: bool,
    payload: &[u8],
) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[0] = MAGIC;
    header[1] = kind.byte();
    header[2] = channel.byte();
    header[3] = if more { MORE } else { 0 };
    header[4..8].copy_from_slice(&stream.to_le_bytes());
    header[8..12].copy_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    let checksum = checksum(&header[..12], kind, payload);
    header[12..16].copy_from_slice(&checksum.to_le_bytes());
    header
}

/// Appends a message in as many frames as it needs.
pub fn encode_message(out: &mut Vec<u8>, kind: Kind, stream: u32, message: &[u8]) {
    let mut pieces = message.chunks(MAX_PAYLOAD).peekable();
    if pieces.peek().is_none() {
        encode(out, kind, Channel::Content, stream, false, &[]);
    }
    while let Some(piece) = pieces.next() {
        encode(out, kind, Channel::Content, stream, pieces.peek().is_some(), piece);
    }
}

fn checksum(header: &[u8], kind: Kind, payload: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(header);
    if kind.payload_is_checked() {
        hasher.update(payload);
    }
    hasher.finalize()
}

/// The frame at the start of `input`, and how many bytes it and the padding before it take.
///
/// `Ok((None, n))` means: drop `n` bytes of padding, then wait for more input.
///
/// # Errors
/// The stream cannot be followed any longer. The agent then skips bytes until a hello can be read (with
/// [`skip_damaged`]); the host drops the connection and makes a new one.
pub fn decode(input: &[u8]) -> Result<(Option<Frame<'_>>, usize), Error> {
    let padding = input.iter().take_while(|&&byte| byte == 0).count();
    let rest = &input[padding..];
    if let Some(&first) = rest.first()
        && first != MAGIC
    {
        return Err(Error::NoMark);
    }
    let Some(header) = rest.first_chunk::<HEADER>() else { return Ok((None, padding)) };
    let kind =
        Kind::ALL.into_iter().find(|kind| kind.byte() == header[1]).ok_or(Error::BadHeader)?;
    let channel = Channel::from_byte(header[2]).ok_or(Error::BadHeader)?;
    let more = match header[3] {
        0 => false,
        MORE => true,
        _ => return Err(Error::BadHeader),
    };
    let word = |at: usize| {
        u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let length = word(8) as usize;
    if length > MAX_PAYLOAD {
        return Err(Error::BadHeader);
    }
    if !kind.payload_is_checked() && checksum(&header[..12], kind, &[]) != word(12) {
        return Err(Error::BadChecksum);
    }
    let Some(payload) = rest[HEADER..].get(..length) else { return Ok((None, padding)) };
    if kind.payload_is_checked() && checksum(&header[..12], kind, payload) != word(12) {
        return Err(Error::BadChecksum);
    }
    let header = Header { kind, channel, more, stream: word(4), length };
    Ok((Some(Frame { header, payload }), padding + HEADER + length))
}

/// How many bytes to drop after [`decode`] failed: at least one, up to the next place where a frame could begin.
pub fn skip_damaged(input: &[u8]) -> usize {
    input
        .iter()
        .skip(1)
        .position(|&byte| byte == MAGIC || byte == 0)
        .map_or(input.len(), |at| at + 1)
}

/// Puts the fragments of messages together, for one stream and one direction.
#[derive(Debug, Default)]
pub struct Assembler {
    partial: Vec<u8>,
}

impl Assembler {
    /// The whole message once its last fragment has come. `None` in the error place: longer than
    /// [`crate::MAX_MESSAGE`], reset the stream.
    pub fn push(&mut self, frame: &Frame<'_>) -> Result<Option<Vec<u8>>, TooLong> {
        if self.partial.len() + frame.payload.len() > crate::MAX_MESSAGE {
            self.partial = Vec::new();
            return Err(TooLong);
        }
        self.partial.extend_from_slice(frame.payload);
        Ok(if frame.header.more { None } else { Some(std::mem::take(&mut self.partial)) })
    }

    /// True while a message has begun and not ended.
    pub fn is_partial(&self) -> bool {
        !self.partial.is_empty()
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a message is longer than the protocol allows")]
pub struct TooLong;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kinds() -> impl Strategy<Value = Kind> {
        prop::sample::select(Kind::ALL.to_vec())
    }

    proptest! {
        #[test]
        fn every_frame_comes_back_as_it_went(kind in kinds(), stream: u32, more: bool, padding in 0usize..40,
                payload in prop::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = vec![0; padding];
            encode(&mut bytes, kind, Channel::Stderr, stream, more, &payload);
            let length = bytes.len();
            bytes.extend_from_slice(&[MAGIC, 9, 9]);
            let (frame, used) = decode(&bytes).unwrap();
            let frame = frame.unwrap();
            prop_assert_eq!(used, length);
            prop_assert_eq!(frame.header, Header { kind, channel: Channel::Stderr, more, stream, length: payload.len() });
            prop_assert_eq!(frame.payload, &payload[..]);
        }

        #[test]
        fn any_bytes_are_decoded_or_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let used = match decode(rest) {
                    Ok((None, 0)) => break,
                    Ok((_, used)) => used,
                    Err(_) => skip_damaged(rest),
                };
                prop_assert!(used >= 1 && used <= rest.len());
                rest = &rest[used..];
            }
        }

        #[test]
        fn a_request_cut_off_by_a_new_connection_is_never_acted_upon(payload in prop::collection::vec(1u8.., 1..3000),
                cut in 1usize..3000) {
            let mut sent = Vec::new();
            encode(&mut sent, Kind::Request, Channel::Content, 7, false, &payload);
            sent.truncate(cut.min(sent.len() - 1));
            sent.resize(sent.len() + MAX_FRAME, 0);
            let padded = sent.len();
            encode(&mut sent, Kind::Hello, Channel::Content, 0, false, b"new epoch");
            let (mut rest, mut seen) = (&sent[..], Vec::new());
            while !rest.is_empty() {
                match decode(rest) {
                    Ok((Some(frame), used)) => { seen.push(frame.header.kind); rest = &rest[used..]; }
                    Ok((None, used)) => { prop_assert!(used > 0, "stuck with {} of {padded}", rest.len()); rest = &rest[used..]; }
                    Err(_) => rest = &rest[skip_damaged(rest)..],
                }
            }
            prop_assert_eq!(seen, vec![Kind::Hello]);
        }

        #[test]
        fn a_message_of_any_length_is_put_together_again(message in prop::collection::vec(any::<u8>(), 0..100_000)) {
            let mut bytes = Vec::new();
            encode_message(&mut bytes, Kind::Reply, 3, &message);
            let (mut rest, mut whole, mut assembler) = (&bytes[..], None, Assembler::default());
            while !rest.is_empty() {
                let (frame, used) = decode(rest).unwrap();
                whole = assembler.push(&frame.unwrap()).unwrap();
                rest = &rest[used..];
            }
            prop_assert_eq!(whole, Some(message));
        }
    }

    #[test]
    fn a_message_without_end_is_refused() {
        let payload = vec![1; MAX_PAYLOAD];
        let header = Header {
            kind: Kind::Request,
            channel: Channel::Content,
            more: true,
            stream: 1,
            length: payload.len(),
        };
        let frame = Frame { header, payload: &payload };
        let mut assembler = Assembler::default();
        assert!(
            (0..=crate::MAX_MESSAGE / MAX_PAYLOAD + 1)
                .any(|_| assembler.push(&frame) == Err(TooLong))
        );
    }
}
