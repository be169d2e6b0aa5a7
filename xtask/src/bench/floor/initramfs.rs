//! Packs the floor's guest and the kernel's modules into an initramfs (cpio, "newc").

use std::{fs, io::Write, path::Path};

use anyhow::Context;

use super::Parts;

pub(super) fn write(target: &Path, guest: &Path, parts: &Parts) -> anyhow::Result<()> {
    let mut archive = Archive { bytes: Vec::new(), entries: 0 };
    for directory in ["dev", "modules", "proc", "root", "sys"] {
        archive.add(directory, 0o040_755, &[]);
    }
    archive.add(
        "init",
        0o100_755,
        &fs::read(guest).with_context(|| format!("read {}", guest.display()))?,
    );
    for (index, module) in parts.modules.iter().enumerate() {
        let content = fs::read(module).with_context(|| format!("read {}", module.display()))?;
        archive.add(&format!("modules/{index:02}.ko"), 0o100_644, &content);
    }
    archive.add("TRAILER!!!", 0, &[]);
    fs::write(target, archive.bytes).with_context(|| format!("write {}", target.display()))
}

struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let fields = [
            self.entries,
            mode,
            0,
            0,
            1,
            0,
            content.len() as u32,
            0,
            0,
            0,
            0,
            name.len() as u32 + 1,
            0,
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            write!(self.bytes, "{field:08x}").expect("memory takes every write");
        }
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}
