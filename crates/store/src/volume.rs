//! Volumes: ext4 disks that outlive sandboxes. Their content is the guests', so nothing here trusts it.

use std::{
    fs::File,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
};

use api::VolumeId;

use crate::{Error, Layout, Result, clone::clone_file, draft, draft::Draft, ext4, layout, pool};

pub use crate::ext4::Recovery;

/// ext4 with a journal needs so much.
pub const MINIMUM_BYTES: u64 = 16 << 20;

const MIB: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    ReadOnly,
    Writable,
}

fn disk(layout: &Layout, id: &VolumeId) -> PathBuf {
    layout.volume(id).join("disk")
}

/// For `map_err` of what touched the disk of `id`.
fn failed(doing: &'static str, path: PathBuf, id: &VolumeId) -> impl FnOnce(io::Error) -> Error {
    let id = *id;
    move |error| {
        if error.kind() == ErrorKind::NotFound {
            not_found(&id)
        } else {
            Error::io(doing, path)(error)
        }
    }
}

fn not_found(id: &VolumeId) -> Error {
    Error::NotFound { what: "volume", id: id.to_string() }
}

fn new_draft(layout: &Layout) -> Result<Draft> {
    let draft = Draft::create(&layout.data_temporary(), "volume")?;
    draft.keep_others_out()?;
    Ok(draft)
}

/// Sparse and empty, with a file system. Takes milliseconds, whatever the size.
pub fn create(layout: &Layout, id: &VolumeId, bytes: u64) -> Result<()> {
    if bytes < MINIMUM_BYTES {
        let (wanted_mb, minimum_mb) = (bytes / MIB, MINIMUM_BYTES / MIB);
        return Err(Error::DiskTooSmall { wanted_mb, minimum_mb });
    }
    let draft = new_draft(layout)?;
    ext4::make_volume(&draft.path().join("disk"), bytes)?;
    draft.publish_new(&layout.volume(id))
}

/// `to` becomes equal to `from`, which nobody may be writing. It gets a UUID of its own.
pub fn clone(layout: &Layout, from: &VolumeId, to: &VolumeId) -> Result<()> {
    let source = disk(layout, from);
    if !source.exists() {
        return Err(not_found(from));
    }
    let draft = new_draft(layout)?;
    let copy = draft.path().join("disk");
    clone_file(&source, &copy)?;
    ext4::renew_identity(&copy)?;
    draft.publish_new(&layout.volume(to))
}

/// For the machine that gets it as a descriptor.
pub fn open(layout: &Layout, id: &VolumeId, access: Access) -> Result<File> {
    let path = disk(layout, id);
    let open = File::options().read(true).write(access == Access::Writable).open(&path);
    open.map_err(failed("open", path, id))
}

/// Its size as the guest sees it.
pub fn bytes(layout: &Layout, id: &VolumeId) -> Result<u64> {
    let path = disk(layout, id);
    Ok(path.metadata().map_err(failed("stat", path, id))?.len())
}

/// What it takes on the host's disk. Blocks that clones share count for each.
pub fn used_bytes(layout: &Layout, id: &VolumeId) -> Result<u64> {
    let path = disk(layout, id);
    if !path.exists() {
        return Err(not_found(id));
    }
    pool::allocated_bytes(&path)
}

/// Makes the disk longer; its file system stays as it is. Also while it is attached, before the machine is told.
pub fn grow(layout: &Layout, id: &VolumeId, to_bytes: u64) -> Result<()> {
    let path = disk(layout, id);
    let file = open(layout, id, Access::Writable)?;
    let has_bytes = file.metadata().map_err(Error::io("stat", &path))?.len();
    if to_bytes < has_bytes {
        return Err(Error::WouldShrink { has_bytes, wanted_bytes: to_bytes });
    }
    file.set_len(to_bytes).map_err(Error::io("set the size of", &path))?;
    file.sync_all().map_err(Error::io("sync", path))
}

/// Makes the disk longer with its file system. Nobody may have it open. An ext4 that is damaged beyond automatic repair
/// is refused; a disk that is no ext4 only becomes longer.
pub fn grow_offline(layout: &Layout, id: &VolumeId, to_bytes: u64) -> Result<()> {
    let has_bytes = bytes(layout, id)?;
    if to_bytes < has_bytes {
        return Err(Error::WouldShrink { has_bytes, wanted_bytes: to_bytes });
    }
    let path = disk(layout, id);
    if !ext4::is_ext4(&path)? {
        return grow(layout, id, to_bytes);
    }
    // resize2fs keeps no journal: killed in the middle of its work, it leaves a broken file system. Hence on a clone.
    let draft = new_draft(layout)?;
    let copy = draft.path().join("disk");
    clone_file(&path, &copy)?;
    if let Recovery::Damaged { report: reason } = ext4::check_and_repair(&copy)? {
        return Err(Error::Unusable { what: "volume", id: id.to_string(), reason });
    }
    ext4::grow(&copy, to_bytes)?;
    draft.publish_file("disk", &path)
}

/// After a machine that had it attached is dead: replays the journal and repairs what can be repaired without a
/// decision, where the file system says that it was not unmounted. Costs a read where it was.
pub fn recover(layout: &Layout, id: &VolumeId) -> Result<Recovery> {
    let path = disk(layout, id);
    if !path.exists() {
        return Err(not_found(id));
    }
    ext4::recover(&path)
}

/// For ever; also twice.
pub fn remove(layout: &Layout, id: &VolumeId) -> Result<()> {
    draft::discard(&layout.volume(id), &layout.data_temporary())
}

/// All that are published.
pub fn list(layout: &Layout) -> Result<Vec<VolumeId>> {
    layout::ids_in(&layout.volumes())
}

/// Those that are not among `known`, told in the log. They stay: what a user wrote is not thrown away for a row that
/// is missing.
pub fn orphans(layout: &Layout, known: &[VolumeId]) -> Result<Vec<VolumeId>> {
    let orphans: Vec<_> = list(layout)?.into_iter().filter(|id| !known.contains(id)).collect();
    for id in &orphans {
        let path = layout.volume(id);
        tracing::warn!(volume = %id, path = %path.display(), "no row names this volume; it is kept");
    }
    Ok(orphans)
}

/// Where its bytes are. Others than [`open`] need it only to clone or to flush them.
pub fn path(layout: &Layout, id: &VolumeId) -> PathBuf {
    disk(layout, id)
}

/// The root disk of a machine, of which nobody knows yet; gone when dropped.
#[derive(Debug)]
pub struct RootDraft {
    draft: Draft,
    file: File,
}

/// A clone of `source`, as long as asked for.
pub fn draft_root(layout: &Layout, source: &Path, bytes: u64) -> Result<RootDraft> {
    let draft = new_draft(layout)?;
    let copy = draft.path().join("disk");
    clone_file(source, &copy)?;
    let open = File::options().read(true).write(true).open(&copy);
    let file = open.map_err(Error::io("open", &copy))?;
    file.set_len(bytes).map_err(Error::io("set the size of", copy))?;
    Ok(RootDraft { draft, file })
}

impl RootDraft {
    /// It is on the disk then, at once in place of what was there.
    pub fn publish(self, layout: &Layout, id: &VolumeId) -> Result<File> {
        let Self { draft, file } = self;
        fault::point!("machine.disk_publishing", Error::io("publish", disk(layout, id)));
        if layout.volume(id).exists() {
            draft.publish_file("disk", &disk(layout, id))?;
        } else {
            draft.publish_new(&layout.volume(id))?;
        }
        fault::point!("machine.disk_published");
        Ok(file)
    }
}

/// [`draft_root`], published.
pub fn put_root(layout: &Layout, id: &VolumeId, source: &Path, bytes: u64) -> Result<File> {
    draft_root(layout, source, bytes)?.publish(layout, id)
}
