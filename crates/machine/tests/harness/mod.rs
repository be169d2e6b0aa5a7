//! A machine baked once for all tests of a file, and clones of it. Needs root, QEMU, and what
//! `make setup` makes.
#![allow(
    clippy::unwrap_used,
    clippy::allow_attributes,
    dead_code,
    reason = "shared by several tests"
)]

use std::fs::File;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use machine::guest::{
    Channel, Command, Event, ExecStart, ExecStatus, Guest, Network, Repair, Reply, Request,
};
use machine::hypervisor::{Boot, Hypervisor, Load, Place, Prepared};
use machine::spec::{Accelerator, MachineSpec, Shape};
use machine::{Durability, Machine, Result, RootDisk, Save, Saved, VolumeDisk, WriteBack};
use tokio::sync::OnceCell;

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);
pub(crate) const SPEC: MachineSpec = spec(1, 512);

pub(crate) const fn spec(cpus: u32, memory_mib: u32) -> MachineSpec {
    MachineSpec { shape: Shape { cpus, memory_mib }, accelerator: Accelerator::Tcg }
}

fn pool() -> PathBuf {
    std::env::var_os("ATOLL_POOL").map_or_else(|| "/var/lib/atoll".into(), PathBuf::from)
}

/// Of what `make setup` made; `ATOLL_TEST_GUEST` names another directory with such files.
pub(crate) fn guest_file(name: &str) -> PathBuf {
    let directory = std::env::var_os("ATOLL_TEST_GUEST")
        .map_or_else(|| pool().join("cache/guest"), PathBuf::from);
    let path = directory.join(name);
    assert!(path.is_file(), "there is no {}; `make setup` makes it", path.display());
    path
}

/// A directory of its own in the pool, where disks are cloned without copying; emptied first. `cargo xtask test`
/// removes them in the end.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let directory = pool().join("test-machine").join(name);
    let _ = std::fs::remove_dir_all(&directory);
    std::fs::create_dir_all(&directory).unwrap();
    directory
}

pub(crate) fn clone_file(source: &Path, target: &Path) {
    let copied = std::process::Command::new("cp")
        .args(["--reflink=auto", "--sparse=always"])
        .args([source, target])
        .status();
    assert!(copied.unwrap().success());
}

pub(crate) fn read_write(path: &Path) -> File {
    File::options().read(true).write(true).open(path).unwrap()
}

pub(crate) fn place(directory: PathBuf) -> Place {
    static NEXT_UID: AtomicU32 = AtomicU32::new(1_899_000_000);
    // Tests of several files run one after the other, but servers may run beside them.
    Place { directory, uid: NEXT_UID.fetch_add(1, Ordering::Relaxed), tap: None }
}

/// A machine that is ended when the test is over, however it ends.
pub(crate) struct Running(Option<Machine>);

impl Running {
    pub(crate) fn into_inner(mut self) -> Machine {
        self.0.take().unwrap()
    }
}

impl From<Machine> for Running {
    fn from(machine: Machine) -> Self {
        Self(Some(machine))
    }
}

impl Deref for Running {
    type Target = Machine;
    fn deref(&self) -> &Machine {
        self.0.as_ref().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(machine) = &self.0 {
            use std::os::unix::fs::MetadataExt;
            let process = std::fs::metadata(format!("/proc/{}", machine.pid()));
            let pid = nix::unistd::Pid::from_raw(machine.pid().cast_signed());
            let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            // The runtime that would see to it ends with the test.
            if let Ok(uid) = process.map(|process| process.uid()) {
                let _ = ::machine::remove_groups(&(uid..=uid), |_| false);
            }
        }
    }
}

pub(crate) struct Bake {
    pub(crate) spec: MachineSpec,
    pub(crate) directory: PathBuf,
    pub(crate) hypervisor: Hypervisor,
}

impl Bake {
    /// Boots, saves and ends a machine.
    pub(crate) async fn make(spec: MachineSpec, directory: PathBuf) -> Self {
        let hypervisor = Hypervisor::find().unwrap();
        let bake = Self { spec, directory, hypervisor };
        let memory =
            File::options().create_new(true).read(true).write(true).open(bake.memory()).unwrap();
        memory.set_len(spec.shape.memory_bytes()).unwrap();
        clone_file(&guest_file("rootfs.ext4"), &bake.root_disk());
        std::fs::create_dir(bake.directory.join("place")).unwrap();
        let boot = Boot {
            kernel: guest_file("vmlinuz"),
            initramfs: guest_file("initramfs"),
            memory,
            root_disk: read_write(&bake.root_disk()),
            place: place(bake.directory.join("place")),
        };
        let machine = Running::from(bake.hypervisor.boot(&spec, boot).await.unwrap());
        let guest = machine.guest().unwrap();
        assert_eq!(guest.call(Request::Quiesce, DEADLINE).await.unwrap(), Reply::Done);
        machine.stop().await.unwrap();
        machine.save_state(&bake.state()).await.unwrap();
        machine.into_inner().kill().await.unwrap();
        bake
    }

    /// One for all tests of a file.
    pub(crate) async fn shared() -> &'static Self {
        static BAKE: OnceCell<Bake> = OnceCell::const_new();
        BAKE.get_or_init(|| async { Self::make(SPEC, scratch(env!("CARGO_CRATE_NAME"))).await })
            .await
    }

    pub(crate) fn memory(&self) -> PathBuf {
        self.directory.join("memory")
    }

    pub(crate) fn state(&self) -> PathBuf {
        self.directory.join("state")
    }

    pub(crate) fn root_disk(&self) -> PathBuf {
        self.directory.join("rootfs")
    }

    pub(crate) fn disk_bytes(&self) -> u64 {
        std::fs::metadata(self.root_disk()).unwrap().len()
    }

    /// A directory for one clone, with its disk.
    pub(crate) fn clone_disk(&self, name: &str) -> PathBuf {
        let directory = self.directory.join(name);
        std::fs::create_dir(&directory).unwrap();
        clone_file(&self.root_disk(), &directory.join("rootfs"));
        directory
    }

    pub(crate) async fn prepare(&self, place: Place) -> Prepared {
        self.hypervisor
            .prepare(&self.spec, File::open(self.memory()).unwrap(), place)
            .await
            .unwrap()
    }

    pub(crate) async fn load(&self, prepared: Prepared, root_disk: &Path) -> Result<Machine> {
        prepared.load(self.loading(read_write(root_disk), self.disk_bytes())).await
    }

    /// `bytes`: the length that the disk is said to have.
    pub(crate) fn loading(&self, root_disk: File, bytes: u64) -> Load {
        let durability = Durability::Throwaway;
        let root_disk =
            RootDisk { file: root_disk, bytes, base_bytes: self.disk_bytes(), durability };
        Load { state: File::open(self.state()).unwrap(), root_disk, volumes: Vec::new() }
    }

    /// A clone that runs, and its agent.
    pub(crate) async fn start(&self, name: &str) -> (Running, Guest) {
        self.start_with(name, Vec::new()).await
    }

    pub(crate) async fn start_with(
        &self,
        name: &str,
        volumes: Vec<(u8, VolumeDisk)>,
    ) -> (Running, Guest) {
        let directory = self.clone_disk(name);
        let prepared = self.prepare(place(directory.clone())).await;
        let load = self.loading(read_write(&directory.join("rootfs")), self.disk_bytes());
        let machine = Running::from(prepared.load(Load { volumes, ..load }).await.unwrap());
        machine.resume().await.unwrap();
        let guest = machine.connect_guest(DEADLINE).await.unwrap();
        assert_eq!(guest.call(Request::Repair(repair()), DEADLINE).await.unwrap(), Reply::Done);
        (machine, guest)
    }

    /// Saves a machine of this bake, which stands still then.
    pub(crate) async fn save(&self, machine: &Machine, directory: PathBuf) -> (Self, Saved) {
        std::fs::create_dir(&directory).unwrap();
        let snapshot = Self { spec: self.spec, directory, hypervisor: self.hypervisor.clone() };
        clone_file(&self.memory(), &snapshot.memory());
        let (source, target) = (root_disk_of(machine), snapshot.root_disk());
        machine.flush_disks().await.unwrap();
        let save = Save {
            state: File::create(snapshot.state()).unwrap(),
            memory: machine
                .copy_ahead(read_write(&snapshot.memory()), WriteBack::Now)
                .await
                .unwrap(),
            while_stopped: move || reflink(&source, &target),
        };
        let saved = machine.save(save).await.unwrap();
        (snapshot, saved)
    }
}

/// Where [`Bake::start`] has put it.
pub(crate) fn root_disk_of(machine: &Machine) -> PathBuf {
    let descriptors = std::fs::read_dir(format!("/proc/{}/fd", machine.pid())).unwrap();
    let files = descriptors.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
    files.into_iter().find(|path| path.ends_with("rootfs")).unwrap()
}

pub(crate) fn reflink(source: &Path, target: &Path) -> std::io::Result<()> {
    Ok(rustix::fs::ioctl_ficlone(File::create_new(target)?, File::open(source)?)?)
}

/// Freezes the guest, saves it, and lets it go on.
pub(crate) async fn snapshot(
    bake: &Bake,
    machine: &Machine,
    guest: &Guest,
    directory: PathBuf,
) -> (Bake, Saved) {
    assert_eq!(guest.call(Request::Quiesce, DEADLINE).await.unwrap(), Reply::Done);
    let saved = bake.save(machine, directory).await;
    machine.resume().await.unwrap();
    let thaw = Request::Thaw { unix_time_ns: repair().unix_time_ns };
    assert_eq!(guest.call(thaw, DEADLINE).await.unwrap(), Reply::Done);
    saved
}

/// A volume with an ext4 in it.
pub(crate) fn make_volume(path: &Path, mebibytes: u64) {
    File::create_new(path).unwrap().set_len(mebibytes << 20).unwrap();
    let made = std::process::Command::new("mke2fs").args(["-q", "-t", "ext4"]).arg(path).status();
    assert!(made.unwrap().success());
}

pub(crate) fn volume(path: &Path, read_only: bool) -> VolumeDisk {
    let file = File::options().read(true).write(!read_only).open(path).unwrap();
    VolumeDisk { bytes: file.metadata().unwrap().len(), file, read_only }
}

/// That the file system in it needs no repair, nor a replay of its journal.
#[track_caller]
pub(crate) fn assert_clean(disk: &Path) {
    let output = std::process::Command::new("e2fsck").arg("-fn").arg(disk).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && !text.contains("recover"), "{text}");
}

pub(crate) fn repair() -> Repair {
    Repair {
        entropy: [7; 32],
        unix_time_ns: 1_800_000_000_000_000_000,
        host_name: "clone".into(),
        machine_id: "0123456789abcdef0123456789abcdef".into(),
        network: Network { address: [10, 200, 0, 2], prefix: 30, gateway: [10, 200, 0, 1] },
        grow_root: false,
        volumes: Vec::new(),
    }
}

/// Runs a script and waits for its end.
pub(crate) async fn run(guest: &Guest, id: &str, script: &str) -> (String, ExecStatus) {
    let start = ExecStart {
        id: id.into(),
        command: Command::Script(script.as_bytes().to_vec().into()),
        working_directory: None,
        environment: Vec::new(),
        user: None,
        has_stdin: false,
        timeout_ms: 60_000,
        output_limit: 1 << 20,
    };
    let stream = guest.open(Request::ExecStart(start)).unwrap();
    let mut output = Vec::new();
    loop {
        let next = tokio::time::timeout(DEADLINE, stream.next()).await.expect("the exec goes on");
        match next.expect("an exec ends with its status").unwrap() {
            Event::Data(Channel::Stdout | Channel::Stderr, bytes) => {
                output.extend_from_slice(&bytes)
            }
            Event::Reply(Reply::ExecEnded(status)) => {
                return (String::from_utf8(output).unwrap(), status);
            }
            Event::Reply(_) | Event::Data(Channel::Content, _) | Event::Finished => {}
        }
    }
}
