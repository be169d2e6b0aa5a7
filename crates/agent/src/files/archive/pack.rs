//! Packing: a walk without recursion whose archive comes out frame by frame. Links are packed as links; what is no file,
//! directory or link is left out, and a comment in the archive says so.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use protocol::frame::{HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, Failure};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, SeekFrom, Stat, fstat, openat, readlinkat, seek,
    statat,
};
use rustix::io::{Errno, pread};

use super::header::{self, Written};
use super::parse::BLOCK;
use crate::failure::{failed, refuse, shown};
use crate::files::list::open_directory;
use crate::files::read::is_made_up;
use crate::files::{open_regular, path, set_blocking, size};

/// Frames made in one go, about 256 KiB.
const FRAMES: usize = 8;
/// Each level holds an open directory.
const DEEPEST: usize = 512;
/// Files with several names, of which the first is remembered.
const MOST_LINKED: usize = 1 << 14;
/// Pieces of one file between its holes; what comes after so many is packed as it is.
const MOST_SEGMENTS: usize = 1 << 14;

pub(crate) struct Packer {
    path: Vec<u8>,
    levels: Vec<Level>,
    content: Option<Content>,
    frames: Frames,
    linked: HashMap<(u64, u64), Vec<u8>>,
    is_at_end: bool,
}

struct Level {
    directory: OwnedFd,
    entries: Dir,
    /// Of the names in it, with a slash at its end; empty for the start.
    prefix: Vec<u8>,
}

/// A file of which more is to be packed.
struct Content {
    file: File,
    name: Vec<u8>,
    segments: Vec<(u64, u64)>,
    at: usize,
    taken: u64,
    stored: u64,
    is_short: bool,
}

/// What is ready to be sent. Each frame has room for its header in front.
#[derive(Default)]
struct Frames {
    whole: Vec<Vec<u8>>,
    open: Vec<u8>,
}

impl Frames {
    fn room(&mut self) -> usize {
        if self.open.len() == HEADER + MAX_PAYLOAD {
            self.whole.push(std::mem::take(&mut self.open));
        }
        if self.open.is_empty() {
            self.open.reserve_exact(HEADER + MAX_PAYLOAD);
            self.open.resize(HEADER, 0);
        }
        HEADER + MAX_PAYLOAD - self.open.len()
    }

    fn extend(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let count = self.room().min(bytes.len());
            self.open.extend_from_slice(&bytes[..count]);
            bytes = &bytes[count..];
        }
    }

    fn zeroes(&mut self, mut count: usize) {
        while count > 0 {
            let now = self.room().min(count);
            self.open.resize(self.open.len() + now, 0);
            count -= now;
        }
    }

    fn close(&mut self) {
        if self.open.len() > HEADER {
            self.whole.push(std::mem::take(&mut self.open));
        }
    }
}

impl Packer {
    /// A directory is packed with what is in it, under names relative to it; a file alone under its own name. Links on the
    /// way to either are followed.
    pub(crate) fn begin(given: &[u8]) -> Result<Self, Failure> {
        let path = path::resolve(given)?;
        let fail = |error| failed("pack", &path, error);
        let mut packer = Self {
            path: path.clone(),
            levels: Vec::new(),
            content: None,
            frames: Frames::default(),
            linked: HashMap::new(),
            is_at_end: false,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let made_up = || {
            let shown = shown(&path);
            let message = format!("pack {shown}: its files are made up by the kernel");
            refuse(ErrorCode::WrongKind, message)
        };
        match openat(CWD, &path[..], flags, Mode::empty()) {
            Ok(directory) if is_made_up(&directory) => return Err(made_up()),
            Ok(directory) => {
                let stat = fstat(&directory).map_err(fail)?;
                packer.put_header(b"./", b"", b'5', &stat);
                packer.enter(directory, Vec::new()).map_err(fail)?;
            }
            Err(Errno::NOTDIR) => {
                let file = open_regular(&path).map_err(|error| match error {
                    Errno::NXIO => refuse(
                        ErrorCode::WrongKind,
                        format!("pack {}: it is no file and no directory", shown(&path)),
                    ),
                    error => fail(error),
                })?;
                if is_made_up(&file) {
                    return Err(made_up());
                }
                let name = path::split(&path).map_or(&b"file"[..], |(_, name)| name).to_vec();
                let stat = fstat(&file).map_err(fail)?;
                packer.put_file(file, name, &stat).map_err(fail)?;
            }
            Err(error) => return Err(fail(error)),
        }
        Ok(packer)
    }

    pub(crate) fn is_at_end(&self) -> bool {
        self.is_at_end
    }

    pub(crate) fn next_frames(&mut self) -> Result<Vec<Vec<u8>>, Failure> {
        while !self.is_at_end && self.frames.whole.len() < FRAMES {
            if self.content.is_some() {
                self.put_content()?;
            } else if !self.put_next_entry()? {
                self.frames.zeroes(2 * BLOCK);
                self.frames.close();
                self.is_at_end = true;
            }
        }
        Ok(std::mem::take(&mut self.frames.whole))
    }

    fn enter(&mut self, directory: OwnedFd, prefix: Vec<u8>) -> Result<(), Errno> {
        let entries = Dir::read_from(&directory)?;
        self.levels.push(Level { directory, entries, prefix });
        Ok(())
    }

    fn at(&self, name: &[u8]) -> Vec<u8> {
        path::join(&self.path, name)
    }

    /// False at the end of the tree.
    fn put_next_entry(&mut self) -> Result<bool, Failure> {
        let Some(level) = self.levels.last_mut() else { return Ok(false) };
        let entry = match level.entries.read() {
            Some(Ok(entry)) => entry,
            None | Some(Err(Errno::NOENT)) => {
                self.levels.pop();
                return Ok(true);
            }
            Some(Err(error)) => {
                let prefix = level.prefix.clone();
                return Err(failed("pack", &self.at(&prefix), error));
            }
        };
        let base = entry.file_name().to_bytes();
        if matches!(base, b"." | b"..") {
            return Ok(true);
        }
        let name = [&level.prefix[..], base].concat();
        match self.put_entry(base, &name) {
            // Deleted, or replaced by something else, since.
            Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => Ok(true),
            Err(Errno::NAMETOOLONG) => Err(refuse(
                ErrorCode::TooLarge,
                format!(
                    "pack {}: the tree is deeper than {DEEPEST}; pack a part of it",
                    shown(&self.at(&name))
                ),
            )),
            Err(error) => Err(failed("pack", &self.at(&name), error)),
        }
    }

    fn put_entry(&mut self, base: &[u8], name: &[u8]) -> Result<(), Errno> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        let stat = statat(&level.directory, base, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let directory = open_directory(&level.directory, base)?;
                let mut with_slash = name.to_vec();
                with_slash.push(b'/');
                if is_made_up(&directory) {
                    self.leave_out(name, "its files are made up by the kernel");
                    return Ok(());
                }
                if self.levels.len() >= DEEPEST {
                    return Err(Errno::NAMETOOLONG);
                }
                self.put_header(&with_slash, b"", b'5', &stat);
                self.enter(directory, with_slash)
            }
            FileType::RegularFile => {
                let identity = (stat.st_dev, stat.st_ino);
                if let Some(first) = self.linked.get(&identity).cloned() {
                    self.put_header(name, &first, b'1', &stat);
                    return Ok(());
                }
                let flags = OFlags::RDONLY
                    | OFlags::NOFOLLOW
                    | OFlags::NONBLOCK
                    | OFlags::NOCTTY
                    | OFlags::CLOEXEC;
                let file = openat(&level.directory, base, flags, Mode::empty())?;
                let stat = fstat(&file)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                    if stat.st_nlink > 1 && self.linked.len() < MOST_LINKED {
                        self.linked.insert((stat.st_dev, stat.st_ino), name.to_vec());
                    }
                    self.put_file(file.into(), name.to_vec(), &stat)?;
                }
                Ok(())
            }
            FileType::Symlink => {
                let target = readlinkat(&level.directory, base, Vec::new())?.into_bytes();
                self.put_header(name, &target, b'2', &stat);
                Ok(())
            }
            kind @ (FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown) => {
                self.leave_out(name, &format!("it is a {}", in_words(kind)));
                Ok(())
            }
        }
    }

    fn leave_out(&mut self, name: &[u8], why: &str) {
        let mut comment = Vec::new();
        header::write_comment(&mut comment, &format!("left out {}: {why}", shown(name)));
        self.frames.extend(&comment);
    }

    fn put_header(&mut self, name: &[u8], link: &[u8], kind: u8, stat: &Stat) {
        let mut bytes = Vec::with_capacity(BLOCK);
        header::write(&mut bytes, &written(name, link, kind, 0, stat));
        self.frames.extend(&bytes);
    }

    fn put_file(&mut self, file: File, name: Vec<u8>, stat: &Stat) -> Result<(), Errno> {
        set_blocking(&file)?;
        let whole = size(stat);
        let blocks = u64::try_from(stat.st_blocks).unwrap_or(0);
        let segments =
            if blocks.saturating_mul(512) < whole { segments(&file, whole) } else { None };
        let mut bytes = Vec::with_capacity(BLOCK);
        let segments = match segments {
            Some(segments) => {
                let stored = segments.iter().map(|(_, length)| length).sum();
                let member = written(&name, b"", b'S', stored, stat);
                header::write_sparse(&mut bytes, &member, whole, &segments);
                segments
            }
            None => {
                header::write(&mut bytes, &written(&name, b"", b'0', whole, stat));
                vec![(0, whole)]
            }
        };
        self.frames.extend(&bytes);
        let stored = segments.iter().map(|(_, length)| length).sum();
        self.content =
            Some(Content { file, name, segments, at: 0, taken: 0, stored, is_short: false });
        Ok(())
    }

    /// The next piece of a file, as long as there is room in the frame.
    fn put_content(&mut self) -> Result<(), Failure> {
        let Some(mut content) = self.content.take() else { return Ok(()) };
        let Some(&(start, length)) = content.segments.get(content.at) else {
            let block = BLOCK as u64;
            let padding = (block - content.stored % block) % block;
            self.frames.zeroes(usize::try_from(padding).unwrap_or(0));
            if content.is_short {
                let why = "its end, for it became shorter meanwhile";
                self.leave_out(&content.name, why);
            }
            return Ok(());
        };
        let left = length - content.taken;
        if left == 0 {
            content.at += 1;
            content.taken = 0;
            self.content = Some(content);
            return Ok(());
        }
        let count = self.frames.room().min(usize::try_from(left).unwrap_or(usize::MAX));
        let place = self.frames.open.len();
        self.frames.open.resize(place + count, 0);
        let read = loop {
            match pread(&content.file, &mut self.frames.open[place..], start + content.taken) {
                Err(Errno::INTR) => {}
                read => break read,
            }
        };
        let read = read.map_err(|error| failed("pack", &self.at(&content.name), error))?;
        // What is missing becomes zeroes: the header has told how much comes.
        let taken = if read == 0 { count } else { read };
        content.is_short |= read == 0;
        self.frames.open.truncate(place + taken);
        content.taken += taken as u64;
        self.content = Some(content);
        Ok(())
    }
}

fn in_words(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "FIFO",
        FileType::Socket => "socket",
        FileType::CharacterDevice | FileType::BlockDevice | FileType::Unknown => "device",
        FileType::RegularFile => "file",
        FileType::Directory => "directory",
        FileType::Symlink => "link",
    }
}

fn written<'a>(name: &'a [u8], link: &'a [u8], kind: u8, size: u64, stat: &Stat) -> Written<'a> {
    Written {
        name,
        link,
        kind,
        size,
        mode: stat.st_mode & 0o7777,
        user: stat.st_uid,
        group: stat.st_gid,
        seconds: stat.st_mtime,
    }
}

/// What of a file is no hole; `None` where there are none, or the file system cannot tell.
fn segments(file: impl AsFd, size: u64) -> Option<Vec<(u64, u64)>> {
    let (mut segments, mut at) = (Vec::new(), 0);
    while at < size {
        let start = match seek(&file, SeekFrom::Data(at)) {
            Ok(start) => start,
            // Nothing but a hole is left.
            Err(Errno::NXIO) => break,
            Err(_) => return None,
        };
        if start >= size {
            break;
        }
        let end = if segments.len() + 1 < MOST_SEGMENTS {
            seek(&file, SeekFrom::Hole(start)).ok()?.min(size)
        } else {
            size
        };
        if end <= start {
            return None;
        }
        segments.push((start, end - start));
        at = end;
    }
    // The last one of GNU tar's maps is at the end, which tells programs the size.
    if segments.last().is_none_or(|&(start, length)| start + length < size) {
        segments.push((size, 0));
    }
    (segments != [(0, size)]).then_some(segments)
}
