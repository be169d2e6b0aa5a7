//! `atoll version`.

use std::io;

use clap::Args;
use serde_json::json;

use crate::output::Output;

/// Print the version
#[derive(Args)]
pub(crate) struct Version {}

impl Version {
    pub(crate) fn run(self, output: Output) -> io::Result<()> {
        output.show(&json!({ "version": env!("CARGO_PKG_VERSION") }), |_| {
            concat!("atoll ", env!("CARGO_PKG_VERSION")).to_owned()
        })
    }
}
