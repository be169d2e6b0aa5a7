//! What the figures were measured on.

use std::{fs, process::Command};

use serde_json::{Value, json};

pub(crate) fn describe(accelerator: &str) -> Value {
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    json!({
        "cpu": field("/proc/cpuinfo", "model name"),
        "cores": cores,
        "memory_mb": field("/proc/meminfo", "MemTotal").split(' ').next().and_then(|kb| kb.parse::<u64>().ok()).map(|kb| kb >> 10),
        "system": field_with("/etc/os-release", "PRETTY_NAME", '=').trim_matches('"'),
        "kernel": fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim(),
        "qemu": first_line("qemu-system-x86_64", &["--version"]),
        "accelerator": accelerator,
        "commit": first_line("git", &["rev-parse", "--short", "HEAD"]),
        // Figures of a busy host mean little.
        "load": fs::read_to_string("/proc/loadavg").unwrap_or_default().split(' ').next().and_then(|load| load.parse::<f64>().ok()),
    })
}

fn field(path: &str, name: &str) -> String {
    field_with(path, name, ':')
}

fn field_with(path: &str, name: &str, separator: char) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(separator))
        .find(|(key, _)| key.trim() == name)
        .map(|(_, value)| value.trim().to_owned())
        .unwrap_or_default()
}

fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
}
