//! Small files that are written whole: whoever reads one finds what was written last, or what was there before.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

/// What the new content outlasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outlasts {
    /// The server being killed; a host that dies may take it along.
    Server,
    Host,
}

pub(crate) fn write_whole(
    path: &Path,
    bytes: impl AsRef<[u8]>,
    mode: u32,
    outlasts: Outlasts,
) -> io::Result<()> {
    let draft = path.with_extension("new");
    // Of a server that died. If it stays, the draft is not made.
    let _ = fs::remove_file(&draft);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&draft)?;
    file.write_all(bytes.as_ref())?;
    if outlasts == Outlasts::Server {
        return fs::rename(&draft, path);
    }
    file.sync_all()?;
    fs::rename(&draft, path)?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_and_a_draft_of_before_does_not_matter() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key.pem");
        fs::write(directory.path().join("key.new"), "half, for all to read").unwrap();
        for (text, outlasts) in [("one", Outlasts::Host), ("other", Outlasts::Server)] {
            write_whole(&path, text, 0o600, outlasts).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
            assert_eq!(directory.path().read_dir().unwrap().count(), 1);
        }
    }
}
