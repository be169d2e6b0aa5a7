//! `atoll account`: who owns, on the server's host.

use api::{Account, AccountId};
use clap::{Args, Subcommand};
use server::Local;

use crate::{
    output::{Output, instant, properties, table},
    settings::{Settings, require_root},
};

/// Create, list and delete accounts, and give them plans (as root, on the server's host)
///
/// Each account sees its own sandboxes, volumes, snapshots and templates alone. What is changed here is written into the
/// server's database; a server that runs goes by it within a second. Make an account's keys with
/// `atoll key create --local --account ACCOUNT`.
#[derive(Subcommand)]
#[command(after_help = "\
Examples:
  sudo atoll account create ada --plan free
  sudo atoll key create --local --account ada
  sudo atoll account set-plan ada team --settings /etc/atoll.toml")]
pub(crate) enum AccountCommand {
    /// Make an account and print its name
    Create {
        account: AccountId,
        /// What it may have [default: the settings' default plan]
        #[arg(long)]
        plan: Option<String>,
        #[command(flatten)]
        settings: Box<OfServer>,
    },
    /// List the accounts
    List {
        #[command(flatten)]
        settings: Box<OfServer>,
    },
    /// Show one account
    Get {
        account: AccountId,
        #[command(flatten)]
        settings: Box<OfServer>,
    },
    /// Give an account another plan; what it has stays, also where it is more than that allows
    SetPlan {
        account: AccountId,
        /// Left out: the settings' default plan
        plan: Option<String>,
        #[command(flatten)]
        settings: Box<OfServer>,
    },
    /// Delete an account with its keys; not while it has sandboxes, volumes, snapshots or templates
    Delete {
        account: AccountId,
        #[command(flatten)]
        settings: Box<OfServer>,
    },
}

#[derive(Args)]
pub(crate) struct OfServer {
    #[command(flatten, next_help_heading = "Options of the server")]
    settings: Settings,
}

impl AccountCommand {
    pub(crate) async fn run(self, output: Output) -> anyhow::Result<()> {
        require_root("account")?;
        let (Self::Create { settings, .. }
        | Self::List { settings }
        | Self::Get { settings, .. }
        | Self::SetPlan { settings, .. }
        | Self::Delete { settings, .. }) = &self;
        let local = Local::open(settings.settings.config_on_any_port()?).await?;
        let done = self.run_on(&local, output).await;
        local.close().await;
        done
    }

    async fn run_on(self, local: &Local, output: Output) -> anyhow::Result<()> {
        match self {
            Self::Create { account, plan, .. } => {
                let made = local.create_account(&account, plan.as_deref()).await?;
                output.show(&made, |account| account.id.to_string())?;
            }
            Self::List { .. } => {
                output.show(&local.accounts().await?, |accounts| listed(accounts))?
            }
            Self::Get { account, .. } => output.show(&local.account(&account).await?, described)?,
            Self::SetPlan { account, plan, .. } => {
                output.show(&local.set_plan(&account, plan.as_deref()).await?, described)?;
            }
            Self::Delete { account, .. } => local.delete_account(&account).await?,
        }
        Ok(())
    }
}

fn listed(accounts: &[Account]) -> String {
    let row = |account: &Account| {
        [
            account.id.to_string(),
            account.plan.clone(),
            account.keys.to_string(),
            account.sandboxes.to_string(),
            account.volumes.to_string(),
            account.snapshots.to_string(),
            instant(account.created_at),
        ]
    };
    table(
        ["account", "plan", ">keys", ">sandboxes", ">volumes", ">snapshots", "created"],
        accounts.iter().map(row),
    )
}

fn described(account: &Account) -> String {
    properties(&[
        ("account", account.id.to_string()),
        ("plan", account.plan.clone()),
        ("keys", account.keys.to_string()),
        ("sandboxes", account.sandboxes.to_string()),
        ("volumes", account.volumes.to_string()),
        ("snapshots", account.snapshots.to_string()),
        ("created", instant(account.created_at)),
    ])
}
