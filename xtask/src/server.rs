//! An `atoll serve` of our own: a fresh data directory on the pool, any free port, and nothing left of it afterwards.

use std::{
    fs::{self, File},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, bail};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::{api::Api, wait};

/// Where everything of Atoll's lies on this host.
pub(crate) fn pool() -> PathBuf {
    std::env::var_os("ATOLL_POOL").map_or_else(|| "/var/lib/atoll".into(), PathBuf::from)
}

pub(crate) struct Server {
    child: Child,
    pub(crate) url: String,
    pub(crate) key: String,
    /// Removed last.
    directory: TempDir,
}

impl Server {
    /// `log` gets what the server says.
    pub(crate) fn start(program: &Path, log: &Path) -> anyhow::Result<Self> {
        let pool = pool();
        let directory =
            tempfile::Builder::new().prefix("test-").tempdir_in(&pool).with_context(|| {
                format!("make a data directory in {} (`make setup` makes the pool)", pool.display())
            })?;
        // QEMU processes run unprivileged and reach their own directory below by name.
        fs::set_permissions(directory.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711))?;
        let key = random_key()?;
        let output = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let child = Command::new(program)
            .args(["serve", "--listen", "127.0.0.1:0", "--data-dir"])
            .arg(directory.path())
            .env("ATOLL_API_KEY", &key)
            // An interrupt is for us, who end it in order.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn()
            .with_context(|| format!("start {}", program.display()))?;
        let mut server = Self { child, url: String::new(), key, directory };
        server.url = wait::until(
            "the server's address",
            Duration::from_secs(1200),
            Duration::from_millis(20),
            || {
                if let Some(status) = server.child.try_wait()? {
                    bail!(
                        "start the server: it ended with {status}: {}",
                        fs::read_to_string(log).unwrap_or_default()
                    );
                }
                Ok(find_url(&fs::read_to_string(log).unwrap_or_default()))
            },
        )?;
        wait::until(
            "the server's first answer",
            Duration::from_secs(60),
            Duration::from_millis(20),
            || Ok(server.api().get("/healthz").ok()),
        )?;
        Ok(server)
    }

    pub(crate) fn api(&self) -> Api {
        Api::new(&self.url, &self.key)
    }

    /// What the server itself has in memory; its machines are other processes.
    pub(crate) fn memory_megabytes(&self) -> anyhow::Result<f64> {
        let path = format!("/proc/{}/status", self.child.id());
        let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        Ok(kib.with_context(|| format!("find VmRSS in {path}"))?.parse::<f64>()? / 1024.0)
    }

    /// The virtual machine behind a sandbox: the QEMU that has its root disk open.
    pub(crate) fn machine_of(&self, sandbox: &str) -> anyhow::Result<u32> {
        machines_with_open_files_in(&self.directory.path().join("sandboxes").join(sandbox))
            .first()
            .copied()
            .with_context(|| format!("find the QEMU of sandbox {sandbox}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Sandboxes outlive their server, so they go first.
        if !self.url.is_empty() && matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.api().delete_all();
        }
        let pid = Pid::from_child(&self.child);
        let _ = kill_process(pid, Signal::TERM);
        for _ in 0..600 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                break;
            }
            wait::pause(Duration::from_millis(50));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        for machine in machines_with_open_files_in(self.directory.path()) {
            let _ = Pid::from_raw(machine.cast_signed()).map(|pid| kill_process(pid, Signal::KILL));
        }
    }
}

/// The line that tells it is for people; the address in it is all that counts.
fn find_url(output: &str) -> Option<String> {
    let start = output.find("http://127.0.0.1:")?;
    let rest = &output[start..];
    // Until the digits have ended, the line may be half-written.
    let end = "http://127.0.0.1:".len()
        + rest["http://127.0.0.1:".len()..].find(|c: char| !c.is_ascii_digit())?;
    Some(rest[..end].to_owned())
}

fn machines_with_open_files_in(directory: &Path) -> Vec<u32> {
    let mut machines = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
        if !name.starts_with("qemu-system") {
            continue;
        }
        let files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if files
            .filter_map(|file| fs::read_link(file.path()).ok())
            .any(|file| file.starts_with(directory))
        {
            machines.push(pid);
        }
    }
    machines
}

fn random_key() -> anyhow::Result<String> {
    let mut bytes = [0; 24];
    std::io::Read::read_exact(&mut File::open("/dev/urandom")?, &mut bytes)?;
    let digits: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("atl_{digits}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_in_the_line_that_tells_it() {
        assert_eq!(
            find_url("listening on http://127.0.0.1:4321\n"),
            Some("http://127.0.0.1:4321".to_owned())
        );
        assert_eq!(
            find_url("url=\"http://127.0.0.1:4321/\" \n"),
            Some("http://127.0.0.1:4321".to_owned())
        );
    }

    #[test]
    fn half_a_line_tells_no_address() {
        for output in [
            "",
            "listening on",
            "listening on http://127.0.0.1:",
            "listening on http://127.0.0.1:43",
        ] {
            assert_eq!(find_url(output), None, "{output}");
        }
    }
}
