//! The guest kernel and its initramfs, as QEMU gets them.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::error::{Error, Result};

/// Copies that QEMU may open, whatever the permissions of the files are.
pub(crate) struct KernelFiles {
    pub(crate) kernel: File,
    pub(crate) initramfs: File,
}

impl KernelFiles {
    pub(crate) fn read(kernel: &Path, initramfs: &Path) -> Result<Self> {
        let copy = |path: &Path| {
            let copied = File::open(path).and_then(|mut file| {
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes)?;
                let mut copy = anonymous_file("kernel")?;
                copy.write_all(&bytes)?;
                copy.rewind()?;
                Ok(copy)
            });
            copied.map_err(Error::file("read", path))
        };
        Ok(Self { kernel: copy(kernel)?, initramfs: copy(initramfs)? })
    }

    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { kernel: self.kernel.try_clone()?, initramfs: self.initramfs.try_clone()? })
    }
}

/// Everybody may open it who has its number, which is only whom it is given to.
pub(crate) fn anonymous_file(name: &str) -> io::Result<File> {
    let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
    file.set_permissions(std::fs::Permissions::from_mode(0o666))?;
    Ok(file)
}
