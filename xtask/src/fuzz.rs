//! `cargo xtask fuzz`: tries inputs that nobody thought of on what reads bytes from strangers, guided by what they reach.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::Duration,
};

use anyhow::{Context, bail, ensure};

use crate::{build, suite::Tally, wait};

/// Each a program in `fuzz/targets`.
const TARGETS: &[&str] = &["archives", "frames", "paths", "ranges"];
const TRIPLE: &str = "x86_64-unknown-linux-gnu";
/// What guides libFuzzer: counters in every block, and the values that are compared. Named by a target, so that build
/// scripts go without.
const COVERAGE: &str = "--cfg fuzzing -C passes=sancov-module \
    -C llvm-args=-sanitizer-coverage-level=4 \
    -C llvm-args=-sanitizer-coverage-inline-8bit-counters \
    -C llvm-args=-sanitizer-coverage-pc-table \
    -C llvm-args=-sanitizer-coverage-trace-compares \
    -C llvm-args=-simplifycfg-branch-fold-threshold=0";
/// An input that takes longer is a finding.
const SLOWEST_SECONDS: u32 = 10;
const MOST_MEMORY_MB: u32 = 1024;
const LINES_SHOWN: usize = 30;
const LONGEST_SHOWN: usize = 1024;

#[derive(clap::Args)]
pub(crate) struct Options {
    /// archives, frames, paths, ranges; all of them, side by side, when none is named
    targets: Vec<String>,
    /// How long
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Try this input once, on the one target that is named
    #[arg(long, value_name = "FILE")]
    replay: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, options: &Options) -> anyhow::Result<()> {
    for name in &options.targets {
        ensure!(TARGETS.contains(&name.as_str()), "find a target {name}: there are {TARGETS:?}");
    }
    if let Some(input) = &options.replay {
        let [target] = &options.targets[..] else { bail!("replay: name one target") };
        return replay(root, target, input);
    }
    let named: Vec<_> = options.targets.iter().map(String::as_str).collect();
    let targets = if named.is_empty() { TARGETS } else { &named };
    let tally = hunt(root, targets, Duration::from_secs(options.seconds))?;
    ensure!(tally.failed == 0, "pass all inputs");
    Ok(())
}

/// All targets at once for so long; each that finds nothing has passed.
pub(crate) fn hunt_all(root: &Path, time: Duration) -> anyhow::Result<Tally> {
    hunt(root, TARGETS, time)
}

fn hunt(root: &Path, targets: &[&str], time: Duration) -> anyhow::Result<Tally> {
    let programs = build(root)?;
    let mut hunts = Vec::new();
    for target in targets {
        hunts.push(Hunt::start(root, &programs, target, time)?);
    }
    let mut tally = Tally::default();
    for mut hunt in hunts {
        let status = hunt.end()?;
        let found = files_in(&hunt.findings)?;
        if status.success() && found.is_empty() {
            println!("fuzz {}: {}", hunt.target, hunt.last_line());
            tally += Tally::PASSED;
        } else {
            hunt.show(&found)?;
            tally += Tally::FAILED;
        }
    }
    Ok(tally)
}

fn replay(root: &Path, target: &str, input: &Path) -> anyhow::Result<()> {
    let program = build(root)?.join(target);
    let mut child = Command::new(&program).arg(input).spawn().context("start the target")?;
    ensure!(wait::end_of(&mut child)?.success(), "pass {}", input.display());
    Ok(())
}

/// The directory of the programs. Apart from all other builds, whose compiler has other flags.
fn build(root: &Path) -> anyhow::Result<PathBuf> {
    let directory = build::target_directory()?.join("fuzz");
    let mut command = build::cargo_command(&root.join("fuzz"));
    command
        .args(["build", "--quiet", "--release", "--locked", "--target", TRIPLE])
        .env("RUSTFLAGS", COVERAGE)
        .env("CARGO_TARGET_DIR", &directory);
    let mut child = command.spawn().context("start cargo")?;
    ensure!(wait::end_of(&mut child)?.success(), "build the fuzz targets");
    Ok(directory.join(TRIPLE).join("release"))
}

fn files_in(directory: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    entries.map(|entry| Ok(entry.context("list a directory")?.path())).collect()
}

/// One target on its hunt. Ends with its owner.
struct Hunt {
    target: String,
    process: Child,
    log: PathBuf,
    findings: PathBuf,
}

impl Hunt {
    /// From the inputs in the repository and what earlier runs have reached; that stays out of the repository.
    fn start(root: &Path, programs: &Path, target: &str, time: Duration) -> anyhow::Result<Self> {
        let place = build::target_directory()?.join("fuzz").join(target);
        let (reached, findings) = (place.join("corpus"), place.join("findings"));
        for directory in [&reached, &findings] {
            fs::create_dir_all(directory)
                .with_context(|| format!("make {}", directory.display()))?;
        }
        // What was found last time is tried first: it passes once its cause is repaired.
        for found in files_in(&findings)? {
            let name = found.file_name().context("name a finding")?;
            fs::rename(&found, reached.join(name)).context("keep a finding")?;
        }
        let log = place.join("log");
        let output = File::create(&log).context("make the log")?;
        let errors = output.try_clone().context("make the log")?;
        let process = Command::new(programs.join(target))
            .arg(format!("-max_total_time={}", time.as_secs()))
            .arg(format!("-timeout={SLOWEST_SECONDS}"))
            .arg(format!("-rss_limit_mb={MOST_MEMORY_MB}"))
            .arg(format!("-artifact_prefix={}/", findings.display()))
            .args(["-print_final_stats=0", "-verbosity=1"])
            .arg(&reached)
            .arg(root.join("fuzz/corpus").join(target))
            // What failed is said above it, and the input is kept.
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .spawn()
            .with_context(|| format!("start {target}"))?;
        Ok(Self { target: target.to_owned(), process, log, findings })
    }

    fn end(&mut self) -> anyhow::Result<ExitStatus> {
        wait::end_of(&mut self.process)
    }

    fn said(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    fn last_line(&self) -> String {
        self.said().lines().last().unwrap_or_default().to_owned()
    }

    fn show(&self, found: &[PathBuf]) -> anyhow::Result<()> {
        let said = self.said();
        let lines: Vec<_> = said.lines().collect();
        println!("fuzz {}:", self.target);
        for line in &lines[lines.len().saturating_sub(LINES_SHOWN)..] {
            println!("    {line}");
        }
        for path in found {
            let input = fs::read(path).with_context(|| format!("read {}", path.display()))?;
            let start = &input[..input.len().min(LONGEST_SHOWN)];
            println!("found {} ({} bytes): {}", path.display(), input.len(), start.escape_ascii());
            println!("again: cargo xtask fuzz {} --replay {}", self.target, path.display());
        }
        Ok(())
    }
}

impl Drop for Hunt {
    fn drop(&mut self) {
        // Fails where it has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
