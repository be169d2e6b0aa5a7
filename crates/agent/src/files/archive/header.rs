//! Headers of tar archives: blocks of 512 bytes with fields at fixed places, read and written.

use super::parse::{BLOCK, Malformed};

const NAME: std::ops::Range<usize> = 0..100;
const MODE: std::ops::Range<usize> = 100..108;
const USER: std::ops::Range<usize> = 108..116;
const GROUP: std::ops::Range<usize> = 116..124;
const SIZE: std::ops::Range<usize> = 124..136;
const MODIFIED: std::ops::Range<usize> = 136..148;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const KIND: usize = 156;
const LINK: std::ops::Range<usize> = 157..257;
const MAGIC: std::ops::Range<usize> = 257..265;
const PREFIX: std::ops::Range<usize> = 345..500;
/// In headers of GNU tar: the first four pieces between holes, whether more follow, and the true size.
const SEGMENTS: std::ops::Range<usize> = 386..482;
const SEGMENTS_GO_ON: usize = 482;
const REAL_SIZE: std::ops::Range<usize> = 483..495;
/// In the blocks behind such a header.
const MORE_SEGMENTS: std::ops::Range<usize> = 0..504;
const MORE_GO_ON: usize = 504;
const SEGMENT: usize = 24;

/// Puts a block together.
#[derive(Debug)]
pub(crate) struct Block {
    bytes: [u8; BLOCK],
    filled: usize,
}

impl Block {
    pub(crate) fn new() -> Self {
        Self { bytes: [0; BLOCK], filled: 0 }
    }

    pub(crate) fn fill(&mut self, input: &mut &[u8]) -> Option<[u8; BLOCK]> {
        let count = (BLOCK - self.filled).min(input.len());
        self.bytes[self.filled..self.filled + count].copy_from_slice(&input[..count]);
        *input = &input[count..];
        self.filled += count;
        if self.filled < BLOCK {
            return None;
        }
        self.filled = 0;
        Some(self.bytes)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    Old,
    Posix,
    Gnu,
}

#[derive(Debug)]
pub(crate) struct Fields {
    pub(crate) name: Vec<u8>,
    pub(crate) link: Vec<u8>,
    pub(crate) kind: u8,
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) seconds: i64,
    pub(crate) layout: Layout,
}

impl Fields {
    pub(crate) fn read(block: &[u8; BLOCK]) -> Result<Self, Malformed> {
        let told = number(&block[CHECKSUM]).map_err(|_| Malformed::Checksum)?;
        // Some old programs took the bytes for signed ones.
        let signed: i64 = counted(block).map(|byte| i64::from(byte.cast_signed())).sum();
        let unsigned: i64 = counted(block).map(i64::from).sum();
        if told != unsigned && told != signed {
            return Err(Malformed::Checksum);
        }
        let layout = match &block[MAGIC] {
            b"ustar  \0" => Layout::Gnu,
            magic if magic.starts_with(b"ustar\0") => Layout::Posix,
            _ => Layout::Old,
        };
        let mut name = text(&block[NAME]);
        if layout == Layout::Posix && block[PREFIX.start] != 0 {
            name = [text(&block[PREFIX]), name].join(&b'/');
        }
        let small =
            |field| number(field).and_then(|n| u32::try_from(n).map_err(|_| Malformed::Number));
        Ok(Self {
            name,
            link: text(&block[LINK]),
            kind: block[KIND],
            size: size(&block[SIZE])?,
            mode: small(&block[MODE])?,
            user: small(&block[USER])?,
            group: small(&block[GROUP])?,
            seconds: number(&block[MODIFIED])?,
            layout,
        })
    }
}

/// The bytes of which the checksum is the sum: its own field counts as blanks.
fn counted(block: &[u8; BLOCK]) -> impl Iterator<Item = u8> {
    block.iter().enumerate().map(|(at, &byte)| if CHECKSUM.contains(&at) { b' ' } else { byte })
}

/// The true size, and whether the map goes on in the next block.
pub(crate) fn first_segments(
    block: &[u8; BLOCK],
    segments: &mut Vec<(u64, u64)>,
) -> Result<(u64, bool), Malformed> {
    push_segments(&block[SEGMENTS], segments)?;
    Ok((size(&block[REAL_SIZE])?, block[SEGMENTS_GO_ON] != 0))
}

/// Whether it goes on still.
pub(crate) fn more_segments(
    block: &[u8; BLOCK],
    segments: &mut Vec<(u64, u64)>,
) -> Result<bool, Malformed> {
    push_segments(&block[MORE_SEGMENTS], segments)?;
    Ok(block[MORE_GO_ON] != 0)
}

fn push_segments(fields: &[u8], segments: &mut Vec<(u64, u64)>) -> Result<(), Malformed> {
    for field in fields.chunks_exact(SEGMENT) {
        let (start, length) = field.split_at(SEGMENT / 2);
        if start[0] == 0 {
            break;
        }
        segments.push((size(start)?, size(length)?));
    }
    Ok(())
}

/// Up to the first NUL.
fn text(field: &[u8]) -> Vec<u8> {
    field.split(|&byte| byte == 0).next().unwrap_or_default().to_vec()
}

fn size(field: &[u8]) -> Result<u64, Malformed> {
    u64::try_from(number(field)?).map_err(|_| Malformed::Number)
}

/// Octal digits, or where the first bit is set the two's complement of the rest.
fn number(field: &[u8]) -> Result<i64, Malformed> {
    if field[0] & 0x80 != 0 {
        let is_negative = field[0] & 0x40 != 0;
        let first = if is_negative {
            i128::from(field[0].cast_signed())
        } else {
            i128::from(field[0] & 0x3f)
        };
        let wide = field[1..].iter().try_fold(first, |value, &byte| {
            value.checked_mul(256).map(|value| value + i128::from(byte))
        });
        return wide.and_then(|value| i64::try_from(value).ok()).ok_or(Malformed::Number);
    }
    let digits = field.split(|&byte| byte == 0).next().unwrap_or_default().trim_ascii();
    digits.iter().try_fold(0_i64, |value, &byte| match byte {
        b'0'..=b'7' => value
            .checked_mul(8)
            .map(|value| value + i64::from(byte - b'0'))
            .ok_or(Malformed::Number),
        _ => Err(Malformed::Number),
    })
}

/// What is written of one member.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Written<'a> {
    pub(crate) name: &'a [u8],
    pub(crate) link: &'a [u8],
    pub(crate) kind: u8,
    /// Bytes that follow.
    pub(crate) size: u64,
    pub(crate) mode: u32,
    pub(crate) user: u32,
    pub(crate) group: u32,
    pub(crate) seconds: i64,
}

/// Appends a header as GNU tar writes them, which every program reads; long names go before it.
pub(crate) fn write(out: &mut Vec<u8>, member: &Written<'_>) {
    for (kind, name, field) in [(b'K', member.link, LINK), (b'L', member.name, NAME)] {
        if name.len() > field.len() {
            let long = Written {
                name: b"././@LongLink",
                link: b"",
                kind,
                size: name.len() as u64 + 1,
                mode: 0o644,
                user: 0,
                group: 0,
                seconds: 0,
            };
            out.extend_from_slice(&block_of(&long));
            out.extend_from_slice(name);
            pad(out, name.len() as u64 + 1, 1);
        }
    }
    out.extend_from_slice(&block_of(member));
}

/// The same for a file with holes, whose map may take more blocks.
pub(crate) fn write_sparse(
    out: &mut Vec<u8>,
    member: &Written<'_>,
    size: u64,
    segments: &[(u64, u64)],
) {
    let mut with_long_names = Vec::new();
    write(&mut with_long_names, member);
    let mut block = block_of(member);
    let first = SEGMENTS.len() / SEGMENT;
    let (in_header, rest) = segments.split_at(segments.len().min(first));
    put_segments(&mut block[SEGMENTS], in_header);
    block[SEGMENTS_GO_ON] = u8::from(!rest.is_empty());
    put_number(&mut block[REAL_SIZE], i128::from(size));
    seal(&mut block);
    let names = with_long_names.len() - BLOCK;
    out.extend_from_slice(&with_long_names[..names]);
    out.extend_from_slice(&block);
    let mut rest = rest.chunks(MORE_SEGMENTS.len() / SEGMENT).peekable();
    while let Some(segments) = rest.next() {
        let mut block = [0; BLOCK];
        put_segments(&mut block[MORE_SEGMENTS], segments);
        block[MORE_GO_ON] = u8::from(rest.peek().is_some());
        out.extend_from_slice(&block);
    }
}

/// Appends a comment, which programs skip.
pub(crate) fn write_comment(out: &mut Vec<u8>, comment: &str) {
    let record = super::pax::record("comment", comment);
    let member = Written {
        name: b"pax_global_header",
        link: b"",
        kind: b'g',
        size: record.len() as u64,
        mode: 0o644,
        user: 0,
        group: 0,
        seconds: 0,
    };
    let mut block = block_of(&member);
    block[MAGIC].copy_from_slice(b"ustar\x0000");
    seal(&mut block);
    out.extend_from_slice(&block);
    out.extend_from_slice(&record);
    pad(out, record.len() as u64, 0);
}

/// Zeroes up to the end of the block in which `size` bytes end, of which `missing` are not written yet.
pub(crate) fn pad(out: &mut Vec<u8>, size: u64, missing: usize) {
    let block = BLOCK as u64;
    let padding = usize::try_from((block - size % block) % block).unwrap_or(0);
    out.resize(out.len() + missing + padding, 0);
}

fn block_of(member: &Written<'_>) -> [u8; BLOCK] {
    let mut block = [0; BLOCK];
    put_text(&mut block[NAME], member.name);
    put_number(&mut block[MODE], i128::from(member.mode));
    put_number(&mut block[USER], i128::from(member.user));
    put_number(&mut block[GROUP], i128::from(member.group));
    put_number(&mut block[SIZE], i128::from(member.size));
    put_number(&mut block[MODIFIED], i128::from(member.seconds));
    block[KIND] = member.kind;
    put_text(&mut block[LINK], member.link);
    block[MAGIC].copy_from_slice(b"ustar  \0");
    seal(&mut block);
    block
}

fn seal(block: &mut [u8; BLOCK]) {
    let sum: u32 = counted(block).map(u32::from).sum();
    block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
}

fn put_segments(field: &mut [u8], segments: &[(u64, u64)]) {
    for (place, &(start, length)) in field.chunks_exact_mut(SEGMENT).zip(segments) {
        let (first, second) = place.split_at_mut(SEGMENT / 2);
        put_number(first, i128::from(start));
        put_number(second, i128::from(length));
    }
}

fn put_text(field: &mut [u8], text: &[u8]) {
    let length = text.len().min(field.len());
    field[..length].copy_from_slice(&text[..length]);
}

/// Octal with a NUL where it fits, else binary.
fn put_number(field: &mut [u8], value: i128) {
    let digits = field.len() - 1;
    let text = format!("{value:0digits$o}");
    if value >= 0 && text.len() == digits {
        field[..digits].copy_from_slice(text.as_bytes());
        return;
    }
    let bytes = value.to_be_bytes();
    let length = field.len();
    field.copy_from_slice(&bytes[bytes.len() - length..]);
    field[0] = if value < 0 { 0xff } else { 0x80 };
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_number_is_read_as_it_was_written(value: i64) {
            let mut field = [0; 12];
            put_number(&mut field, i128::from(value));
            prop_assert_eq!(number(&field), Ok(value));
        }
    }
}
