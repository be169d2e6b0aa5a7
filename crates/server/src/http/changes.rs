//! Changes of files in place, and watching them.

use std::sync::Arc;

use api::{ChangeFile, FileEntry, FileEvent, MoveFile};
use axum::{extract::State, response::Response};
use bytes::Bytes;
use futures::Stream;
use machine::guest::{Change, FilesRequest, MakeDirectory, Noticed, What};
use serde_json::json;

use super::{
    body::{Id, Input, Output, ok},
    files::{exact, mode_of, owner_of, path_in, path_of, shown, user_in, user_of},
    place::Place,
    query::Query,
    sse,
};
use crate::{App, Error, keys::Caller, sandbox::FileWatch};

/// Moves a file, directory or link within one file system. Parents of the new place are made.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/move", tag = "files", params(("id" = String, Path,)), request_body = MoveFile,
    responses((status = 200, body = FileEntry), (status = 409, description = "Something is there, or it is another file system")))]
pub(super) async fn move_to(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(given): Input<MoveFile>,
) -> Result<Output<FileEntry>, Error> {
    let user = user_of(given.user.as_deref())?;
    let from = path_of("from", given.from, given.from_b64)?;
    let to = path_of("to", given.to, given.to_b64)?;
    let request = FilesRequest::Move { from, to, overwrite: given.overwrite };
    change_to(Place::new(app, caller, id), user, request).await
}

/// Makes a directory; fine when it is there.
#[utoipa::path(post, path = "/v1/sandboxes/{id}/fs/mkdir", tag = "files", params(("id" = String, Path,)),
    request_body = api::MakeDirectory, responses((status = 200, body = FileEntry)))]
pub(super) async fn make_directory(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    Input(given): Input<api::MakeDirectory>,
) -> Result<Output<FileEntry>, Error> {
    let user = user_of(given.user.as_deref())?;
    let request = FilesRequest::MakeDirectory(MakeDirectory {
        path: path_of("path", given.path, given.path_b64)?,
        mode: given.mode.as_deref().map(mode_of).transpose()?,
        owner: owner_of(given.owner.as_deref())?,
        create_parents: given.create_parents.unwrap_or(true),
    });
    change_to(Place::new(app, caller, id), user, request).await
}

/// Mode, owner and time. Links are followed.
#[utoipa::path(patch, path = "/v1/sandboxes/{id}/fs", tag = "files",
    params(("id" = String, Path,), ("path" = String, Query, description = "Absolute; percent-encoded bytes")),
    request_body = ChangeFile, responses((status = 200, body = FileEntry)))]
pub(super) async fn change(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
    Input(given): Input<ChangeFile>,
) -> Result<Output<FileEntry>, Error> {
    let user = user_of(given.user.as_deref())?;
    let request = FilesRequest::Change(Change {
        path: path_in(&query)?,
        mode: given.mode.as_deref().map(mode_of).transpose()?,
        owner: owner_of(given.owner.as_deref())?,
        modified_ns: given.mtime.map(nanoseconds).transpose()?,
    });
    change_to(Place::new(app, caller, id), user, request).await
}

async fn change_to(
    place: Place,
    user: Option<String>,
    request: FilesRequest,
) -> Result<Output<FileEntry>, Error> {
    let changed = place.running().await?.change_files(user, request).await;
    Ok(ok(shown(&changed.map_err(|error| place.explain(error))?)))
}

fn nanoseconds(seconds: f64) -> Result<i64, Error> {
    // Whole seconds apart, which a float has exactly.
    let (whole, fraction) = (seconds.floor(), seconds - seconds.floor());
    if !(-9e9..9e9).contains(&whole) {
        return Err(Error::invalid("`mtime` must be seconds since 1970"));
    }
    #[expect(clippy::cast_possible_truncation, reason = "both are in range")]
    let (whole, fraction) = (whole as i64, (fraction * 1e9) as i64);
    Ok(whole * 1_000_000_000 + fraction)
}

/// What happens to a file, in a directory, or with `recursive` in all directories below it, as events: `created`, `modified`,
/// `changed` (mode, owner, times), `deleted`, `moved` (with `from`), `overflow` (more happened than could be told: look at
/// everything again) and `gone` (the end).
#[utoipa::path(get, path = "/v1/sandboxes/{id}/fs/watch", tag = "files", params(
    ("id" = String, Path,),
    ("path" = String, Query, description = "Absolute; percent-encoded bytes"),
    ("recursive" = Option<bool>, Query, description = "Default: false"),
    ("user" = Option<String>, Query, description = "With whose rights. Default: root's"),
), responses((status = 200, body = FileEvent, content_type = "text/event-stream")))]
pub(super) async fn watch(
    State(app): State<Arc<App>>,
    caller: Caller,
    Id(id): Id,
    query: Query,
) -> Result<Response, Error> {
    let place = Place::new(app, caller, id);
    let (path, recursive) = (path_in(&query)?, query.flag("recursive", false)?);
    let watch = place.to_look().await?.watch_files(user_in(&query)?, path, recursive).await;
    let watch = watch.map_err(|error| place.explain(error))?;
    Ok(sse::response(events(watch)))
}

/// That it has begun is told at once, so that a client knows from when on nothing is missed.
fn events(watch: FileWatch) -> impl Stream<Item = Bytes> {
    let beginning = Some(sse::event("watching", &json!({})));
    futures::stream::unfold((beginning, Some(watch)), |(beginning, watch)| async move {
        if let Some(event) = beginning {
            return Some((event, (None, watch)));
        }
        let mut watch = watch?;
        match watch.next().await? {
            Ok(noticed) => Some((event(&noticed), (None, Some(watch)))),
            Err(error) => {
                Some((sse::event("error", &json!({ "error": error.message })), (None, None)))
            }
        }
    })
}

fn event(noticed: &Noticed) -> Bytes {
    let name = match noticed.what {
        What::Created => "created",
        What::Modified => "modified",
        What::Changed => "changed",
        What::Deleted => "deleted",
        What::Moved => "moved",
        What::Overflow => "overflow",
        What::Gone => "gone",
    };
    let text = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
    let event = FileEvent {
        path: text(&noticed.path),
        path_b64: exact(&noticed.path),
        is_dir: noticed.is_directory,
        from: noticed.from.as_ref().map(|from| text(from)),
        from_b64: noticed.from.as_ref().and_then(|from| exact(from)),
    };
    sse::event(name, &event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_may_have_a_fraction_and_lie_before_1970() {
        assert_eq!(nanoseconds(1_234_567_890.0).unwrap(), 1_234_567_890_000_000_000);
        assert_eq!(nanoseconds(-1.5).unwrap(), -1_500_000_000);
        for bad in [f64::NAN, f64::INFINITY, 1e12] {
            assert!(nanoseconds(bad).is_err(), "{bad}");
        }
    }
}
