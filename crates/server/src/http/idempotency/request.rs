//! What makes two requests the same.

use axum::{body::Body, extract::Request};
use bytes::Bytes;
use futures::StreamExt;
use http::{HeaderMap, HeaderName, header::CONTENT_LENGTH};
use sha2::{Digest, Sha256};

use super::super::body::CLIENT_DEADLINE;
use crate::{
    Error,
    buffers::{Buffers, Held},
};

const KEY: HeaderName = HeaderName::from_static("idempotency-key");
const LONGEST_KEY: usize = 255;
/// Of a body: as long as any that is JSON. What is longer, a root file system, is told from others by so much of it and
/// by its length.
const COMPARED: usize = 64 << 20;

/// # Errors
/// 400 says what a key may be.
pub(super) fn key_in(headers: &HeaderMap) -> Result<Option<String>, Error> {
    let mut keys = headers.get_all(KEY).iter();
    let Some(key) = keys.next() else { return Ok(None) };
    let is_fine = (1..=LONGEST_KEY).contains(&key.len())
        && key.as_bytes().iter().all(|byte| (b' '..=b'~').contains(byte))
        && keys.next().is_none();
    match key.to_str() {
        Ok(key) if is_fine => Ok(Some(key.to_owned())),
        Ok(_) | Err(_) => Err(Error::invalid(format!(
            "`Idempotency-Key` must be one header of 1 to {LONGEST_KEY} printable ASCII characters; a random UUID will do"
        ))),
    }
}

/// A request whose body is here, or its beginning.
pub(super) struct Begun {
    /// As it was.
    pub(super) request: Request,
    pub(super) fingerprint: String,
    /// Nothing of the body is still to come.
    pub(super) is_whole: bool,
    pub(super) held: Held,
}

impl Begun {
    /// # Errors
    /// 400 when the body breaks off, 503 when others hold too much.
    pub(super) async fn read(request: Request, buffers: &Buffers) -> Result<Self, Error> {
        let (head, body) = request.into_parts();
        let (mut upload, mut held) = (body.into_data_stream(), buffers.nothing());
        let (mut pieces, mut length) = (Vec::<Bytes>::new(), 0);
        let mut digest = Sha256::new();
        digest.update(head.uri.path_and_query().map_or("", |path| path.as_str()));
        digest.update([0]);
        let is_whole = loop {
            if length > COMPARED {
                break false;
            }
            let piece = tokio::time::timeout(CLIENT_DEADLINE, upload.next())
                .await
                .map_err(|_| Error::invalid("the body stopped coming; send it again"))?;
            let Some(piece) = piece else { break true };
            let piece = piece.map_err(|_| Error::invalid("the body broke off; send it again"))?;
            // Pieces of a long body come as they please: no more than is compared counts.
            digest.update(&piece[..piece.len().min(COMPARED.saturating_sub(length))]);
            length += piece.len();
            if !held.grow_to(length as u64) {
                return Err(Buffers::short());
            }
            pieces.push(piece);
        };
        if !is_whole && let Some(length) = head.headers.get(CONTENT_LENGTH) {
            digest.update(length.as_bytes());
        }
        let fingerprint = digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        let pieces = futures::stream::iter(pieces.into_iter().map(Ok));
        let request = Request::from_parts(head, Body::from_stream(pieces.chain(upload)));
        Ok(Self { request, fingerprint, is_whole, held })
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn key(values: &[&[u8]]) -> Result<Option<String>, Error> {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(KEY, HeaderValue::from_bytes(value).unwrap());
        }
        key_in(&headers)
    }

    #[test]
    fn a_key_is_one_header_of_printable_characters() {
        assert_eq!(key(&[]).unwrap(), None);
        assert_eq!(key(&[b"a b~"]).unwrap(), Some("a b~".to_owned()));
        assert!(key(&[&[b'x'; 255]]).is_ok());
        let refused: [&[&[u8]]; 5] =
            [&[b""], &[&[b'x'; 256]], &["é".as_bytes()], &[b"a\tb"], &[b"a", b"a"]];
        for bad in refused {
            assert!(key(bad).is_err(), "{bad:?}");
        }
    }

    async fn begun(path: &str, body: &'static str) -> Begun {
        let request = Request::post(path).body(Body::from(body)).unwrap();
        Begun::read(request, &Buffers::new(1 << 20)).await.unwrap()
    }

    #[tokio::test]
    async fn requests_are_the_same_by_route_and_body() {
        let first = begun("/a?b=c", "body").await;
        assert!(first.is_whole);
        assert_eq!(first.fingerprint, begun("/a?b=c", "body").await.fingerprint);
        for (path, body) in
            [("/a?b=d", "body"), ("/a", "body"), ("/a?b=c", "bodies"), ("/a?b=c", "")]
        {
            assert_ne!(first.fingerprint, begun(path, body).await.fingerprint, "{path} {body}");
        }
        let read = axum::body::to_bytes(first.request.into_body(), 100).await.unwrap();
        assert_eq!(read, "body");
    }

    #[tokio::test]
    async fn a_long_body_comes_through_whole_and_is_told_by_its_beginning() {
        let pieces =
            || (0..66_u8).map(|byte| Ok::<_, std::io::Error>(Bytes::from(vec![byte; 1 << 20])));
        let request = || {
            Request::post("/a").body(Body::from_stream(futures::stream::iter(pieces()))).unwrap()
        };
        let buffers = Buffers::new(256 << 20);
        let begun = Begun::read(request(), &buffers).await.unwrap();
        assert!(!begun.is_whole);
        assert_eq!(begun.fingerprint, Begun::read(request(), &buffers).await.unwrap().fingerprint);
        let whole = axum::body::to_bytes(begun.request.into_body(), 100 << 20).await.unwrap();
        assert_eq!((whole.len(), whole[whole.len() - 1]), (66 << 20, 65));
    }
}
