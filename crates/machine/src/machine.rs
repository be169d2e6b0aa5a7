//! A machine that runs or stands still. Dropping it leaves it as it is: machines outlive the server.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::disks::{self, ROOT_NODE, VolumeDisk};
use crate::error::{Error, Result};
use crate::guest::Guest;
use crate::hypervisor::explained;
use crate::memory;
use crate::process::{Exit, Process};
use crate::qemu_args::{CONSOLE, CONSOLE_BYTES};
use crate::qmp::Qmp;
use crate::sockets;

pub(crate) const QMP_SOCKET: &str = "qmp.sock";
pub(crate) const GUEST_SOCKET: &str = "guest.sock";
/// Saving stops the machine, and that flushes its disks.
const SAVE: Duration = Duration::from_secs(60);

const HALT_POLL: Duration = Duration::from_millis(200);

/// How a machine ended by itself.
#[derive(Debug)]
pub enum Ended {
    /// The guest did so, or rebooted, or its kernel panicked.
    PoweredOff,
    Died {
        reason: String,
    },
}

#[derive(Debug)]
pub struct Machine {
    pub(crate) process: Process,
    pub(crate) qmp: Qmp,
    directory: PathBuf,
    link: Mutex<Link>,
}

/// What changes while the machine lives.
#[derive(Debug)]
struct Link {
    /// Connected since before the state was loaded; no handshake yet.
    channel: Option<UnixStream>,
    guest: Option<Guest>,
    /// The root disk's new length, of which the guest does not know yet: it can only be told once the machine runs.
    grown: Option<u64>,
}

impl Machine {
    pub(crate) fn new(
        process: Process,
        qmp: Qmp,
        channel: UnixStream,
        directory: PathBuf,
        grown: Option<u64>,
    ) -> Self {
        let link = Link { channel: Some(channel), guest: None, grown };
        Self { process, qmp, directory, link: Mutex::new(link) }
    }

    fn link(&self) -> MutexGuard<'_, Link> {
        self.link.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    pub(crate) fn outlive(&self) {
        self.process.outlive();
    }

    /// Waits for the end of the process, which nobody here asked for.
    pub fn exited(&self) -> impl Future<Output = Ended> + Send + use<> {
        let (exit, qmp, end) = (self.process.exit(), self.qmp.clone(), self.process.ended());
        async move {
            let exit = exit.await;
            // For a process that was adopted only QEMU's last words tell.
            if exit == Exit::Code(0) || (exit == Exit::Unknown && qmp.guest_has_shut_down().await) {
                return Ended::PoweredOff;
            }
            Ended::Died { reason: end.await.to_string() }
        }
    }

    pub fn has_exited(&self) -> bool {
        self.process.has_ended()
    }

    /// The end of what QEMU wrote to standard error.
    pub fn stderr(&self) -> String {
        self.process.stderr()
    }

    /// # Errors
    /// QEMU refuses or is gone.
    pub async fn resume(&self) -> Result<()> {
        self.run("cont", json!({})).await.map_err(Error::or_locked)?;
        self.process.settle();
        let grown = self.link().grown;
        if let Some(size) = grown {
            explained(&self.process, disks::resize(&self.qmp, ROOT_NODE, size)).await?;
            self.link().grown = None;
        }
        Ok(())
    }

    /// Its root disk's file has so many bytes, more than before. The guest is told when it is resumed.
    pub fn lengthen_root(&self, bytes: u64) {
        self.link().grown = Some(bytes);
    }

    /// # Errors
    /// QEMU refuses or is gone.
    pub async fn stop(&self) -> Result<()> {
        self.run("stop", json!({})).await
    }

    async fn run(&self, command: &'static str, arguments: Value) -> Result<()> {
        explained(&self.process, self.qmp.run_within(SAVE, command, arguments, None))
            .await
            .map(drop)
    }

    /// # Errors
    /// QEMU is gone.
    pub async fn is_running(&self) -> Result<bool> {
        let status = explained(&self.process, self.qmp.run("query-status", json!({}))).await?;
        Ok(status["status"] == "running")
    }

    /// Whether it stands still because a write found no room on the host.
    pub fn is_out_of_room(&self) -> bool {
        self.qmp.is_out_of_room()
    }

    /// Tries such a write again.
    ///
    /// # Errors
    /// QEMU refuses or is gone.
    pub async fn try_writes_again(&self) -> Result<()> {
        let status = explained(&self.process, self.qmp.run("query-status", json!({}))).await?;
        if status["status"] == "io-error" {
            return self.run("cont", json!({})).await;
        }
        // QEMU holds back repeated events for a second: one may tell of what is over.
        self.qmp.note_room();
        Ok(())
    }

    /// Waits until the guest of a boot has powered off or its kernel has panicked.
    pub(crate) async fn halted(&self) -> Error {
        loop {
            match explained(&self.process, self.qmp.run("query-status", json!({}))).await {
                Ok(status)
                    if status["status"] == "shutdown" || status["status"] == "internal-error" =>
                {
                    return Error::Silent;
                }
                Ok(_) => tokio::time::sleep(HALT_POLL).await,
                Err(error) => return error,
            }
        }
    }

    /// Writes the state of all devices, without memory, to a file made there. The machine has to be stopped; it stays
    /// so. The file is not flushed to the disk.
    ///
    /// # Errors
    /// QEMU refuses or is gone.
    pub async fn save_state(&self, path: &Path) -> Result<()> {
        let file = File::create(path).map_err(Error::file("create", path))?;
        self.write_state(file).await
    }

    /// The same, to a file that is open for writing only.
    pub(crate) async fn write_state(&self, file: File) -> Result<()> {
        let saving = async {
            let set = self.qmp.add_descriptor(file.into()).await?;
            // Not `live`, which would let go of the locks on the disks.
            let arguments = json!({ "filename": set.path(), "live": false });
            let saved = self.qmp.run_within(SAVE, "xen-save-devices-state", arguments, None).await;
            self.qmp.remove_descriptor(set).await?;
            saved.map(drop)
        };
        explained(&self.process, saving).await
    }

    /// Puts a volume behind an empty slot. The guest sees the size of one that can be written as soon as it runs, that of a
    /// read-only one when its driver takes hold of the device.
    ///
    /// # Errors
    /// The slot is as it was. [`Error::Locked`] when the volume is in use; [`Error::Unfit`] when it does not fit the slot.
    pub async fn attach_volume(&self, slot: u8, volume: VolumeDisk) -> Result<()> {
        explained(&self.process, disks::attach(&self.qmp, slot, volume)).await
    }

    /// Empties a slot, whose volume the guest must have unmounted, and lets go of the volume's lock. What the guest
    /// writes there later fails; but it still sees the volume's size.
    ///
    /// # Errors
    /// QEMU refuses, as when the slot is empty, or is gone.
    pub async fn detach_volume(&self, slot: u8) -> Result<()> {
        explained(&self.process, disks::detach(&self.qmp, slot)).await
    }

    /// Tells the guest that a volume's file has grown to `bytes`.
    ///
    /// # Errors
    /// [`Error::Unfit`] when it would shrink, or there is none.
    pub async fn resize_volume(&self, slot: u8, bytes: u64) -> Result<()> {
        explained(&self.process, disks::grow(&self.qmp, slot, bytes)).await
    }

    /// Tells the guest that the root disk's file has grown to `bytes`.
    ///
    /// # Errors
    /// QEMU refuses or is gone.
    pub async fn resize_root(&self, bytes: u64) -> Result<()> {
        explained(&self.process, disks::resize(&self.qmp, ROOT_NODE, bytes)).await
    }

    /// Connects to the agent anew; what was open before is lost. The machine has to run.
    ///
    /// # Errors
    /// [`Error::Silent`] after the deadline.
    pub async fn connect_guest(&self, deadline: Duration) -> Result<Guest> {
        let channel = {
            let mut link = self.link();
            // A second client of the socket waits for the first to leave.
            link.guest = None;
            link.channel.take()
        };
        let connecting = async {
            let channel = match channel {
                Some(channel) => channel,
                None => sockets::connect(&self.directory, GUEST_SOCKET).await?,
            };
            Guest::connect(channel, deadline).await
        };
        let guest = explained(&self.process, connecting).await?;
        self.link().guest = Some(guest.clone());
        Ok(guest)
    }

    /// The agent, once it was connected to.
    pub fn guest(&self) -> Option<Guest> {
        self.link().guest.clone()
    }

    /// The last 64 KiB that the guest wrote to its console since this was last asked for.
    ///
    /// # Errors
    /// QEMU is gone.
    pub async fn console(&self) -> Result<String> {
        explained(&self.process, console(&self.qmp)).await
    }

    /// Memory that only this machine uses, in use or swapped out.
    ///
    /// # Errors
    /// The process is gone.
    pub fn private_memory_bytes(&self) -> Result<u64> {
        memory::private_bytes(self.pid()).map_err(Error::host("measure the memory of qemu"))
    }

    /// Ends the process at once and waits until it is gone, and its locks and memory with it.
    ///
    /// # Errors
    /// It does not end: the kernel is stuck with it.
    pub async fn kill(self) -> Result<()> {
        self.process.kill().await
    }
}

pub(crate) async fn console(qmp: &Qmp) -> Result<String> {
    let text = qmp
        .run("ringbuf-read", json!({ "device": CONSOLE, "size": CONSOLE_BYTES, "format": "utf8" }))
        .await?;
    Ok(text.as_str().unwrap_or_default().into())
}
