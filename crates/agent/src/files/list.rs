//! Listing: a walk without recursion, in batches, that follows no link below its start.

use std::os::fd::{AsFd, OwnedFd};

use protocol::message::{Entry, EntryKind, ErrorCode, Failure, PathBytes};
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;

use super::{modified_ns, path, size};
use crate::failure::{failed, refuse, shown};

/// Entries in one reply, also bounded by [`BATCH_BYTES`] of names.
const BATCH: usize = 256;
const BATCH_BYTES: usize = 64 << 10;
/// Each level holds an open directory.
const DEEPEST: usize = 256;

pub(crate) struct Listing {
    levels: Vec<Level>,
    depth: usize,
}

struct Level {
    path: Vec<u8>,
    entries: Dir,
}

impl Listing {
    /// The start may be a link to a directory, as for `ls DIR/`.
    pub(crate) fn begin(start: &[u8], depth: u32) -> Result<Self, Failure> {
        let start = path::resolve(start)?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let entries =
            openat(CWD, &start[..], flags, Mode::empty()).and_then(Dir::new).map_err(|error| {
                match error {
                    Errno::NOTDIR if statat(CWD, &start[..], AtFlags::empty()).is_ok() => refuse(
                        ErrorCode::WrongKind,
                        format!("list {}: it is not a directory", shown(&start)),
                    ),
                    error => failed("list", &start, error),
                }
            })?;
        Ok(Self {
            levels: vec![Level { path: start, entries }],
            depth: usize::try_from(depth).unwrap_or(usize::MAX),
        })
    }

    /// The next entries; fewer than a batch, also none, only at the end.
    pub(crate) fn next_batch(&mut self) -> Result<(Vec<Entry>, bool), Failure> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(level) = self.levels.last_mut() else { return Ok((batch, true)) };
            let next = match level.entries.read() {
                Some(Ok(next)) => next,
                // A directory that goes away while it is read has no more entries.
                None | Some(Err(Errno::NOENT)) => {
                    self.levels.pop();
                    continue;
                }
                Some(Err(error)) => return Err(failed("list", &level.path, error)),
            };
            let name = next.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let directory =
                level.entries.fd().map_err(|error| failed("list", &level.path, error))?;
            let path = path::join(&level.path, name);
            let found = match entry(directory, name, path.clone()) {
                Ok(found) => found,
                // Deleted since.
                Err(Errno::NOENT) => continue,
                Err(error) => return Err(failed("list", &path, error)),
            };
            bytes += path.len() + found.target.as_ref().map_or(0, |target| target.len());
            let goes_deeper = found.kind == EntryKind::Directory && self.levels.len() < self.depth;
            batch.push(found);
            if goes_deeper {
                self.enter(name_of(&path).to_vec(), path)?;
            }
        }
        Ok((batch, false))
    }

    fn enter(&mut self, name: Vec<u8>, path: Vec<u8>) -> Result<(), Failure> {
        if self.levels.len() >= DEEPEST {
            let message = format!(
                "list {}: the tree is deeper than {DEEPEST}; list a part of it",
                shown(&path)
            );
            return Err(refuse(ErrorCode::TooLarge, message));
        }
        let Some(level) = self.levels.last() else { return Ok(()) };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened =
            level.entries.fd().and_then(|directory| openat(directory, name, flags, Mode::empty()));
        match opened.and_then(Dir::new) {
            Ok(entries) => self.levels.push(Level { path, entries }),
            // Deleted, or replaced by something else, since.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {}
            Err(error) => return Err(failed("list", &path, error)),
        }
        Ok(())
    }
}

pub(crate) fn stat(given: &[u8]) -> Result<Entry, Failure> {
    let path = path::resolve(given)?;
    entry(CWD, &path, path.clone()).map_err(|error| failed("look at", &path, error))
}

fn name_of(path: &[u8]) -> &[u8] {
    path::split(path).map_or(b"/", |(_, name)| name)
}

fn entry(directory: impl AsFd, name: &[u8], path: Vec<u8>) -> Result<Entry, Errno> {
    let stat = statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let kind = kind(&stat);
    let target = match kind {
        EntryKind::Link => {
            Some(PathBytes::from(readlinkat(&directory, name, Vec::new())?.into_bytes()))
        }
        EntryKind::File
        | EntryKind::Directory
        | EntryKind::Fifo
        | EntryKind::Socket
        | EntryKind::CharDevice
        | EntryKind::BlockDevice => None,
    };
    Ok(Entry {
        path: PathBytes::from(path),
        kind,
        size: size(&stat),
        mode: stat.st_mode & 0o7777,
        modified_ns: modified_ns(&stat),
        user: stat.st_uid,
        group: stat.st_gid,
        target,
    })
}

fn kind(stat: &Stat) -> EntryKind {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile | FileType::Unknown => EntryKind::File,
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Link,
        FileType::Fifo => EntryKind::Fifo,
        FileType::Socket => EntryKind::Socket,
        FileType::CharacterDevice => EntryKind::CharDevice,
        FileType::BlockDevice => EntryKind::BlockDevice,
    }
}

/// For callers that must own the descriptor of a directory they found.
pub(crate) fn open_directory(directory: impl AsFd, name: &[u8]) -> Result<OwnedFd, Errno> {
    openat(
        directory,
        name,
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}
