//! Unpacking, entry by entry as the archive comes. Where it fails, what was unpacked until then stays, except the file in
//! the middle of which it was.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use protocol::files::Unpack;
use protocol::message::{ErrorCode, Failure};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Timespec, Timestamps, UTIME_OMIT, Uid,
    chownat, fchmod, fchown, ftruncate, futimens, linkat, mkdirat, openat, statat, symlinkat,
    syncfs, unlinkat, utimensat,
};
use rustix::io::Errno;

use super::parse::{Event, Kind, Malformed, Member, Parser};
use super::target::Target;
use crate::failure::{failed, refuse, shown};
use crate::files::write::start_writeback;
use crate::users::{Accounts, User};

/// Writing to the disk begins when so much of a file has come.
const WRITEBACK: u64 = 4 << 20;
/// Where something else comes to the same place again and again.
const TRIES: usize = 16;
/// Names of directories whose time is still to be set.
const HELD_NAMES: usize = 1 << 20;

pub(crate) struct Unpacker {
    target: Target,
    /// Of everything; `None`: as the archive says.
    owner: Option<(u32, u32)>,
    /// Else everything is somebody's as it is made, and stays so unless another owner was asked for.
    is_root: bool,
    parser: Parser,
    member: Option<Open>,
    /// What is set when nothing more is put into them.
    directories: Vec<Later>,
    directory_names: usize,
    entries: u64,
    bytes: u64,
}

/// What a directory gets at the end.
struct Later {
    path: Vec<u8>,
    times: Timestamps,
    /// Of one that its owner may not write to: root alone could put something into it.
    mode: Option<u32>,
}

/// The member whose content comes.
struct Open {
    member: Member,
    file: Option<Unfinished>,
    written: u64,
    written_back: u64,
}

/// A file that goes unless it is finished.
struct Unfinished {
    file: File,
    parent: OwnedFd,
    name: Vec<u8>,
    is_finished: bool,
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = unlinkat(&self.parent, &self.name[..], AtFlags::empty());
        }
    }
}

impl Unpacker {
    /// For `user`, whose everything will be; `None`: for root.
    pub(crate) fn begin(request: &Unpack, user: Option<&User>) -> Result<Self, Failure> {
        let owner = match &request.owner {
            None => None,
            Some(owner) => Accounts::read().find(owner).map(|user| Some((user.uid, user.gid)))?,
        };
        Ok(Self {
            target: Target::open(&request.path, owner)?,
            owner,
            is_root: user.is_none(),
            parser: Parser::new(),
            member: None,
            directories: Vec::new(),
            directory_names: 0,
            entries: 0,
            bytes: 0,
        })
    }

    pub(crate) fn append(&mut self, pieces: &[Vec<u8>]) -> Result<(), Failure> {
        for piece in pieces {
            let mut input = &piece[..];
            loop {
                let done = match self.parser.next(&mut input) {
                    Ok(None) => break,
                    Ok(Some(Event::Member(member))) => self.open(member),
                    Ok(Some(Event::Data { offset, bytes })) => self.write(offset, bytes),
                    Ok(Some(Event::End)) => self.finish_member(),
                    Err(malformed) => Err(self.malformed(malformed)),
                };
                if let Err(failure) = done {
                    self.set_later(&[]);
                    return Err(self.with_what_is_there(failure));
                }
            }
        }
        Ok(())
    }

    /// How many entries, and how many bytes of content.
    pub(crate) fn commit(mut self) -> Result<(u64, u64), Failure> {
        if !self.parser.is_over() {
            return Err(self.with_what_is_there(self.malformed(Malformed::Short)));
        }
        self.set_later(&[]);
        syncfs(self.target.directory())
            .map_err(|error| failed("unpack into", &self.target.path, error))
            .map_err(|failure| self.with_what_is_there(failure))?;
        Ok((self.entries, self.bytes))
    }

    fn owner_of(&self, member: &Member) -> Option<(u32, u32)> {
        self.owner.or_else(|| self.is_root.then_some((member.user, member.group)))
    }

    fn malformed(&self, malformed: Malformed) -> Failure {
        let last = self.member.as_ref().map(|open| format!(" in {}", shown(&open.member.name)));
        refuse(ErrorCode::Invalid, format!("the archive{}: {malformed}", last.unwrap_or_default()))
    }

    fn with_what_is_there(&self, mut failure: Failure) -> Failure {
        let (entries, bytes, path) = (self.entries, self.bytes, shown(&self.target.path));
        let before = format!("; {entries} entries ({bytes} bytes) before it are in {path}");
        failure.message.push_str(&before);
        failure
    }

    fn open(&mut self, member: Member) -> Result<(), Failure> {
        let file = self.place(&member)?;
        self.member = Some(Open { member, file, written: 0, written_back: 0 });
        Ok(())
    }

    /// Puts the member into its place; a file is still without its content.
    fn place(&mut self, member: &Member) -> Result<Option<Unfinished>, Failure> {
        let parts = Target::parts(&member.name)?;
        let fail = |error| {
            let shown = shown(&member.name);
            match error {
                Errno::XDEV | Errno::LOOP => refuse(
                    ErrorCode::Invalid,
                    format!("unpack {shown}: a link on its way leads out of the directory"),
                ),
                Errno::NOTDIR => refuse(
                    ErrorCode::WrongKind,
                    format!("unpack {shown}: a part of it is a file, not a directory"),
                ),
                Errno::ISDIR => refuse(
                    ErrorCode::WrongKind,
                    format!("unpack {shown}: there is a directory in its place"),
                ),
                error => failed("unpack", &member.name, error),
            }
        };
        let Some((name, _)) = parts.split_last() else {
            return match member.kind {
                Kind::Directory => {
                    Ok(self.place_target(member)).and_then(|placed| placed.map_err(fail))
                }
                Kind::File | Kind::Symlink(_) | Kind::HardLink(_) | Kind::Special(_) => {
                    Err(fail(Errno::ISDIR))
                }
            };
        };
        match &member.kind {
            Kind::Directory => {
                self.place_directory(member, &parts).map_err(fail)?;
                Ok(None)
            }
            Kind::File => {
                self.target.has_changed(&parts);
                let parent = self.target.parent(&parts).map_err(fail)?;
                let file = replace(parent, name, || {
                    let flags = OFlags::WRONLY
                        | OFlags::CREATE
                        | OFlags::EXCL
                        | OFlags::NOFOLLOW
                        | OFlags::CLOEXEC;
                    openat(parent, *name, flags, Mode::RUSR | Mode::WUSR)
                })
                .map_err(fail)?;
                let parent = parent.try_clone().map_err(|_| fail(Errno::MFILE))?;
                let name = name.to_vec();
                Ok(Some(Unfinished { file: file.into(), parent, name, is_finished: false }))
            }
            Kind::Symlink(link) => {
                self.target.has_changed(&parts);
                let owner = self.owner_of(member);
                let parent = self.target.parent(&parts).map_err(fail)?;
                replace(parent, name, || symlinkat(&link[..], parent, *name)).map_err(fail)?;
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                if let Some(owner) = owner {
                    let (user, group) = ids(owner);
                    chownat(parent, *name, user, group, flags).map_err(fail)?;
                }
                // Some file systems have no times for links.
                let _ = utimensat(parent, *name, &times(member), flags);
                Ok(None)
            }
            Kind::HardLink(link) => {
                let to = Target::parts(link)?;
                if to != parts {
                    let original = self.target.find(&to, OFlags::PATH | OFlags::NOFOLLOW);
                    let original = original.map_err(|error| match error {
                        Errno::NOENT => refuse(
                            ErrorCode::Invalid,
                            format!(
                                "unpack {}: it is another name of {}, which is not there",
                                shown(&member.name),
                                shown(link)
                            ),
                        ),
                        error => fail(error),
                    })?;
                    self.target.has_changed(&parts);
                    let parent = self.target.parent(&parts).map_err(fail)?;
                    replace(parent, name, || name_again(&original, parent, name)).map_err(fail)?;
                }
                Ok(None)
            }
            Kind::Special(_) => {
                let shown = shown(&member.name);
                let message = format!(
                    "unpack {shown}: it is a device, a FIFO or something unknown; only files, directories and links are unpacked"
                );
                Err(refuse(ErrorCode::Invalid, message))
            }
        }
    }

    /// A directory that was there before keeps its own mode: `/tmp` is unpacked into as well.
    fn place_target(&mut self, member: &Member) -> Result<Option<Unfinished>, Errno> {
        if self.target.is_new {
            self.adorn_directory(member, &[])?;
        }
        Ok(None)
    }

    /// A link to a directory stays one, as long as it leads to a place below the target.
    fn place_directory(&mut self, member: &Member, parts: &[&[u8]]) -> Result<(), Errno> {
        let Some((name, _)) = parts.split_last() else { return Ok(()) };
        let parent = self.target.parent(parts)?;
        match mkdirat(parent, *name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                let stat = statat(parent, *name, AtFlags::SYMLINK_NOFOLLOW)?;
                if is_link(&stat) {
                    self.target.find(parts, OFlags::PATH | OFlags::DIRECTORY)?;
                    return Ok(());
                }
            }
            Err(error) => return Err(error),
        }
        self.adorn_directory(member, parts)
    }

    fn adorn_directory(&mut self, member: &Member, parts: &[&[u8]]) -> Result<(), Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let directory = self.target.find(parts, flags)?;
        let is_open = self.is_root || member.mode & 0o700 == 0o700;
        let mode = if is_open { member.mode } else { member.mode | 0o700 };
        match adorn(&directory, mode, self.owner_of(member)) {
            // Somebody else's, that was there before.
            Err(Errno::PERM) if !self.is_root && self.owner.is_none() => return Ok(()),
            adorned => adorned?,
        }
        let path = parts.join(&b'/');
        if self.directory_names > HELD_NAMES {
            self.set_later(&path);
        }
        self.directory_names += path.len() + size_of::<Later>();
        let mode = (!is_open).then_some(member.mode);
        self.directories.push(Later { path, times: times(member), mode });
        Ok(())
    }

    /// Of all directories but those above `next`.
    fn set_later(&mut self, next: &[u8]) {
        let is_above = |path: &[u8]| {
            next.strip_prefix(path)
                .is_some_and(|rest| path.is_empty() || rest.first() == Some(&b'/'))
        };
        let all = std::mem::take(&mut self.directories);
        let (kept, done): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|one| !next.is_empty() && is_above(&one.path));
        // What is deeper was put there later.
        for Later { path, times, mode } in done.iter().rev() {
            let parts: Vec<&[u8]> =
                path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()).collect();
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW;
            // It may have been moved away meanwhile.
            if let Ok(directory) = self.target.find(&parts, flags) {
                let _ = futimens(&directory, times);
                if let Some(mode) = mode {
                    let _ = fchmod(directory, Mode::from_raw_mode(*mode));
                }
            }
        }
        self.directory_names = kept.iter().map(|one| one.path.len()).sum();
        self.directories = kept;
    }

    fn write(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Failure> {
        let Some(open) = &mut self.member else { return Ok(()) };
        let Some(unfinished) = &open.file else { return Ok(()) };
        if let Err(error) = unfinished.file.write_all_at(bytes, offset) {
            let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
            return Err(failed("unpack", &open.member.name, errno));
        }
        open.written = offset + bytes.len() as u64;
        if open.written - open.written_back >= WRITEBACK {
            start_writeback(&unfinished.file, open.written_back, open.written - open.written_back);
            open.written_back = open.written;
        }
        Ok(())
    }

    fn finish_member(&mut self) -> Result<(), Failure> {
        let Some(mut open) = self.member.take() else { return Ok(()) };
        let owner = self.owner_of(&open.member);
        if let Some(unfinished) = &mut open.file {
            let fail = |error| failed("unpack", &open.member.name, error);
            if open.written < open.member.size {
                ftruncate(&unfinished.file, open.member.size).map_err(fail)?;
            }
            adorn(&unfinished.file, open.member.mode, owner).map_err(fail)?;
            futimens(&unfinished.file, &times(&open.member)).map_err(fail)?;
            unfinished.is_finished = true;
            self.bytes += open.member.size;
        }
        self.entries += 1;
        Ok(())
    }
}

/// Does it again where something was in the way, which is deleted first.
fn replace<T>(
    parent: impl AsFd,
    name: &[u8],
    mut make: impl FnMut() -> Result<T, Errno>,
) -> Result<T, Errno> {
    let mut tries = TRIES;
    loop {
        match make() {
            Err(Errno::EXIST) if tries > 0 => match unlinkat(&parent, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => tries -= 1,
                Err(error) => return Err(error),
            },
            made => return made,
        }
    }
}

/// Owner and mode. The change of owner takes set-uid bits away, so it comes first.
fn adorn(file: impl AsFd, mode: u32, owner: Option<(u32, u32)>) -> Result<(), Errno> {
    if let Some(owner) = owner {
        let (user, group) = ids(owner);
        fchown(&file, user, group)?;
    }
    fchmod(&file, Mode::from_raw_mode(mode))
}

/// `u32::MAX` would mean "as it is"; such a user cannot be.
fn ids((user, group): (u32, u32)) -> (Option<Uid>, Option<Gid>) {
    let known = |id: u32| Some(id).filter(|&id| id != u32::MAX);
    (known(user).map(Uid::from_raw), known(group).map(Gid::from_raw))
}

fn name_again(original: &OwnedFd, parent: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    match linkat(original, "", parent, name, AtFlags::EMPTY_PATH) {
        // Not for a user.
        Err(Errno::NOENT | Errno::PERM) => {
            let file = format!("/proc/self/fd/{}", original.as_raw_fd());
            linkat(CWD, file, parent, name, AtFlags::SYMLINK_FOLLOW)
        }
        linked => linked,
    }
}

fn times(member: &Member) -> Timestamps {
    Timestamps {
        last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
        last_modification: Timespec {
            tv_sec: member.seconds,
            tv_nsec: i64::from(member.nanoseconds),
        },
    }
}

fn is_link(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Symlink
}
