//! Files behind the disks that a machine was baked with: its root disk, and volumes in its slots.
//!
//! Each file comes as a descriptor in a set of its own, numbered by QEMU: with numbers of ours, what an attach that was
//! broken off has left in a set would be opened by the next.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::qemu_args::{Access, ROOT, slots};
use crate::qmp::Qmp;

/// The root disk's block node.
pub(crate) const ROOT_NODE: &str = "disk-root";

/// A machine's own disk: a clone of the disk that belongs to the state.
#[derive(Debug)]
pub struct RootDisk {
    pub file: File,
    /// The file's length.
    pub bytes: u64,
    /// The length the state knows. The guest is told when there are more.
    pub base_bytes: u64,
    pub durability: Durability,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// A guest's flush does nothing: the disk goes with its sandbox.
    Throwaway,
    /// A guest's flush is one on the host.
    Durable,
}

/// What it holds outlives the machine, so a guest's flush is one on the host.
#[derive(Debug)]
pub struct VolumeDisk {
    /// Opened for this machine alone: its lock lasts as long as any copy of this descriptor.
    pub file: File,
    /// As the slot is.
    pub read_only: bool,
    /// The file's length.
    pub bytes: u64,
}

/// The device of a slot, by which QEMU knows it, and its nodes.
struct Slot {
    device: String,
    access: Access,
}

impl Slot {
    fn of(slot: u8) -> Result<Self> {
        let named = slots().nth(slot.into());
        let (device, access) =
            named.ok_or_else(|| Error::Unfit(format!("there is no slot {slot}")))?;
        Ok(Self { device, access })
    }

    fn node(&self) -> String {
        format!("disk-{}", self.device)
    }

    fn empty_node(&self) -> String {
        format!("empty-{}", self.device)
    }
}

/// Before the guest runs, so it needs not be told the size.
pub(crate) async fn put_root(qmp: &Qmp, disk: File, durability: Durability) -> Result<()> {
    let set = qmp.add_descriptor(disk.into()).await?;
    // Flushing waits until the file is needed elsewhere.
    let no_flush = match durability {
        Durability::Throwaway => true,
        Durability::Durable => false,
    };
    let cache = json!({ "direct": false, "no-flush": no_flush });
    let file =
        json!({ "driver": "file", "filename": set.path(), "discard": "unmap", "cache": cache });
    let node = json!({ "driver": "raw", "node-name": ROOT_NODE, "discard": "unmap", "cache": cache, "file": file });
    qmp.run("blockdev-add", node).await?;
    put_behind(qmp, ROOT, ROOT_NODE).await
}

/// After the load, whether the guest runs or not: a lock is taken at once then. When it fails, the slot is as it was.
pub(crate) async fn attach(qmp: &Qmp, number: u8, volume: VolumeDisk) -> Result<()> {
    let slot = Slot::of(number)?;
    let VolumeDisk { file, read_only, bytes } = volume;
    if read_only != (slot.access == Access::ReadOnly) {
        return Err(Error::Unfit(format!(
            "a volume cannot be put into {}: only one of them is read-only",
            slot.device
        )));
    }
    // `block_resize` truncates the file to what it is told.
    let length = file.metadata().map_err(Error::host("measure a volume"))?.len();
    if length != bytes {
        return Err(Error::Unfit(format!("a volume of {length} bytes is not one of {bytes}")));
    }
    let set = qmp.add_descriptor(file.into()).await?;
    let discard = if read_only { "ignore" } else { "unmap" };
    let file = json!({ "driver": "file", "filename": set.path(), "read-only": read_only, "discard": discard, "locking": "on" });
    let node = json!({ "driver": "raw", "node-name": slot.node(), "read-only": read_only, "discard": discard, "file": file });
    let added = qmp.run("blockdev-add", node).await;
    // QEMU has its own copy from here on, or none.
    qmp.remove_descriptor(set).await?;
    added?;
    if let Err(error) = put_behind(qmp, &slot.device, &slot.node()).await {
        remove_node(qmp, slot.node()).await?;
        return Err(error.or_locked());
    }
    // Only this tells a guest whose driver holds the device. Of a read-only disk it is refused: there the driver has to
    // take hold of the device anew.
    if !read_only && let Err(error) = resize(qmp, &slot.node(), bytes).await {
        detach(qmp, number).await?;
        return Err(error);
    }
    Ok(())
}

/// The guest must have let go of it.
pub(crate) async fn detach(qmp: &Qmp, slot: u8) -> Result<()> {
    let slot = Slot::of(slot)?;
    // A fresh one: that of the start may have become read-only meanwhile, and an empty slot's is still in use, by which
    // this ends here. To put a node behind a device that has it would end QEMU.
    let _ = remove_node(qmp, slot.empty_node()).await;
    let read_only = slot.access == Access::ReadOnly;
    let empty = json!({ "driver": "null-co", "node-name": slot.empty_node(), "size": 0, "read-zeroes": true, "read-only": read_only });
    qmp.run("blockdev-add", empty).await?;
    put_behind(qmp, &slot.device, &slot.empty_node()).await?;
    remove_node(qmp, slot.node()).await
}

async fn remove_node(qmp: &Qmp, node: String) -> Result<()> {
    qmp.run("blockdev-del", json!({ "node-name": node })).await.map(drop)
}

/// Takes the locks of all disks. From QEMU 10.0 on, a load leaves that to whatever makes the machine run; before, it has
/// done so.
pub(crate) async fn lock_all(qmp: &Qmp) -> Result<()> {
    match qmp.run("blockdev-set-active", json!({ "active": true })).await {
        Err(Error::QmpRefused { reason, .. }) if reason.contains("has not been found") => Ok(()),
        Err(error) => Err(error.or_locked()),
        Ok(_) => Ok(()),
    }
}

/// Tells the guest that the file has grown. `bytes` is the file's length.
pub(crate) async fn grow(qmp: &Qmp, slot: u8, bytes: u64) -> Result<()> {
    let node = Slot::of(slot)?.node();
    let nodes = qmp.run("query-named-block-nodes", json!({ "flat": true })).await?;
    let known = nodes.as_array().into_iter().flatten().find(|known| known["node-name"] == *node);
    let known = known.and_then(|known| known["image"]["virtual-size"].as_u64());
    match known {
        Some(known) if known <= bytes => resize(qmp, &node, bytes).await,
        Some(known) => {
            Err(Error::Unfit(format!("a volume of {known} bytes cannot shrink to {bytes}")))
        }
        None => Err(Error::Unfit("there is no volume in this slot".into())),
    }
}

pub(crate) async fn resize(qmp: &Qmp, node: &str, bytes: u64) -> Result<()> {
    qmp.run("block_resize", json!({ "node-name": node, "size": bytes })).await.map(drop)
}

async fn put_behind(qmp: &Qmp, device: &str, node: &str) -> Result<()> {
    let link: Value = json!({ "path": format!("/machine/peripheral/{device}"), "property": "drive", "value": node });
    qmp.run("qom-set", link).await.map(drop)
}

/// What was written when this is over is not waited for on the disk itself: only a flush makes it durable.
pub(crate) fn write_back(pid: u32) -> io::Result<()> {
    /// Less is not noticed in the pause of a snapshot.
    const SHORT: Duration = Duration::from_millis(5);
    const ROUNDS: usize = 5;
    let files = written_by(pid)?;
    for _ in 0..ROUNDS {
        let begun = Instant::now();
        files.iter().try_for_each(write_pages_back)?;
        if begun.elapsed() < SHORT {
            break;
        }
    }
    Ok(())
}

fn write_pages_back(file: &File) -> io::Result<()> {
    sync_pages(
        file,
        libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER,
    )
}

/// What is in the host's page cache of this file is on its way to the disk when this returns, and no more.
pub(crate) fn begin_to_write_back(file: &File) -> io::Result<()> {
    sync_pages(file, libc::SYNC_FILE_RANGE_WRITE)
}

fn sync_pages(file: &File, flags: libc::c_uint) -> io::Result<()> {
    // SAFETY: nothing of ours is read or written.
    #[expect(unsafe_code, reason = "a call without a wrapper")]
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, flags) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The files that a process has open for writing.
fn written_by(pid: u32) -> io::Result<Vec<File>> {
    let mut files: Vec<(u64, u64, File)> = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // It may have been closed since.
        let Ok(metadata) = std::fs::metadata(&path) else { continue };
        let is_written =
            std::fs::symlink_metadata(&path).is_ok_and(|link| link.mode() & 0o200 != 0);
        let (device, inode) = (metadata.dev(), metadata.ino());
        let is_known = files.iter().any(|known| (known.0, known.1) == (device, inode));
        if metadata.is_file() && is_written && !is_known {
            files.push((device, inode, File::open(&path)?));
        }
    }
    Ok(files.into_iter().map(|(_, _, file)| file).collect())
}
