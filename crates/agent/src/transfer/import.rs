//! Into a file, which appears once all of it is there and right. An attempt that breaks off is gone on with where the other
//! side can do that.

use std::io::Read;

use protocol::message::{ErrorCode, FileWrite};
use protocol::transfer::{TransferFailure, Transferred};
use sha2::{Digest, Sha256};
use ureq::http::{Request, StatusCode};

use super::{Attempt, Client, PIECE, again, broken, hexadecimal, refused, text_of};
use crate::failure::refuse;
use crate::files::write::Writer;

pub(super) struct Import<'a> {
    file: &'a FileWrite,
    sha256: Option<&'a str>,
    begun: Option<Begun>,
}

/// What has come of one content.
struct Begun {
    writer: Box<Writer>,
    digest: Sha256,
    bytes: u64,
    /// By which the rest is known to be of the same; `None`: it has to begin anew.
    validator: Option<String>,
    etag: Option<String>,
}

impl<'a> Import<'a> {
    pub(super) fn new(file: &'a FileWrite, sha256: Option<&'a str>) -> Self {
        Self { file, sha256, begun: None }
    }

    pub(super) fn attempt(&mut self, client: &Client<'_>) -> Attempt {
        let mut begun = self.begun.take().filter(|begun| begun.validator.is_some());
        let mut request = Request::get(&client.transfer.url);
        for (name, value) in &client.transfer.headers {
            request = request.header(name, value);
        }
        if let Some(begun) = &begun {
            request = request.header("Range", format!("bytes={}-", begun.bytes));
            request = request.header("If-Range", begun.validator.as_deref().unwrap_or_default());
        }
        let request = match request.body(()) {
            Ok(request) => request,
            Err(error) => return broken(&ureq::Error::Http(error)),
        };
        let request =
            client.agent.configure_request(request).timeout_global(Some(client.left())).build();
        let mut response = match client.agent.run(request) {
            Ok(response) => response,
            Err(error) => {
                self.begun = begun;
                return broken(&error);
            }
        };
        let status = response.status();
        if status == StatusCode::RANGE_NOT_SATISFIABLE && begun.is_some() {
            // It has become another.
            return again("the content changed while it was fetched");
        }
        if !status.is_success() {
            self.begun = begun;
            return refused(&mut response);
        }
        let goes_on = status == StatusCode::PARTIAL_CONTENT
            && begun.as_ref().is_some_and(|begun| begins_at(&response, begun.bytes));
        if !goes_on {
            if status == StatusCode::PARTIAL_CONTENT && begun.is_some() {
                return again("it sent another part than was asked for");
            }
            begun = match self.begin(&response) {
                Ok(begun) => Some(begun),
                Err(failure) => return Attempt::Over(Err(failure)),
            };
        }
        let Some(mut begun) = begun else { return again("nothing was begun") };
        let body = response.into_body();
        let mut reader = body.into_with_config().limit(u64::MAX).reader();
        loop {
            let mut piece = vec![0; PIECE];
            match reader.read(&mut piece) {
                Ok(0) => return Attempt::Over(self.commit(begun, status.as_u16())),
                Ok(count) => {
                    piece.truncate(count);
                    begun.digest.update(&piece);
                    begun.bytes += count as u64;
                    if let Err(failure) = begun.writer.append(&[piece]) {
                        return Attempt::Over(Err(TransferFailure::File(failure)));
                    }
                }
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.begun = Some(begun);
                    return again("the connection broke off");
                }
            }
        }
    }

    fn begin(&self, response: &ureq::http::Response<ureq::Body>) -> Result<Begun, TransferFailure> {
        let headers = response.headers();
        let size = response.body().content_length();
        let etag = text_of(headers, "etag");
        let strong = etag.clone().filter(|etag| !etag.starts_with("W/"));
        let parts = text_of(headers, "accept-ranges").is_none_or(|ranges| ranges != "none");
        let validator = strong.or_else(|| text_of(headers, "last-modified")).filter(|_| parts);
        let file = FileWrite { size, ..self.file.clone() };
        let writer = Writer::begin(file, None).map_err(TransferFailure::File)?;
        Ok(Begun { writer: Box::new(writer), digest: Sha256::new(), bytes: 0, validator, etag })
    }

    fn commit(&self, begun: Begun, status: u16) -> Result<Transferred, TransferFailure> {
        let sha256 = hexadecimal(&begun.digest.finalize());
        if self.sha256.is_some_and(|wanted| wanted != sha256) {
            return Err(TransferFailure::Digest { sha256 });
        }
        let (bytes, _) = begun.writer.commit().map_err(TransferFailure::File)?;
        if bytes != begun.bytes {
            let failure = refuse(ErrorCode::Internal, "a file is not as long as what was written");
            return Err(TransferFailure::File(failure));
        }
        Ok(Transferred { bytes, sha256, status, etag: begun.etag })
    }
}

fn begins_at(response: &ureq::http::Response<ureq::Body>, offset: u64) -> bool {
    let range = text_of(response.headers(), "content-range");
    let start = range.as_deref().and_then(|range| range.strip_prefix("bytes ")?.split('-').next());
    start.is_some_and(|start| start.trim().parse() == Ok(offset))
}
