//! Bytes on disk: the guest kernel, templates, bakes, snapshots, volumes and the files of sandboxes. Knows neither machines nor HTTP.
//!
//! Everything here blocks; callers in async code go through `spawn_blocking`. A file that others may see appears under
//! its final name by rename after `fsync`, so a process that dies at any instruction leaves the old state or the new
//! one, and [`sweep`] removes the rest.

pub mod bake;
pub mod clone;
pub mod current_guest;
mod debian;
pub mod digest;
mod draft;
mod error;
pub mod exec_output;
pub mod ext4;
mod extents;
pub mod initramfs;
pub mod kernel;
pub mod layout;
pub mod lock;
pub mod machine_files;
pub mod pool;
pub mod prune;
pub mod recipe;
pub mod sandbox_files;
pub mod saved_machine;
pub mod snapshot;
pub mod sweep;
pub mod template;
pub mod tool;
mod tree;
mod unpack;
pub mod volume;

pub use digest::Digest;
pub use error::{Error, Result};
pub use layout::Layout;

/// Hears what a long step is doing, one line at a time.
pub type Progress<'a> = &'a mut dyn FnMut(&str);
