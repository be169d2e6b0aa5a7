//! A process as it is told of to users: by name and number.

use std::fmt;

/// Linux `include/linux/sched.h`.
const PF_KTHREAD: u64 = 0x0020_0000;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    pid: i32,
    name: String,
    pub(crate) is_of_kernel: bool,
    /// It does not react to anything before that.
    pub(crate) waits_for_disk: bool,
}

impl Process {
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Self::parse(pid, &std::fs::read(format!("/proc/{pid}/stat")).ok()?)
    }

    /// `17 (any name) S 1 17 17 0 -1 4194560 …`
    fn parse(pid: i32, stat: &[u8]) -> Option<Self> {
        let begin = stat.iter().position(|&byte| byte == b'(')?;
        let end = stat.iter().rposition(|&byte| byte == b')')?;
        let name = String::from_utf8_lossy(stat.get(begin + 1..end)?).into_owned();
        let mut fields = std::str::from_utf8(&stat[end + 1..]).ok()?.split_ascii_whitespace();
        let waits_for_disk = fields.next()? == "D";
        let flags: u64 = fields.nth(5)?.parse().ok()?;
        Some(Self { pid, name, is_of_kernel: flags & PF_KTHREAD != 0, waits_for_disk })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, pid, .. } = self;
        write!(f, "{} (process {pid})", name.escape_debug())
    }
}

/// Numbers of all processes.
pub(crate) fn all() -> impl Iterator<Item = i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_hold_anything() {
        let stat = b"17 (a) S (b\n) D 1 17 17 0 -1 2129984 0 0";
        let process = Process::parse(17, stat).unwrap();
        assert!(process.waits_for_disk && process.is_of_kernel);
        assert_eq!(process.to_string(), "a) S (b\\n (process 17)");
    }

    #[test]
    fn we_are_no_kernel_thread() {
        let own = i32::try_from(std::process::id()).unwrap();
        assert!(!Process::of(own).unwrap().is_of_kernel);
    }
}
