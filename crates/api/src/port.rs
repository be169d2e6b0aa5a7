//! What listens in a sandbox, and tokens by which others may look at it.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::PreviewTokenId;

/// Any port of a sandbox can be reached, listed or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Port {
    pub port: u16,
    /// Something takes connections on it right now. Always false in a sandbox that does not run.
    pub listening: bool,
    /// It was exposed: it is listed whether something listens or not.
    pub exposed: bool,
    /// Where it listens; `0.0.0.0` and `::` are all addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The name of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// An object with one field: the published clients read `ports` from it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PortList {
    pub ports: Vec<Port>,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ExposePort {
    pub port: u16,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CreatePreviewToken {
    pub port: u16,
    /// Default: an hour. At most 30 days.
    #[serde(default)]
    pub ttl_seconds: Option<i64>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PreviewToken {
    pub id: PreviewTokenId,
    pub port: u16,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub expires_at: OffsetDateTime,
}

/// The only time the token itself is shown.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct NewPreviewToken {
    pub token: String,
    /// The path that it opens, below the server's own URL.
    pub path: String,
    /// The same on the port's own host, where the server knows its suffix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    #[serde(flatten)]
    pub preview: PreviewToken,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct PreviewTokenList {
    pub tokens: Vec<PreviewToken>,
}
