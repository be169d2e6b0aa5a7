//! Bodies of requests: JSON that is read tolerantly, within a limit and a deadline.

use std::{sync::Arc, time::Duration};

use api::{ErrorCode, SandboxId};
use axum::{
    body::Body,
    extract::{FromRequest, FromRequestParts, RawPathParams, Request},
    response::{IntoResponse, Response},
};
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use http::{HeaderValue, StatusCode, header::CONTENT_TYPE, request::Parts};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    App, Error,
    buffers::{Buffers, Held},
    sandbox::no_sandbox,
};

/// For bodies of a few fields.
pub(super) const SMALL: usize = 1 << 20;
/// Nothing came from the client for so long: it is gone.
pub(super) const CLIENT_DEADLINE: Duration = Duration::from_secs(60);

/// A JSON body, whatever its content type says. An empty one is an object without fields.
pub(super) struct Input<T, const LIMIT: usize = SMALL>(pub(super) T);

impl<T: DeserializeOwned, const LIMIT: usize> FromRequest<Arc<App>> for Input<T, LIMIT> {
    type Rejection = Error;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Error> {
        Kept::<T, LIMIT>::from_request(request, app).await.map(|Kept(value, _)| Self(value))
    }
}

/// An [`Input`] that may be large for as long as it is used: its memory is counted until the second is dropped.
pub(super) struct Kept<T, const LIMIT: usize>(pub(super) T, pub(super) Held);

impl<T: DeserializeOwned, const LIMIT: usize> FromRequest<Arc<App>> for Kept<T, LIMIT> {
    type Rejection = Error;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Error> {
        let (text, mut held) = read(request.into_body(), LIMIT, &app.buffers).await?;
        let value = parse(&text)?;
        held.shrink_to(text.len() as u64);
        Ok(Self(value, held))
    }
}

/// # Errors
/// 413 when it is longer than `limit`, 400 when it breaks off, 503 when others hold too much.
pub(super) async fn read(
    body: Body,
    limit: usize,
    buffers: &Buffers,
) -> Result<(Bytes, Held), Error> {
    let mut held = buffers.nothing();
    let mut pieces = body.into_data_stream();
    let mut whole = BytesMut::new();
    loop {
        let piece = tokio::time::timeout(CLIENT_DEADLINE, pieces.next())
            .await
            .map_err(|_| Error::invalid("the body stopped coming; send it again"))?;
        let Some(piece) = piece else { return Ok((whole.freeze(), held)) };
        let piece = piece.map_err(|_| Error::invalid("the body broke off; send it again"))?;
        if whole.len() + piece.len() > limit {
            let message = format!(
                "the body of this request may have at most {limit} bytes; larger things go into files with PUT …/fs"
            );
            return Err(Error::new(ErrorCode::TooLarge, message));
        }
        // What is read from it takes as much once more.
        if !held.grow_to(2 * (whole.len() + piece.len()) as u64) {
            return Err(Buffers::short());
        }
        whole.extend_from_slice(&piece);
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    let text = bytes.trim_ascii();
    let text = if text.is_empty() || text == b"null" { b"{}" } else { text };
    // An array would be taken for an object without the names of its fields.
    if text.first() != Some(&b'{') {
        return Err(Error::invalid("the body: it must be a JSON object"));
    }
    let mut json = serde_json::Deserializer::from_slice(text);
    let value = serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = error.path().to_string();
        let reason = without_position(&error.into_inner());
        // The path of the whole body is a dot: then the reason itself names the field, if there is one.
        Error::invalid(if path == "." {
            format!("the body: {reason}")
        } else {
            format!("`{path}`: {reason}")
        })
    })?;
    json.end().map_err(|_| Error::invalid("the body: it goes on behind the end of the JSON"))?;
    Ok(value)
}

/// Line and column mean nothing to someone who wrote a dictionary.
fn without_position(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rfind(" at line ").map_or_else(|| text.clone(), |end| text[..end].to_owned())
}

/// An answer in JSON.
pub(super) struct Output<T>(pub(super) StatusCode, pub(super) T);

impl<T: Serialize> IntoResponse for Output<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.1) {
            Ok(json) => {
                (self.0, [(CONTENT_TYPE, HeaderValue::from_static("application/json"))], json)
                    .into_response()
            }
            Err(error) => Error::internal(error).into_response(),
        }
    }
}

/// 200 with JSON.
pub(super) fn ok<T>(value: T) -> Output<T> {
    Output(StatusCode::OK, value)
}

/// The `{id}` of a sandbox's route. What is no id belongs to no sandbox.
pub(super) struct Id(pub(super) SandboxId);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let Named(id) = Named::from_request_parts(parts, state).await?;
        parse_id(&id).map(Self)
    }
}

fn parse_id(id: &str) -> Result<SandboxId, Error> {
    id.parse().map_err(|_| no_sandbox())
}

/// The `{id}` of a machine, and what names something in it.
pub(super) struct InMachine(pub(super) SandboxId, pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for InMachine {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let params = RawPathParams::from_request_parts(parts, state).await.ok();
        let mut names = params.iter().flatten().map(|(_, value)| value);
        match (names.next(), names.next()) {
            (Some(id), Some(name)) => Ok(Self(parse_id(id)?, name.to_owned())),
            _ => Err(Error::not_found("there is nothing with this name: it is not UTF-8")),
        }
    }
}

/// A part of an upload: the `{id}` of its sandbox, that of the upload, and the part's number.
pub(super) struct InUpload(pub(super) SandboxId, pub(super) String, pub(super) u32);

impl<S: Send + Sync> FromRequestParts<S> for InUpload {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let params = RawPathParams::from_request_parts(parts, state).await.ok();
        let mut names = params.iter().flatten().map(|(_, value)| value);
        let (Some(id), Some(upload), Some(number)) = (names.next(), names.next(), names.next())
        else {
            return Err(Error::not_found("there is nothing with this name: it is not UTF-8"));
        };
        let number = number
            .parse()
            .map_err(|_| Error::invalid("the number of a part must be a whole number from 1 on"))?;
        Ok(Self(parse_id(id)?, upload.to_owned(), number))
    }
}

/// The one `{…}` of a route, as it was written: each thing has its own rule for what names it.
pub(super) struct Named(pub(super) String);

impl<S: Send + Sync> FromRequestParts<S> for Named {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        let params = RawPathParams::from_request_parts(parts, state).await.ok();
        let name = params.iter().flatten().next().map(|(_, value)| Self(value.to_owned()));
        name.ok_or_else(|| Error::not_found("there is nothing with this name: it is not UTF-8"))
    }
}

#[cfg(test)]
mod tests {
    use api::{CreateSandbox, ExecRequest};

    use super::*;

    fn refused<T: DeserializeOwned>(text: &str) -> String {
        parse::<T>(text.as_bytes()).map(drop).unwrap_err().message
    }

    #[test]
    fn nothing_null_and_unknown_fields_are_fine() {
        for text in [
            "",
            " \n",
            "null",
            "{}",
            r#"{"cpu": null, "from_snapshot": null, "network": true, "env": null}"#,
        ] {
            assert!(parse::<CreateSandbox>(text.as_bytes()).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_refusal_names_the_field() {
        assert!(refused::<CreateSandbox>(r#"{"cpu": "two"}"#).starts_with("`cpu`: invalid type"));
        assert!(
            refused::<CreateSandbox>(r#"{"metadata": {"a": 1}}"#).starts_with("`metadata.a`: ")
        );
        assert!(refused::<ExecRequest>("").contains("`cmd`"));
        assert!(refused::<CreateSandbox>("[]").contains("object"));
        assert!(!refused::<ExecRequest>("{").contains("line"));
        assert!(refused::<ExecRequest>(r#"{"cmd": "a"} b"#).contains("behind the end"));
    }
}
