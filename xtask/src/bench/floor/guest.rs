//! The host's end of the floor's guest. `xtask/bench-guest` has the other end and the list of lines.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    os::unix::net::UnixStream,
    path::PathBuf,
    time::{Duration, Instant},
};

use anyhow::{Context, anyhow};
use serde_json::json;

use super::Machine;

/// As much as one write to a port can carry.
const BLOCK: usize = 64 << 10;

pub(crate) struct Guest {
    pub(super) machine: Machine,
    reader: BufReader<UnixStream>,
    /// Removed at the end.
    pub(super) directory: Option<PathBuf>,
}

impl Guest {
    pub(super) fn new(machine: Machine, directory: Option<PathBuf>) -> Self {
        let stream = machine.channel.try_clone().expect("a descriptor can be had");
        Self { machine, reader: BufReader::with_capacity(BLOCK, stream), directory }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.machine.qemu.pid()
    }

    /// One round trip.
    pub(crate) fn ping(&mut self) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.ask("ping", &[])?;
        Ok(start.elapsed())
    }

    /// Fork, exec and wait, as the guest saw it.
    pub(crate) fn run(&mut self, script: &str) -> anyhow::Result<Duration> {
        self.ask(&format!("run {}", script.len()), script.as_bytes())
            .and_then(|answer| nanoseconds(&answer))
    }

    pub(crate) fn sink(&mut self, bytes: &[u8]) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.ask(&format!("sink {}", bytes.len()), bytes)?;
        Ok(start.elapsed())
    }

    pub(crate) fn source(&mut self, length: usize) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.ask(&format!("source {length}"), &[])?;
        let mut bytes = vec![0; length];
        self.reader.read_exact(&mut bytes).context("read what the guest sends")?;
        Ok(start.elapsed())
    }

    /// Into a file, synced.
    pub(crate) fn put(&mut self, path: &str, bytes: &[u8]) -> anyhow::Result<Duration> {
        let start = Instant::now();
        self.ask(&format!("put {} {path}", bytes.len()), bytes)?;
        Ok(start.elapsed())
    }

    /// The guest's own bytes into a file, synced, as the guest saw it.
    pub(crate) fn write(&mut self, path: &str, length: usize) -> anyhow::Result<Duration> {
        self.ask(&format!("write {length} {path}"), &[]).and_then(|answer| nanoseconds(&answer))
    }

    pub(crate) fn read(&mut self, path: &str) -> anyhow::Result<Duration> {
        self.ask(&format!("read {path}"), &[]).and_then(|answer| nanoseconds(&answer))
    }

    /// For ever: the process and its files are gone afterwards.
    pub(crate) fn quit(mut self) -> anyhow::Result<()> {
        self.machine.qmp.call("quit", &json!({}))?;
        self.machine.qemu.wait()?;
        if let Some(directory) = &self.directory {
            fs::remove_dir_all(directory)
                .with_context(|| format!("remove {}", directory.display()))?;
        }
        Ok(())
    }

    /// The rest of the answer after `ok`.
    fn ask(&mut self, line: &str, content: &[u8]) -> anyhow::Result<String> {
        let head = format!("{line}\n");
        if content.len() < BLOCK {
            self.machine.channel.write_all(&[head.as_bytes(), content].concat())
        } else {
            self.machine
                .channel
                .write_all(head.as_bytes())
                .and_then(|()| self.machine.channel.write_all(content))
        }
        .with_context(|| format!("send `{line}`"))?;
        let mut answer = String::new();
        self.reader
            .read_line(&mut answer)
            .with_context(|| format!("read the answer to `{line}`"))?;
        match answer.trim_end().strip_prefix("ok") {
            Some(rest) => Ok(rest.trim().to_owned()),
            None => Err(anyhow!(
                "have the floor's guest do `{line}`: it answered `{}`",
                answer.trim_end()
            )),
        }
    }
}

fn nanoseconds(text: &str) -> anyhow::Result<Duration> {
    Ok(Duration::from_nanos(text.parse().with_context(|| format!("read `{text}` as nanoseconds"))?))
}
