//! Finds the kernel and the root disk that Atoll's own machines were made of.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};

/// The same files that Atoll's machines are made of.
pub(crate) struct Parts {
    pub(crate) kernel: PathBuf,
    /// Uncompressed, in the order in which they are loaded.
    pub(crate) modules: Vec<PathBuf>,
    pub(crate) rootfs: PathBuf,
}

impl Parts {
    /// In a server's cache directory.
    pub(crate) fn find(cache: &Path, rootfs: PathBuf) -> anyhow::Result<Self> {
        let current = cache.join("kernel/current");
        let digest =
            fs::read_to_string(&current).with_context(|| format!("read {}", current.display()))?;
        let directory = cache.join("kernel").join(digest.trim());
        let mut modules = fs::read_dir(&directory)
            .with_context(|| format!("list {}", directory.display()))?
            .map(|entry| entry.map(|entry| entry.path()))
            .collect::<io::Result<Vec<_>>>()?;
        modules.retain(|path| path.extension().is_some_and(|extension| extension == "ko"));
        modules.sort();
        ensure!(rootfs.is_file(), "find {}", rootfs.display());
        Ok(Self { kernel: directory.join("vmlinuz"), modules, rootfs })
    }
}
