//! Which accelerator works on this host: found out by a boot, once in each boot of the host.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::guest_kernel::{KernelFiles, anonymous_file};
use crate::hypervisor::{FromKernel, Hypervisor, Place, Started};
use crate::process::host_boot_id;
use crate::qemu_args::{Purpose, Verbosity};
use crate::spec::{Accelerator, MachineSpec, Shape};

const PROBE: Duration = Duration::from_secs(5);
const PROBE_POLL: Duration = Duration::from_millis(20);
/// The kernel says so when it has come all the way to the agent.
const PROBE_SUCCESS: &str = "Run /init as init process";
/// Below those of all machines.
const PROBE_UID: u32 = 1_899_999_999;
impl Hypervisor {
    /// Which accelerator works. That KVM can be opened does not mean that a kernel runs under it, so one is booted, once
    /// in each boot of the host; the answer is kept in the file `remembered`.
    ///
    /// # Errors
    /// Only when it cannot be found out; that KVM does not work is no error.
    pub async fn probe(
        &self,
        kernel: &Path,
        initramfs: &Path,
        remembered: &Path,
    ) -> Result<Accelerator> {
        if File::options().read(true).write(true).open("/dev/kvm").is_err() {
            return Ok(Accelerator::Tcg);
        }
        let boot_id = host_boot_id().map_err(Error::host("read the host's boot id"))?;
        let circumstances = format!("{boot_id} {}", self.version());
        if let Ok(text) = std::fs::read_to_string(remembered)
            && let Some((accelerator, then)) = text.trim().split_once(' ')
            && let Ok(accelerator) = accelerator.parse()
            && then == circumstances
        {
            return Ok(accelerator);
        }
        let directory = remembered.with_extension(format!("probe-{}", std::process::id()));
        std::fs::create_dir_all(&directory).map_err(Error::file("create", &directory))?;
        let probed = self.boots_under_kvm(kernel, initramfs, directory.clone()).await;
        std::fs::remove_dir_all(&directory).map_err(Error::file("remove", &directory))?;
        let accelerator = match probed {
            Ok(true) => Accelerator::Kvm,
            Ok(false) => Accelerator::Tcg,
            Err(
                error @ (Error::Exited { .. }
                | Error::Lost
                | Error::QmpSilent { .. }
                | Error::QmpRefused { .. }),
            ) => {
                tracing::warn!(%error, "KVM cannot be used");
                Accelerator::Tcg
            }
            Err(error) => return Err(error),
        };
        let draft = remembered.with_extension(format!("draft-{}", std::process::id()));
        std::fs::write(&draft, format!("{accelerator} {circumstances}\n"))
            .map_err(Error::file("write", &draft))?;
        std::fs::rename(&draft, remembered).map_err(Error::file("write", remembered))?;
        tracing::info!(%accelerator, "found out which accelerator works");
        Ok(accelerator)
    }

    async fn boots_under_kvm(
        &self,
        kernel: &Path,
        initramfs: &Path,
        directory: PathBuf,
    ) -> Result<bool> {
        let spec = MachineSpec {
            shape: Shape { cpus: 1, memory_mib: 256 },
            accelerator: Accelerator::Kvm,
        };
        let memory = anonymous_file("probe-memory").map_err(Error::host("make memory"))?;
        memory.set_len(spec.shape.memory_bytes()).map_err(Error::host("make memory"))?;
        let place = Place { directory, uid: PROBE_UID, tap: None };
        let files = KernelFiles::read(kernel, initramfs)?;
        let kernel = FromKernel { files: &files, console: Verbosity::Full, purpose: Purpose::Save };
        let started = self.start(&spec, &memory, place, Some(kernel)).await?;
        let Started { process, qmp, .. } = &started;
        let end = Instant::now() + PROBE;
        qmp.run("cont", json!({})).await?;
        let mut boots = false;
        while !boots && !process.has_ended() && Instant::now() < end {
            tokio::time::sleep(PROBE_POLL).await;
            boots = crate::machine::console(qmp).await?.contains(PROBE_SUCCESS);
        }
        process.kill().await?;
        Ok(boots)
    }
}
