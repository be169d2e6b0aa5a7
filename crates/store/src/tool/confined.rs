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
    io::{Errno, FdFlags, fcntl_setfd},
    process::{Gid, Resource, Rlimit, Signal, Uid, set_parent_process_death_signal, setrlimit},
    thread::{
        CapabilitySet, CapabilitySets, UnshareFlags, configure_capability_in_ambient_set,
        remove_capability_from_bounding_set, set_capabilities, set_keep_capabilities,
        set_no_new_privs, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
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
    reach: Reach,
}

/// What the tool can read beside what everybody can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    Image,
    /// All files of the host, for it reads a tree of files that belong to root and others: by the one capability for
    /// that, with which nothing can be written.
    Files,
}

impl Confined {
    pub(super) fn new(path: &Path, reach: Reach) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        // Several servers of a host start at different places.
        let uid = FIRST_UID + std::process::id().wrapping_mul(997).wrapping_add(count) % UIDS;
        let open = File::options().read(true).write(true).open(path);
        let image = open.map_err(Error::io("open", path))?;
        let bytes = fstat(&image).map_err(Error::system("stat", path))?.st_size.cast_unsigned();
        let confined = Self { path: path.to_owned(), image, bytes, uid, reach };
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
        let reach = self.reach;
        #[expect(
            unsafe_code,
            reason = "a hook between fork and exec is the only way to ask for this"
        )]
        // SAFETY: the hook makes system calls only: it allocates nothing and takes no lock. The image is open until the
        // tool has ended.
        unsafe {
            command.pre_exec(move || Ok(give_up_everything_but(image, bytes, uid, reach)?));
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

fn give_up_everything_but(
    image: RawFd,
    bytes: u64,
    uid: u32,
    reach: Reach,
) -> rustix::io::Result<()> {
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
    let kept = match reach {
        Reach::Image => CapabilitySet::empty(),
        Reach::Files => CapabilitySet::DAC_READ_SEARCH,
    };
    forbid_all_but(kept)?;
    set_keep_capabilities(true)?;
    set_thread_res_uid(user, user, user)?;
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })?;
    if !kept.is_empty() {
        // Else executing the tool would take it away.
        configure_capability_in_ambient_set(kept, true)?;
    }
    set_no_new_privs(true)?;
    // Changing the user forgot it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    fcntl_setfd(image, FdFlags::empty())
}

/// What executing something could bring back.
fn forbid_all_but(kept: CapabilitySet) -> rustix::io::Result<()> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if capability == kept {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // The kernel does not know it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno),
        }
    }
    Ok(())
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
    fn a_tool_on_a_tree_reads_all_of_it_and_writes_nothing_but_its_image() {
        let directory = tempfile::tempdir().unwrap();
        let (image, secret) = (directory.path().join("image"), directory.path().join("secret"));
        fs::write(&image, vec![0; 4096]).unwrap();
        fs::write(&secret, "of the tree").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        if fs::metadata(&image).unwrap().uid() != 0 {
            return;
        }
        let script = format!(
            "cat {0}; echo; echo forged > {0}; rm -f {0}; chown 0 $0; grep -E 'Cap(Eff|Bnd)|NoNewPrivs' /proc/self/status",
            secret.display()
        );
        let mut said = Vec::new();
        Tool::new("sh", Duration::from_secs(20))
            .args(["-c", &script])
            .on_image_from_files(&image)
            .unwrap()
            .run_with(&mut |line| said.push(line.to_owned()))
            .unwrap();
        let text = said.join("\n");
        assert!(text.contains("of the tree"), "{text}");
        assert_eq!(fs::read_to_string(&secret).unwrap(), "of the tree");
        // CAP_DAC_READ_SEARCH alone.
        for set in ["CapEff", "CapBnd"] {
            assert!(text.contains(&format!("{set}:\t0000000000000004")), "{text}");
        }
        assert!(text.contains("NoNewPrivs:\t1"), "{text}");
    }

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
