//! Unix sockets below a directory whose path may be longer than a socket's address can be.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tokio::net::UnixStream;

use crate::error::{Error, Result};

/// The directory under a short name, as long as the descriptor is open.
fn short(directory: &Path) -> Result<(File, PathBuf)> {
    let open =
        File::options().read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY).open(directory);
    let handle = open.map_err(Error::file("open", directory))?;
    let path = format!("/proc/self/fd/{}", handle.as_raw_fd()).into();
    Ok((handle, path))
}

/// Whatever lay there under that name is replaced.
pub(crate) fn listen(directory: &Path, name: &str) -> Result<UnixListener> {
    let (_handle, short) = short(directory)?;
    match std::fs::remove_file(short.join(name)) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::file("remove", directory.join(name))(error));
        }
        Ok(()) | Err(_) => {}
    }
    UnixListener::bind(short.join(name)).map_err(Error::file("listen at", directory.join(name)))
}

pub(crate) async fn connect(directory: &Path, name: &str) -> Result<UnixStream> {
    let (_handle, short) = short(directory)?;
    UnixStream::connect(short.join(name)).await.map_err(|error| {
        // Whoever listened is gone: its process tells why.
        if matches!(error.kind(), ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset) {
            Error::Lost
        } else {
            Error::file("connect to", directory.join(name))(error)
        }
    })
}
