//! Walls around a tool that reads what a guest wrote: a file system made to attack `e2fsck` must gain nothing by it.

use std::{
    ffi::OsString,
    fs::File,
    os::{
        fd::{AsRawFd, BorrowedFd, RawFd},
        unix::process::CommandExt,
    },
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU32, Ordering},
};

use rustix::{
    fs::{fchown, fstat},
    io::{FdFlags, fcntl_setfd},
    process::{Gid, Resource, Rlimit, Signal, Uid, set_parent_process_death_signal, setrlimit},
    thread::{
        UnshareFlags, set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
        unshare_unsafe,
    },
};

use crate::{Error, Result};

/// Below those of machines. No two tools at once have the same, so none can reach into another.
const FIRST_UID: u32 = 1_899_000_000;
const UIDS: u32 = 900_000;
/// A check of a terabyte takes less.
const MEMORY: u64 = 4 << 30;
const PROCESSES: u64 = 64;

/// The image belongs to the tool's user while this lives.
#[derive(Debug)]
pub(super) struct Confined {
    path: PathBuf,
    image: File,
    bytes: u64,
    uid: u32,
}

impl Confined {
    pub(super) fn new(path: &Path) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        // Several servers of a host start at different places.
        let uid = FIRST_UID + std::process::id().wrapping_mul(997).wrapping_add(count) % UIDS;
        let open = File::options().read(true).write(true).open(path);
        let image = open.map_err(Error::io("open", path))?;
        let bytes = fstat(&image).map_err(Error::system("stat", path))?.st_size.cast_unsigned();
        let confined = Self { path: path.to_owned(), image, bytes, uid };
        confined.give_to(uid).map_err(Error::system("change the owner of", path))?;
        Ok(confined)
    }

    fn give_to(&self, uid: u32) -> rustix::io::Result<()> {
        fchown(&self.image, Some(Uid::from_raw(uid)), Some(Gid::from_raw(uid)))
    }

    /// The tool cannot walk to the image, but it has it open.
    pub(super) fn argument(&self) -> OsString {
        format!("/proc/self/fd/{}", self.image.as_raw_fd()).into()
    }

    pub(super) fn confine(&self, command: &mut Command) {
        command.env_clear().env("LC_ALL", "C.UTF-8").env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.current_dir("/");
        let (image, bytes, uid) = (self.image.as_raw_fd(), self.bytes, self.uid);
        #[expect(
            unsafe_code,
            reason = "a hook between fork and exec is the only way to ask for this"
        )]
        // SAFETY: the hook makes system calls only: it allocates nothing and takes no lock. The image is open until the
        // tool has ended.
        unsafe {
            command.pre_exec(move || Ok(give_up_everything_but(image, bytes, uid)?));
        }
    }
}

impl Drop for Confined {
    fn drop(&mut self) {
        if let Err(error) = self.give_to(0) {
            tracing::warn!(path = %self.path.display(), %error, "an image keeps the owner that its tool had");
        }
    }
}

fn give_up_everything_but(image: RawFd, bytes: u64, uid: u32) -> rustix::io::Result<()> {
    #[expect(
        unsafe_code,
        reason = "the descriptor is the parent's, and no thread shares what is unshared"
    )]
    // SAFETY: the parent holds the descriptor open; this process has no other thread.
    let image = unsafe {
        unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWIPC)?;
        BorrowedFd::borrow_raw(image)
    };
    let limit = |most| Rlimit { current: Some(most), maximum: Some(most) };
    setrlimit(Resource::Core, limit(0))?;
    setrlimit(Resource::As, limit(MEMORY))?;
    setrlimit(Resource::Nproc, limit(PROCESSES))?;
    // Whatever it writes, no file becomes longer than the image is.
    setrlimit(Resource::Fsize, limit(bytes))?;
    set_thread_groups(&[])?;
    let (user, group) = (Uid::from_raw(uid), Gid::from_raw(uid));
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    set_no_new_privs(true)?;
    // Changing the user forgot it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    fcntl_setfd(image, FdFlags::empty())
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{MetadataExt, PermissionsExt},
        time::Duration,
    };

    use crate::tool::Tool;

    #[test]
    fn a_tool_on_a_guest_s_image_reaches_that_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let (image, secret) = (directory.path().join("image"), directory.path().join("secret"));
        fs::write(&image, vec![0; 4096]).unwrap();
        fs::write(&secret, "secret").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        if fs::metadata(&image).unwrap().uid() != 0 {
            return;
        }
        let script = format!(
            "printf found 1<> $0 && echo image; cat {0} 2>&1; cat /etc/shadow 2>&1; echo uid $(id -u) groups $(id -G); \
             env; grep -c : /proc/net/dev; grep -E 'CapEff|CapPrm|NoNewPrivs' /proc/self/status; \
             head -c 5000 /dev/zero > $0",
            secret.display()
        );
        let tool = Tool::new("sh", Duration::from_secs(20)).args(["-c", &script]);
        let mut said = Vec::new();
        let ended = tool
            .env("TOKEN", "token")
            .on_image(&image)
            .unwrap()
            .accept(&[0, 1, 2, 153])
            .run_with(&mut |line| said.push(line.to_owned()))
            .unwrap();
        let text = said.join("\n");
        assert!(text.contains("image") && !text.contains("token"), "{text}");
        assert_eq!(text.matches("Permission denied").count(), 2, "{text}");
        assert!(!text.contains("uid 0") && !text.contains(" 0\n"), "{text}");
        assert!(text.contains("CapEff:\t0000000000000000"), "{text}");
        assert!(text.contains("NoNewPrivs:\t1"), "{text}");
        // The loopback device alone.
        assert!(said.iter().any(|line| line == "1"), "{text}");
        assert!(ended.code != 0, "{text}");
        let metadata = fs::metadata(&image).unwrap();
        assert_eq!((metadata.len(), metadata.uid(), metadata.gid()), (4096, 0, 0));
        assert_eq!(fs::read_to_string(&secret).unwrap(), "secret");
    }
}
