//! What a request with an `Idempotency-Key` had made when its server ended, for the same request when it comes again.

use std::sync::Arc;

use api::{AccountId, ForkedTree, Sandbox, SandboxId, SnapshotId};

use super::{
    GONE_DEADLINE, Sandboxes,
    fork::TREE,
    state::{State, Target},
};
use crate::{Error, keys::Caller};

impl Sandboxes {
    /// One that is there to stay. One that is just going is waited for, so that what it holds is free again.
    pub(super) async fn made_before(
        &self,
        account: &AccountId,
        id: &SandboxId,
    ) -> Result<Option<Sandbox>, Error> {
        let Ok(entry) = self.registry.find(account, id) else { return Ok(None) };
        let is_going =
            entry.look(|row| row.state == State::Creating || row.target == Target::Deleted);
        if !is_going {
            return Ok(Some(entry.shown(&self.accelerator_name(), &self.clock)));
        }
        let mut removed = entry.removed.subscribe();
        match tokio::time::timeout(GONE_DEADLINE, removed.wait_for(|gone| *gone)).await {
            Ok(_) => Ok(None),
            Err(_) => Err(Error::busy(
                "what the first request had begun is being removed; send it again",
                5,
            )),
        }
    }

    /// All of them, or none: a part of a fork is no fork.
    pub(super) async fn children_made_before(
        self: &Arc<Self>,
        caller: &Caller,
        snapshot: &SnapshotId,
        ids: &[SandboxId],
    ) -> Result<Option<Vec<Sandbox>>, Error> {
        let mut children = Vec::new();
        for id in ids {
            children.extend(self.made_before(&caller.account, id).await?);
        }
        if children.len() == ids.len() {
            return Ok(Some(children));
        }
        for child in children {
            self.delete_first(&caller.account, &child.id).await?;
        }
        self.remove_snapshot(snapshot).await?;
        Ok(None)
    }
}

/// How a tree was answered, by its children.
pub(super) fn tree_of(
    parent: &SandboxId,
    snapshot_id: SnapshotId,
    children: Vec<Sandbox>,
) -> ForkedTree {
    let tree = children.first().and_then(|child| child.metadata.get(TREE).cloned());
    // Promoted since.
    let tree_id = tree.unwrap_or_default();
    ForkedTree { tree_id, parent_id: *parent, snapshot_id, children }
}
