//! Writing: into a file without a name, which takes its place in one step once everything is there and on the disk.

use std::fs::File;
use std::io::{IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use protocol::message::{ErrorCode, Failure, FileWrite};
use rustix::fs::{
    AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid, fchmod, fchown, fstat, fstatvfs, fsync,
    linkat, mkdirat, openat, readlinkat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

use super::acting::{Someone, acting_as};
use super::{any_matches, etag, path, read::is_made_up};
use crate::failure::{failed, refuse, shown};
use crate::users::Accounts;

/// As many links in a row as the kernel follows.
const LINKS: usize = 40;
/// Writing to the disk begins when so much has come, so that little is left to wait for at the end.
const WRITEBACK: u64 = 4 << 20;
const DEFAULT_MODE: u32 = 0o644;

/// A file on its way. Dropped before [`Writer::commit`], it leaves nothing behind.
pub(crate) struct Writer {
    request: FileWrite,
    user: Someone,
    /// Where the file will appear: the end of all links.
    path: Vec<u8>,
    directory: OwnedFd,
    name: Vec<u8>,
    temporary: Temporary,
    owner: Option<(u32, u32)>,
    written: u64,
    written_back: u64,
}

/// A file of [`Writer::directory`] that has no name as long as possible.
struct Temporary {
    file: File,
    /// A second descriptor of the directory, for the removal.
    name: Option<(OwnedFd, String)>,
    /// Not removed when the writing fails: it may be tried again.
    is_kept: bool,
}

/// Where a file that comes in parts lies until it is whole.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    /// Where it will appear.
    pub(crate) path: Vec<u8>,
    directory: Vec<u8>,
    name: Vec<u8>,
    temporary: String,
    inode: u64,
    owner: Option<(u32, u32)>,
    user: Someone,
}

impl Place {
    /// Whoever owns the directory may have put something else there meanwhile.
    pub(crate) fn open(&self) -> Result<File, Failure> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let found = self
            .open_directory()
            .and_then(|directory| openat(directory, self.temporary.as_str(), flags, Mode::empty()))
            .and_then(|file| fstat(&file).map(|stat| (file, stat)));
        match found {
            Ok((file, stat)) if stat.st_ino == self.inode && stat.st_nlink == 1 => Ok(file.into()),
            Ok(_)
            | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO | Errno::ISDIR) => {
                let shown = shown(&self.path);
                let message = format!(
                    "write {shown}: what has come of it was deleted in the sandbox; begin again"
                );
                Err(refuse(ErrorCode::NotFound, message))
            }
            Err(error) => Err(failed("write", &self.path, error)),
        }
    }

    pub(crate) fn remove(&self) {
        if self.open().is_ok()
            && let Ok(directory) = self.open_directory()
        {
            let _ = unlinkat(directory, self.temporary.as_str(), AtFlags::empty());
        }
    }

    fn open_directory(&self) -> Result<OwnedFd, Errno> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        openat(CWD, &self.directory[..], flags, Mode::empty())
    }
}

impl Writer {
    pub(crate) fn begin(request: FileWrite, user: Someone) -> Result<Self, Failure> {
        let acting = user.clone();
        acting_as(acting.as_deref(), || Self::begin_acting(request, user, Temporary::create))
    }

    /// Under a name that stays until the file is whole, or given up.
    pub(crate) fn begin_in_parts(request: FileWrite, user: Someone) -> Result<Place, Failure> {
        let acting = user.clone();
        let mut writer = acting_as(acting.as_deref(), || {
            Self::begin_acting(request, user, Temporary::create_named)
        })?;
        let fail = |error| failed("write", &writer.path, error);
        let inode = fstat(&writer.temporary.file).map_err(fail)?.st_ino;
        let named = writer.temporary.name.take();
        let Some((_, temporary)) = named else { return Err(fail(Errno::IO)) };
        let directory = path::split(&writer.path).map_or(&b"/"[..], |(directory, _)| directory);
        Ok(Place {
            directory: directory.to_vec(),
            name: writer.name,
            path: writer.path,
            temporary,
            inode,
            owner: writer.owner,
            user: writer.user,
        })
    }

    /// Of which `written` bytes have come, all there are.
    pub(crate) fn resume(
        request: FileWrite,
        place: Place,
        file: File,
        written: u64,
    ) -> Result<Self, Failure> {
        let opened = place.open_directory().and_then(|directory| {
            let other = directory.try_clone().map_err(errno)?;
            Ok((directory, other))
        });
        let (directory, other) = opened.map_err(|error| failed("write", &place.path, error))?;
        let temporary = Temporary { file, name: Some((other, place.temporary)), is_kept: true };
        let Place { path, name, owner, user, .. } = place;
        let written_back = written;
        Ok(Self { request, user, path, directory, name, temporary, owner, written, written_back })
    }

    fn begin_acting(
        request: FileWrite,
        user: Someone,
        create: impl FnOnce(&OwnedFd) -> Result<Temporary, Errno>,
    ) -> Result<Self, Failure> {
        let asked = path::resolve(&request.path)?;
        let owner = match &request.owner {
            None => None,
            Some(owner) => Accounts::read().find(owner).map(|user| Some((user.uid, user.gid)))?,
        };
        let path = follow_links(asked)?;
        let Some((parent, name)) = path::split(&path) else { return Err(is_a_directory(&path)) };
        if request.create_parents {
            create_directories(parent, owner)?;
        }
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(CWD, parent, flags, Mode::empty())
            .map_err(|error| failed("write", &path, error))?;
        if is_made_up(&directory) {
            let shown = shown(&path);
            let message =
                format!("write {shown}: files cannot be put there; use a command such as `echo`");
            return Err(refuse(ErrorCode::WrongKind, message));
        }
        let present = look(&directory, name).map_err(|error| failed("write", &path, error))?;
        check(&request, &path, present.as_ref())?;
        if user.is_some() && present.is_some() {
            check_writable(&directory, name).map_err(|error| failed("write", &path, error))?;
        }
        if let Some(wanted) = request.size {
            let room =
                fstatvfs(&directory).map(|system| system.f_bfree.saturating_mul(system.f_frsize));
            if room.is_ok_and(|room| room < wanted) {
                return Err(failed("write", &path, Errno::NOSPC));
            }
        }
        let temporary = create(&directory).map_err(|error| failed("write", &path, error))?;
        let name = name.to_vec();
        let (written, written_back) = (0, 0);
        Ok(Self { request, user, directory, name, temporary, owner, written, written_back, path })
    }

    pub(crate) fn append(&mut self, pieces: &[Vec<u8>]) -> Result<(), Failure> {
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut rest = &mut slices[..];
        while !rest.is_empty() {
            let done = match self.temporary.file.write_vectored(&rest[..rest.len().min(64)]) {
                Ok(done) => done,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(failed(
                        "write",
                        &self.path,
                        Errno::from_io_error(&error).unwrap_or(Errno::IO),
                    ));
                }
            };
            self.written += done as u64;
            IoSlice::advance_slices(&mut rest, done);
            while rest.first().is_some_and(|slice| slice.is_empty()) {
                rest = &mut rest[1..];
            }
        }
        if self.written - self.written_back >= WRITEBACK {
            start_writeback(
                &self.temporary.file,
                self.written_back,
                self.written - self.written_back,
            );
            self.written_back = self.written;
        }
        Ok(())
    }

    /// The file takes its place: bytes and etag.
    pub(crate) fn commit(self) -> Result<(u64, String), Failure> {
        let user = self.user.clone();
        acting_as(user.as_deref(), || self.commit_acting())
    }

    fn commit_acting(mut self) -> Result<(u64, String), Failure> {
        let fail = |error| failed("write", &self.path, error);
        let present = look(&self.directory, &self.name).map_err(fail)?;
        check(&self.request, &self.path, present.as_ref())?;
        let file = &self.temporary.file;
        let owner = match (self.owner, &present, &self.user) {
            (Some(owner), _, _) => Some(owner),
            (None, Some(old), None) => Some((old.st_uid, old.st_gid)),
            // Theirs, as it was made.
            (None, Some(_), Some(_)) | (None, None, _) => None,
        };
        if let Some((user, group)) = owner {
            let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
            fchown(file, user, group).map_err(fail)?;
        }
        if self.user.is_some() && present.is_some() {
            check_writable(&self.directory, &self.name).map_err(fail)?;
        }
        // After the change of owner, which takes set-uid bits away.
        let mode =
            self.request.mode.or(present.as_ref().map(|old| old.st_mode)).unwrap_or(DEFAULT_MODE);
        fchmod(file, Mode::from_raw_mode(mode & 0o7777)).map_err(fail)?;
        fsync(file).map_err(fail)?;
        self.temporary.appear(&self.directory, &self.name, self.request.only_new).map_err(
            |error| match error {
                Errno::EXIST if self.request.only_new => precondition(&self.path),
                Errno::BUSY => refuse(
                    ErrorCode::Conflict,
                    format!("write {}: something is mounted there", shown(&self.path)),
                ),
                error => failed("write", &self.path, error),
            },
        )?;
        // A descriptor of kind PATH cannot be synced.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = openat(&self.directory, ".", flags, Mode::empty()).map_err(fail)?;
        fsync(directory).map_err(fail)?;
        let stat = fstat(&self.temporary.file).map_err(fail)?;
        Ok((self.written, etag(&stat)))
    }
}

impl Temporary {
    fn create(directory: &OwnedFd) -> Result<Self, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        match openat(directory, ".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode) {
            Ok(file) => Ok(Self { file: file.into(), name: None, is_kept: false }),
            // The file system has no nameless files.
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                Self::create_named(directory)
            }
            Err(error) => Err(error),
        }
    }

    fn create_named(directory: &OwnedFd) -> Result<Self, Errno> {
        let mode = Mode::RUSR | Mode::WUSR;
        let name = temporary_name()?;
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = openat(directory, name.as_str(), flags, mode)?;
        Ok(Self {
            file: file.into(),
            name: Some((directory.try_clone().map_err(errno)?, name)),
            is_kept: false,
        })
    }

    fn appear(&mut self, directory: &OwnedFd, name: &[u8], only_new: bool) -> Result<(), Errno> {
        if self.name.is_none() {
            // By its descriptor, for which root needs no `/proc`.
            let link =
                |name: &[u8]| match linkat(&self.file, "", directory, name, AtFlags::EMPTY_PATH) {
                    // Not for a user.
                    Err(Errno::NOENT | Errno::PERM) => {
                        let file = format!("/proc/self/fd/{}", self.file.as_raw_fd());
                        linkat(CWD, file, directory, name, AtFlags::SYMLINK_FOLLOW)
                    }
                    linked => linked,
                };
            if only_new {
                return link(name);
            }
            let temporary = temporary_name()?;
            link(temporary.as_bytes())?;
            self.name = Some((directory.as_fd().try_clone_to_owned().map_err(errno)?, temporary));
        }
        if let Some((_, temporary)) = &self.name {
            if only_new {
                // The other name goes with the drop.
                linkat(directory, temporary.as_str(), directory, name, AtFlags::empty())?;
                self.is_kept = false;
                return Ok(());
            }
            renameat(directory, temporary.as_str(), directory, name)?;
            self.name = None;
        }
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some((directory, name)) = &self.name
            && !self.is_kept
        {
            let _ = unlinkat(directory, name.as_str(), AtFlags::empty());
        }
    }
}

/// Short, so that it fits beside a final name of any length.
fn temporary_name() -> Result<String, Errno> {
    let mut random = [0; 8];
    rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
    Ok(format!(".atoll-{:016x}", u64::from_ne_bytes(random)))
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` wants")]
fn errno(error: std::io::Error) -> Errno {
    Errno::from_io_error(&error).unwrap_or(Errno::IO)
}

pub(crate) fn start_writeback(file: &File, from: u64, length: u64) {
    let (Ok(from), Ok(length)) = (i64::try_from(from), i64::try_from(length)) else { return };
    #[expect(unsafe_code, reason = "no crate in use offers sync_file_range")]
    // SAFETY: the descriptor is open and no memory is passed. It only begins what the fsync at the end makes sure of.
    unsafe {
        libc::sync_file_range(file.as_raw_fd(), from, length, libc::SYNC_FILE_RANGE_WRITE);
    }
}

fn look(directory: &OwnedFd, name: &[u8]) -> Result<Option<Stat>, Errno> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whoever may put a file in its place might still not be allowed to write into it.
fn check_writable(directory: &OwnedFd, name: &[u8]) -> Result<(), Errno> {
    let flags =
        OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::NOCTTY | OFlags::CLOEXEC;
    match openat(directory, name, flags, Mode::empty()) {
        // A program that runs, or a link that has just come: replaced, not written into.
        Ok(_) | Err(Errno::TXTBSY | Errno::LOOP | Errno::NOENT) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Whether what is there now may be replaced.
fn check(request: &FileWrite, path: &[u8], present: Option<&Stat>) -> Result<(), Failure> {
    if let Some(stat) = present {
        match FileType::from_raw_mode(stat.st_mode) {
            // A link can only have come since links were followed; it is replaced as the file it has taken the place of.
            FileType::RegularFile | FileType::Symlink => {}
            FileType::Directory => return Err(is_a_directory(path)),
            FileType::Fifo
            | FileType::Socket
            | FileType::CharacterDevice
            | FileType::BlockDevice
            | FileType::Unknown => {
                let shown = shown(path);
                let message =
                    format!("write {shown}: it is a device, a FIFO or a socket, not a file");
                return Err(refuse(ErrorCode::WrongKind, message));
            }
        }
    }
    let etags = &request.if_etags;
    let unchanged = etags.is_empty() || present.is_some_and(|stat| any_matches(etags, &etag(stat)));
    if (request.only_new && present.is_some()) || !unchanged {
        return Err(precondition(path));
    }
    Ok(())
}

fn precondition(path: &[u8]) -> Failure {
    let message =
        format!("write {}: it is not as the request requires; read it again", shown(path));
    refuse(ErrorCode::PreconditionFailed, message)
}

fn is_a_directory(path: &[u8]) -> Failure {
    refuse(ErrorCode::WrongKind, format!("write {}: it is a directory", shown(path)))
}

/// Where a write to `path` ends up: a link is written through, also one that leads to nothing yet.
fn follow_links(path: Vec<u8>) -> Result<Vec<u8>, Failure> {
    let mut now = path;
    for _ in 0..LINKS {
        let target = match readlinkat(CWD, &now[..], Vec::new()) {
            Ok(target) => target.into_bytes(),
            // Not a link, or nothing there; what is in the way is found when the directory is opened.
            Err(Errno::INVAL | Errno::NOENT | Errno::NOTDIR) => return Ok(now),
            Err(error) => return Err(failed("write", &now, error)),
        };
        let Some((directory, _)) = path::split(&now) else { return Ok(now) };
        // Relative to where the directory really is, or `..` in the link would be taken from the wrong place.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let real = openat(CWD, directory, flags, Mode::empty())
            .and_then(|fd| readlinkat(CWD, format!("/proc/self/fd/{}", fd.as_raw_fd()), Vec::new()))
            .map_err(|error| failed("write", &now, error))?;
        let joined =
            if target.starts_with(b"/") { target } else { path::join(real.as_bytes(), &target) };
        // `..` after a link inside the target is left to the kernel, which knows where it leads.
        now = match joined.iter().rposition(|&byte| byte == b'/') {
            Some(slash)
                if !joined[slash + 1..].is_empty()
                    && !matches!(&joined[slash + 1..], b"." | b"..") =>
            {
                joined
            }
            Some(_) | None => return Err(is_a_directory(&now)),
        };
    }
    Err(failed("write", &now, Errno::LOOP))
}

/// Makes what is missing of `path`, each enterable by everybody and owned like the file.
pub(crate) fn create_directories(path: &[u8], owner: Option<(u32, u32)>) -> Result<(), Failure> {
    let fail = |error| failed("make the directory", path, error);
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match openat(CWD, path, flags, Mode::empty()) {
        Ok(_) => return Ok(()),
        Err(Errno::NOENT) => {}
        Err(Errno::NOTDIR) => return Err(not_a_directory(path)),
        Err(error) => return Err(fail(error)),
    }
    let mut now = openat(CWD, "/", flags, Mode::empty()).map_err(fail)?;
    for part in path.split(|&byte| byte == b'/').filter(|part| !part.is_empty()) {
        now = match openat(&now, part, flags, Mode::empty()) {
            Ok(next) => next,
            Err(Errno::NOTDIR) => return Err(not_a_directory(path)),
            Err(Errno::NOENT) => {
                let made = match mkdirat(&now, part, Mode::from_raw_mode(0o755)) {
                    Ok(()) => true,
                    Err(Errno::EXIST) => false,
                    Err(error) => return Err(fail(error)),
                };
                let next = openat(&now, part, flags, Mode::empty()).map_err(fail)?;
                if let (true, Some((user, group))) = (made, owner) {
                    let (user, group) = (Some(Uid::from_raw(user)), Some(Gid::from_raw(group)));
                    rustix::fs::chownat(&next, "", user, group, AtFlags::EMPTY_PATH)
                        .map_err(fail)?;
                }
                next
            }
            Err(error) => return Err(fail(error)),
        };
    }
    Ok(())
}

fn not_a_directory(path: &[u8]) -> Failure {
    refuse(ErrorCode::WrongKind, format!("a part of {} is a file, not a directory", shown(path)))
}
