//! The kernel's modules that the initramfs carries, loaded in the order of their names.

use std::fs::File;

use anyhow::Context;
use rustix::io::Errno;

const DIRECTORY: &str = "/modules";

pub(super) fn load_all() -> anyhow::Result<()> {
    let Ok(entries) = std::fs::read_dir(DIRECTORY) else { return Ok(()) };
    let mut paths: Vec<_> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    for path in paths {
        let file = File::open(&path).with_context(|| format!("open {}", path.display()))?;
        match rustix::system::finit_module(&file, c"", 0) {
            // Loaded already, or built into this kernel.
            Ok(()) | Err(Errno::EXIST) => {}
            // The guest may do without; what is indispensable is missed later, by name.
            Err(error) => super::report(&format!("load {}", path.display()), Err::<(), _>(error)),
        }
    }
    Ok(())
}
