//! What can go wrong with bytes on disk, split by what callers do about it.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

pub type Result<T, E = Error> = std::result::Result<T, E>;

/// How tools say it.
pub(crate) const NO_SPACE: &str = "No space left on device";

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{doing} {path}", path = .path.display())]
    Io { doing: &'static str, path: PathBuf, source: io::Error },
    #[error("start `{tool}`; is it installed? `make setup` installs it")]
    ToolMissing { tool: String, source: io::Error },
    #[error("`{tool}` failed ({status}): {output}")]
    ToolFailed { tool: String, status: String, output: String },
    #[error("`{tool}` was ended after {} s without a result", .after.as_secs())]
    ToolTimedOut { tool: String, after: Duration },
    /// The caller's recipe; every problem is named.
    #[error("the recipe cannot be used: {}", .problems.join("; "))]
    InvalidRecipe { problems: Vec<String> },
    /// The caller's archive.
    #[error("the archive cannot be used: {reason}")]
    InvalidArchive { reason: String },
    /// The caller's wish for a disk.
    #[error("a disk of {wanted_mb} MiB is too small: at least {minimum_mb} MiB are needed")]
    DiskTooSmall { wanted_mb: u64, minimum_mb: u64 },
    #[error("there is no {what} `{id}`")]
    NotFound { what: &'static str, id: String },
    #[error("waited {} s for another process that holds {path}", .after.as_secs(), path = .path.display())]
    Locked { path: PathBuf, after: Duration },
    #[error("{path} is damaged ({reason}); delete it to have it built again", path = .path.display())]
    Damaged { path: PathBuf, reason: String },
    /// A snapshot, a hibernated machine or a volume. It stays where it is.
    #[error("the {what} `{id}` cannot be used: {reason}")]
    Unusable { what: &'static str, id: String, reason: String },
    /// The caller's wish for a volume.
    #[error("a volume of {has_bytes} bytes cannot be made smaller, to {wanted_bytes}")]
    WouldShrink { has_bytes: u64, wanted_bytes: u64 },
    #[error("the guest kernel's package lacks {what}")]
    KernelIncomplete { what: String },
}

impl Error {
    /// For `map_err`: names the step and the file.
    pub(crate) fn io(
        doing: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { doing, path, source }
    }

    pub(crate) fn system(
        doing: &'static str,
        path: &Path,
    ) -> impl FnOnce(rustix::io::Errno) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source: source.into() }
    }

    pub(crate) fn archive(reason: impl Into<String>) -> Self {
        Self::InvalidArchive { reason: reason.into() }
    }

    /// The disk is full, whatever step met it.
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Io { source, .. } => matches!(
                source.kind(),
                io::ErrorKind::StorageFull
                    | io::ErrorKind::QuotaExceeded
                    | io::ErrorKind::FileTooLarge
            ),
            Self::ToolFailed { output, .. } => output.contains(NO_SPACE),
            Self::ToolMissing { .. }
            | Self::ToolTimedOut { .. }
            | Self::InvalidRecipe { .. }
            | Self::InvalidArchive { .. }
            | Self::DiskTooSmall { .. }
            | Self::NotFound { .. }
            | Self::Locked { .. }
            | Self::Damaged { .. }
            | Self::Unusable { .. }
            | Self::WouldShrink { .. }
            | Self::KernelIncomplete { .. } => false,
        }
    }
}
