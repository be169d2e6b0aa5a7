//! Writes `openapi.json` anew from the server's routes. The same test of crate `server` that compares the two in every
//! run writes it when asked to, so that nothing here has to compile the server.

use std::path::Path;

use anyhow::{Context, ensure};

use crate::{build, wait};

pub(crate) fn run(root: &Path) -> anyhow::Result<()> {
    let mut child = build::cargo_command(root)
        .args(["test", "--quiet", "--package", "server", "openapi_json_is_up_to_date"])
        .env("UPDATE_OPENAPI", "1")
        .spawn()
        .context("start cargo")?;
    ensure!(wait::end_of(&mut child)?.success(), "write openapi.json");
    Ok(())
}
