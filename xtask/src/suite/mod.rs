//! `cargo xtask test` and `soak`: everything that must hold, in an order in which the quickest to fail comes first.

pub(crate) mod leftovers;
mod tally;

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::{BufRead, BufReader, ErrorKind},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use cargo_metadata::MetadataCommand;

use self::leftovers::Inventory;
pub(crate) use self::tally::Tally;
use crate::{
    build, check, fuzz,
    server::{Server, pool},
    wait,
};

/// The everyday jobs, through the published clients, whose capabilities are there.
const SCENARIOS: &[&str] = &[
    "artifacts",
    "chart",
    "cli",
    "cli_db",
    "commands",
    "database",
    "directory",
    "files",
    "interpreter",
    "isolation",
    "lifecycle",
    "machine",
    "machine_volume",
    "snapshot",
    "ts_files",
    "ts_snapshot",
    "volume",
];

/// Of each fuzz target, all at once.
const FUZZ: Duration = Duration::from_secs(60);
const LONG_FUZZ: Duration = Duration::from_secs(900);
/// Of the crates' tests, and of the scenarios.
const MOST_UNSTEADY: usize = 5;

pub(crate) fn test(root: &Path) -> anyhow::Result<()> {
    let mut suite = Suite::new(root);
    suite.step("formatting", |root| {
        let mut tally = cargo(root, &["fmt", "--all", "--check"])?;
        tally += cargo(root, &["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])?;
        Ok(tally)
    })?;
    suite.step("rules of the workspace", |root| check::run(root).map(|()| Tally::PASSED))?;
    suite.step("lints", |root| {
        cargo(
            root,
            &["clippy", "--quiet", "--workspace", "--all-targets", "--", "--deny", "warnings"],
        )
    })?;
    let before = Inventory::take();
    suite.step("tests of the crates", tests_of_the_crates)?;
    remove_disks_of_machines()?;
    suite.step("fuzz targets", |root| fuzz::hunt_all(root, FUZZ))?;
    suite.step("build with failpoints", |root| {
        build::failpoints_program(root).map(|_| Tally::PASSED)
    })?;
    suite.with_program(|suite, program| {
        suite.step("end-to-end tests", |root| {
            let mut arguments = end_to_end(root)?;
            arguments.push("--no-fail-fast".to_owned());
            cargo_test(root, &arguments, Some(program)).map(|(tally, _)| tally)
        })?;
        suite.step("scenarios", |root| scenarios(root, program))
    })?;
    suite.step("leftovers on the host", |_| no_leftovers(&before))?;
    suite.finish()
}

/// The long tests, which are marked as ignored.
pub(crate) fn soak(root: &Path) -> anyhow::Result<()> {
    let mut suite = Suite::new(root);
    let before = Inventory::take();
    suite.step("long tests of the crates", |root| {
        cargo_test(
            root,
            &["--workspace", "--exclude", "tests", "--no-fail-fast", "--", "--ignored"],
            None,
        )
        .map(|(tally, _)| tally)
    })?;
    remove_disks_of_machines()?;
    suite.step("fuzz targets", |root| fuzz::hunt_all(root, LONG_FUZZ))?;
    suite.with_program(|suite, program| {
        suite.step("long end-to-end tests", |root| {
            let mut arguments = end_to_end(root)?;
            arguments.extend(["--no-fail-fast", "--", "--ignored"].map(str::to_owned));
            cargo_test(root, &arguments, Some(program)).map(|(tally, _)| tally)
        })
    })?;
    suite.step("leftovers on the host", |_| no_leftovers(&before))?;
    suite.finish()
}

struct Suite<'a> {
    root: &'a Path,
    start: Instant,
    tally: Tally,
    failures: Vec<String>,
}

impl<'a> Suite<'a> {
    fn new(root: &'a Path) -> Self {
        Self { root, start: Instant::now(), tally: Tally::default(), failures: Vec::new() }
    }

    /// A failing step is counted and the next one begins; only an interrupt ends the suite.
    fn step(
        &mut self,
        name: &str,
        action: impl FnOnce(&Path) -> anyhow::Result<Tally>,
    ) -> anyhow::Result<()> {
        self.say(name);
        let tally = match action(self.root) {
            Ok(tally) => tally,
            Err(error) => {
                println!("failed to {error:#}");
                Tally::FAILED
            }
        };
        wait::check_interrupt()?;
        if tally.failed > 0 {
            self.failures.push(name.to_owned());
        }
        self.tally += tally;
        Ok(())
    }

    /// The steps that need the program are left out when it cannot be built; that counts as one failure.
    fn with_program(
        &mut self,
        steps: impl FnOnce(&mut Self, &Path) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut program = None;
        self.step("release build", |root| {
            program = Some(build::release_program(root)?);
            Ok(Tally::PASSED)
        })?;
        program.map_or(Ok(()), |program| steps(self, &program))
    }

    fn say(&self, text: &str) {
        println!("\n[{:>4}s] ==== {text}", self.start.elapsed().as_secs());
    }

    /// The tally is the last line.
    fn finish(self) -> anyhow::Result<()> {
        self.say("done");
        for failure in &self.failures {
            println!("failed: {failure}");
        }
        if self.tally.unsteady > 0 {
            println!(
                "{} failed, and held when they ran again alone: look for `unsteady` above, and for the fault",
                self.tally.unsteady
            );
        }
        println!("{}", self.tally);
        ensure!(self.tally.failed == 0, "pass all tests");
        Ok(())
    }
}

/// Those that fail run once more by themselves. One that holds then is unsteady.
fn tests_of_the_crates(root: &Path) -> anyhow::Result<Tally> {
    let all = ["--workspace", "--exclude", "tests", "--no-fail-fast"];
    let (mut tally, failed) = cargo_test(root, &all, None)?;
    // Others than these are faults of more than a test, and so is a program that ended in the middle of its tests.
    if failed.is_empty() || failed.len() > MOST_UNSTEADY || failed.len() as u64 != tally.failed {
        return Ok(tally);
    }
    wait::check_interrupt()?;
    println!("once more, alone: {failed:?}");
    let mut alone = all.map(str::to_owned).to_vec();
    alone.extend(["--", "--exact", "--test-threads=1"].map(str::to_owned));
    alone.extend(failed.iter().cloned());
    let (again, failed_again) = cargo_test(root, &alone, None)?;
    if again.passed + again.failed < tally.failed {
        return Ok(tally);
    }
    for name in failed.difference(&failed_again) {
        let line = format!("unsteady: {name}");
        println!("{line}");
        tally.take_in(&line);
    }
    Ok(tally)
}

/// Selects the test programs of package `tests` out of the whole workspace: selected as a package, it would have its
/// dependencies built once more, with fewer features.
fn end_to_end(root: &Path) -> anyhow::Result<Vec<String>> {
    let metadata = MetadataCommand::new().current_dir(root).no_deps().exec();
    let metadata = metadata.context("read cargo metadata")?;
    let package = metadata.packages.iter().find(|package| package.name.as_str() == "tests");
    let package = package.context("find package `tests`")?;
    let programs = package.targets.iter().filter(|target| target.is_test());
    let of_crates = metadata.packages.iter().filter(|other| other.name != package.name);
    for other in of_crates.flat_map(|other| &other.targets).filter(|target| target.is_test()) {
        let is_taken = programs.clone().any(|program| program.name == other.name);
        ensure!(
            !is_taken,
            "name {} otherwise: package `tests` has a test of that name",
            other.src_path
        );
    }
    let mut arguments = vec!["--workspace".to_owned()];
    arguments.extend(programs.flat_map(|target| ["--test".to_owned(), target.name.clone()]));
    Ok(arguments)
}

/// Of the tests of crate `machine`, which cannot tell which of them is the last.
fn remove_disks_of_machines() -> anyhow::Result<()> {
    let directory = pool().join("test-machine");
    match std::fs::remove_dir_all(&directory) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(error).with_context(|| format!("remove {}", directory.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn no_leftovers(before: &Inventory) -> anyhow::Result<Tally> {
    let left = before.left_since()?;
    for thing in &left {
        println!("left over: {thing}");
    }
    Ok(if left.is_empty() { Tally::PASSED } else { Tally::FAILED })
}

fn cargo(root: &Path, arguments: &[&str]) -> anyhow::Result<Tally> {
    let mut command = cargo_command(root);
    command.args(arguments);
    let mut child = command.spawn().context("start cargo")?;
    let status = wait::end_of(&mut child)?;
    Ok(if status.success() { Tally::PASSED } else { Tally::FAILED })
}

/// The end-to-end tests start servers of their own, from the program that `ATOLL_PROGRAM` names.
fn cargo_test(
    root: &Path,
    arguments: &[impl AsRef<OsStr>],
    program: Option<&Path>,
) -> anyhow::Result<(Tally, BTreeSet<String>)> {
    let mut command = cargo_command(root);
    command.arg("test").args(arguments);
    if let Some(program) = program {
        command.env("ATOLL_PROGRAM", program);
    }
    counted(command)
}

fn cargo_command(root: &Path) -> Command {
    let mut command = build::cargo_command(root);
    command.stdin(Stdio::null());
    command
}

fn scenarios(root: &Path, program: &Path) -> anyhow::Result<Tally> {
    let directory = std::env::var_os("ATOLL_SCENARIOS")
        .map_or_else(|| root.join("../shared/scenarios"), PathBuf::from);
    let script = directory.join("run.sh");
    if !script.is_file() {
        println!(
            "left out: there are no scenarios in {} (ATOLL_SCENARIOS names another place)",
            directory.display()
        );
        return Ok(Tally::default());
    }
    let log = build::target_directory()?.join("test-server.log");
    println!("the server's log is {}", log.display());
    let server = Server::start(program, &log)?;
    let run = |names: &[String]| {
        let mut command = Command::new("bash");
        command.arg(&script).args(names);
        command.env("ATOLL_URL", &server.url).env("ATOLL_KEY", &server.key);
        command.stdin(Stdio::null());
        counted(command)
    };
    let all: Vec<_> = SCENARIOS.iter().map(|name| (*name).to_owned()).collect();
    let (mut tally, failed) = run(&all)?;
    if !failed.is_empty() && failed.len() <= MOST_UNSTEADY {
        wait::check_interrupt()?;
        println!("once more: {failed:?}");
        let (_, failed_again) = run(&failed.iter().cloned().collect::<Vec<_>>())?;
        for name in failed.difference(&failed_again) {
            let line = format!("unsteady: {name}");
            println!("{line}");
            tally.take_in(&line);
        }
    }
    Ok(tally)
}

/// Shows the output as it comes, adds up the summaries in it, and gives the names of the tests that failed.
fn counted(mut command: Command) -> anyhow::Result<(Tally, BTreeSet<String>)> {
    let mut child =
        command.stdout(Stdio::piped()).spawn().with_context(|| format!("start {command:?}"))?;
    let output = child.stdout.take().context("take the output")?;
    let reader = std::thread::spawn(move || {
        let (mut tally, mut failed) = (Tally::default(), BTreeSet::new());
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            // Every test that passed, by name, is for whoever runs one test program.
            if !(line.starts_with("test ") && line.ends_with(" ... ok")) {
                println!("{line}");
            }
            tally.take_in(&line);
            failed.extend(tally::failed_test(&line).map(str::to_owned));
        }
        (tally, failed)
    });
    let status = wait::end_of(&mut child)?;
    let Ok((mut tally, failed)) = reader.join() else { bail!("read the output") };
    if !status.success() && tally.failed == 0 {
        tally.failed = 1;
    }
    Ok((tally, failed))
}
