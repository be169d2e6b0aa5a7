//! One QEMU virtual machine: its description, its process, its network and the host end of the guest channel.
//! Knows nothing of sandboxes, HTTP or where files lie: descriptors and directories are given to it.

mod cgroup;
mod disks;
mod error;
pub mod guest;
mod guest_kernel;
pub mod hypervisor;
mod jail;
mod leftover;
mod machine;
mod mapped_file;
mod memory;
mod memory_copy;
pub mod network;
mod probe;
mod process;
mod qemu_args;
mod qemu_files;
mod qmp;
mod snapshot;
mod sockets;
pub mod spec;
mod statistics;
mod tap;
mod text;

pub use cgroup::{groups_of, remove_groups};
pub use disks::{Durability, RootDisk, VolumeDisk};
pub use error::{Error, Result};
pub use guest::Guest;
pub use hypervisor::{Boot, Hypervisor, Load, Place, PowerOn, Prepared};
pub use leftover::{kill_all_of, uids_in_use};
pub use machine::{Ended, Machine};
pub use memory_copy::WriteBack;
pub use process::host_boot_id;
pub use snapshot::{Ahead, Save, Saved, Steps};
pub use spec::{Accelerator, MACHINE_TYPE, MachineSpec, READ_ONLY_SLOTS, Shape, WRITABLE_SLOTS};
pub use statistics::{DiskStatistics, Statistics};
pub use tap::Tap;
