//! What listens in the guest: addresses, and the processes behind them.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::unix::ffi::OsStrExt;

use protocol::message::{Listener, ListenerProcess};

/// `TCP_LISTEN`, as the kernel's tables have it.
const LISTENS: &str = "0A";
/// A guest may hold a million sockets open: what is beyond these is not looked at.
const MOST: usize = 4096;
const MOST_DESCRIPTORS: usize = 200_000;

/// Sockets that take TCP connections.
pub(crate) fn listeners() -> Vec<Listener> {
    let mut found: Vec<(u64, Listener)> = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        for (inode, port, address) in table.lines().skip(1).filter_map(listening) {
            if found.len() < MOST
                && !found.iter().any(|(_, one)| one.port == port && one.address == address)
            {
                found.push((inode, Listener { port, address, process: None }));
            }
        }
    }
    if !found.is_empty() {
        let inodes = found.iter().enumerate().map(|(at, (inode, _))| (*inode, at)).collect();
        find_processes(inodes, |at, process| found[at].1.process = Some(process));
    }
    found.into_iter().map(|(_, listener)| listener).collect()
}

/// The socket's inode, its port and address, of a line of the kernel's table, if it listens.
fn listening(line: &str) -> Option<(u64, u16, IpAddr)> {
    let mut fields = line.split_whitespace();
    let (local, state) = (fields.nth(1)?, fields.nth(1)?);
    if state != LISTENS {
        return None;
    }
    let (address, port) = local.rsplit_once(':')?;
    Some((
        fields.nth(5)?.parse().ok()?,
        u16::from_str_radix(port, 16).ok()?,
        address_from(address)?,
    ))
}

/// Words of four bytes, each as the processor has it in memory.
fn address_from(hexadecimal: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let digits = hexadecimal.get(8 * at..8 * at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    match hexadecimal.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let mut bytes = [0; 16];
            for at in 0..4 {
                bytes[4 * at..4 * at + 4].copy_from_slice(&word(at)?);
            }
            Some(Ipv6Addr::from(bytes).into())
        }
        _ => None,
    }
}

/// Looks at the open files of all processes until each socket has one.
fn find_processes(mut wanted: HashMap<u64, usize>, mut found: impl FnMut(usize, ListenerProcess)) {
    let mut looked = 0;
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let numbered = processes.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse::<u32>().ok()?;
        Some((pid, entry.path()))
    });
    for (pid, directory) in numbered {
        // Gone meanwhile, or not ours to look at.
        for file in std::fs::read_dir(directory.join("fd")).into_iter().flatten().flatten() {
            looked += 1;
            if looked > MOST_DESCRIPTORS || wanted.is_empty() {
                return;
            }
            let Some(inode) = socket_of(&file.path()) else { continue };
            if let Some(at) = wanted.remove(&inode) {
                let mut name = std::fs::read(directory.join("comm")).unwrap_or_default();
                name.truncate(name.trim_ascii_end().len());
                found(at, ListenerProcess { pid, name: name.into() });
            }
        }
    }
}

fn socket_of(file: &std::path::Path) -> Option<u64> {
    let target = std::fs::read_link(file).ok()?;
    let inode = target.as_os_str().as_bytes().strip_prefix(b"socket:[")?.strip_suffix(b"]")?;
    std::str::from_utf8(inode).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_is_found_with_its_process() {
        let four = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = four.local_addr().unwrap().port();
        let found = listeners();
        let found = found.iter().find(|listener| listener.port == port).unwrap();
        assert_eq!(found.address, IpAddr::from(Ipv4Addr::LOCALHOST));
        assert_eq!(found.process.as_ref().unwrap().pid, std::process::id());
        drop(four);
        assert!(!listeners().iter().any(|listener| listener.port == port));
    }

    #[test]
    fn addresses_are_read_as_the_kernel_writes_them() {
        let local = u32::from_ne_bytes([127, 0, 0, 1]);
        assert_eq!(address_from(&format!("{local:08X}")), Some(Ipv4Addr::LOCALHOST.into()));
        let last = u32::from_ne_bytes([0, 0, 0, 1]);
        let six = format!("{:024X}{last:08X}", 0);
        assert_eq!(address_from(&six), Some(Ipv6Addr::LOCALHOST.into()));
        assert_eq!(address_from("0100"), None);
    }
}
