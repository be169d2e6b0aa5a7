//! Accounts: who owns, and how much they may have.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Number;
use time::OffsetDateTime;
use utoipa::ToSchema;

use crate::AccountId;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Account {
    pub id: AccountId,
    pub plan: String,
    pub keys: u64,
    pub sandboxes: u64,
    pub volumes: u64,
    pub snapshots: u64,
    #[serde(with = "time::serde::rfc3339")]
    pub created_at: OffsetDateTime,
}

/// What the plan of the key's account allows, and how much of it is taken, by the same names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Quotas {
    pub plan: String,
    /// Null: without a limit.
    #[schema(value_type = BTreeMap<String, Option<f64>>)]
    pub limits: BTreeMap<String, Option<Number>>,
    /// Of `volume_min_gb` and `volume_max_gb`: the smallest and the largest volume there is.
    #[schema(value_type = BTreeMap<String, f64>)]
    pub usage: BTreeMap<String, Number>,
}
