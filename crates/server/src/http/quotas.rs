//! `/v1/quotas`: what the account may have, and what it has.

use std::{collections::BTreeMap, sync::Arc};

use api::{Quotas, Volume};
use axum::extract::State;
use serde_json::Number;

use super::body::{Output, ok};
use crate::{App, Error, keys::Caller};

/// Every limit of the plan, and how much of it is taken.
#[utoipa::path(get, path = "/v1/quotas", tag = "accounts", responses((status = 200, body = Quotas)))]
pub(super) async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
) -> Result<Output<Quotas>, Error> {
    let has = app.db.amounts(&caller.account).await?;
    let (least, most) = app.db.volume_extremes(&caller.account).await?;
    let limits = &caller.plan.limits;
    let gigabytes = |bytes| Volume::sizes(bytes).1;
    let all: [(&str, Option<u64>, Number); 8] = [
        ("sandboxes", limits.sandboxes, has.sandboxes.into()),
        ("vcpus", limits.vcpus, has.vcpus.into()),
        ("memory_mb", limits.memory_mb, has.memory_mb.into()),
        ("volumes", limits.volumes, has.volumes.into()),
        ("volume_min_gb", limits.volume_min_gb, gigabytes(least)),
        ("volume_max_gb", limits.volume_max_gb, gigabytes(most)),
        ("total_gb", limits.total_gb, gigabytes(has.disk_bytes)),
        ("snapshots", limits.snapshots, has.snapshots.into()),
    ];
    let (mut limits, mut usage) = (BTreeMap::new(), BTreeMap::new());
    for (name, limit, taken) in all {
        limits.insert(name.to_owned(), limit.map(Number::from));
        usage.insert(name.to_owned(), taken);
    }
    Ok(ok(Quotas { plan: caller.plan.name.clone(), limits, usage }))
}
