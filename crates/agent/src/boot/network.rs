//! The guest's interface, its address and its route, by the kernel's oldest interface: a root file system need not have
//! any program for it.
#![expect(unsafe_code, reason = "these ioctls take structures that no crate in use knows")]

use std::ffi::{c_int, c_void};
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd};

use protocol::message::Network;
use rustix::net::{AddressFamily, SocketType, socket};

const INTERFACE: &[u8] = b"eth0";
const LOOPBACK: &[u8] = b"lo";

pub(crate) fn configure(network: &Network) -> std::io::Result<()> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    bring_up(&socket, LOOPBACK)?;
    let mask = u32::MAX.checked_shl(32 - u32::from(network.prefix.min(32))).unwrap_or(0);
    set_address(&socket, libc::SIOCSIFADDR, network.address)?;
    set_address(&socket, libc::SIOCSIFNETMASK, mask.to_be_bytes())?;
    bring_up(&socket, INTERFACE)?;
    add_default_route(&socket, network.gateway)
}

fn request(interface: &[u8]) -> libc::ifreq {
    // SAFETY: all zeroes are a value of this structure of numbers and characters.
    let mut request: libc::ifreq = unsafe { zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface) {
        *to = from.cast_signed();
    }
    request
}

fn call(socket: impl AsFd, number: libc::Ioctl, argument: *mut c_void) -> std::io::Result<()> {
    // SAFETY: every caller passes the structure that this request reads or fills.
    let result: c_int = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), number, argument) };
    if result < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

fn bring_up(socket: impl AsFd, interface: &[u8]) -> std::io::Result<()> {
    let mut request = request(interface);
    call(&socket, libc::SIOCGIFFLAGS, (&raw mut request).cast())?;
    // SAFETY: the call before has filled the flags.
    unsafe {
        request.ifr_ifru.ifru_flags |= (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    }
    call(&socket, libc::SIOCSIFFLAGS, (&raw mut request).cast())
}

fn set_address(socket: impl AsFd, number: libc::Ioctl, address: [u8; 4]) -> std::io::Result<()> {
    let mut request = request(INTERFACE);
    request.ifr_ifru.ifru_addr = socket_address(address);
    call(socket, number, (&raw mut request).cast())
}

fn add_default_route(socket: impl AsFd, gateway: [u8; 4]) -> std::io::Result<()> {
    // SAFETY: all zeroes are a value: any destination by any interface.
    let mut route: libc::rtentry = unsafe { zeroed() };
    route.rt_dst = socket_address([0; 4]);
    route.rt_genmask = socket_address([0; 4]);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    match call(socket, libc::SIOCADDRT, (&raw mut route).cast()) {
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(()),
        other => other,
    }
}

fn socket_address(address: [u8; 4]) -> libc::sockaddr {
    let mut data = [0; 14];
    for (to, from) in data[2..6].iter_mut().zip(address) {
        *to = from.cast_signed();
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}
