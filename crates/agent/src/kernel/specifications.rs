//! Kernel specifications, as `jupyter kernelspec` installs them: what there is besides Python's own kernel.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

#[derive(Debug, Clone, Deserialize, PartialEq, Eq)]
pub(super) struct Specification {
    pub(super) argv: Vec<String>,
    #[serde(default)]
    pub(super) language: String,
    #[serde(default)]
    pub(super) env: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) interrupt_mode: Option<String>,
}

/// Names under which a language is asked for.
const SAME: [&[&str]; 3] = [
    &["javascript", "js", "node", "nodejs", "jslab"],
    &["bash", "sh", "shell"],
    &["typescript", "ts", "tslab", "deno"],
];

/// Of the kernel named or written in `language`, the first along the search path.
pub(super) fn find(language: &str, environment: &[(String, String)]) -> Option<Specification> {
    let mut by_language = None;
    for directory in search_path(environment) {
        let entries = std::fs::read_dir(&directory).into_iter().flatten().flatten();
        let mut names: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        names.sort();
        for path in names {
            let Some(specification) = read(&path) else { continue };
            let name = path.file_name().map(|name| name.to_string_lossy().to_lowercase());
            if name.as_deref() == Some(language) {
                return Some(specification);
            }
            if by_language.is_none() && are_same(&specification.language.to_lowercase(), language) {
                by_language = Some(specification);
            }
        }
    }
    by_language
}

fn are_same(one: &str, other: &str) -> bool {
    one == other || SAME.iter().any(|names| names.contains(&one) && names.contains(&other))
}

fn read(directory: &Path) -> Option<Specification> {
    let text = std::fs::read(directory.join("kernel.json")).ok()?;
    let mut specification: Specification = serde_json::from_slice(&text).ok()?;
    for argument in &mut specification.argv {
        *argument = argument.replace("{resource_dir}", &directory.to_string_lossy());
    }
    (!specification.argv.is_empty()).then_some(specification)
}

fn search_path(environment: &[(String, String)]) -> Vec<PathBuf> {
    let value = |name: &str| {
        environment.iter().find(|(given, _)| given == name).map(|(_, value)| value.clone())
    };
    let mut path: Vec<PathBuf> = Vec::new();
    let own = value("JUPYTER_PATH").unwrap_or_default();
    path.extend(own.split(':').filter(|part| part.starts_with('/')).map(PathBuf::from));
    path.extend(value("HOME").map(|home| Path::new(&home).join(".local/share/jupyter")));
    path.extend(["/usr/local/share/jupyter", "/usr/share/jupyter"].map(PathBuf::from));
    path.into_iter().map(|directory| directory.join("kernels")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn install(directory: &Path, name: &str, language: &str) {
        let directory = directory.join("kernels").join(name);
        std::fs::create_dir_all(&directory).unwrap();
        let text = serde_json::json!({
            "argv": ["k", "{resource_dir}/x", "{connection_file}"], "language": language, "display_name": "",
        });
        std::fs::write(directory.join("kernel.json"), text.to_string()).unwrap();
    }

    #[test]
    fn a_kernel_is_found_by_its_name_before_its_language() {
        let directory = tempfile::tempdir().unwrap();
        install(directory.path(), "a-bash", "bash");
        install(directory.path(), "bash", "other");
        install(directory.path(), "jslab", "javascript");
        let environment =
            [("JUPYTER_PATH".to_owned(), directory.path().to_str().unwrap().to_owned())];
        let language = |wanted: &str| find(wanted, &environment).map(|found| found.language);
        assert_eq!(language("bash").as_deref(), Some("other"));
        assert_eq!(language("sh").as_deref(), Some("bash"));
        assert_eq!(language("node").as_deref(), Some("javascript"));
        assert_eq!(language("cobol"), None);
        let found = find("bash", &environment).unwrap();
        let resources = directory.path().join("kernels/bash/x");
        assert_eq!(found.argv, ["k", resources.to_str().unwrap(), "{connection_file}"]);
    }
}
