//! Files that QEMU reads while it starts, beside its program and libraries.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// Of the machine, of a kernel that is booted directly, and of what QEMU may put in its place. Not every release has all.
const FIRMWARE: [&str; 5] =
    ["bios-256k.bin", "kvmvapic.bin", "linuxboot_dma.bin", "linuxboot.bin", "pvh.bin"];
/// Distributions that build the emulator as a module put it in one of these.
const MODULES: [&str; 3] = ["/usr/lib/x86_64-linux-gnu/qemu", "/usr/lib64/qemu", "/usr/lib/qemu"];

/// # Errors
/// QEMU does not run, or has no firmware for the machine.
pub(crate) fn data(binary: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new(binary).args(["-L", "help"]).stdin(Stdio::null()).output();
    let output = output.map_err(Error::file("run", binary))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let first = |name: &&str| {
        text.lines().map(|line| Path::new(line.trim()).join(name)).find(|path| path.is_file())
    };
    let mut files: Vec<PathBuf> = FIRMWARE.iter().filter_map(first).collect();
    if files.is_empty() {
        let missing = std::io::Error::from(std::io::ErrorKind::NotFound);
        return Err(Error::file("find the firmware of", binary)(missing));
    }
    for directory in MODULES {
        let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
        files.extend(entries.map(|entry| entry.path()).filter(|path| is_accelerator(path)));
    }
    Ok(files)
}

fn is_accelerator(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    name.starts_with("accel-") && name.ends_with(".so") && !name.contains("qtest")
}
