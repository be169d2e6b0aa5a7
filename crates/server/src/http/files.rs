//! `/fs`: files of a sandbox, streamed both ways.

use std::{
    sync::Arc,
    time::{Duration, UNIX_EPOCH},
};

use api::{DirListing, FileEntry, FileKind, FileWritten};
use axum::{
    body::{Body, BodyDataStream},
    extract::State,
    response::{IntoResponse, Response},
};
use base64::{Engine as _, prelude::BASE64_STANDARD};
use bytes::Bytes;
use futures::{Stream, TryStreamExt, stream};
use http::{
    HeaderMap, HeaderValue, StatusCode,
    header::{
        ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, IF_MATCH, IF_NONE_MATCH,
        IF_RANGE, LAST_MODIFIED, RANGE,
    },
};
use machine::guest::{Entry, EntryKind, FileHead, FileRead, FileWrite, PathBytes};

use super::{
    body::{Id, Output, ok},
    etag,
    place::Place,
    query::Query,
    range,
};
use crate::{
    App, Error,
    keys::Caller,
    sandbox::{AsUser, DirEntries, FileContent, Read, Running, Written, too_large},
};

/// Of a file in one request.
const LONGEST_WRITE: u64 = 32 << 20;
/// As Linux has it.
const LONGEST_PATH: usize = 4096;
const LONGEST_OWNER: usize = 128;
const DEEPEST: u32 = 64;

/// The file's bytes. `Range`, `If-Range` and `If-None-Match` work.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs", tag = "files",
    params(("id" = String, Path,), ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
        ("user" = Option<String>, Query, description = "With the rights of this user, by name or number. Default: root")),
    responses((status = 200, body = Vec<u8>, content_type = "application/octet-stream"), (status = 206), (status = 304), (status = 416)))]
pub(super) async fn read(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    headers: HeaderMap,
) -> Result<Response, Error> {
    let request = FileRead {
        path: path_in(&query)?,
        range: headers.get(RANGE).and_then(|value| range::parse(value.to_str().ok()?)),
        unless_etags: etag::list(&headers, &IF_NONE_MATCH),
        // A date is never the file's etag, so the whole file comes: right, if not quick.
        range_if_etag: headers
            .get(IF_RANGE)
            .and_then(|value| value.to_str().ok().map(str::to_owned)),
    };
    let place = Place::new(app, caller, id);
    let user = rights_in(&query)?;
    let read = place.to_look().await?.read_file(user, request).await;
    match read.map_err(|error| place.explain(error))? {
        Read::Content(content) => content_response(place.app, content),
        Read::NotModified(etag) => {
            Ok((StatusCode::NOT_MODIFIED, [(ETAG, header(&etag)?)]).into_response())
        }
        Read::OutOfRange(size) => {
            let message = format!("`Range`: the file has {size} bytes");
            let mut response =
                Error::new(api::ErrorCode::RangeNotSatisfiable, message).into_response();
            response.headers_mut().insert(CONTENT_RANGE, header(&format!("bytes */{size}"))?);
            Ok(response)
        }
    }
}

fn content_response(app: Arc<App>, content: FileContent) -> Result<Response, Error> {
    let FileHead { size, start, length, partial, modified_ns, ref etag } = content.head;
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(CONTENT_LENGTH, length.into());
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    headers.insert(ETAG, header(etag)?);
    headers.insert(LAST_MODIFIED, header(&http_date(modified_ns))?);
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    if partial {
        let last = (start + length).saturating_sub(1);
        headers.insert(CONTENT_RANGE, header(&format!("bytes {start}-{last}/{size}"))?);
    }
    let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let bytes = stream::try_unfold((app, content), |(app, mut content)| async move {
        let Some(bytes) = content.next().await.transpose()? else { return Ok::<_, Error>(None) };
        app.metrics.file_bytes_read.inc_by(bytes.len() as u64);
        Ok(Some((bytes, (app, content))))
    });
    Ok((status, headers, Body::from_stream(broken_off(bytes))).into_response())
}

/// Writes a whole file at once: it appears with all of its content, or not at all.
#[utoipa::path(put, path = "/v1/sandboxes/{id}/fs", tag = "files", params(
    ("id" = String, Path,),
    ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
    ("mode" = Option<String>, Query, description = "Octal. Default: that of the file it replaces, else 0644"),
    ("owner" = Option<String>, Query, description = "`user` or `user:group`. Default: that of the file it replaces, else root"),
    ("create_parents" = Option<bool>, Query, description = "Default: true"),
    ("user" = Option<String>, Query, description = "With the rights of this user, by name or number: what is made belongs to them. Default: root"),
), request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses((status = 200, body = FileWritten), (status = 413)))]
pub(super) async fn write(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let mut upload = body.into_data_stream();
    let outcome = async {
        let request = write_request(&query, &headers)?;
        let user = rights_in(&query)?;
        let path = String::from_utf8_lossy(&request.path).into_owned();
        let running = place.running().await?;
        Ok::<_, Error>((path, write_content(&running, user, request, &mut upload).await?))
    };
    match outcome.await {
        Ok((path, written)) => {
            place.app.metrics.file_bytes_written.inc_by(written.bytes);
            let etag = header(&written.etag)?;
            Ok(([(ETAG, etag)], ok(FileWritten { path, bytes: written.bytes })).into_response())
        }
        Err(error) => Err(place.explain(error)),
    }
}

async fn write_content(
    running: &Running,
    user: AsUser,
    request: FileWrite,
    upload: &mut BodyDataStream,
) -> Result<Written, Error> {
    // Nothing is begun that cannot be finished.
    if request.size.is_some_and(|size| size > LONGEST_WRITE) {
        return Err(too_large());
    }
    running.write_file(user, request, LONGEST_WRITE, upload).await
}

fn write_request(query: &Query, headers: &HeaderMap) -> Result<FileWrite, Error> {
    let mode = query.text("mode")?.filter(|text| !text.is_empty()).map(mode_of).transpose()?;
    let owner = owner_in(query)?;
    let unless = etag::list(headers, &IF_NONE_MATCH);
    if unless.iter().any(|tag| tag != "*") {
        return Err(Error::invalid(
            "`If-None-Match` can only be `*` here: write only if there is no such file",
        ));
    }
    let if_etags = etag::list(headers, &IF_MATCH);
    if if_etags.is_empty() && headers.contains_key(&IF_MATCH) {
        return Err(Error::invalid("`If-Match` must be `*` or a list of etags, each in quotes"));
    }
    Ok(FileWrite {
        path: path_in(query)?,
        mode,
        owner,
        create_parents: query.flag("create_parents", true)?,
        if_etags,
        only_new: !unless.is_empty(),
        size: headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok()),
    })
}

/// Recursive; fine when it is missing. A link is deleted, not what it points to.
#[utoipa::path(delete, path = "/v1/sandboxes/{id}/fs", tag = "files",
    params(("id" = String, Path,), ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
        ("user" = Option<String>, Query, description = "With the rights of this user, by name or number. Default: root")), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<StatusCode, Error> {
    let place = Place::new(app, caller, id);
    let (user, path) = (rights_in(&query)?, path_in(&query)?);
    let deleted = place.running().await?.delete_file(user, path).await;
    deleted.map_err(|error| place.explain(error))?;
    Ok(StatusCode::NO_CONTENT)
}

/// The entries of a directory, in the file system's order.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/dir", tag = "files", params(
    ("id" = String, Path,),
    ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
    ("depth" = Option<u32>, Query, description = "1, the default: its own entries; 2: theirs too, and so on. Links are not followed"),
    ("user" = Option<String>, Query, description = "With the rights of this user, by name or number. Default: root"),
), responses((status = 200, body = DirListing)))]
pub(super) async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let (user, path) = (rights_in(&query)?, path_in(&query)?);
    let depth = query.number("depth")?.unwrap_or(1);
    if !(1..=DEEPEST).contains(&depth) {
        return Err(Error::invalid(format!("`depth` must be between 1 and {DEEPEST}")));
    }
    let shown_path =
        serde_json::to_string(&String::from_utf8_lossy(&path)).map_err(Error::internal)?;
    let entries = place.to_look().await?.list_directory(user, path, depth).await;
    let entries = entries.map_err(|error| place.explain(error))?;
    let opening = Bytes::from(format!("{{\"path\":{shown_path},\"entries\":["));
    let json = stream::try_unfold(Listing::Opening(opening, entries), Listing::next);
    Ok((
        [(CONTENT_TYPE, HeaderValue::from_static("application/json"))],
        Body::from_stream(broken_off(json)),
    )
        .into_response())
}

/// A listing on its way out: never more than one batch of it is in memory.
enum Listing {
    Opening(Bytes, DirEntries),
    Entries { entries: DirEntries, is_first: bool },
    Closed,
}

impl Listing {
    async fn next(self) -> Result<Option<(Bytes, Self)>, Error> {
        let (mut entries, mut is_first) = match self {
            Self::Opening(opening, entries) => {
                return Ok(Some((opening, Self::Entries { entries, is_first: true })));
            }
            Self::Entries { entries, is_first } => (entries, is_first),
            Self::Closed => return Ok(None),
        };
        let Some(batch) = entries.next().await.transpose()? else {
            return Ok(Some((Bytes::from_static(b"]}"), Self::Closed)));
        };
        let mut json = Vec::new();
        for entry in &batch {
            if !std::mem::take(&mut is_first) {
                json.push(b',');
            }
            serde_json::to_writer(&mut json, &shown(entry)).map_err(Error::internal)?;
        }
        Ok(Some((json.into(), Self::Entries { entries, is_first })))
    }
}

/// One entry. Links are not followed.
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/stat", tag = "files",
    params(("id" = String, Path,), ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
        ("user" = Option<String>, Query, description = "With the rights of this user, by name or number. Default: root")), responses((status = 200, body = FileEntry)))]
pub(super) async fn stat(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Output<FileEntry>, Error> {
    let place = Place::new(app, caller, id);
    let (user, path) = (rights_in(&query)?, path_in(&query)?);
    let entry = place.to_look().await?.stat_file(user, path).await;
    Ok(ok(shown(&entry.map_err(|error| place.explain(error))?)))
}

/// Whoever the key belongs to, nothing is done that this user could not do.
fn rights_in(query: &Query) -> Result<AsUser, Error> {
    AsUser::named(query.text("user")?)
}

pub(super) fn path_in(query: &Query) -> Result<PathBytes, Error> {
    let path = query
        .bytes("path")?
        .ok_or_else(|| Error::invalid("`path` is missing: name an absolute path with ?path=/…"))?;
    checked_path("path", path.to_vec())
}

/// Of a field of a body, or of its like for names that are not UTF-8.
pub(super) fn path_of(
    field: &str,
    text: Option<String>,
    base64: Option<String>,
) -> Result<PathBytes, Error> {
    let path = match (text, base64) {
        (Some(text), None) => text.into_bytes(),
        (None, Some(base64)) => BASE64_STANDARD
            .decode(base64)
            .map_err(|_| Error::invalid(format!("`{field}_b64` must be base64")))?,
        (Some(_), Some(_)) => {
            return Err(Error::invalid(format!("give `{field}` or `{field}_b64`, not both")));
        }
        (None, None) => {
            return Err(Error::invalid(format!("`{field}` is missing: name an absolute path")));
        }
    };
    checked_path(field, path)
}

fn checked_path(field: &str, path: Vec<u8>) -> Result<PathBytes, Error> {
    if !path.starts_with(b"/") {
        return Err(Error::invalid(format!("`{field}` must be absolute: begin it with `/`")));
    }
    if path.contains(&0) {
        return Err(Error::invalid(format!("`{field}` must not hold NUL")));
    }
    if path.len() >= LONGEST_PATH {
        return Err(Error::invalid(format!("`{field}` may have at most 4095 bytes")));
    }
    Ok(PathBytes::from(path))
}

pub(super) fn owner_in(query: &Query) -> Result<Option<String>, Error> {
    owner_of(query.text("owner")?)
}

pub(super) fn user_in(query: &Query) -> Result<Option<String>, Error> {
    user_of(query.text("user")?)
}

/// With whose rights on files; root's where none is named.
pub(super) fn user_of(text: Option<&str>) -> Result<Option<String>, Error> {
    let user = text.filter(|text| !text.is_empty());
    if user.is_some_and(|user| user.len() > LONGEST_OWNER || user.contains('\0')) {
        return Err(Error::invalid("`user` must be `user` or `user:group`, by name or number"));
    }
    Ok(user.map(str::to_owned))
}

pub(super) fn owner_of(text: Option<&str>) -> Result<Option<String>, Error> {
    let owner = text.filter(|text| !text.is_empty());
    if owner.is_some_and(|owner| owner.len() > LONGEST_OWNER || owner.contains('\0')) {
        return Err(Error::invalid("`owner` must be `user` or `user:group`, by name or number"));
    }
    Ok(owner.map(str::to_owned))
}

pub(super) fn mode_of(text: &str) -> Result<u32, Error> {
    let digits = text.strip_prefix("0o").unwrap_or(text);
    let mode = if digits.bytes().all(|byte| byte.is_ascii_digit()) {
        u32::from_str_radix(digits, 8).ok()
    } else {
        None
    };
    mode.filter(|mode| *mode <= 0o7777)
        .ok_or_else(|| Error::invalid("`mode` must be octal, like 0755"))
}

pub(super) fn shown(entry: &Entry) -> FileEntry {
    let name = name_of(&entry.path);
    FileEntry {
        name: String::from_utf8_lossy(name).into_owned(),
        path: String::from_utf8_lossy(&entry.path).into_owned(),
        is_dir: entry.kind == EntryKind::Directory,
        size: entry.size,
        mode: format!("{:04o}", entry.mode & 0o7777),
        mtime: entry.modified_ns.div_euclid(1_000_000_000),
        kind: match entry.kind {
            EntryKind::File => FileKind::File,
            EntryKind::Directory => FileKind::Directory,
            EntryKind::Link => FileKind::Link,
            EntryKind::Fifo => FileKind::Fifo,
            EntryKind::Socket => FileKind::Socket,
            EntryKind::CharDevice => FileKind::CharDevice,
            EntryKind::BlockDevice => FileKind::BlockDevice,
        },
        user: entry.user,
        group: entry.group,
        target: entry.target.as_ref().map(|target| String::from_utf8_lossy(target).into_owned()),
        name_b64: exact(name),
        path_b64: exact(&entry.path),
    }
}

/// The last part of an absolute path; that of `/` is `/`.
pub(super) fn name_of(path: &[u8]) -> &[u8] {
    path.rsplit(|&byte| byte == b'/').next().filter(|name| !name.is_empty()).unwrap_or(path)
}

/// `None`: the text is exact already.
pub(super) fn exact(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(bytes).is_err().then(|| BASE64_STANDARD.encode(bytes))
}

/// Times before 1970 are told as 1970: the header cannot have them.
fn http_date(modified_ns: i64) -> String {
    httpdate::fmt_http_date(
        UNIX_EPOCH + Duration::from_secs(u64::try_from(modified_ns / 1_000_000_000).unwrap_or(0)),
    )
}

pub(super) fn header(text: &str) -> Result<HeaderValue, Error> {
    HeaderValue::from_str(text).map_err(Error::internal)
}

/// An answer that has begun can only be told as failed by breaking it off: the client misses its end.
pub(super) fn broken_off(
    bytes: impl Stream<Item = Result<Bytes, Error>>,
) -> impl Stream<Item = Result<Bytes, Error>> {
    bytes.inspect_err(
        |error| tracing::debug!(%error, cause = error.causes(), "an answer was broken off"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(path: &[u8]) -> Entry {
        Entry {
            path: PathBytes::from(path.to_vec()),
            kind: EntryKind::File,
            size: 3,
            mode: 0o100_755,
            modified_ns: -1,
            user: 0,
            group: 0,
            target: None,
        }
    }

    #[test]
    fn a_name_that_is_not_utf8_stands_beside_in_base64() {
        let odd = shown(&entry(b"/a\xff/b\xfe"));
        assert_eq!((odd.name.as_str(), odd.path.as_str()), ("b\u{fffd}", "/a\u{fffd}/b\u{fffd}"));
        assert_eq!(odd.name_b64.unwrap(), BASE64_STANDARD.encode(b"b\xfe"));
        assert_eq!(odd.path_b64.unwrap(), BASE64_STANDARD.encode(b"/a\xff/b\xfe"));
        let plain = shown(&entry("/ä/b".as_bytes()));
        assert_eq!((plain.name.as_str(), plain.mode.as_str(), plain.mtime), ("b", "0755", -1));
        assert_eq!((plain.name_b64, plain.path_b64), (None, None));
        assert_eq!(shown(&entry(b"/")).name, "/");
    }

    #[test]
    fn a_mode_is_octal() {
        for (text, mode) in [("0755", 0o755), ("644", 0o644), ("0o4755", 0o4755), ("0", 0)] {
            assert_eq!(mode_of(text).unwrap(), mode);
        }
        for bad in ["", "888", "rwx", "+644", "77777", "-1", "0x1ff"] {
            assert!(mode_of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_path_is_absolute_and_without_nul() {
        let path = |query: &str| path_in(&Query::parse(query.as_bytes()));
        assert_eq!(path("path=/a%20b+c%ff").unwrap().as_ref() as &[u8], b"/a b c\xff");
        for bad in ["", "path=", "path=a", "path=a/b", "path=/a%00", "path=/a&path=/b"] {
            assert!(path(bad).is_err(), "{bad}");
        }
        assert!(path(&format!("path=/{}", "x".repeat(LONGEST_PATH))).is_err());
    }
}
