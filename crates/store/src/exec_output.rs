//! What execs printed, as far as it is too much for a row: a file for each stream in the directory of their sandbox,
//! and gone with it.

use std::{
    fs::{self, File},
    io::ErrorKind,
    os::unix::fs::{DirBuilderExt, FileExt},
    path::PathBuf,
};

use api::{ExecId, ExecStream, SandboxId};

use crate::{Error, Layout, Result};

/// The output of one sandbox's execs. Appended to by offset: what a killed server left is a beginning of the whole.
#[derive(Debug, Clone)]
pub struct ExecFiles {
    directory: PathBuf,
}

impl ExecFiles {
    /// Touches nothing.
    pub fn of(layout: &Layout, id: &SandboxId) -> Self {
        Self { directory: layout.sandbox(id).join("execs") }
    }

    fn path(&self, exec: &ExecId, stream: ExecStream) -> PathBuf {
        self.directory.join(format!("{exec}.{stream}"))
    }

    /// Made if it is missing, in the directory of a sandbox that is still there.
    pub fn open(&self, exec: &ExecId, stream: ExecStream) -> Result<File> {
        match fs::DirBuilder::new().mode(0o700).create(&self.directory) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                return Err(Error::io("create", &self.directory)(error));
            }
            Ok(()) | Err(_) => {}
        }
        let path = self.path(exec, stream);
        let open = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        open.map_err(Error::io("open", path))
    }

    /// 0 for what is not there.
    pub fn length(&self, exec: &ExecId, stream: ExecStream) -> Result<u64> {
        let path = self.path(exec, stream);
        match fs::metadata(&path) {
            Ok(metadata) => Ok(metadata.len()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            Err(error) => Err(Error::io("stat", path)(error)),
        }
    }

    /// As much as there is, up to `most` bytes from `offset` on.
    pub fn read(
        &self,
        exec: &ExecId,
        stream: ExecStream,
        offset: u64,
        most: usize,
    ) -> Result<Vec<u8>> {
        let path = self.path(exec, stream);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io("open", path)(error)),
        };
        let mut bytes = vec![0; most];
        let mut length = 0;
        while length < most {
            match file.read_at(&mut bytes[length..], offset + length as u64) {
                Ok(0) => break,
                Ok(count) => length += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(Error::io("read", path)(error)),
            }
        }
        bytes.truncate(length);
        Ok(bytes)
    }

    /// There need be none.
    pub fn remove(&self, exec: &ExecId) -> Result<()> {
        for stream in ExecStream::ALL {
            let path = self.path(exec, stream);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(Error::io("remove", path)(error));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    /// Files of other execs than these are removed: their rows are gone.
    pub fn remove_all_but(&self, kept: &[ExecId]) -> Result<()> {
        self.list()?.iter().filter(|id| !kept.contains(id)).try_for_each(|id| self.remove(id))
    }

    /// Those that have a file.
    pub fn list(&self) -> Result<Vec<ExecId>> {
        let entries = match fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io("list", &self.directory)(error)),
        };
        let mut ids = Vec::new();
        for entry in entries {
            let name = entry.map_err(Error::io("list", &self.directory))?.file_name();
            let id = name.to_str().and_then(|name| name.rsplit_once('.')).map(|(id, _)| id.parse());
            ids.extend(id.into_iter().flatten());
        }
        ids.sort();
        ids.dedup();
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_found_by_its_offset_and_goes_when_no_row_names_it() {
        let directory = tempfile::tempdir().unwrap();
        let layout =
            Layout::create(directory.path().join("d"), directory.path().join("c")).unwrap();
        let sandbox = SandboxId::random();
        let files = ExecFiles::of(&layout, &sandbox);
        let ids = ["a", "a.stdout", &"x".repeat(128)].map(|id| id.parse::<ExecId>().unwrap());
        // Without its sandbox there is no place for it.
        assert!(files.open(&ids[0], ExecStream::Stdout).is_err());
        fs::create_dir(layout.sandbox(&sandbox)).unwrap();
        for (at, id) in ids.iter().enumerate() {
            let file = files.open(id, ExecStream::Stdout).unwrap();
            file.write_all_at(format!("output {at}").as_bytes(), 0).unwrap();
        }
        assert_eq!(files.read(&ids[1], ExecStream::Stdout, 7, 100).unwrap(), b"1");
        assert_eq!(files.read(&ids[1], ExecStream::Stdout, 100, 100).unwrap(), b"");
        assert_eq!(files.read(&ids[1], ExecStream::Stderr, 0, 100).unwrap(), b"");
        assert_eq!(files.length(&ids[2], ExecStream::Stdout).unwrap(), 8);
        files.remove_all_but(&ids[1..2]).unwrap();
        assert_eq!(files.list().unwrap(), ids[1..2]);
        files.remove(&ids[1]).unwrap();
        files.remove(&ids[1]).unwrap();
        assert!(files.list().unwrap().is_empty());
    }
}
