//! Saving a guest that runs on from a saved one, by hand: device state, changed pages, disk.

use std::{
    fs::{self, File},
    ops::Range,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::atomic::AtomicU32,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use serde_json::json;

use super::{Bake, Guest, clone_file};

const PAGE: u64 = 4096;
/// A memory file rewritten in smaller pieces takes long to be cloned the next time.
const BLOCK: u64 = 64 << 10;

pub(crate) struct Save {
    /// Guests go on from here as they do from a bake.
    pub(crate) bake: Bake,
    /// How long the guest stood still.
    pub(crate) stood: Duration,
}

impl Guest {
    /// `base` is what the guest went on from. `directory` must not exist.
    pub(crate) fn save(&mut self, base: &Bake, directory: PathBuf) -> anyhow::Result<Save> {
        fs::create_dir(&directory).with_context(|| format!("make {}", directory.display()))?;
        let memory = directory.join("memory");
        clone_file(&base.directory.join("memory"), &memory)?;
        self.run("sync")?;
        let disk = self.directory.as_ref().context("find the guest's disk")?.join("disk");
        File::open(&disk)?.sync_data()?;

        let start = Instant::now();
        self.machine.qmp.call("stop", &json!({}))?;
        let state = json!({"filename": directory.join("state"), "live": false});
        self.machine.qmp.call("xen-save-devices-state", &state)?;
        copy_changed(self.pid(), base.shape.memory_mib << 20, &memory)?;
        clone_file(&disk, &directory.join("disk"))?;
        self.machine.qmp.call("cont", &json!({}))?;
        let stood = start.elapsed();
        let bake = Bake {
            directory,
            accelerator: base.accelerator.clone(),
            shape: base.shape,
            disk_bytes: base.disk_bytes,
            kernel: base.kernel.clone(),
            prepared: AtomicU32::new(0),
        };
        Ok(Save { bake, stood })
    }
}

/// Pages that are no longer the file's, over a clone of it.
fn copy_changed(pid: u32, length: u64, target: &std::path::Path) -> anyhow::Result<()> {
    let address = address_of_memory(pid, length)?;
    let mut entries = vec![0; (length / PAGE * 8) as usize];
    File::open(format!("/proc/{pid}/pagemap"))?.read_exact_at(&mut entries, address / PAGE * 8)?;
    let source = File::open(format!("/proc/{pid}/mem"))?;
    let target = File::options().write(true).open(target)?;
    let mut bytes = Vec::new();
    for range in changed(&entries) {
        bytes.resize((range.end - range.start) as usize, 0);
        source.read_exact_at(&mut bytes, address + range.start)?;
        target.write_all_at(&bytes, range.start)?;
    }
    Ok(())
}

fn address_of_memory(pid: u32, length: u64) -> anyhow::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    for line in maps.lines() {
        let Some((start, end)) = line.split(' ').next().and_then(|range| range.split_once('-'))
        else {
            continue;
        };
        let (start, end) = (u64::from_str_radix(start, 16)?, u64::from_str_radix(end, 16)?);
        if end - start == length && line.contains(" rw-p ") {
            return Ok(start);
        }
    }
    ensure!(false, "find the guest's memory in process {pid}");
    Ok(0)
}

/// Blocks with a changed page: present and not of a file, or swapped out. Of entries of `/proc/PID/pagemap`.
fn changed(entries: &[u8]) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for (block, entries) in (0..).zip(entries.chunks((BLOCK / PAGE * 8) as usize)) {
        let is_changed = |entry: &[u8]| {
            // The highest bits: present, swapped, of a file.
            let bits = entry.last().unwrap_or(&0) >> 5;
            bits & 0b010 != 0 || bits & 0b101 == 0b100
        };
        if entries.chunks(8).any(is_changed) {
            let (start, end) = (block * BLOCK, block * BLOCK + entries.len() as u64 / 8 * PAGE);
            match ranges.last_mut() {
                Some(last) if last.end == start => last.end = end,
                Some(_) | None => ranges.push(start..end),
            }
        }
    }
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_with_a_changed_page_are_joined() {
        let mut entries = vec![0_u8; 64 * 8];
        let mut set = |page: usize, bits: u8| entries[page * 8 + 7] = bits << 5;
        set(1, 0b100);
        set(17, 0b010);
        set(33, 0b101);
        set(63, 0b110);
        assert_eq!(changed(&entries), [0..2 * BLOCK, 3 * BLOCK..4 * BLOCK]);
    }
}
