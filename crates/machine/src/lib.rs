//! One QEMU virtual machine: its description, its process, its network and the host end of the guest channel.
//! Knows nothing of sandboxes, HTTP or where files lie: descriptors and directories are given to it.

pub mod network;
mod tap;

pub use tap::Tap;
