//! What snapshots take on the disk, remembered for a moment: to measure it takes time with the pieces that memory lies in,
//! and lists are asked for often.

use std::{collections::HashMap, sync::Mutex, time::Duration};

use api::SnapshotId;
use store::snapshot::Sizes;
use tokio::time::Instant;

use super::registry::locked;

/// Sandboxes that run change it too, by what they write.
const FRESH: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct SnapshotSizes(Mutex<HashMap<SnapshotId, (Instant, Sizes)>>);

impl SnapshotSizes {
    pub(super) fn get(&self, id: &SnapshotId) -> Option<Sizes> {
        let known = locked(&self.0);
        known.get(id).filter(|(measured, _)| measured.elapsed() < FRESH).map(|(_, sizes)| *sizes)
    }

    pub(super) fn put(&self, id: SnapshotId, sizes: Sizes) {
        locked(&self.0).insert(id, (Instant::now(), sizes));
    }

    /// One has come or gone, with which any other may share.
    pub(super) fn forget_all(&self) {
        locked(&self.0).clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_size_is_measured_again_when_it_is_old_or_another_snapshot_has_come_or_gone() {
        let (known, id) = (SnapshotSizes::default(), SnapshotId::random());
        let sizes = Sizes { own_bytes: 1, total_bytes: 2 };
        assert_eq!(known.get(&id), None);
        known.put(id, sizes);
        assert_eq!(known.get(&id), Some(sizes));
        known.forget_all();
        assert_eq!(known.get(&id), None);
        known.put(id, sizes);
        tokio::time::advance(FRESH).await;
        assert_eq!(known.get(&id), None);
    }
}
