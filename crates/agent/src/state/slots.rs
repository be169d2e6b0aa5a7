//! The disks that volumes are put behind. Their PCI devices follow the root disk's, in order, from the boot on.
//!
//! An empty slot has no driver, and its device does not answer: each device that does lengthens every restore of the
//! machine. In place of its node there is one that leads nowhere, lest a program make a file of that name and believe
//! that it wrote to a disk.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use protocol::message::{ErrorCode, Failure};
use protocol::{READ_ONLY_SLOTS, WRITABLE_SLOTS};
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat, stat, unlink};
use rustix::io::Errno;

use super::mountinfo::Device;
use crate::failure::refuse;

const ALL: u8 = WRITABLE_SLOTS + READ_ONLY_SLOTS;
/// Its driver stays although it is empty: giving one back takes long, and most sandboxes with volumes have one that they
/// write. A disk of size 0 takes no bytes either. The driver of a read-only disk is never told another size, so of those
/// none stays.
const READY: u8 = 0;
const ROOT_DISK: &str = "/sys/class/block/vda";
const PCI: &str = "/sys/bus/pci";
const DRIVER: &str = "virtio-pci";
/// Of a PCI device's configuration: the command register, and in it that the device answers in memory.
const COMMAND: u64 = 4;
const MEMORY: u8 = 0x02;
const FIRST_LETTER: u8 = b'b';

#[derive(Debug, Clone)]
pub(crate) enum Slots {
    /// The number of the first one's PCI device.
    OfMachine(u32),
    /// On a host: block devices by slot.
    Given(Vec<(u8, PathBuf)>),
}

/// The block device of a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Disk {
    pub(crate) node: PathBuf,
    pub(crate) device: Device,
}

impl Disk {
    fn of(node: PathBuf, number: u64) -> Self {
        Self { node, device: Device::of(number) }
    }

    /// As the kernel knows it now.
    pub(crate) fn bytes(&self) -> u64 {
        self.size().unwrap_or(0)
    }

    /// `None`: there is no such disk.
    fn size(&self) -> Option<u64> {
        let Device { major, minor } = self.device;
        let sectors = fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/size")).ok()?;
        Some(sectors.trim().parse::<u64>().ok()? * 512)
    }
}

impl Slots {
    pub(crate) fn of_machine() -> Option<Self> {
        // `/sys/devices/pci0000:00/0000:00:05.0/virtio3/block/vda`
        let path = fs::canonicalize(ROOT_DISK).ok()?;
        let address = path.iter().nth_back(3)?.to_str()?;
        let device = address.strip_prefix("0000:00:")?.strip_suffix(".0")?;
        Some(Self::OfMachine(u32::from_str_radix(device, 16).ok()? + 1))
    }

    /// The others, which have disks.
    pub(crate) fn clear_empty(&self) -> BTreeSet<u8> {
        let is_used = |slot: &u8| self.find(*slot).is_some_and(|disk| disk.bytes() > 0);
        let (used, empty): (BTreeSet<u8>, BTreeSet<u8>) = (0..ALL).partition(is_used);
        for slot in empty.into_iter().filter(|slot| *slot != READY) {
            crate::boot::report("empty a slot", self.clear(slot));
        }
        used
    }

    /// The slot whose driver stays while it is empty, with its disk.
    pub(crate) fn ready(&self) -> Option<(u8, Disk)> {
        match self {
            Self::OfMachine(_) => Some((READY, self.find(READY)?)),
            Self::Given(_) => None,
        }
    }

    /// As [`Slots::bind`], of a slot whose disk was found before: to look for it again takes longer than all the rest.
    pub(crate) fn bind_known(&self, slot: u8, disk: Disk) -> Result<Disk, Failure> {
        if disk.size().is_none() {
            return self.bind(slot);
        }
        show(&disk).map_err(|error| not_found(slot, &error))?;
        Ok(disk)
    }

    fn check(&self, slot: u8) -> Result<(), Failure> {
        let exists = match self {
            Self::OfMachine(_) => slot < ALL,
            Self::Given(disks) => disks.iter().any(|(given, _)| *given == slot),
        };
        if exists {
            return Ok(());
        }
        Err(refuse(ErrorCode::Invalid, format!("this sandbox has no slot {slot} for a volume")))
    }

    /// Its disk, if it has a driver.
    pub(crate) fn find(&self, slot: u8) -> Option<Disk> {
        match self {
            Self::OfMachine(_) => {
                let name = block_name(&self.directory(slot)?)?;
                let text = fs::read_to_string(format!("/sys/class/block/{name}/dev")).ok()?;
                let (major, minor) = text.trim().split_once(':')?;
                let device = Device { major: major.parse().ok()?, minor: minor.parse().ok()? };
                Some(Disk { node: Path::new("/dev").join(name), device })
            }
            Self::Given(disks) => {
                let (_, path) = disks.iter().find(|(given, _)| *given == slot)?;
                Some(Disk::of(path.clone(), stat(path).ok()?.st_rdev))
            }
        }
    }

    /// Its disk, with a driver from now on. It must not be in use.
    pub(crate) fn bind(&self, slot: u8) -> Result<Disk, Failure> {
        self.check(slot)?;
        if slot >= WRITABLE_SLOTS && self.find(slot).is_some() {
            // Its size is read once: QEMU tells of a change only where it may write.
            crate::boot::report("empty a slot", self.clear(slot));
        }
        if self.find(slot).is_none()
            && let Some(address) = self.address(slot)
        {
            fs::write(format!("{PCI}/drivers/{DRIVER}/bind"), address)
                .map_err(|error| not_found(slot, &error))?;
        }
        let disk = self.find(slot).ok_or_else(|| not_found(slot, &"it has none"))?;
        if let Self::OfMachine(_) = self {
            show(&disk).map_err(|error| not_found(slot, &error))?;
        }
        Ok(disk)
    }

    /// Nothing can be written to it any more.
    pub(crate) fn clear(&self, slot: u8) -> std::io::Result<()> {
        let (Some(address), Some(directory)) = (self.address(slot), self.directory(slot)) else {
            return Ok(());
        };
        let name = block_name(&directory);
        if directory.join("driver").exists() {
            fs::write(format!("{PCI}/drivers/{DRIVER}/unbind"), &address)?;
        }
        silence(&directory)?;
        match name {
            // A device of number 0 exists nowhere.
            Some(name) => Ok(put_node(&Path::new("/dev").join(name), 0)?),
            None => Ok(()),
        }
    }

    fn address(&self, slot: u8) -> Option<String> {
        match self {
            Self::OfMachine(first) => Some(format!("0000:00:{:02x}.0", first + u32::from(slot))),
            Self::Given(_) => None,
        }
    }

    fn directory(&self, slot: u8) -> Option<PathBuf> {
        Some(Path::new(PCI).join("devices").join(self.address(slot)?))
    }
}

fn not_found(slot: u8, error: &dyn std::fmt::Display) -> Failure {
    refuse(ErrorCode::Internal, format!("find the disk of slot {slot}: {error}"))
}

fn show(disk: &Disk) -> Result<(), Errno> {
    put_node(&disk.node, makedev(disk.device.major, disk.device.minor))
}

/// Names go by the order in which disks came.
fn block_name(device: &Path) -> Option<String> {
    let virtio = children(device).find(|name| name.starts_with("virtio"))?;
    let name = children(&device.join(virtio).join("block")).next();
    name.filter(|name| name.as_bytes().get(2).is_some_and(|&letter| letter >= FIRST_LETTER))
}

fn children(directory: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

fn silence(device: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let configuration = fs::File::options().read(true).write(true).open(device.join("config"))?;
    let mut command = [0; 2];
    configuration.read_exact_at(&mut command, COMMAND)?;
    if command[0] & MEMORY != 0 {
        command[0] &= !MEMORY;
        configuration.write_all_at(&command, COMMAND)?;
    }
    Ok(())
}

/// The kernel leaves a name alone that is taken, and so may root have done anything to it.
fn put_node(path: &Path, number: u64) -> Result<(), Errno> {
    if let Ok(stat) = rustix::fs::lstat(path) {
        let is_block = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        if is_block && stat.st_rdev == number {
            return Ok(());
        }
        unlink(path)?;
    }
    mknodat(CWD, path, FileType::BlockDevice, Mode::from_raw_mode(0o600), number)
}
