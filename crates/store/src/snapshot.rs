//! Snapshots: machines at rest that sandboxes are made from. Each shares blocks with what it was made from and with
//! what was made from it; the file system counts, so any of them may go first.

use api::SnapshotId;

use crate::{
    Error, Layout, Result, draft, extents, layout,
    saved_machine::{Files, SavedMachine, SavedMachineDraft},
};

pub use crate::saved_machine::Manifest;

/// Nothing is visible before [`SavedMachineDraft::publish`].
pub fn draft(layout: &Layout, id: &SnapshotId) -> Result<SavedMachineDraft> {
    SavedMachineDraft::create(&layout.data_temporary(), "snapshot", layout.snapshot(id))
}

/// `None` when there is none of this id.
///
/// # Errors
/// [`Error::Unusable`] when its files are damaged or of a newer version.
pub fn get(layout: &Layout, id: &SnapshotId) -> Result<Option<SavedMachine>> {
    SavedMachine::read(layout.snapshot(id), "snapshot", &id.to_string())
}

/// Also twice. Sandboxes that run from it go on, and what others share with it stays.
pub fn remove(layout: &Layout, id: &SnapshotId) -> Result<()> {
    draft::discard(&layout.snapshot(id), &layout.data_temporary())
}

/// All that are published.
pub fn list(layout: &Layout) -> Result<Vec<SnapshotId>> {
    layout::ids_in(&layout.snapshots())
}

/// Removes those that are not among `kept`.
pub fn remove_all_but(layout: &Layout, kept: &[SnapshotId]) -> Result<()> {
    list(layout)?.iter().filter(|id| !kept.contains(id)).try_for_each(|id| {
        tracing::info!(snapshot = %id, "removing a snapshot that no row names");
        remove(layout, id)
    })
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// What no other file shares, so what its removal frees. It changes as others come and go.
    pub own_bytes: u64,
    /// All that it takes on the disk, shared or not.
    pub total_bytes: u64,
}

pub fn sizes(layout: &Layout, id: &SnapshotId) -> Result<Sizes> {
    let directory = layout.snapshot(id);
    let mut sizes = Sizes::default();
    for name in Files::NAMES {
        let path = directory.join(name);
        match extents::held(&path) {
            Ok(held) => {
                sizes.own_bytes += held.own_bytes;
                sizes.total_bytes += held.total_bytes;
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::NotFound { what: "snapshot", id: id.to_string() });
            }
            Err(error) => return Err(Error::io("measure", path)(error)),
        }
    }
    Ok(sizes)
}
