//! `/v1/usage`: what the account has used, and what that costs.

use std::sync::Arc;

use api::Usage;
use axum::extract::State;
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use super::{
    body::{Output, ok},
    query::Query,
};
use crate::{App, Error, account::Period, keys::Caller};

/// From one time to another, to the second. Running machines, volumes whether anything runs or not, snapshots, and bytes
/// sent to the internet.
#[utoipa::path(get, path = "/v1/usage", tag = "accounts", responses((status = 200, body = Usage)), params(
    ("from" = Option<String>, Query, description = "RFC 3339; default: the beginning of this month in UTC"),
    ("to" = Option<String>, Query, description = "RFC 3339; default: now, and never later"),
))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: Query,
) -> Result<Output<Usage>, Error> {
    let period = Period::new(time(&query, "from")?, time(&query, "to")?, &app.clock)?;
    app.sandboxes.meter_traffic(Some(&caller.account)).await?;
    Ok(ok(period.usage(&caller.account, &app.db, &app.config.plans).await?))
}

fn time(query: &Query, name: &str) -> Result<Option<OffsetDateTime>, Error> {
    let text = query.text(name)?.filter(|text| !text.is_empty());
    let parse = |text: &str| {
        OffsetDateTime::parse(text, &Rfc3339).map_err(|_| {
            Error::invalid(format!("`{name}` must be a time like 2026-11-01T00:00:00Z"))
        })
    };
    text.map(parse).transpose()
}
