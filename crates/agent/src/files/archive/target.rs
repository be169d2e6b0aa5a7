//! The directory that an archive is unpacked into: names below it, which the kernel resolves without ever leaving it.

use std::os::fd::{AsFd, OwnedFd};

use protocol::message::{ErrorCode, Failure};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, ResolveFlags, Uid, chownat, mkdirat, openat, openat2,
};
use rustix::io::Errno;

use crate::failure::{failed, refuse, shown};
use crate::files::{path, write};

const LONGEST_NAME: usize = 255;
const LONGEST_PATH: usize = 4096;
/// The kernel gives up where something is renamed at the same moment.
const TRIES: usize = 64;

pub(crate) struct Target {
    pub(crate) path: Vec<u8>,
    /// It was not there before.
    pub(crate) is_new: bool,
    directory: OwnedFd,
    resolve: ResolveFlags,
    owner: Option<(u32, u32)>,
    /// The parent of the last entry, for most entries have the same as the one before.
    last: Option<(Vec<u8>, OwnedFd)>,
}

impl Target {
    /// Made if missing, with its parents.
    pub(crate) fn open(given: &[u8], owner: Option<(u32, u32)>) -> Result<Self, Failure> {
        let path = path::resolve(given)?;
        let fail = |error| match error {
            Errno::NOTDIR => refuse(
                ErrorCode::WrongKind,
                format!("unpack into {}: it is not a directory", shown(&path)),
            ),
            error => failed("unpack into", &path, error),
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let (directory, is_new) = match openat(CWD, &path[..], flags, Mode::empty()) {
            Err(Errno::NOENT) => {
                write::create_directories(&path, owner)?;
                (openat(CWD, &path[..], flags, Mode::empty()).map_err(fail)?, true)
            }
            opened => (opened.map_err(fail)?, false),
        };
        if crate::files::read::is_made_up(&directory) {
            return Err(fail(Errno::ROFS));
        }
        // Below `/` a link such as `/var/run`, which is absolute, leads nowhere else.
        let inside = if path == b"/" { ResolveFlags::IN_ROOT } else { ResolveFlags::BENEATH };
        let resolve = inside | ResolveFlags::NO_MAGICLINKS;
        Ok(Self { path, is_new, directory, resolve, owner, last: None })
    }

    pub(crate) fn directory(&self) -> &OwnedFd {
        &self.directory
    }

    /// The parts of a member's name: none for the target itself.
    pub(crate) fn parts(name: &[u8]) -> Result<Vec<&[u8]>, Failure> {
        let refused = |why: &str| {
            Err(refuse(
                ErrorCode::Invalid,
                format!("unpack {}: {why}", shown(&name[..name.len().min(LONGEST_PATH)])),
            ))
        };
        if name.starts_with(b"/") {
            return refused("its name is absolute; pack it relative to a directory");
        }
        if name.is_empty() || name.contains(&0) || name.len() >= LONGEST_PATH {
            return refused("an archive cannot have such a name");
        }
        let parts: Vec<&[u8]> =
            name.split(|&byte| byte == b'/').filter(|part| !matches!(*part, b"" | b".")).collect();
        if parts.contains(&&b".."[..]) {
            return refused("its name leads out of the directory");
        }
        if parts.iter().any(|part| part.len() > LONGEST_NAME) {
            return refused("a name is longer than 255 bytes");
        }
        Ok(parts)
    }

    /// What is there under this name, if it is below the target.
    pub(crate) fn find(&self, parts: &[&[u8]], flags: OFlags) -> Result<OwnedFd, Errno> {
        if parts.is_empty() {
            return openat(&self.directory, ".", flags | OFlags::CLOEXEC, Mode::empty());
        }
        let joined = parts.join(&b'/');
        let mut tries = TRIES;
        loop {
            match openat2(
                &self.directory,
                &joined[..],
                flags | OFlags::CLOEXEC,
                Mode::empty(),
                self.resolve,
            ) {
                Err(Errno::AGAIN | Errno::INTR) if tries > 0 => tries -= 1,
                found => return found,
            }
        }
    }

    /// The directory in which the last of the parts lies; made if missing.
    pub(crate) fn parent(&mut self, parts: &[&[u8]]) -> Result<&OwnedFd, Errno> {
        let above = &parts[..parts.len().saturating_sub(1)];
        let joined = above.join(&b'/');
        let found = match self.last.take() {
            Some((path, directory)) if path == joined => directory,
            Some(_) | None => match self.find(above, OFlags::PATH | OFlags::DIRECTORY) {
                Err(Errno::NOENT) => self.make(above)?,
                found => found?,
            },
        };
        Ok(&self.last.insert((joined, found)).1)
    }

    fn make(&self, parts: &[&[u8]]) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY;
        let mut now = self.find(&[], flags)?;
        for (at, part) in parts.iter().enumerate() {
            now = match self.find(&parts[..=at], flags) {
                Err(Errno::NOENT) => {
                    mkdirat(&now, *part, Mode::from_raw_mode(0o755))?;
                    let made = self.find(&parts[..=at], flags)?;
                    own(&made, self.owner)?;
                    made
                }
                found => found?,
            };
        }
        Ok(now)
    }

    /// Something else has taken the place of `parts`, which may have led to where we think we are.
    pub(crate) fn has_changed(&mut self, parts: &[&[u8]]) {
        let joined = parts.join(&b'/');
        self.last.take_if(|(path, _)| {
            path.strip_prefix(&joined[..]).is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
        });
    }
}

fn own(file: impl AsFd, owner: Option<(u32, u32)>) -> Result<(), Errno> {
    let Some((user, group)) = owner else { return Ok(()) };
    chownat(file, "", Some(Uid::from_raw(user)), Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)
}
