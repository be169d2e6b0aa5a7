//! Deleting a tree: without recursion, without following a link, without ever naming a path twice, so that nothing put in
//! the way while it runs leads it out of the tree.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use protocol::message::{ErrorCode, Failure};
use rustix::fs::{AtFlags, CWD, Dir, Mode, OFlags, fstat, openat, readlinkat, statat, unlinkat};
use rustix::io::Errno;

use super::list::open_directory;
use super::path;
use crate::failure::{failed, refuse, shown};

/// Levels held open at once; a deeper one is found again through its child's `..`, and checked.
const HELD_OPEN: usize = 128;

/// How often a directory that was emptied may have been filled again before we give up.
const PUT_BACK: u32 = 64;

struct Level {
    /// `None`: closed, because many are open below it.
    entries: Option<Dir>,
    identity: (u64, u64),
    /// In the level above.
    name: Vec<u8>,
}

/// Done also when there is nothing at `path`.
pub(crate) fn delete(given: &[u8]) -> Result<(), Failure> {
    let path = path::resolve(given)?;
    let fail = |error| failed("delete", &path, error);
    let Some((parent, name)) = path::split(&path) else {
        return Err(refuse(ErrorCode::Denied, "/ cannot be deleted; delete the sandbox"));
    };
    let parent = match openat(
        CWD,
        parent,
        OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    ) {
        Ok(parent) => parent,
        Err(Errno::NOENT | Errno::NOTDIR) => return Ok(()),
        Err(error) => return Err(fail(error)),
    };
    let refused = match unlinkat(&parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(error @ (Errno::ISDIR | Errno::PERM | Errno::BUSY)) => error,
        Err(error) => return Err(fail(error)),
    };
    if let Some(mounted) = mount_below(&parent, name) {
        let message = format!("{} is a mounted file system; unmount it first", shown(&mounted));
        return Err(refuse(ErrorCode::Denied, message));
    }
    match delete_directory(&parent, name) {
        Ok(()) => Ok(()),
        // It is no directory after all: an immutable file, or another's in a directory for all.
        Err(Errno::NOTDIR | Errno::LOOP) => Err(fail(refused)),
        Err(error) => Err(fail(error)),
    }
}

fn delete_directory(parent: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    let Some(first) = enter(parent, name)? else { return Ok(()) };
    let device = first.identity.0;
    let mut levels = vec![first];
    let mut again = PUT_BACK;
    while let Some(depth) = levels.len().checked_sub(1) {
        let level = &mut levels[depth];
        let Some(entries) = &mut level.entries else { return Err(Errno::STALE) };
        let next = match entries.read() {
            Some(Ok(next)) => Some(next),
            None | Some(Err(Errno::NOENT)) => None,
            Some(Err(error)) => return Err(error),
        };
        let Some(next) = next else {
            leave(&mut levels, parent, &mut again)?;
            continue;
        };
        let name = next.file_name().to_bytes();
        if matches!(name, b"." | b"..") {
            continue;
        }
        let directory = entries.fd()?;
        match unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => continue,
            Err(Errno::ISDIR | Errno::PERM) => {}
            Err(error) => return Err(error),
        }
        match unlinkat(directory, name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => continue,
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            // Unlink was not permitted and it is no directory: an immutable file.
            Err(Errno::NOTDIR) => return Err(Errno::PERM),
            Err(error) => return Err(error),
        }
        let Some(below) = enter(directory, name)? else { continue };
        if below.identity.0 != device {
            return Err(Errno::BUSY);
        }
        levels.push(below);
        if let Some(far) = levels.len().checked_sub(HELD_OPEN + 1) {
            levels[far].entries = None;
        }
    }
    Ok(())
}

fn enter(directory: impl AsFd, name: &[u8]) -> Result<Option<Level>, Errno> {
    let opened = match open_directory(directory, name) {
        Ok(opened) => opened,
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error),
    };
    let identity = identity(&opened)?;
    Ok(Some(Level { entries: Some(Dir::new(opened)?), identity, name: name.to_vec() }))
}

/// Removes the emptied last level and makes sure that the one above is open. If something was put into it meanwhile, the
/// level is read again, as often as `again` says.
fn leave(levels: &mut Vec<Level>, top: &OwnedFd, again: &mut u32) -> Result<(), Errno> {
    let Some(mut done) = levels.pop() else { return Ok(()) };
    let removed = match levels.last_mut() {
        None => unlinkat(top, &done.name[..], AtFlags::REMOVEDIR),
        Some(above) => {
            let entries = match &mut above.entries {
                Some(entries) => entries,
                closed @ None => closed.insert(reopen(&done, above.identity)?),
            };
            unlinkat(entries.fd()?, &done.name[..], AtFlags::REMOVEDIR)
        }
    };
    match removed {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(Errno::NOTEMPTY | Errno::EXIST) if *again > 0 => {
            *again -= 1;
            if let Some(entries) = &mut done.entries {
                entries.rewind();
            }
            levels.push(done);
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn reopen(below: &Level, identity_above: (u64, u64)) -> Result<Dir, Errno> {
    let here = below.entries.as_ref().ok_or(Errno::STALE)?;
    let up = openat(
        here.fd()?,
        "..",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?;
    // Somebody may have moved it away; what it is in now is not ours to delete.
    if identity(&up)? == identity_above { Dir::new(up) } else { Err(Errno::STALE) }
}

fn identity(directory: impl AsFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(directory)?;
    Ok((stat.st_dev, stat.st_ino))
}

/// A mount point at or below `name`, found before anything is touched.
fn mount_below(parent: &OwnedFd, name: &[u8]) -> Option<Vec<u8>> {
    statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let real = readlinkat(CWD, format!("/proc/self/fd/{}", parent.as_raw_fd()), Vec::new()).ok()?;
    let path = path::join(real.as_bytes(), name);
    let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
    mounts.split(|&byte| byte == b'\n').filter_map(mount_point).find(|point| {
        point.strip_prefix(&path[..]).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
    })
}

/// The fifth field of a line of `mountinfo`, in which blanks and the like are written as `\ooo`.
fn mount_point(line: &[u8]) -> Option<Vec<u8>> {
    let field = line.split(|&byte| byte == b' ').nth(4)?;
    let (mut point, mut rest) = (Vec::new(), field);
    while let Some((&first, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok());
        if let Some(byte) = octal.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            point.push(byte);
            rest = &after[3..];
        } else {
            point.push(first);
            rest = after;
        }
    }
    Some(point)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_point_with_a_blank_is_read_as_it_is() {
        let line = b"36 35 98:0 /mnt1 /mnt/a\\040b\\134c rw,noatime - ext3 /dev/root rw";
        assert_eq!(mount_point(line).unwrap(), b"/mnt/a b\\c");
    }
}
