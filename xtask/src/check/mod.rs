//! Rules of the workspace that no compiler knows. Cheap: nothing is compiled.

mod arrows;
mod hygiene;

use std::path::Path;

use anyhow::bail;

pub(crate) fn run(root: &Path) -> anyhow::Result<()> {
    let mut refusals = arrows::refusals()?;
    refusals.extend(hygiene::refusals(root)?);
    for refusal in &refusals {
        println!("{refusal}");
    }
    if !refusals.is_empty() {
        bail!("keep the workspace's rules: {} broken", refusals.len());
    }
    Ok(())
}
