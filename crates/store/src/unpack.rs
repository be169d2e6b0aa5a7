//! Unpacks a user's root file system into a tree. The archive is hostile until proven otherwise: nothing leaves the
//! tree, nothing but files, directories, links and FIFOs is made, and sizes are bounded.

use std::{
    cell::Cell,
    ffi::OsStr,
    fs::File,
    io::{self, BufReader, Read, Seek, SeekFrom, Write},
    os::unix::ffi::OsStrExt,
    path::{Component, Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use rustix::io::Errno;

use crate::{
    Error, Progress, Result,
    tree::{Ids, Tree},
};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Holes and zeroes do not count.
    pub(crate) bytes: u64,
    /// All counts; it bounds the work that zeroes make.
    pub(crate) apparent_bytes: u64,
    pub(crate) entries: u64,
    pub(crate) time: Duration,
}

/// Of a whole name. `mke2fs -d` (e2fsprogs 1.47, `create_inode.c`, `path_append`) writes one byte too many where a path's
/// length is exactly that of its buffer; the allocator only has no spare byte there from 2040 on.
const LONGEST_PATH: usize = 1024;
const BLOCK: usize = 64 * 1024;
/// Between two entries: headers, long names, extended attributes. The tar library keeps these in memory.
const HEADER_BYTES: u64 = 4 << 20;
const TOLD_EVERY: u64 = 10_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Compression {
    None,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
}

impl Compression {
    fn of(start: &[u8]) -> Self {
        match start {
            [0x1f, 0x8b, ..] => Self::Gzip,
            [0x28, 0xb5, 0x2f, 0xfd, ..] => Self::Zstd,
            [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Self::Xz,
            [b'B', b'Z', b'h', ..] => Self::Bzip2,
            _ => Self::None,
        }
    }

    fn program(self) -> Option<&'static [&'static str]> {
        match self {
            Self::None => None,
            Self::Gzip => Some(&["gzip", "-dc"]),
            Self::Zstd => Some(&["zstd", "-dcq"]),
            Self::Xz => Some(&["xz", "-dc", "--memlimit=1GiB"]),
            Self::Bzip2 => Some(&["bzip2", "-dc"]),
        }
    }
}

/// The archive's bytes, decompressed by a program of the host that goes with this.
struct Source {
    reader: Box<dyn Read>,
    child: Option<Child>,
}

impl Source {
    fn open(archive: &Path) -> Result<Self> {
        let mut file = File::open(archive).map_err(Error::io("open", archive))?;
        let mut start = [0; 6];
        let length = read_up_to(&mut file, &mut start).map_err(Error::io("read", archive))?;
        file.rewind().map_err(Error::io("read", archive))?;
        let Some(program) = Compression::of(&start[..length]).program() else {
            return Ok(Self {
                reader: Box::new(BufReader::with_capacity(1 << 18, file)),
                child: None,
            });
        };
        let mut child = Command::new(program[0])
            .args(&program[1..])
            .stdin(file)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|source| Error::ToolMissing { tool: program[0].to_owned(), source })?;
        let output = child.stdout.take().expect("its output is piped");
        Ok(Self { reader: Box::new(BufReader::with_capacity(1 << 18, output)), child: Some(child) })
    }

    /// All was read; what the decompressor says about it counts.
    fn finish(mut self) -> Result<()> {
        io::copy(&mut self.reader, &mut io::sink()).map_err(unreadable)?;
        let Some(mut child) = self.child.take() else { return Ok(()) };
        match child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(_) | Err(_) => Err(Error::archive("its compressed data is damaged or cut short")),
        }
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Fails when more is read than `left` allows.
struct Guarded<'a, R> {
    reader: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Guarded<'_, R> {
    fn read(&mut self, block: &mut [u8]) -> io::Result<usize> {
        let n = self.reader.read(block)?;
        let left = self.left.get().checked_sub(n as u64);
        self.left.set(left.ok_or_else(|| io::Error::other("a header in it is too large"))?);
        Ok(n)
    }
}

#[expect(clippy::needless_pass_by_value, reason = "for map_err")]
fn unreadable(error: io::Error) -> Error {
    Error::archive(format!("it cannot be read as a tar archive ({error})"))
}

/// `archive` may be compressed with gzip, zstd, xz or bzip2; its content tells, not its name.
pub(crate) fn unpack(
    archive: &Path,
    tree: &Tree,
    limits: Limits,
    progress: Progress<'_>,
) -> Result<()> {
    let mut source = Source::open(archive)?;
    let mut unpacking = Unpacking {
        tree,
        limits,
        end: Instant::now() + limits.time,
        used: Limits::NONE,
        directories: Vec::new(),
    };
    let mut skipped = 0_u64;
    let left = Cell::new(HEADER_BYTES);
    {
        let mut tar = tar::Archive::new(Guarded { reader: &mut source.reader, left: &left });
        for entry in tar.entries().map_err(unreadable)? {
            let mut entry = entry.map_err(unreadable)?;
            left.set(u64::MAX);
            let name = entry.path_bytes().into_owned();
            if !unpacking.entry(&mut entry, &name).map_err(|error| blame(error, &name))? {
                skipped += 1;
            }
            unpacking.pass_over(&mut entry)?;
            left.set(HEADER_BYTES);
            if unpacking.used.entries.is_multiple_of(TOLD_EVERY) {
                progress(&format!("unpacked {} entries", unpacking.used.entries));
            }
        }
    }
    unpacking.close_directories()?;
    let entries = unpacking.used.entries;
    if entries == 0 {
        return Err(Error::archive("it is empty, or not a tar archive"));
    }
    source.finish()?;
    if skipped > 0 {
        progress(&format!("left out {skipped} device nodes; the guest makes its own"));
    }
    progress(&format!("unpacked all {entries} entries"));
    Ok(())
}

impl Limits {
    const NONE: Self = Self { bytes: 0, apparent_bytes: 0, entries: 0, time: Duration::ZERO };
}

struct Unpacking<'a> {
    tree: &'a Tree,
    limits: Limits,
    end: Instant,
    used: Limits,
    /// Given their modes at the end: one may forbid writing into itself, and making entries changes its time.
    directories: Vec<(PathBuf, u32, Ids)>,
}

impl Unpacking<'_> {
    /// `false` when it was left out.
    fn entry(&mut self, entry: &mut tar::Entry<'_, impl Read>, name: &[u8]) -> Result<bool> {
        let kind = entry.header().entry_type();
        if matches!(kind, tar::EntryType::XGlobalHeader) {
            return Ok(true);
        }
        self.used.entries += 1;
        if self.used.entries > self.limits.entries {
            return Err(Error::archive(format!(
                "it holds more than {} entries",
                self.limits.entries
            )));
        }
        self.check_time()?;
        let path = inside(name)?;
        let header = entry.header();
        let number =
            |value: io::Result<u64>| value.ok().and_then(|n| u32::try_from(n).ok()).unwrap_or(0);
        let owner = Ids { user: number(header.uid()), group: number(header.gid()) };
        let mode = header.mode().map_err(unreadable)? & 0o7777;
        #[expect(
            clippy::wildcard_enum_match_arm,
            reason = "the library's enum is open: any byte is a kind"
        )]
        match kind {
            tar::EntryType::Directory => {
                if path.as_os_str().is_empty() {
                    self.directories.push((path, mode, owner));
                } else {
                    self.tree.directory(&path, 0o700, owner)?;
                    self.directories.push((path, mode, owner));
                }
            }
            tar::EntryType::Regular | tar::EntryType::Continuous | tar::EntryType::GNUSparse => {
                self.file(entry, &path, mode, owner)?;
            }
            tar::EntryType::Symlink => {
                let target = link_target(entry)?;
                // Wherever it points: it is resolved in the guest, and never here outside the tree.
                self.tree.link(named(&path)?, Path::new(OsStr::from_bytes(&target)), owner)?;
            }
            tar::EntryType::Link => {
                let target = inside(&link_target(entry)?)?;
                self.tree.hard_link(named(&path)?, named(&target)?)?;
            }
            tar::EntryType::Fifo => self.tree.fifo(named(&path)?, mode, owner)?,
            tar::EntryType::Char | tar::EntryType::Block => return Ok(false),
            _ => {
                let kind = char::from(kind.as_byte());
                let path = path.display();
                return Err(Error::archive(format!(
                    "`{path}` is of a kind that is not known ({kind:?})"
                )));
            }
        }
        Ok(true)
    }

    fn file(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        path: &Path,
        mode: u32,
        owner: Ids,
    ) -> Result<()> {
        let capabilities = capabilities(entry)?;
        let mut target = self.tree.create_file(named(path)?)?;
        let mut block = vec![0; BLOCK];
        let mut length = 0_u64;
        loop {
            let n = read_up_to(entry, &mut block).map_err(unreadable)?;
            if n == 0 {
                break;
            }
            length += n as u64;
            self.used.apparent_bytes += n as u64;
            if self.used.apparent_bytes > self.limits.apparent_bytes {
                return Err(self.too_large());
            }
            self.check_time()?;
            let written = if block[..n].iter().all(|&byte| byte == 0) {
                target.file.seek(SeekFrom::Current(n.cast_signed() as i64)).map(|_| ())
            } else {
                self.used.bytes += n as u64;
                if self.used.bytes > self.limits.bytes {
                    return Err(self.too_large());
                }
                target.file.write_all(&block[..n])
            };
            written.map_err(Error::io("write", path))?;
        }
        // The last block may have been a hole.
        target.file.set_len(length).map_err(Error::io("write", path))?;
        match capabilities {
            Some(value) => target.finish_with_capabilities(mode, owner, &value),
            None => target.finish(mode, owner),
        }
    }

    /// Content that an entry should not have.
    fn pass_over(&mut self, entry: &mut impl Read) -> Result<()> {
        let mut block = vec![0; BLOCK];
        loop {
            let n = read_up_to(entry, &mut block).map_err(unreadable)?;
            if n == 0 {
                return Ok(());
            }
            self.used.apparent_bytes += n as u64;
            if self.used.apparent_bytes > self.limits.apparent_bytes {
                return Err(self.too_large());
            }
            self.check_time()?;
        }
    }

    fn too_large(&self) -> Error {
        Error::archive(format!(
            "its files are larger than the template's disk ({} MiB); ask for a larger disk_mb",
            self.limits.bytes >> 20
        ))
    }

    fn check_time(&self) -> Result<()> {
        if Instant::now() < self.end {
            return Ok(());
        }
        Err(Error::archive(format!(
            "unpacking it took longer than {} s",
            self.limits.time.as_secs()
        )))
    }

    fn close_directories(&mut self) -> Result<()> {
        // A later entry may have put a link in a directory's place; then the link's target, still in the tree, gets it.
        for (path, mode, owner) in self.directories.drain(..).rev() {
            self.tree.directory(&path, mode, owner)?;
        }
        Ok(())
    }
}

/// The name as a path below the root; the root itself is empty.
fn inside(name: &[u8]) -> Result<PathBuf> {
    let shown = || String::from_utf8_lossy(name).into_owned();
    if name.contains(&0) {
        return Err(Error::archive(format!("the name `{}` holds a zero byte", shown())));
    }
    if name.len() > LONGEST_PATH {
        let start: String = shown().chars().take(80).collect();
        return Err(Error::archive(format!(
            "the name `{start}…` is longer than {LONGEST_PATH} bytes; leave such files out"
        )));
    }
    let mut path = PathBuf::new();
    for part in Path::new(OsStr::from_bytes(name)).components() {
        match part {
            Component::Normal(part) => path.push(part),
            Component::CurDir | Component::RootDir => {}
            Component::ParentDir | Component::Prefix(_) => {
                return Err(Error::archive(format!(
                    "the name `{}` leads out of it by `..`",
                    shown()
                )));
            }
        }
    }
    Ok(path)
}

/// What the kernel refused because of the archive's names is the archive's fault.
fn blame(error: Error, name: &[u8]) -> Error {
    let Error::Io { doing, path, source } = error else { return error };
    match Errno::from_io_error(&source) {
        Some(
            Errno::EXIST
            | Errno::NOTEMPTY
            | Errno::LOOP
            | Errno::NAMETOOLONG
            | Errno::ISDIR
            | Errno::NOTDIR
            | Errno::NOENT,
        ) => Error::archive(format!(
            "could not {doing} `{}`: {source}",
            String::from_utf8_lossy(name)
        )),
        Some(_) | None => Error::Io { doing, path, source },
    }
}

fn named(path: &Path) -> Result<&Path> {
    if path.as_os_str().is_empty() {
        Err(Error::archive("an entry other than a directory is named `/`"))
    } else {
        Ok(path)
    }
}

fn link_target(entry: &tar::Entry<'_, impl Read>) -> Result<Vec<u8>> {
    match entry.link_name_bytes() {
        Some(target) if !target.is_empty() && !target.contains(&0) => Ok(target.into_owned()),
        Some(_) | None => Err(Error::archive("a link has no target")),
    }
}

/// What makes `ping` work for everyone; the other extended attributes are left out.
fn capabilities(entry: &mut tar::Entry<'_, impl Read>) -> Result<Option<Vec<u8>>> {
    let Some(extensions) = entry.pax_extensions().map_err(unreadable)? else { return Ok(None) };
    for extension in extensions {
        let extension = extension.map_err(unreadable)?;
        if extension.key_bytes() == b"SCHILY.xattr.security.capability" {
            return Ok(Some(extension.value_bytes().to_vec()));
        }
    }
    Ok(None)
}

fn read_up_to(reader: &mut impl Read, block: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < block.len() {
        match reader.read(&mut block[length..]) {
            Ok(0) => break,
            Ok(n) => length += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}

#[cfg(test)]
mod tests;
