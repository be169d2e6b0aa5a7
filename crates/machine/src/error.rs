//! What can go wrong with a machine, one variant for each case some caller treats differently.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use protocol::message::Failure;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("find qemu-system-x86_64: it is not in PATH; install QEMU 8.2 or newer")]
    QemuMissing,
    #[error("QEMU {version} is too old: 8.2 or newer can map memory privately and read-only")]
    QemuTooOld { version: String },
    #[error("{action} {path}", path = .path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    /// The host refused something that has no path.
    #[error("{action}")]
    Host { action: &'static str, source: io::Error },
    /// What was given cannot work: a memory file of the wrong size, a disk that would shrink.
    #[error("{0}")]
    Unfit(String),
    #[error("start qemu for {directory}", directory = .directory.display())]
    Spawn { directory: PathBuf, source: io::Error },
    #[error("qemu refused `{command}`: {reason}")]
    QmpRefused { command: &'static str, reason: String },
    #[error("qemu did not answer `{command}` in time")]
    QmpSilent { command: &'static str },
    /// The process is gone, with the end of what it wrote to standard error.
    #[error("qemu ended ({status}): {stderr}")]
    Exited { status: String, stderr: String },
    #[error("the saved state did not load within {} ms: {stderr}", .waited.as_millis())]
    NotLoaded { waited: Duration, stderr: String },
    /// Another process has the file of a disk in use.
    #[error("a disk is in use by another machine: {reason}")]
    Locked { reason: String },
    #[error("the guest did not come up; its console ends: {console}")]
    NotBooted { console: String },
    #[error("no running machine is known in {directory}", directory = .directory.display())]
    NoMachine { directory: PathBuf },

    /// The deadline passed before the guest answered.
    #[error("the guest did not answer in time")]
    Silent,
    /// The channel to the guest is gone; whatever was asked for may or may not have happened.
    #[error("the connection to the guest is lost")]
    Lost,
    /// The guest gave up this one stream.
    #[error("the guest ended the stream")]
    Reset,
    /// The guest broke the rules of the channel on this one stream.
    #[error("the guest broke the protocol: {0}")]
    Misbehaved(&'static str),
    #[error("too many streams to the guest are open; try again when some have ended")]
    Busy,
    /// The guest holds an agent of before this kind of request: it was not sent.
    #[error("the agent in the guest speaks protocol {speaks}, the request is of {needs}")]
    OldAgent { speaks: u32, needs: u32 },
    /// The guest answered with a failure.
    #[error(transparent)]
    Refused(#[from] Failure),
}

impl Error {
    /// Of a lock, QEMU tells only in words.
    pub(crate) fn or_locked(self) -> Self {
        if let Self::QmpRefused { reason, .. } | Self::NotLoaded { stderr: reason, .. } = &self
            && reason.contains("Failed to get")
            && reason.contains("lock")
        {
            return Self::Locked { reason: reason.clone() };
        }
        self
    }

    pub(crate) fn host(action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Host { action, source }
    }

    pub(crate) fn file(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File { action, path: path.into(), source }
    }
}
