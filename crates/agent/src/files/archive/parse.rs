//! Reads a tar archive as its bytes come: POSIX `ustar` and `pax`, and what GNU tar made of it, holes included. Nothing of
//! it is trusted, and no more than a few MiB of it are ever held.

use super::header::{self, Block, Fields, Layout};
use super::pax::Records;

pub(crate) const BLOCK: usize = 512;
/// Of one extension: a long name, or the records of a member.
const LONGEST_EXTENSION: u64 = 1 << 20;
/// Pieces of one file between its holes.
const MOST_SEGMENTS: usize = 1 << 16;

#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    Member(Member),
    /// Of the last member's content. What is between two of them, or behind the last, is a hole.
    Data {
        offset: u64,
        bytes: &'a [u8],
    },
    /// Everything of the last member has come.
    End,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Member {
    /// As the archive has it, without trailing slashes.
    pub(crate) name: Vec<u8>,
    pub(crate) kind: Kind,
    /// Holes included.
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Symlink(Vec<u8>),
    /// To another member's name.
    HardLink(Vec<u8>),
    /// A device, FIFO or what else cannot be unpacked; the type as the archive has it.
    Special(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("it is not a tar archive, or it is damaged: a header's checksum is wrong")]
    Checksum,
    #[error("it is damaged: a number in a header cannot be read")]
    Number,
    #[error("it is damaged: an extended header cannot be read")]
    Extension,
    #[error("an extended header is longer than 1 MiB")]
    LongExtension,
    #[error("it is damaged: a map of holes makes no sense, or has more than 65536 pieces")]
    Holes,
    #[error("it ends early")]
    Short,
}

#[derive(Debug)]
pub(crate) struct Parser {
    state: State,
    block: Block,
    /// Padding, and what is of no interest.
    skip: u64,
    /// From extensions, for the next member.
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    records: Records,
}

#[derive(Debug)]
enum State {
    Header,
    Extension {
        kind: u8,
        left: usize,
        text: Vec<u8>,
    },
    /// Blocks that go on with the map of holes, before the content.
    Map(Box<Sparse>),
    /// The same as text.
    MapText(Box<Sparse>, Numbers),
    Content(Content),
    Over,
}

#[derive(Debug)]
struct Sparse {
    member: Member,
    segments: Vec<(u64, u64)>,
    /// Bytes of it in the archive.
    stored: u64,
}

#[derive(Debug)]
struct Numbers {
    read: Vec<u64>,
    current: Option<u64>,
}

#[derive(Debug)]
struct Content {
    segments: Vec<(u64, u64)>,
    /// The segment, and how much of it has come.
    at: usize,
    taken: u64,
    padding: u64,
}

impl Parser {
    pub(crate) fn new() -> Self {
        Self {
            state: State::Header,
            block: Block::new(),
            skip: 0,
            long_name: None,
            long_link: None,
            records: Records::default(),
        }
    }

    /// The end of the archive has been seen; whatever follows is of no interest.
    pub(crate) fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// The next event; `None` when `input` is used up.
    pub(crate) fn next<'a>(
        &mut self,
        input: &mut &'a [u8],
    ) -> Result<Option<Event<'a>>, Malformed> {
        loop {
            if self.skip > 0 {
                let count = usize::try_from(self.skip).unwrap_or(usize::MAX).min(input.len());
                *input = &input[count..];
                self.skip -= count as u64;
                if self.skip > 0 {
                    return Ok(None);
                }
            }
            match std::mem::replace(&mut self.state, State::Header) {
                State::Header => {
                    let Some(block) = self.block.fill(input) else { return Ok(None) };
                    if let Some(event) = self.header(&block)? {
                        return Ok(Some(event));
                    }
                }
                State::Extension { kind, mut left, mut text } => {
                    let count = left.min(input.len());
                    text.extend_from_slice(&input[..count]);
                    *input = &input[count..];
                    left -= count;
                    if left > 0 {
                        self.state = State::Extension { kind, left, text };
                        return Ok(None);
                    }
                    self.skip = padding(text.len() as u64);
                    self.extension(kind, text)?;
                }
                State::Map(mut sparse) => {
                    let Some(block) = self.block.fill(input) else {
                        self.state = State::Map(sparse);
                        return Ok(None);
                    };
                    let more = header::more_segments(&block, &mut sparse.segments)?;
                    if sparse.segments.len() > MOST_SEGMENTS {
                        return Err(Malformed::Holes);
                    }
                    if more {
                        self.state = State::Map(sparse);
                    } else {
                        return self.begin(*sparse).map(Some);
                    }
                }
                State::MapText(mut sparse, mut numbers) => {
                    let Some(block) = self.block.fill(input) else {
                        self.state = State::MapText(sparse, numbers);
                        return Ok(None);
                    };
                    sparse.stored =
                        sparse.stored.checked_sub(BLOCK as u64).ok_or(Malformed::Holes)?;
                    if numbers.read(&block)? {
                        sparse.segments = numbers.segments();
                        return self.begin(*sparse).map(Some);
                    }
                    self.state = State::MapText(sparse, numbers);
                }
                State::Content(mut content) => {
                    let Some(&(start, length)) = content.segments.get(content.at) else {
                        self.skip = content.padding;
                        return Ok(Some(Event::End));
                    };
                    let left = length - content.taken;
                    if left == 0 {
                        content.at += 1;
                        content.taken = 0;
                        self.state = State::Content(content);
                        continue;
                    }
                    if input.is_empty() {
                        self.state = State::Content(content);
                        return Ok(None);
                    }
                    let count = usize::try_from(left).unwrap_or(usize::MAX).min(input.len());
                    let (bytes, rest) = input.split_at(count);
                    *input = rest;
                    let offset = start + content.taken;
                    content.taken += count as u64;
                    self.state = State::Content(content);
                    return Ok(Some(Event::Data { offset, bytes }));
                }
                State::Over => {
                    self.state = State::Over;
                    *input = &[];
                    return Ok(None);
                }
            }
        }
    }

    fn header<'a>(&mut self, block: &[u8; BLOCK]) -> Result<Option<Event<'a>>, Malformed> {
        if block.iter().all(|&byte| byte == 0) {
            self.state = State::Over;
            return Ok(None);
        }
        let fields = Fields::read(block)?;
        match fields.kind {
            kind @ (b'L' | b'K' | b'x' | b'X') => {
                if fields.size > LONGEST_EXTENSION {
                    return Err(Malformed::LongExtension);
                }
                let left = usize::try_from(fields.size).map_err(|_| Malformed::LongExtension)?;
                self.state = State::Extension { kind, left, text: Vec::new() };
                Ok(None)
            }
            // What holds for all that follows (nothing that matters here), and the name of the volume.
            b'g' | b'V' => {
                self.skip =
                    fields.size.checked_next_multiple_of(BLOCK as u64).ok_or(Malformed::Number)?;
                Ok(None)
            }
            _ => self.member(fields, block),
        }
    }

    fn extension(&mut self, kind: u8, mut text: Vec<u8>) -> Result<(), Malformed> {
        match kind {
            b'x' | b'X' => self.records.read(&text)?,
            kind => {
                if let Some(end) = text.iter().position(|&byte| byte == 0) {
                    text.truncate(end);
                }
                match kind {
                    b'L' => self.long_name = Some(text),
                    _ => self.long_link = Some(text),
                }
            }
        }
        Ok(())
    }

    fn member<'a>(
        &mut self,
        fields: Fields,
        block: &[u8; BLOCK],
    ) -> Result<Option<Event<'a>>, Malformed> {
        let records = std::mem::take(&mut self.records);
        let (long_name, long_link) = (self.long_name.take(), self.long_link.take());
        let mut name = records.name.or(records.path).or(long_name).unwrap_or(fields.name);
        let link = records.link.or(long_link).unwrap_or(fields.link);
        let stored = records.size.unwrap_or(fields.size);
        let is_named_directory = name.ends_with(b"/");
        while name.len() > 1 && name.ends_with(b"/") {
            name.pop();
        }
        let kind = match fields.kind {
            b'0' | b'\0' | b'7' if is_named_directory => Kind::Directory,
            b'0' | b'\0' | b'7' | b'S' => Kind::File,
            b'1' => Kind::HardLink(link),
            b'2' => Kind::Symlink(link),
            b'5' | b'D' => Kind::Directory,
            other => Kind::Special(other),
        };
        let (seconds, nanoseconds) = records.modified.unwrap_or((fields.seconds, 0));
        let member = Member {
            name,
            size: stored,
            mode: fields.mode & 0o7777,
            user: records.user.unwrap_or(fields.user),
            group: records.group.unwrap_or(fields.group),
            seconds,
            nanoseconds,
            kind,
        };
        let mut sparse = Box::new(Sparse { member, segments: Vec::new(), stored });
        if fields.kind == b'S' && fields.layout == Layout::Gnu {
            let (size, more) = header::first_segments(block, &mut sparse.segments)?;
            sparse.member.size = size;
            if more {
                self.state = State::Map(sparse);
                return Ok(None);
            }
            return self.begin(*sparse).map(Some);
        }
        if sparse.member.kind == Kind::File {
            if let Some(size) = records.real_size {
                sparse.member.size = size;
            }
            if records.has_map_in_content {
                self.state = State::MapText(sparse, Numbers { read: Vec::new(), current: None });
                return Ok(None);
            }
            if let Some(segments) = records.segments {
                if segments.len() > MOST_SEGMENTS {
                    return Err(Malformed::Holes);
                }
                sparse.segments = segments;
                return self.begin(*sparse).map(Some);
            }
            sparse.segments.push((0, stored));
        } else if fields.kind != b'D' {
            // Links and the like have no content, whatever they say of its size.
            (sparse.stored, sparse.member.size) = (0, 0);
        } else {
            self.skip = stored.checked_next_multiple_of(BLOCK as u64).ok_or(Malformed::Number)?;
            (sparse.stored, sparse.member.size) = (0, 0);
        }
        self.begin(*sparse).map(Some)
    }

    /// The content follows.
    fn begin<'a>(&mut self, sparse: Sparse) -> Result<Event<'a>, Malformed> {
        let Sparse { member, mut segments, stored } = sparse;
        segments.retain(|&(_, length)| length > 0);
        let (mut end, mut sum) = (0, 0_u64);
        for &(start, length) in &segments {
            if start < end {
                return Err(Malformed::Holes);
            }
            end = start.checked_add(length).ok_or(Malformed::Holes)?;
            sum = sum.checked_add(length).ok_or(Malformed::Holes)?;
        }
        // No file can be as long as that.
        if end > member.size || sum != stored || i64::try_from(member.size).is_err() {
            return Err(Malformed::Holes);
        }
        let padding = padding(stored);
        self.state = State::Content(Content { segments, at: 0, taken: 0, padding });
        Ok(Event::Member(member))
    }
}

fn padding(size: u64) -> u64 {
    (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64
}

impl Numbers {
    /// True once all of them have come: how many segments, then offset and length of each, one a line.
    fn read(&mut self, block: &[u8; BLOCK]) -> Result<bool, Malformed> {
        for &byte in block {
            match byte {
                b'0'..=b'9' => {
                    let so_far = self.current.unwrap_or(0);
                    let next =
                        so_far.checked_mul(10).and_then(|n| n.checked_add(u64::from(byte - b'0')));
                    self.current = Some(next.ok_or(Malformed::Holes)?);
                }
                b'\n' => {
                    self.read.push(self.current.take().ok_or(Malformed::Holes)?);
                    let count = usize::try_from(self.read[0]).unwrap_or(usize::MAX);
                    if count > MOST_SEGMENTS {
                        return Err(Malformed::Holes);
                    }
                    if self.read.len() == 1 + 2 * count {
                        return Ok(true);
                    }
                }
                _ => return Err(Malformed::Holes),
            }
        }
        Ok(false)
    }

    fn segments(&self) -> Vec<(u64, u64)> {
        self.read[1..].chunks_exact(2).map(|pair| (pair[0], pair[1])).collect()
    }
}
