//! From the initramfs to the root disk.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::Context;
use rustix::mount::{MountFlags, mount, mount_move};

pub(crate) fn boot() -> anyhow::Result<()> {
    for (kind, target) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        fs::create_dir_all(target).with_context(|| format!("make {target}"))?;
        mount(kind, target, kind, MountFlags::empty(), None)
            .with_context(|| format!("mount {target}"))?;
    }
    load_modules().context("load the kernel modules")?;
    enter_root_disk().context("enter the root disk")
}

/// In the order of their names, which is the order of their needs.
fn load_modules() -> anyhow::Result<()> {
    let mut modules: Vec<PathBuf> = fs::read_dir("/modules")?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<io::Result<_>>()?;
    modules.sort();
    for module in modules {
        let file = fs::File::open(&module)?;
        match rustix::system::finit_module(&file, c"", 0) {
            Ok(()) | Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error).with_context(|| format!("load {}", module.display())),
        }
    }
    Ok(())
}

fn enter_root_disk() -> anyhow::Result<()> {
    let root = Path::new("/root");
    fs::create_dir_all(root)?;
    mount("/dev/vda", root, "ext4", MountFlags::empty(), None).context("mount /dev/vda")?;
    for name in ["dev", "proc", "sys"] {
        mount_move(Path::new("/").join(name), root.join(name))
            .with_context(|| format!("move /{name}"))?;
    }
    rustix::process::chdir(root)?;
    mount_move(".", "/").context("move the root")?;
    rustix::process::chroot(".").context("change the root")?;
    rustix::process::chdir("/")?;
    Ok(())
}

/// To the console.
pub(crate) fn say(text: &str) {
    if let Ok(mut console) = fs::OpenOptions::new().write(true).open("/dev/console") {
        let _ = writeln!(console, "{text}");
    }
}
