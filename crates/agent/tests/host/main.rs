//! The agent's server on this host, over a socket pair.
#![expect(
    clippy::unwrap_used,
    clippy::wildcard_enum_match_arm,
    reason = "a test fails by panicking, on whatever was not due"
)]

mod archives;
mod channel;
mod execs;
mod files;
mod kernels;
mod lent;
mod ports;
mod quiet;
mod support;
mod terminals;
mod uploads;
mod users;
mod volumes;
