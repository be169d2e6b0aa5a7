//! The cache that all servers of the host share: drafts without an owner, and what nobody used for long.

use std::time::{Duration, SystemTime};

use store::{Layout, prune, sweep::of_cache};

use super::{Found, Kind, blocking};
use crate::{Error, clock::Clock};

pub(super) async fn sweep(found: &mut Found, layout: &Layout, clock: &Clock) -> Result<(), Error> {
    let mode = found.mode;
    let now = SystemTime::UNIX_EPOCH
        + Duration::from_millis(u64::try_from(clock.now_ms()).unwrap_or_default());
    let layout = layout.clone();
    let (drafts, unused) = blocking(move || {
        Ok::<_, store::Error>((of_cache(&layout, mode)?, prune::prune(&layout, now, mode)?))
    })
    .await?
    .map_err(Error::from_start)?;
    for path in drafts {
        found.push(Kind::Draft, path.display(), "whoever made it is gone", Ok(()));
    }
    for unused in unused {
        let why = format!("not used for long; {} KiB", unused.bytes >> 10);
        found.push(Kind::Cached, unused.path.display(), why, Ok(()));
    }
    Ok(())
}
