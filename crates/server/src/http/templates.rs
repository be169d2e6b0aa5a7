//! `/v1/templates`: what sandboxes are made from, and how users add to it.

use std::{io, path::Path as FilePath, sync::Arc};

use api::{Build, ErrorCode, Template, TemplateName};
use axum::{
    extract::{
        FromRequest, Multipart, Request, State,
        multipart::{Field, MultipartError},
    },
    response::Response,
};
use bytes::Bytes;
use futures::{FutureExt, Stream, StreamExt};
use http::{StatusCode, header::CONTENT_TYPE};
use tempfile::TempPath;
use tokio::io::AsyncWriteExt;

use super::{
    body::{self, CLIENT_DEADLINE, Named, Output, ok},
    query::Query,
    sse,
};
use crate::{
    App, Error,
    keys::Caller,
    sandbox::DISK_MIB,
    template::{BuildLog, BuildSource},
};

/// Of a root file system as it is sent.
const LONGEST_ROOTFS: u64 = 16 << 30;
const LONGEST_FIELD: usize = 1 << 20;
/// Build contexts of the published clients come in many fields.
const MOST_FIELDS: usize = 10_000;
/// Routes of their own under `/v1/templates/`.
const RESERVED: [&str; 2] = ["build", "builds"];

/// Built-in ones and the account's own.
#[utoipa::path(get, path = "/v1/templates", tag = "templates", responses((status = 200, body = Vec<Template>)))]
pub(super) async fn list(State(app): State<Arc<App>>, caller: Caller) -> Output<Vec<Template>> {
    ok(app.templates.list(&caller.account))
}

#[utoipa::path(get, path = "/v1/templates/{name}", tag = "templates", params(("name" = String, Path,)), responses((status = 200, body = Template)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(name): Named,
) -> Result<Output<Template>, Error> {
    Ok(ok(app.templates.get(&caller.account, &existing(&name)?)?))
}

/// One of the account's own. Sandboxes made from it go on.
#[utoipa::path(delete, path = "/v1/templates/{name}", tag = "templates", params(("name" = String, Path,)), responses((status = 204)))]
pub(super) async fn delete(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(name): Named,
) -> Result<StatusCode, Error> {
    app.templates.delete(&caller.account, &existing(&name)?).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What is no name belongs to no template.
fn existing(name: &str) -> Result<TemplateName, Error> {
    name.parse().map_err(|_| {
        Error::not_found("there is no template with this name; list them with GET /v1/templates")
    })
}

/// What a build request says, in either encoding.
#[derive(Default)]
struct BuildForm {
    name: Option<String>,
    recipe: Option<String>,
    /// Removed again unless the build takes it over.
    rootfs: Option<TempPath>,
    dockerfile: bool,
    image_ref: bool,
    size_mb: Option<String>,
    kernel: bool,
}

/// Starts a build from a recipe (`recipe`) or from a root file system as a tar (`rootfs`). The disks of the latter's sandboxes
/// have `size_mb` where that is more than 10240. It is done when sandboxes of it start at once.
#[utoipa::path(post, path = "/v1/templates/build", tag = "templates",
    request_body(content_type = "multipart/form-data", description = "`name`, and `recipe`, or `rootfs` with `size_mb`", content = String),
    responses((status = 202, body = Build)))]
pub(super) async fn build(
    State(app): State<Arc<App>>,
    caller: Caller,
    request: Request,
) -> Result<Output<Build>, Error> {
    let content_type = request
        .headers()
        .get(CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default();
    let form = if content_type.starts_with("multipart/form-data") {
        let broken = |_| Error::invalid("the multipart body cannot be read");
        multipart_form(
            Multipart::from_request(request, &()).await.map_err(broken)?,
            &app.templates.uploads(),
        )
        .await?
    } else {
        let (text, _held) = body::read(request.into_body(), LONGEST_FIELD, &app.buffers).await?;
        urlencoded_form(&Query::parse(&text))?
    };
    let (name, source, rootfs) = source_of(form)?;
    let build = app.templates.start_build(&caller, name, source).await?;
    if let Some(rootfs) = rootfs {
        // The build has it now, and removes it.
        rootfs.keep().map_err(Error::internal)?;
    }
    Ok(Output(StatusCode::ACCEPTED, build))
}

fn source_of(form: BuildForm) -> Result<(TemplateName, BuildSource, Option<TempPath>), Error> {
    let name = form.name.ok_or_else(|| Error::invalid("`name` is missing"))?;
    let name: TemplateName =
        name.parse().map_err(|error| Error::invalid(format!("`name`: {error}")))?;
    if RESERVED.contains(&name.as_str()) {
        return Err(Error::invalid(format!(
            "`name`: `{name}` is a word of the API; choose another name"
        )));
    }
    let size_mb = form.size_mb.filter(|text| !text.is_empty());
    match (form.recipe, form.rootfs) {
        _ if form.dockerfile || form.image_ref => Err(Error::invalid(
            "templates cannot be built from a `dockerfile` or an `image_ref` yet: send a `recipe`, or the root file system as a tar in `rootfs`",
        )),
        _ if form.kernel => Err(Error::invalid(
            "`kernel`: all sandboxes have the same guest kernel, which comes with the server; leave it out",
        )),
        (Some(_), None) if size_mb.is_some() => Err(Error::invalid(
            "`size_mb` is for `rootfs`; a recipe has the size itself, as `disk_mb`",
        )),
        (Some(recipe), None) => Ok((name, BuildSource::Recipe(recipe), None)),
        (None, Some(rootfs)) => {
            let size_mb = size_mb.as_deref().map(disk_size).transpose()?;
            let source = BuildSource::Tar { archive: rootfs.to_path_buf(), size_mb };
            Ok((name, source, Some(rootfs)))
        }
        (Some(_), Some(_)) => Err(Error::invalid("send `recipe` or `rootfs`, not both")),
        (None, None) => Err(Error::invalid("`recipe` or `rootfs` is missing")),
    }
}

fn disk_size(text: &str) -> Result<u64, Error> {
    let most = *DISK_MIB.end();
    text.trim().parse::<u64>().ok().filter(|size_mb| *size_mb <= most).ok_or_else(|| {
        Error::invalid(format!("`size_mb` must be a whole number of MiB, at most {most}"))
    })
}

fn urlencoded_form(fields: &Query) -> Result<BuildForm, Error> {
    let text = |name| {
        Ok::<_, Error>(fields.text(name)?.filter(|text| !text.is_empty()).map(str::to_owned))
    };
    Ok(BuildForm {
        name: text("name")?,
        recipe: text("recipe")?,
        rootfs: None,
        dockerfile: text("dockerfile")?.is_some(),
        image_ref: text("image_ref")?.is_some(),
        size_mb: text("size_mb")?,
        kernel: text("kernel")?.is_some(),
    })
}

async fn multipart_form(mut parts: Multipart, uploads: &FilePath) -> Result<BuildForm, Error> {
    let mut form = BuildForm::default();
    for _ in 0..MOST_FIELDS {
        let field = patiently(parts.next_field()).await?;
        let Some(mut field) = field else { return Ok(form) };
        match field.name().unwrap_or_default() {
            "name" => form.name = Some(text_of(&mut field).await?),
            "recipe" => form.recipe = Some(text_of(&mut field).await?),
            "size_mb" => form.size_mb = Some(text_of(&mut field).await?),
            "rootfs" => form.rootfs = Some(save(&mut field, uploads).await?),
            // Read to its end, so that the client gets to see the refusal.
            "dockerfile" => form.dockerfile |= skip(&mut field).await? > 0,
            "image_ref" => form.image_ref |= skip(&mut field).await? > 0,
            "kernel" => form.kernel |= skip(&mut field).await? > 0,
            _ => drop(skip(&mut field).await?),
        }
    }
    Err(Error::invalid(format!("a build may have at most {MOST_FIELDS} fields")))
}

async fn patiently<T>(next: impl Future<Output = Result<T, MultipartError>>) -> Result<T, Error> {
    match tokio::time::timeout(CLIENT_DEADLINE, next).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => {
            Err(Error::invalid("the multipart body cannot be read or broke off").because(error))
        }
        Err(_) => Err(Error::invalid("the body stopped coming; send it again")),
    }
}

async fn text_of(field: &mut Field<'_>) -> Result<String, Error> {
    let name = field.name().unwrap_or_default().to_owned();
    let mut bytes = Vec::new();
    while let Some(piece) = patiently(field.chunk()).await? {
        if bytes.len() + piece.len() > LONGEST_FIELD {
            return Err(Error::new(
                ErrorCode::TooLarge,
                format!("`{name}` may have at most 1 MiB"),
            ));
        }
        bytes.extend_from_slice(&piece);
    }
    String::from_utf8(bytes).map_err(|_| Error::invalid(format!("`{name}` must be UTF-8")))
}

/// How long it was.
async fn skip(field: &mut Field<'_>) -> Result<u64, Error> {
    let mut bytes = 0;
    while let Some(piece) = patiently(field.chunk()).await? {
        bytes += piece.len() as u64;
        if bytes > LONGEST_ROOTFS {
            return Err(Error::new(ErrorCode::TooLarge, "the body is too large"));
        }
    }
    Ok(bytes)
}

async fn save(field: &mut Field<'_>, uploads: &FilePath) -> Result<TempPath, Error> {
    let directory = uploads.to_owned();
    let made = tokio::task::spawn_blocking(move || {
        tempfile::Builder::new().prefix("upload-").suffix(".tar").tempfile_in(directory)
    });
    let (file, path) = made.await.map_err(Error::internal)?.map_err(unwritten)?.into_parts();
    let mut file = tokio::fs::File::from_std(file);
    let mut bytes = 0;
    while let Some(piece) = patiently(field.chunk()).await? {
        bytes += piece.len() as u64;
        if bytes > LONGEST_ROOTFS {
            return Err(Error::new(ErrorCode::TooLarge, "`rootfs` may have at most 16 GiB"));
        }
        file.write_all(&piece).await.map_err(unwritten)?;
    }
    file.flush().await.map_err(unwritten)?;
    if bytes == 0 {
        return Err(Error::invalid("`rootfs` is empty: send a tar"));
    }
    Ok(path)
}

fn unwritten(error: io::Error) -> Error {
    if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
        let message = "the server has no room for this root file system";
        return Error::new(ErrorCode::CapacityExceeded, message).because(error);
    }
    Error::internal(error)
}

/// Newest first.
#[utoipa::path(get, path = "/v1/templates/builds", tag = "templates", responses((status = 200, body = Vec<Build>)))]
pub(super) async fn builds(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<Vec<Build>>, Error> {
    Ok(ok(app.templates.builds(&caller.account).await?))
}

#[utoipa::path(get, path = "/v1/templates/builds/{id}", tag = "templates", params(("id" = String, Path,)), responses((status = 200, body = Build)))]
pub(super) async fn build_status(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
) -> Result<Output<Build>, Error> {
    Ok(ok(app.templates.build(&caller.account, &id).await?))
}

/// The build's lines so far; with `follow` also those to come. Ends with an event `done`.
#[utoipa::path(get, path = "/v1/templates/builds/{id}/logs", tag = "templates",
    params(("id" = String, Path,), ("follow" = Option<bool>, Query,)),
    responses((status = 200, body = String, content_type = "text/event-stream")))]
pub(super) async fn build_log(
    State(app): State<Arc<App>>,
    caller: Caller,
    Named(id): Named,
    query: Query,
) -> Result<Response, Error> {
    let log = app.templates.build_log(&caller.account, &id).await?;
    let done = futures::stream::iter([Bytes::from_static(b"event: done\ndata: end\n\n")]);
    Ok(if query.flag("follow", false)? {
        sse::response(lines(log).chain(done))
    } else {
        sse::response(futures::stream::iter(lines_so_far(log)).chain(done))
    })
}

/// What is there without waiting.
fn lines_so_far(mut log: BuildLog) -> Vec<Bytes> {
    std::iter::from_fn(|| log.next().now_or_never().flatten().map(|line| sse::line(&line)))
        .collect()
}

fn lines(log: BuildLog) -> impl Stream<Item = Bytes> {
    futures::stream::unfold(log, |mut log| async move {
        log.next().await.map(|line| (sse::line(&line), log))
    })
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    async fn form(fields: &[(&str, &str)], uploads: &FilePath) -> Result<BuildForm, Error> {
        let mut body = String::new();
        for (name, content) in fields {
            body.push_str(&format!(
                "--cut\r\nContent-Disposition: form-data; name=\"{name}\"; filename=\"f\"\r\n\r\n{content}\r\n"
            ));
        }
        body.push_str("--cut--\r\n");
        let request = Request::builder()
            .header(CONTENT_TYPE, "multipart/form-data; boundary=cut")
            .body(Body::from(body))
            .unwrap();
        multipart_form(Multipart::from_request(request, &()).await.unwrap(), uploads).await
    }

    #[tokio::test]
    async fn a_root_file_system_is_kept_only_while_someone_wants_it() {
        let directory = tempfile::tempdir().unwrap();
        let fields = [("name", "mine"), ("size_mb", "1024"), ("rootfs", "a tar")];
        let (name, source, path) =
            source_of(form(&fields, directory.path()).await.unwrap()).unwrap();
        let BuildSource::Tar { archive: tar, size_mb } = source else { panic!("it is a tar") };
        assert_eq!((name.as_str(), size_mb), ("mine", Some(1024)));
        assert_eq!(std::fs::read_to_string(&tar).unwrap(), "a tar");
        drop(path);
        assert!(!tar.exists());

        let cut_short = [("rootfs", "a tar"), ("recipe", "\u{fffd}")];
        drop(form(&cut_short, directory.path()).await.unwrap());
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn what_cannot_be_built_is_refused_with_the_way_out() {
        let directory = tempfile::tempdir().unwrap();
        for (fields, word) in [
            (&[("name", "a"), ("dockerfile", "FROM x"), ("src/app.py", "x")][..], "recipe"),
            (&[("name", "a"), ("image_ref", "x")], "recipe"),
            (&[("name", "a")], "missing"),
            (&[("recipe", "x")], "name"),
            (&[("name", "../a"), ("recipe", "x")], "name"),
            (&[("name", "builds"), ("recipe", "x")], "name"),
            (&[("name", "a"), ("recipe", "x"), ("rootfs", "x")], "both"),
            (&[("name", "a"), ("rootfs", "x"), ("kernel", "6.1")], "`kernel`"),
            (&[("name", "a"), ("recipe", "x"), ("size_mb", "1024")], "`disk_mb`"),
            (&[("name", "a"), ("rootfs", "x"), ("size_mb", "1G")], "`size_mb`"),
            (&[("name", "a"), ("rootfs", "x"), ("size_mb", "-1")], "`size_mb`"),
            (&[("name", "a"), ("rootfs", "x"), ("size_mb", "1048577")], "`size_mb`"),
        ] {
            let refused = source_of(form(fields, directory.path()).await.unwrap()).err().unwrap();
            assert_eq!(refused.code, ErrorCode::InvalidRequest);
            assert!(refused.message.contains(word), "{refused}");
        }
        let empty = form(&[("name", "a"), ("rootfs", "")], directory.path()).await.err().unwrap();
        assert!(empty.message.contains("rootfs"));
    }

    #[test]
    fn a_form_may_be_urlencoded() {
        let form = urlencoded_form(&Query::parse(b"name=mine&recipe=from+%3D+%22base%22")).unwrap();
        let (name, source, _) = source_of(form).unwrap();
        assert!(matches!(source, BuildSource::Recipe(text) if text == "from = \"base\""));
        assert_eq!(name.as_str(), "mine");
    }
}
