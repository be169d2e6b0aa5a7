//! `atoll key`: make, list and revoke keys.

use api::{AccountId, CreateKey, Key, NewKey, Scope};
use clap::{Args, Subcommand, ValueEnum};

use crate::{
    Connection,
    output::{instant, line, optional_instant, remark, table},
    settings::{Settings, require_root},
};

/// Make, list and revoke keys
#[derive(Subcommand)]
pub(crate) enum KeyCommand {
    Create(Box<Create>),
    List(List),
    Revoke(Revoke),
}

/// Make a key and print it: it is shown this once
#[derive(Args)]
#[command(after_help = "\
Examples:
  atoll key create --label ci --expires-in-days 90
  export ATOLL_KEY=$(sudo atoll key create --local)      # without a key, on the server's host
  sudo atoll key create --local --account ada --label ada")]
pub(crate) struct Create {
    /// What it is for
    #[arg(long)]
    label: Option<String>,
    /// Until it is no longer valid [default: for ever]
    #[arg(long, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..))]
    expires_in_days: Option<u32>,
    /// `read` allows lists and plain reads only
    #[arg(long, value_enum, default_value_t = KeyScope::Full)]
    scope: KeyScope,
    /// Write it into the database on this host, as root; needs no key, and no server that runs
    #[arg(long)]
    local: bool,
    /// Of another account than `default`, with --local
    #[arg(long, value_name = "ACCOUNT", requires = "local")]
    account: Option<AccountId>,
    #[command(flatten, next_help_heading = "Options with --local")]
    settings: Settings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KeyScope {
    Full,
    Read,
}

/// List the keys by what they begin with
#[derive(Args)]
pub(crate) struct List {}

/// Make a key invalid for ever
#[derive(Args)]
pub(crate) struct Revoke {
    /// Its prefix, as `atoll key list` shows it
    prefix: String,
}

impl KeyCommand {
    pub(crate) async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        match self {
            Self::Create(create) => create.run(connection).await,
            Self::List(List {}) => {
                let keys = connection.client()?.keys().await?;
                Ok(connection.output().show(&keys, |keys| listed(keys))?)
            }
            Self::Revoke(Revoke { prefix }) => Ok(connection.client()?.revoke_key(&prefix).await?),
        }
    }
}

impl Create {
    async fn run(self, connection: &Connection) -> anyhow::Result<()> {
        let scope = match self.scope {
            KeyScope::Full => Scope::Full,
            KeyScope::Read => Scope::Read,
        };
        let request = CreateKey {
            label: self.label,
            expires_in_days: self.expires_in_days,
            scope: Some(scope),
        };
        let new: NewKey = if self.local {
            require_root("key create --local")?;
            let local = server::Local::open(self.settings.config_on_any_port()?).await?;
            let account = self.account.unwrap_or_else(AccountId::default_account);
            let new = local.create_key(&account, request).await;
            local.close().await;
            new?
        } else {
            connection.client()?.create_key(&request).await?
        };
        if connection.json {
            return Ok(connection.output().show(&new, |_| String::new())?);
        }
        remark(format_args!("key {}…, shown this once:", new.key.prefix));
        Ok(line(&new.token)?)
    }
}

fn listed(keys: &[Key]) -> String {
    let row = |key: &Key| {
        let scope = match key.scope {
            Scope::Full => "full",
            Scope::Read => "read",
        };
        let expires = optional_instant(key.expires_at, "never");
        [key.prefix.clone(), key.label.clone(), scope.to_owned(), instant(key.created_at), expires]
    };
    table(["prefix", "label", "scope", "created", "expires"], keys.iter().map(row))
}
