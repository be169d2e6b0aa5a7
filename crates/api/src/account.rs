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

/// What an account has used from one time to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Usage {
    pub account: AccountId,
    #[serde(with = "time::serde::rfc3339")]
    pub from: OffsetDateTime,
    #[serde(with = "time::serde::rfc3339")]
    pub to: OffsetDateTime,
    #[serde(flatten)]
    pub used: UsedAmounts,
    /// Null where the server's settings have no prices.
    pub price: Option<Price>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct UsedAmounts {
    /// Of sandboxes and machines while they are `running`.
    pub vcpu_seconds: f64,
    pub memory_gb_seconds: f64,
    /// Of all volumes, by their size, attached or not.
    pub volume_gb_seconds: f64,
    /// The same in months of 30 days.
    pub volume_gb_months: f64,
    pub snapshot_gb_seconds: f64,
    pub snapshot_gb_months: f64,
    /// Sent by sandboxes.
    pub egress_bytes: u64,
}

/// By the prices of the server's settings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Price {
    pub currency: String,
    pub vcpus: f64,
    pub memory: f64,
    pub volumes: f64,
    pub snapshots: f64,
    pub egress: f64,
    pub total: f64,
}
