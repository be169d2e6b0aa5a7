//! What guests are made of now, under names that do not change: for tests of single machines, and for looking at it.

use std::{
    fs,
    io::ErrorKind,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use crate::{Error, Layout, Result, initramfs::Initramfs, kernel::Kernel, template::Template};

/// Names kernel, initramfs and a root file system; returns the directory that has them.
pub fn name(
    layout: &Layout,
    kernel: &Kernel,
    initramfs: &Initramfs,
    template: &Template,
) -> Result<PathBuf> {
    let directory = layout.current_guest();
    fs::create_dir_all(&directory).map_err(Error::io("create", &directory))?;
    let names = [
        ("vmlinuz", &kernel.vmlinuz),
        ("initramfs", &initramfs.path),
        ("rootfs.ext4", &template.rootfs),
    ];
    for (name, target) in names {
        put_link(&directory.join(name), target)?;
    }
    Ok(directory)
}

/// What a guest boots from.
#[derive(Debug, Clone)]
pub struct CurrentGuest {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
}

/// `None`: nothing was named yet, or it is gone.
pub fn find(layout: &Layout) -> Option<CurrentGuest> {
    let directory = layout.current_guest();
    let (kernel, initramfs) = (directory.join("vmlinuz"), directory.join("initramfs"));
    (kernel.exists() && initramfs.exists()).then_some(CurrentGuest { kernel, initramfs })
}

/// Whoever looks finds the old one or the new one.
fn put_link(link: &Path, target: &Path) -> Result<()> {
    let draft = link.with_extension(format!("draft-{}", std::process::id()));
    match fs::remove_file(&draft) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("remove", draft)(error));
        }
        Ok(()) | Err(_) => {}
    }
    symlink(target, &draft).map_err(Error::io("create", &draft))?;
    fs::rename(&draft, link).map_err(Error::io("create", link))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_leads_to_what_it_was_given_last() {
        let directory = tempfile::tempdir().unwrap();
        let link = directory.path().join("vmlinuz");
        for target in ["old", "new"] {
            fs::write(directory.path().join(target), target).unwrap();
            put_link(&link, &directory.path().join(target)).unwrap();
        }
        assert_eq!(fs::read_to_string(&link).unwrap(), "new");
        assert_eq!(directory.path().read_dir().unwrap().count(), 3);
    }
}
