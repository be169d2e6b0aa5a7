//! A PostgreSQL of a test's own, that can be ended and started again.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::process::{Child, Command};

use crate::until;

pub struct Postgres {
    directory: TempDir,
    process: Child,
}

impl Postgres {
    /// # Panics
    /// It does not start.
    pub async fn start() -> Self {
        let directory =
            tempfile::Builder::new().prefix("pg").tempdir().expect("/tmp can be written");
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777))
            .expect("it is ours");
        let data = data(directory.path());
        let mut made = unprivileged("initdb");
        made.args([
            "--no-sync",
            "--auth=trust",
            "--encoding=UTF8",
            "--username=postgres",
            "--pgdata",
        ]);
        let made = made.arg(data).stdout(Stdio::null()).status().await;
        assert!(made.is_ok_and(|status| status.success()), "initdb failed");
        let process = run(directory.path()).await;
        Self { directory, process }
    }

    pub fn url(&self) -> String {
        format!("postgres:///postgres?host={}&user=postgres", self.directory.path().display())
    }

    /// At once, without telling its clients.
    pub async fn end(&mut self) {
        self.quit();
        self.process.wait().await.expect("a child can be waited for");
    }

    fn quit(&self) {
        if let Some(pid) = self.process.id().and_then(|pid| Pid::from_raw(pid.cast_signed())) {
            // Fails where it has ended.
            let _ = kill_process(pid, Signal::QUIT);
        }
    }

    pub async fn start_again(&mut self) {
        self.process = run(self.directory.path()).await;
    }
}

impl Drop for Postgres {
    /// Not by SIGKILL, which would leave its shared memory on the host.
    fn drop(&mut self) {
        self.quit();
    }
}

fn data(directory: &Path) -> PathBuf {
    directory.join("data")
}

async fn run(directory: &Path) -> Child {
    let log = fs::File::options().append(true).create(true).open(directory.join("log"));
    let mut server = unprivileged("postgres");
    server.arg("-D").arg(data(directory)).arg("-k").arg(directory);
    server.args(["-c", "listen_addresses=", "-c", "fsync=off"]);
    let server = server.stdout(Stdio::null()).stderr(log.expect("the directory is ours")).spawn();
    until("PostgreSQL answers", Duration::from_secs(60), async || {
        let asked = Command::new(programs().join("pg_isready"))
            .arg("-q")
            .arg("-h")
            .arg(directory)
            .status()
            .await;
        asked.is_ok_and(|status| status.success()).then_some(())
    })
    .await;
    server.expect("PostgreSQL can be started")
}

/// It refuses to run as root.
fn unprivileged(program: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=postgres", "--regid=postgres", "--clear-groups", "--"]);
    command.arg(programs().join(program)).stdin(Stdio::null());
    command
}

/// Debian keeps the server's programs off the PATH.
fn programs() -> PathBuf {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut found: Vec<_> = versions.map(|version| version.path().join("bin")).collect();
    found.sort();
    found.pop().expect("PostgreSQL is installed for the tests (package postgresql)")
}
