//! The server: an HTTP API in front of sandboxes, their lifecycle, and the rows that remember them.

pub mod app;
pub mod clock;
pub mod config;
mod db;
pub mod error;
pub mod http;
pub mod keys;
mod metrics;
pub mod sandbox;
pub mod template;

pub use app::App;
pub use config::Config;
pub use error::Error;
