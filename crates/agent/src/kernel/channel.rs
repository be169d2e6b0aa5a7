//! How the agent hands calls to the process of a session: packets that carry descriptors, the first of them a file in
//! memory with the call, the second the socket for the answer.

use std::io::{IoSlice, IoSliceMut, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use protocol::kernel::KernelRun;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::{Deserialize, Serialize};

const MOST_DESCRIPTORS: usize = 4;
/// What comes back over the same way: whether a cell runs. The first of these says that the kernel has begun.
pub(crate) const IDLE: u8 = b'i';
pub(crate) const BUSY: u8 = b'b';

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Call {
    /// With a socket to [`super::launch::Nursery`] as a third descriptor where there is one. The second of a process finds
    /// a kernel that runs, and settles it in.
    Start(Start),
    Run(KernelRun),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) language: String,
    /// Everything: `NAME`, value.
    pub(crate) environment: Vec<(String, String)>,
    pub(crate) directory: serde_bytes::ByteBuf,
}

/// Keeps packets apart.
pub(crate) fn packets() -> Result<(OwnedFd, OwnedFd), Errno> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
}

/// For an answer.
pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

pub(crate) fn in_memory(call: &Call) -> std::io::Result<OwnedFd> {
    let mut file = std::fs::File::from(memfd_create(c"call", MemfdFlags::CLOEXEC)?);
    file.write_all(&protocol::message::encode(call))?;
    Ok(file.into())
}

pub(crate) fn read_call(file: OwnedFd) -> anyhow::Result<Call> {
    let mut file = std::fs::File::from(file);
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(protocol::message::decode(&bytes)?)
}

/// Never waits.
pub(crate) fn send(
    channel: impl AsFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let mut space =
        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        ancillary.push(SendAncillaryMessage::ScmRights(descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    sendmsg(channel, &[IoSlice::new(bytes)], &mut ancillary, flags).map(drop)
}

pub(crate) type Packet = (Vec<u8>, Vec<OwnedFd>);

/// `None`: the other end is closed.
pub(crate) fn receive(channel: impl AsFd) -> Result<Option<Packet>, Errno> {
    let mut bytes = vec![0; 4096];
    let mut space =
        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
    let received = match recvmsg(channel, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
    {
        Err(Errno::CONNRESET) => return Ok(None),
        received => received?,
    };
    let mut descriptors = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            descriptors.extend(rights);
        }
    }
    bytes.truncate(received.bytes);
    Ok((received.bytes > 0).then_some((bytes, descriptors)))
}
