//! What a host can do, and what to do about each lack. Works beside a server, without one, and as far as possible
//! without root; changes nothing.

mod kernel;
mod room;
mod tools;
mod virtualization;

use std::{future::Future, time::Duration};

use serde::Serialize;
use store::Layout;

use crate::Config;

/// A check that takes longer says that it is under way.
const TOLD_AFTER: Duration = Duration::from_secs(2);
/// Longer than any check, the boot of a guest included.
const DEADLINE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Ok,
    /// Sandboxes run, but slower, less confined or less many than they could.
    Warn,
    /// No server starts, or no sandbox.
    Fail,
}

impl Verdict {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "fail",
        }
    }
}

/// One line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub check: &'static str,
    pub verdict: Verdict,
    pub found: String,
    /// What to do, where something is lacking.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advice: Option<String>,
}

impl Finding {
    fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, verdict: Verdict::Ok, found: found.into(), advice: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        let (found, advice) = (found.into(), Some(advice.into()));
        Self { check, verdict: Verdict::Warn, found, advice }
    }

    fn fail(check: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { verdict: Verdict::Fail, ..Self::warn(check, found, advice) }
    }
}

struct Examination<'a> {
    progress: &'a mut (dyn FnMut(&str) + Send),
    findings: Vec<Finding>,
}

impl Examination<'_> {
    /// Of something that only reads and is quick.
    fn note(&mut self, findings: impl IntoIterator<Item = Finding>) {
        self.findings.extend(findings);
    }

    /// Of something that may take long, or never come back.
    async fn wait(&mut self, check: &'static str, finding: impl Future<Output = Vec<Finding>>) {
        let mut finding = std::pin::pin!(finding);
        let found = match tokio::time::timeout(TOLD_AFTER, &mut finding).await {
            Ok(found) => found,
            Err(_) => {
                (self.progress)(&format!("still at: {check}"));
                match tokio::time::timeout(DEADLINE, finding).await {
                    Ok(found) => found,
                    Err(_) => vec![Finding::fail(
                        check,
                        format!("no answer within {} s", DEADLINE.as_secs()),
                        "look at the host's log (dmesg): something hangs",
                    )],
                }
            }
        };
        self.findings.extend(found);
    }
}

/// Every check, in an order in which a lack explains those after it. `progress` hears of what takes long.
pub async fn examine(config: &Config, progress: &mut (dyn FnMut(&str) + Send)) -> Vec<Finding> {
    let is_root = rustix::process::geteuid().is_root();
    let layout = Layout::of(&config.data_dir, &config.cache_dir);
    let mut examination = Examination { progress, findings: Vec::new() };
    examination.note([root(is_root)]);
    examination.wait("qemu", virtualization::qemu(is_root)).await;
    examination.wait("accelerator", virtualization::accelerator(&layout, is_root)).await;
    examination.wait("tools", tools::check()).await;
    examination.wait("nftables", tools::nftables(is_root)).await;
    examination.wait("namespaces", kernel::namespaces(is_root)).await;
    examination.note([kernel::tun(is_root), kernel::cgroups(is_root), kernel::features()]);
    examination.wait("pool", room::pool(layout)).await;
    examination.note(room::memory());
    examination.note([kernel::open_files()]);
    examination.wait("clock", tools::clock()).await;
    examination.note([kernel::port(config.listen)]);
    examination.findings
}

fn root(is_root: bool) -> Finding {
    if is_root {
        Finding::ok("user", "root")
    } else {
        Finding::warn("user", "not root", "run it with sudo: what needs root was not tried")
    }
}

/// A program's output and whether it succeeded; `None` when there is none or it hangs.
async fn output(program: &str, arguments: &[&str]) -> Option<(bool, String)> {
    let running = tokio::process::Command::new(program)
        .args(arguments)
        .env("LC_ALL", "C")
        .stdin(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(Duration::from_secs(10), running).await.ok()?.ok()?;
    let text = [output.stdout, output.stderr].concat();
    Some((output.status.success(), String::from_utf8_lossy(&text).trim().to_owned()))
}
