//! The server's own capabilities: it and the tools it starts keep what they use, and give up the rest for good.

use rustix::{
    io::Errno,
    thread::{
        CapabilitySet, CapabilitySets, capabilities, remove_capability_from_bounding_set,
        set_capabilities,
    },
};

/// What each is for. Of these, mmdebstrap and the packages' own scripts need the files' and `SYS_CHROOT` to `SETFCAP`.
const NEEDED: [CapabilitySet; 17] = [
    // Namespaces, mounts, and moving processes into them.
    CapabilitySet::SYS_ADMIN,
    CapabilitySet::SYS_CHROOT,
    // Networks, taps, packet filters; the resolvers of sandboxes listen at port 53.
    CapabilitySet::NET_ADMIN,
    CapabilitySet::NET_BIND_SERVICE,
    // Machines' processes get a uid without capabilities, are looked at, and ended.
    CapabilitySet::SETUID,
    CapabilitySet::SETGID,
    CapabilitySet::SETPCAP,
    CapabilitySet::SYS_PTRACE,
    CapabilitySet::KILL,
    // Root file systems hold files of any owner, mode and kind.
    CapabilitySet::CHOWN,
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::DAC_READ_SEARCH,
    CapabilitySet::FOWNER,
    CapabilitySet::FSETID,
    CapabilitySet::MKNOD,
    CapabilitySet::SETFCAP,
    // Scripts of packages that make users write to the audit log.
    CapabilitySet::AUDIT_WRITE,
];

/// To be called while the process has one thread: each has capabilities of its own, and new ones inherit them. Without
/// root's there is nothing to give up.
///
/// # Errors
/// The kernel refuses.
pub fn give_up_privileges() -> std::io::Result<()> {
    let before = capabilities(None)?;
    if before.permitted.is_empty() {
        return Ok(());
    }
    let needed = NEEDED.into_iter().fold(CapabilitySet::empty(), CapabilitySet::union);
    for number in 0..CapabilitySet::all().bits().count_ones() {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        if needed.contains(capability) {
            continue;
        }
        match remove_capability_from_bounding_set(capability) {
            // The kernel does not know it.
            Ok(()) | Err(Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    let kept = before.permitted & needed;
    let sets =
        CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    Ok(set_capabilities(None, sets)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_given_up_neither_stays_nor_comes_back_by_executing_something() {
        // Capabilities belong to threads: this one's end with it.
        let shown = std::thread::spawn(|| {
            give_up_privileges().unwrap();
            std::process::Command::new("cat").arg("/proc/self/status").output().unwrap().stdout
        });
        let status = String::from_utf8(shown.join().unwrap()).unwrap();
        let set = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            CapabilitySet::from_bits_retain(u64::from_str_radix(line.trim(), 16).unwrap())
        };
        let needed = NEEDED.into_iter().fold(CapabilitySet::empty(), CapabilitySet::union);
        for name in ["CapPrm:", "CapEff:", "CapBnd:"] {
            assert!(needed.contains(set(name)), "{name} {:?}", set(name));
        }
        assert!(!set("CapEff:").intersects(CapabilitySet::SYS_MODULE | CapabilitySet::SYS_RAWIO));
        assert!(set("CapEff:").contains(CapabilitySet::SYS_ADMIN), "this test needs root");
    }
}
