//! Kernels of the interpreter. Each session has a process of its own, made of the agent's own program but outside of it
//! (`atoll-agent kernel`): it runs the language's kernel beside itself, speaks Jupyter's protocol with it, and answers
//! the calls that the agent hands over. So nothing that a kernel says is ever read by the first process of the guest,
//! and whatever becomes of the machine, the two ends of that conversation stay together.

mod cell;
pub(crate) mod channel;
mod jupyter;
mod launch;
mod session;
mod specifications;
mod zmtp;

use std::path::{Path, PathBuf};

pub(crate) use launch::{RENEW, script};

/// How the process of a session ends, where it is not killed.
pub(crate) mod exit {
    /// The kernel never began; whoever asked was told why.
    pub(crate) const NOT_BEGUN: i32 = 70;
    /// The kernel had to be given up: another is due.
    pub(crate) const RESTART: i32 = 71;
    /// The kernel has ended.
    pub(crate) const DEAD: i32 = 72;
    /// The agent wants it no longer.
    pub(crate) const OVER: i32 = 0;
}

/// Where a session begins unless somebody wants it elsewhere.
pub(crate) const HOME: &[u8] = b"/root";

/// The first argument of the agent's program as such a process.
pub(crate) const ARGUMENT: &str = "kernel";

/// Serves one session; calls come on standard input. Returns the code to exit with.
pub fn run() -> i32 {
    match session::run() {
        Ok(code) => code,
        Err(error) => {
            crate::boot::report("run a kernel", Err::<(), _>(error));
            exit::DEAD
        }
    }
}

/// Without a process that would have to look: whether ipykernel lies where Python's packages do.
pub(crate) fn may_have_python() -> bool {
    let mut places = vec![PathBuf::from("/usr/lib/python3/dist-packages")];
    for base in ["/usr/lib", "/usr/local/lib"] {
        let versions = std::fs::read_dir(base).into_iter().flatten().flatten();
        let versions = versions.map(|entry| entry.path()).filter(|path| {
            path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"))
        });
        for version in versions {
            places.extend(["dist-packages", "site-packages"].map(|name| version.join(name)));
        }
    }
    places.iter().any(|place| place.join("ipykernel").is_dir())
}

/// Where the kernel of the session with this process has its sockets. In memory where possible: nothing is written
/// there while file systems stand still.
pub(crate) fn directory(process: u32) -> PathBuf {
    let run = Path::new("/run");
    let base = if run.is_dir() { run.to_owned() } else { std::env::temp_dir() };
    base.join(format!("atoll-kernel-{process}"))
}
