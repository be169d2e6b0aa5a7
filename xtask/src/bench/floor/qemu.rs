//! The floor's QEMU: the machine that `machine::qemu_args` describes, told by hand, without jail and network.

use std::{
    fs::File,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context, ensure};

use crate::wait;

const WRITABLE_SLOTS: usize = 8;
const READ_ONLY_SLOTS: usize = 8;

/// Virtual CPUs and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) cpus: u64,
    pub(crate) memory_mib: u64,
}

pub(super) enum Start<'a> {
    /// From the kernel, memory shared with its file.
    Cold { kernel: &'a Path, initramfs: &'a Path },
    /// Waits for a device state, memory mapped privately and read-only.
    Incoming,
}

pub(super) struct Qemu {
    child: Child,
    directory: PathBuf,
}

impl Qemu {
    pub(super) fn start(
        directory: &Path,
        accelerator: &str,
        shape: Shape,
        memory: &Path,
        disk_bytes: u64,
        start: &Start<'_>,
    ) -> anyhow::Result<Self> {
        let log = File::create(directory.join("qemu.log"))?;
        let child = Command::new("qemu-system-x86_64")
            .args(arguments(directory, accelerator, shape, memory, disk_bytes, start))
            // An interrupt is for the bench, which ends it in order.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .context("start qemu-system-x86_64")?;
        Ok(Self { child, directory: directory.to_owned() })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(super) fn last_words(&self) -> String {
        let read = |name| std::fs::read(self.directory.join(name)).unwrap_or_default();
        let text = [read("qemu.log"), read("console")].concat();
        String::from_utf8_lossy(&text[text.len().saturating_sub(2000)..]).into_owned()
    }

    /// After it was told to quit.
    pub(super) fn wait(&mut self) -> anyhow::Result<()> {
        let status = wait::until(
            "the end of QEMU",
            Duration::from_secs(10),
            Duration::from_micros(200),
            || Ok(self.child.try_wait()?),
        )?;
        ensure!(status.success(), "end qemu: {status}: {}", self.last_words());
        Ok(())
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn arguments(
    directory: &Path,
    accelerator: &str,
    shape: Shape,
    memory: &Path,
    disk_bytes: u64,
    start: &Start<'_>,
) -> Vec<String> {
    let machine = "pc-q35-8.2,memory-backend=ram,suppress-vmdesc=on,dump-guest-core=off,hpet=off,sata=off,smbus=off,i8042=off,vmport=off";
    let (engine, cpu, kernel_options) = match accelerator {
        // The processor of the experiment that the technique comes from. Ours has two flags less, which is a part of what is
        // measured.
        "tcg" => (
            "tcg,thread=multi,tb-size=64",
            "max",
            "no_timer_check tsc=reliable nowatchdog mitigations=off",
        ),
        other => (other, "host", ""),
    };
    let sharing = match start {
        Start::Cold { .. } => "share=on",
        Start::Incoming => "share=off,readonly=on,rom=off",
    };
    let Shape { cpus, memory_mib } = shape;
    let mut list = Vec::new();
    let mut add = |words: &[&str]| list.extend(words.iter().map(|&word| word.to_owned()));
    add(&["-machine", machine, "-accel", engine, "-cpu", cpu]);
    add(&["-smp", &format!("cpus={cpus},maxcpus={cpus}"), "-m", &format!("size={memory_mib}M")]);
    add(&["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-S"]);
    let console = directory.join("console");
    add(&["-chardev", &format!("ringbuf,id=console,size=65536,logfile={}", console.display())]);
    add(&["-serial", "chardev:console"]);
    let file = memory.display();
    add(&[
        "-object",
        &format!("memory-backend-file,id=ram,size={memory_mib}M,mem-path={file},{sharing}"),
    ]);
    add(&["-global", "migration.send-configuration=off", "-device", "vmgenid,guid=auto"]);
    add(&["-qmp", &format!("unix:{},server=on,wait=off", directory.join("qmp").display())]);
    let channel = directory.join("channel");
    add(&["-chardev", &format!("socket,id=channel,path={},server=on,wait=off", channel.display())]);
    add(&["-device", "virtio-serial-pci,id=serial,max_ports=2"]);
    add(&["-device", "virtserialport,bus=serial.0,nr=1,chardev=channel,name=floor.0"]);
    // A card without a cable: it costs the guest the same, and no namespace is needed.
    add(&[
        "-netdev",
        "hubport,id=net0,hubid=0",
        "-device",
        "virtio-net-pci,id=net,netdev=net0,romfile=",
    ]);
    add(&["-device", "virtio-rng-pci,id=rng"]);
    add_disk(&mut add, "root", disk_bytes, "off");
    for slot in 0..WRITABLE_SLOTS {
        add_disk(&mut add, &format!("writable{slot}"), 0, "off");
    }
    for slot in 0..READ_ONLY_SLOTS {
        add_disk(&mut add, &format!("readonly{slot}"), 0, "on");
    }
    match start {
        Start::Cold { kernel, initramfs } => {
            add(&[
                "-kernel",
                &kernel.display().to_string(),
                "-initrd",
                &initramfs.display().to_string(),
            ]);
            let line =
                format!("console=ttyS0 reboot=t panic=-1 8250.nr_uarts=1 quiet {kernel_options}");
            add(&["-append", line.trim_end()]);
        }
        Start::Incoming => add(&["-incoming", "defer"]),
    }
    list
}

/// Empty until a file is put behind it.
fn add_disk(add: &mut impl FnMut(&[&str]), name: &str, bytes: u64, read_only: &str) {
    add(&[
        "-blockdev",
        &format!(
            "null-co,node-name=empty-{name},size={bytes},read-zeroes=on,read-only={read_only}"
        ),
    ]);
    add(&["-device", &format!("virtio-blk-pci,id={name},drive=empty-{name},num-queues=1")]);
}
