//! Finds, and removes, what servers that are gone left on the host. What a living server holds is locked, and what a row
//! names is kept; everything else that bears our names belongs to nobody.

mod cache;
mod dead;
mod own;

use std::{
    collections::BTreeSet,
    fmt,
    path::{Path, PathBuf},
};

use serde::Serialize;
use store::Layout;
pub use store::sweep::Mode;

use crate::{Config, Error, clock::Clock};

/// One thing that belongs to nobody.
#[derive(Debug, Serialize)]
pub struct Leftover {
    pub kind: Kind,
    /// A name, a number or a path.
    pub name: String,
    pub why: String,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Processes of one user of ours.
    Processes,
    /// Of a user of ours that has no processes.
    ControlGroups,
    Namespace,
    Interface,
    Table,
    /// An instance number.
    Claim,
    /// A whole data directory, of a set-up that was killed.
    DataDirectory,
    SandboxDirectory,
    MachineDirectory,
    Draft,
    /// Of the shared cache: kernels, initramfs archives, packages.
    Cached,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Processes => "processes",
            Self::ControlGroups => "control groups",
            Self::Namespace => "namespace",
            Self::Interface => "interface",
            Self::Table => "nft table",
            Self::Claim => "claim",
            Self::DataDirectory => "data directory",
            Self::SandboxDirectory => "sandbox directory",
            Self::MachineDirectory => "machine directory",
            Self::Draft => "draft",
            Self::Cached => "cached",
        })
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It was only looked for.
    WouldGo,
    Removed,
    Failed(String),
}

/// What a sweep has found so far.
pub(crate) struct Found {
    mode: Mode,
    all: Vec<Leftover>,
}

/// What a sweep tells.
#[derive(Debug, Serialize)]
pub struct Swept {
    pub leftovers: Vec<Leftover>,
    /// Why something was not looked at.
    pub remarks: Vec<String>,
}

impl Found {
    fn new(mode: Mode) -> Self {
        Self { mode, all: Vec::new() }
    }

    fn removes(&self) -> bool {
        self.mode == Mode::Remove
    }

    /// `outcome` is that of the removal, where there was one.
    fn push(
        &mut self,
        kind: Kind,
        name: impl fmt::Display,
        why: impl Into<String>,
        outcome: Result<(), Error>,
    ) {
        let (name, why) = (name.to_string(), why.into());
        let outcome = match outcome {
            Ok(()) if self.removes() => {
                tracing::info!(%kind, name, why, "removed a leftover");
                Outcome::Removed
            }
            Ok(()) => Outcome::WouldGo,
            Err(error) => {
                let reason = [error.message.clone(), error.causes()].join(": ");
                tracing::warn!(%kind, name, reason, "failed to remove a leftover");
                Outcome::Failed(reason)
            }
        };
        self.all.push(Leftover { kind, name, why, outcome });
    }
}

/// What is left of machines whose processes are gone already; with the others it goes with them.
async fn control_groups(found: &mut Found, uids: BTreeSet<u32>, why: &str) -> Result<(), Error> {
    for uid in uids {
        let removed = if found.removes() {
            let removed = blocking(move || machine::remove_groups(&(uid..=uid), |_| false)).await?;
            removed.map(drop).map_err(Error::internal)
        } else {
            Ok(())
        };
        found.push(Kind::ControlGroups, format!("of uid {uid}"), why, removed);
    }
    Ok(())
}

/// Of the whole host, and of this data directory if no server runs there.
///
/// # Errors
/// Not root, or the host cannot be asked.
pub async fn sweep(config: &Config, mode: Mode) -> Result<Swept, Error> {
    let layout = Layout::of(&config.data_dir, &config.cache_dir);
    let (mut found, mut remarks) = (Found::new(mode), Vec::new());
    dead::sweep(&mut found, &scratch_places(config)).await?;
    own::sweep(&mut found, config, &layout, &mut remarks).await?;
    cache::sweep(&mut found, &layout, &Clock::default()).await?;
    Ok(Swept { leftovers: found.all, remarks })
}

/// The same at a server's start, whose recovery keeps its own data directory in order.
pub(crate) async fn at_start(config: Config, layout: Layout, clock: Clock) {
    let mut found = Found::new(Mode::Remove);
    let swept = async {
        dead::sweep(&mut found, &scratch_places(&config)).await?;
        cache::sweep(&mut found, &layout, &clock).await
    };
    if let Err(error) = swept.await {
        tracing::warn!(%error, cause = error.causes(), "failed to look for leftovers of other servers");
    }
}

/// Where `prepare` and `demo` make data directories of their own.
fn scratch_places(config: &Config) -> Vec<PathBuf> {
    let parents = [config.data_dir.parent(), config.cache_dir.parent()];
    let mut places: Vec<PathBuf> = parents
        .into_iter()
        .flatten()
        .chain([config.data_dir.as_path()])
        .map(Path::to_owned)
        .collect();
    places.sort_unstable();
    places.dedup();
    places
}

/// Done on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)
}
