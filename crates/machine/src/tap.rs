//! The host end of a machine's network card, and the namespace its QEMU lives in.
#![expect(unsafe_code, reason = "taps are made by an ioctl")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sched::{CloneFlags, unshare};

/// A tap made with `IFF_VNET_HDR`: a saved state with a network card loads only behind such a one.
#[derive(Debug)]
pub struct Tap {
    pub fd: OwnedFd,
    pub netns: OwnedFd,
}

nix::ioctl_write_int!(tun_set_iff, b'T', 202);

impl Tap {
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, netns: self.netns.try_clone()? })
    }

    /// A tap that leads nowhere, in a namespace that goes when the last descriptor of it is closed. Blocks shortly.
    pub fn unconnected() -> io::Result<Self> {
        // Namespaces belong to threads: one of its own is the only one that changes.
        std::thread::spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET)?;
            let netns = File::open("/proc/thread-self/ns/net")?;
            Ok(Self { fd: open_tap("tap0")?, netns: netns.into() })
        })
        .join()
        .map_err(|_| io::Error::other("the thread that makes a tap panicked"))?
    }
}

/// Makes a tap in this thread's network namespace.
pub(crate) fn open_tap(name: &str) -> io::Result<OwnedFd> {
    let device = File::options().read(true).write(true).open("/dev/net/tun")?;
    let mut request = libc::ifreq {
        ifr_name: [0; libc::IFNAMSIZ],
        ifr_ifru: libc::__c_anonymous_ifr_ifru {
            ifru_flags: i16::try_from(libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR)
                .map_err(io::Error::other)?,
        },
    };
    for (target, byte) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *target = byte.cast_signed();
    }
    // SAFETY: TUNSETIFF reads an ifreq, which lives until the call returns.
    unsafe { tun_set_iff(device.as_raw_fd(), &raw const request as libc::c_ulong) }?;
    Ok(device.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unconnected_tap_lives_in_a_namespace_of_its_own() {
        use std::os::unix::fs::MetadataExt;
        let (one, two) = (Tap::unconnected().unwrap(), Tap::unconnected().unwrap());
        let inode = |fd: &OwnedFd| File::from(fd.try_clone().unwrap()).metadata().unwrap().ino();
        let own = std::fs::metadata("/proc/self/ns/net").unwrap().ino();
        assert!(inode(&one.netns) != inode(&two.netns) && inode(&one.netns) != own);
    }
}
