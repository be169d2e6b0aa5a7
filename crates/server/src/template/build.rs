//! Builds that users ask for: one at a time, each with a log that can be followed.

use std::{
    collections::{HashMap, VecDeque},
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use api::{AccountId, Build, BuildStatus, ErrorCode, TemplateName};
use store::{
    recipe::{Recipe, ResolvedRecipe},
    template::{Size, Template},
};
use tokio::sync::{Mutex as AsyncMutex, Semaphore, watch};
use uuid::Uuid;

use super::Templates;
use crate::{
    Error,
    blocking::blocking,
    clock,
    db::{BuildRow, TemplateRow},
    error::chain,
    keys::Caller,
    sandbox,
};

/// Lines kept of one build.
const LONGEST_LOG: usize = 10_000;
/// Builds whose logs are kept.
const MOST_LOGS: usize = 100;
/// Queued and running, of all accounts.
const MOST_UNFINISHED: usize = 16;
/// The same, of one account: a build may take an hour.
const MOST_OF_ACCOUNT: usize = 8;

/// Bakes of builds at once, of all accounts: each is a machine whose recipe says how long it runs.
const MOST_BAKES: usize = 4;
/// Longer than all commands of a `warm_up` may take: no bake goes on for nobody.
const BAKE_DEADLINE: Duration = Duration::from_secs(3600);

/// Of a template made from a root file system.
const TAR_SIZE: Size = Size { cpu: 2, memory_mb: 2048, disk_mb: 10_240 };

/// What a template is to be made from.
pub enum BuildSource {
    /// A recipe's text.
    Recipe(String),
    /// A root file system as a tar, deleted when it is no longer needed.
    Tar {
        archive: PathBuf,
        /// Of the sandboxes' disks, in MiB: at least the default.
        size_mb: Option<u64>,
    },
}

pub(super) struct Builds {
    /// Oldest first.
    logs: Mutex<VecDeque<(String, Arc<Log>)>>,
    turn: Arc<Semaphore>,
    baking: Semaphore,
    of_accounts: Mutex<HashMap<AccountId, Arc<AsyncMutex<()>>>>,
    unfinished: Arc<Semaphore>,
}

impl Default for Builds {
    fn default() -> Self {
        Self {
            logs: Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
            baking: Semaphore::new(MOST_BAKES),
            of_accounts: Mutex::default(),
            unfinished: Arc::new(Semaphore::new(MOST_UNFINISHED)),
        }
    }
}

impl Builds {
    /// Of an account's builds; each that has not ended has a copy of it. `None`: too many have not.
    fn turn_of(&self, account: &AccountId) -> Option<Arc<AsyncMutex<()>>> {
        let mut turns = self.of_accounts.lock().unwrap_or_else(PoisonError::into_inner);
        turns.retain(|_, turn| Arc::strong_count(turn) > 1);
        let turn = turns.entry(account.clone()).or_default();
        (Arc::strong_count(turn) <= MOST_OF_ACCOUNT).then(|| Arc::clone(turn))
    }
}

#[derive(Default)]
struct Log {
    lines: Mutex<Vec<String>>,
    /// How many lines there are, and whether that is all.
    progress: watch::Sender<(usize, bool)>,
}

impl Log {
    fn push(&self, line: &str) {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() < LONGEST_LOG {
            lines.push(line.trim_end().to_owned());
        }
        let count = lines.len();
        drop(lines);
        self.progress.send_modify(|progress| progress.0 = count);
    }

    fn end(&self) {
        self.progress.send_modify(|progress| progress.1 = true);
    }
}

/// A build's log as it grows.
pub struct BuildLog {
    log: Option<Arc<Log>>,
    progress: Option<watch::Receiver<(usize, bool)>>,
    seen: usize,
}

impl BuildLog {
    /// The next line; `None` when the build has ended and all of it was read.
    pub async fn next(&mut self) -> Option<String> {
        let (log, progress) = (self.log.as_ref()?, self.progress.as_mut()?);
        loop {
            let (count, ended) = *progress.borrow_and_update();
            if self.seen < count {
                let line = log
                    .lines
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get(self.seen)
                    .cloned();
                self.seen += 1;
                return line;
            }
            if ended || progress.changed().await.is_err() {
                return None;
            }
        }
    }
}

impl Templates {
    /// # Errors
    /// 400 for a broken recipe, 409 for a built-in's name, 503 when too many builds wait already.
    pub async fn start_build(
        self: &Arc<Self>,
        caller: &Caller,
        name: TemplateName,
        source: BuildSource,
    ) -> Result<Build, Error> {
        let (account, id) = (&caller.account, caller.new_id::<Uuid>(0).to_string());
        if caller.asks_again()
            && let Some(begun) = self.db.build(account, &id).await?
        {
            return Ok(show(&begun));
        }
        if self.find_built_in(&name).is_some() {
            return Err(Error::conflict(format!(
                "`name`: template `{name}` is built in; choose another name"
            )));
        }
        let source = match source {
            BuildSource::Recipe(text) => {
                let invalid = |error| Error::invalid(format!("`recipe`: {}", chain(&error)));
                let recipe = Recipe::parse(&text).map_err(invalid)?;
                let resolved = recipe.resolve(&store::recipe::find_builtin).map_err(invalid)?;
                Source::Recipe(Box::new((recipe, resolved)))
            }
            BuildSource::Tar { archive, size_mb } => {
                let disk_mb = size_mb.unwrap_or(0).max(TAR_SIZE.disk_mb);
                Source::Tar(archive, Size { disk_mb, ..TAR_SIZE })
            }
        };
        let of_account = self.builds.turn_of(account).ok_or_else(|| {
            let message = format!(
                "{MOST_OF_ACCOUNT} template builds of this account have not ended; try again when one has"
            );
            Error::busy(message, 30)
        })?;
        let place = Arc::clone(&self.builds.unfinished).try_acquire_owned().map_err(|_| {
            Error::busy("too many template builds wait already; try again when one has ended", 30)
        })?;
        let row = BuildRow {
            id,
            account: account.clone(),
            name,
            status: BuildStatus::Queued,
            error: None,
            disk_mb: Some(source.disk_mb()),
            created_at: self.clock.now_ms(),
            started_at: None,
            ended_at: None,
        };
        self.db.put_build(&row).await?;
        let log = Arc::new(Log::default());
        {
            let mut logs = self.builds.logs.lock().unwrap_or_else(PoisonError::into_inner);
            logs.push_back((row.id.clone(), Arc::clone(&log)));
            if logs.len() > MOST_LOGS {
                logs.pop_front();
            }
        }
        let shown = show(&row);
        let templates = Arc::clone(self);
        tokio::spawn(async move {
            // They go one after another: the last of a name has it in the end.
            let _turn = of_account.lock().await;
            templates.run_build(row, source, &log).await;
            log.end();
            drop(place);
        });
        Ok(shown)
    }

    async fn run_build(&self, mut row: BuildRow, source: Source, log: &Arc<Log>) {
        let outcome = self.carry_out(&mut row, source, log).await;
        row.ended_at = Some(self.clock.now_ms());
        match outcome {
            Ok(()) => row.status = BuildStatus::Done,
            Err(error) => {
                row.status = BuildStatus::Failed;
                log.push(&format!("failed: {}", error.message));
                row.error = Some(error.message);
            }
        }
        self.note(&row).await;
    }

    async fn note(&self, row: &BuildRow) {
        tracing::info!(build = %row.id, template = %row.name, status = %row.status, "template build");
        if let Err(error) = self.db.put_build(row).await {
            tracing::error!(build = %row.id, cause = error.causes(), "failed to write a build's row");
        }
    }

    /// It has its name only once sandboxes of it start at once: a build that fails leaves the template of before as it was.
    async fn carry_out(
        &self,
        row: &mut BuildRow,
        source: Source,
        log: &Arc<Log>,
    ) -> Result<(), Error> {
        let turn = self.builds.turn.acquire().await.map_err(Error::internal)?;
        row.status = BuildStatus::Running;
        row.started_at = Some(self.clock.now_ms());
        self.note(row).await;
        let (built, label, description) = self.build_one(source, log).await?;
        drop(turn);
        row.status = BuildStatus::Baking;
        self.note(row).await;
        self.bake(&built, log).await?;
        let (layout, digest) = (self.layout.clone(), built.digest.clone());
        if blocking(move || store::template::get(&layout, &digest)).await?.is_none() {
            let message = "a template of the same content was deleted meanwhile, and its files with it; build it again";
            return Err(Error::conflict(message));
        }
        let template = TemplateRow {
            account: row.account.clone(),
            name: row.name.clone(),
            digest: built.digest.to_string(),
            label,
            description,
            cpu: built.cpu,
            memory_mb: built.memory_mb,
            disk_mb: built.disk_mb,
            size_bytes: built.size_bytes,
            created_at: self.clock.now_ms(),
        };
        self.db.put_template(&template).await?;
        // The files of what had the name before stay: another server of this cache may name them.
        let mut own = self.own.write().unwrap_or_else(PoisonError::into_inner);
        own.insert((row.account.clone(), row.name.clone()), template);
        Ok(())
    }

    /// With its label and its description.
    async fn build_one(
        &self,
        source: Source,
        log: &Arc<Log>,
    ) -> Result<(Template, String, String), Error> {
        let (layout, lines) = (self.layout.clone(), Arc::clone(log));
        tokio::task::spawn_blocking(move || {
            let mut progress = |line: &str| lines.push(line);
            match source {
                Source::Recipe(recipe) => {
                    let (recipe, resolved) = *recipe;
                    store::template::build_from_recipe(&layout, &resolved, &mut progress)
                        .map(|built| (built, recipe.label, recipe.description))
                }
                Source::Tar(path, size) => {
                    let built =
                        store::template::build_from_tar(&layout, &path, size, &mut progress);
                    // It was ours alone, and is worth nothing any longer, whatever came of it.
                    let _ = std::fs::remove_file(&path);
                    built.map(|built| (built, String::new(), "from a root file system".to_owned()))
                }
            }
        })
        .await
        .map_err(Error::internal)?
        .map_err(Error::from_build)
    }

    /// In its own size, so that nobody's first create has to wait for it.
    async fn bake(&self, built: &Template, log: &Log) -> Result<(), Error> {
        let size = sandbox::Size::default_of(built);
        let (cpus, memory_mib) = (size.shape.cpus, size.shape.memory_mib);
        log.push(&format!("baking with {cpus} vCPUs and {memory_mib} MiB"));
        let _turn = self.builds.baking.acquire().await.map_err(Error::internal)?;
        let Err(error) = self.bakes.get(built, &size, BAKE_DEADLINE).await else { return Ok(()) };
        tracing::warn!(template = %built.digest, %error, cause = error.causes(), "failed to bake a template");
        if let Err(error) = self.remove_unnamed(built.digest.clone()).await {
            tracing::warn!(template = %built.digest, cause = error.causes(), "files of a template are left over");
        }
        let message = if error.code == ErrorCode::Unavailable {
            "a sandbox of it takes more than an hour to come to rest; make its `warm_up` shorter"
        } else if error.code == ErrorCode::Internal {
            "no sandbox of it could be started and brought to rest; look at what it runs at its start and at `warm_up`"
        } else {
            return Err(error);
        };
        Err(Error::invalid(message).because(error))
    }

    /// Newest first.
    ///
    /// # Errors
    /// The database cannot be read.
    pub async fn builds(&self, account: &AccountId) -> Result<Vec<Build>, Error> {
        Ok(self.db.builds(account).await?.iter().map(show).collect())
    }

    /// # Errors
    /// 404 for an unknown id.
    pub async fn build(&self, account: &AccountId, id: &str) -> Result<Build, Error> {
        let row = self.db.build(account, id).await?;
        row.as_ref().map(show).ok_or_else(|| {
            Error::not_found(
                "there is no template build with this id; list them with GET /v1/templates/builds",
            )
        })
    }

    /// From its first line on. A build of an earlier server has none any longer.
    ///
    /// # Errors
    /// 404 for an unknown id.
    pub async fn build_log(&self, account: &AccountId, id: &str) -> Result<BuildLog, Error> {
        self.build(account, id).await?;
        let logs = self.builds.logs.lock().unwrap_or_else(PoisonError::into_inner);
        let log = logs.iter().find(|(known, _)| known == id).map(|(_, log)| Arc::clone(log));
        Ok(BuildLog { progress: log.as_ref().map(|log| log.progress.subscribe()), log, seen: 0 })
    }
}

enum Source {
    Recipe(Box<(Recipe, ResolvedRecipe)>),
    Tar(PathBuf, Size),
}

impl Source {
    /// Of the sandboxes.
    fn disk_mb(&self) -> u64 {
        match self {
            Self::Recipe(recipe) => recipe.1.disk_mb(),
            Self::Tar(_, size) => size.disk_mb,
        }
    }
}

fn show(row: &BuildRow) -> Build {
    Build {
        id: row.id.clone(),
        name: row.name.clone(),
        status: row.status,
        error: row.error.clone(),
        size_mb: row.disk_mb,
        created_at: clock::from_ms(row.created_at),
        started_at: row.started_at.map(clock::from_ms),
        ended_at: row.ended_at.map(clock::from_ms),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_has_but_so_many_builds_that_have_not_ended() {
        let builds = Builds::default();
        let [one, other]: [AccountId; 2] = ["one", "other"].map(|name| name.parse().unwrap());
        let mut begun: Vec<_> =
            (0..MOST_OF_ACCOUNT).map(|_| builds.turn_of(&one).unwrap()).collect();
        assert!(builds.turn_of(&one).is_none());
        assert!(builds.turn_of(&other).is_some());
        begun.pop();
        assert!(builds.turn_of(&one).is_some());
    }

    #[tokio::test]
    async fn a_log_is_read_to_its_end_by_whoever_comes_when() {
        let log = Arc::new(Log::default());
        let follow = || BuildLog {
            log: Some(Arc::clone(&log)),
            progress: Some(log.progress.subscribe()),
            seen: 0,
        };
        let mut early = follow();
        log.push("one\n");
        assert_eq!(early.next().await.as_deref(), Some("one"));
        log.push("two");
        log.end();
        let mut late = follow();
        assert_eq!(
            (late.next().await.as_deref(), late.next().await.as_deref(), late.next().await),
            (Some("one"), Some("two"), None)
        );
        assert_eq!((early.next().await.as_deref(), early.next().await), (Some("two"), None));
    }
}
