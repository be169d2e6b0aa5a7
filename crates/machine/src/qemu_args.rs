//! Turns a [`MachineSpec`] into QEMU's arguments. Pure: no file is touched here.
//!
//! [`hardware`] is what the guest sees and what a saved state must find again; [`process`] is the rest. A change in the
//! former makes every bake and every snapshot unusable.

use std::os::fd::RawFd;

use crate::spec::{Accelerator, MACHINE_TYPE, MachineSpec, READ_ONLY_SLOTS, WRITABLE_SLOTS};

/// Bytes of the guest's console that QEMU remembers; a power of two.
pub(crate) const CONSOLE_BYTES: usize = 64 * 1024;
/// The root disk's device, and the stem of the nodes put behind it.
pub(crate) const ROOT: &str = "root";
pub(crate) const CONSOLE: &str = "console";
/// Where `/dev/kvm` is passed, which the unprivileged user cannot open.
const KVM_FDSET: u32 = 1000;
const GUEST_MAC: &str = "52:54:00:a7:00:02";

/// The numbers under which the process finds what it inherits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Inherited {
    /// Listening sockets.
    pub(crate) qmp: RawFd,
    pub(crate) guest: RawFd,
    pub(crate) tap: RawFd,
    pub(crate) memory: RawFd,
    /// Only with [`Accelerator::Kvm`].
    pub(crate) kvm: Option<RawFd>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Start {
    /// From the kernel.
    Boot { kernel: RawFd, initramfs: RawFd, console: Verbosity, purpose: Purpose },
    /// Waits for a saved state, with memory that is mapped privately.
    Incoming,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verbosity {
    Quiet,
    /// For the probe, which reads how far the kernel came.
    Full,
}

/// What a machine is booted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// To be saved: its memory is written to its file, and when it powers off, it only stands still.
    Save,
    /// To be used: its memory's file is as empty as it was when it ends, and its process ends when it powers off.
    Use,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Writable,
    ReadOnly,
}

/// Devices of the volumes, in the order of their slots' numbers.
pub(crate) fn slots() -> impl Iterator<Item = (String, Access)> {
    let writable = (0..WRITABLE_SLOTS).map(|n| (format!("writable{n}"), Access::Writable));
    let read_only = (0..READ_ONLY_SLOTS).map(|n| (format!("readonly{n}"), Access::ReadOnly));
    writable.chain(read_only)
}

/// The machine as the guest sees it, in its order.
pub(crate) fn hardware(spec: &MachineSpec) -> Vec<String> {
    let tuning = Tuning::of(spec.accelerator);
    let mut arguments = Arguments::default();
    // `pit=off` would miscalibrate the clock; `hpet=on` costs
    // ten times the processor time in an idle guest.
    arguments.add(
        "-machine",
        format!("{MACHINE_TYPE},memory-backend=ram,suppress-vmdesc=on,dump-guest-core=off,hpet=off,sata=off,smbus=off,i8042=off,vmport=off"),
    );
    arguments.add("-global", "migration.send-configuration=off");
    arguments.add(
        "-cpu",
        match spec.accelerator {
            Accelerator::Kvm => "host",
            // The emulator runs `rep movsb`, for which guests take these two flags, byte by byte: copies in the guest are
            // two to three times as fast without.
            Accelerator::Tcg => "max,erms=off,fsrm=off",
        },
    );
    arguments.add("-smp", format!("cpus={0},maxcpus={0}", spec.shape.cpus));
    arguments.add("-m", format!("size={}M", spec.shape.memory_mib));
    arguments.add("-device", "vmgenid,guid=auto");
    let mut address = 2..;
    let mut pci = |device: String| {
        let slot = address.next().unwrap_or_default();
        arguments
            .add("-device", format!("{device},disable-legacy=on{},addr={slot:#x}", tuning.device));
    };
    // Port 0 is reserved for consoles.
    pci("virtio-serial-pci,id=serial,max_ports=2".into());
    pci(format!("virtio-net-pci,id=net,netdev=tap,mac={GUEST_MAC},romfile="));
    pci("virtio-rng-pci,id=rng".into());
    pci(disk(ROOT));
    for (slot, _) in slots() {
        pci(format!("{}{}", disk(&slot), tuning.slot));
    }
    arguments.add(
        "-device",
        format!("virtserialport,bus=serial.0,nr=1,chardev=guest,name={}", protocol::PORT_NAME),
    );
    arguments.add("-serial", format!("chardev:{CONSOLE}"));
    arguments.0
}

/// Properties of devices that are worth their while under one accelerator only.
struct Tuning {
    device: &'static str,
    slot: &'static str,
}

impl Tuning {
    fn of(accelerator: Accelerator) -> Self {
        match accelerator {
            Accelerator::Kvm => Self { device: "", slot: "" },
            // Waking another thread costs more there than handling a request at once. And each region of each device
            // lengthens the load of a state, so the slots do without message-signalled interrupts: 34 ms became 22.
            Accelerator::Tcg => Self { device: ",ioeventfd=off", slot: ",vectors=0" },
        }
    }
}

fn disk(name: &str) -> String {
    format!("virtio-blk-pci,id={name},drive=empty-{name},num-queues=1")
}

/// All arguments.
pub(crate) fn process(spec: &MachineSpec, inherited: &Inherited, start: &Start) -> Vec<String> {
    let mut arguments = Arguments(hardware(spec));
    match (spec.accelerator, inherited.kvm) {
        (Accelerator::Tcg, _) => {
            // Translations of less than 64 MiB make a large program several times slower.
            arguments.add("-accel", "tcg,thread=multi,tb-size=64");
        }
        (Accelerator::Kvm, Some(fd)) => {
            arguments.add("-add-fd", format!("fd={fd},set={KVM_FDSET}"));
            arguments.add("-accel", format!("kvm,device=/dev/fdset/{KVM_FDSET}"));
        }
        (Accelerator::Kvm, None) => arguments.add("-accel", "kvm"),
    }
    for switch in ["-nodefaults", "-no-user-config", "-no-reboot", "-S"] {
        arguments.0.push(switch.into());
    }
    arguments.add("-display", "none");
    arguments
        .add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");

    let memory = format!(
        "memory-backend-file,id=ram,size={}M,mem-path=/proc/self/fd/{}",
        spec.shape.memory_mib, inherited.memory
    );
    arguments.add(
        "-object",
        match start {
            Start::Boot { purpose: Purpose::Save, .. } => format!("{memory},share=on"),
            Start::Boot { purpose: Purpose::Use, .. } | Start::Incoming => {
                format!("{memory},share=off,readonly=on,rom=off")
            }
        },
    );
    arguments.add("-chardev", format!("socket,id=qmp,fd={},server=on,wait=off", inherited.qmp));
    arguments.add("-mon", "chardev=qmp,mode=control");
    arguments.add("-chardev", format!("socket,id=guest,fd={},server=on,wait=off", inherited.guest));
    arguments.add("-chardev", format!("ringbuf,id={CONSOLE},size={CONSOLE_BYTES}"));
    arguments.add("-netdev", format!("tap,id=tap,fd={},vhost=off", inherited.tap));
    // Nothing is behind a slot yet. Size 0, for a node of any size would swallow what is written to it.
    for (name, access) in std::iter::once((ROOT.into(), Access::Writable)).chain(slots()) {
        let read_only = match access {
            Access::Writable => "off",
            Access::ReadOnly => "on",
        };
        arguments.add(
            "-blockdev",
            format!("null-co,node-name=empty-{name},size=0,read-zeroes=on,read-only={read_only}"),
        );
    }
    match *start {
        Start::Boot { kernel, initramfs, console, purpose } => {
            match purpose {
                // A boot that fails is asked for its console first.
                Purpose::Save => arguments.add("-action", "shutdown=pause"),
                Purpose::Use => {}
            }
            arguments.add("-kernel", format!("/proc/self/fd/{kernel}"));
            arguments.add("-initrd", format!("/proc/self/fd/{initramfs}"));
            arguments.add("-append", command_line(spec.accelerator, console));
        }
        Start::Incoming => arguments.add("-incoming", "defer"),
    }
    arguments.0
}

fn command_line(accelerator: Accelerator, console: Verbosity) -> String {
    let mut words = vec!["console=ttyS0", "reboot=t", "panic=-1", "8250.nr_uarts=1"];
    // Memory is saved whole: what nobody has any longer, such as pages of a volume or a secret of a process that has ended,
    // must not be in it.
    words.extend(["init_on_free=1", "init_on_alloc=0"]);
    match console {
        Verbosity::Quiet => words.push("quiet"),
        Verbosity::Full => {}
    }
    match accelerator {
        Accelerator::Kvm => {}
        // An emulated processor is at the mercy of the host's scheduler: checks of one clock against another, and of
        // the timer's interrupts against a busy loop, fail for no fault of the guest. Nor does it speculate.
        Accelerator::Tcg => {
            words.extend(["no_timer_check", "tsc=reliable", "nowatchdog", "mitigations=off"])
        }
    }
    words.join(" ")
}

#[derive(Default)]
struct Arguments(Vec<String>);

impl Arguments {
    fn add(&mut self, option: &str, value: impl Into<String>) {
        self.0.push(option.into());
        self.0.push(value.into());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::spec::Shape;

    const INHERITED: Inherited =
        Inherited { qmp: 11, guest: 12, tap: 13, memory: 14, kvm: Some(15) };
    const BOOT: Start = boot(Purpose::Save);

    const fn boot(purpose: Purpose) -> Start {
        Start::Boot { kernel: 16, initramfs: 17, console: Verbosity::Quiet, purpose }
    }

    fn spec(accelerator: Accelerator) -> MachineSpec {
        MachineSpec { shape: Shape { cpus: 1, memory_mib: 512 }, accelerator }
    }

    fn values<'a>(arguments: &'a [String], option: &str) -> Vec<&'a str> {
        arguments.windows(2).filter(|pair| pair[0] == option).map(|pair| pair[1].as_str()).collect()
    }

    #[test]
    fn the_machine_type_is_a_versioned_one() {
        let arguments = process(&spec(Accelerator::Tcg), &INHERITED, &BOOT);
        assert!(values(&arguments, "-machine")[0].starts_with("pc-q35-8.2,"));
    }

    #[test]
    fn every_disk_has_an_empty_node_of_its_own_that_holds_nothing() {
        let arguments = process(&spec(Accelerator::Tcg), &INHERITED, &Start::Incoming);
        let disks: Vec<_> = values(&arguments, "-device")
            .into_iter()
            .filter(|device| device.starts_with("virtio-blk-pci"))
            .collect();
        assert_eq!(disks.len(), 1 + WRITABLE_SLOTS + READ_ONLY_SLOTS);
        let nodes = values(&arguments, "-blockdev");
        assert_eq!(nodes.len(), disks.len());
        for node in &nodes {
            assert!(node.contains(",size=0,"), "{node}");
            let name = node.split("node-name=").nth(1).unwrap().split(',').next().unwrap();
            assert_eq!(
                disks.iter().filter(|disk| disk.contains(&format!("drive={name},"))).count(),
                1
            );
        }
        assert_eq!(
            nodes.iter().filter(|node| node.ends_with("read-only=on")).count(),
            READ_ONLY_SLOTS
        );
    }

    #[test]
    fn memory_of_a_machine_that_is_used_can_not_be_written_to_its_file() {
        for start in [Start::Incoming, boot(Purpose::Use)] {
            let arguments = process(&spec(Accelerator::Tcg), &INHERITED, &start);
            assert_eq!(
                values(&arguments, "-object"),
                [
                    "memory-backend-file,id=ram,size=512M,mem-path=/proc/self/fd/14,share=off,readonly=on,rom=off"
                ]
            );
        }
    }

    #[test]
    fn only_a_machine_that_is_to_be_saved_stays_when_its_guest_powers_off() {
        let actions = |start| {
            let arguments = process(&spec(Accelerator::Tcg), &INHERITED, &start);
            values(&arguments, "-action").len()
        };
        let all = [boot(Purpose::Save), boot(Purpose::Use), Start::Incoming].map(actions);
        assert_eq!(all, [1, 0, 0]);
    }

    #[test]
    fn a_restored_machine_has_no_kernel_and_a_booted_one_no_state() {
        let boot = process(&spec(Accelerator::Tcg), &INHERITED, &BOOT);
        let incoming = process(&spec(Accelerator::Tcg), &INHERITED, &Start::Incoming);
        assert!(values(&boot, "-incoming").is_empty() && !values(&boot, "-kernel").is_empty());
        assert!(values(&incoming, "-kernel").is_empty() && values(&incoming, "-append").is_empty());
        assert_eq!(values(&incoming, "-incoming"), ["defer"]);
    }

    proptest! {
        #[test]
        fn a_guest_sees_the_same_machine_however_it_is_started(cpus in 1u32..64, memory_mib in 128u32..65_536, kvm: bool) {
            let accelerator = if kvm { Accelerator::Kvm } else { Accelerator::Tcg };
            let spec = MachineSpec { shape: Shape { cpus, memory_mib }, accelerator };
            let hardware = hardware(&spec);
            for start in [BOOT, boot(Purpose::Use), Start::Incoming] {
                let arguments = process(&spec, &INHERITED, &start);
                prop_assert_eq!(&arguments[..hardware.len()], &hardware[..]);
                for option in ["-device", "-machine", "-cpu", "-smp", "-m", "-global", "-serial"] {
                    prop_assert_eq!(values(&arguments, option), values(&hardware, option));
                }
            }
            let addresses: BTreeSet<_> = hardware.iter().filter_map(|argument| argument.split(",addr=").nth(1)).collect();
            prop_assert_eq!(addresses.len(), 4 + WRITABLE_SLOTS + READ_ONLY_SLOTS);
        }
    }
}
