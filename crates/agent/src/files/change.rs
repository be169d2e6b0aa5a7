//! Changes in place: moving, making directories, mode, owner and time.

use protocol::files::{Change, MakeDirectory};
use protocol::message::{Entry, ErrorCode, Failure};
use rustix::fs::{
    AtFlags, CWD, Gid, Mode, OFlags, RenameFlags, Timespec, Timestamps, UTIME_OMIT, Uid, chmodat,
    chownat, openat, renameat, renameat_with, statat, utimensat,
};
use rustix::io::Errno;

use super::{list, path, write};
use crate::failure::{failed, refuse, shown};
use crate::users::Accounts;

/// What is there now, under its new name.
pub(crate) fn move_to(from: &[u8], to: &[u8], overwrite: bool) -> Result<Entry, Failure> {
    let (from, to) = (path::resolve(from)?, path::resolve(to)?);
    if path::split(&from).is_none() || path::split(&to).is_none() {
        return Err(refuse(ErrorCode::Invalid, "/ can neither be moved nor replaced"));
    }
    statat(CWD, &from[..], AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|error| failed("move", &from, error))?;
    if let Some((parent, _)) = path::split(&to) {
        write::create_directories(parent, None)?;
    }
    let moved = if overwrite {
        renameat(CWD, &from[..], CWD, &to[..])
    } else {
        renameat_with(CWD, &from[..], CWD, &to[..], RenameFlags::NOREPLACE)
    };
    moved.map_err(|error| {
        let (shown_from, shown_to) = (shown(&from), shown(&to));
        match error {
            Errno::XDEV => refuse(
                ErrorCode::Conflict,
                format!("move {shown_from}: {shown_to} is on another file system; use a command such as `mv`"),
            ),
            Errno::EXIST => refuse(
                ErrorCode::Exists,
                format!("move {shown_from}: there is something at {shown_to}; delete it, or set `overwrite`"),
            ),
            Errno::NOTEMPTY => refuse(
                ErrorCode::Exists,
                format!("move {shown_from}: {shown_to} is a directory that is not empty"),
            ),
            Errno::ISDIR | Errno::NOTDIR => refuse(
                ErrorCode::WrongKind,
                format!("move {shown_from}: a file cannot replace a directory, nor the other way round ({shown_to})"),
            ),
            Errno::INVAL => refuse(
                ErrorCode::Invalid,
                format!("move {shown_from}: {shown_to} lies in it"),
            ),
            error => failed("move", &from, error),
        }
    })?;
    list::stat(&to)
}

pub(crate) fn make_directory(request: &MakeDirectory) -> Result<Entry, Failure> {
    let path = path::resolve(&request.path)?;
    let owner = owner(request.owner.as_deref())?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, &path[..], flags, Mode::empty()) {
        Ok(_) => return list::stat(&path),
        Err(Errno::NOTDIR) => {
            let message =
                format!("make the directory {}: it, or a part of it, is a file", shown(&path));
            return Err(refuse(ErrorCode::Exists, message));
        }
        Err(Errno::NOENT) => {}
        Err(error) => return Err(failed("make the directory", &path, error)),
    }
    if !request.create_parents
        && let Some((parent, _)) = path::split(&path)
    {
        openat(CWD, parent, flags, Mode::empty())
            .map_err(|error| failed("make a directory in", parent, error))?;
    }
    write::create_directories(&path, owner)?;
    if let Some(mode) = request.mode {
        chmodat(CWD, &path[..], Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())
            .map_err(|error| failed("change", &path, error))?;
    }
    list::stat(&path)
}

pub(crate) fn change(request: &Change) -> Result<Entry, Failure> {
    let path = path::resolve(&request.path)?;
    let owner = owner(request.owner.as_deref())?;
    let fail = |error| failed("change", &path, error);
    statat(CWD, &path[..], AtFlags::empty()).map_err(fail)?;
    if let Some((user, group)) = owner {
        let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
        chownat(CWD, &path[..], user, group, AtFlags::empty()).map_err(fail)?;
    }
    // After the change of owner, which takes set-uid bits away.
    if let Some(mode) = request.mode {
        chmodat(CWD, &path[..], Mode::from_raw_mode(mode & 0o7777), AtFlags::empty())
            .map_err(fail)?;
    }
    if let Some(modified) = request.modified_ns {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec {
                tv_sec: modified.div_euclid(1_000_000_000),
                tv_nsec: modified.rem_euclid(1_000_000_000),
            },
        };
        utimensat(CWD, &path[..], &times, AtFlags::empty()).map_err(fail)?;
    }
    list::stat(&path)
}

fn owner(given: Option<&str>) -> Result<Option<(u32, u32)>, Failure> {
    given.map(|owner| Accounts::read().find(owner).map(|user| (user.uid, user.gid))).transpose()
}
