//! ext4 images in files, through Debian's e2fsprogs. Images are sparse; every tool has a deadline.

use std::{
    fs::{File, OpenOptions},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use crate::{Error, Result, error::NO_SPACE, tool::Tool};

const MAKE_DEADLINE: Duration = Duration::from_secs(600);
/// Nothing is written in proportion to the size.
const MAKE_VOLUME_DEADLINE: Duration = Duration::from_secs(30);
const CHECK_DEADLINE: Duration = Duration::from_secs(600);
const RESIZE_DEADLINE: Duration = Duration::from_secs(900);
const ASK_DEADLINE: Duration = Duration::from_secs(60);

const MIB: u64 = 1 << 20;
/// Room that ext4 itself and a little work need beside the files.
const SPARE_MB: u64 = 64;

/// Makes the file `image`. Its content is that of `tree`, with owners, modes, links and capabilities.
pub fn make(image: &Path, size_mb: u64, label: &str, tree: Option<&Path>) -> Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(image)
        .map_err(Error::io("create", image))?;
    file.set_len(size_mb * MIB).map_err(Error::io("set the size of", image))?;
    drop(file);
    let mut tool = Tool::new("mke2fs", MAKE_DEADLINE)
        .args(["-q", "-F", "-t", "ext4", "-m", "1", "-L", label])
        // The file is new, so its blocks read as zeroes: nothing has to be written to make them so, here or later by
        // the guest.
        .args(["-E", "assume_storage_prezeroed=1"]);
    tool = match tree {
        Some(tree) => {
            let tree = std::path::absolute(tree).map_err(Error::io("find", tree))?;
            tool.arg("-d").arg(tree).on_image_from_files(image)?
        }
        None => tool.on_image(image)?,
    };
    tool.run()?;
    Ok(())
}

/// Makes the file `image` of so many bytes, without any files in it. It can grow to 1 TiB at least while it is mounted,
/// hence blocks of 4 KiB also where ext4 would take smaller ones. The checksums' seed of its own lets
/// [`renew_identity`] change the UUID without rewriting them.
pub(crate) fn make_volume(image: &Path, bytes: u64) -> Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(image)
        .map_err(Error::io("create", image))?;
    file.set_len(bytes).map_err(Error::io("set the size of", image))?;
    drop(file);
    // A thousand times its size is what it can grow to by itself.
    let grows_to = if bytes < 1 << 30 { ",resize=268435456" } else { "" };
    Tool::new("mke2fs", MAKE_VOLUME_DEADLINE)
        .args(["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0", "-O", "metadata_csum_seed", "-E"])
        .arg(format!("assume_storage_prezeroed=1,nodiscard{grows_to}"))
        .arg(image)
        .run()?;
    Ok(())
}

/// A UUID of its own for a clone. Left as it is where that would take more than a moment.
pub(crate) fn renew_identity(image: &Path) -> Result<()> {
    let Some(superblock) = Superblock::read(image)? else { return Ok(()) };
    if superblock.is_clean() && superblock.has_checksum_seed() {
        Tool::new("tune2fs", ASK_DEADLINE).args(["-U", "random"]).on_image(image)?.run()?;
    }
    Ok(())
}

pub(crate) fn is_ext4(image: &Path) -> Result<bool> {
    Ok(Superblock::read(image)?.is_some())
}

/// What [`recover`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recovery {
    /// It was unmounted; nothing was done.
    Clean,
    /// The journal was replayed, or small errors were corrected.
    Recovered,
    /// What is wrong needs a person: the file system was left as far as `e2fsck -p` came.
    Damaged { report: String },
    /// The guest put something else there.
    NotExt4,
}

/// Brings a file system that was not unmounted into order.
pub(crate) fn recover(image: &Path) -> Result<Recovery> {
    match Superblock::read(image)? {
        None => Ok(Recovery::NotExt4),
        Some(superblock) if superblock.is_clean() => Ok(Recovery::Clean),
        Some(_) => repair(image, &["-p"]),
    }
}

fn repair(image: &Path, options: &[&str]) -> Result<Recovery> {
    let tool = Tool::new("e2fsck", CHECK_DEADLINE).args(options).on_image(image)?;
    // 0: in order. Bits 1 and 2: corrected, such as by replaying the journal. All others: could not.
    let done = tool.accept(&[0, 1, 2, 3]).run();
    let file = File::open(image).map_err(Error::io("open", image))?;
    file.sync_all().map_err(Error::io("sync", image))?;
    match done {
        Ok(_) => Ok(Recovery::Recovered),
        Err(Error::ToolFailed { output, .. }) if !output.contains(NO_SPACE) => {
            Ok(Recovery::Damaged { report: output })
        }
        Err(error) => Err(error),
    }
}

/// As [`recover`], however clean it looks.
pub(crate) fn check_and_repair(image: &Path) -> Result<Recovery> {
    repair(image, &["-f", "-p"])
}

/// Makes the file and the file system in it larger; nothing may use them, and it must have been checked just before.
pub(crate) fn grow(image: &Path, to_bytes: u64) -> Result<()> {
    let file = File::options().write(true).open(image).map_err(Error::io("open", image))?;
    file.set_len(to_bytes).map_err(Error::io("set the size of", image))?;
    Tool::new("resize2fs", RESIZE_DEADLINE).on_image(image)?.run()?;
    Ok(())
}

/// What a superblock says about itself; the guest wrote it.
struct Superblock {
    state: u16,
    incompatible: u32,
}

impl Superblock {
    const POSITION: u64 = 1024;
    const LENGTH: usize = 1024;

    /// `None` when it is none of ext4.
    fn read(image: &Path) -> Result<Option<Self>> {
        use std::os::unix::fs::FileExt;
        let file = File::open(image).map_err(Error::io("open", image))?;
        let mut bytes = [0; Self::LENGTH];
        match file.read_exact_at(&mut bytes, Self::POSITION) {
            Ok(()) => Ok(Self::parse(&bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(None),
            Err(error) => Err(Error::io("read", image)(error)),
        }
    }

    fn parse(bytes: &[u8; Self::LENGTH]) -> Option<Self> {
        let u16_at = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        const MAGIC: u16 = 0xef53;
        (u16_at(0x38) == MAGIC).then(|| Self { state: u16_at(0x3a), incompatible: u32_at(0x60) })
    }

    /// Unmounted, without an error noted, without anything in the journal.
    fn is_clean(&self) -> bool {
        const UNMOUNTED: u16 = 0x1;
        const NEEDS_RECOVERY: u32 = 0x4;
        self.state == UNMOUNTED && self.incompatible & NEEDS_RECOVERY == 0
    }

    fn has_checksum_seed(&self) -> bool {
        const CHECKSUM_SEED: u32 = 0x2000;
        self.incompatible & CHECKSUM_SEED != 0
    }
}

/// An error unless the file system is clean and consistent.
pub fn check(image: &Path) -> Result<()> {
    Tool::new("e2fsck", CHECK_DEADLINE).args(["-f", "-n"]).on_image(image)?.run()?;
    Ok(())
}

/// The smallest disk that holds the files of `image`, in MiB, with a little room.
pub fn minimum_mb(image: &Path) -> Result<u64> {
    let mut blocks = None;
    Tool::new("resize2fs", ASK_DEADLINE).arg("-P").on_image(image)?.run_with(&mut |line| {
        if let Some(number) = line.strip_prefix("Estimated minimum size of the filesystem:") {
            blocks = number.trim().parse::<u64>().ok();
        }
    })?;
    let blocks = blocks.ok_or_else(|| damaged(image, "resize2fs did not tell its minimum"))?;
    let listing = Tool::new("dumpe2fs", ASK_DEADLINE).arg("-h").on_image(image)?;
    let mut block_size = None;
    listing.run_with(&mut |line| {
        if let Some(size) = line.strip_prefix("Block size:") {
            block_size = size.trim().parse::<u64>().ok();
        }
    })?;
    let block_size =
        block_size.ok_or_else(|| damaged(image, "dumpe2fs did not tell its block size"))?;
    Ok((blocks * block_size).div_ceil(MIB) + SPARE_MB)
}

fn damaged(image: &Path, reason: &str) -> Error {
    Error::Damaged { path: image.to_owned(), reason: reason.to_owned() }
}

/// Makes the file system and its file smaller; nothing may use them.
pub fn shrink(image: &Path, to_mb: u64) -> Result<()> {
    let minimum_mb = minimum_mb(image)?;
    if to_mb < minimum_mb {
        return Err(Error::DiskTooSmall { wanted_mb: to_mb, minimum_mb });
    }
    // resize2fs insists on a fresh check. 1: errors were corrected, such as a journal that was replayed.
    Tool::new("e2fsck", CHECK_DEADLINE)
        .args(["-f", "-p"])
        .on_image(image)?
        .accept(&[0, 1])
        .run()?;
    Tool::new("resize2fs", RESIZE_DEADLINE).on_image(image)?.arg(format!("{to_mb}M")).run()?;
    let file = File::options().write(true).open(image).map_err(Error::io("open", image))?;
    file.set_len(to_mb * MIB).map_err(Error::io("set the size of", image))?;
    file.sync_all().map_err(Error::io("sync", image))
}

/// What [`make`] needs at least for files of that size.
pub(crate) fn needed_mb(file_bytes: u64) -> u64 {
    (file_bytes + file_bytes / 16).div_ceil(MIB) + SPARE_MB
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    };

    use super::*;

    #[test]
    fn an_image_is_sparse_clean_and_holds_the_tree() {
        let directory = tempfile::tempdir().unwrap();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        fs::write(tree.join("file"), b"content").unwrap();
        fs::set_permissions(tree.join("file"), fs::Permissions::from_mode(0o4755)).unwrap();
        symlink("/nowhere", tree.join("link")).unwrap();
        let image = directory.path().join("image");
        make(&image, 10_240, "test", Some(&tree)).unwrap();
        check(&image).unwrap();
        let metadata = image.metadata().unwrap();
        assert_eq!(metadata.len(), 10 << 30);
        assert!(metadata.blocks() * 512 < 32 << 20, "{} blocks", metadata.blocks());
        let listing =
            Tool::new("debugfs", ASK_DEADLINE).args(["-R", "ls -l /"]).arg(&image).run().unwrap();
        assert!(
            listing
                .last_lines
                .iter()
                .any(|line| line.contains("104755") && line.ends_with(" file"))
        );
    }

    #[test]
    fn an_image_shrinks_to_what_its_files_need_and_no_further() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        make(&image, 4096, "test", None).unwrap();
        let minimum = minimum_mb(&image).unwrap();
        assert!(
            matches!(shrink(&image, minimum - 1), Err(Error::DiskTooSmall { minimum_mb, .. }) if minimum_mb == minimum)
        );
        shrink(&image, 512).unwrap();
        assert_eq!(image.metadata().unwrap().len(), 512 << 20);
        check(&image).unwrap();
    }

    #[test]
    fn a_damaged_image_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("image");
        fs::write(&image, vec![0; 1 << 20]).unwrap();
        assert!(check(&image).is_err());
    }
}
