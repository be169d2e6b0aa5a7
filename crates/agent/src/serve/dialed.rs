//! Connections to what listens in the guest. Each side ends for itself; what the host sends waits here until the socket
//! takes it, and what the socket has is read as far as the host takes it.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;

use protocol::Reply;
use protocol::frame::{Channel, HEADER, MAX_PAYLOAD};
use protocol::message::{ErrorCode, Failure};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, Shutdown, SocketFlags, SocketType, sockopt,
};

use super::files::FileResult;
use super::stream::Role;
use super::{Server, Source};
use crate::failure::{failed, refuse};

pub(crate) struct Dialed {
    socket: OwnedFd,
    port: u16,
    /// Where else it may listen, while this is not known.
    connecting: Option<VecDeque<SocketAddr>>,
    inbox: VecDeque<Vec<u8>>,
    pub(crate) inbox_bytes: usize,
    /// Of the first in the inbox.
    written: usize,
    /// The host sends nothing more.
    pub(crate) finished: bool,
    shut: bool,
    /// The other side sends nothing more.
    at_end: bool,
}

enum Attempt {
    Connected(OwnedFd),
    UnderWay(OwnedFd),
}

impl Server {
    /// # Errors
    /// Nothing listens there.
    pub(crate) fn dial(&mut self, stream: u32, port: u16) -> Result<(), Failure> {
        if port == 0 {
            return Err(refuse(ErrorCode::Invalid, "a port is a number between 1 and 65535"));
        }
        let own = own_addresses().into_iter().map(IpAddr::from);
        let addresses = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()].into_iter();
        let mut addresses: VecDeque<_> =
            addresses.chain(own).map(|address| SocketAddr::new(address, port)).collect();
        let attempt = attempt(&mut addresses, port)?;
        self.take_attempt(stream, port, attempt, addresses)
    }

    fn take_attempt(
        &mut self,
        stream: u32,
        port: u16,
        attempt: Attempt,
        others: VecDeque<SocketAddr>,
    ) -> Result<(), Failure> {
        let (socket, connecting) = match attempt {
            Attempt::Connected(socket) => (socket, None),
            Attempt::UnderWay(socket) => (socket, Some(others)),
        };
        // By edges: it is read and written as far as it goes each time.
        let edges = epoll::EventFlags::IN
            | epoll::EventFlags::OUT
            | epoll::EventFlags::RDHUP
            | epoll::EventFlags::ET;
        epoll::add(&self.poll, &socket, Source::Dialed.event(stream), edges)
            .map_err(|error| failed("watch", b"a connection", error))?;
        let is_connected = connecting.is_none();
        let Some(found) = self.streams.get_mut(&stream) else { return Ok(()) };
        found.role = match std::mem::replace(&mut found.role, Role::Answering) {
            // What the host has said already goes to whoever is found.
            Role::Dialed(dialed) => Role::Dialed(Dialed { socket, connecting, ..dialed }),
            Role::Opening { .. }
            | Role::Watching(_)
            | Role::Attached(_)
            | Role::Reading(_)
            | Role::Writing(_)
            | Role::Listing(_)
            | Role::Deferred(_)
            | Role::Answering => Role::Dialed(Dialed {
                socket,
                port,
                connecting,
                inbox: VecDeque::new(),
                inbox_bytes: 0,
                written: 0,
                finished: false,
                shut: false,
                at_end: false,
            }),
        };
        if is_connected {
            self.port.output.reply(stream, &Reply::Connected);
            self.drive_dialed(stream);
        }
        Ok(())
    }

    /// An answer that somebody in this guest gives over a socket; the host has nothing more to say.
    pub(crate) fn relay(&mut self, stream: u32, socket: OwnedFd) -> Result<(), Failure> {
        let edges = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        epoll::add(&self.poll, &socket, Source::Dialed.event(stream), edges)
            .map_err(|error| failed("watch", b"an answer", error))?;
        if let Some(found) = self.streams.get_mut(&stream) {
            found.role = Role::Dialed(Dialed {
                socket,
                port: 0,
                connecting: None,
                inbox: VecDeque::new(),
                inbox_bytes: 0,
                written: 0,
                finished: true,
                shut: true,
                at_end: false,
            });
        }
        self.has_something(stream);
        Ok(())
    }

    /// Something about the socket has changed, or about what is to be sent.
    pub(crate) fn drive_dialed(&mut self, stream: u32) {
        let Some(found) = self.streams.get_mut(&stream) else { return };
        let Role::Dialed(dialed) = &mut found.role else { return };
        if dialed.connecting.is_some() {
            self.see_whether_connected(stream);
            return;
        }
        match dialed.write() {
            Ok(consumed) => self.grant(stream, consumed),
            // What it said before it went is still read.
            Err(consumed) => {
                if let Some(found) = self.streams.get_mut(&stream)
                    && let Role::Dialed(dialed) = &mut found.role
                {
                    dialed.give_up_writing();
                }
                self.grant(stream, consumed);
            }
        }
        self.has_something(stream);
    }

    fn see_whether_connected(&mut self, stream: u32) {
        let Some(found) = self.streams.get_mut(&stream) else { return };
        let Role::Dialed(dialed) = &mut found.role else { return };
        let port = dialed.port;
        let Some(others) = &mut dialed.connecting else { return };
        match sockopt::socket_error(&dialed.socket) {
            Ok(Ok(())) if rustix::net::getpeername(&dialed.socket).is_ok() => {
                dialed.connecting = None;
                self.port.output.reply(stream, &Reply::Connected);
                self.drive_dialed(stream);
            }
            // The first of the edges, before there is an outcome.
            Ok(Ok(())) => {}
            Ok(Err(_)) | Err(_) => {
                let mut others = std::mem::take(others);
                let next = attempt(&mut others, port)
                    .and_then(|attempt| self.take_attempt(stream, port, attempt, others));
                if let Err(failure) = next {
                    self.end_with(stream, Err(failure));
                }
            }
        }
    }

    /// The next frame of what the socket has; whether there may be another at once.
    pub(crate) fn produce_dialed(&mut self, stream: u32) -> bool {
        let Some(found) = self.streams.get_mut(&stream) else { return false };
        let Role::Dialed(dialed) = &mut found.role else { return false };
        if dialed.connecting.is_some() {
            return false;
        }
        if dialed.at_end {
            self.close_if_over(stream);
            return false;
        }
        let most = MAX_PAYLOAD.min(found.credit);
        if most == 0 {
            // Asked again when the host has granted more.
            return false;
        }
        match rustix::net::recv(&dialed.socket, &mut self.buffer[..most], RecvFlags::empty()) {
            Ok((_, 0)) => {
                dialed.at_end = true;
                self.port.output.finish(stream);
                self.close_if_over(stream);
                false
            }
            Ok((_, count)) => {
                found.credit -= count;
                let mut frame = Vec::with_capacity(HEADER + count);
                frame.resize(HEADER, 0);
                frame.extend_from_slice(&self.buffer[..count]);
                self.port.output.data(stream, Channel::Content, frame);
                true
            }
            Err(Errno::AGAIN) => false,
            Err(Errno::INTR) => true,
            // It broke off: what has come is not taken for a whole.
            Err(_) => {
                self.close(stream);
                self.port.output.reset(stream);
                false
            }
        }
    }

    fn close_if_over(&mut self, stream: u32) {
        let Some(found) = self.streams.get(&stream) else { return };
        let Role::Dialed(dialed) = &found.role else { return };
        if dialed.at_end && dialed.shut {
            let host_goes_on = !dialed.finished;
            self.close(stream);
            if host_goes_on {
                self.port.output.reset(stream);
            }
        }
    }

    pub(crate) fn list_listeners(&self, stream: u32) {
        self.submit(stream, || FileResult::Answer(Ok(Reply::Listeners(crate::ports::listeners()))));
    }
}

impl Dialed {
    pub(crate) fn take(&mut self, payload: &[u8]) {
        if !self.shut {
            self.inbox_bytes += payload.len();
            self.inbox.push_back(payload.to_vec());
        }
    }

    /// How much went.
    ///
    /// # Errors
    /// How much went before the socket broke.
    fn write(&mut self) -> Result<usize, usize> {
        let mut consumed = 0;
        while let Some(first) = self.inbox.front() {
            match rustix::net::send(&self.socket, &first[self.written..], SendFlags::NOSIGNAL) {
                Ok(count) => {
                    self.written += count;
                    self.inbox_bytes -= count;
                    consumed += count;
                    if self.written == first.len() {
                        self.written = 0;
                        self.inbox.pop_front();
                    }
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(consumed),
                Err(_) => return Err(consumed),
            }
        }
        if self.finished && !self.shut {
            self.shut = true;
            // Fails where the other side is gone.
            let _ = rustix::net::shutdown(&self.socket, Shutdown::Write);
        }
        Ok(consumed)
    }

    fn give_up_writing(&mut self) {
        self.inbox.clear();
        (self.inbox_bytes, self.written, self.shut) = (0, 0, true);
    }
}

/// Goes on until one is connected or may yet be.
///
/// # Errors
/// There are no more addresses.
fn attempt(addresses: &mut VecDeque<SocketAddr>, port: u16) -> Result<Attempt, Failure> {
    while let Some(address) = addresses.pop_front() {
        let family = match address {
            SocketAddr::V4(_) => AddressFamily::INET,
            SocketAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = match rustix::net::socket_with(family, SocketType::STREAM, flags, None) {
            Ok(socket) => socket,
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS)) => {
                return Err(failed("connect to", format!("port {port}").as_bytes(), error));
            }
            // The kernel has no such addresses.
            Err(_) => continue,
        };
        // Requests are written whole; waiting for more of them would only delay.
        let _ = sockopt::set_tcp_nodelay(&socket, true);
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(Attempt::Connected(socket)),
            Err(Errno::INPROGRESS | Errno::INTR) => return Ok(Attempt::UnderWay(socket)),
            Err(_) => {}
        }
    }
    let message =
        format!("nothing listens on port {port} in this sandbox; start a server there first");
    Err(refuse(ErrorCode::NotFound, message))
}

/// Of this guest's interfaces, without the loopback's.
fn own_addresses() -> Vec<Ipv4Addr> {
    let all = nix::ifaddrs::getifaddrs().into_iter().flatten();
    let addresses = all.filter_map(|interface| Some(interface.address?.as_sockaddr_in()?.ip()));
    addresses.filter(|address| !address.is_loopback()).collect()
}
