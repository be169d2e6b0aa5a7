//! `/fs/archive`: trees of files as tar archives, streamed both ways.

use std::sync::Arc;

use api::Unpacked;
use axum::{
    body::Body,
    extract::State,
    response::{IntoResponse, Response},
};
use futures::stream;
use http::{
    HeaderMap,
    header::{CONTENT_DISPOSITION, CONTENT_TYPE},
};
use machine::guest::Unpack;

use super::{
    body::{Id, Output, ok},
    compression::{self, Compression},
    files::{broken_off, header, name_of, owner_in, path_in, user_in},
    place::Place,
    query::Query,
};
use crate::{App, Error, keys::Caller};

/// Unpacks a tar archive into a directory, as it comes. Nothing leaves the directory. Where it fails, the answer names the
/// entry, and what came before it stays.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/fs/archive", tag = "files", params(
    ("id" = String, Path,),
    ("path" = String, Query, description = "A directory, absolute; made if missing"),
    ("owner" = Option<String>, Query, description = "`user` or `user:group`, of everything. Default: as in the archive, by number"),
    ("user" = Option<String>, Query, description = "With whose rights. Default: root's"),
), request_body(content = Vec<u8>, content_type = "application/x-tar", description = "Plain, or compressed with gzip or Zstandard"),
    responses((status = 200, body = Unpacked)))]
pub(super) async fn unpack(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    headers: HeaderMap,
    body: Body,
) -> Result<Output<Unpacked>, Error> {
    let place = Place::new(app, caller, id);
    let mut upload = body.into_data_stream();
    let outcome = async {
        let request = Unpack { path: path_in(&query)?, owner: owner_in(&query)? };
        let path = String::from_utf8_lossy(&request.path).into_owned();
        let running = place.running().await?;
        let mut archive = compression::decompressed(&headers, &mut upload).await?;
        let (entries, bytes) = running.unpack(user_in(&query)?, request, &mut archive).await?;
        Ok::<_, Error>(Unpacked { path, entries, bytes })
    };
    match outcome.await {
        Ok(unpacked) => {
            place.app.metrics.file_bytes_written.inc_by(unpacked.bytes);
            Ok(ok(unpacked))
        }
        Err(error) => Err(place.explain(error)),
    }
}

/// A directory with all that is in it as a tar archive, or one file. What is no file, directory or link is left out, and
/// named in a comment of the archive.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/archive", tag = "files", params(
    ("id" = String, Path,),
    ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
    ("format" = Option<String>, Query, description = "`tar`, the default, `tar.gz` or `tar.zst`"),
    ("user" = Option<String>, Query, description = "With whose rights. Default: root's"),
), responses((status = 200, body = Vec<u8>, content_type = "application/x-tar")))]
pub(super) async fn pack(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let path = path_in(&query)?;
    let format = Compression::of_format(query.text("format")?)?;
    let name: String = String::from_utf8_lossy(name_of(&path))
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.') { c } else { '_' })
        .collect();
    let archive = place
        .to_look()
        .await?
        .pack(user_in(&query)?, path)
        .await
        .map_err(|error| place.explain(error))?;
    let bytes = stream::try_unfold((place.app, archive), |(app, mut archive)| async move {
        let Some(bytes) = archive.next().await.transpose()? else { return Ok::<_, Error>(None) };
        app.metrics.file_bytes_read.inc_by(bytes.len() as u64);
        Ok(Some((bytes, (app, archive))))
    });
    let file = format!("attachment; filename=\"{name}.{}\"", format.extension());
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, header(format.media_type())?);
    headers.insert(CONTENT_DISPOSITION, header(&file)?);
    headers.insert("x-content-type-options", header("nosniff")?);
    let body = Body::from_stream(broken_off(compression::compressed(format, bytes)));
    Ok((headers, body).into_response())
}
