//! Watching a file, a directory, or all directories below it. What the host does not take waits in the kernel's queue;
//! when that is full, the kernel says so, and so do we.

use std::collections::HashMap;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use protocol::files::{Noticed, What};
use protocol::frame::{HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, Failure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, fstat, openat};
use rustix::io::Errno;

use super::path;
use crate::failure::{failed, refuse, shown};

/// Of one request.
const MOST_DIRECTORIES: usize = 8192;
const DEEPEST: usize = 256;
/// Of what is found in directories that are new.
const MOST_FOUND: usize = 16_384;
const BUFFER: usize = 16 << 10;
/// For the second half of a move, which the kernel puts into the queue a moment after the first: inotify(7).
const SECOND_HALF: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// So many buffers in a row may end between two halves.
const MOST_BUFFERS: usize = 8;

pub(crate) struct Watcher {
    queue: OwnedFd,
    /// By the kernel's numbers.
    directories: HashMap<i32, Vec<u8>>,
    recursive: bool,
    top: i32,
    is_over: bool,
}

/// What the kernel said, before it is put into our words.
struct Event {
    watch: i32,
    flags: ReadFlags,
    cookie: u32,
    name: Vec<u8>,
}

impl Watcher {
    pub(crate) fn begin(given: &[u8], recursive: bool) -> Result<Self, Failure> {
        let path = path::resolve(given)?;
        let fail = |error| failed("watch", &path, error);
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let found = openat(CWD, &path[..], flags, Mode::empty()).map_err(fail)?;
        let is_directory =
            FileType::from_raw_mode(fstat(&found).map_err(fail)?.st_mode) == FileType::Directory;
        let queue = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).map_err(fail)?;
        let mut watcher = Self {
            queue,
            directories: HashMap::new(),
            recursive: recursive && is_directory,
            top: -1,
            is_over: false,
        };
        watcher.top = watcher.add(&path).map_err(|error| too_many(&path, error))?;
        if watcher.recursive {
            watcher.add_below(&path, None).map_err(|error| too_many(&path, error))?;
        }
        Ok(watcher)
    }

    pub(crate) fn queue(&self) -> BorrowedFd<'_> {
        self.queue.as_fd()
    }

    /// Nothing more will come.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    fn add(&mut self, path: &[u8]) -> Result<i32, Errno> {
        if self.directories.len() >= MOST_DIRECTORIES {
            return Err(Errno::NOSPC);
        }
        let flags = WatchFlags::CREATE
            | WatchFlags::MODIFY
            | WatchFlags::CLOSE_WRITE
            | WatchFlags::ATTRIB
            | WatchFlags::DELETE
            | WatchFlags::MOVED_FROM
            | WatchFlags::MOVED_TO
            | WatchFlags::DELETE_SELF
            | WatchFlags::MOVE_SELF;
        let watch = inotify::add_watch(&self.queue, path, flags)?;
        self.directories.insert(watch, path.to_vec());
        Ok(watch)
    }

    /// Without recursion. What is in directories that are new is told: it may have come before they were watched.
    fn add_below(
        &mut self,
        start: &[u8],
        mut noticed: Option<&mut Vec<Noticed>>,
    ) -> Result<(), Errno> {
        let mut ahead = vec![(start.to_vec(), 0)];
        while let Some((directory, depth)) = ahead.pop() {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let Ok(entries) = openat(CWD, &directory[..], flags, Mode::empty()).and_then(Dir::new)
            else {
                continue;
            };
            for entry in entries.flatten() {
                let name = entry.file_name().to_bytes();
                if matches!(name, b"." | b"..") {
                    continue;
                }
                let path = path::join(&directory, name);
                let is_directory = entry.file_type() == FileType::Directory;
                match &mut noticed {
                    Some(noticed) if noticed.len() < MOST_FOUND => {
                        noticed.push(noticed_at(What::Created, path.clone(), is_directory));
                    }
                    Some(noticed) if noticed.len() == MOST_FOUND => {
                        noticed.push(noticed_at(What::Overflow, Vec::new(), false));
                    }
                    Some(_) | None => {}
                }
                if is_directory && depth < DEEPEST {
                    match self.add(&path) {
                        Ok(_) => ahead.push((path, depth + 1)),
                        Err(Errno::NOENT | Errno::NOTDIR) => {}
                        Err(error) => return Err(error),
                    }
                }
            }
        }
        Ok(())
    }

    /// What has come, as frames with room for their headers; empty when there is nothing now.
    pub(crate) fn next_frames(&mut self) -> Vec<Vec<u8>> {
        let events = self.read();
        let mut noticed = Vec::new();
        let mut events = events.into_iter().peekable();
        while let Some(event) = events.next() {
            let other = events.next_if(|next| {
                event.flags.contains(ReadFlags::MOVED_FROM)
                    && next.flags.contains(ReadFlags::MOVED_TO)
                    && next.cookie == event.cookie
            });
            self.understand(&event, other.as_ref(), &mut noticed);
        }
        // Writes in many small pieces are one change.
        noticed.dedup();
        let mut frames = Vec::new();
        for one in &noticed {
            let message = protocol::message::encode(one);
            let length = u32::try_from(message.len()).unwrap_or(u32::MAX).to_le_bytes();
            for mut bytes in [&length[..], &message[..]] {
                while !bytes.is_empty() {
                    if frames.last().is_none_or(|last: &Vec<u8>| last.len() == HEADER + MAX_PAYLOAD)
                    {
                        frames.push(vec![0; HEADER]);
                    }
                    let Some(last) = frames.last_mut() else { break };
                    let count = bytes.len().min(HEADER + MAX_PAYLOAD - last.len());
                    last.extend_from_slice(&bytes[..count]);
                    bytes = &bytes[count..];
                }
            }
        }
        frames
    }

    /// A buffer's worth, the next call goes on; more when that ends between the halves of a move.
    fn read(&self) -> Vec<Event> {
        let mut events = self.read_buffer();
        for _ in 1..MOST_BUFFERS {
            let is_half =
                events.last().is_some_and(|last| last.flags.contains(ReadFlags::MOVED_FROM));
            let mut queue = [PollFd::new(&self.queue, PollFlags::IN)];
            if !is_half || poll(&mut queue, Some(&SECOND_HALF)) != Ok(1) {
                break;
            }
            events.extend(self.read_buffer());
        }
        events
    }

    fn read_buffer(&self) -> Vec<Event> {
        let mut buffer = [MaybeUninit::uninit(); BUFFER];
        let mut reader = Reader::new(&self.queue, &mut buffer);
        let mut events = Vec::new();
        while let Ok(event) = reader.next() {
            events.push(Event {
                watch: event.wd(),
                flags: event.events(),
                cookie: event.cookie(),
                name: event.file_name().map(|name| name.to_bytes().to_vec()).unwrap_or_default(),
            });
            if reader.is_buffer_empty() {
                break;
            }
        }
        events
    }

    fn understand(&mut self, event: &Event, other: Option<&Event>, noticed: &mut Vec<Noticed>) {
        if event.flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            noticed.push(noticed_at(What::Overflow, Vec::new(), false));
            self.look_again(noticed);
            return;
        }
        if event.flags.contains(ReadFlags::IGNORED) {
            self.directories.remove(&event.watch);
            if event.watch == self.top {
                self.is_over = true;
                noticed.push(noticed_at(What::Gone, Vec::new(), false));
            }
            return;
        }
        let Some(directory) = self.directories.get(&event.watch).cloned() else { return };
        let is_directory = event.flags.contains(ReadFlags::ISDIR);
        let path = if event.name.is_empty() {
            // Of a directory itself its parent tells; of what is watched alone nobody else.
            if event.watch != self.top {
                return;
            }
            directory.clone()
        } else {
            path::join(&directory, &event.name)
        };
        if event.name.is_empty() && event.flags.contains(ReadFlags::MOVE_SELF) {
            self.is_over = true;
            noticed.push(noticed_at(What::Gone, path, is_directory));
            return;
        }
        let what = if event.flags.intersects(ReadFlags::CREATE | ReadFlags::MOVED_TO) {
            What::Created
        } else if event
            .flags
            .intersects(ReadFlags::DELETE | ReadFlags::MOVED_FROM | ReadFlags::DELETE_SELF)
        {
            What::Deleted
        } else if event.flags.contains(ReadFlags::ATTRIB) {
            What::Changed
        } else {
            What::Modified
        };
        if let Some(other) = other
            && let Some(new) = self.directories.get(&other.watch)
        {
            let new = path::join(new, &other.name);
            if is_directory {
                self.rename_below(&path, &new);
            }
            noticed.push(Noticed {
                what: What::Moved,
                path: new.into(),
                is_directory,
                from: Some(path.into()),
            });
            return;
        }
        if is_directory && event.flags.contains(ReadFlags::MOVED_FROM) {
            self.forget_below(&path);
        }
        noticed.push(noticed_at(what, path.clone(), is_directory));
        if self.recursive && is_directory && what == What::Created {
            let added = self.add(&path).and_then(|_| self.add_below(&path, Some(noticed)));
            if !matches!(added, Ok(()) | Err(Errno::NOENT | Errno::NOTDIR)) {
                // Not all of it can be watched.
                noticed.push(noticed_at(What::Overflow, Vec::new(), false));
            }
        }
    }

    /// Events were lost, and with them which directories have come, gone and got other names: what is there now is
    /// watched, under its present name.
    fn look_again(&mut self, noticed: &mut Vec<Noticed>) {
        let before = std::mem::take(&mut self.directories);
        let Some(top) = before.get(&self.top) else { return };
        if self.add(top) != Ok(self.top) {
            self.is_over = true;
            noticed.push(noticed_at(What::Gone, top.clone(), false));
            return;
        }
        if self.recursive {
            // What cannot be watched was told as missed already.
            let _ = self.add_below(top, None);
        }
        for watch in before.into_keys().filter(|watch| !self.directories.contains_key(watch)) {
            let _ = inotify::remove_watch(&self.queue, watch);
        }
    }

    fn rename_below(&mut self, from: &[u8], to: &[u8]) {
        for path in self.directories.values_mut() {
            if let Some(rest) = below(path, from) {
                *path = [to, rest].concat();
            }
        }
    }

    fn forget_below(&mut self, gone: &[u8]) {
        let watches: Vec<i32> = self
            .directories
            .iter()
            .filter(|(_, path)| below(path, gone).is_some())
            .map(|(&watch, _)| watch)
            .collect();
        for watch in watches {
            self.directories.remove(&watch);
            let _ = inotify::remove_watch(&self.queue, watch);
        }
    }
}

/// The rest of a path that is `above` or lies in it.
fn below<'a>(path: &'a [u8], above: &[u8]) -> Option<&'a [u8]> {
    path.strip_prefix(above).filter(|rest| rest.is_empty() || rest[0] == b'/')
}

fn noticed_at(what: What, path: Vec<u8>, is_directory: bool) -> Noticed {
    Noticed { what, path: path.into(), is_directory, from: None }
}

fn too_many(path: &[u8], error: Errno) -> Failure {
    if error == Errno::NOSPC || error == Errno::MFILE {
        let message = format!(
            "watch {}: there are more than {MOST_DIRECTORIES} directories below it, or too much is watched already; watch a part of it",
            shown(path)
        );
        return refuse(ErrorCode::TooLarge, message);
    }
    failed("watch", path, error)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use super::*;

    fn watching(directory: &Path) -> Watcher {
        Watcher::begin(directory.as_os_str().as_bytes(), true).unwrap()
    }

    /// What the watcher has to tell, until so many things are there.
    fn told(watcher: &mut Watcher, count: usize) -> Vec<Noticed> {
        let mut all = Vec::new();
        while all.len() < count {
            let frames = watcher.next_frames();
            assert!(!frames.is_empty(), "{} of {count} were told", all.len());
            let bytes =
                frames.iter().flat_map(|frame| frame[HEADER..].to_vec()).collect::<Vec<_>>();
            let mut rest = &bytes[..];
            while let Some((length, after)) = rest.split_first_chunk::<4>() {
                let (message, after) = after.split_at(u32::from_le_bytes(*length) as usize);
                all.push(protocol::message::decode(message).unwrap());
                rest = after;
            }
        }
        all
    }

    #[test]
    fn a_move_whose_halves_lie_in_two_buffers_is_told_as_a_move() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let mut watcher = watching(directory.path());
        // One event, then pairs of the same length: every buffer ends inside of a pair.
        std::os::unix::fs::symlink("nothing", at("a")).unwrap();
        let count = 4 * BUFFER / 64;
        for _ in 0..count / 2 {
            fs::rename(at("a"), at("b")).unwrap();
            fs::rename(at("b"), at("a")).unwrap();
        }
        let told = told(&mut watcher, 1 + count);
        assert_eq!(told[0].what, What::Created);
        let others: Vec<_> = told[1..].iter().filter(|one| one.what != What::Moved).collect();
        assert!(others.is_empty(), "{others:?}");
    }

    #[test]
    fn what_leaves_the_watched_directory_is_deleted_and_what_comes_is_created() {
        let directory = tempfile::tempdir().unwrap();
        let (inside, outside) = (directory.path().join("inside"), directory.path().join("outside"));
        fs::create_dir(&inside).unwrap();
        fs::create_dir(&outside).unwrap();
        fs::write(inside.join("file"), "").unwrap();
        let mut watcher = watching(&inside);
        fs::rename(inside.join("file"), outside.join("file")).unwrap();
        assert_eq!(told(&mut watcher, 1)[0].what, What::Deleted);
        fs::rename(outside.join("file"), inside.join("file")).unwrap();
        assert_eq!(told(&mut watcher, 1)[0].what, What::Created);
    }
}
