//! What a sandbox uses of its host.

use api::{AccountId, CpuMetrics, DiskMetrics, MemoryMetrics, Metrics, NetworkMetrics, SandboxId};

use super::{Sandboxes, state::Wish};
use crate::{Error, blocking::blocking, clock};

impl Sandboxes {
    /// Zero, where there is no machine: nothing is woken to be measured.
    ///
    /// # Errors
    /// 404 when it is not theirs or gone.
    pub async fn figures(&self, account: &AccountId, id: &SandboxId) -> Result<Metrics, Error> {
        let entry = self.registry.find(account, id)?;
        entry.accept(Wish::Change, self.clock.steady_ms())?;
        let (count, memory_mb, disk_mb) = entry.look(|row| (row.cpu, row.memory_mb, row.disk_mb));
        let traffic = self.network(account, id)?;
        let (files, layout, root) =
            (self.files(&entry), self.sites.layout.clone(), entry.root_volume());
        let used_bytes = blocking(move || {
            let root = root.map(|id| store::volume::used_bytes(&layout, &id)).transpose()?;
            Ok(files.used_bytes()? + root.unwrap_or(0))
        });
        let used_bytes = used_bytes.await?;
        let mut metrics = Metrics {
            sandbox_id: *id,
            at: clock::from_ms(self.clock.now_ms()),
            cpu: CpuMetrics { count, seconds: 0.0 },
            memory: MemoryMetrics { total_bytes: memory_mb << 20, private_bytes: 0 },
            disk: DiskMetrics { total_bytes: disk_mb << 20, used_bytes, ..DiskMetrics::default() },
            network: NetworkMetrics {
                received_bytes: traffic.received_bytes,
                sent_bytes: traffic.sent_bytes,
            },
        };
        if let Some(inside) = entry.inside() {
            let used = inside.machine.statistics().await?;
            metrics.cpu.seconds = used.vcpu_time.as_secs_f64();
            metrics.memory.private_bytes = inside.machine.private_memory_bytes()?;
            metrics.disk.read_bytes = used.root_disk.read_bytes;
            metrics.disk.written_bytes = used.root_disk.written_bytes;
            metrics.disk.reads = used.root_disk.reads;
            metrics.disk.writes = used.root_disk.writes;
        }
        Ok(metrics)
    }
}
