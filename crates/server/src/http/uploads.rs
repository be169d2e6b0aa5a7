//! `/fs/uploads`: files of any size, in parts.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use api::{BeginUpload, CompleteUpload, FileWritten, UploadList, UploadParts};
use axum::{
    body::{Body, BodyDataStream},
    extract::State,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{Stream, StreamExt};
use http::{
    HeaderMap, StatusCode,
    header::{CONTENT_LENGTH, ETAG},
};
use machine::guest::{FileWrite, UploadBegin, UploadStatus};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::{
    body::{Id, InMachine, InUpload, Input, Output, ok},
    files::{exact, header, mode_of, owner_of, path_of, user_of},
    place::Place,
};
use crate::{App, Error, keys::Caller};

const DEFAULT_PART: u64 = 16 << 20;
/// As the guest's agent has it.
const MOST_PARTS: u64 = 100_000;
const LARGEST_PART: u64 = 5 << 30;
/// RFC 9530, and for those who find base64 hard.
const CONTENT_DIGEST: &str = "content-digest";
const CHECKSUM: &str = "x-checksum-sha256";

type Sha256Sum = [u8; 32];

fn shown(status: UploadStatus) -> api::Upload {
    let runs = status.parts.into_iter();
    api::Upload {
        id: status.id,
        path: String::from_utf8_lossy(&status.path).into_owned(),
        path_b64: exact(&status.path),
        size: status.size,
        part_size: status.part_size,
        parts: runs.map(|(first, last)| UploadParts { first, last }).collect(),
        bytes: status.bytes,
    }
}

/// Begins an upload. The file appears when it is completed, with all of its content. An upload lives as long as its sandbox
/// runs, is paused or hibernated, and is given up after a day without a request.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/uploads", tag = "files", params(("id" = String, Path,)), request_body = BeginUpload,
    responses((status = 201, body = api::Upload)))]
pub(super) async fn begin(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(given): Input<BeginUpload>,
) -> Result<Output<api::Upload>, Error> {
    let user = user_of(given.user.as_deref())?;
    let write = FileWrite {
        path: path_of("path", given.path, given.path_b64)?,
        mode: given.mode.as_deref().map(mode_of).transpose()?,
        owner: owner_of(given.owner.as_deref())?,
        create_parents: true,
        if_etags: Vec::new(),
        only_new: false,
        size: given.size,
    };
    if given.size.is_some_and(|size| size > MOST_PARTS * LARGEST_PART) {
        return Err(Error::invalid("`size` may be at most 488 TiB: 100000 parts of 5 GiB"));
    }
    let least = given.size.unwrap_or(0).div_ceil(MOST_PARTS).next_multiple_of(1 << 20);
    let part_size = given.part_size.unwrap_or(DEFAULT_PART.max(least));
    // The same request with a key begins the same upload.
    let upload: Uuid = caller.ticket.map_or_else(Uuid::new_v4, |ticket| ticket.id(0));
    let request = UploadBegin { id: upload.to_string(), write, part_size };
    let place = Place::new(app, caller, id);
    let begun = place.running().await?.begin_upload(user, request).await;
    let begun = begun.map_err(|error| place.explain(error))?;
    Ok(Output(StatusCode::CREATED, shown(begun)))
}

/// Those that are under way in a sandbox.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/uploads", tag = "files", params(("id" = String, Path,)),
    responses((status = 200, body = UploadList)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
) -> Result<Output<UploadList>, Error> {
    let place = Place::new(app, caller, id);
    let uploads = place.to_look().await?.uploads().await;
    let uploads = uploads.map_err(|error| place.explain(error))?;
    Ok(ok(UploadList { uploads: uploads.into_iter().map(shown).collect() }))
}

/// Which parts of an upload are there.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/uploads/{upload}", tag = "files",
    params(("id" = String, Path,), ("upload" = String, Path,)), responses((status = 200, body = api::Upload)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, upload): InMachine,
) -> Result<Output<api::Upload>, Error> {
    let place = Place::new(app, caller, id);
    let status = place.to_look().await?.upload(upload).await;
    Ok(ok(shown(status.map_err(|error| place.explain(error))?)))
}

/// Writes a part, in any order. Sent again, it replaces what was there. With `Content-Digest: sha-256=:…:` (base64) or
/// `X-Checksum-SHA256` (hexadecimal) a part that came through damaged is refused and not kept.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/fs/uploads/{upload}/parts/{number}", tag = "files", params(
    ("id" = String, Path,), ("upload" = String, Path,), ("number" = u32, Path, description = "From 1 on"),
), request_body(content = Vec<u8>, content_type = "application/octet-stream", description = "With a `Content-Length`"),
    responses((status = 204)))]
pub(super) async fn write_part(
    State(app): State<Arc<App>>,
    caller: Caller,
    InUpload(id, upload, number): InUpload,
    headers: HeaderMap,
    body: Body,
) -> Result<StatusCode, Error> {
    let place = Place::new(app, caller, id);
    let mut body = Checked { upload: body.into_data_stream(), digest: None, is_wrong: false };
    let outcome = async {
        let length = headers
            .get(CONTENT_LENGTH)
            .and_then(|value| value.to_str().ok()?.parse().ok())
            .ok_or_else(|| Error::invalid("a part needs a `Content-Length`"))?;
        body.digest = digest_in(&headers)?.map(|expected| (Sha256::new(), expected));
        let running = place.running().await?;
        let written = running.write_part(upload, number, length, &mut body).await;
        if body.is_wrong {
            return Err(Error::invalid(
                "the SHA-256 of the part is another than the header says; it was not kept, send it again",
            ));
        }
        written.map(|()| length)
    };
    match outcome.await {
        Ok(length) => {
            place.app.metrics.file_bytes_written.inc_by(length);
            Ok(StatusCode::NO_CONTENT)
        }
        Err(error) => Err(place.explain(error)),
    }
}

/// The file takes its place, once all parts are there. Size and digest are compared where they are given.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/uploads/{upload}/complete", tag = "files",
    params(("id" = String, Path,), ("upload" = String, Path,)), request_body = CompleteUpload,
    responses((status = 200, body = FileWritten)))]
pub(super) async fn complete(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, upload): InMachine,
    Input(given): Input<CompleteUpload>,
) -> Result<Response, Error> {
    let sha256 = given
        .sha256
        .as_deref()
        .map(|text| {
            hexadecimal(text)
                .ok_or_else(|| Error::invalid("`sha256` must be 64 hexadecimal digits"))
        })
        .transpose()?;
    let place = Place::new(app, caller, id);
    let outcome = async {
        let running = place.running().await?;
        let path = running.upload(upload.clone()).await?.path;
        let written = running.complete_upload(upload, given.size, sha256).await?;
        Ok::<_, Error>((path, written))
    };
    let (path, written) = outcome.await.map_err(|error| place.explain(error))?;
    let path = String::from_utf8_lossy(&path).into_owned();
    let etag = header(&written.etag)?;
    Ok(([(ETAG, etag)], ok(FileWritten { path, bytes: written.bytes })).into_response())
}

/// Gives an upload up, with all its parts; fine when there is none.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/fs/uploads/{upload}", tag = "files",
    params(("id" = String, Path,), ("upload" = String, Path,)), responses((status = 204)))]
pub(super) async fn abort(
    State(app): State<Arc<App>>,
    caller: Caller,
    InMachine(id, upload): InMachine,
) -> Result<StatusCode, Error> {
    let place = Place::new(app, caller, id);
    let aborted = place.running().await?.abort_upload(upload).await;
    aborted.map_err(|error| place.explain(error))?;
    Ok(StatusCode::NO_CONTENT)
}

/// A body that ends with an error when its digest is wrong.
struct Checked {
    upload: BodyDataStream,
    digest: Option<(Sha256, Sha256Sum)>,
    is_wrong: bool,
}

impl Stream for Checked {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = std::task::ready!(self.upload.poll_next_unpin(context));
        match &next {
            Some(Ok(piece)) => {
                if let Some((digest, _)) = &mut self.digest {
                    digest.update(piece);
                }
            }
            Some(Err(_)) => {}
            None => {
                if let Some((digest, expected)) = self.digest.take()
                    && Sha256Sum::from(digest.finalize()) != expected
                {
                    self.is_wrong = true;
                    return Poll::Ready(Some(Err(axum::Error::new("its digest is wrong"))));
                }
            }
        }
        Poll::Ready(next)
    }
}

fn digest_in(headers: &HeaderMap) -> Result<Option<Sha256Sum>, Error> {
    if let Some(value) = headers.get(CHECKSUM) {
        let digest = value.to_str().ok().and_then(hexadecimal);
        return digest
            .map(Some)
            .ok_or_else(|| Error::invalid("`X-Checksum-SHA256` must be 64 hexadecimal digits"));
    }
    let Some(value) = headers.get(CONTENT_DIGEST) else { return Ok(None) };
    let digest = value.to_str().ok().and_then(|value| {
        let encoded =
            value.split(',').find_map(|member| member.trim().strip_prefix("sha-256=:"))?;
        BASE64_STANDARD.decode(encoded.strip_suffix(':')?).ok()?.try_into().ok()
    });
    digest
        .map(Some)
        .ok_or_else(|| Error::invalid("`Content-Digest` must hold `sha-256=:BASE64:` (RFC 9530)"))
}

fn hexadecimal(text: &str) -> Option<Sha256Sum> {
    let mut digest = Sha256Sum::default();
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in digest.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(digest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_read_in_either_header() {
        let mut headers = HeaderMap::new();
        assert_eq!(digest_in(&headers).unwrap(), None);
        headers.insert(
            CONTENT_DIGEST,
            "md5=:AA==:, sha-256=:AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=:".parse().unwrap(),
        );
        assert_eq!(digest_in(&headers).unwrap(), Some([1; 32]));
        headers.insert(CONTENT_DIGEST, "sha-512=:AA==:".parse().unwrap());
        assert!(digest_in(&headers).is_err());
        headers.insert(CHECKSUM, "02".repeat(32).parse().unwrap());
        assert_eq!(digest_in(&headers).unwrap(), Some([2; 32]));
        headers.insert(CHECKSUM, "0".parse().unwrap());
        assert!(digest_in(&headers).is_err());
    }
}
