//! A root file system as a tree of files on the host, while it is made. Its content is not trusted: every name is
//! resolved by the kernel as if the tree were the root, so no link leads out of it.

use std::{
    fs::File,
    io::{self, Read, Write},
    os::fd::OwnedFd,
    path::{Component, Path, PathBuf},
};

use rustix::{
    fs::{
        AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid, XattrFlags, chownat, fchmod,
        fchown, fsetxattr, linkat, mkdirat, mknodat, openat, openat2, statat, symlinkat, unlinkat,
    },
    io::Errno,
};

use crate::{Error, Result};

/// Which user and group own something in the tree, by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ids {
    pub(crate) user: u32,
    pub(crate) group: u32,
}

impl Ids {
    pub(crate) const ROOT: Self = Self { user: 0, group: 0 };

    fn uid(self) -> Uid {
        Uid::from_raw(self.user)
    }

    fn gid(self) -> Gid {
        Gid::from_raw(self.group)
    }
}

#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
}

/// Where an entry is to be made: an open directory and a name in it.
struct Place {
    directory: OwnedFd,
    name: PathBuf,
}

impl Tree {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let root = openat(
            rustix::fs::CWD,
            path,
            OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(Error::system("open", path))?;
        Ok(Self { root })
    }

    fn open_inside(&self, path: &Path, flags: OFlags) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::CLOEXEC;
        openat2(
            &self.root,
            relative(path),
            flags,
            Mode::empty(),
            ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
        )
    }

    /// What is there after following links; `None` when there is nothing.
    pub(crate) fn kind(&self, path: &Path) -> Option<FileType> {
        let file = self.open_inside(path, OFlags::PATH).ok()?;
        let stat = rustix::fs::fstat(file).ok()?;
        Some(FileType::from_raw_mode(stat.st_mode))
    }

    pub(crate) fn is_executable(&self, path: &Path) -> bool {
        let Ok(file) = self.open_inside(path, OFlags::PATH) else { return false };
        rustix::fs::fstat(file).is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile
                && stat.st_mode & 0o111 != 0
        })
    }

    /// `None` when there is nothing. Only the first MiB.
    pub(crate) fn read(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let file = match self.open_inside(path, OFlags::RDONLY | OFlags::NONBLOCK) {
            Ok(file) => File::from(file),
            Err(Errno::NOENT) => return Ok(None),
            Err(error) => return Err(self.failed("read", path)(error)),
        };
        let mut bytes = Vec::new();
        file.take(1 << 20).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
        Ok(Some(bytes))
    }

    /// Makes missing parents, for root with mode 0755.
    fn place(&self, path: &Path) -> Result<Place> {
        let name = path
            .file_name()
            .ok_or_else(|| Error::archive(format!("`{}` names no file", path.display())))?;
        let parent = path.parent().unwrap_or(Path::new(""));
        let flags = OFlags::DIRECTORY | OFlags::PATH;
        let directory = match self.open_inside(parent, flags) {
            Err(Errno::NOENT) => {
                self.directory(parent, 0o755, Ids::ROOT)?;
                self.open_inside(parent, flags)
            }
            other => other,
        };
        let directory = directory.map_err(self.failed("open the directory of", path))?;
        Ok(Place { directory, name: name.into() })
    }

    /// One that is there already gets the mode and owner.
    pub(crate) fn directory(&self, path: &Path, mode: u32, owner: Ids) -> Result<()> {
        let readable = OFlags::DIRECTORY | OFlags::RDONLY;
        let directory = match self.open_inside(path, readable) {
            Ok(directory) => directory,
            Err(Errno::NOENT | Errno::NOTDIR) => {
                let place = self.place(path)?;
                place.clear().map_err(self.failed("replace", path))?;
                mkdirat(&place.directory, &place.name, Mode::from_raw_mode(0o700))
                    .map_err(self.failed("create", path))?;
                self.open_inside(path, readable).map_err(self.failed("open", path))?
            }
            Err(error) => return Err(self.failed("open", path)(error)),
        };
        fchown(&directory, Some(owner.uid()), Some(owner.gid()))
            .map_err(self.failed("set the owner of", path))?;
        fchmod(&directory, Mode::from_raw_mode(mode)).map_err(self.failed("set the mode of", path))
    }

    /// In place of whatever was there, except a directory. Filled and given its mode by [`NewFile::finish`].
    pub(crate) fn create_file(&self, path: &Path) -> Result<NewFile> {
        let place = self.place(path)?;
        place.clear().map_err(self.failed("replace", path))?;
        let flags =
            OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::RDWR | OFlags::CLOEXEC;
        let file = openat(&place.directory, &place.name, flags, Mode::from_raw_mode(0o600))
            .map_err(self.failed("create", path))?;
        Ok(NewFile { file: file.into(), path: path.to_owned() })
    }

    pub(crate) fn write(&self, path: &Path, content: &[u8], mode: u32, owner: Ids) -> Result<()> {
        let mut file = self.create_file(path)?;
        file.file.write_all(content).map_err(Error::io("write", path))?;
        file.finish(mode, owner)
    }

    /// New content under the old mode and owner.
    pub(crate) fn rewrite(&self, path: &Path, content: &[u8]) -> Result<()> {
        let file = self.open_inside(path, OFlags::WRONLY | OFlags::TRUNC | OFlags::NONBLOCK);
        let mut file = File::from(file.map_err(self.failed("open", path))?);
        file.write_all(content).map_err(Error::io("write", path))
    }

    pub(crate) fn link(&self, path: &Path, target: &Path, owner: Ids) -> Result<()> {
        let place = self.place(path)?;
        place.clear().map_err(self.failed("replace", path))?;
        symlinkat(target, &place.directory, &place.name).map_err(self.failed("link", path))?;
        place.own(owner).map_err(self.failed("set the owner of", path))
    }

    /// A second name for what `existing` names in this tree; a link there is not followed.
    pub(crate) fn hard_link(&self, path: &Path, existing: &Path) -> Result<()> {
        let name = existing.file_name().ok_or(Errno::INVAL).map_err(self.failed("link", path))?;
        let parent = existing.parent().unwrap_or(Path::new(""));
        let from = self
            .open_inside(parent, OFlags::DIRECTORY | OFlags::PATH)
            .map_err(|errno| self.missing_link_target(path, existing, errno))?;
        let place = self.place(path)?;
        let stat = statat(&from, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|errno| self.missing_link_target(path, existing, errno))?;
        if let Ok(present) = statat(&place.directory, &place.name, AtFlags::SYMLINK_NOFOLLOW)
            && (present.st_dev, present.st_ino) == (stat.st_dev, stat.st_ino)
        {
            return Ok(());
        }
        place.clear().map_err(self.failed("replace", path))?;
        linkat(&from, name, &place.directory, &place.name, AtFlags::empty())
            .map_err(self.failed("link", path))
    }

    fn missing_link_target(&self, path: &Path, existing: &Path, errno: Errno) -> Error {
        match errno {
            Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Error::archive(format!(
                "`{}` is a hard link to `{}`, which is not in the archive before it",
                path.display(),
                existing.display()
            )),
            errno => self.failed("link", path)(errno),
        }
    }

    pub(crate) fn fifo(&self, path: &Path, mode: u32, owner: Ids) -> Result<()> {
        let place = self.place(path)?;
        place.clear().map_err(self.failed("replace", path))?;
        mknodat(
            &place.directory,
            &place.name,
            FileType::Fifo,
            Mode::from_raw_mode(mode & 0o777),
            0,
        )
        .map_err(self.failed("create", path))?;
        place.own(owner).map_err(self.failed("set the owner of", path))
    }

    /// Names the file in the tree, not where the tree lies: these errors reach users.
    fn failed(&self, doing: &'static str, path: &Path) -> impl FnOnce(Errno) -> Error {
        let path = path.to_owned();
        move |errno| Error::Io { doing, path, source: io::Error::from(errno) }
    }
}

impl Place {
    /// Whatever has the name now goes, except a directory with content.
    fn clear(&self) -> Result<(), Errno> {
        match unlinkat(&self.directory, &self.name, AtFlags::empty()) {
            Err(Errno::ISDIR) => unlinkat(&self.directory, &self.name, AtFlags::REMOVEDIR),
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn own(&self, owner: Ids) -> Result<(), Errno> {
        chownat(
            &self.directory,
            &self.name,
            Some(owner.uid()),
            Some(owner.gid()),
            AtFlags::SYMLINK_NOFOLLOW,
        )
    }
}

pub(crate) struct NewFile {
    pub(crate) file: File,
    path: PathBuf,
}

impl NewFile {
    pub(crate) fn finish(self, mode: u32, owner: Ids) -> Result<()> {
        // The owner first: changing it takes set-user-id bits and capabilities away.
        fchown(&self.file, Some(owner.uid()), Some(owner.gid()))
            .map_err(Error::system("set the owner of", &self.path))?;
        fchmod(&self.file, Mode::from_raw_mode(mode & 0o7777))
            .map_err(Error::system("set the mode of", &self.path))
    }

    pub(crate) fn finish_with_capabilities(
        self,
        mode: u32,
        owner: Ids,
        capabilities: &[u8],
    ) -> Result<()> {
        let file = self.file.try_clone().map_err(Error::io("open", &self.path))?;
        let path = self.path.clone();
        self.finish(mode, owner)?;
        fsetxattr(&file, "security.capability", capabilities, XattrFlags::empty())
            .map_err(Error::system("set the capabilities of", &path))
    }
}

/// The kernel takes a leading slash for its own root only with `IN_ROOT`; an empty name would be refused.
fn relative(path: &Path) -> PathBuf {
    let inside: PathBuf =
        path.components().filter(|part| !matches!(part, Component::RootDir)).collect();
    if inside.as_os_str().is_empty() { PathBuf::from(".") } else { inside }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[test]
    fn links_in_a_tree_do_not_lead_out_of_it() {
        let directory = tempfile::tempdir().unwrap();
        let (outside, inside) = (directory.path().join("outside"), directory.path().join("tree"));
        fs::create_dir_all(&outside).unwrap();
        fs::create_dir_all(&inside).unwrap();
        symlink(&outside, inside.join("absolute")).unwrap();
        symlink("../outside", inside.join("relative")).unwrap();
        symlink(outside.join("new"), inside.join("file")).unwrap();
        let tree = Tree::open(&inside).unwrap();
        for path in ["absolute/a", "relative/b", "file", "/../../outside/c"] {
            let _ = tree.write(Path::new(path), b"x", 0o644, Ids::ROOT);
            let _ = tree.directory(&Path::new(path).with_extension("d"), 0o755, Ids::ROOT);
            let _ = tree.link(&Path::new(path).with_extension("l"), Path::new("x"), Ids::ROOT);
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert_eq!(fs::read(inside.join("file")).unwrap(), b"x");
    }
}
