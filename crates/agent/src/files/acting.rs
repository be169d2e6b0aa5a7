//! Work on files with the rights of a user. Linux keeps them for each thread: the worker that does the work takes them on
//! and gives them back, and the rest of the agent goes on as root.
#![expect(unsafe_code, reason = "the C library's functions would change all threads")]

use std::io;
use std::sync::Arc;

use protocol::message::{ErrorCode, Failure};

use crate::failure::refuse;
use crate::users::User;

/// `None`: root, as we are.
pub(crate) type Someone = Option<Arc<User>>;

/// With the rights on files of `user`: what is made meanwhile is theirs, and what they may not do is refused.
pub(crate) fn acting_as<T>(
    user: Option<&User>,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    let Some(user) = user else { return work() };
    let _acting = Acting::begin(user).map_err(|error| {
        refuse(ErrorCode::Internal, format!("take on the rights of a user: {error}"))
    })?;
    work()
}

/// While it lives, this thread has the rights of another user.
struct Acting {
    user: u32,
    group: u32,
    groups: Vec<u32>,
}

impl Acting {
    fn begin(user: &User) -> io::Result<Self> {
        let before = Self { user: file_user(None), group: file_group(None), groups: groups()? };
        set_groups(&user.groups)?;
        file_group(Some(user.gid));
        file_user(Some(user.uid));
        // From here on the drop of `before` gives them back.
        if file_user(None) != user.uid || file_group(None) != user.gid {
            return Err(io::Error::from(io::ErrorKind::PermissionDenied));
        }
        Ok(before)
    }
}

impl Drop for Acting {
    fn drop(&mut self) {
        // The user first: with it the right to change the rest comes back.
        file_user(Some(self.user));
        file_group(Some(self.group));
        let restored = set_groups(&self.groups);
        // A thread that would do the next one's work with this one's rights must not go on.
        if restored.is_err() || file_user(None) != self.user || file_group(None) != self.group {
            std::process::abort();
        }
    }
}

/// Sets it, if so asked; what it was before. This system call has no failure: an id that cannot be is ignored.
fn file_user(to: Option<u32>) -> u32 {
    // SAFETY: numbers in, a number out; it changes this thread alone.
    let before = unsafe { libc::syscall(libc::SYS_setfsuid, to.unwrap_or(u32::MAX)) };
    u32::try_from(before).unwrap_or(u32::MAX)
}

fn file_group(to: Option<u32>) -> u32 {
    // SAFETY: as above.
    let before = unsafe { libc::syscall(libc::SYS_setfsgid, to.unwrap_or(u32::MAX)) };
    u32::try_from(before).unwrap_or(u32::MAX)
}

fn groups() -> io::Result<Vec<u32>> {
    let all = nix::unistd::getgroups().map_err(io::Error::from)?;
    Ok(all.into_iter().map(nix::unistd::Gid::as_raw).collect())
}

fn set_groups(groups: &[u32]) -> io::Result<()> {
    // SAFETY: the kernel reads as many numbers as there are; it changes this thread alone.
    let result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    use super::*;

    #[test]
    fn rights_are_taken_on_and_given_back_also_after_a_panic() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let secret = directory.path().join("secret");
        std::fs::write(&secret, "x").unwrap();
        std::fs::set_permissions(&secret, PermissionsExt::from_mode(0o600)).unwrap();
        std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o777)).unwrap();
        let (uid, gid) = (54_321, 54_322);
        let (name, home, shell) = ("somebody".to_owned(), Vec::new(), String::new());
        let user = User { uid, gid, groups: vec![gid], name, home, shell };
        let made = directory.path().join("made");
        acting_as(Some(&user), || {
            assert!(std::fs::read(&secret).is_err());
            std::fs::write(&made, "y").unwrap();
            Ok(())
        })
        .unwrap();
        let made = made.metadata().unwrap();
        assert_eq!((made.uid(), made.gid()), (uid, gid));
        assert!(std::fs::read(&secret).is_ok());
        let panicked = std::panic::catch_unwind(|| {
            acting_as(Some(&user), || -> Result<(), Failure> { panic!("on purpose") })
        });
        assert!(panicked.is_err());
        assert!(std::fs::read(&secret).is_ok());
    }
}
