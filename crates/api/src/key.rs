//! Keys: how an account proves itself.

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::{AccountId, KeyId};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    #[default]
    Full,
    /// Lists and plain reads only.
    Read,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Key {
    pub id: KeyId,
    pub label: String,
    /// The first characters of the key, to recognize it by.
    pub prefix: String,
    pub scope: Scope,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339::option", default)]
    pub expires_at: Option<OffsetDateTime>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CreateKey {
    #[serde(default)]
    pub label: Option<String>,
    #[serde(default)]
    pub expires_in_days: Option<u32>,
    #[serde(default)]
    pub scope: Option<Scope>,
}

/// The only time the key itself is shown.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
pub struct NewKey {
    pub token: String,
    #[serde(flatten)]
    pub key: Key,
}

#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Me {
    pub account: AccountId,
    pub scope: Scope,
}
