//! Names of hosts: `/etc/hosts`, then the guest's resolver. The C library's own way needs its shared libraries, which a static
//! program in a foreign root file system does not have.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use ureq::config::Config;
use ureq::http::Uri;
use ureq::unversioned::resolver::{ResolvedSocketAddrs, Resolver};
use ureq::unversioned::transport::NextTimeout;

const ATTEMPT: Duration = Duration::from_secs(3);
const ATTEMPTS: usize = 3;
const LONGEST_ANSWER: usize = 4096;
const MOST_ADDRESSES: usize = 16;
/// Of a host's address.
const TYPE_A: u16 = 1;

#[derive(Debug)]
pub(super) struct Names;

impl Resolver for Names {
    fn resolve(
        &self,
        uri: &Uri,
        _: &Config,
        timeout: NextTimeout,
    ) -> Result<ResolvedSocketAddrs, ureq::Error> {
        let host = uri.host().ok_or(ureq::Error::HostNotFound)?;
        let default = if uri.scheme_str() == Some("https") { 443 } else { 80 };
        let port = uri.port_u16().unwrap_or(default);
        let plain = host.trim_start_matches('[').trim_end_matches(']');
        let addresses = match plain.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => {
                let until = Instant::now() + (*timeout.after).min(ATTEMPT * 10);
                look_up(host, until).into_iter().map(IpAddr::from).collect()
            }
        };
        let mut found = self.empty();
        for address in addresses.into_iter().take(MOST_ADDRESSES) {
            found.push(SocketAddr::new(address, port));
        }
        if found.is_empty() { Err(ureq::Error::HostNotFound) } else { Ok(found) }
    }
}

/// A sandbox has IPv4 only.
fn look_up(host: &str, until: Instant) -> Vec<Ipv4Addr> {
    let hosts = std::fs::read_to_string("/etc/hosts").unwrap_or_default();
    let known = in_hosts(&hosts, host);
    if !known.is_empty() {
        return known;
    }
    let settings = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    let servers = resolvers(&settings);
    for attempt in 0..ATTEMPTS * servers.len().max(1) {
        let Some(server) = servers.get(attempt % servers.len().max(1)) else { break };
        let left = until.saturating_duration_since(Instant::now()).min(ATTEMPT);
        if left.is_zero() {
            break;
        }
        if let Some(found) = ask(*server, host, left) {
            return found;
        }
    }
    Vec::new()
}

fn in_hosts(text: &str, host: &str) -> Vec<Ipv4Addr> {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default());
    lines
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let address = words.next()?.parse().ok()?;
            words.any(|name| name.eq_ignore_ascii_case(host)).then_some(address)
        })
        .collect()
}

fn resolvers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter_map(|line| line.trim().strip_prefix("nameserver"));
    lines.filter_map(|address| address.trim().parse().ok()).take(3).collect()
}

/// `None`: no answer, or none that counts.
fn ask(server: IpAddr, host: &str, within: Duration) -> Option<Vec<Ipv4Addr>> {
    let mut number = [0; 2];
    rustix::rand::getrandom(&mut number, rustix::rand::GetRandomFlags::empty()).ok()?;
    let any = if server.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(SocketAddr::new(server, 53)).ok()?;
    socket.set_read_timeout(Some(within)).ok()?;
    socket.send(&question(number, host)?).ok()?;
    let mut buffer = [0; LONGEST_ANSWER];
    let length = socket.recv(&mut buffer).ok()?;
    addresses(&buffer[..length], number)
}

fn question(number: [u8; 2], host: &str) -> Option<Vec<u8>> {
    // Recursion is wanted; one question.
    let mut message = vec![number[0], number[1], 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    for label in host.trim_end_matches('.').split('.') {
        let length = u8::try_from(label.len()).ok().filter(|length| (1..=63).contains(length))?;
        message.push(length);
        message.extend_from_slice(label.as_bytes());
    }
    message.extend_from_slice(&[0, 0, 1, 0, 1]);
    Some(message)
}

/// All addresses of the answer: whichever names lead there, the question was about one.
fn addresses(message: &[u8], number: [u8; 2]) -> Option<Vec<Ipv4Addr>> {
    let word = |at: usize| Some(u16::from_be_bytes(message.get(at..at + 2)?.try_into().ok()?));
    let is_answer = message.get(..2)? == number && message.get(2)? & 0x80 != 0;
    // No such name is an answer as well; a failure is none.
    if !is_answer || ![0, 3].contains(&(message.get(3)? & 0x0f)) {
        return None;
    }
    let (questions, answers) = (word(4)?, word(6)?);
    let mut at = 12;
    for _ in 0..questions {
        at = behind_name(message, at)? + 4;
    }
    let mut found = Vec::new();
    for _ in 0..answers {
        at = behind_name(message, at)?;
        let (kind, length) = (word(at)?, usize::from(word(at + 8)?));
        let data = message.get(at + 10..at + 10 + length)?;
        if let (TYPE_A, Ok(address)) = (kind, <[u8; 4]>::try_from(data)) {
            found.push(Ipv4Addr::from(address));
        }
        at += 10 + length;
    }
    Some(found)
}

fn behind_name(message: &[u8], mut at: usize) -> Option<usize> {
    loop {
        match *message.get(at)? {
            0 => return Some(at + 1),
            // The rest is elsewhere.
            length if length >= 0xc0 => return Some(at + 2),
            length => at += 1 + usize::from(length),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_answer_is_read_with_its_aliases() {
        let mut message = question([7, 9], "a.example").unwrap();
        message[2] |= 0x80;
        message[7] = 2;
        // An alias, then an address; both names point at the question's.
        message.extend_from_slice(&[0xc0, 12, 0, 5, 0, 1, 0, 0, 0, 9, 0, 2, 0xc0, 12]);
        message.extend_from_slice(&[0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 192, 0, 2, 1]);
        assert_eq!(addresses(&message, [7, 9]), Some(vec![Ipv4Addr::new(192, 0, 2, 1)]));
        assert_eq!(addresses(&message, [7, 8]), None);
    }

    #[test]
    fn hosts_and_resolvers_are_read_from_their_files() {
        let hosts = "127.0.0.1 localhost\n# 192.0.2.9 no\n192.0.2.1 Store store.example # here\n";
        assert_eq!(in_hosts(hosts, "STORE"), [Ipv4Addr::new(192, 0, 2, 1)]);
        assert_eq!(in_hosts(hosts, "no"), [] as [Ipv4Addr; 0]);
        assert_eq!(
            resolvers("# x\nnameserver 192.0.2.53\nsearch a\n"),
            [IpAddr::from([192, 0, 2, 53])]
        );
        assert_eq!(question([0, 0], "a..b"), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_it_panic(message in prop::collection::vec(any::<u8>(), 0..80)) {
            let number = [message.first().copied().unwrap_or(0), message.get(1).copied().unwrap_or(0)];
            let _ = addresses(&message, number);
        }
    }
}
