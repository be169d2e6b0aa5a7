//! Sources that grew too long, and names that say nothing.

use std::{fs, path::Path};

use anyhow::Context;

const MOST_LINES: usize = 600;

/// Paths that may be longer. Empty, and meant to stay so: split by topic instead.
const LONG_FILES: &[&str] = &[];

/// A file is named after a thing of the field, never after a layer or after nothing.
const EMPTY_NAMES: &[&str] = &[
    "common", "handlers", "helper", "helpers", "manager", "misc", "service", "services", "util",
    "utils",
];

/// The sentences of refusal for the sources below `root`.
pub(super) fn refusals(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut refusals = Vec::new();
    for top in ["crates", "tests", "xtask"] {
        visit(root, &root.join(top), &mut refusals)?;
    }
    Ok(refusals)
}

fn visit(root: &Path, directory: &Path, refusals: &mut Vec<String>) -> anyhow::Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let entry = entry?;
        let path = entry.path();
        let shown = path.strip_prefix(root).unwrap_or(&path).display().to_string();
        let is_directory = entry.file_type()?.is_dir();
        let is_source = path.extension().is_some_and(|extension| extension == "rs");
        if is_directory || is_source {
            refusals.extend(refused_name(&shown));
        }
        if is_directory {
            visit(root, &path, refusals)?;
        } else if is_source {
            let text = fs::read_to_string(&path).with_context(|| format!("read {shown}"))?;
            refusals.extend(refused_length(&shown, text.lines().count()));
        }
    }
    Ok(())
}

fn refused_name(path: &str) -> Option<String> {
    let stem = Path::new(path).file_stem()?.to_str()?;
    EMPTY_NAMES.contains(&stem).then(|| {
        format!("{path} is named after nothing of the field: name it after what it is about")
    })
}

fn refused_length(path: &str, lines: usize) -> Option<String> {
    // A suite of end-to-end tests is a list of claims, not a thing to be understood whole.
    let is_suite = path.starts_with("tests/");
    (lines > MOST_LINES && !is_suite && !LONG_FILES.contains(&path))
        .then(|| format!("{path} has {lines} lines, more than {MOST_LINES}: split it by topic"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_after_nothing_are_refused_and_names_of_the_field_are_not() {
        for path in
            ["crates/store/src/utils.rs", "crates/server/src/http/handlers", "tests/helpers.rs"]
        {
            assert!(refused_name(path).is_some(), "{path}");
        }
        for path in
            ["crates/store/src/layout.rs", "crates/server/src/sandbox", "crates/machine/src/lib.rs"]
        {
            assert!(refused_name(path).is_none(), "{path}");
        }
    }

    #[test]
    fn a_file_may_have_just_the_most_lines() {
        assert!(refused_length("crates/api/src/id.rs", MOST_LINES).is_none());
        assert!(refused_length("crates/api/src/id.rs", MOST_LINES + 1).is_some());
        assert!(refused_length("tests/files.rs", MOST_LINES + 1).is_none());
    }
}
