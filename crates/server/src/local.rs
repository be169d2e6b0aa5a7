//! Keys and accounts for whoever holds the host: written into the rows, whether a server runs or not. A running server
//! notices within a second.

use std::sync::Arc;

use api::{Account, AccountId, CreateKey, ErrorCode, NewKey, Usage};
use store::layout::Layout;
use time::OffsetDateTime;

use crate::{
    Config, Error,
    account::{Amounts, Period},
    clock::{self, Clock},
    db::{AccountRow, Db},
    keys::Keys,
};

/// What is done without a server.
pub struct Local {
    db: Db,
    config: Config,
    clock: Clock,
}

impl Local {
    /// # Errors
    /// The database cannot be opened.
    pub async fn open(config: Config) -> Result<Self, Error> {
        Layout::create(&config.data_dir, &config.cache_dir).map_err(Error::internal)?;
        let db = Db::connect(&config.database_url()).await.map_err(|source| {
            Error::new(ErrorCode::InvalidRequest, "cannot open the database; check --database")
                .because(source)
        })?;
        // The steady time of the servers of this directory.
        let clock = Clock::open(&config.data_dir.join("clock")).map_err(Error::internal)?;
        Ok(Self { db: db.with_clock(&clock), config, clock })
    }

    pub async fn close(self) {
        self.db.close().await;
    }

    /// # Errors
    /// 404 for an unknown account; a bad field.
    pub async fn create_key(
        &self,
        account: &AccountId,
        request: CreateKey,
    ) -> Result<NewKey, Error> {
        self.account(account).await?;
        let plans = Arc::clone(&self.config.plans);
        let keys = Keys::load(self.db.clone(), self.clock.clone(), None, plans).await?;
        keys.create(account, request).await
    }

    /// # Errors
    /// 409 when the name is taken; 400 for a plan that the settings do not name.
    pub async fn create_account(
        &self,
        id: &AccountId,
        plan: Option<&str>,
    ) -> Result<Account, Error> {
        self.check_plan(plan)?;
        let row = AccountRow {
            id: id.clone(),
            plan: plan.map(str::to_owned),
            created_at: self.clock.now_ms(),
        };
        if !self.db.insert_account(&row).await? {
            return Err(Error::conflict(format!("there is an account `{id}` already")));
        }
        self.shown(row).await
    }

    /// By name.
    ///
    /// # Errors
    /// The rows cannot be read.
    pub async fn accounts(&self) -> Result<Vec<Account>, Error> {
        let mut shown = Vec::new();
        for row in self.db.accounts().await? {
            shown.push(self.shown(row).await?);
        }
        Ok(shown)
    }

    /// # Errors
    /// 404 when there is none.
    pub async fn account(&self, id: &AccountId) -> Result<Account, Error> {
        let row = self.db.accounts().await?.into_iter().find(|row| row.id == *id);
        self.shown(row.ok_or_else(|| not_found(id))?).await
    }

    /// `None`: the default of the settings.
    ///
    /// Of any account, also one that was deleted.
    ///
    /// # Errors
    /// 400 when it ends before it begins.
    pub async fn usage(
        &self,
        account: &AccountId,
        from: Option<OffsetDateTime>,
        to: Option<OffsetDateTime>,
    ) -> Result<Usage, Error> {
        let period = Period::new(from, to, &self.clock)?;
        period.usage(account, &self.db, &self.config.plans).await
    }

    /// # Errors
    /// 404 when there is no such account; 400 for a plan that the settings do not name.
    pub async fn set_plan(&self, id: &AccountId, plan: Option<&str>) -> Result<Account, Error> {
        self.check_plan(plan)?;
        if !self.db.set_plan(id, plan).await? {
            return Err(not_found(id));
        }
        self.account(id).await
    }

    /// Its keys are refused from now on; what it used is still told.
    ///
    /// # Errors
    /// 404 when there is none; 409 while it has something.
    pub async fn delete_account(&self, id: &AccountId) -> Result<(), Error> {
        if *id == AccountId::default_account() {
            return Err(Error::conflict("the default account cannot be deleted"));
        }
        let refused = || {
            Error::conflict(format!(
                "account `{id}` still has sandboxes, volumes, snapshots or templates; delete them first"
            ))
        };
        let has = self.db.amounts(id).await?;
        if has != Amounts::default() || self.db.count_templates(id).await? > 0 {
            return Err(refused());
        }
        // Made between the two looks: the rows hold on to their account.
        if self.db.delete_account(id).await.map_err(|error| refused().because(error))? {
            Ok(())
        } else {
            Err(not_found(id))
        }
    }

    fn check_plan(&self, plan: Option<&str>) -> Result<(), Error> {
        let plans = &self.config.plans;
        match plan {
            Some(name) if plans.get(Some(name)).is_none() => Err(Error::invalid(format!(
                "there is no plan `{name}`; there are {} (--settings names the file with others)",
                plans.names()
            ))),
            Some(_) | None => Ok(()),
        }
    }

    async fn shown(&self, row: AccountRow) -> Result<Account, Error> {
        let keys = self.db.keys().await?.iter().filter(|key| key.account == row.id).count();
        let has = self.db.amounts(&row.id).await?;
        let default = self.config.plans.get(None).map(|plan| plan.name.clone());
        Ok(Account {
            id: row.id,
            plan: row.plan.or(default).unwrap_or_default(),
            keys: keys as u64,
            sandboxes: has.sandboxes,
            volumes: has.volumes,
            snapshots: has.snapshots,
            created_at: clock::from_ms(row.created_at),
        })
    }
}

fn not_found(id: &AccountId) -> Error {
    Error::not_found(format!("there is no account `{id}`; list them with `atoll account list`"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_account_has_a_plan_and_keys_until_it_is_deleted() {
        let directory = tempfile::tempdir().unwrap();
        let config = Config {
            data_dir: directory.path().join("data"),
            cache_dir: directory.path().join("cache"),
            ..Config::testing()
        };
        let local = Local::open(config).await.unwrap();
        let id: AccountId = "ada".parse().unwrap();
        let code = |refused: Result<Account, Error>| refused.unwrap_err().code;
        assert_eq!(code(local.account(&id).await), ErrorCode::NotFound);
        assert_eq!(code(local.create_account(&id, Some("gold")).await), ErrorCode::InvalidRequest);
        assert_eq!(local.create_account(&id, None).await.unwrap().plan, "unlimited");
        assert_eq!(code(local.create_account(&id, None).await), ErrorCode::Conflict);
        assert_eq!(local.set_plan(&id, Some("free")).await.unwrap().plan, "free");
        local.create_key(&id, CreateKey::default()).await.unwrap();
        assert_eq!(local.account(&id).await.unwrap().keys, 1);
        assert_eq!(local.accounts().await.unwrap().len(), 2);
        local.delete_account(&id).await.unwrap();
        assert_eq!(local.delete_account(&id).await.unwrap_err().code, ErrorCode::NotFound);
        let default = AccountId::default_account();
        assert_eq!(local.delete_account(&default).await.unwrap_err().code, ErrorCode::Conflict);
        local.close().await;
    }
}
