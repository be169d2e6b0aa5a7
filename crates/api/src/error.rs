//! What a refusal looks like on the wire.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// For programs. The HTTP status follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    InvalidRequest,
    Unauthenticated,
    Forbidden,
    QuotaExceeded,
    NotFound,
    MethodNotAllowed,
    Conflict,
    Gone,
    PreconditionFailed,
    TooLarge,
    RangeNotSatisfiable,
    RateLimited,
    Internal,
    /// What listens in the sandbox, or does not, did not answer as a server should.
    BadGateway,
    /// Nothing was done; the same request may work later.
    Unavailable,
    /// The limit that the request itself named ran out.
    TimedOut,
    /// The host, or the sandbox's disk, has no room. Nothing was created.
    CapacityExceeded,
}

impl ErrorCode {
    pub fn status(self) -> u16 {
        match self {
            Self::InvalidRequest => 400,
            Self::Unauthenticated => 401,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::Conflict => 409,
            Self::Gone => 410,
            Self::PreconditionFailed => 412,
            Self::TooLarge => 413,
            Self::RangeNotSatisfiable => 416,
            Self::QuotaExceeded | Self::RateLimited => 429,
            Self::Internal => 500,
            Self::BadGateway => 502,
            Self::Unavailable => 503,
            Self::TimedOut => 504,
            Self::CapacityExceeded => 507,
        }
    }
}

/// `error` and `detail` are the same plain sentence: one published client prints the first, the other the second, and
/// neither copes with anything but a string.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub error: String,
    pub code: ErrorCode,
    pub detail: String,
    pub request_id: String,
}
