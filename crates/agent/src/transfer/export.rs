//! Out of a file, each time from its beginning: an object storage takes all of it or nothing.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;

use protocol::message::{ErrorCode, PathBytes};
use protocol::transfer::{TransferFailure, Transferred};
use rustix::fs::{Mode, OFlags};
use sha2::{Digest, Sha256};
use ureq::SendBody;
use ureq::http::Request;

use super::{Attempt, Client, broken, hexadecimal, refused, text_of};
use crate::failure::{failed, refuse, shown};
use crate::files::path;

pub(super) fn attempt(client: &Client<'_>, path: &PathBytes, method: &str) -> Attempt {
    let (file, size) = match open(path) {
        Ok(opened) => opened,
        Err(failure) => return Attempt::Over(Err(failure)),
    };
    let mut content = Content { file: file.take(size), digest: Sha256::new(), left: size };
    let mut request = Request::builder().method(method).uri(&client.transfer.url);
    for (name, value) in &client.transfer.headers {
        request = request.header(name, value);
    }
    // Object storages do not take content of unknown length.
    request = request.header("Content-Length", size);
    let answer = match request.body(SendBody::from_reader(&mut content)) {
        Ok(request) => {
            let request = client.agent.configure_request(request);
            client.agent.run(request.timeout_global(Some(client.left())).build())
        }
        Err(error) => return broken(&ureq::Error::Http(error)),
    };
    let (left, digest) = (content.left, content.digest);
    match answer {
        Ok(response) if response.status().is_success() => {
            if left > 0 {
                let message = format!("{} was cut while it was sent; send it again", shown(path));
                let failure = refuse(ErrorCode::Conflict, message);
                return Attempt::Over(Err(TransferFailure::File(failure)));
            }
            Attempt::Over(Ok(Transferred {
                bytes: size,
                sha256: hexadecimal(&digest.finalize()),
                status: response.status().as_u16(),
                etag: text_of(response.headers(), "etag"),
            }))
        }
        Ok(mut response) => refused(&mut response),
        Err(error) => broken(&error),
    }
}

fn open(path: &PathBytes) -> Result<(File, u64), TransferFailure> {
    let path = path::resolve(path).map_err(TransferFailure::File)?;
    let fail = |error| TransferFailure::File(failed("read", &path, error));
    // A FIFO would wait for its writer.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
    let name = std::ffi::OsStr::from_bytes(&path);
    let file: File = rustix::fs::open(name, flags, Mode::empty()).map_err(fail)?.into();
    let metadata = file.metadata().map_err(|error| {
        fail(rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::IO))
    })?;
    if !metadata.is_file() {
        let message = format!("read {}: only regular files can be sent", shown(&path));
        return Err(TransferFailure::File(refuse(ErrorCode::WrongKind, message)));
    }
    Ok((file, metadata.len()))
}

/// A file on its way, as long as it was when it was opened.
struct Content {
    file: io::Take<File>,
    digest: Sha256,
    left: u64,
}

impl Read for Content {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.file.read(buffer)?;
        self.digest.update(&buffer[..count]);
        self.left -= count as u64;
        if count == 0 && self.left > 0 && !buffer.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(count)
    }
}
