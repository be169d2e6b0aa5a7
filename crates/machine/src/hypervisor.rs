//! The way to a running machine: a boot for a bake, a restore into a process started ahead, or finding one again.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::cgroup::{Cgroups, Limits};
use crate::disks::{self, Durability, RootDisk, VolumeDisk};
use crate::error::{Error, Result};
use crate::guest_kernel::KernelFiles;
use crate::jail::Jail;
use crate::machine::{GUEST_SOCKET, Machine, QMP_SOCKET};
use crate::process::{Launch, Process};
use crate::qemu_args::{self, Inherited, Purpose, Start, Verbosity};
use crate::qemu_files;
use crate::qmp::{PROMPT, Qmp};
use crate::sockets;
use crate::spec::{Accelerator, MachineSpec};
use crate::tap::Tap;
use crate::text::plain;

const BINARY: &str = "qemu-system-x86_64";
/// Only from there on can a private mapping be opened read-only.
const OLDEST: (u32, u32) = (8, 2);
/// From the start of the process to its first word. It loads some forty libraries.
const START: Duration = Duration::from_secs(30);
/// A boot under emulation takes six seconds, several times that beside others.
const BOOT: Duration = Duration::from_secs(180);
const LOAD: Duration = Duration::from_secs(10);
const LOAD_POLL: Duration = Duration::from_millis(1);

/// QEMU on this host. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Hypervisor {
    jail: Arc<Jail>,
    cgroups: Arc<Cgroups>,
    version: Arc<str>,
}

/// Where a machine lives on the host.
#[derive(Debug)]
pub struct Place {
    /// Exists, and belongs to root alone: it holds the machine's sockets and says which process it is.
    pub directory: PathBuf,
    /// For this machine's QEMU alone; also its group.
    pub uid: u32,
    /// `None`: a network card that leads nowhere.
    pub tap: Option<Tap>,
}

#[derive(Debug)]
pub struct Boot {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// Open for reading and writing, as long as the machine's memory, not used by anything else. It becomes that
    /// memory; in the end it belongs to root and everybody may read it, so it has to lie where nobody else gets to.
    pub memory: File,
    pub root_disk: File,
    pub place: Place,
}

/// What a machine goes on from.
#[derive(Debug)]
pub struct Load {
    pub state: File,
    pub root_disk: RootDisk,
    /// By the number of their slots: first those that can be written, then those that can only be read.
    pub volumes: Vec<(u8, VolumeDisk)>,
}

/// What a machine is booted from that goes on with its own disk.
#[derive(Debug)]
pub struct PowerOn {
    pub kernel: PathBuf,
    pub initramfs: PathBuf,
    /// As long as the machine's memory, empty, and only read, by everybody: what the machine writes is its own.
    pub memory: File,
    pub root_disk: RootDisk,
    /// As in [`Load`].
    pub volumes: Vec<(u8, VolumeDisk)>,
    pub place: Place,
}

/// A kernel to boot, and how.
#[derive(Clone, Copy)]
pub(crate) struct FromKernel<'a> {
    pub(crate) files: &'a KernelFiles,
    pub(crate) console: Verbosity,
    pub(crate) purpose: Purpose,
}

/// A process that waits for a saved state. Dropping it ends the process.
#[derive(Debug)]
pub struct Prepared {
    started: Started,
}

/// A process with both connections; it ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Started {
    pub(crate) process: Process,
    pub(crate) qmp: Qmp,
    channel: UnixStream,
    directory: PathBuf,
}

impl Hypervisor {
    /// Blocks shortly, while QEMU says its version and what it needs is put together. An upgrade of QEMU has no effect on
    /// the machines of this hypervisor; the next one finds it.
    ///
    /// # Errors
    /// There is none, it is too old, or this process may not make namespaces.
    pub fn find() -> Result<Self> {
        let paths = std::env::var_os("PATH").unwrap_or_default();
        let binary = std::env::split_paths(&paths)
            .map(|directory| directory.join(BINARY))
            .find(|path| path.is_file())
            .ok_or(Error::QemuMissing)?;
        let output = std::process::Command::new(&binary).arg("--version").output();
        let output = output.map_err(Error::file("run", &binary))?;
        let text = String::from_utf8_lossy(&output.stdout);
        let version = text
            .lines()
            .next()
            .unwrap_or_default()
            .trim_start_matches("QEMU emulator version ")
            .to_owned();
        match release(&version) {
            Some(release) if release >= OLDEST => {
                let jail = Jail::new(&binary, &qemu_files::data(&binary)?)?;
                let cgroups = Cgroups::find();
                Ok(Self { jail: jail.into(), cgroups: cgroups.into(), version: version.into() })
            }
            Some(_) | None => Err(Error::QemuTooOld { version }),
        }
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    /// Boots a machine and waits until its agent has answered. It is meant to be saved: when it powers off, it only
    /// stands still, so that its console can be read.
    ///
    /// # Errors
    /// [`Error::NotBooted`] with the end of the console; the process is gone then.
    pub async fn boot(&self, spec: &MachineSpec, boot: Boot) -> Result<Machine> {
        check_size(&boot.memory, spec)?;
        let files = KernelFiles::read(&boot.kernel, &boot.initramfs)?;
        // QEMU opens it once more by its number, for which it needs permission. Once it has, that is taken back.
        let own = |uid, mode| {
            std::os::unix::fs::fchown(&boot.memory, Some(uid), Some(uid))?;
            boot.memory.set_permissions(std::fs::Permissions::from_mode(mode))
        };
        own(boot.place.uid, 0o600).map_err(Error::host("hand the memory over"))?;
        let kernel =
            FromKernel { files: &files, console: Verbosity::Quiet, purpose: Purpose::Save };
        let started = self.start(spec, &boot.memory, boot.place, Some(kernel)).await;
        own(0, 0o444).map_err(Error::host("take the memory back"))?;
        let started = started?;
        disks::put_root(&started.qmp, boot.root_disk, Durability::Throwaway).await?;
        started.qmp.run("cont", json!({})).await?;
        let machine = started.into_machine(None);
        let failure = tokio::select! {
            connected = machine.connect_guest(BOOT) => match connected {
                Ok(_) => {
                    machine.outlive();
                    return Ok(machine);
                }
                Err(error) => error,
            },
            failure = machine.halted() => failure,
        };
        let console = machine.console().await.unwrap_or_default();
        machine.kill().await?;
        let has_no_answer = matches!(failure, Error::Silent);
        Err(if has_no_answer {
            Error::NotBooted { console: plain(last_lines(&console), console.len()) }
        } else {
            failure
        })
    }

    /// A machine at its first instruction, with its disks, that boots once it is resumed. Its process ends when the guest
    /// powers off.
    ///
    /// # Errors
    /// Nothing is left of the process then. [`Error::Locked`] when a disk is in use.
    pub async fn power_on(&self, spec: &MachineSpec, boot: PowerOn) -> Result<Machine> {
        let PowerOn { kernel, initramfs, memory, root_disk, volumes, place } = boot;
        check_size(&memory, spec)?;
        check_disk(&root_disk)?;
        let files = tokio::task::spawn_blocking(move || KernelFiles::read(&kernel, &initramfs));
        let files = files.await.map_err(|_| Error::Lost)??;
        let kernel = FromKernel { files: &files, console: Verbosity::Quiet, purpose: Purpose::Use };
        let started = self.start(spec, &memory, place, Some(kernel)).await?;
        let disks = async {
            disks::put_root(&started.qmp, root_disk.file, root_disk.durability).await?;
            for (slot, volume) in volumes {
                disks::attach(&started.qmp, slot, volume).await?;
            }
            Ok(())
        };
        match explained(&started.process, disks).await {
            Ok(()) => {
                let machine = started.into_machine(None);
                machine.outlive();
                Ok(machine)
            }
            Err(error) => {
                started.process.kill().await?;
                Err(error.or_locked())
            }
        }
    }

    /// Starts a process ahead of the state that it will be given. `memory` is that of the state; it is only read.
    ///
    /// # Errors
    /// The process could not be started; nothing is left of it.
    pub async fn prepare(
        &self,
        spec: &MachineSpec,
        memory: File,
        place: Place,
    ) -> Result<Prepared> {
        check_size(&memory, spec)?;
        Ok(Prepared { started: self.start(spec, &memory, place, None).await? })
    }

    /// Finds the machine that an earlier server left running in this place.
    ///
    /// # Errors
    /// [`Error::NoMachine`] when its process is gone.
    pub async fn adopt(place: &Place) -> Result<Machine> {
        let process = Process::adopt(&place.directory, place.uid)?;
        process.settle();
        let qmp =
            Qmp::connect(sockets::connect(&place.directory, QMP_SOCKET).await?, PROMPT).await?;
        if qmp.run("query-status", json!({})).await?["status"] == "io-error" {
            qmp.note_out_of_room();
        }
        let channel = sockets::connect(&place.directory, GUEST_SOCKET).await?;
        Ok(Machine::new(process, qmp, channel, place.directory.clone(), None))
    }

    pub(crate) async fn start(
        &self,
        spec: &MachineSpec,
        memory: &File,
        place: Place,
        kernel: Option<FromKernel<'_>>,
    ) -> Result<Started> {
        let Place { directory, uid, tap } = place;
        fault::point!("create.sockets_making", Error::host("listen for qemu"));
        let qmp = sockets::listen(&directory, QMP_SOCKET)?;
        let guest = sockets::listen(&directory, GUEST_SOCKET)?;
        let kvm = match spec.accelerator {
            Accelerator::Kvm => {
                let device = File::options().read(true).write(true).open("/dev/kvm");
                Some(device.map_err(Error::file("open", "/dev/kvm"))?)
            }
            Accelerator::Tcg => None,
        };
        let memory = memory.try_clone().map_err(Error::host("duplicate a descriptor"))?;
        let kernel = match kernel {
            Some(FromKernel { files, console, purpose }) => {
                let files = files.try_clone().map_err(Error::host("duplicate a descriptor"))?;
                Some((files, console, purpose))
            }
            None => None,
        };
        let (jail, cgroups) = (self.jail.clone(), self.cgroups.clone());
        let (spec, process_directory) = (*spec, directory.clone());
        let process = tokio::task::spawn_blocking(move || {
            let tap = tap.map_or_else(Tap::unconnected, Ok).map_err(Error::host("make a tap"))?;
            let inherited = Inherited {
                qmp: qmp.as_raw_fd(),
                guest: guest.as_raw_fd(),
                tap: tap.fd.as_raw_fd(),
                memory: memory.as_raw_fd(),
                kvm: kvm.as_ref().map(AsRawFd::as_raw_fd),
            };
            let mut descriptors =
                vec![inherited.qmp, inherited.guest, inherited.tap, inherited.memory];
            descriptors.extend(inherited.kvm);
            let start = match &kernel {
                Some((files, console, purpose)) => {
                    let (kernel, initramfs) =
                        (files.kernel.as_raw_fd(), files.initramfs.as_raw_fd());
                    descriptors.extend([kernel, initramfs]);
                    Start::Boot { kernel, initramfs, console: *console, purpose: *purpose }
                }
                None => Start::Incoming,
            };
            let arguments = qemu_args::process(&spec, &inherited, &start);
            let (directory, inherited) = (&process_directory, &descriptors);
            let group = cgroups.create(uid, &Limits::of(&spec))?;
            Process::start(Launch {
                jail: &jail,
                group,
                arguments,
                directory,
                uid,
                netns: &tap.netns,
                inherited,
            })
        });
        let process = process.await.map_err(|_| Error::Lost)??;
        fault::point!("create.process_started", Error::host("reach qemu"));
        Started::connect(process, directory).await
    }
}

impl Started {
    /// The sockets listened before the process was there, so a connection waits in them until it is.
    async fn connect(process: Process, directory: PathBuf) -> Result<Self> {
        let connected = async {
            let channel = sockets::connect(&directory, GUEST_SOCKET).await?;
            let qmp = Qmp::connect(sockets::connect(&directory, QMP_SOCKET).await?, START).await?;
            // A port that was full when the state was saved stays silent for ever if its socket is opened after the load.
            let end = Instant::now() + START;
            while !is_connected(&qmp).await? {
                if Instant::now() > end {
                    return Err(Error::QmpSilent { command: "query-chardev" });
                }
                tokio::time::sleep(LOAD_POLL).await;
            }
            Ok((qmp, channel))
        };
        let connected = explained(&process, connected).await;
        // It waits for commands now, so it has read all the files it needs.
        let (process, closed) = tokio::task::spawn_blocking(move || {
            let closed = process.close_jail();
            (process, closed)
        })
        .await
        .map_err(|_| Error::Lost)?;
        match connected.and_then(|connected| closed.map(|()| connected)) {
            Ok((qmp, channel)) => Ok(Self { process, qmp, channel, directory }),
            Err(error) => {
                process.kill().await?;
                Err(error)
            }
        }
    }

    /// It still ends when it is dropped. `grown`: the root disk's new length, of which the guest does not know yet.
    fn into_machine(self, grown: Option<u64>) -> Machine {
        Machine::new(self.process, self.qmp, self.channel, self.directory, grown)
    }
}

impl Prepared {
    pub fn pid(&self) -> u32 {
        self.started.process.pid()
    }

    pub fn has_exited(&self) -> bool {
        self.started.process.has_ended()
    }

    /// Loads a saved state. The machine is paused then.
    ///
    /// # Errors
    /// Nothing is left of the process then. [`Error::Locked`] when a disk is in use. A state of another machine than the
    /// spec's may be told by [`Error::NotLoaded`], or not at all: compare descriptions first.
    pub async fn load(self, load: Load) -> Result<Machine> {
        let process = &self.started.process;
        let RootDisk { bytes, base_bytes, .. } = load.root_disk;
        match explained(process, self.load_state(load)).await {
            Ok(()) => {
                let machine = self.started.into_machine(Some(bytes).filter(|_| bytes > base_bytes));
                machine.outlive();
                Ok(machine)
            }
            Err(error) => {
                process.kill().await?;
                Err(error.or_locked())
            }
        }
    }

    async fn load_state(&self, load: Load) -> Result<()> {
        let Started { process, qmp, .. } = &self.started;
        let Load { state, root_disk, volumes } = load;
        check_disk(&root_disk)?;
        let RootDisk { file, durability, .. } = root_disk;
        fault::point!("create.disk_putting", Error::host("put a disk into its slot"));
        disks::put_root(qmp, file, durability).await?;
        fault::point!("create.state_loading", Error::host("load a state"));
        let set = qmp.add_descriptor(state.into()).await?;
        let begun = Instant::now();
        qmp.run("migrate-incoming", json!({ "uri": format!("file:{}", set.path()) })).await?;
        // When a disk is locked, the load ends as if it had succeeded, but this stays as it is for ever.
        while qmp.run("query-status", json!({})).await?["status"] == "inmigrate" {
            if begun.elapsed() > LOAD {
                return Err(Error::NotLoaded { waited: LOAD, stderr: process.stderr() });
            }
            tokio::time::sleep(LOAD_POLL).await;
        }
        fault::point!("create.state_loaded", Error::host("load a state"));
        qmp.remove_descriptor(set).await?;
        disks::lock_all(qmp).await?;
        for (slot, volume) in volumes {
            disks::attach(qmp, slot, volume).await?;
        }
        Ok(())
    }
}

async fn is_connected(qmp: &Qmp) -> Result<bool> {
    let devices = qmp.run("query-chardev", json!({})).await?;
    let guest = devices.as_array().into_iter().flatten().find(|device| device["label"] == "guest");
    Ok(guest
        .and_then(|device| device["filename"].as_str())
        .is_some_and(|name| !name.starts_with("disconnected:")))
}

/// When the process ends meanwhile, that is the reason, and not the broken connection it leaves behind.
pub(crate) async fn explained<T>(
    process: &Process,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    const NOTICED: Duration = Duration::from_secs(1);
    let error = tokio::select! {
        biased;
        result = work => match result {
            Err(error @ Error::Lost) => error,
            result => return result,
        },
        ended = process.ended() => return Err(ended),
    };
    Err(tokio::time::timeout(NOTICED, process.ended()).await.unwrap_or(error))
}

/// `block_resize` truncates the file to what it is told.
fn check_disk(disk: &RootDisk) -> Result<()> {
    let RootDisk { file, bytes, base_bytes, .. } = disk;
    let length = file.metadata().map_err(Error::host("measure a disk"))?.len();
    if length != *bytes || bytes < base_bytes {
        return Err(Error::Unfit(format!(
            "a disk of {length} bytes cannot take the place of {base_bytes} as one of {bytes}"
        )));
    }
    Ok(())
}

fn check_size(memory: &File, spec: &MachineSpec) -> Result<()> {
    let metadata = memory.metadata().map_err(Error::host("measure a memory file"))?;
    let (length, expected) = (metadata.len(), spec.shape.memory_bytes());
    if length != expected {
        return Err(Error::Unfit(format!(
            "a memory file of {length} bytes is not one of {expected}"
        )));
    }
    Ok(())
}

/// `10.0.2 (Debian 1:10.0.2)` is release 10.0.
fn release(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split(['.', ' ']).map(|word| word.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn last_lines(console: &str) -> &str {
    const BYTES: usize = 2000;
    let start = console.len().saturating_sub(BYTES);
    let start =
        (start..console.len()).find(|&at| console.is_char_boundary(at)).unwrap_or(console.len());
    &console[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_as_numbers() {
        assert!(release("10.0.2 (Debian 1:10.0.2+ds-2)").unwrap() > OLDEST);
        assert!(release("8.2.0").unwrap() >= OLDEST);
        assert!(release("7.2.22").unwrap() < OLDEST);
        assert_eq!(release("of something else"), None);
    }
}
