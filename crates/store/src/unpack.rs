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
mod tests {
    use std::{
        fs,
        os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt},
    };

    use tar::{Builder, EntryType, Header};

    use super::*;

    const LIMITS: Limits = Limits {
        bytes: 1 << 20,
        apparent_bytes: 64 << 20,
        entries: 100,
        time: Duration::from_secs(60),
    };

    struct Case {
        directory: tempfile::TempDir,
        tar: Builder<Vec<u8>>,
    }

    impl Case {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            fs::create_dir(directory.path().join("tree")).unwrap();
            fs::create_dir(directory.path().join("outside")).unwrap();
            fs::write(directory.path().join("outside/secret"), b"secret").unwrap();
            Self { directory, tar: Builder::new(Vec::new()) }
        }

        /// Names go in as they are: the library's own checks must not protect us here.
        fn add(&mut self, kind: EntryType, name: &str, target: &str, content: &[u8]) -> &mut Self {
            let mut header = Header::new_gnu();
            header.set_entry_type(kind);
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.as_old_mut().linkname[..target.len()].copy_from_slice(target.as_bytes());
            header.set_mode(if kind == EntryType::Directory { 0o755 } else { 0o4711 });
            header.set_uid(12);
            header.set_gid(34);
            header.set_size(content.len() as u64);
            header.set_cksum();
            self.tar.append(&header, content).unwrap();
            self
        }

        fn unpack(&mut self) -> Result<()> {
            let tar =
                std::mem::replace(&mut self.tar, Builder::new(Vec::new())).into_inner().unwrap();
            self.unpack_bytes(&tar)
        }

        fn unpack_bytes(&self, bytes: &[u8]) -> Result<()> {
            let archive = self.directory.path().join("archive");
            fs::write(&archive, bytes).unwrap();
            unpack(&archive, &Tree::open(&self.path("")).unwrap(), LIMITS, &mut |_| ())
        }

        fn path(&self, name: &str) -> PathBuf {
            self.directory.path().join("tree").join(name)
        }

        fn outside_is_untouched(&self) -> bool {
            let outside = self.directory.path().join("outside");
            fs::read_dir(&outside).unwrap().count() == 1
                && fs::read(outside.join("secret")).unwrap() == b"secret"
                && fs::read_dir(self.directory.path()).unwrap().count() == 3
        }
    }

    fn refused(result: Result<()>) -> String {
        match result {
            Err(Error::InvalidArchive { reason }) => reason,
            other => panic!("must be refused as the archive's fault, and was {other:?}"),
        }
    }

    #[test]
    fn files_links_and_modes_are_kept() {
        let mut case = Case::new();
        case.add(EntryType::Directory, "./d/", "", b"")
            .add(EntryType::Regular, "./d/file", "", b"content")
            .add(EntryType::Regular, "made/on/the/way", "", b"")
            .add(EntryType::Symlink, "d/link", "/anywhere/../at all", b"")
            .add(EntryType::Link, "hard", "./d/file", b"")
            .add(EntryType::Fifo, "fifo", "", b"");
        case.unpack().unwrap();
        let file = case.path("d/file").metadata().unwrap();
        assert_eq!(
            (file.mode() & 0o7777, file.uid(), file.gid(), file.nlink()),
            (0o4711, 12, 34, 2)
        );
        assert_eq!(fs::read(case.path("hard")).unwrap(), b"content");
        assert_eq!(fs::read_link(case.path("d/link")).unwrap(), Path::new("/anywhere/../at all"));
        assert!(case.path("fifo").symlink_metadata().unwrap().file_type().is_fifo());
        assert_eq!(case.path("made/on").metadata().unwrap().permissions().mode() & 0o777, 0o755);
    }

    #[test]
    fn names_with_two_dots_are_refused() {
        for name in ["../outside/a", "a/../../outside/a", "/../outside/a", ".."] {
            let mut case = Case::new();
            refused(case.add(EntryType::Regular, name, "", b"x").unpack());
            assert!(case.outside_is_untouched(), "{name}");
        }
    }

    #[test]
    fn an_absolute_name_lands_in_the_tree() {
        let mut case = Case::new();
        case.add(EntryType::Regular, "/etc/atoll-test", "", b"x").unpack().unwrap();
        assert_eq!(fs::read(case.path("etc/atoll-test")).unwrap(), b"x");
        assert!(!Path::new("/etc/atoll-test").exists());
    }

    #[test]
    fn a_link_out_leads_nothing_out() {
        let outside =
            |case: &Case| case.directory.path().join("outside").to_str().unwrap().to_owned();
        for relative in [false, true] {
            let mut case = Case::new();
            let target = if relative { "../outside".to_owned() } else { outside(&case) };
            case.add(EntryType::Symlink, "link", &target, b"")
                .add(EntryType::Regular, "link/new", "", b"x")
                .add(EntryType::Symlink, "file", &format!("{target}/secret"), b"")
                .add(EntryType::Regular, "file", "", b"overwritten");
            let _ = case.unpack();
            assert!(case.outside_is_untouched());
        }
        let mut case = Case::new();
        let target = outside(&case);
        case.add(EntryType::Symlink, "link", &target, b"").add(
            EntryType::Directory,
            "link/",
            "",
            b"",
        );
        let _ = case.unpack();
        assert!(case.outside_is_untouched());
        assert_eq!(case.directory.path().join("outside").metadata().unwrap().uid(), 0);
    }

    #[test]
    fn a_hard_link_out_is_refused() {
        for through_link in [false, true] {
            let mut case = Case::new();
            let target = case.directory.path().join("outside").to_str().unwrap().to_owned();
            if through_link {
                case.add(EntryType::Symlink, "link", &target, b"").add(
                    EntryType::Link,
                    "stolen",
                    "link/secret",
                    b"",
                );
            } else {
                case.add(EntryType::Link, "stolen", &format!("{target}/secret"), b"");
            }
            refused(case.unpack());
            assert!(!case.path("stolen").exists());
            assert_eq!(case.directory.path().join("outside/secret").metadata().unwrap().nlink(), 1);
        }
        let mut case = Case::new();
        refused(case.add(EntryType::Link, "stolen", "../outside/secret", b"").unpack());
    }

    #[test]
    fn device_nodes_are_left_out() {
        let mut case = Case::new();
        case.add(EntryType::Char, "dev/mem", "", b"").add(EntryType::Block, "dev/sda", "", b"");
        case.add(EntryType::Regular, "dev/file", "", b"");
        case.unpack().unwrap();
        assert_eq!(fs::read_dir(case.path("dev")).unwrap().count(), 1);
    }

    #[test]
    fn sizes_and_counts_are_bounded() {
        let mut case = Case::new();
        assert!(
            refused(case.add(EntryType::Regular, "a", "", &vec![1; 2 << 20]).unpack())
                .contains("disk_mb")
        );
        let mut case = Case::new();
        for n in 0..=LIMITS.entries {
            case.add(EntryType::Regular, &format!("f{n}"), "", b"");
        }
        refused(case.unpack());
        let mut case = Case::new();
        for name in ["a", "b", "c"] {
            case.add(EntryType::Regular, name, "", &vec![0; 30 << 20]);
        }
        refused(case.unpack());
    }

    #[test]
    fn zeroes_become_holes() {
        let mut case = Case::new();
        let mut content = vec![0; 30 << 20];
        content[20 << 20] = 1;
        case.add(EntryType::Regular, "hole", "", &content).unpack().unwrap();
        let metadata = case.path("hole").metadata().unwrap();
        assert_eq!(metadata.len(), 30 << 20);
        assert!(metadata.blocks() * 512 <= 256 << 10);
        assert!(fs::read(case.path("hole")).unwrap() == content);
    }

    #[test]
    fn a_hole_of_ten_gigabytes_is_refused_in_no_time() {
        let case = Case::new();
        let big = case.directory.path().join("big");
        File::create(&big).unwrap().set_len(10 << 30).unwrap();
        let output = Command::new("tar")
            .args(["-cSf", "-", "-C"])
            .arg(case.directory.path())
            .arg("big")
            .output()
            .unwrap();
        fs::remove_file(&big).unwrap();
        assert!(output.stdout.len() < 1 << 20);
        let start = Instant::now();
        refused(case.unpack_bytes(&output.stdout));
        assert!(start.elapsed() < Duration::from_secs(10));
        assert!(case.outside_is_untouched());
    }

    #[test]
    fn a_header_that_fills_the_memory_is_refused() {
        for kind in [EntryType::XHeader, EntryType::GNULongName] {
            let mut case = Case::new();
            case.add(kind, "x", "", &vec![b'a'; 8 << 20]).add(EntryType::Regular, "a", "", b"");
            refused(case.unpack());
        }
    }

    #[test]
    fn every_usual_compression_is_taken_and_damage_is_told() {
        let mut case = Case::new();
        case.add(EntryType::Regular, "file", "", &[7; 100_000]);
        let tar = std::mem::replace(&mut case.tar, Builder::new(Vec::new())).into_inner().unwrap();
        let plain = case.directory.path().join("plain");
        fs::write(&plain, tar).unwrap();
        for program in ["cat", "gzip", "zstd", "xz"] {
            let mut command = Command::new(program);
            if program != "cat" {
                command.arg("-c");
            }
            let packed = command.arg(&plain).output().unwrap().stdout;
            let case = Case::new();
            case.unpack_bytes(&packed).unwrap();
            assert_eq!(fs::read(case.path("file")).unwrap().len(), 100_000, "{program}");
            if program != "cat" {
                refused(case.unpack_bytes(&packed[..packed.len() - 9]));
            }
        }
    }

    #[test]
    fn what_is_no_archive_is_refused() {
        for bytes in [&b""[..], b"hello", &[0; 4096], &[0xff; 4096], b"\x1f\x8bnot gzip"] {
            refused(Case::new().unpack_bytes(bytes));
        }
    }

    #[test]
    fn a_file_over_a_directory_and_other_clashes_are_the_archives_fault() {
        let mut case = Case::new();
        case.add(EntryType::Regular, "d/file", "", b"").add(EntryType::Regular, "d", "", b"");
        refused(case.unpack());
        let mut case = Case::new();
        case.add(EntryType::Regular, "f", "", b"").add(EntryType::Regular, "f/below", "", b"");
        refused(case.unpack());
        let mut case = Case::new();
        case.add(EntryType::Symlink, "a", "b", b"").add(EntryType::Symlink, "b", "a", b"");
        refused(case.add(EntryType::Regular, "a/x", "", b"").unpack());
    }
}
