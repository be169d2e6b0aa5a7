//! What a request is refused with: a code, and words that name the path or field and the way out.

use protocol::message::{ErrorCode, Failure};
use rustix::io::Errno;

pub(crate) fn refuse(code: ErrorCode, message: impl Into<String>) -> Failure {
    Failure { code, message: message.into() }
}

/// Names are bytes; in messages what is not UTF-8 is replaced.
pub(crate) fn shown(path: &[u8]) -> String {
    String::from_utf8_lossy(path).into_owned()
}

/// A system call on `path` failed while doing `what` ("read", "write").
pub(crate) fn failed(what: &str, path: &[u8], error: Errno) -> Failure {
    let path = shown(path);
    let code = code(error);
    let reason = match code {
        ErrorCode::NotFound => "there is no such file or directory",
        ErrorCode::WrongKind => "it is a directory",
        ErrorCode::NoSpace => "the disk is full; delete something first",
        ErrorCode::Exists => "it exists already",
        ErrorCode::Busy => "the sandbox is short of memory or descriptors; try again later",
        ErrorCode::Conflict
        | ErrorCode::Denied
        | ErrorCode::Invalid
        | ErrorCode::Internal
        | ErrorCode::TooLarge
        | ErrorCode::PreconditionFailed
        | ErrorCode::NotModified
        | ErrorCode::RangeNotSatisfiable => {
            return refuse(code, format!("{what} {path}: {}", in_words(error)));
        }
    };
    refuse(code, format!("{what} {path}: {reason}"))
}

/// As the C library says it, without the number.
fn in_words(error: Errno) -> String {
    let text = std::io::Error::from(error).to_string();
    text.split(" (os error").next().unwrap_or_default().to_lowercase()
}

fn code(error: Errno) -> ErrorCode {
    match error {
        Errno::NOENT | Errno::NOTDIR => ErrorCode::NotFound,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => ErrorCode::Denied,
        Errno::ISDIR => ErrorCode::WrongKind,
        Errno::NOSPC | Errno::DQUOT => ErrorCode::NoSpace,
        Errno::EXIST => ErrorCode::Exists,
        Errno::NAMETOOLONG | Errno::LOOP | Errno::INVAL => ErrorCode::Invalid,
        Errno::BUSY | Errno::TXTBSY => ErrorCode::Conflict,
        Errno::FBIG | Errno::TOOBIG => ErrorCode::TooLarge,
        Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN => ErrorCode::Busy,
        _ => ErrorCode::Internal,
    }
}
