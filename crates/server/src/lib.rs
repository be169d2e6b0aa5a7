//! The server: an HTTP API in front of sandboxes, their lifecycle, and the rows that remember them.

pub mod account;
mod agent_binary;
pub mod app;
mod blocking;
mod buffers;
pub mod clock;
pub mod config;
pub mod database;
mod db;
pub mod doctor;
pub mod error;
pub mod http;
mod instance;
pub mod keys;
mod local;
mod metrics;
mod previews;
mod privileges;
mod run;
pub mod sandbox;
mod shared_work;
pub mod sweep;
pub mod template;
mod ticket;
pub mod volume;
mod whole_file;

pub use agent_binary::AGENT;
pub use app::App;
pub use config::{Capacity, Config, PreviewAccess, PreviewConfig};
pub use error::Error;
pub use local::Local;
pub use machine::network::{Destination, Door, HostPolicy};
pub use privileges::give_up_privileges;
pub use run::{prepare, run};
