//! Tar archives as clients have them: plain, with gzip or with Zstandard. The host (de)compresses, in pieces: in a guest it
//! would be many times slower, and what the guest parses is plain tar.

use std::io;

use api::ErrorCode;
use async_compression::{
    Level,
    tokio::bufread::{GzipDecoder, GzipEncoder, ZstdDecoder, ZstdEncoder},
    zstd::DParameter,
};
use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt, TryStreamExt, stream, stream::BoxStream};
use http::{
    HeaderMap,
    header::{CONTENT_ENCODING, CONTENT_TYPE},
};
use tokio::io::{AsyncBufRead, AsyncRead};
use tokio_util::io::{ReaderStream, StreamReader};

use crate::Error;

/// Decompressed at once.
const PIECE: usize = 64 << 10;
/// The base-2 logarithm of the memory that a frame may ask for: what RFC 8878 wants from every decoder, 8 MiB.
const LARGEST_WINDOW: u32 = 23;
/// A little slower than the fastest and a good deal smaller.
const GZIP_LEVEL: Level = Level::Precise(3);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Compression {
    None,
    Gzip,
    Zstd,
}

impl Compression {
    /// Of the `format` that a client asks for.
    pub(super) fn of_format(format: Option<&str>) -> Result<Self, Error> {
        match format {
            None | Some("" | "tar") => Ok(Self::None),
            Some("tar.gz" | "tgz") => Ok(Self::Gzip),
            Some("tar.zst" | "tzst") => Ok(Self::Zstd),
            Some(_) => Err(Error::invalid("`format` must be `tar`, `tar.gz` or `tar.zst`")),
        }
    }

    pub(super) fn media_type(self) -> &'static str {
        match self {
            Self::None => "application/x-tar",
            Self::Gzip => "application/gzip",
            Self::Zstd => "application/zstd",
        }
    }

    pub(super) fn extension(self) -> &'static str {
        match self {
            Self::None => "tar",
            Self::Gzip => "tar.gz",
            Self::Zstd => "tar.zst",
        }
    }

    /// By the first bytes, unless the client says that they are plain.
    fn of_content(headers: &HeaderMap, start: &[u8]) -> Result<Self, Error> {
        let says = |name, what: &str| {
            headers
                .get(name)
                .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(what.as_bytes()))
        };
        let is_encoded =
            headers.contains_key(CONTENT_ENCODING) && !says(CONTENT_ENCODING, "identity");
        let found = match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            _ => Self::None,
        };
        if is_encoded {
            let fits = match found {
                Self::None => false,
                Self::Gzip => says(CONTENT_ENCODING, "gzip") || says(CONTENT_ENCODING, "x-gzip"),
                Self::Zstd => says(CONTENT_ENCODING, "zstd"),
            };
            if !fits {
                return Err(Error::invalid(
                    "`Content-Encoding` is not what the content is; it can be `gzip` or `zstd`",
                ));
            }
            return Ok(found);
        }
        if found == Self::None && (start.starts_with(b"BZh") || start.starts_with(b"\xfd7zXZ")) {
            return Err(Error::invalid(
                "the archive is compressed with bzip2 or xz; send it plain, or with gzip or Zstandard",
            ));
        }
        if says(CONTENT_TYPE, "application/x-tar") {
            return Ok(Self::None);
        }
        Ok(found)
    }
}

/// The plain archive in a body. Its errors are in words for the client.
///
/// # Errors
/// 400 for a compression that is unknown here, or a body that breaks off at once.
pub(super) async fn decompressed<'a, E: std::error::Error + Send + Sync + 'static>(
    headers: &HeaderMap,
    mut body: impl Stream<Item = Result<Bytes, E>> + Unpin + Send + 'a,
) -> Result<BoxStream<'a, io::Result<Bytes>>, Error> {
    let mut start = BytesMut::new();
    while start.len() < 6
        && let Some(piece) =
            tokio::time::timeout(super::body::CLIENT_DEADLINE, body.next())
                .await
                .map_err(|_| Error::invalid("the archive stopped coming; send it again"))?
    {
        let piece = piece.map_err(|_| Error::invalid("the archive broke off; send it again"))?;
        start.extend_from_slice(&piece);
    }
    let compression = Compression::of_content(headers, &start)?;
    let whole =
        stream::once(async move { Ok(start.freeze()) }).chain(body.map_err(io::Error::other));
    Ok(match compression {
        Compression::None => whole.boxed(),
        Compression::Gzip => {
            let mut decoder = GzipDecoder::new(StreamReader::new(whole.boxed()));
            decoder.multiple_members(true);
            pieces(decoder)
        }
        Compression::Zstd => {
            let window = [DParameter::window_log_max(LARGEST_WINDOW)];
            let mut decoder = ZstdDecoder::with_params(StreamReader::new(whole.boxed()), &window);
            decoder.multiple_members(true);
            pieces(decoder)
        }
    })
}

fn pieces<'a>(decoder: impl AsyncRead + Send + 'a) -> BoxStream<'a, io::Result<Bytes>> {
    ReaderStream::with_capacity(decoder, PIECE)
        .map_err(|error| io::Error::other(format!("it cannot be decompressed: {error}")))
        .boxed()
}

/// An archive on its way out.
pub(super) fn compressed(
    compression: Compression,
    archive: impl Stream<Item = Result<Bytes, Error>> + Send + 'static,
) -> BoxStream<'static, Result<Bytes, Error>> {
    match compression {
        Compression::None => archive.boxed(),
        Compression::Gzip => encoded(GzipEncoder::with_quality(plain(archive), GZIP_LEVEL)),
        Compression::Zstd => encoded(ZstdEncoder::new(plain(archive))),
    }
}

fn plain(
    archive: impl Stream<Item = Result<Bytes, Error>> + Send + 'static,
) -> impl AsyncBufRead + Send + 'static {
    StreamReader::new(archive.map_err(io::Error::other).boxed())
}

fn encoded(encoder: impl AsyncRead + Send + 'static) -> BoxStream<'static, Result<Bytes, Error>> {
    ReaderStream::with_capacity(encoder, PIECE)
        .map_err(|error| match error.downcast::<Error>() {
            Ok(error) => error,
            Err(error) => {
                Error::new(ErrorCode::Internal, "an archive could not be compressed").because(error)
            }
        })
        .boxed()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(
        header: Option<(http::HeaderName, &'static str)>,
        start: &[u8],
    ) -> Option<Compression> {
        let mut headers = HeaderMap::new();
        if let Some((name, value)) = header {
            headers.insert(name, value.parse().unwrap());
        }
        Compression::of_content(&headers, start).ok()
    }

    #[test]
    fn a_compression_is_told_by_the_content_and_must_be_what_the_header_says() {
        let (gzip, zstd) = (b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd");
        assert_eq!(found(None, gzip), Some(Compression::Gzip));
        assert_eq!(found(None, zstd), Some(Compression::Zstd));
        assert_eq!(found(None, b"name"), Some(Compression::None));
        assert_eq!(found(None, b""), Some(Compression::None));
        assert_eq!(found(Some((CONTENT_ENCODING, "gzip")), gzip), Some(Compression::Gzip));
        assert_eq!(found(Some((CONTENT_ENCODING, "gzip")), b"name"), None);
        assert_eq!(found(Some((CONTENT_ENCODING, "br")), b"name"), None);
        assert_eq!(found(Some((CONTENT_TYPE, "application/gzip")), gzip), Some(Compression::Gzip));
        assert_eq!(found(Some((CONTENT_TYPE, "application/x-tar")), gzip), Some(Compression::None));
        assert_eq!(found(None, b"BZh91AY"), None);
    }
}
