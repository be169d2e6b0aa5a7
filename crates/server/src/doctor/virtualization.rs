//! QEMU, and what speeds it up.

use std::fs::File;

use machine::{Accelerator, Hypervisor};
use store::{Layout, current_guest};

use super::{Finding, output};
use crate::error::chain;

const EMULATION: &str =
    "sandboxes are emulated: several times slower, and the emulator is no security boundary";

const BINARY: &str = "qemu-system-x86_64";

pub(super) async fn qemu(is_root: bool) -> Vec<Finding> {
    const CHECK: &str = "qemu";
    const INSTALL: &str =
        "install qemu-system-x86 8.2 or newer (Debian 12 has it in bookworm-backports)";
    let finding = match tokio::task::spawn_blocking(Hypervisor::find).await {
        Ok(Ok(hypervisor)) => Finding::ok(CHECK, hypervisor.version()),
        Ok(Err(error @ (machine::Error::QemuMissing | machine::Error::QemuTooOld { .. }))) => {
            Finding::fail(CHECK, chain(&error), INSTALL)
        }
        // Its confinement needs root; that it is there can be seen without.
        Ok(Err(_)) if !is_root => match output(BINARY, &["--version"]).await {
            Some((true, said)) => {
                let version = said.lines().next().unwrap_or_default();
                Finding::ok(CHECK, version.trim_start_matches("QEMU emulator version "))
            }
            Some((false, _)) | None => Finding::fail(CHECK, "it cannot be run", INSTALL),
        },
        Ok(Err(error)) => Finding::fail(
            CHECK,
            chain(&error),
            "its processes cannot be confined here: run this outside a container, or in a privileged one",
        ),
        Err(error) => Finding::fail(CHECK, error.to_string(), INSTALL),
    };
    vec![finding]
}

async fn find() -> Result<Hypervisor, String> {
    match tokio::task::spawn_blocking(Hypervisor::find).await {
        Ok(found) => found.map_err(|error| chain(&error)),
        Err(error) => Err(error.to_string()),
    }
}

pub(super) async fn accelerator(layout: &Layout, is_root: bool) -> Vec<Finding> {
    const CHECK: &str = "accelerator";
    let none = |found: String| {
        Finding::warn(
            CHECK,
            found,
            format!(
                "{EMULATION}. Turn on virtualization in the firmware (or nested virtualization in the host of this one) and load kvm_intel or kvm_amd"
            ),
        )
    };
    let finding = match File::options().read(true).write(true).open("/dev/kvm") {
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied && !is_root => {
            Finding::warn(CHECK, "/dev/kvm is there", "run it as root to try a guest under it")
        }
        Err(error) => none(format!("emulation (TCG); /dev/kvm: {error}")),
        Ok(_) if !is_root => {
            Finding::warn(CHECK, "/dev/kvm can be opened", "run it as root to try a guest under it")
        }
        Ok(_) => match probe(layout).await {
            Ok(Some(Accelerator::Kvm)) => Finding::ok(CHECK, "kvm: a guest boots under it"),
            Ok(Some(Accelerator::Tcg)) => none(
                "emulation (TCG): /dev/kvm can be opened, but no guest boots under it".to_owned(),
            ),
            Ok(None) => Finding::warn(
                CHECK,
                "/dev/kvm can be opened; no guest was there to try it with",
                "run `atoll prepare`, then this again",
            ),
            Err(error) => none(format!("unknown: {error}")),
        },
    };
    vec![finding]
}

/// `None`: nothing was ever prepared here.
async fn probe(layout: &Layout) -> Result<Option<Accelerator>, String> {
    let Some(guest) = current_guest::find(layout) else { return Ok(None) };
    // Not where the servers remember it: it is to be tried now.
    let scratch = tempfile::tempdir().map_err(|error| error.to_string())?;
    let remembered = scratch.path().join("accelerator");
    let probed = find().await?.probe(&guest.kernel, &guest.initramfs, &remembered).await;
    probed.map(Some).map_err(|error| chain(&error))
}
