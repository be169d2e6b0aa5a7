//! Bakes: a template booted once in a given size, brought to rest, and saved. Every create restores one.

use std::{fs::File, sync::Arc, time::Duration};

use machine::{
    Accelerator, Boot, Hypervisor, Machine, MachineSpec, Place, PowerOn, RootDisk, Shape,
    VolumeDisk,
    guest::{Guest, Request},
};
use store::{
    Digest, Layout,
    bake::{Bake, BakeDraft, Manifest},
    initramfs::Initramfs,
    kernel::Kernel,
    template::Template,
};

use super::{Running, saved::SavedMachine, site::Sites};
use crate::{Error, blocking::blocking, shared_work::SharedWork};

/// A create waits so long for its size to be baked: the clients give up after 30 s.
pub(crate) const BAKE_PATIENCE: Duration = Duration::from_secs(20);
/// Longer than any bake.
const LOCK_DEADLINE: Duration = Duration::from_secs(900);
/// The imports of a big template take long under emulation.
const WARM_UP_DEADLINE: Duration = Duration::from_secs(180);
/// All bakes together may take so much of the host's disk before old ones go.
const KEPT_BYTES: u64 = 20 << 30;
/// Of what a failed one printed, for the log.
const WARM_UP_OUTPUT: usize = 4096;
/// A guest at rest has written to some hundreds of MiB of its memory.
const BAKE_ROOM: u64 = 128 << 20;
const REST_DEADLINE: Duration = Duration::from_secs(30);
/// What a clone takes of free memory then lies together: of 100 MB taken, a snapshot stores nearly 1 MB less of the guest
/// kernel's own account of it, in half as many pieces.
const COMPACT: &str = "echo 1 > /proc/sys/vm/compact_memory";

/// What a size is made of.
#[derive(Debug, Clone)]
pub(crate) struct Size {
    pub(crate) shape: Shape,
    /// MiB; of the bake, so at most the template's default.
    pub(crate) disk_mib: u64,
}

impl Size {
    /// Of a sandbox of this template whose create names none.
    pub(crate) fn default_of(template: &Template) -> Self {
        let memory_mib = u32::try_from(template.memory_mb).unwrap_or(u32::MAX);
        Self { shape: Shape { cpus: template.cpu, memory_mib }, disk_mib: template.disk_mb }
    }
}

/// What a machine boots with that has a disk of its own already.
pub(crate) struct Switch {
    pub(crate) spec: MachineSpec,
    pub(crate) memory: File,
    pub(crate) root_disk: RootDisk,
    pub(crate) volumes: Vec<(u8, VolumeDisk)>,
    pub(crate) place: Place,
}

pub(crate) struct Bakes {
    layout: Layout,
    hypervisor: Hypervisor,
    accelerator: Accelerator,
    kernel: Kernel,
    initramfs: Initramfs,
    sites: Sites,
    work: SharedWork<Arc<SavedMachine>>,
}

impl Bakes {
    pub(crate) fn new(
        hypervisor: Hypervisor,
        accelerator: Accelerator,
        kernel: Kernel,
        initramfs: Initramfs,
        sites: Sites,
    ) -> Arc<Self> {
        Arc::new(Self {
            layout: sites.layout.clone(),
            hypervisor,
            accelerator,
            kernel,
            initramfs,
            sites,
            work: SharedWork::default(),
        })
    }

    pub(crate) fn accelerator(&self) -> Accelerator {
        self.accelerator
    }

    pub(crate) fn spec(&self, shape: Shape) -> MachineSpec {
        MachineSpec { shape, accelerator: self.accelerator }
    }

    /// Puts what this template's guests are made of under names that do not change.
    pub(crate) async fn name_guest(&self, template: &Template) -> Result<(), Error> {
        let (layout, template) = (self.layout.clone(), template.clone());
        let (kernel, initramfs) = (self.kernel.clone(), self.initramfs.clone());
        blocking(move || store::current_guest::name(&layout, &kernel, &initramfs, &template))
            .await?;
        Ok(())
    }

    /// Everything that decides whether a saved state fits: a bare device state is hardly checked by QEMU itself.
    fn description(&self, template: &Template, size: &Size) -> String {
        format!(
            "template {}\nkernel {}\ninitramfs {}\ndisk {} MiB\nbefore rest {COMPACT}\n{}",
            template.digest,
            self.kernel.digest,
            self.initramfs.digest,
            size.disk_mib,
            self.spec(size.shape).description()
        )
    }

    /// A machine with the kernel of all guests, which boots once it is resumed.
    pub(crate) async fn power_on(&self, switch: Switch) -> machine::Result<Machine> {
        let Switch { spec, memory, root_disk, volumes, place } = switch;
        let (kernel, initramfs) = (self.kernel.vmlinuz.clone(), self.initramfs.path.clone());
        let boot = PowerOn { kernel, initramfs, memory, root_disk, volumes, place };
        self.hypervisor.power_on(&spec, boot).await
    }

    /// The bake of this size, made now if need be; others who want the same wait for the same.
    ///
    /// # Errors
    /// 503 when it takes longer than `patience`: it goes on, and the same request may be sent again.
    pub(crate) async fn get(
        self: &Arc<Self>,
        template: &Template,
        size: &Size,
        patience: Duration,
    ) -> Result<Arc<SavedMachine>, Error> {
        let key = Digest::of(self.description(template, size).as_bytes());
        let baked = self.find_or_begin(&key, template, size, patience).await?;
        if baked.is_there() {
            return Ok(baked);
        }
        // Another server of this cache made room.
        self.work.forget(key.as_str());
        self.find_or_begin(&key, template, size, patience).await
    }

    async fn find_or_begin(
        self: &Arc<Self>,
        key: &Digest,
        template: &Template,
        size: &Size,
        patience: Duration,
    ) -> Result<Arc<SavedMachine>, Error> {
        let busy =
            "this size of the template is being prepared for the first time; try again shortly";
        let (bakes, template, size, name) =
            (Arc::clone(self), template.clone(), size.clone(), key.clone());
        let work = || async move { bakes.find_or_make(&name, &template, &size).await };
        self.work.get(key.as_str(), patience, busy, work).await
    }

    async fn find_or_make(
        &self,
        key: &Digest,
        template: &Template,
        size: &Size,
    ) -> Result<Arc<SavedMachine>, Error> {
        let (layout, name) = (self.layout.clone(), key.clone());
        // Held to the end, so that another server of this cache waits for this bake instead of making its own.
        let (_lock, stored) = blocking(move || {
            let waiting =
                &mut || tracing::info!(key = name.short(), "another server bakes the same");
            let lock = store::bake::lock(&layout, &name, LOCK_DEADLINE, waiting)?;
            Ok((lock, store::bake::get(&layout, &name)?))
        })
        .await?;
        let bake = match stored {
            Some(bake) => bake,
            None => self.bake(key, template, size).await?,
        };
        Ok(Arc::new(SavedMachine::of_bake(key.to_string(), self.spec(size.shape), &bake)?))
    }

    async fn bake(&self, key: &Digest, template: &Template, size: &Size) -> Result<Bake, Error> {
        tracing::info!(
            key = key.short(),
            cpus = size.shape.cpus,
            memory_mib = size.shape.memory_mib,
            "baking"
        );
        let began = tokio::time::Instant::now();
        let (layout, name, source, size_asked) =
            (self.layout.clone(), key.clone(), template.clone(), size.clone());
        let draft = blocking(move || {
            let draft = BakeDraft::create(&layout, &name)?;
            store::clone::clone_file(&source.rootfs, &draft.files().rootfs())?;
            if size_asked.disk_mib < source.disk_mb {
                store::ext4::shrink(&draft.files().rootfs(), size_asked.disk_mib)?;
            }
            Ok(draft)
        })
        .await?;
        self.check_room()?;
        let site = self.sites.prepare().await?;
        let made = match site.place() {
            Ok(place) => self.make(&draft, place, template, size).await,
            Err(error) => Err(error),
        };
        site.remove().await;
        made.map_err(|error| match self.check_room() {
            Ok(()) => error,
            // A machine that finds no room for its memory simply ends.
            Err(full) => full.because(format!("No space left on device: {}", error.causes())),
        })?;
        let manifest = Manifest {
            description: self.description(template, size),
            template: template.digest.clone(),
            disk_bytes: size.disk_mib << 20,
        };
        let layout = self.layout.clone();
        let files = blocking(move || draft.publish(&layout, manifest)).await?;
        tracing::info!(key = key.short(), seconds = began.elapsed().as_secs(), "baked");
        self.make_room().await;
        Ok(files)
    }

    /// # Errors
    /// 507 when there is hardly any left for a bake.
    fn check_room(&self) -> Result<(), Error> {
        let room = store::pool::room(self.layout.cache()).map_err(Error::internal)?;
        if room.free_bytes < BAKE_ROOM {
            return Err(Error::disk_full().because(format!(
                "No space left on device: {} bytes for a bake",
                room.free_bytes
            )));
        }
        Ok(())
    }

    /// Bakes of sizes and agents that nobody asks for any longer go, the longest unused first.
    async fn make_room(&self) {
        let in_use: Vec<_> = self.work.keys().iter().filter_map(|key| key.parse().ok()).collect();
        let layout = self.layout.clone();
        let removing =
            move || store::bake::remove_least_recently_used(&layout, KEPT_BYTES, &in_use);
        match blocking(removing).await {
            Ok(removed) if removed.is_empty() => {}
            Ok(removed) => {
                tracing::info!(count = removed.len(), "removed bakes that were long unused")
            }
            Err(error) => tracing::warn!(cause = error.causes(), "failed to remove old bakes"),
        }
    }

    async fn make(
        &self,
        draft: &BakeDraft,
        place: Place,
        template: &Template,
        size: &Size,
    ) -> Result<(), Error> {
        let mut options = File::options();
        options.read(true).write(true);
        let memory = options
            .clone()
            .create_new(true)
            .open(draft.files().memory())
            .map_err(Error::internal)?;
        memory.set_len(size.shape.memory_bytes()).map_err(Error::internal)?;
        let root_disk = options.open(draft.files().rootfs()).map_err(Error::internal)?;
        let (kernel, initramfs) = (self.kernel.vmlinuz.clone(), self.initramfs.path.clone());
        let boot = Boot { kernel, initramfs, memory, root_disk, place };
        let machine =
            self.hypervisor.boot(&self.spec(size.shape), boot).await.map_err(Error::internal)?;
        let rested = self.bring_to_rest(&machine, draft, template).await;
        machine.kill().await.map_err(Error::internal)?;
        rested
    }

    async fn bring_to_rest(
        &self,
        machine: &Machine,
        draft: &BakeDraft,
        template: &Template,
    ) -> Result<(), Error> {
        let guest =
            machine.guest().ok_or_else(|| Error::internal("a booted machine without a guest"))?;
        for script in &template.warm_up {
            warm_up(&guest, script).await?;
        }
        if super::kernels::prepare(&guest).await? {
            tracing::info!("the bake has a kernel that stands ready");
        }
        warm_up(&guest, COMPACT).await?;
        guest.forget_now().await.map_err(Error::internal)?;
        guest.call(Request::Quiesce, REST_DEADLINE).await.map_err(Error::internal)?;
        machine.stop().await.map_err(Error::internal)?;
        machine.save_state(&draft.files().state()).await.map_err(Error::internal)
    }
}

/// What a command touches before the save lies in every clone's page cache afterwards.
pub(super) async fn warm_up(guest: &Guest, script: &str) -> Result<(), Error> {
    let inside = Running {
        guest: guest.clone(),
        environment: Arc::default(),
        logs: Arc::default(),
        execs: None,
        in_use: None,
    };
    match inside.run_to_end(script, WARM_UP_DEADLINE, WARM_UP_OUTPUT).await? {
        (Some(0), _) => Ok(()),
        (exit_code, said) => Err(Error::internal(format!(
            "the warm-up `{script}` ended with {exit_code:?}: {}",
            said.trim()
        ))),
    }
}
