//! Where everything lies. The only builder of paths below the data and the cache directory; names get in only as
//! types that cannot hold a separator.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    str::FromStr,
};

use api::{SandboxId, SnapshotId, VolumeId};

use crate::{Digest, Error, Result};

/// `data` belongs to one server; `cache` may be shared by several on one host. Both should lie on one file system,
/// else nothing can be cloned between them without copying.
#[derive(Debug, Clone)]
pub struct Layout {
    data: PathBuf,
    cache: PathBuf,
}

impl Layout {
    /// Makes nothing: to look at what there is.
    pub fn of(data: impl Into<PathBuf>, cache: impl Into<PathBuf>) -> Self {
        Self { data: data.into(), cache: cache.into() }
    }

    /// Makes the directories that everything else expects.
    pub fn create(data: impl Into<PathBuf>, cache: impl Into<PathBuf>) -> Result<Self> {
        let layout = Self::of(data, cache);
        for directory in [
            layout.data.clone(),
            layout.sandboxes(),
            layout.machines(),
            layout.snapshots(),
            layout.volumes(),
            layout.data_temporary(),
            layout.kernels(),
            layout.initramfs_directory(),
            layout.templates(),
            layout.bakes(),
            layout.packages(),
            layout.cache_temporary(),
            layout.locks(),
        ] {
            std::fs::create_dir_all(&directory).map_err(Error::io("create", &directory))?;
        }
        Ok(layout)
    }

    pub fn data(&self) -> &Path {
        &self.data
    }

    pub fn cache(&self) -> &Path {
        &self.cache
    }

    pub fn sandboxes(&self) -> PathBuf {
        self.data.join("sandboxes")
    }

    pub fn sandbox(&self, id: &SandboxId) -> PathBuf {
        self.sandboxes().join(id.to_string())
    }

    pub(crate) fn snapshots(&self) -> PathBuf {
        self.data.join("snapshots")
    }

    pub(crate) fn snapshot(&self, id: &SnapshotId) -> PathBuf {
        self.snapshots().join(id.to_string())
    }

    pub(crate) fn volumes(&self) -> PathBuf {
        self.data.join("volumes")
    }

    pub(crate) fn volume(&self, id: &VolumeId) -> PathBuf {
        self.volumes().join(id.to_string())
    }

    /// Which start of the host the rows of running sandboxes are from.
    pub fn boot_id(&self) -> PathBuf {
        self.data.join("boot-id")
    }

    pub(crate) fn machines(&self) -> PathBuf {
        self.data.join("machines")
    }

    /// Where the machine in this slot of the host has its sockets.
    pub fn machine(&self, slot: u16) -> PathBuf {
        self.machines().join(slot.to_string())
    }

    /// Which accelerator works on this host, once that was found out.
    pub fn accelerator(&self) -> PathBuf {
        self.cache.join("accelerator")
    }

    /// Half-made things that end in `data`; on its file system, so that a rename can publish them.
    pub fn data_temporary(&self) -> PathBuf {
        self.data.join("temporary")
    }

    pub fn cache_temporary(&self) -> PathBuf {
        self.cache.join("temporary")
    }

    pub(crate) fn locks(&self) -> PathBuf {
        self.cache.join("locks")
    }

    /// `kind` is a word of ours, never text from outside.
    pub(crate) fn lock(&self, kind: &'static str, name: Option<&Digest>) -> PathBuf {
        self.locks().join(match name {
            Some(name) => format!("{kind}-{name}"),
            None => kind.to_owned(),
        })
    }

    pub(crate) fn kernels(&self) -> PathBuf {
        self.cache.join("kernel")
    }

    pub(crate) fn kernel(&self, digest: &Digest) -> PathBuf {
        self.kernels().join(digest.as_str())
    }

    /// Names the digest of the kernel in use.
    pub(crate) fn current_kernel(&self) -> PathBuf {
        self.kernels().join("current")
    }

    pub(crate) fn initramfs_directory(&self) -> PathBuf {
        self.cache.join("initramfs")
    }

    pub(crate) fn initramfs(&self, digest: &Digest) -> PathBuf {
        self.initramfs_directory().join(digest.as_str())
    }

    pub(crate) fn templates(&self) -> PathBuf {
        self.cache.join("templates")
    }

    pub(crate) fn template(&self, digest: &Digest) -> PathBuf {
        self.templates().join(digest.as_str())
    }

    pub(crate) fn bakes(&self) -> PathBuf {
        self.cache.join("bakes")
    }

    pub(crate) fn bake(&self, key: &Digest) -> PathBuf {
        self.bakes().join(key.as_str())
    }

    pub(crate) fn current_guest(&self) -> PathBuf {
        self.cache.join("guest")
    }

    /// Debian packages as downloaded.
    pub(crate) fn packages(&self) -> PathBuf {
        self.cache.join("apt")
    }
}

/// Things of this directory. Names that are no ids are not ours and are left out.
pub(crate) fn ids_in<Id: FromStr>(directory: &Path) -> Result<Vec<Id>> {
    let mut ids = Vec::new();
    for entry in directory.read_dir().map_err(Error::io("list", directory))? {
        match entry {
            Ok(entry) => {
                ids.extend(entry.file_name().to_str().and_then(|name| name.parse::<Id>().ok()));
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io("list", directory)(error)),
        }
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use std::path::Component;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_name_leaves_its_directory(text in "\\PC{0,80}|[0-9a-f/.]{60,70}|[0-9a-f-]{30,40}") {
            let layout = Layout { data: "/d".into(), cache: "/c".into() };
            let mut paths = Vec::new();
            if let Ok(digest) = text.parse::<Digest>() {
                paths.extend([
                    (layout.template(&digest), layout.templates()),
                    (layout.bake(&digest), layout.bakes()),
                    (layout.kernel(&digest), layout.kernels()),
                    (layout.initramfs(&digest), layout.initramfs_directory()),
                    (layout.lock("template", Some(&digest)), layout.locks()),
                ]);
            }
            if let Ok(id) = text.parse::<SandboxId>() {
                paths.push((layout.sandbox(&id), layout.sandboxes()));
            }
            if let Ok(id) = text.parse::<SnapshotId>() {
                paths.push((layout.snapshot(&id), layout.snapshots()));
            }
            if let Ok(id) = text.parse::<VolumeId>() {
                paths.push((layout.volume(&id), layout.volumes()));
            }
            for (path, directory) in paths {
                prop_assert_eq!(path.parent(), Some(directory.as_path()));
                prop_assert!(path.components().all(|part| !matches!(part, Component::ParentDir | Component::CurDir)));
            }
        }
    }
}
