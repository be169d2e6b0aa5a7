//! `cargo xtask bench`: what a sandbox costs, beside what the technique alone costs on the same host.

mod bursts;
mod databases;
mod execs;
mod figures;
mod files;
mod floor;
mod host;
mod interpreter;
mod machines;
mod measure;
mod reads;
mod state;

use std::{
    fs,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use self::{
    figures::{Document, Figures, Row, table},
    floor::{Bake, Parts, Shape},
    measure::{Bench, Group},
};
use crate::{
    api::id_of,
    build,
    server::{Server, pool},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Write the figures to this file, for programs
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Only these rows
    #[arg(long, value_name = "ROW", value_delimiter = ',')]
    only: Vec<String>,
    /// The template whose sandboxes are measured
    #[arg(long, default_value = "code-interpreter")]
    template: String,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<()> {
    let groups = chosen(&options.only)?;
    let start = Instant::now();
    let progress = |text: &str| eprintln!("[{:>4}s] {text}", start.elapsed().as_secs());

    progress("building the release program and the floor's guest");
    let program = build::release_program(root)?;
    let guest_program = build::floor_guest(root)?;

    progress("starting a server");
    let server = Server::start(&program, &build::target_directory()?.join("bench-server.log"))?;
    let api = server.api();
    progress("creating the first sandbox, which makes its template and bakes it if need be");
    let sandbox = api.create_patiently(&json!({"template": options.template}))?;
    api.exec(id_of(&sandbox)?, "true")?;
    api.delete(&format!("/v1/sandboxes/{}", id_of(&sandbox)?))?;

    let accelerator = sandbox["accelerator"].as_str().unwrap_or("tcg").to_owned();
    let shape =
        Shape { cpus: number(&sandbox, "cpu")?, memory_mib: number(&sandbox, "memory_mb")? };
    let small = Shape { cpus: 1, memory_mib: 512 };
    let template = api.get_json(&format!("/v1/templates/{}", options.template))?;
    let digest =
        template["digest"].as_str().with_context(|| format!("find the digest in {template}"))?;
    let cache =
        std::env::var_os("ATOLL_CACHE_DIR").map_or_else(|| pool().join("cache"), PathBuf::from);
    let parts = Parts::find(&cache, cache.join("templates").join(digest).join("rootfs"))?;
    let directory =
        tempfile::Builder::new().prefix("bench-").tempdir_in(pool()).context("make a directory")?;
    progress(&format!(
        "baking the floor: {} vCPUs, {} MiB, {accelerator}",
        shape.cpus, shape.memory_mib
    ));
    let bake = |name: &str, shape| {
        Bake::make(directory.path().join(name), &accelerator, shape, &parts, &guest_program)
    };
    let (floor, small_floor) = (bake("default", shape)?, bake("small", small)?);
    let host = host::describe(&accelerator);

    let bench = Bench::new(server, floor, small_floor, &options.template);
    let mut results = Vec::new();
    for group in groups {
        let names: Vec<_> = group.rows.iter().map(|row| row.name).collect();
        progress(&format!("measuring {}", names.join(" and ")));
        let measured =
            (group.measure)(&bench).with_context(|| format!("measure {}", names.join(" and ")))?;
        for (row, samples) in group.rows.iter().zip(measured) {
            if is_chosen(row, &options.only) {
                results.push((*row, Figures::new(row, &samples)));
            }
        }
    }
    print!("{}", table(&results));
    if let Some(path) = &options.json {
        let document =
            Document { host: &host, rows: results.iter().map(|(_, figures)| figures).collect() };
        let text = serde_json::to_string_pretty(&document)? + "\n";
        fs::write(path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

fn number(object: &Value, field: &str) -> anyhow::Result<u64> {
    object[field].as_u64().with_context(|| format!("find {field} in {object}"))
}

fn all() -> impl Iterator<Item = &'static Group> {
    let state = measure::GROUPS.iter().chain(state::GROUPS);
    let state = state.chain(machines::GROUPS).chain(execs::GROUPS);
    state.chain(interpreter::GROUPS).chain(files::GROUPS).chain(databases::GROUPS)
}

fn chosen(only: &[String]) -> anyhow::Result<Vec<&'static Group>> {
    let known: Vec<_> = all().flat_map(|group| group.rows).map(|row| row.name).collect();
    for name in only {
        ensure!(
            known.contains(&name.as_str()),
            "find a row `{name}`: there are {}",
            known.join(", ")
        );
    }
    Ok(all().filter(|group| group.rows.iter().any(|row| is_chosen(row, only))).collect())
}

fn is_chosen(row: &Row, only: &[String]) -> bool {
    only.is_empty() || only.iter().any(|name| name == row.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_chosen_by_its_name_and_an_unknown_one_is_refused() {
        assert_eq!(chosen(&["delete".to_owned()]).unwrap().len(), 1);
        assert_eq!(chosen(&[]).unwrap().len(), all().count());
        assert!(chosen(&["exec_treu".to_owned()]).is_err());
    }
}
