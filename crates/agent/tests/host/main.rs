//! The agent's server on this host, over a socket pair.

mod channel;
mod execs;
mod files;
mod support;
