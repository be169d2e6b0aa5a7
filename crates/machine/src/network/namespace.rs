//! What only the kernel can do: named network namespaces, work inside them, and taps.

use std::{
    fs::{self, File},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg, OFlag},
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, setns, unshare},
    sys::stat::Mode,
};
use tokio::{runtime::Handle, sync::oneshot};

use super::{
    Error,
    address::{Instance, Slot, TAP},
};
use crate::tap::open_tap;

/// Where `ip netns` keeps its names; ours are to be seen with it.
pub(super) const NAMES: &str = "/run/netns";

/// A visit makes a few system calls, which may have to wait for the kernel's network lock.
const DEADLINE: Duration = Duration::from_secs(10);

const NOTHING: Option<&str> = None;

pub(super) fn path(slot: Slot) -> PathBuf {
    Path::new(NAMES).join(slot.namespace())
}

/// Makes the directory of names as `ip netns` would: mounted over itself and shared, so that a namespace
/// removed here is also released where the directory was copied into another mount namespace.
pub(super) fn ensure_names() -> Result<(), Error> {
    let failed = |source: io::Error| Error::kernel("prepare", NAMES, source);
    fs::create_dir_all(NAMES).map_err(failed)?;
    // Two servers may start at once.
    let lock = Flock::lock(File::open(NAMES).map_err(failed)?, FlockArg::LockExclusive)
        .map_err(|(_, errno)| failed(errno.into()))?;
    let share = || mount(NOTHING, NAMES, NOTHING, MsFlags::MS_SHARED | MsFlags::MS_REC, NOTHING);
    match share() {
        Err(Errno::EINVAL) => {
            mount(Some(NAMES), NAMES, NOTHING, MsFlags::MS_BIND | MsFlags::MS_REC, NOTHING)
                .and_then(|()| share())
        }
        other => other,
    }
    .map_err(|errno| failed(errno.into()))?;
    drop(lock);
    Ok(())
}

/// Makes the slot's namespace under its name; `work` is then done inside.
pub(super) async fn create<T: Send + 'static>(
    slot: Slot,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<(OwnedFd, T), Error> {
    on_a_thread(move || {
        let path = path(slot);
        let failed =
            |source: io::Error| Error::kernel("make the namespace", slot.namespace(), source);
        File::create_new(&path).map_err(failed)?;
        unshare(CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))?;
        mount(Some("/proc/thread-self/ns/net"), &path, NOTHING, MsFlags::MS_BIND, NOTHING)
            .map_err(|errno| failed(errno.into()))?;
        let netns = open(slot)?;
        Ok((netns, work()?))
    })
    .await
}

/// Does `work` inside `netns`. Sockets opened and programs started there stay there.
pub(super) async fn visit<T: Send + 'static>(
    netns: &OwnedFd,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let failed = |source: io::Error| Error::kernel("enter", "a network namespace", source);
    let netns = netns.try_clone().map_err(failed)?;
    on_a_thread(move || {
        setns(netns, CloneFlags::CLONE_NEWNET).map_err(|errno| failed(errno.into()))?;
        work()
    })
    .await
}

/// The namespace belongs to the thread, so the thread must be our own and end with the work.
async fn on_a_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = oneshot::channel();
    let runtime = Handle::current();
    std::thread::Builder::new()
        .name("network".into())
        .spawn(move || {
            let _context = runtime.enter();
            // Whoever asked may have given up meanwhile.
            let _ = done.send(work());
        })
        .map_err(|source| Error::kernel("start", "a thread", source))?;
    tokio::time::timeout(DEADLINE, result)
        .await
        .map_err(|_| Error::Stuck { what: "the kernel", deadline: DEADLINE })?
        .map_err(|_| Error::kernel("finish", "work in a namespace", io::ErrorKind::Other.into()))?
}

/// Opens the slot's namespace; [`Error::Gone`] when there is none.
pub(super) fn open(slot: Slot) -> Result<OwnedFd, Error> {
    let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
    nix::fcntl::open(&path(slot), flags, Mode::empty()).map_err(|errno| {
        if errno == Errno::ENOENT {
            Error::Gone(slot.namespace())
        } else {
            Error::kernel("open the namespace", slot.namespace(), errno.into())
        }
    })
}

/// Takes the name away. The namespace itself ends with the last process and descriptor in it; the kernel
/// clears it up in the background.
pub(super) fn forget(slot: Slot) -> Result<(), Error> {
    let path = path(slot);
    let failed =
        |source: io::Error| Error::kernel("remove the namespace", slot.namespace(), source);
    match umount2(&path, MntFlags::MNT_DETACH) {
        // Not mounted, or not there: what was half made, or is removed twice.
        Ok(()) | Err(Errno::EINVAL | Errno::ENOENT) => {}
        Err(errno) => return Err(failed(errno.into())),
    }
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(error)),
        _ => Ok(()),
    }
}

/// The slots of `instance` that have a named namespace.
pub(super) fn named(instance: Instance) -> Result<Vec<Slot>, Error> {
    let failed = |source: io::Error| Error::kernel("list", NAMES, source);
    let mut slots = Vec::new();
    for entry in fs::read_dir(NAMES).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        slots.extend(name.to_str().and_then(|name| instance.slot_of_namespace(name)));
    }
    Ok(slots)
}

/// The slots of `instance` that have an interface on the host.
pub(super) fn linked(instance: Instance) -> Result<Vec<Slot>, Error> {
    let interfaces = nix::net::if_::if_nameindex()
        .map_err(|errno| Error::kernel("list", "the network interfaces", errno.into()))?;
    Ok(interfaces
        .iter()
        .filter_map(|interface| instance.slot_of_link(interface.name().to_str().ok()?))
        .collect())
}

pub(super) fn has_link(slot: Slot) -> bool {
    nix::net::if_::if_nametoindex(slot.link().as_str()).is_ok()
}

/// Sets `net/NAME` in the calling thread's namespace.
pub(super) fn set(name: &str, value: &str) -> Result<(), Error> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value).map_err(|source| Error::kernel("set", path, source))
}

/// As [`set`], for what a kernel without IPv6 does not have.
pub(super) fn set_if_there(name: &str, value: &str) -> Result<(), Error> {
    if Path::new("/proc/sys/net").join(name).exists() { set(name, value) } else { Ok(()) }
}

/// Makes the guest's tap in the calling thread's namespace.
pub(super) fn make_tap() -> Result<OwnedFd, Error> {
    open_tap(TAP).map_err(|source| Error::kernel("make the tap", TAP, source))
}
