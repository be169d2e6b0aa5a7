//! The conversation between the server (host) and `atoll-agent` (guest): frames, messages, flow control.
//! No IO and no async here, so that both ends, tests and fuzzers share exactly these rules.
//!
//! One ordered byte stream carries many *streams*. The host opens a stream by sending a [`Request`] under a new
//! number; both sides send [`frame::Kind::Data`] on it as far as the other side's credit allows, then
//! [`frame::Kind::Finish`]. Either side may [`frame::Kind::Reset`] it.
//!
//! The byte stream has no reliable disconnect signal, so every connection begins with a handshake: see [`hello`].

pub mod files;
pub mod frame;
pub mod hello;
pub mod kernel;
pub mod message;
pub mod transfer;

use std::time::Duration;

pub use message::{Reply, Request};

/// Counts up with every change that an older agent would not understand. Agents live on in snapshots, so the host
/// speaks all versions from 1 on, and asks none for what it does not know: see [`Request::since`].
pub const VERSION: u32 = 2;

/// The name of the virtio-serial port, `/dev/virtio-ports/…` in guests with udev; without, found through
/// `/sys/class/virtio-ports/*/name`.
pub const PORT_NAME: &str = "atoll.0";

/// Bytes of data that either side may send on a new stream before it has been granted more.
pub const INITIAL_CREDIT: u32 = 1 << 20;

/// The longest message (request or reply) after its fragments were put together. A command line of 1 MiB fits.
pub const MAX_MESSAGE: usize = 4 << 20;

/// Volumes have slots: so many that can be written to, then so many that cannot.
pub const WRITABLE_SLOTS: u8 = 8;
pub const READ_ONLY_SLOTS: u8 = 8;

/// [`Request::Quiesce`] is answered within this.
pub const QUIESCE_LIMIT: Duration = Duration::from_secs(90);

/// A quiet guest goes on by itself when it has heard nothing for so long, by a clock that stands while the machine does.
/// A host must have stopped the machine long before.
pub const QUIET_LIMIT: Duration = Duration::from_secs(60);

/// Streams open at once; the agent resets those beyond.
pub const MAX_STREAMS: usize = 1024;
