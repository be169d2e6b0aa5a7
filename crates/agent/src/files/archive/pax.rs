//! Extended records of tar archives (POSIX.1-2001, `pax`): `LENGTH KEY=VALUE\n`, one after the other.

use super::parse::Malformed;

/// What they say of the next member. Keys that are not here change nothing that is unpacked.
#[derive(Debug, Default)]
pub(crate) struct Records {
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) link: Option<Vec<u8>>,
    pub(crate) size: Option<u64>,
    pub(crate) user: Option<u32>,
    pub(crate) group: Option<u32>,
    /// Seconds and nanoseconds.
    pub(crate) modified: Option<(i64, u32)>,
    /// The true name of a file with holes.
    pub(crate) name: Option<Vec<u8>>,
    pub(crate) real_size: Option<u64>,
    pub(crate) segments: Option<Vec<(u64, u64)>>,
    pub(crate) has_map_in_content: bool,
}

impl Records {
    pub(crate) fn read(&mut self, text: &[u8]) -> Result<(), Malformed> {
        let mut rest = text;
        let mut offset = None;
        while !rest.is_empty() {
            let blank =
                rest.iter().take(20).position(|&byte| byte == b' ').ok_or(Malformed::Extension)?;
            let length: usize = parsed(&rest[..blank])?;
            let record = rest.get(blank + 1..length).ok_or(Malformed::Extension)?;
            let record = record.strip_suffix(b"\n").ok_or(Malformed::Extension)?;
            let equals =
                record.iter().position(|&byte| byte == b'=').ok_or(Malformed::Extension)?;
            self.take(&record[..equals], &record[equals + 1..], &mut offset)?;
            rest = &rest[length..];
        }
        Ok(())
    }

    fn take(
        &mut self,
        key: &[u8],
        value: &[u8],
        offset: &mut Option<u64>,
    ) -> Result<(), Malformed> {
        match key {
            b"path" => self.path = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(parsed(value)?),
            b"uid" => self.user = Some(parsed(value)?),
            b"gid" => self.group = Some(parsed(value)?),
            b"mtime" => self.modified = Some(time(value)?),
            b"GNU.sparse.name" => self.name = Some(value.to_vec()),
            b"GNU.sparse.size" | b"GNU.sparse.realsize" => self.real_size = Some(parsed(value)?),
            b"GNU.sparse.major" => self.has_map_in_content = parsed::<u32>(value)? == 1,
            b"GNU.sparse.offset" => *offset = Some(parsed(value)?),
            b"GNU.sparse.numbytes" => {
                let start = offset.take().ok_or(Malformed::Holes)?;
                self.segments.get_or_insert_default().push((start, parsed(value)?));
            }
            b"GNU.sparse.map" => {
                let numbers = value
                    .split(|&byte| byte == b',')
                    .filter(|text| !text.is_empty())
                    .map(parsed)
                    .collect::<Result<Vec<u64>, _>>()?;
                let (pairs, []) = numbers.as_chunks::<2>() else { return Err(Malformed::Holes) };
                self.segments =
                    Some(pairs.iter().map(|&[start, length]| (start, length)).collect());
            }
            // A file that is one hole has no pieces.
            b"GNU.sparse.numblocks" => {
                self.segments.get_or_insert_default();
            }
            _ => {}
        }
        Ok(())
    }
}

fn parsed<N: std::str::FromStr>(text: &[u8]) -> Result<N, Malformed> {
    let text = std::str::from_utf8(text).map_err(|_| Malformed::Extension)?;
    text.parse().map_err(|_| Malformed::Extension)
}

/// `-12.345`: the fraction goes on from the seconds towards the future.
fn time(text: &[u8]) -> Result<(i64, u32), Malformed> {
    let text = std::str::from_utf8(text).map_err(|_| Malformed::Extension)?;
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let seconds: i64 = whole.parse().map_err(|_| Malformed::Extension)?;
    if !fraction.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(Malformed::Extension);
    }
    let nanoseconds: u32 = format!("{fraction:0<9.9}").parse().map_err(|_| Malformed::Extension)?;
    if whole.starts_with('-') && nanoseconds > 0 {
        let seconds = seconds.checked_sub(1).ok_or(Malformed::Extension)?;
        return Ok((seconds, 1_000_000_000 - nanoseconds));
    }
    Ok((seconds, nanoseconds))
}

/// One record. Its length counts itself.
pub(crate) fn record(key: &str, value: &str) -> Vec<u8> {
    let rest = key.len() + value.len() + 3;
    let mut length = rest + rest.to_string().len();
    if length.to_string().len() + rest != length {
        length = rest + length.to_string().len();
    }
    format!("{length} {key}={value}\n").into_bytes()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_is_read_as_it_was_written(value in "[a-z\n= ]{0,1200}") {
            let text = [record("path", &value), record("comment", "x")].concat();
            let mut records = Records::default();
            records.read(&text).unwrap();
            prop_assert_eq!(records.path, Some(value.into_bytes()));
        }
    }

    #[test]
    fn times_have_fractions() {
        assert_eq!(time(b"12.5"), Ok((12, 500_000_000)));
        assert_eq!(time(b"-1.25"), Ok((-2, 750_000_000)));
        assert_eq!(time(b"7"), Ok((7, 0)));
        assert!(time(b"7.x").is_err() && time(b"").is_err());
    }
}
