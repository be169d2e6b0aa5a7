//! SHA-256 digests: the names of what is addressed by content.

use std::{fmt, io::Read, path::Path, str::FromStr};

use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result};

/// 64 lower-case hexadecimal digits, so it is safe as a file name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Digest(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a digest must be 64 lower-case hexadecimal digits")]
pub struct InvalidDigest;

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        let mut hasher = Hasher::default();
        hasher.0.update(bytes);
        hasher.finish()
    }

    pub fn of_file(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).map_err(Error::io("open", path))?;
        Self::of_reader(file).map_err(Error::io("read", path))
    }

    pub fn of_reader(mut reader: impl Read) -> std::io::Result<Self> {
        let mut hasher = Hasher::default();
        let mut block = vec![0; 1 << 20];
        loop {
            match reader.read(&mut block)? {
                0 => return Ok(hasher.finish()),
                n => hasher.0.update(&block[..n]),
            }
        }
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Enough to tell two apart in a log or a table.
    pub fn short(&self) -> &str {
        &self.0[..12]
    }
}

/// Digests a sequence of parts; unlike a plain concatenation, where one part ends matters.
#[derive(Default)]
pub struct Hasher(Sha256);

impl Hasher {
    #[must_use]
    pub fn part(mut self, bytes: &[u8]) -> Self {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
        self
    }

    pub fn finish(self) -> Digest {
        let mut text = String::with_capacity(64);
        for byte in self.0.finalize() {
            for nibble in [byte >> 4, byte & 15] {
                text.push(char::from_digit(nibble.into(), 16).expect("a nibble is below 16"));
            }
        }
        Digest(text)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Digest {
    type Err = InvalidDigest;
    fn from_str(text: &str) -> Result<Self, InvalidDigest> {
        let plain =
            text.len() == 64 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if plain { Ok(Self(text.to_owned())) } else { Err(InvalidDigest) }
    }
}

impl TryFrom<String> for Digest {
    type Error = InvalidDigest;
    fn try_from(text: String) -> Result<Self, InvalidDigest> {
        text.parse()
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_is_that_of_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(Digest::of(b"").as_str(), empty);
        assert_eq!(empty.parse(), Ok(Digest::of(b"")));
    }

    #[test]
    fn where_a_part_ends_matters() {
        assert_ne!(
            Hasher::default().part(b"ab").part(b"c").finish(),
            Hasher::default().part(b"a").part(b"bc").finish()
        );
    }

    #[test]
    fn only_plain_digests_are_taken() {
        for bad in ["", "..", &"A".repeat(64), &"a".repeat(63), &format!("{}/", "a".repeat(63))] {
            assert_eq!(bad.parse::<Digest>(), Err(InvalidDigest), "{bad:?}");
        }
    }
}
