//! The host end of a machine's network card, and the namespace its QEMU lives in.

use std::io;
use std::os::fd::OwnedFd;

/// A tap made with `IFF_VNET_HDR`: a saved state with a network card loads only behind such a one.
#[derive(Debug)]
pub struct Tap {
    pub fd: OwnedFd,
    pub netns: OwnedFd,
}

impl Tap {
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, netns: self.netns.try_clone()? })
    }
}
