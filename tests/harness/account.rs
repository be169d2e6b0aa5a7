//! Accounts beside the default one, made as their host's operator does.

use std::{process::Output, time::Duration};

use client::Client;
use serde_json::Value;
use tokio::process::Command;

use crate::{Server, pool, program, until};

/// What another process wrote is noticed within a second.
const NOTICED: Duration = Duration::from_secs(60);

impl Server {
    /// `atoll …` on the server's host, with its settings.
    pub async fn local(&self, arguments: &[&str]) -> Output {
        let program = self.options().program.clone().unwrap_or_else(program);
        let mut command = Command::new(program);
        command.args(arguments).arg("--data-dir").arg(self.data()).env("ATOLL_POOL", pool());
        for (name, value) in &self.options().environment {
            command.env(name, value);
        }
        command.output().await.expect("the program can be started")
    }

    /// What it prints with `--json`; nothing, where it prints nothing.
    ///
    /// # Panics
    /// It fails.
    pub async fn told(&self, arguments: &[&str]) -> Value {
        let output = self.local(&[&["--json"], arguments].concat()).await;
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        serde_json::from_slice(&output.stdout).unwrap_or(Value::Null)
    }

    /// A client of a new account.
    pub async fn account(&self, name: &str, plan: &str) -> Client {
        let made = self.told(&["account", "create", name, "--plan", plan]).await;
        assert_eq!((made["id"].as_str(), made["plan"].as_str()), (Some(name), Some(plan)));
        self.client_of(name).await
    }

    /// With another key of the account.
    pub async fn client_of(&self, account: &str) -> Client {
        let key = self.told(&["key", "create", "--local", "--account", account]).await;
        let client = self.client_with(key["token"].as_str());
        let me = until("the key is known", NOTICED, async || client.me().await.ok()).await;
        assert_eq!(me.account.as_str(), account);
        client
    }
}
