//! What the technique itself costs: QEMU by hand and a guest that only echoes, forks and runs. No code of Atoll is used,
//! so that its figures can be held against these.

mod guest;
mod initramfs;
mod parts;
mod qemu;
mod qmp;
mod save;

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    time::{Duration, Instant},
};

use anyhow::Context;
use serde_json::json;

pub(crate) use self::{guest::Guest, parts::Parts, qemu::Shape};
use self::{
    qemu::{Qemu, Start},
    qmp::Qmp,
};
use crate::wait;

/// A machine that was booted once and saved.
pub(crate) struct Bake {
    directory: PathBuf,
    accelerator: String,
    shape: Shape,
    disk_bytes: u64,
    kernel: PathBuf,
    prepared: AtomicU32,
}

impl Bake {
    /// `directory` must not exist and be where files can be cloned.
    pub(crate) fn make(
        directory: PathBuf,
        accelerator: &str,
        shape: Shape,
        parts: &Parts,
        guest_program: &Path,
    ) -> anyhow::Result<Self> {
        fs::create_dir_all(&directory).with_context(|| format!("make {}", directory.display()))?;
        clone_file(&parts.rootfs, &directory.join("disk"))?;
        let disk_bytes = fs::metadata(directory.join("disk"))?.len();
        File::create(directory.join("memory"))?.set_len(shape.memory_mib << 20)?;
        let image = directory.join("initramfs");
        initramfs::write(&image, guest_program, parts)?;
        let bake = Self {
            directory,
            accelerator: accelerator.to_owned(),
            shape,
            disk_bytes,
            kernel: parts.kernel.clone(),
            prepared: AtomicU32::new(0),
        };

        let start = Start::Cold { kernel: &parts.kernel, initramfs: &image };
        let mut machine = bake.start(&bake.directory.join("baking"), &start)?;
        machine.put_disk(&bake.directory.join("disk"))?;
        machine.qmp.call("cont", &json!({}))?;
        let mut guest = Guest::new(machine, None);
        guest.ping().with_context(|| {
            format!("boot the floor's guest: {}", guest.machine.qemu.last_words())
        })?;
        // Bash is in the guest's page cache from here on: no restored machine reads it from the disk.
        guest.run("sync")?;
        guest.machine.qmp.call("stop", &json!({}))?;
        let state = bake.directory.join("state");
        guest
            .machine
            .qmp
            .call("xen-save-devices-state", &json!({"filename": state, "live": false}))?;
        guest.quit()?;
        Ok(bake)
    }

    /// The same machine from its kernel on, and how long its first answer took from there.
    pub(crate) fn boot(&self) -> anyhow::Result<(Guest, Duration)> {
        let number = self.prepared.fetch_add(1, Ordering::Relaxed);
        let directory = self.sibling(&format!("boot-{number}"));
        fs::create_dir_all(&directory)?;
        clone_file(&self.directory.join("disk"), &directory.join("disk"))?;
        File::create(directory.join("memory"))?.set_len(self.shape.memory_mib << 20)?;
        let image = self.directory.join("initramfs");
        let booting = Self {
            directory: directory.clone(),
            accelerator: self.accelerator.clone(),
            shape: self.shape,
            disk_bytes: self.disk_bytes,
            kernel: self.kernel.clone(),
            prepared: AtomicU32::new(0),
        };
        let start = Start::Cold { kernel: &self.kernel, initramfs: &image };
        let mut machine = booting.start(&directory.join("booting"), &start)?;
        machine.put_disk(&directory.join("disk"))?;
        let begun = Instant::now();
        machine.qmp.call("cont", &json!({}))?;
        let mut guest = Guest::new(machine, Some(directory));
        guest.ping().context("boot the floor's guest once more")?;
        Ok((guest, begun.elapsed()))
    }

    /// A process started ahead.
    pub(crate) fn prepare(&self) -> anyhow::Result<Prepared> {
        let directory =
            self.directory.join(self.prepared.fetch_add(1, Ordering::Relaxed).to_string());
        let machine = self.start(&directory, &Start::Incoming)?;
        Ok(Prepared {
            machine,
            base: self.directory.join("disk"),
            state: self.directory.join("state"),
            directory,
        })
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// A path beside it, where files can be cloned as well.
    pub(crate) fn sibling(&self, name: &str) -> PathBuf {
        self.directory.with_file_name(name)
    }

    fn start(&self, directory: &Path, start: &Start<'_>) -> anyhow::Result<Machine> {
        fs::create_dir_all(directory)?;
        let memory = self.directory.join("memory");
        let qemu =
            Qemu::start(directory, &self.accelerator, self.shape, &memory, self.disk_bytes, start)?;
        let connected = Qmp::connect(&directory.join("qmp")).and_then(|qmp| {
            // Before the state is loaded: a port that was full when it was saved stays silent for ever otherwise.
            let channel = qmp::connect(&directory.join("channel"))?;
            Ok((qmp, channel))
        });
        let (qmp, channel) =
            connected.with_context(|| format!("reach qemu: {}", qemu.last_words()))?;
        Ok(Machine { qemu, qmp, channel })
    }
}

/// A QEMU process and our ends of its sockets.
struct Machine {
    qemu: Qemu,
    qmp: Qmp,
    channel: std::os::unix::net::UnixStream,
}

impl Machine {
    fn put_disk(&mut self, file: &Path) -> anyhow::Result<()> {
        let protocol = json!({"driver": "file", "filename": file});
        let node = json!({"driver": "raw", "node-name": "root-disk", "discard": "unmap", "file": protocol});
        self.qmp.call("blockdev-add", &node)?;
        let link =
            json!({"path": "/machine/peripheral/root", "property": "drive", "value": "root-disk"});
        self.qmp.call("qom-set", &link)?;
        Ok(())
    }
}

/// Waits for its disk and its state.
pub(crate) struct Prepared {
    machine: Machine,
    base: PathBuf,
    state: PathBuf,
    directory: PathBuf,
}

impl Prepared {
    /// The steps that a create cannot do without.
    pub(crate) fn restore(mut self) -> anyhow::Result<Guest> {
        let disk = self.directory.join("disk");
        clone_file(&self.base, &disk)?;
        self.machine.put_disk(&disk)?;
        self.machine
            .qmp
            .call("migrate-incoming", &json!({"uri": format!("file:{}", self.state.display())}))?;
        let (limit, step) = (Duration::from_secs(10), Duration::from_micros(500));
        wait::until("the loaded state", limit, step, || {
            let status = self.machine.qmp.call("query-status", &json!({}))?;
            Ok((status["status"] != "inmigrate").then_some(()))
        })
        .with_context(|| format!("load the state: {}", self.machine.qemu.last_words()))?;
        self.machine.qmp.call("cont", &json!({}))?;
        Ok(Guest::new(self.machine, Some(self.directory)))
    }
}

fn clone_file(source: &Path, target: &Path) -> anyhow::Result<()> {
    let from = File::open(source).with_context(|| format!("open {}", source.display()))?;
    let to = File::create(target).with_context(|| format!("create {}", target.display()))?;
    rustix::fs::ioctl_ficlone(&to, &from).with_context(|| {
        format!(
            "clone {} to {} (both on one file system with reflinks?)",
            source.display(),
            target.display()
        )
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{build, server::pool};

    #[test]
    #[ignore = "long: boots a virtual machine from the files of a set-up host"]
    fn a_restored_guest_of_the_floor_does_everything_it_is_told() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let cache = pool().join("cache");
        let template =
            fs::read_dir(cache.join("templates")).unwrap().next().unwrap().unwrap().path();
        let parts = Parts::find(&cache, template.join("rootfs")).unwrap();
        let directory = tempfile::Builder::new().prefix("bench-").tempdir_in(pool()).unwrap();
        let shape = Shape { cpus: 1, memory_mib: 512 };
        let program = build::floor_guest(root).unwrap();
        let bake =
            Bake::make(directory.path().join("bake"), "tcg", shape, &parts, &program).unwrap();
        for _ in 0..2 {
            let mut guest = bake.prepare().unwrap().restore().unwrap();
            guest.ping().unwrap();
            guest.run("true").unwrap();
            assert!(guest.run("false").is_err());
            let bytes = vec![7; 1 << 20];
            guest.sink(&bytes).unwrap();
            guest.source(bytes.len()).unwrap();
            guest.put("/srv/file", &bytes).unwrap();
            guest.run(&format!("test $(stat -c %s /srv/file) = {}", bytes.len())).unwrap();
            guest.write("/srv/file", 1000).unwrap();
            guest.read("/srv/file").unwrap();
            guest.quit().unwrap();
        }

        let mut guest = bake.prepare().unwrap().restore().unwrap();
        guest.run("mount -t tmpfs none /mnt && head -c 20M /dev/urandom > /mnt/file && cp /mnt/file /srv/file").unwrap();
        let save = guest.save(&bake, directory.path().join("saved")).unwrap();
        guest.run("rm /mnt/file /srv/file").unwrap();
        guest.quit().unwrap();
        for _ in 0..2 {
            let mut guest = save.bake.prepare().unwrap().restore().unwrap();
            guest.run("cmp /mnt/file /srv/file").unwrap();
            guest.quit().unwrap();
        }
    }
}
