//! Where the server's log goes: standard error, in lines for people or for programs.

use std::io::IsTerminal as _;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// `ATOLL_LOG` overrides `level`: a level, or `TARGET=LEVEL,…`.
pub(crate) fn start(format: LogFormat, level: &str) {
    let filter = EnvFilter::try_from_env("ATOLL_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    let log = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_env_filter(filter);
    match format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
}
