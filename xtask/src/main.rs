//! What developers and CI run on the workspace: `cargo xtask --help`.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

mod api;
mod bench;
mod build;
mod check;
mod fuzz;
mod openapi;
mod server;
mod suite;
mod wait;

use std::{path::Path, process::ExitCode};

use anyhow::Context;
use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(about = "Tasks of the workspace")]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Rules of the workspace: which crate uses which, names and lengths of files
    Check,
    /// Write openapi.json anew from the server's routes
    Openapi,
    /// All tests: formatting, rules, lints, crates, end to end, scenarios, leftovers
    Test,
    /// The long tests
    Soak,
    /// Try inputs that nobody thought of on what reads bytes from strangers
    Fuzz(fuzz::Options),
    /// Build the program that tests/faults starts
    Failpoints,
    /// Measure what a sandbox costs beside what the technique alone costs
    Bench(bench::Options),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: failed to {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let task = Arguments::parse().task;
    wait::listen_for_interrupts()?;
    // Of the checkout that cargo runs this in: one that is built may be used by another with the same target directory.
    let own = std::env::var_os("CARGO_MANIFEST_DIR").context("run as `cargo xtask`")?;
    let root = Path::new(&own).parent().context("find the workspace")?;
    match task {
        Task::Check => check::run(root),
        Task::Openapi => openapi::run(root),
        Task::Test => suite::test(root),
        Task::Soak => suite::soak(root),
        Task::Fuzz(options) => fuzz::run(root, &options),
        Task::Failpoints => {
            println!("{}", build::failpoints_program(root)?.display());
            Ok(())
        }
        Task::Bench(options) => bench::run(root, &options),
    }
}
