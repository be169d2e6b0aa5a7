//! Forks: children that start from one instant of their parent.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use api::{
    AccountId, EventKind, Fork, ForkTree, Forked, ForkedTree, Promote, Promoted, Sandbox,
    SandboxId, SnapshotId,
};
use futures::StreamExt;
use tokio::time::Instant;

use super::{
    Sandboxes,
    again::tree_of,
    create::{Draft, RootWish},
    fields::{check_metadata, ttl_of},
    passing::PassingInstant,
    registry::Entry,
    saved::SavedMachine,
    snapshots::Purpose,
};
use crate::{
    Error,
    db::{SandboxRow, SnapshotRow},
    keys::Caller,
};

const MOST_CHILDREN: u32 = 16;
/// Siblings of one that is promoted.
const ENDED_AT_ONCE: usize = 16;
/// In a child's metadata: which tree it is of.
pub(super) const TREE: &str = "fork_tree_id";
const PARENT: &str = "fork_parent_id";
/// In a tree's metadata: its children's time to live, in seconds.
const EXPLORE_TTL: &str = "explore_ttl";

/// Of what a fork makes.
#[derive(Clone)]
struct Ids {
    snapshot: SnapshotId,
    children: Vec<SandboxId>,
}

impl Ids {
    fn new(caller: &Caller, count: u32) -> Result<Self, Error> {
        if !(1..=MOST_CHILDREN).contains(&count) {
            return Err(Error::invalid(format!("`count` must be between 1 and {MOST_CHILDREN}")));
        }
        let children = (1..=count as usize).map(|place| caller.new_id(place)).collect();
        Ok(Self { snapshot: caller.new_id(0), children })
    }
}

/// The instant at which children begin.
enum Beginning {
    /// For as long as there are children: of a tree.
    Kept(SnapshotRow, Arc<SavedMachine>),
    Passing(PassingInstant),
}

impl Beginning {
    fn parts(&self) -> (&SnapshotRow, &Arc<SavedMachine>) {
        match self {
            Self::Kept(row, saved) => (row, saved),
            Self::Passing(instant) => (&instant.row, &instant.saved),
        }
    }
}

impl Sandboxes {
    /// # Errors
    /// As for a create; all children or none.
    pub async fn fork(
        self: &Arc<Self>,
        caller: &Caller,
        id: &SandboxId,
        request: Fork,
    ) -> Result<Forked, Error> {
        self.check_parent(caller, id)?;
        let count = request.count.unwrap_or(1);
        let metadata = request.metadata.unwrap_or_default();
        let ids = Ids::new(caller, count)?;
        let children = match self.branched_before(caller, &ids).await? {
            Some(children) => children,
            None => {
                let parent = self.registry.find(&caller.account, id)?;
                self.branch(caller, &parent, &ids, metadata, None).await?
            }
        };
        let Some(first) = children.first().cloned() else {
            return Err(Error::internal("a fork without children"));
        };
        Ok(Forked { sandbox: first, children })
    }

    /// # Errors
    /// As for a create; all children or none.
    pub async fn fork_tree(
        self: &Arc<Self>,
        caller: &Caller,
        id: &SandboxId,
        request: ForkTree,
    ) -> Result<ForkedTree, Error> {
        self.check_parent(caller, id)?;
        let ids = Ids::new(caller, request.count)?;
        if let Some(children) = self.branched_before(caller, &ids).await? {
            return Ok(tree_of(id, ids.snapshot, children));
        }
        let parent = self.registry.find(&caller.account, id)?;
        let tree_id = uuid::Uuid::new_v4().to_string();
        let metadata = request.metadata.unwrap_or_default();
        let children = self.branch(caller, &parent, &ids, metadata, Some(tree_id.clone())).await?;
        Ok(ForkedTree { tree_id, parent_id: *id, snapshot_id: ids.snapshot, children })
    }

    /// Before what else could be wrong with a request: of a sandbox that is not theirs nothing is told. When the request
    /// comes again, its answer may have outlived the parent.
    fn check_parent(&self, caller: &Caller, id: &SandboxId) -> Result<(), Error> {
        if caller.asks_again() {
            return Ok(());
        }
        self.registry.find(&caller.account, id).map(drop)
    }

    /// By a server that ended before it answered.
    async fn branched_before(
        self: &Arc<Self>,
        caller: &Caller,
        ids: &Ids,
    ) -> Result<Option<Vec<Sandbox>>, Error> {
        if !caller.asks_again() {
            return Ok(None);
        }
        self.children_made_before(caller, &ids.snapshot, &ids.children).await
    }

    /// Goes on to its end when whoever asked has gone: where the children begin is not left behind.
    async fn branch(
        self: &Arc<Self>,
        caller: &Caller,
        parent: &Arc<Entry>,
        ids: &Ids,
        added: BTreeMap<String, String>,
        tree: Option<String>,
    ) -> Result<Vec<Sandbox>, Error> {
        let (sandboxes, caller) = (Arc::clone(self), caller.clone());
        let (parent, ids) = (Arc::clone(parent), ids.clone());
        let task = self.tasks.spawn(async move {
            sandboxes.branch_to_the_end(&caller, &parent, &ids, added, tree).await
        });
        task.await.map_err(Error::internal)?
    }

    async fn branch_to_the_end(
        self: &Arc<Self>,
        caller: &Caller,
        parent: &Arc<Entry>,
        ids: &Ids,
        added: BTreeMap<String, String>,
        tree: Option<String>,
    ) -> Result<Vec<Sandbox>, Error> {
        let began = Instant::now();
        let explore_ttl = match added.get(EXPLORE_TTL) {
            Some(text) => {
                let ttl = text.parse().ok().and_then(|seconds| ttl_of(Some(seconds), None).ok());
                let wrong = "`metadata.explore_ttl` must be a number of seconds, at least 1 and at most ten years";
                ttl.ok_or_else(|| Error::invalid(wrong))?
            }
            None => None,
        };
        let parent_row = parent.row();
        let (mut metadata, ttl) = (parent_row.metadata, parent_row.ttl_seconds);
        metadata.extend(added);
        // Of an earlier fork, or made up.
        metadata.remove(TREE);
        metadata.insert(PARENT.to_owned(), parent.look(|row| row.id).to_string());
        metadata.extend(tree.iter().map(|tree| (TREE.to_owned(), tree.clone())));
        check_metadata(&metadata)?;

        // Refused before the parent stands still for it; each counts when its row is written.
        let all = parent.look(SandboxRow::amounts).times(ids.children.len() as u64);
        self.check_quota(caller, &all, None).await?;
        let _under_way = self.pool.create_under_way();
        let (count, is_taken) = (ids.children.len(), AtomicBool::new(false));
        let taking = async {
            let taken = self.beginning(parent, ids.snapshot, tree).await;
            is_taken.store(true, Ordering::SeqCst);
            taken
        };
        let (taken, ()) = tokio::join!(taking, self.pool.make_sites_ahead(count, &is_taken));
        let beginning = match taken {
            Ok(beginning) => beginning,
            Err(error) => {
                self.pool.remove_sites_ahead().await;
                return Err(error);
            }
        };
        let (of_parent, saved) = beginning.parts();
        let children = self.children(ids, &caller.account, |id| Draft {
            id,
            caller: caller.clone(),
            template: of_parent.template.clone(),
            saved: Some(Arc::clone(saved)),
            cpu: of_parent.cpu,
            memory_mb: of_parent.memory_mb,
            disk_mb: of_parent.disk_mb,
            metadata: metadata.clone(),
            // A child is its parent's copy, down to what its commands are given.
            environment: parent_row.environment.clone(),
            network: parent_row.network.clone(),
            ttl_seconds: explore_ttl.unwrap_or(ttl),
            from_snapshot: Some(ids.snapshot),
            attachments: Vec::new(),
            name: None,
            managed: false,
            databases: parent_row.databases.clone(),
            root: RootWish::Own,
            began,
        });
        let made = children.await;
        self.pool.remove_sites_ahead().await;
        fault::point!("fork.children_made");
        match beginning {
            // They hold what they need of it.
            Beginning::Passing(instant) => self.end_passing(instant).await,
            Beginning::Kept(row, _) if made.is_err() => self.end_beginning(&row.id).await,
            Beginning::Kept(..) => {}
        }
        if made.is_ok() {
            self.tell(parent, EventKind::Forked, Some(format!("{count} children")));
        }
        made
    }

    async fn beginning(
        self: &Arc<Self>,
        parent: &Arc<Entry>,
        id: SnapshotId,
        tree: Option<String>,
    ) -> Result<Beginning, Error> {
        let Some(tree) = tree else {
            return Ok(Beginning::Passing(self.catch_passing(parent, id).await?));
        };
        let row = self.take_snapshot(parent, id, String::new(), Purpose::Tree(tree)).await?;
        match self.saved_snapshot(&row.account, &row.id).await {
            Ok((row, saved)) => Ok(Beginning::Kept(row, saved)),
            Err(error) => {
                self.end_beginning(&row.id).await;
                Err(error)
            }
        }
    }

    /// Of a tree that has no children. The next start tries again.
    async fn end_beginning(&self, id: &SnapshotId) {
        if let Err(error) = self.remove_snapshot(id).await {
            tracing::warn!(snapshot = %id, %error, cause = error.causes(), "failed to remove the snapshot of a fork that failed");
        }
    }

    /// Side by side from one image. When one cannot be had, none is.
    async fn children(
        self: &Arc<Self>,
        ids: &Ids,
        account: &AccountId,
        draft: impl Fn(SandboxId) -> Draft,
    ) -> Result<Vec<Sandbox>, Error> {
        let drafts = ids.children.iter().map(|id| draft(*id));
        let made = futures::future::join_all(drafts.map(|draft| self.create_draft(draft))).await;
        let (mut children, mut failure) = (Vec::new(), None);
        for outcome in made {
            match outcome {
                Ok(child) => children.push(child),
                Err(error) => failure = Some(error),
            }
        }
        let Some(failure) = failure else { return Ok(children) };
        for child in children {
            if let Err(error) = self.delete(account, &child.id).await {
                tracing::warn!(sandbox = %child.id, %error, "a child of a fork that failed goes later");
            }
        }
        Err(failure)
    }

    /// Takes a child out of its tree, and ends its siblings if so asked.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone; 400 when there is no tree to clean up.
    pub async fn promote(
        &self,
        account: &AccountId,
        id: &SandboxId,
        request: Promote,
    ) -> Result<Promoted, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(super::state::Wish::Change, self.clock.steady_ms())?;
        if request.tree_id.as_ref().is_some_and(|tree| uuid::Uuid::parse_str(tree).is_err()) {
            return Err(Error::invalid(
                "`tree_id` must be the id that the answer of a fork-tree has",
            ));
        }
        let own_tree = entry.look(|row| row.metadata.get(TREE).cloned());
        let tree_id = request.tree_id.or_else(|| own_tree.clone());
        let cleanup = request.cleanup_siblings.unwrap_or(false);
        if cleanup && tree_id.is_none() {
            return Err(Error::invalid(
                "`tree_id` is missing, and the sandbox is of no tree: there are no siblings to clean up",
            ));
        }
        // Unless it was given another time to live since.
        let was_explored = entry.look(|row| {
            let explore_ttl = row.metadata.get(EXPLORE_TTL).and_then(|text| text.parse().ok());
            explore_ttl.is_some() && explore_ttl == row.ttl_seconds
        });
        entry.change(|row| {
            row.metadata.remove(TREE);
            row.metadata.remove(EXPLORE_TTL);
        });
        self.save_row(&entry).await?;
        if let Some(tree) = own_tree.as_ref().filter(|tree| self.of_tree(account, tree).is_empty())
        {
            self.end_tree(tree).await;
        }
        if was_explored {
            // What only bounded the search does not end its result.
            let ttl_seconds = i64::try_from(self.default_ttl.as_secs()).ok();
            let update = api::UpdateLifecycle { ttl_seconds, ..api::UpdateLifecycle::default() };
            self.update_lifecycle(account, id, update).await?;
        }
        let mut promoted =
            Promoted { winner: *id, tree_id, deleted: Vec::new(), failures: BTreeMap::new() };
        if let Some(tree) = promoted.tree_id.as_ref().filter(|_| cleanup) {
            // Side by side: its client waits for all of them.
            let ends = self.of_tree(account, tree).into_iter().map(|sibling| async move {
                let outcome = self.delete(account, &sibling).await;
                (sibling, outcome)
            });
            let mut ends = futures::stream::iter(ends).buffered(ENDED_AT_ONCE);
            while let Some((sibling, outcome)) = ends.next().await {
                match outcome {
                    Ok(()) => promoted.deleted.push(sibling),
                    Err(error) if error.code == api::ErrorCode::NotFound => {}
                    Err(error) => {
                        promoted.failures.insert(sibling.to_string(), error.message);
                    }
                }
            }
            self.end_tree(tree).await;
        }
        self.tell(&entry, EventKind::Promoted, promoted.tree_id.clone());
        Ok(promoted)
    }

    fn of_tree(&self, account: &AccountId, tree: &str) -> Vec<SandboxId> {
        let of_this = |entry: &Arc<Entry>| {
            entry.look(|row| {
                (row.account == *account && row.metadata.get(TREE).is_some_and(|own| own == tree))
                    .then_some(row.id)
            })
        };
        self.registry.all().iter().filter_map(of_this).collect()
    }

    /// The instant that a tree began with goes with its last child.
    pub(super) async fn leave_tree(&self, entry: &Entry) {
        let (account, tree) =
            entry.look(|row| (row.account.clone(), row.metadata.get(TREE).cloned()));
        if let Some(tree) = tree.filter(|tree| self.of_tree(&account, tree).is_empty()) {
            self.end_tree(&tree).await;
        }
    }

    /// Of servers that died before a child had its row. One that cannot be removed now is at the next start.
    pub(super) async fn end_trees_without_children(&self) -> Result<(), Error> {
        for (account, tree) in self.db.trees().await? {
            if self.of_tree(&account, &tree).is_empty() {
                self.end_tree(&tree).await;
            }
        }
        Ok(())
    }

    async fn end_tree(&self, tree: &str) {
        let ended = async {
            match self.db.snapshot_of_tree(tree).await? {
                Some(id) => self.remove_snapshot(&id).await,
                None => Ok(()),
            }
        };
        if let Err(error) = ended.await {
            tracing::warn!(tree, %error, cause = error.causes(), "failed to remove the snapshot of a fork tree");
        }
    }
}
