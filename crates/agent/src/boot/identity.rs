//! The files by which a guest knows itself. They are written in place and without a sync: a create waits for them, and
//! after a crash they are written again.

use std::io::Read;

use rustix::fs::{CWD, FileType, Mode, OFlags, fstat, ftruncate, openat, readlinkat, unlinkat};
use rustix::io::{Errno, pwrite};

/// The line of `/etc/hosts` that is ours, so that the host name resolves.
const OUR_ADDRESS: &str = "127.0.1.1";
/// Beyond it a file is not touched.
const LONGEST: u64 = 1 << 20;

pub(crate) fn set_host_name(name: &str) -> Result<(), Errno> {
    rustix::system::sethostname(name.as_bytes())?;
    write_in_place("/etc/hostname", format!("{name}\n").as_bytes(), 0o644)?;
    let hosts = read("/etc/hosts").unwrap_or_default();
    write_in_place("/etc/hosts", with_host(&hosts, name).as_bytes(), 0o644)
}

pub(crate) fn set_machine_id(id: &str) -> Result<(), Errno> {
    write_in_place("/etc/machine-id", format!("{id}\n").as_bytes(), 0o444)
}

pub(crate) fn set_resolver(address: [u8; 4]) -> Result<(), Errno> {
    let [a, b, c, d] = address;
    let text = format!("nameserver {a}.{b}.{c}.{d}\n");
    let path = "/etc/resolv.conf";
    // A template may have a link to what a resolver of its own would write, which does not run here.
    if readlinkat(CWD, path, Vec::new()).is_ok() {
        unlinkat(CWD, path, rustix::fs::AtFlags::empty())?;
    }
    write_in_place(path, text.as_bytes(), 0o644)
}

fn with_host(hosts: &str, name: &str) -> String {
    let mut text = String::with_capacity(hosts.len() + 64);
    if hosts.trim().is_empty() {
        text.push_str("127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n");
    }
    for line in
        hosts.lines().filter(|line| line.split_ascii_whitespace().next() != Some(OUR_ADDRESS))
    {
        text.push_str(line);
        text.push('\n');
    }
    text + OUR_ADDRESS + "\t" + name + "\n"
}

fn read(path: &str) -> Option<String> {
    let mut bytes = Vec::new();
    crate::files::open_regular(path.as_bytes()).ok()?.take(LONGEST).read_to_end(&mut bytes).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Not cut to nothing first: closing such a file makes ext4 write it out at once.
fn write_in_place(path: &str, content: &[u8], mode: u32) -> Result<(), Errno> {
    let flags =
        OFlags::WRONLY | OFlags::CREATE | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = openat(CWD, path, flags, Mode::from_raw_mode(mode))?;
    let stat = fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(Errno::NXIO);
    }
    let mut written = 0;
    while written < content.len() {
        written += pwrite(&file, &content[written..], written as u64)?;
    }
    if u64::try_from(stat.st_size).is_ok_and(|size| size > content.len() as u64) {
        ftruncate(&file, content.len() as u64)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_has_one_line_however_often_it_changes() {
        let once = with_host("127.0.0.1\tlocalhost\n# kept\n", "one");
        assert_eq!(with_host(&once, "two"), "127.0.0.1\tlocalhost\n# kept\n127.0.1.1\ttwo\n");
    }

    #[test]
    fn a_missing_file_gets_localhost_too() {
        assert!(with_host("", "one").starts_with("127.0.0.1\tlocalhost\n"));
    }
}
