//! Where guests find what listens on this host, if they are let.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};

/// One by which other machines know this host.
///
/// # Panics
/// It has none.
pub fn address_of_the_host() -> Ipv4Addr {
    // Nothing is sent: the kernel only picks the address that it would send from.
    let socket = UdpSocket::bind("0.0.0.0:0").expect("there is a free port");
    socket.connect("203.0.113.1:9").expect("the host has a route");
    match socket.local_addr().expect("it is bound").ip() {
        IpAddr::V4(address) => address,
        IpAddr::V6(address) => panic!("{address}"),
    }
}
