//! Templates by name: the built-in ones, and those that accounts built.

mod build;

use std::{
    collections::HashMap,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use api::{AccountId, TemplateName};
use store::{
    Digest, Layout,
    recipe::{Recipe, ResolvedRecipe},
    template::Template,
};

pub use self::build::{BuildLog, BuildSource};
use crate::{
    Error,
    clock::{self, Clock},
    db::{Db, TemplateRow},
    sandbox::Bakes,
    shared_work::SharedWork,
};

pub struct Templates {
    layout: Layout,
    db: Db,
    clock: Clock,
    /// For what is built.
    bakes: Arc<Bakes>,
    built_in: Vec<BuiltIn>,
    /// A copy of the rows.
    own: RwLock<HashMap<(AccountId, TemplateName), TemplateRow>>,
    work: SharedWork<Template>,
    builds: build::Builds,
}

struct BuiltIn {
    name: TemplateName,
    recipe: Recipe,
    resolved: ResolvedRecipe,
}

/// What a sandbox of a template is like when its create does not say.
#[derive(Debug, Clone)]
pub(crate) struct Defaults {
    pub(crate) cpu: u32,
    pub(crate) memory_mb: u64,
    pub(crate) disk_mb: u64,
}

impl Templates {
    /// # Errors
    /// The rows cannot be read, or a built-in recipe is broken.
    pub(crate) async fn open(
        layout: Layout,
        db: Db,
        clock: Clock,
        bakes: Arc<Bakes>,
    ) -> Result<Arc<Self>, Error> {
        let built_in = store::recipe::builtin()
            .into_iter()
            .map(|(name, recipe)| {
                let resolved = recipe.resolve(&store::recipe::find_builtin)?;
                Ok(BuiltIn { name, recipe, resolved })
            })
            .collect::<store::Result<_>>()
            .map_err(Error::internal)?;
        let own = db
            .templates()
            .await?
            .into_iter()
            .map(|row| ((row.account.clone(), row.name.clone()), row))
            .collect();
        db.fail_unfinished_builds(clock.now_ms()).await?;
        Ok(Arc::new(Self {
            layout,
            db,
            clock,
            bakes,
            built_in,
            own: RwLock::new(own),
            work: SharedWork::default(),
            builds: build::Builds::default(),
        }))
    }

    /// The names of the built-in templates.
    pub(crate) fn built_in_names(&self) -> Vec<TemplateName> {
        self.built_in.iter().map(|template| template.name.clone()).collect()
    }

    fn find_built_in(&self, name: &TemplateName) -> Option<&BuiltIn> {
        self.built_in
            .iter()
            .find(|template| template.name == *name || template.recipe.aliases.contains(name))
    }

    /// Where a root file system is kept on its way into a build. What a server leaves there, its next start removes.
    pub(crate) fn uploads(&self) -> std::path::PathBuf {
        self.layout.data_temporary()
    }

    fn find_own(&self, account: &AccountId, name: &TemplateName) -> Option<TemplateRow> {
        let own = self.own.read().unwrap_or_else(PoisonError::into_inner);
        own.get(&(account.clone(), name.clone())).cloned()
    }

    /// # Errors
    /// 404 for a name that the account does not have.
    pub(crate) fn defaults(
        &self,
        account: &AccountId,
        name: &TemplateName,
    ) -> Result<Defaults, Error> {
        if let Some(BuiltIn { resolved, .. }) = self.find_built_in(name) {
            return Ok(Defaults {
                cpu: resolved.cpu(),
                memory_mb: resolved.memory_mb(),
                disk_mb: resolved.disk_mb(),
            });
        }
        let row = self.find_own(account, name).ok_or_else(|| unknown(name))?;
        Ok(Defaults { cpu: row.cpu, memory_mb: row.memory_mb, disk_mb: row.disk_mb })
    }

    /// Its root file system; a built-in one is built now if this host has not done so yet.
    ///
    /// # Errors
    /// 404 for an unknown name; 503 when the build takes longer than `patience`.
    pub(crate) async fn built(
        &self,
        account: &AccountId,
        name: &TemplateName,
        patience: Duration,
    ) -> Result<store::template::Template, Error> {
        if let Some(BuiltIn { resolved, .. }) = self.find_built_in(name) {
            return self.build_built_in(name, resolved, patience, |_| {}).await;
        }
        let row = self.find_own(account, name).ok_or_else(|| unknown(name))?;
        let digest: Digest = row.digest.parse().map_err(Error::internal)?;
        store::template::get(&self.layout, &digest).map_err(Error::internal)?.ok_or_else(|| {
            Error::conflict(format!(
                "the files of template `{name}` are gone from the cache; build it again"
            ))
        })
    }

    /// Builds a built-in template unless that was done before.
    pub(crate) async fn prepare(
        &self,
        name: &TemplateName,
        progress: impl FnMut(&str) + Send + 'static,
    ) -> Result<store::template::Template, Error> {
        let BuiltIn { resolved, .. } = self.find_built_in(name).ok_or_else(|| unknown(name))?;
        self.build_built_in(name, resolved, Duration::from_secs(3600), progress).await
    }

    async fn build_built_in(
        &self,
        name: &TemplateName,
        recipe: &ResolvedRecipe,
        patience: Duration,
        mut progress: impl FnMut(&str) + Send + 'static,
    ) -> Result<store::template::Template, Error> {
        let (layout, recipe, shown) = (self.layout.clone(), recipe.clone(), name.clone());
        let busy = format!(
            "template `{name}` is being built for the first time, which takes minutes; try again shortly"
        );
        self.work
            .get(recipe.digest().as_str(), patience, &busy, || async move {
                tokio::task::spawn_blocking(move || {
                    store::template::build_from_recipe(&layout, &recipe, &mut |line: &str| {
                        tracing::debug!(template = %shown, line, "building");
                        progress(line);
                    })
                })
                .await
                .map_err(Error::internal)?
                .map_err(Error::from_start)
            })
            .await
    }

    /// By name, the account's own after the built-in ones.
    pub fn list(&self, account: &AccountId) -> Vec<api::Template> {
        let mut templates: Vec<_> =
            self.built_in.iter().map(|template| self.show_built_in(template)).collect();
        let own = self.own.read().unwrap_or_else(PoisonError::into_inner);
        let mut rows: Vec<_> = own.values().filter(|row| row.account == *account).collect();
        rows.sort_by(|left, right| left.name.cmp(&right.name));
        templates.extend(rows.into_iter().map(show_own));
        templates
    }

    /// # Errors
    /// 404 for a name that the account does not have.
    pub fn get(&self, account: &AccountId, name: &TemplateName) -> Result<api::Template, Error> {
        if let Some(template) = self.find_built_in(name) {
            return Ok(self.show_built_in(template));
        }
        self.find_own(account, name).map(|row| show_own(&row)).ok_or_else(|| unknown(name))
    }

    /// Sandboxes made from it go on.
    ///
    /// # Errors
    /// 404 for an unknown name, 409 for a built-in one.
    pub async fn delete(&self, account: &AccountId, name: &TemplateName) -> Result<(), Error> {
        if self.find_built_in(name).is_some() {
            return Err(Error::conflict(format!(
                "template `{name}` is built in and cannot be deleted"
            )));
        }
        if !self.db.delete_template(account, name).await? {
            return Err(unknown(name));
        }
        let row = {
            let mut own = self.own.write().unwrap_or_else(PoisonError::into_inner);
            own.remove(&(account.clone(), name.clone()))
        };
        match row.and_then(|row| row.digest.parse().ok()) {
            Some(digest) => self.remove_unnamed(digest).await,
            None => Ok(()),
        }
    }

    /// Files that no name stands for any longer, nor another account's.
    async fn remove_unnamed(&self, digest: Digest) -> Result<(), Error> {
        let is_named = {
            let own = self.own.read().unwrap_or_else(PoisonError::into_inner);
            own.values().any(|row| row.digest == digest.as_str())
        };
        if is_named || self.is_built_in(&digest) {
            return Ok(());
        }
        let layout = self.layout.clone();
        let removed = tokio::task::spawn_blocking(move || {
            store::template::delete(&layout, &digest)?;
            store::bake::remove_of_template(&layout, &digest)
        });
        removed.await.map_err(Error::internal)?.map_err(Error::internal)?;
        Ok(())
    }

    fn is_built_in(&self, digest: &Digest) -> bool {
        self.built_in.iter().any(|template| template.resolved.digest() == *digest)
    }

    fn show_built_in(&self, BuiltIn { name, recipe, resolved }: &BuiltIn) -> api::Template {
        let digest = resolved.digest();
        let built = store::template::get(&self.layout, &digest).ok().flatten();
        api::Template {
            name: name.clone(),
            label: recipe.label.clone(),
            description: recipe.description.clone(),
            aliases: recipe.aliases.clone(),
            cpu: resolved.cpu(),
            memory_mb: resolved.memory_mb(),
            disk_mb: resolved.disk_mb(),
            size_bytes: built.as_ref().map_or(0, |built| built.size_bytes),
            is_global: true,
            digest: digest.to_string(),
            created_at: built.map(|built| built.created.into()),
        }
    }
}

fn show_own(row: &TemplateRow) -> api::Template {
    api::Template {
        name: row.name.clone(),
        label: row.label.clone(),
        description: row.description.clone(),
        aliases: Vec::new(),
        cpu: row.cpu,
        memory_mb: row.memory_mb,
        disk_mb: row.disk_mb,
        size_bytes: row.size_bytes,
        is_global: false,
        digest: row.digest.clone(),
        created_at: Some(clock::from_ms(row.created_at)),
    }
}

fn unknown(name: &TemplateName) -> Error {
    Error::not_found(format!("there is no template `{name}`; list them with GET /v1/templates"))
}
